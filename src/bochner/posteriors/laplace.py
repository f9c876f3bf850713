r"""Laplace posteriors over the weights: Kronecker-factored, diagonal, full, or the last layer alone.

Around the MAP estimate the precision is the generalised Gauss–Newton matrix of the whole training set plus the prior's:
$H = \sum_n J_n^\top \Lambda_n J_n + \tau$. For a layer $z = W\bar a$ ($\bar a$ carries a 1 for the bias) KFAC takes

$$ \sum_n J_n^\top\Lambda_n J_n \approx A \otimes B, \qquad A = \tfrac{1}{NT}\sum_{n,t} \bar a \bar a^\top, \qquad
   B = \sum_{n,t,c} g_c g_c^\top, $$

with $g_c$ the gradient of output $c$, weighted by a root of $\Lambda_n$, in $z$, and $T$ the positions that share the weights.
In the eigenbases of A and B, in units of the prior's standard deviations, the prior is added exactly: the precision of entry
(i, j) is $b_i a_j + 1$. For the two likelihoods here the Gauss–Newton matrix is the Fisher information.

The linearised prediction $f(x) + J(x)(\theta - \theta^*)$ has variance $\sum_{ij} (U_B^\top G U_A)_{ij}^2 / (b_i a_j + \tau)$ for
each layer, where $G = \sum_t g_t \bar a_t^\top$. For a linear layer that is $\tilde g^2 \cdot M \cdot \tilde a^2$: two matrix
products and no Jacobian. A convolution sums over its positions, so that $G$ is formed there, for one layer and one chunk at a time.

The lengthscale and the noise stay outside: they are point estimates here.

The prior that a network was trained with is often far too wide for its weights: linearised predictions then are too unsure.
``tune_prior`` multiplies the precision of all weights by a factor that suits held-out rows. Eigenbases do not depend on it, so
trying another factor costs one prediction.

A list of networks of one shape is treated as one stack: every array then has a leading dimension E, and nothing loops over
the members.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import stack_module_state, vmap

from bochner.activations import unknown
from bochner.likelihoods import Gaussian
from bochner.models import Model
from bochner.posteriors.closed_form import batches
from bochner.posteriors.curvature import Curvature, Diagonal, Full, Kron, normal
from bochner.posteriors.mixture import Parameters, drawn_outputs, mixture
from bochner.posteriors.taps import Listener, likelihood_root, taps, unit_cotangents
from bochner.predictive import GaussianPredictive, Predictive, not_spoken_against
from bochner.validation import as_stack, check_data

MULTIPLIERS = tuple(10.0 ** (k / 2) for k in range(-4, 13))  # of the prior precision that are tried: 0.01 to a million


class Laplace:
    """Gaussian posterior over the weights of a trained network, or of a stack of them.

    Args:
        model: The network at its MAP estimate, or a list of networks of one shape. Dropout and BatchNorm act as in
            evaluation from here on.
        x: Training inputs, (N, ...), or one set for each network, (E, N, ...): all rows, streamed in chunks.
        y: Training targets, with the same leading dimensions. They do not enter the curvature, only the checks.
        structure: "kfac", "diagonal", "full" (small networks) or "last_layer" (full, on the output layer alone).
        damping: How the prior joins A ⊗ B under "kfac": "exact" in the eigenbasis, or "pi", the factored
            (A + π) ⊗ (B + 1/π), in units of the prior, with π² the ratio of mean eigenvalues.
        chunk: Rows that are processed at a time.
    """

    def __init__(
        self,
        model: Model | Sequence[Model],
        x: Tensor,
        y: Tensor,
        *,
        structure: str = "kfac",
        damping: Literal["exact", "pi"] = "exact",
        chunk: int = 512,
    ) -> None:
        kinds: dict[str, type[Curvature]] = {"kfac": Kron, "diagonal": Diagonal, "full": Full, "last_layer": Full}
        if structure not in kinds:
            raise ValueError(unknown("structure", structure, kinds))
        if damping not in ("exact", "pi"):
            raise ValueError(f"The damping parameter must be 'exact' or 'pi', got {damping!r} instead.")
        models = as_stack(model)
        self.single = isinstance(model, Model)
        self.model = models[0]
        self.own_data = y.ndim == (3 if isinstance(self.model.likelihood, Gaussian) else 2)
        for i, member in enumerate(models):
            check_data(member.eval(), x[i] if self.own_data else x, y[i] if self.own_data else y)
        self.parameters, self.buffers = stack_module_state(models)  # pyright: ignore[reportArgumentType]
        self.parameters = {name: p.detach() for name, p in self.parameters.items()}
        layers = taps(self.model)
        self.layers = [t for t in layers if t.module is self.model.output] if structure == "last_layer" else layers
        self.curvature = kinds[structure](self.layers, damping)
        self.listener = Listener(self.model, self.layers, x[0] if self.own_data else x)
        self.state = self._fit(x, chunk)
        self._as_trained, self.prior_multiplier = self.state, 1.0

    def _fit(self, x: Tensor, chunk: int) -> list[Any]:
        example = x[0] if self.own_data else x

        def statistics(parameters: Parameters, buffers: Parameters, xb: Tensor) -> list[Any]:
            _, rows, grads = self.listener(parameters | buffers, xb, lambda p, f: likelihood_root(self.model, p, f))
            return self.curvature.statistics(rows, grads)

        total: Any = None
        stream = x.split(chunk, dim=1) if self.own_data else x.split(chunk)
        for xb in stream:
            part = vmap(statistics, in_dims=(0, 0, 0 if self.own_data else None))(self.parameters, self.buffers, xb)
            total = (
                part
                if total is None
                else [[a + b for a, b in zip(t, p, strict=True)] for t, p in zip(total, part, strict=True)]
            )
        return self.curvature.finish(total, example.shape[0])

    def set_prior(self, multiplier: float) -> None:
        """Makes the prior precision of every covered weight ``multiplier`` times what the model says."""
        if not isinstance(multiplier, int | float) or not 0 < multiplier < math.inf:
            raise ValueError(f"The multiplier parameter must be positive and finite, got {multiplier!r} instead.")
        self.state = self.curvature.with_prior(self._as_trained, multiplier)
        self.prior_multiplier = multiplier

    def tune_prior(self, x: Tensor, y: Tensor, *, multipliers: Sequence[float] = MULTIPLIERS) -> float:
        """Chooses the multiplier of the prior precision by the log probability of rows that were not learnt from.

        It is the smallest one, and so the posterior the widest, that these rows do not speak against by more than a standard error:
        among rows like them a narrow posterior may do as well, elsewhere it is too sure.

        Args:
            x: Held-out inputs; a few hundred are enough.
            y: Their targets.
            multipliers: Those to try.

        Returns:
            The multiplier that was chosen, which predictions then use. For a stack of networks it is one for all.
        """
        check_data(self.model, x, y)
        if len(x) < 2 or len(multipliers) == 0:
            raise ValueError(
                f"tune_prior needs at least two rows and one multiplier, got {len(x)} and {len(multipliers)} instead."
            )

        def held_out(multiplier: float) -> Tensor:
            self.set_prior(multiplier)
            generator = torch.Generator(x.device).manual_seed(0)
            return self.predict(x, generator=generator).log_prob(y).double().reshape(-1, len(x)).mean(0)

        tried = sorted(multipliers)
        logs = torch.stack([held_out(multiplier) for multiplier in tried])
        self.set_prior(tried[int(not_spoken_against(logs).nonzero().min())])
        return self.prior_multiplier

    def sample_weights(self, num: int, *, generator: torch.Generator | None = None) -> Parameters:
        """Draws of the named parameters of the covered layers, each (num, E, ...)."""
        drawn: Parameters = {}
        for tap, deviation in zip(self.layers, self.curvature.sample(self.state, num, generator), strict=True):
            weights = tap.weights(self.parameters)
            drawn |= tap.parameters(weights + deviation.to(weights))
        return drawn

    @torch.no_grad()
    def predict_samples(
        self, x: Tensor, num: int = 50, *, group: int = 10, generator: torch.Generator | None = None
    ) -> Predictive:
        """Averages the network over posterior draws of its weights, ``group`` of them at a time."""
        moving = {name for tap in self.layers for name in tap.parameters(tap.weights(self.parameters))}
        fixed = {name: p for name, p in self.parameters.items() if name not in moving} | self.buffers

        def outputs() -> Iterator[Tensor]:
            for start in range(0, num, group):
                drawn = self.sample_weights(min(group, num - start), generator=generator)
                yield from drawn_outputs(self.model, drawn, fixed, x)

        return self._predictive(outputs())

    def output_moments(self, x: Tensor, *, chunk: int = 256, own: bool = False) -> tuple[Tensor, Tensor]:
        """Mean (E, n, c) and covariance (E, n, c, c) of the linearised outputs at (n, ...), or at (E, n, ...) with ``own``."""
        self.model.eval()

        def moments(parameters: Parameters, buffers: Parameters, state: list[Any], xb: Tensor) -> tuple[Tensor, Tensor]:
            f, rows, grads = self.listener(parameters | buffers, xb, unit_cotangents)
            return f, self.curvature.variance(state, rows, grads)

        parts = [
            vmap(moments, in_dims=(0, 0, 0, 0 if own else None))(self.parameters, self.buffers, self.state, xb)
            for xb in (x.split(chunk, dim=1) if own else (b for (b,) in batches(x, size=chunk)))
        ]
        return torch.cat([f for f, _ in parts], 1), torch.cat([v for _, v in parts], 1)

    @torch.no_grad()
    def predict(
        self,
        x: Tensor,
        *,
        samples: int = 100,
        chunk: int = 256,
        own: bool = False,
        generator: torch.Generator | None = None,
    ) -> Predictive:
        """Prediction of the linearised network: Gaussian for regression, averaged over draws of the outputs for classes.

        Args:
            x: Inputs, (n, ...), or with ``own`` one set for each network, (E, n, ...).
            samples: Draws of the outputs for classes.
            chunk: Rows that are processed at a time.
            own: Whether each network of the stack has its own inputs.
            generator: Source of randomness.
        """
        mean, covariance = self.output_moments(x, chunk=chunk, own=own)
        if isinstance(self.model.likelihood, Gaussian):
            mean, variance = self._members(mean), self._members(covariance.diagonal(dim1=-2, dim2=-1))
            return GaussianPredictive(mean, variance, self._noise())
        jitter = 1e-9 * torch.eye(mean.shape[-1], dtype=torch.float64, device=mean.device)
        factor = torch.linalg.cholesky(covariance.double() + jitter)
        draws = (mean + (factor @ normal((*mean.shape, 1), factor, generator))[..., 0].to(mean) for _ in range(samples))
        return self._predictive(draws)

    def _members(self, value: Tensor) -> Tensor:
        """Drops the stack's dimension for a single network."""
        return value[0] if self.single else value

    def _noise(self) -> Tensor:
        return self._members(self.parameters["likelihood.log_noise"].exp())

    def _predictive(self, outputs: Iterator[Tensor]) -> Predictive:
        noise = self._noise() if isinstance(self.model.likelihood, Gaussian) else None
        return mixture(self.model, (self._members(f) for f in outputs), noise)
