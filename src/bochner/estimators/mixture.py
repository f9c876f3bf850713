r"""Mixtures: the weight of each member, and what all members predict together.

$$ p(y \mid x) = \sum_m w_m\, p_m(y \mid x) $$

The weights maximise the probability of rows that the members have not learnt from ('stacking', Yao et al., 2018). A Dirichlet prior
counts as one row in favour of each member.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from scipy.special import ndtri
from torch import Tensor

from bochner.estimators.targets import TargetMap
from bochner.predictive import normal_log_density

QUANTILE_BISECTIONS = 60  # halvings of the interval that holds a quantile: enough to reach rounding errors


@torch.no_grad()
def stacking_weights(log_densities: Tensor, row_weight: Tensor, *, steps: int = 300) -> Tensor:
    """Weights of the mixture that maximise the log density of the rows, by expectation maximisation (EM).

    Args:
        log_densities: Log density of each row under each member, (members, rows).
        row_weight: How many rows each one stands for.
        steps: Iterations.
    """
    weights = torch.full_like(log_densities[:, 0], 1 / len(log_densities))
    for _ in range(steps):
        shares = torch.softmax(log_densities + weights.log()[:, None], 0) @ row_weight
        weights = (shares + 1) / (row_weight.sum() + len(weights))
    return weights


@dataclass(frozen=True)
class NormalMixture:
    """A predictive distribution of the target at n rows: a mixture of Gaussians, each on the scale of its member's map.

    Attributes:
        weight: Weight of each member, (members,).
        mean: Means on the mapped scales, (members, n).
        std: Standard deviations there, noise included, (members, n).
        maps: The map of each member.
    """

    weight: Tensor
    mean: Tensor
    std: Tensor
    maps: tuple[TargetMap, ...]

    def _standard(self, y: Tensor) -> Tensor:
        """Distance of targets (..., n) from each member's mean in its standard deviations, (..., members, n)."""
        distinct, number = self._distinct_maps
        mapped = torch.stack([target_map.forward(y) for target_map in distinct], -2)
        return ((mapped if len(distinct) == 1 else mapped[..., number, :]) - self.mean) / self.std

    @cached_property
    def _distinct_maps(self) -> tuple[list[TargetMap], Tensor]:
        """The different maps, and the number of each member's map among them."""
        distinct = list(dict.fromkeys(self.maps))
        return distinct, torch.tensor([distinct.index(target_map) for target_map in self.maps], device=self.mean.device)

    def member_log_prob(self, y: Tensor) -> Tensor:
        """Log density of each target under each member, (members, n)."""
        parts = [
            normal_log_density(m.forward(y), mean, std) + m.log_slope(y)
            for m, mean, std in zip(self.maps, self.mean, self.std, strict=True)
        ]
        return torch.stack(parts)

    def log_prob(self, y: Tensor) -> Tensor:
        """Log density of each target, (n,)."""
        return (self.member_log_prob(y) + self.weight.log()[:, None]).logsumexp(0)

    def cdf(self, y: Tensor) -> Tensor:
        """Probability of a value up to each target, (n,)."""
        return self.weight @ torch.special.ndtr(self._standard(y))

    def quantile(self, level: float) -> Tensor:
        """The quantile at each row, (n,)."""
        return self.quantiles([level])[:, 0]

    def quantiles(self, levels: Sequence[float]) -> Tensor:
        """Quantiles at each row, (n, levels), by bisection between the lowest and the highest quantile of the members."""
        z = [float(ndtri(level)) for level in levels]
        of_members = torch.stack(
            [
                torch.stack([m.inverse(mean + shift * std) for shift in z])
                for m, mean, std in zip(self.maps, self.mean, self.std, strict=True)
            ]
        )
        low, high = of_members.min(0).values, of_members.max(0).values  # (levels, n)
        for _ in range(QUANTILE_BISECTIONS if len(self.maps) > 1 else 0):
            middle = 0.5 * (low + high)
            share_below = torch.special.ndtr(self._standard(middle))
            # A product for each level: in a product of all levels together the last digits would depend on their number.
            below = torch.stack([self.weight @ part < level for part, level in zip(share_below, levels, strict=True)])
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return (0.5 * (low + high)).mT

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the target at each row, (n,) each."""
        parts = [m.moments(mean, std) for m, mean, std in zip(self.maps, self.mean, self.std, strict=True)]
        means, variances = (torch.stack(part) for part in zip(*parts, strict=True))
        mean = self.weight @ means
        return mean, (self.weight @ (variances + (means - mean).square())).sqrt()

    def scaled(self, factor: Tensor) -> "NormalMixture":
        """The distribution with all standard deviations multiplied by a factor for each row."""
        return NormalMixture(self.weight, self.mean, self.std * factor, self.maps)

    def scores(self, y: Tensor) -> Tensor:
        """Standard normal quantile of each target's probability, (n,), cut at ±8."""
        z = self._standard(y)
        inside = torch.special.ndtri((self.weight @ torch.special.ndtr(z)).clamp(1e-15, 1 - 1e-15))
        return inside.clamp(-8, 8)
