r"""Heads: posteriors of linear models on features of a stationary prior, for regression and for classes.

Regression has a conjugate posterior. With the features of :mod:`bochner.members.features`, noise of variance $s^2$ and a row of
weight $\omega$ that counts as $\omega$ rows,

$$ w \mid y \sim \mathrm{N}(A^{-1}\Phi^\top\Omega y / s^2,\; A^{-1}), \qquad A = \Phi^\top\Omega\Phi/s^2 + I/a^2. $$

Classes have a softmax over latent functions, one for each class. Two classes share one function with a sigmoid. The head is the
mode of the log posterior. Its latent functions f at a row are divided by $\sqrt{1 + \pi\tau v/8}$: about the average over a
Gaussian of variance $\tau v$ (MacKay, 1992), where v is the variance that the rows leave. With $\tau = 1$ held-out rows were less
probable than with the mode alone, so held-out rows choose the averaged share $\tau$.

Both kinds of head know which share of the prior variance the rows leave. For regression it is $\operatorname{Var} f / a^2$. For
classes it is the same with precision $\Phi^\top\Omega\Phi/4 + I/a^2$: a quarter is the largest curvature of a sigmoid.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from bochner.members.features import FEATURE_CHUNK_ROWS, KernelFeatures
from bochner.members.rows import TrainingRows
from bochner.posteriors.closed_form import Statistics, cholesky
from bochner.posteriors.feature_rows import FeatureRows
from bochner.training.threads import ONE_THREAD_ROWS, one_thread

MAX_NEWTON_STEPS = 30  # of an update by more rows
MIN_GAIN_PER_ROW = 1e-6  # nats; an update ends with a step that promises less
MAX_CURVATURE = 0.25  # largest second derivative of log(1 + exp f)


def sums_of(features: KernelFeatures, rows: TrainingRows) -> Statistics:
    """Φ'ΩΦ, Φ'Ωy, y'Ωy and the total weight: the sums over rows that a regression head needs."""
    size = len(features.anchors)
    gram = torch.zeros(size, size, dtype=torch.float64, device=rows.x.device)
    projection = torch.zeros(size, rows.y.shape[1], dtype=torch.float64, device=rows.x.device)
    for x, y, weight in zip(*(t.split(FEATURE_CHUNK_ROWS) for t in (rows.x, rows.y, rows.weight)), strict=True):
        phi = features(x)
        weighted = phi * weight[:, None]
        gram.addmm_(phi.mT, weighted)
        projection.addmm_(weighted.mT, y)
    square = (rows.weight[:, None] * rows.y.square()).sum()
    return Statistics(gram, projection, square, float(rows.weight.sum()))


@dataclass
class GaussianHead:
    """The posterior of a regression head.

    Attributes:
        features: The prior as features.
        sums: Sums over the rows.
        amplitude: Prior standard deviation of f.
        noise: Standard deviation of the noise.
    """

    features: KernelFeatures
    sums: Statistics
    amplitude: float
    noise: float
    factor: Tensor = field(init=False, repr=False)
    mean: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        with one_thread():  # the same bits for any number of threads
            precision = self.sums.gram / self.noise**2
            precision.diagonal().add_(self.amplitude**-2)
            self.factor = cholesky(precision)
            self.mean = torch.cholesky_solve(self.sums.projection / self.noise**2, self.factor)

    def updated(self, rows: TrainingRows, forgetting_factor: float = 1.0) -> "GaussianHead":
        """The posterior after more rows: exactly that of all rows together, given the anchors.

        Args:
            rows: The new rows.
            forgetting_factor: What an earlier row counts now, beside 1 for a new one.
        """
        sums = self.sums.discounted(forgetting_factor) + sums_of(self.features, rows)
        return GaussianHead(self.features, sums, self.amplitude, self.noise)

    def _whitened(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Features φ, (n, M), products L⁻¹φ with the factor of the precision, (M, n), and the variance that anchors leave, (n,)."""
        phi = self.features(x)
        half = torch.linalg.solve_triangular(self.factor, phi.mT, upper=False)
        unexplained = self.amplitude**2 * (1 - phi.square().sum(1)).clamp(min=0)
        return phi, half, unexplained

    def predict(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of f at each row, (n,) each."""
        phi, half, unexplained = self._whitened(x)
        return (phi @ self.mean)[:, 0], half.square().sum(0) + unexplained

    def covariance(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (n,) and covariance (n, n) of f at all rows together."""
        phi, half, _ = self._whitened(x)
        scaled = x / self.features.lengthscale
        prior = self.features.spectrum.kernel(scaled) - phi @ phi.mT
        return (phi @ self.mean)[:, 0], half.mT @ half + self.amplitude**2 * prior

    def left_of(self, _: Tensor, variance: Tensor) -> Tensor:
        """Share of the prior variance that the rows leave, (n,), from what ``predict`` returned."""
        return variance / self.amplitude**2

    def variance_left(self, x: Tensor) -> Tensor:
        """Share of the prior variance that the rows leave, (n,)."""
        return self.left_of(*self.predict(x))

    @property
    def log_evidence(self) -> float:
        """Log marginal likelihood of the rows under the linear model in the features."""
        prior = torch.full_like(self.sums.gram[0], self.amplitude**-2)
        return float(self.sums.log_marginal(prior, torch.tensor(self.noise, dtype=torch.float64).to(prior)))


def as_targets(labels: Tensor, classes: int) -> Tensor:
    """Labels as 0/1 targets: one column for two classes, one for each of more."""
    onehot = torch.nn.functional.one_hot(labels, classes).double()
    return onehot[:, 1:] if classes == 2 else onehot


def as_probabilities(latent: Tensor) -> Tensor:
    """Probability of each class from latent functions, (n, 1) or (n, c)."""
    if latent.shape[1] > 1:
        return torch.softmax(latent, 1)
    return torch.cat([torch.sigmoid(-latent), torch.sigmoid(latent)], 1)


def _fit_and_residual(latent: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log likelihood of each row, (n,), and its gradient in the latent functions."""
    if latent.shape[1] == 1:
        fit = -torch.nn.functional.softplus(torch.where(targets > 0.5, -latent, latent))
        return fit[:, 0], targets - torch.sigmoid(latent)
    logs = torch.log_softmax(latent, 1)
    return (logs * targets).sum(1), targets - logs.exp()


def fit_and_slopes(latent: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log likelihood of each row, (n,), its largest curvature, (n,), and its gradient in the latent functions.

    Two classes have the curvature p(1 − p). That of more classes is a matrix, whose largest eigenvalue is at most twice the largest
    p(1 − p): the largest sum of sizes in a row (Gershgorin).
    """
    fit, residual = _fit_and_residual(latent, targets)
    probability = targets - residual
    largest = (probability * (1 - probability)).amax(1)
    return fit, largest if latent.shape[1] == 1 else 2 * largest, residual


@dataclass
class SoftmaxHead:
    """A head for classes: the mode of its posterior.

    Attributes:
        features: The prior as features.
        gram: Φ'ΩΦ, for the variance that the rows leave.
        amplitude: Prior standard deviation of each latent function.
        weights: The mode, (M, 1) for two classes, (M, c) for more.
        averaging: The share τ of the variance that predictions average over.
    """

    features: KernelFeatures
    gram: Tensor
    amplitude: float
    weights: Tensor
    averaging: float = 0.0
    factor: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        with one_thread():  # the same bits for any number of threads
            self.factor = _bound(self.gram, self.amplitude)
        self.weights = self.weights.contiguous()

    @classmethod
    def fit(
        cls, features: KernelFeatures, rows: TrainingRows, amplitude: float, start: Tensor | None = None
    ) -> "SoftmaxHead":
        """The head whose weights maximise the log posterior.

        Args:
            features: The prior as features.
            rows: Rows with 0/1 targets.
            amplitude: Prior standard deviation of each latent function.
            start: Weights to begin from.
        """
        return next(cls.along(features, rows, (amplitude,), start))

    @classmethod
    def along(
        cls, features: KernelFeatures, rows: TrainingRows, amplitudes: Iterable[float], start: Tensor | None = None
    ) -> "Iterator[SoftmaxHead]":
        """Heads for several amplitudes; the search for each mode begins at the mode before."""
        pieces = FeatureRows(features, rows.x.split(FEATURE_CHUNK_ROWS))
        gram = torch.zeros(len(features.anchors), len(features.anchors), dtype=torch.float64, device=rows.x.device)
        for phi, weight in zip(pieces, rows.weight.split(FEATURE_CHUNK_ROWS), strict=True):
            gram.addmm_(phi.mT, phi * weight[:, None])
        for amplitude in amplitudes:
            start = find_mode(pieces, rows, gram, amplitude, start)
            yield cls(features, gram, amplitude, start)

    def updated(self, rows: TrainingRows, forgetting_factor: float = 1.0) -> "SoftmaxHead":
        """The head after more rows, by Laplace's approximation: earlier rows are a normal distribution of the weights.

        Its mean is the mode so far. Its precision is Φ'ΩΦ times the mean curvature at the anchors, which are a sample of the rows
        that the head was first fitted to. Lost is in which directions the earlier rows had more curvature than in others.

        Args:
            rows: The new rows.
            forgetting_factor: What an earlier row counts now, beside 1 for a new one.
        """
        at_anchors = self.features.factor @ self.weights  # φ at anchor i is row i of the factor
        _, curvature, _ = fit_and_slopes(at_anchors, torch.zeros_like(at_anchors))
        past = forgetting_factor * float(curvature.mean()) * self.gram
        past.diagonal().add_(self.amplitude**-2)
        head, phi = replace(self, gram=forgetting_factor * self.gram), self.features(rows.x)
        gram = head.gram + phi.mT @ (phi * rows.weight[:, None])
        for _ in range(MAX_NEWTON_STEPS):
            _, curvature, residual = fit_and_slopes(phi @ head.weights, rows.y)
            slope = phi.mT @ (rows.weight[:, None] * residual) - past @ (head.weights - self.weights)
            stepped = head.newton_step(gram, past + phi.mT @ (phi * (rows.weight * curvature)[:, None]), slope)
            gain = 0.5 * float((slope * (stepped.weights - head.weights)).sum())
            head = stepped
            if gain < MIN_GAIN_PER_ROW * float(rows.weight.sum()):
                break
        return head

    def newton_step(self, gram: Tensor, precision: Tensor, slope: Tensor) -> "SoftmaxHead":
        """The head after one Newton step.

        Args:
            gram: Φ'ΩΦ over all rows so far.
            precision: Curvature of the log posterior at the weights, or a matrix that is nowhere below it.
            slope: Gradient of the log posterior at the weights.
        """
        factor = cholesky(precision)
        return replace(self, gram=gram, weights=self.weights + torch.cholesky_solve(slope, factor))

    @property
    def classes(self) -> int:
        """Number of classes; two have one latent function."""
        return max(2, self.weights.shape[1])

    def latent(self, x: Tensor) -> Tensor:
        """The latent functions at each row, (n, 1) or (n, c)."""
        return self.features(x) @ self.weights

    def probabilities(self, x: Tensor) -> Tensor:
        """Probability of each class at each row, (n, c)."""
        return as_probabilities(self.latent(x)) if self.averaging == 0 else self.probabilities_of(*self.predict(x))

    def predict(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Latent functions at each row, (n, 1) or (n, c), and the share of the prior variance that the rows leave, (n,)."""
        phi = self.features(x)
        half = torch.linalg.solve_triangular(self.factor, phi.mT, upper=False)
        left = half.square().sum(0) / self.amplitude**2 + (1 - phi.square().sum(1)).clamp(min=0)
        return phi @ self.weights, left

    def probabilities_of(self, latent: Tensor, left: Tensor) -> Tensor:
        """Probability of each class at each row, (n, c), from what ``predict`` returned."""
        if self.averaging == 0:
            return as_probabilities(latent)
        return as_probabilities(moderated(latent, self.averaging * self.amplitude**2 * left))

    def left_of(self, _: Tensor, left: Tensor) -> Tensor:
        """Share of the prior variance that the rows leave, (n,), from what ``predict`` returned."""
        return left

    def variance_left(self, x: Tensor) -> Tensor:
        """Share of the prior variance that the rows leave, (n,), whatever their labels."""
        return self.predict(x)[1]


def moderated(latent: Tensor, variance: Tensor) -> Tensor:
    """Latent functions, (n, c), divided so that their probabilities are about the mean over a Gaussian of this variance, (n,)."""
    return latent / (1 + math.pi / 8 * variance).sqrt()[:, None]


def _bound(gram: Tensor, amplitude: float) -> Tensor:
    """Lower Cholesky factor of the precision in which every row has the largest curvature."""
    bound = MAX_CURVATURE * gram
    bound.diagonal().add_(amplitude**-2)
    return cholesky(bound)


def find_mode(
    pieces: Iterable[Tensor], rows: TrainingRows, gram: Tensor, amplitude: float, start: Tensor | None
) -> Tensor:
    """Most probable weights, by L-BFGS in coordinates in which the curvature is at most about 1."""
    factor = _bound(gram, amplitude)
    shape = (len(gram), rows.y.shape[1])
    sizes = [len(phi) for phi in pieces]
    targets, weights = rows.y.split(sizes), rows.weight.split(sizes)

    def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        v = torch.from_numpy(flat.reshape(shape)).to(gram.device)
        w = torch.linalg.solve_triangular(factor.mT, v, upper=True)
        loss, slope = 0.5 * w.square().sum() / amplitude**2, w / amplitude**2
        for phi, target, weight in zip(pieces, targets, weights, strict=True):
            fit, residual = _fit_and_residual(phi @ w, target)
            loss = loss - (weight * fit).sum()
            slope = slope - phi.mT @ (weight[:, None] * residual)
        slope = torch.linalg.solve_triangular(factor, slope, upper=False)
        return float(loss), slope.cpu().numpy().ravel()

    begin = torch.zeros(shape, dtype=torch.float64) if start is None else (factor.mT @ start).cpu()
    options = {"maxiter": 100, "maxcor": 10, "ftol": 1e-8, "gtol": 1e-3}
    with one_thread(len(rows) <= ONE_THREAD_ROWS):
        optimum = minimize(objective, begin.numpy().ravel(), jac=True, method="L-BFGS-B", options=options)
    v = torch.from_numpy(optimum.x.reshape(shape)).to(gram.device)
    return torch.linalg.solve_triangular(factor.mT, v, upper=True)


def left_out_latent(phi: Tensor, rows: TrainingRows, weights: Tensor, amplitude: float) -> Tensor:
    r"""Leave-one-out latent functions: at each row without learning from that row, (n, 1) or (n, c).

    One Newton step away from the mode: $f_{-i} = f_i - V_i\, g_i$, with the gradient $g_i$ of the row's log likelihood, its
    curvature $h_i$, the posterior variance $S_i$ and $V_i = S_i / (1 - S_i h_i)$ (Vehtari et al., 2016). With more than two
    classes each function is treated separately.
    """
    latent = phi @ weights
    _, residual = _fit_and_residual(latent, rows.y)
    probability = rows.y - residual
    curvature = rows.weight[:, None] * probability * (1 - probability)
    columns = []
    for c in range(latent.shape[1]):
        precision = phi.mT @ (phi * curvature[:, c : c + 1])
        precision.diagonal().add_(amplitude**-2)
        half = torch.linalg.solve_triangular(cholesky(precision), phi.mT, upper=False)
        variance = half.square().sum(0)
        variance = variance / (1 - variance * curvature[:, c]).clamp(min=1e-6)
        columns.append(latent[:, c] - variance * rows.weight * residual[:, c])
    return torch.stack(columns, 1)
