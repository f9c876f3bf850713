"""Steps of fully connected networks, stacked, with few passes over memory on CUDA and with products in bfloat16.

Plain operators go over the activations 11 times (sine) to 40 times (local Matérn), forward and backward: with 500 rows in a batch
that is most of a training step. Triton kernels take a bias, a wave and a dropout mask at once, the slope with its sum over the
rows, and a step of SGD with the copy of the weights in bfloat16 that products read. Without CUDA or Triton plain operators are
used; the two agree to rounding.
"""

import importlib.util
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from bochner.networks import SeededDropout
from bochner.priors import activations
from bochner.priors.activations import MaternWave, TrapezoidWave

SINE, TRAPEZOID, BUMP, MATERN, RELU = range(5)  # numbers of the waves in the kernel
KernelWave = tuple[int, float, float, float]  # number of a wave in the kernel, and its three constants


def kernel_wave(wave: Callable[..., Any]) -> KernelWave | None:
    """Number and constants of a wave in the kernel; None where the kernel does not have it."""
    if isinstance(wave, TrapezoidWave):
        return TRAPEZOID, wave.height, wave.slope, wave.limit
    if isinstance(wave, MaternWave):
        return MATERN, wave.log_factor, wave.nu - 0.5, math.sqrt(2 * wave.nu)
    without_constants: dict[Any, KernelWave] = {
        activations._sine_wave: (SINE, math.sqrt(2), 0.0, 0.0),
        activations._bump_wave: (BUMP, 0.0, 0.0, 0.0),
        activations._relu_wave: (RELU, 0.0, 0.0, 0.0),
    }
    return without_constants.get(wave)


@cache
def available() -> bool:
    """Whether there is a GPU and a Triton to compile for it."""
    return torch.cuda.is_available() and importlib.util.find_spec("triton") is not None


@cache
def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether products in bfloat16 pay there: on a GPU with Triton, on processors with AVX-512 for them."""
    if device.type == "cuda":
        return available()
    return device.type == "cpu" and getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()


class Dropout:
    """Masks of a dropout layer, shared by the members of a group.

    Attributes:
        mask: Zero or 1/(1 − p), (G, n, width).
        group: Which mask each member has, (E,).
        scale: 1/(1 − p).
    """

    def __init__(self, mask: Tensor, group: Tensor, scale: float) -> None:
        self.mask, self.group, self.scale = mask, group, scale


class _BiasWave(torch.autograd.Function):
    """A wave at u + bias, for u (E, n, width) and bias (E, width)."""

    @staticmethod
    def forward(
        u: Tensor, bias: Tensor, in_kernel: KernelWave, dtype: torch.dtype, dropout: Dropout | None
    ) -> tuple[Tensor, Tensor]:
        from bochner.training.fused_kernel import wave

        mask, group = (None, bias) if dropout is None else (dropout.mask, dropout.group)
        return wave(u, bias, in_kernel, dtype, mask, group)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        u, _, in_kernel, _, dropout = inputs
        ctx.relu, ctx.dtype, ctx.scale = in_kernel[0] == RELU, u.dtype, 1.0 if dropout is None else dropout.scale
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[0] if ctx.relu else output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        from bochner.training.fused_kernel import slope

        # The value for ReLU: where it is 0 the slope is 0, elsewhere the slope is constant.
        (slope_or_value,) = ctx.saved_tensors
        return *slope(grad, slope_or_value, ctx.dtype, ctx.relu, ctx.scale), None, None, None


def bias_wave(
    u: Tensor,
    bias: Tensor,
    wave: Callable[..., Any],
    *,
    dtype: torch.dtype | None = None,
    dropout: Dropout | None = None,
) -> Tensor:
    """The wave at u + bias, for u (E, n, width) and bias (E, width).

    Args:
        u: Products of weights and inputs.
        bias: What is added to each of their rows.
        wave: The activation's wave.
        dtype: Type of the result; by default that of u.
        dropout: Mask that the values are multiplied by; only ReLU takes one.
    """
    in_kernel = kernel_wave(wave) if u.is_cuda and u.dtype != torch.float64 and available() else None
    if in_kernel is not None:
        return _BiasWave.apply(u, bias, in_kernel, dtype or u.dtype, dropout)[0]  # pyright: ignore[reportOptionalSubscript]
    value = wave(u + bias[:, None])
    return (value if dropout is None else value * dropout.mask[dropout.group]).to(dtype or u.dtype)


class _WideProduct(torch.autograd.Function):
    """x W' for x (E, n, k) and W (E, c, k) in bfloat16, the result in float32."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return torch.bmm(x, weight.mT, out_dtype=torch.float32)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:  # noqa: ARG004
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        grad = grad.to(x.dtype)
        return torch.bmm(grad, weight), torch.bmm(grad.mT, x)


def wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """The products x W', (E, n, k) and (E, c, k) to (E, n, c); in float32 where the factors have less."""
    if x.dtype != torch.bfloat16:
        return torch.bmm(x, weight.mT)
    if not x.is_cuda:
        return torch.bmm(x.float(), weight.float().mT)
    return _WideProduct.apply(x, weight)  # pyright: ignore[reportReturnType]


def is_plain(module: nn.Module) -> bool:
    """Whether a module is a sequence of linear layers with biases, ReLUs and dropouts after ReLUs: what ``sequence`` can run."""
    if not isinstance(module, nn.Sequential):
        return False
    layers = list(module)
    for before, layer in zip([None, *layers], layers, strict=False):
        if type(layer) is nn.Linear and layer.bias is not None:
            continue
        follows = {nn.ReLU: nn.Linear, SeededDropout: nn.ReLU}
        if type(layer) not in follows or type(before) is not follows[type(layer)]:
            return False
    return len(layers) > 0


def sequence(module: nn.Sequential, parameters: dict[str, Tensor], x: Tensor, dropouts: dict[str, Dropout]) -> Tensor:
    """Outputs of a plain sequence in training, with stacked parameters (E, ...), on stacked inputs (E, n, d).

    Products are in the type of the weights; the outputs are in that of the biases.
    """
    layers = list(module)
    linears = [i for i, layer in enumerate(layers) if isinstance(layer, nn.Linear)]
    for i in linears:
        weight, bias = parameters[f"{i}.weight"], parameters[f"{i}.bias"]
        has_relu = i + 1 < len(layers) and isinstance(layers[i + 1], nn.ReLU)
        dropout = dropouts.get(f"{i + 2}")
        x = x.to(weight.dtype)
        if i == linears[-1]:
            u = wide_product(x, weight)
            x = bias_wave(u, bias, activations._relu_wave, dropout=dropout) if has_relu else u + bias[:, None]
        else:
            u = torch.bmm(x, weight.mT)
            x = (
                bias_wave(u, bias, activations._relu_wave, dropout=dropout)
                if has_relu
                else (u + bias[:, None]).to(u.dtype)
            )
    return x


def momentum_sgd(
    state: tuple[Tensor, Tensor, Tensor | None], grad: Tensor, rates: Tensor, *, momentum: float, decay: float
) -> None:
    """A step of SGD for a stack of parameters (E, ...), in place, each member at its rate.

    Args:
        state: The parameters, their velocity, and a copy of them in less precision, if there is one; all, and the gradient, in
            one order in memory, the members first.
        grad: The gradient.
        rates: The learning rate of each member, (E,).
        momentum: What is left of the velocity.
        decay: Weight decay.
    """
    value, velocity, copy = state
    if value.is_cuda and available():
        from bochner.training.fused_kernel import sgd_step

        sgd_step(state, grad, rates, momentum, decay)
        return
    velocity.mul_(momentum).add_(grad).add_(value, alpha=decay)
    value.sub_(rates.to(value).reshape(-1, *[1] * (value.ndim - 1)) * velocity)
    if copy is not None:
        copy.copy_(value)
