"""The Laplace posterior of a network, or of a stack of networks; the formulas are in :mod:`bochner.posteriors.laplace`."""
# torch.linalg and other parts of torch declare no types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.utils._pytree import tree_map

from bochner.arguments import as_sequence, dense_tensor, positive_number, shown, whole_number
from bochner.errors import one_of
from bochner.likelihoods import Gaussian
from bochner.models import Model
from bochner.posteriors.closed_form_classifier import average_classes, seed_of
from bochner.posteriors.laplace.curvature import Curvature, Diagonal, FactoredKron, Full, Kron, LayerTensors
from bochner.posteriors.laplace.taps import Listener, Tap, likelihood_root, taps, unit_cotangents
from bochner.posteriors.laplace.tuning import CHUNK_ROWS, MULTIPLIERS, tune_by_evidence, tune_by_rows
from bochner.posteriors.mixture import Parameters, drawn_outputs, mixture
from bochner.predictive import GaussianPredictive, Predictive
from bochner.training.batches import Batches, TensorOrLoader, over_batches
from bochner.training.checks import as_stack, check_data

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
        for member in models:
            member.eval()
        self.model = copy.deepcopy(models[0])  # a copy: its hooks and parameters are not shared
        self.own_data = y is not None and y.ndim == (3 if isinstance(self.model.likelihood, Gaussian) else 2)
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
            tensors = parameters | buffers
            f, rows, grads = self.listener(tensors, xb, partial(likelihood_root, self.model))
            noise = {n.removeprefix("likelihood."): v for n, v in tensors.items() if n.startswith("likelihood.")}
            likelihood = functional_call(self.model.likelihood, noise, (f.detach(), yb)).sum()
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
        factors = _positive_numbers("multipliers", multipliers)
        factors = factors * len(self.layers) if len(factors) == 1 else factors
        if len(factors) != len(self.layers):
            raise ValueError(
                f"The multipliers parameter must be one number or {len(self.layers)}, got {shown(multipliers)} instead."
            )
        self.state = self.curvature.with_prior(self._as_trained, factors)
        self.prior_multipliers = factors

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
            tune_by_evidence(self, tried, per_layer)
        else:
            tune_by_rows(self, Batches(self.model, x, y, size=CHUNK_ROWS).of_all_processes(), tried, per_layer)
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
        return self.predictive_of(mean, covariance, samples=samples, generator=generator, temperature=self.temperature)

    @torch.no_grad()
    def predictive_of(
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
