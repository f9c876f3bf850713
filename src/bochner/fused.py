"""Bias and activation in one pass over memory, for stacks of networks that train on CUDA.

Plain operators go over the activations 11 times (sine) to 40 times (local Matérn), forward and backward: with 500 rows in a batch
that is most of a training step. A Triton kernel gives the value and the slope at once. Without CUDA or Triton the plain operators
are used; the two agree to rounding.
"""

import importlib.util
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from bochner import activations
from bochner.activations import MaternWave, TrapezoidWave
from bochner.networks import SeededDropout

SINE, TRAPEZOID, BUMP, MATERN, RELU = range(5)
Plan = tuple[int, float, float, float]  # which wave, and its three constants


def plan(wave: Callable[..., Any]) -> Plan | None:
    """What the kernel needs to know of a wave; None where it does not have that wave."""
    if isinstance(wave, TrapezoidWave):
        return TRAPEZOID, wave.height, wave.slope, wave.limit
    if isinstance(wave, MaternWave):
        return MATERN, wave.log_factor, wave.nu - 0.5, math.sqrt(2 * wave.nu)
    plain: dict[Any, Plan] = {
        activations._sine_wave: (SINE, math.sqrt(2), 0.0, 0.0),
        activations._bump_wave: (BUMP, 0.0, 0.0, 0.0),
        activations._relu_wave: (RELU, 0.0, 0.0, 0.0),
    }
    return plain.get(wave)


@cache
def available() -> bool:
    """Whether there is a GPU and a Triton to compile for it."""
    return torch.cuda.is_available() and importlib.util.find_spec("triton") is not None


class _BiasWave(torch.autograd.Function):
    """A wave at u + bias, for u (E, n, width) and bias (E, width)."""

    @staticmethod
    def forward(u: Tensor, bias: Tensor, how: Plan) -> tuple[Tensor, Tensor]:
        from bochner.fused_kernel import wave

        return wave(u, bias, how)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.relu = inputs[2][0] == RELU
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[0] if ctx.relu else output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (kept,) = ctx.saved_tensors  # the slope, or ReLU's value, which says as much
        inner = torch.ops.aten.threshold_backward(grad, kept, 0) if ctx.relu else grad * kept
        return inner, inner.sum(1), None

    @staticmethod
    def vmap(_: Any, in_dims: tuple[Any, ...], u: Tensor, bias: Tensor, how: Plan) -> tuple[Any, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        found = _BiasWave.apply(u.movedim(in_dims[0], 0), bias.movedim(in_dims[1], 0), how)
        return found, (0, None if how[0] == RELU else 0)


def bias_wave(u: Tensor, bias: Tensor, wave: Callable[..., Any]) -> Tensor:
    """The wave at u + bias: (n, width) and (width,) of one member under ``vmap``, or (E, n, width) and (E, width) of a stack."""
    how = plan(wave) if u.is_cuda and u.dtype == torch.float32 and available() else None
    if how is None:
        return wave(u + (bias if bias.ndim == 1 else bias[:, None]))
    return _BiasWave.apply(u, bias, how)[0]  # pyright: ignore[reportOptionalSubscript]


def is_plain(module: nn.Module) -> bool:
    """Whether a module is a sequence of linear layers with biases, ReLUs and dropouts, which ``sequence`` can run."""
    kinds = (nn.Linear, nn.ReLU, SeededDropout)
    return isinstance(module, nn.Sequential) and all(
        type(layer) in kinds and (not isinstance(layer, nn.Linear) or layer.bias is not None) for layer in module
    )


def sequence(module: nn.Sequential, numbers: dict[str, Tensor], x: Tensor) -> Tensor:
    """A plain sequence in training with stacked numbers (E, ...) on stacked inputs (E, n, d): each bias with the ReLU after it."""
    layers = list(module)
    for i, layer in enumerate(layers):
        if isinstance(layer, SeededDropout):
            x = x * numbers[f"{i}.mask"]
        elif isinstance(layer, nn.Linear):
            u, bias = torch.bmm(x, numbers[f"{i}.weight"].mT), numbers[f"{i}.bias"]
            last = i + 1 == len(layers) or not isinstance(layers[i + 1], nn.ReLU)
            x = u + bias[:, None] if last else bias_wave(u, bias, activations._relu_wave)
        elif i == 0 or not isinstance(layers[i - 1], nn.Linear):
            x = x.relu()
    return x
