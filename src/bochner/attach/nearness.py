"""How near a row's features are to those of the training rows, as the share of the prior variance that these leave."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from bochner.members.features import FEATURE_CHUNK_ROWS, KernelFeatures, squared_distances
from bochner.priors.spectra import RBF, Matern, Spectrum

KERNELS: dict[str, Spectrum] = {"matern32": Matern(1.5), "rbf": RBF()}  # the kernels that are tried, by name
ROW_PRECISION = 16.0  # prior variance over the variance of a row's noise; the variance left hardly depends on it
# Median distances that one standard deviation of log lengths counts for; more would hide directions.
LENGTH_WEIGHT = 0.1
MAX_USUAL_LENGTH = 6.0  # standard deviations of log lengths above which each further one counts a whole median distance
SMALLEST_ANGLE = 1e-6  # distance of two directions below which they are the same
DISTANCE_PAIRS = 1000  # pairs of rows whose median distance is the unit


@dataclass
class Space:
    """The space in which distances between features are measured.

    Attributes:
        directions: Whether a point is the direction of the features and the logarithm of their length; else it is the features.
        centre: Median of the log length and the smallest length, (2,); or mean of the features, (d,).
        scale: Root mean squared deviation of log lengths above their median; or standard deviation of the features.
        unit: Median distance of two rows, or of their directions.
    """

    directions: bool
    centre: Tensor
    scale: Tensor
    unit: float

    @classmethod
    def of(cls, features: Tensor, *, directions: bool) -> "Space":
        """The space of a sample of features, (n, d). Single numbers have no direction, nor have features that all have the same."""
        features = features.double()
        lengths = features.norm(dim=1)
        if directions and _have_directions(features[: 2 * DISTANCE_PAIRS], lengths[: 2 * DISTANCE_PAIRS]):
            smallest = lengths.mean() * 1e-6
            logs = (lengths + smallest).log()
            centre = logs.median()
            # By long features alone: a few rows without any, whose logarithm is far below, would hide what is far too long.
            scale = (logs - centre).clamp(min=0).square().sum().div((logs > centre).sum().clamp(min=1)).sqrt()
            space = cls(True, torch.stack([centre, smallest]), scale.clamp(min=1e-6), 1.0)
        else:
            space = cls(False, features.mean(0), features.std(0).square().mean().sqrt().clamp(min=1e-150), 1.0)
        x = space(features[: 2 * DISTANCE_PAIRS])
        x = x[:, :-1] if space.directions else x  # the length is weighed by the distances of directions
        half = len(x) // 2
        distances = squared_distances(x[:half], x[half:]).sqrt()
        positive = distances[distances > 1e-7]
        if len(positive) == 0 or not bool(torch.isfinite(positive).all()):
            raise ValueError(
                "The features before the last layer are the same for all rows of the loader: nothing can be told from them. Is the "
                "network trained, and is head= the right layer?"
            )
        space.unit = float(positive.median())
        return space

    def __call__(self, features: Tensor) -> Tensor:
        """Features, (n, d), as points of this space."""
        features = features.double()
        if not self.directions:
            return (features - self.centre) / self.scale
        lengths = features.norm(dim=1, keepdim=True) + self.centre[1]
        logs = (lengths.log() - self.centre[0]) / self.scale
        unusual = (logs - MAX_USUAL_LENGTH).clamp(min=0)
        return torch.cat([features / lengths, self.unit * (LENGTH_WEIGHT * logs + unusual)], 1)


def _have_directions(features: Tensor, lengths: Tensor) -> bool:
    """Whether features, (n, d), are no single numbers, and differ in direction."""
    units = features[lengths > 0] / lengths[lengths > 0][:, None]
    return features.shape[1] > 1 and len(units) > 0 and float((units - units[0]).norm(dim=1).max()) > SMALLEST_ANGLE


@dataclass
class Nearness:
    """The posterior of a stationary prior on the features: it gives the variance left at any row.

    Attributes:
        space: The space in which distances are measured.
        kernel: The kernel's name.
        scale: Its lengthscale, in median distances.
        phi: The prior as features φ, for given anchors.
        factor: Cholesky factor of I + P ΦᵀΦ over the training rows, for a precision P of every row.
    """

    space: Space
    kernel: str
    scale: float
    phi: KernelFeatures
    factor: Tensor = field(repr=False)

    @classmethod
    def at(
        cls, space: Space, kernel: str, scale: float, anchors: Tensor, rows: Tensor, counts: Tensor | None = None
    ) -> "Nearness":
        """The posterior from the features of anchors and of training rows, each of which may count as several."""
        points = space(anchors)
        phi = KernelFeatures.at(KERNELS[kernel], torch.full_like(points[0], scale * space.unit), points)
        empty = cls(space, kernel, scale, phi, torch.eye(len(points), dtype=torch.float64, device=points.device))
        return empty.with_rows(empty.gram(rows, counts))

    def gram(self, features: Tensor, counts: Tensor | None = None) -> Tensor:
        """ΦᵀΦ of some rows, each of which may count as several."""
        total = torch.zeros_like(self.phi.factor)
        counts = torch.ones_like(features[:, 0]) if counts is None else counts
        for part, count in zip(features.split(FEATURE_CHUNK_ROWS), counts.split(FEATURE_CHUNK_ROWS), strict=True):
            phi = self.phi(self.space(part))
            total.addmm_(phi.mT, phi * count[:, None])
        return total

    def with_rows(self, gram: Tensor) -> "Nearness":
        """The same prior after rows with this ΦᵀΦ."""
        precision = ROW_PRECISION * gram
        precision.diagonal().add_(1.0)
        # Laid out as a file lays it out: then a head that is read back gives the same bits.
        factor = torch.linalg.cholesky(precision).contiguous()
        return Nearness(self.space, self.kernel, self.scale, self.phi, factor)

    def left(self, features: Tensor, *, seen: bool = False) -> Tensor:
        """Variance left at rows, (n,); with ``seen``, for training rows, each as if it alone were not among them."""
        parts = []
        for part in features.split(FEATURE_CHUNK_ROWS):
            phi = self.phi(self.space(part))
            posterior = torch.linalg.solve_triangular(self.factor, phi.mT, upper=False).square().sum(0)
            if seen:  # φ'(A − Pφφ')⁻¹φ
                posterior = posterior / (1 - ROW_PRECISION * posterior).clamp(min=1e-6)
            parts.append(posterior + (1 - phi.square().sum(1)).clamp(min=0))
        return torch.cat(parts).clamp(max=1.0)
