"""Gaussian processes, by GPyTorch: what the networks become at infinite width.

The only file that imports GPyTorch. Any kernel of the package will do: a function of two sets of inputs, with the
lengthscale(s), the amplitude and the noise around it as hyperparameters.
"""
# GPyTorch declares no types:
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportCallIssue=false, reportOptionalMemberAccess=false, reportIndexIssue=false, reportIncompatibleMethodOverride=false
# (GPyTorch's modules declare most of their attributes and results as unions.)

from collections.abc import Callable

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.mlls import ExactMarginalLogLikelihood, VariationalELBO
from torch import Tensor

from bochner.arguments import finite_tensor, positive_number, seed_number, shown, whole_number
from bochner.predictive import CategoricalPredictive, GaussianPredictive
from bochner.priors.kernels import InducedKernel
from bochner.priors.spectra import Spectrum, check_lengthscale

VARIATIONAL_RATE = 0.05  # learning rate of Adam on the evidence lower bound
Function = Callable[[Tensor, Tensor], Tensor]


class _Kernel(gpytorch.kernels.Kernel):
    """κ(x/ℓ, x'/ℓ) for a function κ of two sets of inputs."""

    has_lengthscale = True

    def __init__(self, function: Function, ard_num_dims: int | None) -> None:
        super().__init__(ard_num_dims=ard_num_dims)
        self.function = function

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **_: object) -> Tensor:
        x1, x2 = x1 / self.lengthscale, x2 / self.lengthscale
        if diag:
            x1, x2 = torch.broadcast_tensors(x1, x2)
            single = torch.func.vmap(lambda a, b: self.function(a[None], b[None])[0, 0])
            return single(x1.flatten(0, -2), x2.flatten(0, -2)).reshape(x1.shape[:-1])
        if x1.ndim == 2:
            return self.function(x1, x2)
        lead = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
        pairs = (v.expand(*lead, *v.shape[-2:]).flatten(0, -3) for v in (x1, x2))
        return torch.stack([self.function(a, b) for a, b in zip(*pairs, strict=True)]).unflatten(0, lead)


def _covariance(
    kernel: Spectrum | InducedKernel | Function, dim: int, lengthscale: float | Tensor, amplitude: float
) -> gpytorch.kernels.ScaleKernel:
    """The kernel with hyperparameters around it, in float64."""
    scale, amplitude = check_lengthscale(lengthscale), positive_number("amplitude", amplitude)
    if scale.ndim and len(scale) != dim:
        raise ValueError(f"The lengthscale parameter must be a number or {dim} numbers, got {len(scale)} instead.")
    if isinstance(kernel, type) or not (isinstance(kernel, Spectrum) or callable(kernel)):
        raise ValueError(
            f"The kernel parameter must be a spectrum, a kernel or a function, got {shown(kernel)} instead."
        )
    function: Function = kernel.kernel if isinstance(kernel, Spectrum) else kernel
    covariance = gpytorch.kernels.ScaleKernel(_Kernel(function, len(scale) if scale.ndim else None)).double()
    covariance.base_kernel.lengthscale = scale
    covariance.outputscale = torch.tensor(amplitude**2, dtype=torch.float64)
    return covariance


def _check(x: Tensor, y: Tensor) -> None:
    for name, value in (("x", x), ("y", y)):
        finite_tensor(name, value)
    if x.ndim != 2 or len(x) == 0 or len(x) != len(y):
        raise ValueError(
            f"The x parameter must have shape (N, d) with the N ≥ 1 rows of y, got {tuple(x.shape)} and {len(y)} instead."
        )


def _rows_like(train: Tensor, x: Tensor) -> Tensor:
    """Inputs of a prediction in float64, after checking that they have the columns of the training inputs."""
    if finite_tensor("x", x).ndim != 2 or x.shape[1] != train.shape[1]:
        raise ValueError(f"The x parameter must have shape (n, {train.shape[1]}), got {tuple(x.shape)} instead.")
    return x.detach().to(train)


class _Exact(gpytorch.models.ExactGP):
    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        likelihood: gpytorch.likelihoods.GaussianLikelihood,
        covariance: gpytorch.kernels.Kernel,
    ) -> None:
        super().__init__(x, y, likelihood)
        self.mean, self.covariance = gpytorch.means.ZeroMean(), covariance

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean(x), self.covariance(x))


class GaussianProcess:
    """Exact Gaussian process regression, in float64, with zero mean.

    Args:
        kernel: A spectrum, an induced kernel, or any function of two sets of inputs.
        x: Training inputs, (N, d).
        y: Training targets, (N, 1).
        lengthscale: A number, or d of them (ARD).
        amplitude: Standard deviation of f.
        noise: Standard deviation of the noise.
    """

    def __init__(
        self,
        kernel: Spectrum | InducedKernel | Function,
        x: Tensor,
        y: Tensor,
        *,
        lengthscale: float | Tensor = 1.0,
        amplitude: float = 1.0,
        noise: float = 1.0,
    ) -> None:
        _check(x, y)
        if y.ndim != 2 or y.shape[1] != 1:
            raise ValueError(f"The y parameter must have shape (N, 1), got {tuple(y.shape)} instead.")
        noise = positive_number("noise", noise)
        constraint = gpytorch.constraints.GreaterThan(1e-8)
        likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=constraint).double()
        likelihood.noise = torch.tensor(noise**2, dtype=torch.float64)
        self.x, self.y = x.detach().double(), y.detach()[:, 0].double()
        self.gp = (
            _Exact(self.x, self.y, likelihood, _covariance(kernel, x.shape[1], lengthscale, amplitude))
            .to(x.device)
            .double()
        )
        self.objective = ExactMarginalLogLikelihood(likelihood, self.gp)

    def tune(self, *, steps: int = 200, lr: float = 0.05) -> "GaussianProcess":
        """Raises the log marginal likelihood by Adam, in lengthscale(s), amplitude and noise; returns the process itself."""
        optimizer = torch.optim.Adam(self.gp.parameters(), lr=positive_number("lr", lr))
        self.gp.train()
        for _ in range(whole_number("steps", steps)):
            optimizer.zero_grad()
            with _exact_algebra():
                loss = -self.objective(self.gp(self.x), self.y)
                loss.backward()
            optimizer.step()
        return self

    @property
    def log_marginal_likelihood(self) -> float:
        """Log marginal likelihood of the training data at the present hyperparameters."""
        self.gp.train()
        with torch.no_grad(), _exact_algebra():
            return float(self.objective(self.gp(self.x), self.y)) * len(self.x)

    @property
    def hyperparameters(self) -> dict[str, Tensor]:
        """Lengthscale(s), amplitude and noise."""
        covariance = self.gp.covariance
        return {
            "lengthscale": covariance.base_kernel.lengthscale.detach()[0],
            "amplitude": covariance.outputscale.detach().sqrt(),
            "noise": self.gp.likelihood.noise.detach().sqrt()[0],
        }

    def predict(self, x: Tensor) -> GaussianPredictive:
        """Mean and variance of f at each input."""
        self.gp.eval()
        # Without debug mode GPyTorch does not object to predictions at the training inputs.
        with torch.no_grad(), _exact_algebra(), gpytorch.settings.debug(False):
            f = self.gp(_rows_like(self.x, x))
        return GaussianPredictive(f.mean[:, None], f.variance[:, None], self.hyperparameters["noise"])


def _exact_algebra() -> gpytorch.settings.fast_computations:
    """Cholesky everywhere: no conjugate gradients, no Lanczos."""
    return gpytorch.settings.fast_computations(covar_root_decomposition=False, log_prob=False, solves=False)


class _Variational(gpytorch.models.ApproximateGP):
    def __init__(self, inducing: Tensor, classes: int, covariance: gpytorch.kernels.Kernel) -> None:
        batch = torch.Size([classes])
        distribution = gpytorch.variational.CholeskyVariationalDistribution(len(inducing), batch_shape=batch)
        strategy = gpytorch.variational.VariationalStrategy(
            self, inducing, distribution, learn_inducing_locations=False
        )
        super().__init__(gpytorch.variational.IndependentMultitaskVariationalStrategy(strategy, num_tasks=classes))
        self.mean, self.covariance = gpytorch.means.ZeroMean(), covariance

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean(x), self.covariance(x))


class GaussianProcessClassifier:
    """Variational Gaussian process classification: one process for each class, softmax, every training input inducing.

    Args:
        kernel: A spectrum, an induced kernel, or any function of two sets of inputs.
        x: Training inputs, (N, d).
        y: Class labels, (N,).
        lengthscale: Initial lengthscale, a number or d of them.
        steps: Steps of Adam on the evidence lower bound, which moves lengthscale(s) and amplitude too.
        seed: Seed of the draws of the bound and of predictions.
    """

    def __init__(
        self,
        kernel: Spectrum | InducedKernel | Function,
        x: Tensor,
        y: Tensor,
        *,
        lengthscale: float | Tensor = 1.0,
        steps: int = 300,
        seed: int = 0,
    ) -> None:
        _check(x, y)
        if y.is_floating_point() or y.ndim != 1 or len(y.unique()) < 2 or int(y.min()) < 0:
            raise ValueError(
                f"The y parameter must hold integer labels from 0 of at least two classes, got {y.dtype} of shape {tuple(y.shape)} "
                f"with values {y.unique().tolist()[:5]}."
            )
        classes = int(y.max()) + 1
        self.seed = seed_number("seed", seed)
        self.x = x = x.detach().double()
        self.gp = _Variational(x, classes, _covariance(kernel, x.shape[1], lengthscale, 1.0)).to(x.device).double()
        likelihood = gpytorch.likelihoods.SoftmaxLikelihood(num_classes=classes, mixing_weights=False)
        objective = VariationalELBO(likelihood, self.gp, num_data=len(x))
        optimizer = torch.optim.Adam(self.gp.parameters(), lr=VARIATIONAL_RATE)
        self.gp.train()
        with torch.random.fork_rng(devices=[]), gpytorch.settings.num_likelihood_samples(20):
            torch.random.manual_seed(seed)
            for _ in range(whole_number("steps", steps)):
                optimizer.zero_grad()
                loss = -objective(self.gp(x), y)
                loss.backward()
                optimizer.step()

    def predict(self, x: Tensor, *, samples: int = 200) -> CategoricalPredictive:
        """Class probabilities, averaged over Gaussian draws of the processes."""
        samples = whole_number("samples", samples)
        self.gp.eval()
        with torch.no_grad():
            f = self.gp(_rows_like(self.x, x))
            std, mean = f.variance.sqrt(), f.mean
        generator = torch.Generator(device=mean.device).manual_seed(self.seed)
        shape = mean.shape
        draws = (
            mean + std * torch.randn(shape, generator=generator, dtype=mean.dtype, device=mean.device)
            for _ in range(samples)
        )
        return CategoricalPredictive.from_logits(draws)
