r"""Heads as one matrix product, for rows that come a few at a time.

A head solves with two triangular matrices for every row: the factor L of its features, and that of its posterior precision A. Both
are known when the head is fitted. With $I - A^{-1}/a^2 = R R^\top$ and the kernel $k = \kappa(Z, x)$ of a row with the anchors,

$$ f(x) = \alpha^\top k, \quad \alpha = L^{-\top} w, \qquad
   \operatorname{Var} f(x) / a^2 = 1 - \lVert P k \rVert^2, \quad P = R^\top L^{-1}. $$

The mean is computed in float64, because its terms cancel. P may be in float32, which halves what is read for a row once more.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from bochner.members.features import correlation
from bochner.members.heads import GaussianHead, SoftmaxHead

NEGLIGIBLE_SHARE = 1e-7  # directions that explain at most this share of the prior variance of any row are left out
LEAST_LEFT = 1e-12  # smallest share of the prior variance left at a row, which rounding might make negative


@dataclass
class CompactHead:
    """What a head predicts, from products that are computed once.

    Attributes:
        head: The head.
        dtype: Type of the product for the variance.
        weights: Weights α of the kernel, float64, (M, 1) or (M, c).
        explaining: The matrix P, (r, M).
    """

    head: GaussianHead | SoftmaxHead
    dtype: torch.dtype
    weights: Tensor = field(init=False, repr=False)
    explaining: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        head, factor = self.head, self.head.features.factor
        weights = head.mean if isinstance(head, GaussianHead) else head.weights
        self.weights = torch.linalg.solve_triangular(factor.mT, weights, upper=True)
        precisions, directions = torch.linalg.eigh(head.factor @ head.factor.mT)
        explained = 1 - 1 / (head.amplitude**2 * precisions)
        kept = explained > NEGLIGIBLE_SHARE
        directions = directions[:, kept] * explained[kept].sqrt()
        self.explaining = (
            torch.linalg.solve_triangular(factor.mT, directions, upper=True).mT.to(self.dtype).contiguous()
        )

    @property
    def amplitude(self) -> float:
        """Prior standard deviation of f, or of each latent function."""
        return self.head.amplitude

    @property
    def noise(self) -> float:
        """Standard deviation of the noise, of a head for regression."""
        assert isinstance(self.head, GaussianHead)
        return self.head.noise

    def predict(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What ``head.predict`` gives: mean and variance, or latent functions and the share of the prior variance left."""
        features = self.head.features
        nearness = correlation(features.spectrum, features.anchors, x / features.lengthscale)
        found = nearness.mT @ self.weights
        explained = (self.explaining @ nearness.to(self.dtype)).square().sum(0, dtype=torch.float64)
        left = (1 - explained).clamp(min=LEAST_LEFT)
        return (found[:, 0], self.amplitude**2 * left) if isinstance(self.head, GaussianHead) else (found, left)

    def left_of(self, found: Tensor, left: Tensor) -> Tensor:
        """Share of the prior variance that the rows leave, (n,), from what ``predict`` returned."""
        return self.head.left_of(found, left)

    def probabilities_of(self, latent: Tensor, left: Tensor) -> Tensor:
        """Probability of each class at each row, (n, c), from what ``predict`` returned."""
        assert isinstance(self.head, SoftmaxHead)
        return self.head.probabilities_of(latent, left)
