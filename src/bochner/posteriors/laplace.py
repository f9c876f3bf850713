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
``tune_prior`` multiplies the precision of all weights, or that of each layer, by a factor m that suits held-out rows; or, without
any, by the one with the largest marginal likelihood,

$$ \log p(y) \approx \log p(y \mid \theta^*) - \tfrac12 \sum_l m_l \|\theta^*_l\|^2_{\tau_l}
   - \tfrac12 \log |H| + \tfrac12 \log |m\tau| , $$

which is exact for a linear network with Gaussian noise. Eigenbases do not depend on m, so trying another one costs one prediction,
or none. For classes held-out rows also choose a temperature of at least 1, by which the outputs of every draw are divided; a
smaller one would make the network surer everywhere, and so where it has seen nothing.

A list of networks of one shape is treated as one stack: every array then has a leading dimension E, and nothing loops over
the members.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.utils._pytree import tree_map

from bochner.arguments import as_sequence, dense_tensor, positive_number, shown, whole_number
from bochner.errors import one_of
from bochner.layers import StationaryLayer
from bochner.likelihoods import Gaussian
from bochner.models import Model
from bochner.posteriors.closed_form_classifier import average_classes, seed_of
from bochner.posteriors.curvature import Curvature, Diagonal, FactoredKron, Full, Kron, LayerTensors
from bochner.posteriors.mixture import Parameters, drawn_outputs, mixture
from bochner.posteriors.taps import Listener, Tap, likelihood_root, taps, unit_cotangents
from bochner.predictive import GaussianPredictive, Predictive, not_spoken_against
from bochner.training.checks import as_stack, check_data
from bochner.training.loaders import Batches, TensorOrLoader, over_batches

CHUNK = 256  # held-out rows that are processed at a time
SEARCH_DRAWS = 32  # draws of the outputs of a held-out row, for each prior and temperature that is tried
TEMPERATURE_SPREAD = (
    0.5  # prior standard deviation of the log temperature: most temperatures are within a factor of 2 of 1
)
MULTIPLIERS = tuple(
    10.0 ** (k / 2) for k in range(-4, 13)
)  # factors on the prior precision that are tried, 0.01 to 10⁶

STRUCTURES: dict[str, type[Curvature]] = {
    "kfac": Kron,
    "kfac_pi": FactoredKron,
    "diagonal": Diagonal,
    "full": Full,
    "last_layer": Full,
}


def _positive_numbers(name: str, values: float | Sequence[float]) -> list[float]:
    """Positive numbers from one or several."""
    return [positive_number(name, value) for value in as_sequence(values)]


class Laplace:
    """Gaussian posterior over the weights of a trained network, or of a stack of them.

    Args:
        model: The network at its MAP estimate, or a list of networks of one shape. Dropout and BatchNorm act as in
            evaluation from here on.
        x: Training inputs, (N, ...), or one set for each network, (E, N, ...): all rows, streamed in chunks. Or a loader of (x, y).
        y: Training targets, with the same leading dimensions; None with a loader. They enter the marginal likelihood alone.
        structure: "kfac", "diagonal", "full" (small networks) or "last_layer" (full, on the output layer alone). "kfac_pi" is
            KFAC with the factored prior (A + π) ⊗ (B + 1/π), in units of the prior, with π² the ratio of mean eigenvalues;
            "kfac" adds the prior exactly, in the eigenbasis.
        prior: Precision of the extractor's weights before ``tune_prior``: "trained", that of the model; or "fan_in", that times the
            number of a layer's inputs, which suits layers of very different widths.
        chunk: Rows of a tensor that are processed at a time.

    Attributes:
        prior_multipliers: Factor on the prior precision of each covered layer.
        temperature: Number that the outputs of every draw are divided by, for classes.
    """

    def __init__(
        self,
        model: Model | Sequence[Model],
        x: TensorOrLoader,
        y: Tensor | None = None,
        *,
        structure: str = "kfac",
        prior: Literal["trained", "fan_in"] = "trained",
        chunk: int = 512,
    ) -> None:
        one_of("structure", structure, STRUCTURES)
        one_of("prior", prior, ("trained", "fan_in"))
        chunk, models = whole_number("chunk", chunk), as_stack(model)
        if y is not None:
            x, y = dense_tensor("x", x), dense_tensor("y", y)
        self.single = isinstance(model, Model)
        self.model = copy.deepcopy(models[0])  # a copy: its hooks and parameters are not shared
        self.own_data = y is not None and y.ndim == (3 if isinstance(self.model.likelihood, Gaussian) else 2)
        for member in models:
            member.eval()
        if self.own_data:
            assert isinstance(x, Tensor)
            assert y is not None
            sizes = [len(v) if v.ndim else 0 for v in (x, y)]
            if sizes != [len(models)] * 2:
                raise ValueError(
                    f"The x and y parameters must hold a set of rows for each of {len(models)} networks, got {sizes[0]} and "
                    f"{sizes[1]} sets instead."
                )
            for i, member in enumerate(models):
                check_data(member, x[i], y[i])
        parameters, buffers = stack_module_state(list[nn.Module](models))
        self.parameters: Parameters = {name: p.detach() for name, p in parameters.items()}
        self.buffers: Parameters = dict(buffers)
        if structure == "last_layer":
            self.layers = [Tap("output", self.model.output, float(self.model.layer.out_features), 1.0)]
        else:
            self.layers = taps(self.model, fan_in=prior == "fan_in")
        self.curvature = STRUCTURES[structure](self.layers)
        self.state = self._fit(x, y, chunk)
        self._as_trained = self.state
        self.prior_multipliers: list[float] = [1.0] * len(self.layers)
        self.temperature = 1.0

    def _fit(self, x: TensorOrLoader, y: Tensor | None, chunk: int) -> LayerTensors:
        """Sums the curvature and the log likelihood over all rows."""
        batches: Batches | None = None
        if self.own_data:
            assert isinstance(x, Tensor)
            assert y is not None
            pairs = zip(x.split(chunk, 1), y.split(chunk, 1), strict=True)
        else:
            pairs = batches = Batches(self.model, x, y, size=chunk)

        def statistics(parameters: Parameters, buffers: Parameters, xb: Tensor, yb: Tensor) -> LayerTensors:
            numbers = parameters | buffers
            f, rows, grads = self.listener(numbers, xb, partial(likelihood_root, self.model))
            own = {n.removeprefix("likelihood."): v for n, v in numbers.items() if n.startswith("likelihood.")}
            likelihood = functional_call(self.model.likelihood, own, (f.detach(), yb)).sum()
            return [*self.curvature.statistics(rows, grads), (likelihood.double(), likelihood.new_ones(()) * len(xb))]

        member = 0 if self.own_data else None
        total: LayerTensors | None = None
        for xb, yb in pairs:
            if total is None:
                self.listener = Listener(self.model, self.layers, xb[0] if self.own_data else xb)
            part = vmap(statistics, in_dims=(0, 0, member, member))(self.parameters, self.buffers, xb, yb)
            total = part if total is None else tree_map(torch.add, total, part)
        if batches is not None:
            total = tree_map(batches.over_processes, total)
        assert total is not None  # batches hold at least one row
        *sums, (self.log_likelihood, count) = total
        return self.curvature.finish(sums, int(count.flatten()[0]))

    def set_prior(self, multipliers: float | Sequence[float]) -> None:
        """Makes the prior precision of covered weights that many times what it was: one factor, or one for each layer."""
        every = _positive_numbers("multipliers", multipliers)
        every = every * len(self.layers) if len(every) == 1 else every
        if len(every) != len(self.layers):
            raise ValueError(
                f"The multipliers parameter must be one number or {len(self.layers)}, got {shown(multipliers)} instead."
            )
        self.state = self.curvature.with_prior(self._as_trained, every)
        self.prior_multipliers = every

    @property
    def log_marginal_likelihood(self) -> Tensor:
        """Laplace's approximation of the evidence under the present prior, (E,) or a number; see the module's page.

        The model layer, where it is covered, counts as if its prior were Gaussian.
        """
        quadratic = torch.zeros_like(self.log_likelihood)
        for tap, multiplier in zip(self.layers, self.prior_multipliers, strict=True):
            weights = tap.weights(self.parameters).double()
            quadratic = quadratic + multiplier * (tap.precisions(weights) * weights.square()).sum((-2, -1))
        value = self.log_likelihood - 0.5 * quadratic - self.curvature.log_volume(self.state, self.prior_multipliers)
        return self._members(value)

    def tune_prior(
        self,
        x: TensorOrLoader | None = None,
        y: Tensor | None = None,
        *,
        per_layer: bool = False,
        multipliers: Sequence[float] = MULTIPLIERS,
    ) -> list[float]:
        """Chooses the multipliers of the prior precision, and for classes the temperature.

        With held-out rows it is the smallest multiplier, and so the widest posterior, whose log probability of these rows is
        within a standard error of the best. A narrow posterior may be as good near the data; elsewhere it is too sure.
        Without them it is the one with the largest marginal likelihood; the model layer, whose weights and phases are not
        Gaussian, then keeps the prior that it has, and so does the temperature.

        Args:
            x: Held-out inputs, a few hundred are enough; or a loader of (x, y). None for the marginal likelihood.
            y: Their targets; None with a loader.
            per_layer: Whether each layer then gets a multiplier of its own, one after the other: the best for these rows.
            multipliers: Those to try.

        Returns:
            The multipliers, one for each covered layer, which predictions then use. A stack of networks shares them.
        """
        tried = sorted(_positive_numbers("multipliers", multipliers))
        if not tried:
            raise ValueError("The multipliers parameter must hold at least one number, got none.")
        if x is None:
            _tune_by_evidence(self, tried, per_layer)
        else:
            _tune_by_rows(self, Batches(self.model, x, y, size=CHUNK).of_all_processes(), tried, per_layer)
        return self.prior_multipliers

    def sample_weights(self, num: int, *, generator: torch.Generator | None = None) -> Parameters:
        """Draws of the named parameters of the covered layers, each (num, E, ...)."""
        drawn: Parameters = {}
        for tap, deviation in zip(self.layers, self.curvature.sample(self.state, num, generator), strict=True):
            weights = tap.weights(self.parameters)
            drawn |= tap.parameters(weights + deviation.to(weights))
        return drawn

    @over_batches
    @torch.no_grad()
    def predict_samples(
        self, x: Tensor, num: int = 50, *, group: int = 10, generator: torch.Generator | None = None
    ) -> Predictive:
        """Averages the network over posterior draws of its weights, ``group`` of them at a time."""
        num, group = whole_number("num", num), whole_number("group", group)
        moving = {name for tap in self.layers for name in tap.parameters(tap.weights(self.parameters))}
        fixed = {name: p for name, p in self.parameters.items() if name not in moving} | self.buffers

        def outputs() -> Iterator[Tensor]:
            for start in range(0, num, group):
                drawn = self.sample_weights(min(group, num - start), generator=generator)
                yield from drawn_outputs(self.model, drawn, fixed, x) / self.temperature

        return self._predictive(outputs())

    @torch.no_grad()
    def output_moments(self, x: Tensor, *, chunk: int = 256, own: bool = False) -> tuple[Tensor, Tensor]:
        """Mean (E, n, c) and covariance (E, n, c, c) of the linearised outputs at (n, ...), or at (E, n, ...) with ``own``."""
        self.model.eval()

        def moments(
            parameters: Parameters, buffers: Parameters, state: LayerTensors, xb: Tensor
        ) -> tuple[Tensor, Tensor]:
            f, rows, grads = self.listener(parameters | buffers, xb, unit_cotangents)
            return f, self.curvature.variance(state, rows, grads)

        parts = [
            vmap(moments, in_dims=(0, 0, 0, 0 if own else None))(self.parameters, self.buffers, self.state, xb)
            for xb in x.split(chunk, dim=1 if own else 0)
        ]
        return torch.cat([f for f, _ in parts], 1), torch.cat([v for _, v in parts], 1)

    @over_batches
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
            x: Inputs, (n, ...), or with ``own`` one set for each network, (E, n, ...); or a loader.
            samples: Draws of the outputs for classes.
            chunk: Rows that are processed at a time.
            own: Whether each network of the stack has its own inputs.
            generator: Source of the draws; the same ones every time by default.
        """
        samples, chunk = whole_number("samples", samples), whole_number("chunk", chunk)
        mean, covariance = self.output_moments(x, chunk=chunk, own=own)
        return self._from_moments(mean, covariance, samples=samples, generator=generator, temperature=self.temperature)

    @torch.no_grad()
    def _from_moments(
        self,
        mean: Tensor,
        covariance: Tensor,
        *,
        temperature: float,
        samples: int = 100,
        generator: torch.Generator | None = None,
    ) -> Predictive:
        """The prediction from mean (E, n, c) and covariance (E, n, c, c) of the outputs."""
        if isinstance(self.model.likelihood, Gaussian):
            mean, variance = self._members(mean), self._members(covariance.diagonal(dim1=-2, dim2=-1))
            return GaussianPredictive(mean, variance, self._noise())
        mean, covariance = self._members(mean) / temperature, self._members(covariance) / temperature**2
        return average_classes(mean, covariance, samples=samples, seed=seed_of(generator))

    def _members(self, value: Tensor) -> Tensor:
        """Drops the stack's dimension for a single network."""
        return value[0] if self.single else value

    def _noise(self) -> Tensor:
        return self._members(self.parameters["likelihood.log_noise"].exp())

    def _predictive(self, outputs: Iterator[Tensor]) -> Predictive:
        noise = self._noise() if isinstance(self.model.likelihood, Gaussian) else None
        return mixture(self.model, (self._members(f) for f in outputs), noise)


def _tune_by_evidence(posterior: Laplace, tried: list[float], per_layer: bool) -> None:
    gaussian = [i for i, tap in enumerate(posterior.layers) if not isinstance(tap.module, StationaryLayer)]
    for group in [[i] for i in gaussian] if per_layer else [gaussian]:

        def evidence(multiplier: float, group: list[int] = group) -> float:
            every = [multiplier if i in group else m for i, m in enumerate(posterior.prior_multipliers)]
            posterior.set_prior(every)
            return float(posterior.log_marginal_likelihood.sum())

        best = max(tried, key=evidence)
        evidence(best)


def _tune_by_rows(posterior: Laplace, rows: list[tuple[Tensor, Tensor]], tried: list[float], per_layer: bool) -> None:
    count = sum(len(y) for _, y in rows)
    if count < 2:
        raise ValueError(f"tune_prior needs at least two held-out rows, got {count} instead.")

    def held_out(multipliers: float | list[float]) -> tuple[Tensor, float]:
        """Log probability of every row, and the temperature for it."""
        posterior.set_prior(multipliers)
        return _best_temperature(posterior, [(posterior.output_moments(xb), yb) for xb, yb in rows])

    scores = [held_out(multiplier) for multiplier in tried]
    smallest = int(not_spoken_against(torch.stack([logs for logs, _ in scores])).nonzero().min())
    every, posterior.temperature = [tried[smallest]] * len(posterior.layers), scores[smallest][1]
    for i in range(len(posterior.layers)) if per_layer else ():
        others = {m: held_out([*every[:i], m, *every[i + 1 :]]) for m in tried}
        every[i] = max(others, key=lambda m: float(others[m][0].mean()))
        posterior.temperature = others[every[i]][1]
    posterior.set_prior(every)


def _best_temperature(posterior: Laplace, moments: list[tuple[tuple[Tensor, Tensor], Tensor]]) -> tuple[Tensor, float]:
    """Log probability of rows, and for classes the temperature under which they are most probable."""

    def logs(temperature: float) -> Tensor:
        parts = [
            posterior._from_moments(*own, temperature=temperature, samples=SEARCH_DRAWS).log_prob(y)
            for own, y in moments
        ]
        return torch.cat([part.double().reshape(-1, part.shape[-1]).mean(0) for part in parts])

    if isinstance(posterior.model.likelihood, Gaussian):
        return logs(1.0), 1.0
    count = sum(len(y) for _, y in moments)

    def loss(log_temperature: float) -> float:
        # Few rows, all of them right, would ask for any temperature.
        prior = 0.5 * (log_temperature / TEMPERATURE_SPREAD) ** 2 / count
        return prior - float(logs(math.exp(log_temperature)).mean())

    best = minimize_scalar(loss, bounds=(0.0, 3.0), method="bounded", options={"xatol": 0.01})
    temperature = math.exp(float(best.x)) if best.fun < loss(0.0) else 1.0
    return logs(temperature), temperature
