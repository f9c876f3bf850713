r"""A factor on the predicted standard deviation of each row, where held-out targets were spread less or more than predicted.

Let $u_i$ be the standard normal quantile of a row's target under the mixture of members that have not learnt from it. It is
standard normal if the mixture is right. A model of its log standard deviation, $u_i \sim \mathrm{N}(0, e^{2h(x_i)})$ with
$h = c + \phi(x)^\top v$, is fitted as the mode of a convex log posterior. At a new row all standard deviations of the mixture are
multiplied by $e^{h(x)}$. Far from the data $\phi$ vanishes, and the factor is $e^c$, which is near 1.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from bochner.members.features import KernelFeatures
from bochner.priors.spectra import RBF
from bochner.training.threads import one_thread

MAX_ANCHORS = 200  # largest number of anchors: a spread changes slowly with the inputs
# Lengthscales of h that are tried, in standard deviations of the mean and of typical columns.
LENGTHSCALES = (1.0, 2.0, 4.0)
PRIOR_SLOPE = 0.5  # prior standard deviation of h over its lengthscale: the same typical slope for every lengthscale
# Nats of held-out log density that a spread must gain over a constant one; with less, small tables are overconfident.
MIN_GAIN = 5.0
MAX_LOG_FACTOR = 2.0  # largest |h|: a factor of seven


@dataclass
class Spread:
    """The factor on the standard deviation of each row, as a function of the row.

    Attributes:
        constant: c, the log of the factor far away.
        features: Features of h, or None where the factor is constant.
        weights: v.
        mean_only: Whether h depends on the predicted mean alone, and not on the columns too.
    """

    constant: float = 0.0
    features: KernelFeatures | None = None
    weights: Tensor | None = None
    mean_only: bool = False

    def __call__(self, x: Tensor, mean: Tensor) -> Tensor:
        """The factor at each row, from its inputs and its predicted mean on the mapped scale."""
        level = torch.full_like(mean, self.constant)
        if self.features is not None and self.weights is not None:
            level = level + self.features(_inputs(x, mean, self.mean_only)) @ self.weights
        return level.clamp(-MAX_LOG_FACTOR, MAX_LOG_FACTOR).exp()

    def far(self, mean: Tensor) -> Tensor:
        """The factor far from all rows, where the mean is the prior's."""
        if self.mean_only:
            return self(mean[:, None], mean)
        return torch.full_like(mean, self.constant).clamp(-MAX_LOG_FACTOR, MAX_LOG_FACTOR).exp()


def _inputs(x: Tensor, mean: Tensor, mean_only: bool) -> Tensor:
    """Inputs of h: the predicted mean alone, or the columns and the mean."""
    return mean[:, None] if mean_only else torch.cat([x / math.sqrt(x.shape[1]), mean[:, None]], 1)


def log_density(score: Tensor, level: Tensor) -> Tensor:
    """Log density of scores with the spread minus that without: positive where the spread helps."""
    return 0.5 * score.square() * (1 - torch.exp(-2 * level)) - level


def _mode(phi: Tensor, score: Tensor, weight: Tensor, amplitude: float) -> Tensor:
    """Most probable (v, c), (M + 1,), by L-BFGS; c has a standard normal prior."""
    design = torch.cat([phi, phi.new_ones(len(phi), 1)], 1)
    precision = torch.full((design.shape[1],), amplitude**-2, dtype=phi.dtype, device=phi.device)
    precision[-1] = 1.0
    square = score.square()

    def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        v = torch.from_numpy(flat).to(phi)
        level = design @ v
        misfit = 0.5 * square * torch.exp(-2 * level)
        loss = (weight * (level + misfit)).sum() + 0.5 * (precision * v.square()).sum()
        slope = design.mT @ (weight * (1 - 2 * misfit)) + precision * v
        return float(loss), slope.cpu().numpy()

    start = np.zeros(design.shape[1])
    with one_thread():
        optimum = minimize(objective, start, jac=True, method="L-BFGS-B", options={"maxiter": 60, "ftol": 1e-7})
    return torch.from_numpy(optimum.x).to(phi)


@torch.no_grad()
def learn_spread(x: Tensor, mean: Tensor, score: Tensor, weight: Tensor, folds: int) -> Spread:
    """The spread with the highest held-out log density: constant, a function of the mean, or of the mean and the columns.

    Args:
        x: Inputs of rows that judged the mixture, in random order.
        mean: Their predicted means on the mapped scale.
        score: Normal scores of their targets.
        weight: How many rows each one stands for.
        folds: Number of parts that are left out in turn.
    """
    part = torch.arange(len(x), device=x.device) % folds

    def gain(phi: Tensor, amplitude: float) -> float:
        total = 0.0
        for fold in range(folds if len(x) >= folds else 0):
            out = part == fold
            v = _mode(phi[~out], score[~out], weight[~out], amplitude)
            level = (phi[out] @ v[:-1] + v[-1]).clamp(-MAX_LOG_FACTOR, MAX_LOG_FACTOR)
            total += float((weight[out] * log_density(score[out], level)).sum())
        return total

    nothing = x.new_zeros(len(x), 0)
    best, spread = max(0.0, gain(nothing, 1.0)), Spread()
    if best > 0:
        spread = Spread(float(_mode(nothing, score, weight, 1.0)[-1]))
    best += MIN_GAIN
    for mean_only, scale in itertools.product((True, False), LENGTHSCALES):
        inputs = _inputs(x, mean, mean_only)
        features = KernelFeatures.at(RBF(), torch.full_like(inputs[0], scale), inputs[:MAX_ANCHORS])
        phi = features(inputs)
        value = gain(phi, PRIOR_SLOPE * scale)
        if value > best:
            v = _mode(phi, score, weight, PRIOR_SLOPE * scale)
            best, spread = value, Spread(float(v[-1]), features, v[:-1], mean_only)
    return spread
