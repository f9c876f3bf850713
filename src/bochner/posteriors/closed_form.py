r"""The output layer's posterior given the features: exact for regression.

With features $\phi(x) \in \mathbb{R}^K$ from the model layer, $f = \Phi w$ and $w \sim \mathrm{N}(0, \Lambda^{-1})$ with
$\Lambda = K/a^2$ (and 1 for an output bias), Gaussian noise of variance $s^2$ gives

$$ w \mid y \sim \mathrm{N}(A^{-1}\Phi^\top y / s^2,\, A^{-1}), \qquad A = \Phi^\top\Phi/s^2 + \Lambda, $$

$$ \log p(y) = -\tfrac12\left[\tfrac{y^\top y}{s^2} - \tfrac{b^\top A^{-1} b}{s^4}
   + \log|A| - \log|\Lambda| + N\log 2\pi s^2\right], \qquad b = \Phi^\top y. $$

Only $\Phi^\top\Phi$, $b$ and $y^\top y$ are kept, summed over batches in float64: memory does not grow with N.
"""
# torch.linalg and other parts of torch declare no types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

import math
import warnings
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from bochner.arguments import dense_tensor, finite_tensor, generator_device, positive_number, whole_number
from bochner.likelihoods import Gaussian
from bochner.models import Model
from bochner.predictive import GaussianPredictive, normal_log_density
from bochner.training.batches import Batches, TensorOrLoader, over_batches
from bochner.training.checks import check_data, check_model

CHUNK_ROWS = 16_384  # rows of a tensor that are processed at a time
TUNING_RATE = 0.05  # learning rate of Adam on the logarithms of lengthscale, noise and amplitude
TUNING_REACH = 7.0  # how far the logarithms of amplitude and noise may move: a factor of a thousand
STRIP_COLUMNS = 128  # columns that are multiplied at a time, where only the lower half of a product is needed


def cholesky(matrix: Tensor) -> Tensor:
    """Lower Cholesky factors in float64 of matrices (..., K, K), with jitter only where it is needed, and then with a warning.

    Jitter of 1e-12, 1e-10, … 1e-6 of the mean diagonal is tried until the factorisation succeeds. Duplicated features need
    none, since the prior is in the matrix already.
    """
    matrix = matrix.double()
    scale = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    for jitter in (0.0, 1e-12, 1e-10, 1e-8, 1e-6):
        damped = matrix if jitter == 0 else matrix + jitter * scale * torch.eye(matrix.shape[-1]).to(matrix)
        factor, info = torch.linalg.cholesky_ex(damped)
        if not info.any():
            if jitter:
                warnings.warn(
                    f"A precision matrix is not positive definite to rounding: {jitter:g} of its mean diagonal was added.",
                    stacklevel=2,
                )
            return factor
    raise ValueError(
        "The precision matrix is not positive definite even after jitter of 1e-6. Either the features are not finite, or "
        "they are float32 on a GPU under very small noise; use model.double() then."
    )


def features(model: Model, x: Tensor) -> Tensor:
    """Features with a column of ones where the output layer has a bias, (n, K) or (n, K + 1).

    The network is put in evaluation mode: features of a row must not depend on its batch or on chance.
    """
    phi = model.eval().features(x)
    return torch.cat([phi, torch.ones_like(phi[:, :1])], -1) if model.output.has_bias else phi


def prior_precision(model: Model) -> Tensor:
    """Diagonal of Λ, float64: K/a² for the weights, 1 for the bias."""
    weights = (model.layer.out_features / model.amplitude.double().square()).expand(model.layer.out_features)
    return torch.cat([weights, weights.new_ones(1)]) if model.output.has_bias else weights


@dataclass
class Statistics:
    """Sums over the training data: Φ'Φ, Φ'y, y'y and the number of rows, or their total weight."""

    gram: Tensor
    projection: Tensor
    square: Tensor
    count: float

    @classmethod
    def of(cls, batches: Batches) -> "Statistics":
        """Accumulates over batches: sums in float64, and products too on the CPU; on a GPU in the precision of the features."""
        gram = projection = square = count = torch.zeros((), dtype=torch.float64)
        for x, y in batches:
            phi = features(batches.model, x)
            phi = phi.double() if phi.device.type == "cpu" else phi
            gram = gram + (phi.mT @ phi).double()
            projection = projection + (phi.mT @ y.to(phi)).double()
            square, count = square + y.double().square().sum(), count + len(x)
        sums = [batches.over_processes(total.to(gram.device)) for total in (gram, projection, square, count)]
        return cls(sums[0], sums[1], sums[2], float(sums[3]))

    def __add__(self, other: "Statistics") -> "Statistics":
        """The sums over both sets of rows."""
        count = self.count + other.count
        return Statistics(self.gram + other.gram, self.projection + other.projection, self.square + other.square, count)

    def __sub__(self, other: "Statistics") -> "Statistics":
        """The sums over the rows outside a part of them."""
        count = self.count - other.count
        return Statistics(self.gram - other.gram, self.projection - other.projection, self.square - other.square, count)

    def discounted(self, share: float) -> "Statistics":
        """The sums where each row counts as a share of a row."""
        return Statistics(share * self.gram, share * self.projection, share * self.square, share * self.count)

    def log_marginal(self, prior: Tensor, noise: Tensor) -> Tensor:
        """Log marginal likelihood of all outputs together, differentiable in everything."""
        variance = noise.double().square()
        outputs = self.projection.shape[-1]
        factor = cholesky(self.gram / variance + torch.diag(prior.double()))
        half = torch.linalg.solve_triangular(factor, self.projection / variance, upper=False)
        log_det = 2 * factor.diagonal().log().sum() - prior.double().log().sum()
        quadratic = self.square / variance - half.square().sum()
        return -0.5 * (quadratic + outputs * (log_det + self.count * torch.log(2 * math.pi * variance)))


def _noise(model: Model) -> Tensor:
    """Standard deviation of the noise, float64."""
    assert isinstance(model.likelihood, Gaussian)
    return model.likelihood.noise.double()


def fewer_rows(model: Model, x: Tensor) -> bool:
    """Whether the dual form is the cheaper one."""
    return len(x) <= model.layer.out_features


def dual_log_marginal(model: Model, x: Tensor, y: Tensor) -> tuple[float, Tensor]:
    r"""The same as ``Statistics.log_marginal`` by the N×N matrix $C = \Phi\Lambda^{-1}\Phi^\top + s^2 I$: cheaper while N ≤ K.

    The product with the gradient is in the precision of the features, all else in float64.

    Returns:
        The log marginal likelihood; and a function of the parameters with its gradient, which is that of
        $\tfrac12\langle G, C\rangle$ for a fixed $G = C^{-1}yy^\top C^{-1} - c\,C^{-1}$ over c outputs.
    """
    phi = features(model, x)
    phi = phi * prior_precision(model).rsqrt().to(phi)
    variance, target, outputs = _noise(model).square(), y.double(), y.shape[-1]
    with torch.no_grad():
        exact = phi.double()
        matrix = variance * torch.eye(len(x)).to(target)
        for start in range(0, len(x), STRIP_COLUMNS):  # the factorisation reads the lower triangle
            matrix[start:, start : start + STRIP_COLUMNS].addmm_(exact[start:], exact[start : start + STRIP_COLUMNS].mT)
        factor = cholesky(matrix)
        solved = torch.cholesky_solve(target, factor)
        log_det = 2 * factor.diagonal().log().sum() + len(x) * math.log(2 * math.pi)
        value = -0.5 * ((target * solved).sum() + outputs * log_det)
        gradient = solved @ solved.mT - outputs * torch.cholesky_inverse(factor)
        push = gradient.to(phi) @ phi
    return value.item(), (push * phi).sum() + 0.5 * gradient.trace() * variance


class ClosedForm:
    """Posterior of the output layer of a regression network; exact given the features.

    Args:
        model: A network with a Gaussian likelihood. Its output weights are not used: they are integrated out.
        x: Training inputs, (N, ...); or a loader of (x, y).
        y: Training targets, (N, c); None with a loader.
        chunk: Rows of a tensor that are processed at a time.

    Attributes:
        mean: Posterior mean of the output weights, amplitude included, (K, c), float64; the bias, if any, is the last row.
        factor: Lower Cholesky factor of the posterior precision, (K, K).
        log_marginal_likelihood: Evidence of the training data.
        statistics: What is kept of the training data.
    """

    def __init__(self, model: Model, x: TensorOrLoader, y: Tensor | None = None, *, chunk: int = CHUNK_ROWS) -> None:
        check_model(model)
        if not isinstance(model.likelihood, Gaussian):
            raise ValueError("ClosedForm needs a Gaussian likelihood; for classes use ClosedFormClassifier.")
        with torch.no_grad():
            self._solve(model, Statistics.of(Batches(model, x, y, size=chunk)))

    @classmethod
    def from_statistics(cls, model: Model, statistics: Statistics) -> "ClosedForm":
        """The posterior from sums over the training data, without the data."""
        posterior = cls.__new__(cls)
        posterior._solve(model, statistics)
        return posterior

    @torch.no_grad()
    def _solve(self, model: Model, statistics: Statistics) -> None:
        self.model, self.statistics = model, statistics
        self.noise = _noise(model)
        prior = prior_precision(model)
        self.factor = cholesky(statistics.gram / self.noise.square() + torch.diag(prior))
        self.mean = torch.cholesky_solve(statistics.projection / self.noise.square(), self.factor)
        self.log_marginal_likelihood = float(statistics.log_marginal(prior, self.noise))

    def update(self, x: TensorOrLoader, y: Tensor | None = None, *, chunk: int = CHUNK_ROWS) -> None:
        """Takes in more rows: the posterior is then that of all rows so far."""
        with torch.no_grad():
            more = Statistics.of(Batches(self.model, x, y, size=chunk))
        self._solve(self.model, self.statistics + more)

    def tune_prior(self, x: TensorOrLoader, y: Tensor | None = None) -> tuple[float, float]:
        """Chooses the amplitude and the noise under which held-out rows are most probable, and solves again.

        A trained extractor has learnt its rows in part by heart, so that noise and amplitude that suit these rows are too small
        for new ones. The model's own ``amplitude`` and ``likelihood.noise`` move.

        Args:
            x: Held-out inputs, a hundred are enough; or a loader of (x, y).
            y: Their targets; None with a loader.

        Returns:
            The amplitude and the noise.
        """
        assert isinstance(self.model.likelihood, Gaussian)
        logs, statistics = (self.model.output.log_amplitude, self.model.likelihood.log_noise), self.statistics
        with torch.no_grad():
            held = [(features(self.model, xb).double(), yb) for xb, yb in Batches(self.model, x, y, size=CHUNK_ROWS)]
            phi, targets = (torch.cat(part) for part in zip(*held, strict=True))
        start = [log.item() for log in logs]

        @torch.no_grad()
        def loss(point: np.ndarray) -> float:
            for log, value in zip(logs, point, strict=True):
                log.fill_(float(value))
            self._solve(self.model, statistics)
            half = torch.linalg.solve_triangular(self.factor, phi.mT, upper=False)
            std = (half.square().sum(0) + self.noise.square()).sqrt()[:, None]
            return -float(normal_log_density(targets.double(), phi @ self.mean, std).mean())

        bounds = [(value - TUNING_REACH, value + TUNING_REACH) for value in start]
        first = [start, *([v + 1.0 * (k == n) for n, v in enumerate(start)] for k in range(2))]
        options = {"initial_simplex": first, "xatol": 1e-3, "fatol": 1e-6, "maxfev": 200}
        best = start
        try:
            best = minimize(loss, start, method="Nelder-Mead", bounds=bounds, options=options).x
        finally:
            loss(np.asarray(best))
        return self.model.amplitude.item(), self.noise.item()

    @torch.no_grad()
    def _half(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Features in float64, and L⁻¹φ as columns: inner products of columns are posterior covariances."""
        phi = features(self.model, x).double()
        return phi, torch.linalg.solve_triangular(self.factor, phi.mT, upper=False)

    @over_batches
    @torch.no_grad()
    def predict(self, x: Tensor) -> GaussianPredictive:
        """Mean and variance of f at each input of a tensor or of a loader."""
        phi, half = self._half(x)
        mean = phi @ self.mean
        return GaussianPredictive(mean, half.square().sum(0)[:, None].expand_as(mean), self.noise)

    @torch.no_grad()
    def covariance(self, x: Tensor) -> Tensor:
        """Joint posterior covariance of f over all inputs, (n, n); the same for every output."""
        half = self._half(finite_tensor("x", x))[1]
        return half.mT @ half

    @torch.no_grad()
    def sample(self, x: Tensor, num: int, *, generator: torch.Generator | None = None) -> Tensor:
        """Posterior functions at the inputs, (num, n, c): whole functions, not independent points."""
        shape = (whole_number("num", num), *self.mean.shape)
        noise = torch.randn(shape, generator=generator, dtype=torch.float64, device=generator_device(generator))
        weights = self.mean + torch.linalg.solve_triangular(self.factor.mT, noise.to(self.mean), upper=True)
        return features(self.model, finite_tensor("x", x)).double() @ weights


def _log_prior(model: Model, std: float) -> Tensor:
    """Log density, up to a constant, of what ``tune_marginal`` moves, but for the features."""
    scale, log_noise = model.layer.log_lengthscale.double(), torch.log(_noise(model))
    log_amplitude = model.output.log_amplitude.double()
    squares = (scale - scale.mean()).square().sum() + (log_noise - math.log(0.3)).square() + log_amplitude.square()
    return -0.5 * squares / std**2


def _push_back(model: Model, x: Tensor, y: Tensor, statistics: Statistics) -> None:
    """Streams the gradients of Φ'Φ and Φ'y back into the parameters of the features."""
    gram, projection = statistics.gram.grad, statistics.projection.grad
    assert gram is not None
    assert projection is not None
    for xb, yb in Batches(model, x, y, size=CHUNK_ROWS):
        phi = features(model, xb)
        # d/dΦ of <G', Φ'Φ> + <B', Φ'y>, for a symmetric G'.
        push = 2 * phi.detach() @ gram.to(phi) + yb.to(phi) @ projection.to(phi).mT
        if phi.requires_grad:
            phi.backward(push)


def _evidence_gradient(model: Model, x: Tensor, y: Tensor, prior_std: float) -> float:
    """Log marginal likelihood and log prior, whose negative gradient is left in the parameters."""
    statistics = None
    if fewer_rows(model, x):
        value, slope = dual_log_marginal(model, x, y)
    else:
        with torch.no_grad():
            statistics = Statistics.of(Batches(model, x, y, size=CHUNK_ROWS))
        statistics.gram.requires_grad_()
        statistics.projection.requires_grad_()
        slope = statistics.log_marginal(prior_precision(model), _noise(model))
        value = slope.item()
    prior = _log_prior(model, prior_std)
    (-slope - prior).backward()
    if statistics is not None:
        _push_back(model, x, y, statistics)
    return value + prior.item()


def _check_tuning(model: Model, x: TensorOrLoader, y: Tensor | None, prior_std: float) -> None:
    """Raises a ValueError unless ``tune_marginal`` can work with these arguments."""
    if y is None and not isinstance(x, Tensor):
        raise ValueError(
            "The x parameter of tune_marginal must be a tensor: a loader's rows may differ from pass to pass."
        )
    check_data(model, dense_tensor("x", x), dense_tensor("y", y))
    if not (isinstance(prior_std, float) and prior_std == math.inf):
        positive_number("prior_std", prior_std)
    if not isinstance(model.likelihood, Gaussian):
        raise ValueError("tune_marginal needs a Gaussian likelihood.")


def tune_marginal(
    model: Model,
    x: Tensor,
    y: Tensor,
    *,
    steps: int = 200,
    train_features: bool = False,
    prior_std: float = math.inf,
) -> list[float]:
    """Type-II maximum likelihood: raises the log marginal likelihood of the closed form by Adam, in place.

    The model's lengthscale(s), noise and amplitude move; with ``train_features`` the weights, biases and extractor too. The
    gradient streams over chunks as the statistics do: one pass for Φ'Φ and Φ'y, one to push their gradients back. With fewer
    rows than units the dual form serves instead.

    With few rows for each column the marginal likelihood alone overfits. A finite ``prior_std`` adds normal priors of that standard
    deviation on logarithms: of each lengthscale over their geometric mean, of the noise over 0.3, of the amplitude (for targets of
    standard deviation 1).

    Returns:
        The log marginal likelihood before each step, with the log prior up to a constant.
    """
    _check_tuning(model, x, y, prior_std)
    assert isinstance(model.likelihood, Gaussian)
    x, y = x.detach(), y.detach()
    tuned = [model.layer.log_lengthscale]
    if train_features:
        tuned += [p for p in (*model.extractor.parameters(), model.layer.weight, model.layer.bias) if p is not None]
    tuned = [p for p in tuned if p.requires_grad]
    log_amplitude = model.output.log_amplitude
    held = not log_amplitude.requires_grad
    optimizer = torch.optim.Adam(
        [*tuned, model.likelihood.log_noise, log_amplitude.requires_grad_(True)], lr=TUNING_RATE
    )
    history: list[float] = []
    try:
        for _ in range(whole_number("steps", steps)):
            optimizer.zero_grad()
            history.append(_evidence_gradient(model, x, y, prior_std))
            optimizer.step()
    finally:
        model.zero_grad()
        log_amplitude.requires_grad_(not held)
    return history
