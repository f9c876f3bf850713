r"""Lengthscales, amplitude and noise of a regression head: the most probable ones given the rows, by L-BFGS.

$$ \log p(y \mid \theta) + \log p(\theta), \qquad y \sim \mathrm{N}(0,\, a^2\kappa_\ell(X, X) + s^2 W^{-1}) $$

A row of weight w counts as w equal rows. Everything is in units in which columns and target have standard deviation 1. The prior
holds the logarithms: of the lengthscale that columns share around $\sqrt d$, of each column's around that (``column_spread``), of
the amplitude around 1 and of the noise around 0.3. It is the same at every size; rows outvote it where there are enough.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from bochner.members.features import JITTER, squared_distances
from bochner.members.settings import Settings
from bochner.priors.spectra import Spectrum
from bochner.training.threads import one_thread

NOISE_CENTRE, WIDE_PRIOR, UNIT_PRIOR = math.log(0.3), 1.5, 1.0  # of logarithms: where it lies, standard deviations
LOG_BOUNDS = {"common": (-3.0, 6.0), "column": (-5.0, 6.0), "amplitude": (-3.0, 4.0), "noise": (-5.5, 1.5)}
CONVERGED = 0.2  # nats that three steps must gain to go on: less does not change a prediction


@dataclass(frozen=True)
class Rows:
    """Rows to learn from, in standardised units.

    Attributes:
        x: Inputs, (n, d).
        y: Targets, (n, c) floats.
        weight: How many rows each one stands for, (n,).
    """

    x: Tensor
    y: Tensor
    weight: Tensor

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: Tensor) -> "Rows":
        return Rows(self.x[index], self.y[index], self.weight[index])


@dataclass(frozen=True)
class Hyperparameters:
    """What is tuned.

    Attributes:
        common: Log of the lengthscale that columns share.
        columns: Log of each column's lengthscale over that, (groups,); zeros for an isotropic kernel.
        log_amplitude: Log of the prior standard deviation of f.
        log_noise: Log of the standard deviation of the noise.
    """

    common: float
    columns: np.ndarray
    log_amplitude: float = 0.0
    log_noise: float = NOISE_CENTRE

    @classmethod
    def start(cls, groups: int) -> "Hyperparameters":
        """The middle of the prior."""
        return cls(_middle(groups), np.zeros(groups))

    @classmethod
    def from_vector(cls, vector: np.ndarray) -> "Hyperparameters":
        """From (common, columns, amplitude, noise)."""
        return cls(float(vector[0]), vector[1:-2].copy(), float(vector[-2]), float(vector[-1]))

    @property
    def vector(self) -> np.ndarray:
        """(common, columns, amplitude, noise)."""
        return np.concatenate([[self.common], self.columns, [self.log_amplitude, self.log_noise]])

    def lengthscale(self, group: Tensor) -> Tensor:
        """Lengthscale of every input, (d,), from the number of its group."""
        logs = torch.from_numpy(self.common + self.columns).to(group.device)
        return logs.exp()[group]

    @property
    def amplitude(self) -> float:
        """Prior standard deviation of f."""
        return math.exp(self.log_amplitude)

    @property
    def noise(self) -> float:
        """Standard deviation of the noise."""
        return math.exp(self.log_noise)


def _middle(groups: int) -> float:
    """Centre of the common log lengthscale: typical distances of standardised rows grow as the root of their columns."""
    return 0.5 * math.log(groups) + 0.3


def log_evidence(rows: Rows, spectrum: Spectrum, group: Tensor, theta: np.ndarray) -> tuple[float, np.ndarray]:
    """Log marginal likelihood of the rows, and its gradient in (common, columns, log amplitude, log noise).

    Returns minus infinity where the covariance is not positive definite in floating point.
    """
    point = Hyperparameters.from_vector(theta)
    x = rows.x / point.lengthscale(group)
    signal, noise = point.amplitude**2, point.noise**2
    nugget = noise + JITTER * signal
    distance = squared_distances(x, x).clamp(min=1e-12).requires_grad_()
    kernel = spectrum.correlation(distance.sqrt())
    with torch.no_grad():
        matrix = signal * kernel
        matrix.diagonal().add_(nugget / rows.weight)
        factor, failed = torch.linalg.cholesky_ex(matrix)
        if bool(failed):
            return -math.inf, np.zeros_like(theta)
        outputs, total = rows.y.shape[1], float(rows.weight.sum())
        solved = torch.cholesky_solve(rows.y, factor)
        value = -0.5 * (rows.y * solved).sum() - outputs * factor.diagonal().log().sum()
        # A row of weight w has the likelihood of w rows with the same target.
        value = value - 0.5 * outputs * ((total - len(rows)) * math.log(nugget) + rows.weight.log().sum())
        value = float(value) - 0.5 * outputs * total * math.log(2 * math.pi)
        gradient = solved @ solved.mT - outputs * torch.cholesky_inverse(factor)  # of the value in the matrix, doubled
    # A scalar: torch loads its symbolic algebra, a second's work, where it is given a gradient of another shape.
    (slope,) = torch.autograd.grad((kernel * (gradient * signal)).sum(), distance)
    slope = slope.detach().fill_diagonal_(0.0)
    kernel = kernel.detach()
    # d r²/d log ℓ = −2 (x − x')² for each input.
    per_input = -2 * ((x.square() * slope.sum(1)[:, None]).sum(0) - (x * (slope @ x)).sum(0))
    per_group = torch.zeros(len(point.columns), dtype=x.dtype, device=x.device).index_add_(0, group, per_input)
    per_group = per_group.cpu().numpy()
    in_nugget = float((gradient.diagonal() / rows.weight).sum()) - outputs * (total - len(rows)) / nugget
    ends = [signal * (float((gradient * kernel).sum()) + JITTER * in_nugget), noise * in_nugget]
    return value, np.concatenate([[per_group.sum()], per_group, ends])


def _log_prior(theta: np.ndarray, spread: float) -> tuple[float, np.ndarray]:
    """Log prior of the vector up to a constant, and its gradient."""
    groups = len(theta) - 3
    centre = np.concatenate([[_middle(groups)], np.zeros(groups), [0.0, NOISE_CENTRE]])
    scale = np.concatenate([[WIDE_PRIOR], np.full(groups, spread), [UNIT_PRIOR, WIDE_PRIOR]])
    z = (theta - centre) / scale
    return -0.5 * float(z @ z), -z / scale


def tune(
    rows: Rows, spectrum: Spectrum, group: Tensor, start: Hyperparameters, settings: Settings, *, columns_move: bool
) -> Hyperparameters:
    """The most probable hyperparameters.

    Args:
        rows: Rows to learn from.
        spectrum: The kernel's spectral density.
        group: Number of the column that each input stands for, (d,); inputs of one column share their lengthscale.
        start: Where to begin.
        settings: The prior's spread of columns, and how long to search.
        columns_move: Whether every column has a lengthscale of its own; otherwise they keep their ratios, at first all equal.
    """
    theta = start.vector
    free = np.ones(len(theta), dtype=bool)
    free[1:-2] = columns_move
    values: list[float] = []

    def objective(part: np.ndarray) -> tuple[float, np.ndarray]:
        full = theta.copy()
        full[free] = part
        value, gradient = log_evidence(rows, spectrum, group, full)
        prior, push = _log_prior(full, settings.column_spread)
        if not math.isfinite(value):
            return 1e10, np.zeros(len(part))
        return -(value + prior), -(gradient + push)[free]

    def watch(intermediate_result: object) -> None:
        values.append(float(intermediate_result.fun))  # pyright: ignore[reportAttributeAccessIssue]
        if len(values) > 3 and values[-4] - values[-1] < CONVERGED:
            raise StopIteration

    limits = [LOG_BOUNDS["common"], *[LOG_BOUNDS["column"]] * len(start.columns)]
    limits = [*limits, LOG_BOUNDS["amplitude"], LOG_BOUNDS["noise"]]
    bounds = [limit for limit, moves in zip(limits, free, strict=True) if moves]
    options = {"maxiter": settings.tuning_steps, "maxcor": 20}
    with one_thread():
        found = minimize(
            objective, theta[free], jac=True, method="L-BFGS-B", bounds=bounds, options=options, callback=watch
        )
    theta[free] = found.x
    return Hyperparameters.from_vector(theta)


@torch.no_grad()
def left_out(rows: Rows, spectrum: Spectrum, group: Tensor, point: Hyperparameters) -> tuple[Tensor, Tensor]:
    r"""Mean and variance of y at every row given all the others, (n, c) and (n,).

    $$ y_i - [C^{-1}y]_i / [C^{-1}]_{ii}, \qquad 1 / [C^{-1}]_{ii} $$

    The variance is that of a single new row: one that stands for several is left out as a whole.
    """
    x = rows.x / point.lengthscale(group)
    matrix = point.amplitude**2 * spectrum.correlation(squared_distances(x, x).sqrt())
    nugget = point.noise**2 + JITTER * point.amplitude**2
    matrix.diagonal().add_(nugget / rows.weight)
    factor = torch.linalg.cholesky(matrix)
    inverse = torch.cholesky_inverse(factor).diagonal()
    mean = rows.y - torch.cholesky_solve(rows.y, factor) / inverse[:, None]
    return mean, 1 / inverse - nugget / rows.weight + nugget
