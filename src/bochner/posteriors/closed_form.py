r"""The output layer's posterior given the features: exact for regression, Laplace for classification.

With features $\phi(x) \in \mathbb{R}^K$ from the model layer, $f = \Phi w$ and $w \sim \mathrm{N}(0, \Lambda^{-1})$ with
$\Lambda = K/a^2$ (and 1 for an output bias), Gaussian noise of variance $s^2$ gives

$$ w \mid y \sim \mathrm{N}(A^{-1}\Phi^\top y / s^2,\, A^{-1}), \qquad A = \Phi^\top\Phi/s^2 + \Lambda, $$

$$ \log p(y) = -\tfrac12\left[\tfrac{y^\top y}{s^2} - \tfrac{b^\top A^{-1} b}{s^4}
   + \log|A| - \log|\Lambda| + N\log 2\pi s^2\right], \qquad b = \Phi^\top y. $$

Only $\Phi^\top\Phi$, $b$ and $y^\top y$ are kept, summed over batches in float64: memory does not grow with N.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from bochner.likelihoods import Categorical, Gaussian
from bochner.models import Model
from bochner.predictive import CategoricalPredictive, GaussianPredictive, Predictive
from bochner.validation import check_data

CHUNK = 16_384
KEPT = 2**27  # numbers of float64 in a GiB


def cholesky(matrix: Tensor) -> Tensor:
    """Lower Cholesky factor in float64, with jitter only where it is needed.

    The ladder adds 1e-12, 1e-10, … 1e-6 of the mean diagonal until the factorisation succeeds. Duplicated features need
    none, since the prior is in the matrix already.
    """
    matrix = matrix.double()
    scale = matrix.diagonal(dim1=-2, dim2=-1).mean()
    for jitter in (0.0, 1e-12, 1e-10, 1e-8, 1e-6):
        damped = matrix if jitter == 0 else matrix + jitter * scale * torch.eye(matrix.shape[-1]).to(matrix)
        factor, info = torch.linalg.cholesky_ex(damped)
        if not info.any():
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
    return phi if model.output.bias is None else torch.cat([phi, torch.ones_like(phi[:, :1])], -1)


def prior_precision(model: Model, amplitude: Tensor) -> Tensor:
    """Diagonal of Λ: K/a² for the weights, 1 for the bias."""
    weights = (model.layer.out_features / amplitude.square()).expand(model.layer.out_features)
    return weights if model.output.bias is None else torch.cat([weights, weights.new_ones(1)])


def batches(*tensors: Tensor, size: int) -> Iterator[tuple[Tensor, ...]]:
    """Consecutive slices of at most ``size`` rows."""
    return zip(*(t.split(size) for t in tensors), strict=True)


@dataclass
class Statistics:
    """Sums over the training data: Φ'Φ, Φ'y, y'y and the number of rows."""

    gram: Tensor
    projection: Tensor
    square: Tensor
    count: int

    @classmethod
    def of(cls, model: Model, x: Tensor, y: Tensor, chunk: int = CHUNK) -> "Statistics":
        """Accumulates over chunks: sums in float64, and products too on the CPU; on a GPU in the precision of the features."""
        gram = projection = square = 0.0
        for xb, yb in batches(x, y, size=chunk):
            phi = features(model, xb)
            phi = phi.double() if phi.device.type == "cpu" else phi
            gram = gram + (phi.mT @ phi).double()
            projection = projection + (phi.mT @ yb.to(phi)).double()
            square = square + yb.double().square().sum()
        return cls(torch.as_tensor(gram), torch.as_tensor(projection), torch.as_tensor(square), len(x))

    def __add__(self, other: "Statistics") -> "Statistics":
        """The sums over both sets of rows."""
        count = self.count + other.count
        return Statistics(self.gram + other.gram, self.projection + other.projection, self.square + other.square, count)

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
    return len(x) < model.layer.out_features


def dual_log_marginal(model: Model, x: Tensor, y: Tensor, amplitude: Tensor) -> Tensor:
    r"""The same as ``Statistics.log_marginal``, through the N×N matrix $\Phi\Lambda^{-1}\Phi^\top + s^2 I$: cheaper while N < K."""
    phi = features(model, x).double() * prior_precision(model, amplitude).rsqrt()
    noise = _noise(model).square() * torch.eye(len(x)).to(phi)
    factor = cholesky(phi @ phi.mT + noise)
    half = torch.linalg.solve_triangular(factor, y.to(phi), upper=False)
    log_det = 2 * factor.diagonal().log().sum()
    return -0.5 * (half.square().sum() + y.shape[-1] * (log_det + len(x) * math.log(2 * math.pi)))


class ClosedForm:
    """Posterior of the output layer of a regression network; exact given the features.

    Args:
        model: A network with a Gaussian likelihood. Its output weights are not used: they are integrated out.
        x: Training inputs, (N, ...).
        y: Training targets, (N, c).
        amplitude: Prior standard deviation a of f: the output weights have variance a²/K.
        chunk: Rows that are processed at a time.

    Attributes:
        mean: Posterior mean of the output weights, (K, c), float64; the last row is the bias where there is one.
        factor: Lower Cholesky factor of the posterior precision, (K, K).
        log_marginal_likelihood: Evidence of the training data.
        statistics: What is kept of the training data.
    """

    def __init__(
        self, model: Model, x: Tensor, y: Tensor, *, amplitude: float | Tensor = 1.0, chunk: int = CHUNK
    ) -> None:
        if not isinstance(model.likelihood, Gaussian):
            raise ValueError("ClosedForm needs a Gaussian likelihood; for classes use ClosedFormClassifier.")
        check_data(model, x, y)
        with torch.no_grad():
            self._solve(model, Statistics.of(model, x, y, chunk), float(amplitude))

    @classmethod
    def from_statistics(cls, model: Model, statistics: Statistics, *, amplitude: float = 1.0) -> "ClosedForm":
        """The posterior from sums over the training data, without the data."""
        posterior = cls.__new__(cls)
        posterior._solve(model, statistics, amplitude)
        return posterior

    @torch.no_grad()
    def _solve(self, model: Model, statistics: Statistics, amplitude: float) -> None:
        self.model, self.statistics, self.amplitude = model, statistics, amplitude
        self.noise = _noise(model)
        prior = prior_precision(model, torch.tensor(amplitude, dtype=torch.float64).to(self.noise))
        self.factor = cholesky(statistics.gram / self.noise.square() + torch.diag(prior))
        self.mean = torch.cholesky_solve(statistics.projection / self.noise.square(), self.factor)
        self.log_marginal_likelihood = float(statistics.log_marginal(prior, self.noise))

    def update(self, x: Tensor, y: Tensor, *, chunk: int = CHUNK) -> None:
        """Takes in more rows: the posterior is then that of all rows so far."""
        check_data(self.model, x, y)
        with torch.no_grad():
            more = Statistics.of(self.model, x, y, chunk)
        self._solve(self.model, self.statistics + more, self.amplitude)

    @torch.no_grad()
    def _half(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Features in float64, and L⁻¹φ as columns: inner products of columns are posterior covariances."""
        phi = features(self.model, x).double()
        return phi, torch.linalg.solve_triangular(self.factor, phi.mT, upper=False)

    @torch.no_grad()
    def predict(self, x: Tensor) -> GaussianPredictive:
        """Mean and variance of f at each input."""
        phi, half = self._half(x)
        mean = phi @ self.mean
        return GaussianPredictive(mean, half.square().sum(0)[:, None].expand_as(mean), self.noise)

    @torch.no_grad()
    def covariance(self, x: Tensor) -> Tensor:
        """Joint posterior covariance of f over all inputs, (n, n); the same for every output."""
        half = self._half(x)[1]
        return half.mT @ half

    @torch.no_grad()
    def sample(self, x: Tensor, num: int, *, generator: torch.Generator | None = None) -> Tensor:
        """Posterior functions at the inputs, (num, n, c): whole functions, not independent points."""
        shape = (num, *self.mean.shape)
        noise = torch.randn(
            shape, generator=generator, dtype=torch.float64, device=generator.device if generator else None
        )
        weights = self.mean + torch.linalg.solve_triangular(self.factor.mT, noise.to(self.mean), upper=True)
        return features(self.model, x).double() @ weights


def tune_marginal(
    model: Model,
    x: Tensor,
    y: Tensor,
    *,
    steps: int = 200,
    lr: float = 0.05,
    amplitude: float = 1.0,
    train_features: bool = False,
    chunk: int = CHUNK,
) -> tuple[float, list[float]]:
    """Type-II maximum likelihood: raises the log marginal likelihood of the closed form by Adam, in place.

    The lengthscale(s), the noise and the amplitude move; with ``train_features`` the weights, biases and extractor too.
    The gradient streams over chunks as the statistics do: one pass for Φ'Φ and Φ'y, one to push their gradients back. With fewer
    rows than units the dual form serves instead.

    Returns:
        The amplitude and the log marginal likelihood before each step.
    """
    check_data(model, x, y)
    if not isinstance(model.likelihood, Gaussian):
        raise ValueError("tune_marginal needs a Gaussian likelihood.")
    log_amplitude = torch.tensor(math.log(amplitude), dtype=torch.float64, device=x.device, requires_grad=True)
    tuned = [model.layer.log_lengthscale]
    if train_features:
        tuned += [p for p in (*model.extractor.parameters(), model.layer.weight, model.layer.bias) if p is not None]
    tuned = [p for p in tuned if p.requires_grad]
    optimizer = torch.optim.Adam([*tuned, model.likelihood.log_noise, log_amplitude], lr=lr)
    history = []
    for _ in range(steps):
        optimizer.zero_grad()
        if fewer_rows(model, x):
            evidence = dual_log_marginal(model, x, y, log_amplitude.exp())
            (-evidence).backward()
            optimizer.step()
            history.append(evidence.item())
            continue
        with torch.no_grad():
            statistics = Statistics.of(model, x, y, chunk)
        statistics.gram.requires_grad_()
        statistics.projection.requires_grad_()
        evidence = statistics.log_marginal(prior_precision(model, log_amplitude.exp()), model.likelihood.noise)
        (-evidence).backward()
        gram_grad, projection_grad = statistics.gram.grad, statistics.projection.grad
        assert gram_grad is not None
        assert projection_grad is not None
        for xb, yb in batches(x, y, size=chunk):
            phi = features(model, xb)
            # d/dΦ of <G', Φ'Φ> + <B', Φ'y>, for a symmetric G'.
            push = 2 * phi.detach() @ gram_grad.to(phi) + yb.to(phi) @ projection_grad.to(phi).mT
            if phi.requires_grad:
                phi.backward(push)
        optimizer.step()
        history.append(evidence.item())
    model.zero_grad()
    return log_amplitude.exp().item(), history


class _FeatureRows:
    """The features of all training rows in chunks, in float64, again and again: kept while they take at most a GiB."""

    def __init__(self, model: Model, x: Tensor, chunk: int) -> None:
        self.model, self.x, self.chunk = model, x, chunk
        self.kept: list[Tensor] | None = None
        if len(x) * model.layer.out_features <= KEPT:
            self.kept = list(self)

    def __iter__(self) -> Iterator[Tensor]:
        if self.kept is not None:
            return iter(self.kept)
        return (features(self.model, xb).double() for xb in self.x.split(self.chunk))


class ClosedFormClassifier:
    """Laplace posterior of the output layer of a classification network, given the features.

    The mode is found by L-BFGS on the convex log joint, preconditioned with the Böhning bound ½Φ'Φ + Λ. The precision there
    is exact for all weights together while K·c stays within ``full_limit``; beyond, blocks of K×K for each class, which
    leaves out the correlations between classes.

    Args:
        model: A network with a Categorical likelihood.
        x: Training inputs, (N, ...).
        y: Class labels, (N,).
        amplitude: Prior standard deviation of each output.
        samples: Draws of the outputs that predictions average over.
        steps: Most iterations of L-BFGS.
        full_limit: Largest K·c with a joint precision matrix.
        chunk: Rows that are processed at a time.
        generator: Source of the draws.
    """

    def __init__(
        self,
        model: Model,
        x: Tensor,
        y: Tensor,
        *,
        amplitude: float = 1.0,
        samples: int = 100,
        steps: int = 100,
        full_limit: int = 4000,
        chunk: int = CHUNK,
        generator: torch.Generator | None = None,
    ) -> None:
        if not isinstance(model.likelihood, Categorical):
            raise ValueError("ClosedFormClassifier needs a Categorical likelihood; for regression use ClosedForm.")
        check_data(model, x, y)
        self.model, self.samples = model, samples
        self.seed = int(torch.randint(2**31, (), generator=generator, device=generator.device if generator else None))
        self.classes = model.output.out_features
        prior = prior_precision(model, torch.tensor(amplitude, dtype=torch.float64, device=x.device))
        with torch.no_grad():
            rows = _FeatureRows(model, x, chunk)
            self.mean = self._mode(rows, y, prior, steps)
            self.full = self.mean.numel() <= full_limit
            precision = self._precision(rows, prior)
            # One class at a time: libraries treat batches of matrices as small ones.
            self.factor = cholesky(precision) if self.full else torch.stack([cholesky(block) for block in precision])
            # With the joint precision at hand Newton's method finishes what L-BFGS left.
            for _ in range(3 if self.full else 0):
                gradient = self._loss_and_gradient(self.mean, rows, y, prior)[1].mT.reshape(-1, 1)
                self.mean = self.mean - torch.cholesky_solve(gradient, self.factor).reshape(self.mean.mT.shape).mT
                self.factor = cholesky(self._precision(rows, prior))
            # Laid out as a file lays it out: then a posterior that is read back predicts the same bits.
            self.mean, self.factor = self.mean.contiguous(), self.factor.contiguous()

    @classmethod
    def from_moments(
        cls, model: Model, mean: Tensor, factor: Tensor, *, classes: int, samples: int, seed: int
    ) -> "ClosedFormClassifier":
        """The posterior from its mode (K, c) and the factor of its precision, without the data."""
        if mean.shape != (model.layer.out_features + (model.output.bias is not None), classes):
            raise ValueError(
                f"The mean parameter must have a column for each of {classes} classes, got {tuple(mean.shape)}."
            )
        posterior = cls.__new__(cls)
        posterior.model, posterior.mean, posterior.factor = model, mean, factor
        posterior.classes, posterior.samples, posterior.seed, posterior.full = classes, samples, seed, factor.ndim == 2
        return posterior

    def _mode(self, rows: "_FeatureRows", y: Tensor, prior: Tensor, steps: int) -> Tensor:
        """Maximum a posteriori output weights, (K, c), float64."""
        bound = torch.diag(prior)
        for phi in rows:
            bound = bound + 0.5 * phi.mT @ phi
        bound = cholesky(bound)
        weights = torch.zeros(len(prior), self.classes, dtype=torch.float64, device=y.device)
        v = weights.clone().requires_grad_()
        optimizer = torch.optim.LBFGS(
            [v], max_iter=steps, line_search_fn="strong_wolfe", tolerance_grad=1e-8, tolerance_change=1e-12
        )

        def closure() -> Tensor:
            w = torch.linalg.solve_triangular(bound.mT, v.detach(), upper=True)
            loss, grad = self._loss_and_gradient(w, rows, y, prior)
            v.grad = torch.linalg.solve_triangular(bound, grad, upper=False).contiguous()
            return loss

        with torch.enable_grad():
            optimizer.step(closure)
        return torch.linalg.solve_triangular(bound.mT, v.detach(), upper=True)

    def _loss_and_gradient(self, w: Tensor, rows: "_FeatureRows", y: Tensor, prior: Tensor) -> tuple[Tensor, Tensor]:
        """Minus the log joint of the output weights (K, c), up to a constant, and its gradient."""
        loss, grad = 0.5 * (prior[:, None] * w.square()).sum(), prior[:, None] * w
        for phi, yb in zip(rows, y.long().split(rows.chunk), strict=True):
            log_p = torch.log_softmax(phi @ w, -1)
            loss = loss - log_p.gather(-1, yb[:, None]).sum()
            grad = grad + phi.mT @ (log_p.exp() - torch.nn.functional.one_hot(yb, w.shape[-1]))
        return loss, grad

    def _precision(self, rows: "_FeatureRows", prior: Tensor) -> Tensor:
        """Σ φφ' ⊗ (diag p − pp') + Λ: (cK, cK), or its class blocks (c, K, K)."""
        k, c = self.mean.shape
        blocks = torch.zeros((c * k, c * k) if self.full else (c, k, k), dtype=torch.float64, device=prior.device)
        for phi in rows:
            p = torch.softmax(phi @ self.mean, -1)
            if not self.full:
                for j in range(c):
                    blocks[j] += phi.mT @ (phi * (p[:, j] * (1 - p[:, j]))[:, None])
                continue
            for i in range(c):
                for j in range(i, c):
                    weight = p[:, i] * (float(i == j) - p[:, j])
                    blocks[i * k : (i + 1) * k, j * k : (j + 1) * k] += phi.mT @ (phi * weight[:, None])
        if not self.full:
            return blocks + torch.diag(prior)
        upper = blocks.triu()
        return upper + upper.triu(1).mT + torch.diag(prior.repeat(c))

    @torch.no_grad()
    def logit_moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (n, c) and covariance (n, c, c) of the outputs."""
        phi = features(self.model, x).double()
        c = self.classes
        if not self.full:
            halves = (torch.linalg.solve_triangular(factor, phi.mT, upper=False) for factor in self.factor)
            return phi @ self.mean, torch.diag_embed(torch.stack([half.square().sum(0) for half in halves], -1))
        # Columns of the identity over classes: L⁻¹(e_i ⊗ φ) for each i.
        wide = torch.stack([torch.cat([phi.mT * float(i == j) for j in range(c)]) for i in range(c)])
        half = torch.linalg.solve_triangular(self.factor, wide, upper=False)
        return phi @ self.mean, torch.einsum("ikn,jkn->nij", half, half)

    @torch.no_grad()
    def predict(self, x: Tensor, *, chunk: int = 1024) -> Predictive:
        """Class probabilities, averaged over Gaussian draws of the outputs."""
        mean, covariance = (
            torch.cat(parts) for parts in zip(*(self.logit_moments(xb) for xb in x.split(chunk)), strict=True)
        )
        return average_classes(mean, covariance, samples=self.samples, seed=self.seed)


def average_classes(mean: Tensor, covariance: Tensor, *, samples: int, seed: int) -> CategoricalPredictive:
    """Class probabilities averaged over Gaussian outputs with means (n, c) and covariances (n, c, c).

    The draws are a scrambled Sobol sequence, the same for every row: the answer for a row does not depend on the rows beside it.
    Each draw serves once for every turn of its entries, so that no class is favoured by chance.
    """
    mean, covariance = mean.double(), covariance.double()
    classes = mean.shape[-1]
    factor = torch.linalg.cholesky(covariance + 1e-12 * torch.eye(classes).to(mean))
    points = SobolEngine(classes, scramble=True, seed=seed).draw(math.ceil(samples / classes), dtype=torch.float64)
    normals = torch.special.ndtri(points + 2.0**-31).to(mean)  # half a cell up: the grid of 2^-30 contains 0
    return CategoricalPredictive.from_logits(
        mean + factor @ z.roll(turn, 0) for z in normals for turn in range(classes)
    )
