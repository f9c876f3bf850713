r"""Maps of the target: a skewed target is predicted on a scale on which it is nearly Gaussian.

Each map is increasing and onto the whole real line, so that a quantile on the mapped scale maps back to the same quantile of the
target. The density of the target is that of the mapped target times the slope of the map. The map is chosen by the density of rows
that were left out.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from scipy.stats import yeojohnson_normmax
from torch import Tensor

MAX_LOG = 300.0  # largest logarithm whose exponential is taken: keeps results finite
QUADRATURE_NODES = 32  # number of nodes of Gauss–Hermite quadrature; exact for polynomials up to degree 63


@dataclass(frozen=True)
class TargetMap:
    r"""A map of the target, $z = (m(u) - c) / d$ for $u = (y - \text{mean}) / \text{scale}$.

    Attributes:
        kind: "identity"; "log", for positive targets, of y itself; or "power", Yeo and Johnson's (2000), of u.
        mean: Mean of the target; 0 for "log".
        scale: Its standard deviation; 1 for "log".
        power: Exponent λ of "power", from 0 to 2, where the map is onto the whole line; 1 is the identity.
        centre: Mean of the mapped target.
        spread: Its standard deviation.
        low: Smallest value of the target in means and standard deviations: the smallest training target minus their range.
        high: Largest value: the largest training target plus their range. Without limits, a wide Gaussian on a logarithmic scale
            would have an enormous mean.
    """

    kind: str
    mean: float
    scale: float
    power: float = 1.0
    centre: float = 0.0
    spread: float = 1.0
    low: float = -math.inf
    high: float = math.inf

    @classmethod
    def learn(cls, kind: str, y: np.ndarray, weight: np.ndarray) -> "TargetMap":
        """The map of a kind, with centre and spread such that mapped training targets have mean 0 and standard deviation 1."""
        mean = float(np.average(y, weights=weight))
        scale = math.sqrt(float(np.average((y - mean) ** 2, weights=weight)))
        if kind == "log":
            mean, scale = 0.0, 1.0
        power = 1.0
        if kind == "power":
            low, mean, high = np.quantile(y, (0.25, 0.5, 0.75)).tolist()
            scale = (high - low) or scale
            power = float(np.clip(yeojohnson_normmax((y - mean) / scale), 0.0, 2.0))
        mapped = cls(kind, mean, scale, power).forward(torch.from_numpy(y)).numpy()
        centre = float(np.average(mapped, weights=weight))
        spread = math.sqrt(float(np.average((mapped - centre) ** 2, weights=weight)))
        reach = float(y.max() - y.min())
        low, high = float(y.min()) - reach, float(y.max()) + reach
        return cls(kind, mean, scale, power, centre, spread or 1.0, low, high)

    def forward(self, y: Tensor) -> Tensor:
        """Target to mapped target; minus infinity for the logarithm of a target that is not positive."""
        u = (y - self.mean) / self.scale
        if self.kind == "log":
            u = torch.where(u > 0, u, torch.zeros_like(u)).log()
        elif self.kind == "power":
            u = _power(u, self.power)
        return (u - self.centre) / self.spread

    def inverse(self, z: Tensor) -> Tensor:
        """Mapped target to target."""
        u = z * self.spread + self.centre
        if self.kind == "log":
            u = u.clamp(max=MAX_LOG).exp()
        elif self.kind == "power":
            u = _power_inverse(u, self.power)
        return u * self.scale + self.mean

    def log_slope(self, y: Tensor) -> Tensor:
        """Log of the slope dz/dy."""
        u = (y - self.mean) / self.scale
        constant = -math.log(self.scale) - math.log(self.spread)
        if self.kind == "log":
            return constant - torch.where(u > 0, u, torch.ones_like(u)).log()
        if self.kind == "power":
            return constant + (self.power - 1) * u.sign() * u.abs().log1p()
        return torch.full_like(u, constant)

    def moments(self, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the target where the mapped target is Gaussian, by quadrature."""
        if self.kind == "identity":
            factor = self.scale * self.spread
            return self.inverse(mean), (factor * std).square()
        nodes, weights = (torch.from_numpy(v).to(mean) for v in _quadrature_rule())
        weights = weights / weights.sum()
        values = self.inverse(mean[..., None] + std[..., None] * nodes).clamp(self.low, self.high)
        centre = (values * weights).sum(-1)
        return centre, ((values - centre[..., None]).square() * weights).sum(-1)


@cache
def _quadrature_rule() -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of Gauss–Hermite quadrature."""
    return np.polynomial.hermite_e.hermegauss(QUADRATURE_NODES)


def _power(u: Tensor, power: float) -> Tensor:
    """Yeo and Johnson's map: Box and Cox's of 1 + u above 0, and of 1 − u with 2 − λ, mirrored, below."""
    size = u.abs().log1p()
    return torch.where(u >= 0, _grow(size, power), -_grow(size, 2 - power))


def _power_inverse(z: Tensor, power: float) -> Tensor:
    """Inverse of ``_power``."""
    size = z.abs()
    above, below = _shrink(size, power), _shrink(size, 2 - power)
    return torch.where(z >= 0, torch.expm1(above.clamp(max=MAX_LOG)), -torch.expm1(below.clamp(max=MAX_LOG)))


def _grow(size: Tensor, power: float) -> Tensor:
    """((1 + u)^λ − 1) / λ from log(1 + u)."""
    return size if abs(power) < 1e-9 else torch.expm1(power * size) / power


def _shrink(value: Tensor, power: float) -> Tensor:
    """Log(1 + u) from ((1 + u)^λ − 1) / λ."""
    return value if abs(power) < 1e-9 else torch.log1p(power * value) / power


def possible_maps(y: np.ndarray, weight: np.ndarray) -> list[TargetMap]:
    """Maps to choose from for a target: the identity first; the logarithm only where all values are positive."""
    kinds = ["identity", "power", *(["log"] if y.min() > 0 else [])]
    maps = [TargetMap.learn(kind, y, weight) for kind in kinds]
    return [maps[0], *(m for m in maps[1:] if m.spread > 1e-9 and not (m.kind == "power" and m.power == 1.0))]


def as_tensor(y: Any, like: Tensor) -> Tensor:
    """Targets as float64 on the device of another tensor."""
    return torch.tensor(np.asarray(y, dtype=np.float64), device=like.device)


def mapped_target(target_map: TargetMap, y: Tensor) -> Tensor:
    """New targets on a member's scale, (n, 1); a ValueError where they have no place on it."""
    mapped = target_map.forward(y)[:, None]
    if not bool(torch.isfinite(mapped).all()):
        raise ValueError(
            "The y parameter must be positive, as it was when the model was first fitted, for it learnt y's logarithm; "
            "fit again to all rows."
        )
    return mapped
