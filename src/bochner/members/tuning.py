r"""Tuning of a regression head: the most probable lengthscales, amplitude and noise given the rows, by L-BFGS.

$$ \log p(y \mid \theta) + \log p(\theta), \qquad y \sim \mathrm{N}(0,\, a^2\kappa_\ell(X, X) + s^2 W^{-1}) $$

A row of weight w counts as w equal rows. Columns and target have standard deviation 1. The prior p(θ) is normal in logarithms. It
is centred at about $\sqrt d$ for the lengthscale that columns share, at that for each column (``column_spread``), at 1 for the
amplitude and at 0.3 for the noise. It does not depend on the number of rows.

No row is held out here: the evidence p(y | θ) is that of the rows which the head then learns from.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from bochner.members.features import JITTER, squared_distances
from bochner.members.rows import TrainingRows
from bochner.training.threads import one_thread

if TYPE_CHECKING:
    from bochner.members.settings import Settings
    from bochner.priors.spectra import Spectrum

LOG_NOISE_PRIOR_MEAN = math.log(0.3)  # prior mean of the log noise, in log standard deviations of the target
LOG_NOISE_PRIOR_STD = 1.5  # prior standard deviation of the log noise
LOG_LENGTHSCALE_PRIOR_STD = 1.5  # prior standard deviation of the common log lengthscale
LOG_AMPLITUDE_PRIOR_STD = 1.0  # prior standard deviation of the log amplitude, around 0
LOG_BOUNDS = {"common": (-3.0, 6.0), "column": (-5.0, 6.0), "amplitude": (-3.0, 4.0), "noise": (-5.5, 1.5)}
MIN_GAIN_OF_THREE_STEPS = 0.2  # nats; tuning stops below it: smaller gains do not change a prediction


@dataclass(frozen=True)
class Hyperparameters:
    """Hyperparameters of a regression head, as logarithms.

    Attributes:
        common: Log of the lengthscale that columns share.
        columns: Log of each column's lengthscale over that, (groups,); zeros for an isotropic kernel.
        log_amplitude: Log of the prior standard deviation of f.
        log_noise: Log of the standard deviation of the noise.
    """

    common: float
    columns: np.ndarray
    log_amplitude: float = 0.0
    log_noise: float = LOG_NOISE_PRIOR_MEAN

    @classmethod
    def start(cls, groups: int) -> "Hyperparameters":
        """The prior mean: where tuning begins."""
        return cls(_common_prior_mean(groups), np.zeros(groups))

    @classmethod
    def from_vector(cls, vector: np.ndarray) -> "Hyperparameters":
        """From the vector (common, columns, log amplitude, log noise)."""
        return cls(float(vector[0]), vector[1:-2].copy(), float(vector[-2]), float(vector[-1]))

    @property
    def vector(self) -> np.ndarray:
        """The vector (common, columns, log amplitude, log noise)."""
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


def _common_prior_mean(groups: int) -> float:
    """Prior mean of the common log lengthscale: distances of standardised rows grow as the root of the number of columns."""
    return 0.5 * math.log(groups) + 0.3


def log_evidence(
    rows: TrainingRows, spectrum: "Spectrum", group: Tensor, theta: np.ndarray
) -> tuple[float, np.ndarray]:
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
    # The gradient of a scalar: for another shape torch would load its symbolic algebra, which takes a second.
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
    centre = np.concatenate([[_common_prior_mean(groups)], np.zeros(groups), [0.0, LOG_NOISE_PRIOR_MEAN]])
    scale = np.concatenate(
        [[LOG_LENGTHSCALE_PRIOR_STD], np.full(groups, spread), [LOG_AMPLITUDE_PRIOR_STD, LOG_NOISE_PRIOR_STD]]
    )
    z = (theta - centre) / scale
    return -0.5 * float(z @ z), -z / scale


def _bounds(free: np.ndarray) -> list[tuple[float, float]]:
    """Limits of those hyperparameters that are tuned."""
    limits = [
        LOG_BOUNDS["common"],
        *[LOG_BOUNDS["column"]] * (len(free) - 3),
        LOG_BOUNDS["amplitude"],
        LOG_BOUNDS["noise"],
    ]
    return [limit for limit, moves in zip(limits, free, strict=True) if moves]


def of_mean_weight_one(rows: TrainingRows) -> TrainingRows:
    """Rows with weights in proportion to their mean."""
    return TrainingRows(rows.x, rows.y, rows.weight / rows.weight.mean())


def tune(
    rows: TrainingRows,
    spectrum: "Spectrum",
    group: Tensor,
    start: Hyperparameters,
    settings: "Settings",
    *,
    columns_move: bool,
) -> Hyperparameters:
    """The most probable hyperparameters given the rows. No row is held out.

    Weights count in proportion to their mean: a table whose rows all come twice says no more than each of them once, for copies
    would be evidence of targets without noise.

    Args:
        rows: Rows to learn from.
        spectrum: The kernel's spectral density.
        group: Index of the column that each input belongs to, (d,); inputs of one column share their lengthscale.
        start: Hyperparameters to begin with.
        settings: For the prior spread of columns and the number of steps.
        columns_move: Whether the lengthscale of each column is tuned. Otherwise only the common one is, and ratios stay.
    """
    rows = of_mean_weight_one(rows)
    theta = start.vector
    free = np.ones(len(theta), dtype=bool)
    free[1:-2] = columns_move
    values: list[float] = []

    def objective(part: np.ndarray) -> tuple[float, np.ndarray]:
        full = theta.copy()
        full[free] = part
        value, gradient = log_evidence(rows, spectrum, group, full)
        prior, prior_gradient = _log_prior(full, settings.column_spread)
        if not math.isfinite(value):
            return 1e10, np.zeros(len(part))
        return -(value + prior), -(gradient + prior_gradient)[free]

    def stop_when_converged(intermediate_result: object) -> None:
        values.append(float(intermediate_result.fun))  # pyright: ignore[reportAttributeAccessIssue]
        if len(values) > 3 and values[-4] - values[-1] < MIN_GAIN_OF_THREE_STEPS:
            raise StopIteration

    options = {"maxiter": settings.tuning_steps, "maxcor": 20}
    bounds, callback = _bounds(free), stop_when_converged
    with one_thread():  # sums in another order may stop the tuning at another step
        optimum = minimize(
            objective, theta[free], jac=True, method="L-BFGS-B", bounds=bounds, options=options, callback=callback
        )
    theta[free] = optimum.x
    return Hyperparameters.from_vector(theta)


@torch.no_grad()
def leave_one_out_predictions(
    rows: TrainingRows, spectrum: "Spectrum", group: Tensor, point: Hyperparameters
) -> tuple[Tensor, Tensor]:
    r"""Mean and variance of y at every row given all the others, (n, c) and (n,).

    $$ y_i - [C^{-1}y]_i / [C^{-1}]_{ii}, \qquad 1 / [C^{-1}]_{ii} $$

    A row that stands for several is left out as a whole; the variance is that of a single new row.
    """
    x = rows.x / point.lengthscale(group)
    matrix = point.amplitude**2 * spectrum.correlation(squared_distances(x, x).sqrt())
    nugget = point.noise**2 + JITTER * point.amplitude**2
    matrix.diagonal().add_(nugget / rows.weight)
    factor = torch.linalg.cholesky(matrix)
    inverse = torch.cholesky_inverse(factor).diagonal()
    mean = rows.y - torch.cholesky_solve(rows.y, factor) / inverse[:, None]
    return mean, 1 / inverse - nugget / rows.weight + nugget
