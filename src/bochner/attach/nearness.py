"""How near a row's features are to those of rows that were seen."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from bochner.members.features import FEATURE_CHUNK_ROWS, KernelFeatures, squared_distances
from bochner.priors.spectra import RBF, Matern, Spectrum

KERNELS: dict[str, Spectrum] = {"matern32": Matern(1.5), "rbf": RBF()}  # those that are tried
PRECISION = 16.0  # what a row tells: the prior variance over that of its noise; what is left hardly depends on it
LENGTH_WEIGHT = 0.1  # median distances that a standard deviation of log lengths counts for; more drowns directions
USUAL_LENGTHS = 6.0  # standard deviations of log lengths beyond which each further one is a whole median distance
PAIRS = 1000  # rows on either side of the pairs whose median distance is taken


@dataclass
class Space:
    """What distances between features are measured in.

    Attributes:
        directions: Whether it is directions that count, with the logarithm of the length beside them.
        centre: Mean of the log length, or of the features.
        scale: Standard deviation of the log length, or of the features.
        unit: Median distance of rows, or of their directions.
    """

    directions: bool
    centre: Tensor
    scale: Tensor
    unit: float

    @classmethod
    def of(cls, features: Tensor, *, directions: bool) -> "Space":
        """From a sample of features."""
        features = features.double()
        if directions:
            lengths = features.norm(dim=1)
            smallest = lengths.mean() * 1e-6
            logs = (lengths + smallest).log()
            found = cls(True, torch.stack([logs.mean(), smallest]), logs.std().clamp(min=1e-6), 1.0)
        else:
            found = cls(False, features.mean(0), features.std(0).square().mean().sqrt(), 1.0)
        x = found(features[: 2 * PAIRS])
        x = x[:, :-1] if directions else x  # the length is weighed by the distances of directions
        half = len(x) // 2
        distances = squared_distances(x[:half], x[half:]).sqrt()
        apart = distances[distances > 1e-7]
        if len(apart) == 0 or not bool(torch.isfinite(apart).all()):
            raise ValueError(
                "The features before the last layer are the same for all rows of the loader, or of the same direction: nothing can "
                "be told from them. Is the network trained, and is head= the right layer?"
            )
        found.unit = float(apart.median())
        return found

    def __call__(self, features: Tensor) -> Tensor:
        """Features, (n, d), as points of this space."""
        features = features.double()
        if not self.directions:
            return (features - self.centre) / self.scale
        lengths = features.norm(dim=1, keepdim=True) + self.centre[1]
        logs = (lengths.log() - self.centre[0]) / self.scale
        unusual = logs - logs.clamp(-USUAL_LENGTHS, USUAL_LENGTHS)
        return torch.cat([features / lengths, self.unit * (LENGTH_WEIGHT * logs + unusual)], 1)


@dataclass
class Nearness:
    """The share of the prior variance that training rows leave, under one kernel.

    Attributes:
        space: What distances are measured in.
        kernel: The kernel's name.
        scale: Its lengthscale, in median distances.
        phi: The prior as features, at anchors.
        factor: Cholesky factor of I + P ΦᵀΦ over the training rows, for a precision P of every row.
    """

    space: Space
    kernel: str
    scale: float
    phi: KernelFeatures
    factor: Tensor = field(repr=False)

    @classmethod
    def at(cls, space: Space, kernel: str, scale: float, anchors: Tensor, rows: Tensor) -> "Nearness":
        """From the features of anchors and of rows to learn from."""
        points = space(anchors)
        phi = KernelFeatures.at(KERNELS[kernel], torch.full_like(points[0], scale * space.unit), points)
        empty = cls(space, kernel, scale, phi, torch.eye(len(points), dtype=torch.float64, device=points.device))
        return empty.with_rows(empty.gram(rows))

    def gram(self, features: Tensor) -> Tensor:
        """ΦᵀΦ of some rows."""
        total = torch.zeros_like(self.phi.factor)
        for part in features.split(FEATURE_CHUNK_ROWS):
            own = self.phi(self.space(part))
            total.addmm_(own.mT, own)
        return total

    def with_rows(self, gram: Tensor) -> "Nearness":
        """The same prior after rows with this ΦᵀΦ."""
        precision = PRECISION * gram
        precision.diagonal().add_(1.0)
        # Laid out as a file lays it out: then a head that is read back gives the same bits.
        factor = torch.linalg.cholesky(precision).contiguous()
        return Nearness(self.space, self.kernel, self.scale, self.phi, factor)

    def left(self, features: Tensor, *, seen: bool = False) -> Tensor:
        """Variance left at rows, (n,); for rows that are among those learnt from, as if each alone were not."""
        found = []
        for part in features.split(FEATURE_CHUNK_ROWS):
            phi = self.phi(self.space(part))
            own = torch.linalg.solve_triangular(self.factor, phi.mT, upper=False).square().sum(0)
            if seen:  # φ'(A − Pφφ')⁻¹φ
                own = own / (1 - PRECISION * own).clamp(min=1e-6)
            found.append(own + (1 - phi.square().sum(1)).clamp(min=0))
        return torch.cat(found).clamp(max=1.0)
