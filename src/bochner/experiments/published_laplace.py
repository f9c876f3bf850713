r"""The KFAC posterior of the paper's published code, to compare with its tables. Use it for nothing else.

$$ W = W^* + \tfrac{\mathrm{scale}}{N}\, L_B^{-\top} Z L_A^{-\top} $$

It takes A and B from the empirical Fisher of one batch with dropout on, has $\sqrt{5\cdot10^{-4}}$ on the diagonal of each in place
of a prior ($\sqrt{5\cdot10^{-4}/T}$ for a convolution with T positions), scale/N where Laplace has $1/\sqrt N$, and $L_A^{-\top}$
where $L_A^{-1}$ is right.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.utils._pytree import tree_map

from bochner.experiments.published import noises
from bochner.layers import StationaryLayer
from bochner.models import Model
from bochner.networks import SeededDropout
from bochner.posteriors.laplace.taps import Listener, Tap, taps
from bochner.priors.activations import link
from bochner.training.checks import as_stack
from bochner.training.randomness import counter_mask

Parameters = dict[str, Tensor]
Roots = list[tuple[Tensor, Tensor]]  # of each layer: L_A⁻¹ and L_B⁻¹

DAMPING = math.sqrt(5e-4)  # added to the diagonal of each factor


class PublishedLaplace:
    """The KFAC posterior of the published code, for a stack of networks that share their activation.

    Args:
        models: Trained networks of one structure.
        x: The batch that the curvature comes from, one for each network, (E, b, d).
        y: Its targets.
        num_data: The N that the scale is divided by.
        seeds: Seeds of the dropout masks, (E,).
    """

    def __init__(self, models: Sequence[Model], x: Tensor, y: Tensor, *, num_data: int, seeds: Tensor) -> None:
        self.models = [model.eval() for model in as_stack(models)]
        self.model, self.num_data = self.models[0], num_data
        parameters, self.buffers = stack_module_state(self.models)  # pyright: ignore[reportArgumentType]
        self.parameters = {name: p.detach() for name, p in parameters.items()}
        self.layers = taps(self.model)
        factors, positions = self._average_factors(x, y, seeds)
        damping = [DAMPING / math.sqrt(count) for count in positions]
        self.inverses = [
            (_inverse_root(a, each), _inverse_root(b, each)) for (a, b), each in zip(factors, damping, strict=True)
        ]

    def _masks(self, x: Tensor, seeds: Tensor) -> Parameters:
        """Dropout masks of every network for the batch (E, b, d), by the names of their buffers."""
        masks = {}
        for i, (name, module) in enumerate(self.model.named_modules()):
            if isinstance(module, SeededDropout):
                kept = counter_mask(seeds, i, x.shape[1] * module.width, module.p).to(x) / (1 - module.p)
                masks[f"{name}.mask"] = kept.reshape(len(x), x.shape[1], module.width)
        return masks

    def _average_factors(self, x: Tensor, y: Tensor, seeds: Tensor) -> tuple[list[tuple[Tensor, Tensor]], list[int]]:
        """A and B of each layer for every network, and the positions of each layer: 1 but for convolutions."""
        listener = Listener(self.model, self.layers, x[0])
        positions: list[int] = []

        def statistics(state: Parameters, inputs: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
            def slope(parameters: Parameters, f: Tensor) -> Tensor:
                noise = {
                    name.removeprefix("likelihood."): value
                    for name, value in parameters.items()
                    if name.startswith("likelihood.")
                }
                return grad(lambda g: functional_call(self.model.likelihood, noise, (g, targets)).sum())(f)[None]

            _, rows, grads = listener(state, inputs, slope)
            positions[:] = [each.shape[1] for each in rows]
            return [_factors(*each) for each in zip(self.layers, rows, grads, strict=True)]

        self.model.train()
        try:
            return vmap(statistics)(self.parameters | self.buffers | self._masks(x, seeds), x, y), positions
        finally:
            self.model.eval()

    @torch.no_grad()
    def outputs(self, x: Tensor, *, scales: Sequence[float], num: int) -> Iterator[Tensor]:
        """Outputs (len(scales), E, n, c) of each of ``num`` draws at inputs (E, n, d), for networks of linear layers.

        As in the code, draw i takes its noise from seed i: all networks and scales share it.
        """
        shrink = torch.tensor([scale / self.num_data for scale in scales], dtype=x.dtype, device=x.device)
        states = self.parameters | self.buffers

        def single(state: Parameters, roots: Roots, rows: Tensor, noise: list[Tensor]) -> Tensor:
            return self._perturbed(state, roots, noise, rows, shrink)

        networks = vmap(single, in_dims=(0, 0, 0, None))
        draws: Any = vmap(networks, in_dims=(None, None, None, 0))
        size, rows, group = self._portion(x, len(scales))

        def compute(some: Tensor, noise: list[Tensor]) -> Tensor:
            """Outputs (draws, E, scales, n, c) at some of the rows, a few networks at a time."""
            # The rows are repeated for every scale: one tall product in place of several.
            tall = some.repeat(1, len(scales), 1)
            parts = [
                draws(*tree_map(lambda t, i=i: t[i : i + size], (states, self.inverses, tall)), noise)
                for i in range(0, len(x), size)
            ]
            return torch.cat(parts, 1).unflatten(2, (len(scales), -1))

        for start in range(0, num, group):
            drawn = [self._noise(seed) for seed in range(start, min(start + group, num))]
            noise = [torch.stack(each) for each in zip(*drawn, strict=True)]
            yield from torch.cat([compute(some, noise) for some in x.split(rows, 1)], 3).transpose(1, 2)

    @staticmethod
    def _portion(x: Tensor, scales: int) -> tuple[int, int, int]:
        """Numbers of networks, rows and draws that are computed at a time, for inputs (E, n, d).

        A GPU takes all networks and about 200,000 rows, of one draw or several: with fewer its kernels would be short, more would
        not fit its memory. A CPU takes one draw and a few thousand rows, whose activations stay in its cache.
        """
        num, rows = x.shape[0], x.shape[1]
        if not x.is_cuda:
            return max(1, 2000 // (scales * rows)), rows, 1
        row_draws = max(1, 200_000 // (num * scales))
        return num, min(rows, row_draws), max(1, row_draws // rows)

    def _noise(self, seed: int) -> list[Tensor]:
        """The standard normal matrices of one draw, a layer after the other."""
        generator = torch.Generator(self.inverses[0][0].device).manual_seed(seed)
        return [
            torch.randn(b.shape[-1], a.shape[-1], generator=generator, dtype=a.dtype, device=a.device)
            for a, b in self.inverses
        ]

    @torch.no_grad()
    def networks(self, *, scale: float, num: int) -> Iterator[Parameters]:
        """Parameters (E, ...) of each of ``num`` draws, also for networks with convolutions."""
        for i in range(num):
            drawn = dict(self.parameters)
            for tap, (a, b), z in zip(self.layers, self.inverses, self._noise(i), strict=True):
                change = scale / self.num_data * b.mT @ z @ a.mT
                names = [f"{tap.name}.weight", *([f"{tap.name}.bias"] if tap.has_bias else [])]
                parts = (change[..., :-1], change[..., -1]) if tap.has_bias else (change,)
                for name, part in zip(names, parts, strict=True):  # phases move before their link
                    drawn[name] = drawn[name] + part.reshape(drawn[name].shape)
            yield drawn

    def _perturbed(self, state: Parameters, roots: Roots, noise: list[Tensor], x: Tensor, shrink: Tensor) -> Tensor:
        """Outputs of one network with every layer's weights moved, without forming the weights.

        The rows of a layer go through three thin products instead.
        """
        rows: dict[str, Tensor] = {}
        handles = []
        for tap, (a, b), z in zip(self.layers, roots, noise, strict=True):

            def keep_rows(_: nn.Module, args: tuple[Tensor, ...], tap: Tap = tap) -> None:
                rows[tap.name] = tap.rows(args[0])[:, 0]

            def move(
                _: nn.Module, __: object, f: Tensor, tap: Tap = tap, factors: tuple[Tensor, Tensor, Tensor] = (a, b, z)
            ) -> Tensor:
                return f + _change(tap, rows[tap.name], *factors, shrink)

            handles += [tap.module.register_forward_pre_hook(keep_rows), tap.nudged.register_forward_hook(move)]
        try:
            return functional_call(self.model, state, (x,))
        finally:
            for handle in handles:
                handle.remove()

    @property
    def noise(self) -> Tensor:
        """Noise of each network, (E,)."""
        return noises(self.models)


def _factors(tap: Tap, rows: Tensor, grads: Tensor) -> tuple[Tensor, Tensor]:
    """Averages over the batch of āā' and gg', in the units of the published code, whose weights leave out the wave's unit."""
    unit = tap.module.activation.unit if isinstance(tap.module, StationaryLayer) else 1.0
    a, b = rows.flatten(0, 1) / unit, grads.flatten(0, 2) * unit
    return a.mT @ a / len(a), b.mT @ b / len(b)


def _inverse_root(factor: Tensor, damping: float) -> Tensor:
    """L⁻¹ of a damped factor, (E, n, n); NaN for a diverged network, whose factor has none."""
    eye = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    lower, failed = torch.linalg.cholesky_ex(factor + damping * eye)
    lower = torch.where(failed[:, None, None] > 0, math.nan, lower)
    return torch.linalg.solve_triangular(lower, eye.expand_as(factor), upper=False)


def _change(tap: Tap, rows: Tensor, a: Tensor, b: Tensor, z: Tensor, shrink: Tensor) -> Tensor:
    """The change of a layer's pre-activations when its weights move by shrink · L_B⁻ᵀ Z L_A⁻ᵀ; phases move before their link.

    The rows hold one block for each element of ``shrink``.
    """
    num = len(rows) // len(shrink)
    scale = shrink.repeat_interleave(num)[:, None]
    if not tap.circular:
        return scale * _product(rows, a, z, b)
    layer: Any = tap.module
    flat = torch.cat([rows[:, :-1], torch.zeros_like(rows[:, -1:])], -1)
    bias = layer.bias + shrink[:, None] * ((a[-1] @ z.mT) @ b)
    turned = layer.activation.unit * (link(bias) - link(layer.bias))
    return scale * _product(flat, a, z, b) + turned.repeat_interleave(num, 0)


def _product(rows: Tensor, a: Tensor, z: Tensor, b: Tensor) -> Tensor:
    """Rows times L_A⁻¹ Z' L_B⁻¹, in the cheaper order: the three factors first, or the rows through each."""
    (fan_out, fan_in), num = z.shape, len(rows)
    if num * (fan_in**2 + fan_out**2) > fan_in * fan_out * (fan_in + fan_out):
        return rows @ ((a @ z.mT) @ b)
    return ((rows @ a) @ z.mT) @ b
