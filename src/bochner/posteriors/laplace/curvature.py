"""Structures of the Gauss–Newton matrix of a network: Kronecker-factored, diagonal and full. The formulas are in the package."""
# torch.linalg and other parts of torch declare no types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from bochner.arguments import generator_device
from bochner.posteriors.closed_form import cholesky
from bochner.posteriors.laplace.taps import Tap

LayerTensors = list[tuple[Tensor, ...]]  # the tensors of every layer; under ``Full`` of all layers together


def normal(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard normal numbers of the type and on the device of ``like``, from a generator on any device."""
    device = like.device if generator is None else generator_device(generator)
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=device).to(like.device)


def _jacobian(rows: Tensor, grads: Tensor) -> Tensor:
    """Σ_t g ā' of each row: (n, T, in) and (c, n, T, out) to (c, n, out, in)."""
    return torch.einsum("cnto,nti->cnoi", grads, rows)


class Curvature(ABC):
    """A structure of the precision matrix of the weights, such as block-diagonal by layers.

    The *state* is what sampling and prediction need of the precision. ``statistics`` and ``variance`` see one network, for they run
    under vmap; all others see the stack of networks.
    """

    def __init__(self, layers: list[Tap]) -> None:
        self.layers = layers

    @abstractmethod
    def statistics(self, rows: list[Tensor], grads: list[Tensor]) -> LayerTensors:
        """What is summed over chunks of rows, for each layer.

        Args:
            rows: Inputs of each layer, (n, T, fan_in).
            grads: Gradients in its pre-activations, weighted by a root of the likelihood's Hessian, (c, n, T, fan_out).
        """

    @abstractmethod
    def finish(self, total: LayerTensors, count: int) -> LayerTensors:
        """The state under the prior that the network was trained with, from sums over ``count`` rows."""

    @abstractmethod
    def with_prior(self, state: LayerTensors, multipliers: Sequence[float]) -> LayerTensors:
        """The state where the prior precision of each layer's weights is its multiplier times as large."""

    @abstractmethod
    def log_volume(self, state: LayerTensors, multipliers: Sequence[float]) -> Tensor:
        """Half the log determinant of the precision minus half that of the prior's, in nats, (E,)."""

    @abstractmethod
    def sample(self, state: LayerTensors, num: int, generator: torch.Generator | None) -> list[Tensor]:
        """Draws of the weights minus the MAP weights, (num, E, fan_out, fan_in) for each layer."""

    @abstractmethod
    def variance(self, state: LayerTensors, rows: list[Tensor], grads: list[Tensor]) -> Tensor:
        """Covariance of the linearised outputs, (n, c, c)."""


def _weighted_outer(rows: Tensor, grads: Tensor, variance: Tensor) -> Tensor:
    """Σ_oi J_c J_d v of a layer whose weights have independent variances v (out, in): (n, c, c)."""
    if rows.shape[1] == 1:
        weighted = (rows[:, 0].square() @ variance.mT)[None] * grads[:, :, 0]
        return torch.einsum("cno,dno->ncd", weighted, grads[:, :, 0])
    j = _jacobian(rows, grads)
    return torch.einsum("cnoi,dnoi->ncd", j * variance, j)


class Kron(Curvature):
    """A ⊗ B for each layer, kept as eigenbases and the standard deviation of each pair."""

    def statistics(self, rows: list[Tensor], grads: list[Tensor]) -> LayerTensors:
        """ΣT⁻¹āā' and Σgg'."""
        pairs: LayerTensors = []
        for r, g in zip(rows, grads, strict=True):
            a, b = r.flatten(0, 1), g.flatten(0, 2)
            pairs.append(((a.mT @ a).double() / r.shape[1], (b.mT @ b).double()))
        return pairs

    def finish(self, total: LayerTensors, count: int) -> LayerTensors:
        """Eigendecompositions, in the precision of the network."""
        self.factors = [(a / count, b) for a, b in total]
        state: LayerTensors = []
        for tap, (a, b) in zip(self.layers, self.factors, strict=True):
            dtype = tap.weight.dtype
            # In units of the prior's standard deviation every weight has prior precision 1.
            unit = tap.precisions(a).rsqrt()
            values_a, vectors_a = torch.linalg.eigh((unit[:, None] * a * unit).to(dtype))
            values_b, vectors_b = torch.linalg.eigh(b.to(dtype))
            values_a, values_b = values_a.clamp(min=0), values_b.clamp(min=0)
            variance = self._precision(values_a, values_b).reciprocal()
            part = (vectors_b, unit[:, None].to(dtype) * vectors_a, variance)
            # Laid out as a file lays it out: then a posterior that is read back predicts the same bits.
            state.append(tuple(t.contiguous() for t in part))
        return state

    def _precision(self, values_a: Tensor, values_b: Tensor) -> Tensor:
        """Precision of every pair of eigenvectors, in units of the prior."""
        return values_b[..., :, None] * values_a[..., None, :] + 1

    def with_prior(self, state: LayerTensors, multipliers: Sequence[float]) -> LayerTensors:
        """The eigenbases stay: in units of the prior the precision of a pair is ba + m instead of ba + 1."""
        pairs = zip(state, multipliers, strict=True)
        return [(u_b, u_a, ((v.reciprocal() - 1).clamp(min=0) + m).reciprocal()) for (u_b, u_a, v), m in pairs]

    def log_volume(self, state: LayerTensors, multipliers: Sequence[float]) -> Tensor:
        """−½ Σ log(v m), with v the variance of a pair in units of the prior at multiplier 1."""
        parts = [-0.5 * (v.double() * m).log().sum((-2, -1)) for (_, _, v), m in zip(state, multipliers, strict=True)]
        return torch.stack(parts).sum(0)

    def sample(self, state: LayerTensors, num: int, generator: torch.Generator | None) -> list[Tensor]:
        """U_B (z / √precision) U_A'."""
        return [u_b @ (normal((num, *v.shape), v, generator) * v.sqrt()) @ u_a.mT for u_b, u_a, v in state]

    def variance(self, state: LayerTensors, rows: list[Tensor], grads: list[Tensor]) -> Tensor:
        """Rows and gradients turned into the eigenbases, where the weights are independent."""
        parts = zip(rows, grads, state, strict=True)
        return torch.stack([_weighted_outer(r @ u_a, g @ u_b, v) for r, g, (u_b, u_a, v) in parts]).sum(0)


class FactoredKron(Kron):
    """(A + π) ⊗ (B + 1/π) for each layer, with π² the ratio of mean eigenvalues: the prior is part of both factors."""

    def _precision(self, values_a: Tensor, values_b: Tensor) -> Tensor:
        tiny = torch.finfo(values_b.dtype).tiny
        ratio = values_a.mean(-1, keepdim=True) / values_b.mean(-1, keepdim=True).clamp(min=tiny)
        pi = ratio.sqrt().clamp(1e-6, 1e6)
        return (values_b + 1 / pi)[..., :, None] * (values_a + pi)[..., None, :]

    def with_prior(self, state: LayerTensors, multipliers: Sequence[float]) -> LayerTensors:  # noqa: ARG002
        """Raises a ValueError: the prior cannot be separated from the factors."""
        raise ValueError(
            "The prior can be chosen under structure='kfac', but not under 'kfac_pi', where it is part of both factors."
        )


class Diagonal(Curvature):
    """The diagonal of the Gauss–Newton matrix."""

    def statistics(self, rows: list[Tensor], grads: list[Tensor]) -> LayerTensors:
        """Σ over rows and outputs of the squared Jacobian."""
        squares: LayerTensors = []
        for r, g in zip(rows, grads, strict=True):
            if r.shape[1] == 1:
                squares.append((g[:, :, 0].square().sum(0).mT @ r[:, 0].square(),))
            else:
                squares.append((_jacobian(r, g).square().sum((0, 1)),))
        return squares

    def finish(self, total: LayerTensors, count: int) -> LayerTensors:  # noqa: ARG002
        """The variance of every weight, under the prior that the network was trained with."""
        return [
            ((square + tap.precisions(square)).reciprocal(),) for tap, (square,) in zip(self.layers, total, strict=True)
        ]

    def with_prior(self, state: LayerTensors, multipliers: Sequence[float]) -> LayerTensors:
        """The variance of every weight, after (m − 1) τ is added to its precision."""
        return [
            ((v.reciprocal() + (m - 1) * tap.precisions(v)).reciprocal(),)
            for tap, (v,), m in zip(self.layers, state, multipliers, strict=True)
        ]

    def log_volume(self, state: LayerTensors, multipliers: Sequence[float]) -> Tensor:
        """−½ Σ log(v m τ), with v the variance of a weight."""
        parts = zip(self.layers, state, multipliers, strict=True)
        return torch.stack(
            [-0.5 * (v.double() * (m * tap.precisions(v))).log().sum((-2, -1)) for tap, (v,), m in parts]
        ).sum(0)

    def sample(self, state: LayerTensors, num: int, generator: torch.Generator | None) -> list[Tensor]:
        """Independent normal numbers."""
        return [normal((num, *v.shape), v, generator) * v.sqrt() for (v,) in state]

    def variance(self, state: LayerTensors, rows: list[Tensor], grads: list[Tensor]) -> Tensor:
        """Squared Jacobians times variances."""
        return torch.stack([_weighted_outer(r, g, v) for r, g, (v,) in zip(rows, grads, state, strict=True)]).sum(0)


class Full(Curvature):
    """The whole Gauss–Newton matrix over the covered layers together, in float64."""

    LIMIT = 20_000  # largest number of weights: their matrix then takes 3.2 GB

    def __init__(self, layers: list[Tap]) -> None:
        super().__init__(layers)
        self.shapes = [(len(tap.weight), tap.weight[0].numel() + tap.has_bias) for tap in layers]
        self.sizes = [out * fan_in for out, fan_in in self.shapes]
        if sum(self.sizes) > self.LIMIT:
            raise ValueError(
                f"A full posterior covers at most {self.LIMIT} weights, got {sum(self.sizes)}; use 'kfac' or 'last_layer'."
            )

    def _jacobians(self, rows: list[Tensor], grads: list[Tensor]) -> Tensor:
        return torch.cat([_jacobian(r, g).flatten(-2) for r, g in zip(rows, grads, strict=True)], -1).double()

    def statistics(self, rows: list[Tensor], grads: list[Tensor]) -> LayerTensors:
        """ΣJ'J with the likelihood's root in J."""
        j = self._jacobians(rows, grads).flatten(0, 1)
        return [(j.mT @ j,)]

    def finish(self, total: LayerTensors, count: int) -> LayerTensors:  # noqa: ARG002
        """The Cholesky factor of the precision, under the prior that the network was trained with."""
        ((ggn,),) = total
        self.ggn = ggn
        return self.with_prior([], [1.0] * len(self.layers))

    def _prior(self, multipliers: Sequence[float]) -> Tensor:
        """Prior precision of every weight."""
        parts = zip(self.layers, self.shapes, multipliers, strict=True)
        return torch.cat(
            [m * tap.precisions(self.ggn.new_zeros(fan_in)).repeat(out) for tap, (out, fan_in), m in parts]
        )

    def with_prior(self, state: LayerTensors, multipliers: Sequence[float]) -> LayerTensors:  # noqa: ARG002
        """The Cholesky factor of the precision."""
        return [(cholesky(self.ggn + torch.diag(self._prior(multipliers))),)]

    def log_volume(self, state: LayerTensors, multipliers: Sequence[float]) -> Tensor:
        """Σ log of the factor's diagonal, less half that of the prior."""
        ((factor,),) = state
        return factor.diagonal(dim1=-2, dim2=-1).log().sum(-1) - 0.5 * self._prior(multipliers).log().sum()

    def sample(self, state: LayerTensors, num: int, generator: torch.Generator | None) -> list[Tensor]:
        """L⁻ᵀz for standard normal z, cut into layers."""
        ((factor,),) = state
        noise = normal((num, *factor.shape[:-1], 1), factor, generator)
        draws = torch.linalg.solve_triangular(factor.mT, noise, upper=True)[..., 0]
        return [d.unflatten(-1, shape) for d, shape in zip(draws.split(self.sizes, -1), self.shapes, strict=True)]

    def variance(self, state: LayerTensors, rows: list[Tensor], grads: list[Tensor]) -> Tensor:
        """|L⁻¹J|²."""
        ((factor,),), j = state, self._jacobians(rows, grads)
        half = torch.linalg.solve_triangular(factor, j.flatten(0, 1).mT, upper=False).unflatten(-1, j.shape[:2])
        return torch.einsum("pcn,pdn->ncd", half, half).to(rows[0])
