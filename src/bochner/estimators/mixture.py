r"""Mixtures: the weight of each member, and what all members predict together.

$$ p(y \mid x) = \sum_m w_m\, p_m(y \mid x) $$

The weights maximise the probability of rows that the members have not learnt from ('stacking', Yao et al., 2018). A Dirichlet prior
counts as one row in favour of each member.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from scipy.special import ndtri
from torch import Tensor

from bochner.estimators.targets import TargetMap
from bochner.predictive import normal_log_density

QUANTILE_STEPS = 12  # of the search for a quantile, before rows that are not yet found go on alone; most need fewer
MAX_NORMAL = 40.0  # limit of standard normal quantiles: that of the smallest probability above 0 is −38.5
QUANTILE_TOLERANCE = 1e-12  # of a quantile's probability, in standard normal deviations


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
        """Quantiles at each row, (n, levels); each lies between the lowest and the highest quantile of the members."""
        z = [float(ndtri(level)) for level in levels]
        of_members = torch.stack(
            [
                torch.stack([m.inverse(mean + shift * std) for shift in z])
                for m, mean, std in zip(self.maps, self.mean, self.std, strict=True)
            ]
        )
        low, high = of_members.min(0).values, of_members.max(0).values  # (levels, n)
        found = (
            low
            if len(self.maps) == 1
            else self._search(low, high, torch.tensor(z, dtype=low.dtype, device=low.device)[:, None])
        )
        return found.mT

    def _search(self, low: Tensor, high: Tensor, z: Tensor) -> Tensor:
        """Targets from ``low`` to ``high``, (levels, n), whose probability is that of standard normal quantiles z, (levels, 1).

        By the Illinois method: the secant through the errors at both ends, of which one that stays is halved. Every third step
        halves the interval instead. Errors are those of normal quantiles, which for a single Gaussian are a straight line.
        """
        upper = torch.where(z > 0, -1.0, 1.0).to(low)  # the upper tail is searched from above: 1 − tiny has no digits

        def error_at(y: Tensor) -> Tensor:
            tails = 0.5 * torch.erfc(
                -math.sqrt(0.5) * upper[..., None] * self._standard(y)
            )  # ndtr has no digits below 1e-14
            # A product for each level: in a product of all levels together the last digits would depend on their number.
            share = torch.stack([self.weight @ part for part in tails])
            return (upper * torch.special.ndtri(share)).clamp(-MAX_NORMAL, MAX_NORMAL) - z

        error_low, error_high, last_sign = error_at(low), error_at(high), torch.zeros_like(low)
        found = torch.where(error_high.abs() < error_low.abs(), high, low)
        searching = (error_low < -QUANTILE_TOLERANCE) & (error_high > QUANTILE_TOLERANCE)
        for number in range(QUANTILE_STEPS):
            if not bool(searching.any()):
                return found
            share = 0.5 if number % 3 == 2 else error_low / (error_low - error_high)
            middle = low + share * (high - low)
            error = error_at(middle)
            found, sign = torch.where(searching, middle, found), error.sign()
            searching &= (error.abs() > QUANTILE_TOLERANCE) & (low < middle) & (middle < high)
            kept_low = torch.where(last_sign > 0, 0.5 * error_low, error_low)
            kept_high = torch.where(last_sign < 0, 0.5 * error_high, error_high)
            below = sign < 0
            error_low, error_high = torch.where(below, error, kept_low), torch.where(below, kept_high, error)
            low, high, last_sign = torch.where(below, middle, low), torch.where(below, high, middle), sign
        at = searching.any(0).nonzero()[:, 0]
        if len(at):
            rest = NormalMixture(self.weight, self.mean[:, at], self.std[:, at], self.maps)
            found[:, at] = torch.where(searching[:, at], rest._search(low[:, at], high[:, at], z), found[:, at])
        return found

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
