"""The Triton kernels of ``fused``: the only file that imports Triton."""

# pyright: reportMissingImports=false
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

BLOCK = 1024  # entries that one program takes
SLOPE_ROWS, SLOPE_COLUMNS = 32, 128  # rows that a program sums over at a time, and columns that it takes, in ``slope``
SINE, TRAPEZOID, BUMP, MATERN, RELU = (tl.constexpr(kind) for kind in range(5))  # as in ``fused``


@triton.jit
def _wave(
    u_ptr, bias_ptr, mask_ptr, group_ptr, value_ptr, slope_ptr, size, width, a, b, c,
    KIND: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Value and slope of a wave at u + bias, entry by entry; a member has ``size`` entries and a bias for each column."""
    member = tl.program_id(1).to(tl.int64)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    u = tl.load(u_ptr + member * size + index, mask=inside).to(tl.float32)
    z = u + tl.load(bias_ptr + member * width + index % width, mask=inside)
    if KIND == SINE:
        value, slope = a * libdevice.sin(z), a * libdevice.cos(z)
    elif KIND == TRAPEZOID:
        offset = libdevice.rint(z) - z
        value = a - b * tl.abs(offset)
        slope = tl.where(offset > 0, b, tl.where(offset < 0, -b, 0.0))
        slope = tl.where((c < a) & (tl.abs(value) >= c), 0.0, slope)
        value = tl.minimum(tl.maximum(value, -c), c)
    elif KIND == BUMP:
        value = libdevice.exp(-z * z)
        slope = -2 * z * value
    elif KIND == MATERN:
        positive = tl.where(z > 0, z, 1.0)
        value = tl.where(z > 0, libdevice.exp(a + b * libdevice.log(positive) - c * positive), 0.0)
        slope = value * (b / positive - c)
    else:
        value, slope = tl.maximum(z, 0.0), z
    if MASKED:
        group = tl.load(group_ptr + member)
        value = value * tl.load(mask_ptr + group * size + index, mask=inside)
    tl.store(value_ptr + member * size + index, value, mask=inside)
    if KIND != RELU:
        tl.store(slope_ptr + member * size + index, slope, mask=inside)


def wave(
    u: Tensor,
    bias: Tensor,
    kernel_wave: tuple[int, float, float, float],
    dtype: torch.dtype,
    mask: Tensor | None,
    group: Tensor,
) -> tuple[Tensor, Tensor]:
    """Values and slopes of a wave at u + bias; under ReLU the slopes are an empty tensor.

    Args:
        u: Products of weights and inputs, (E, n, width).
        bias: Biases, (E, width).
        kernel_wave: Number of the wave, and its three constants.
        dtype: Type of the values and slopes.
        mask: Factors on the values of ReLU, (G, n, width); None for none.
        group: Which of the G masks each member has, (E,).
    """
    kind, *constants = kernel_wave
    u, bias = u.contiguous(), bias.contiguous()
    value = torch.empty_like(u, dtype=dtype)
    slope = u.new_empty(0) if kind == RELU.value else torch.empty_like(u, dtype=dtype)
    size = u[0].numel()
    launch: Any = _wave
    launch[triton.cdiv(size, BLOCK), len(u)](
        u, bias, u if mask is None else mask, group, value, slope, size, u.shape[-1], *constants,
        KIND=kind, MASKED=mask is not None, BLOCK=BLOCK,
    )  # fmt: skip
    return value, slope


@triton.jit
def _slope(
    grad_ptr, kept_ptr, inner_ptr, sum_ptr, rows, width, scale,
    RELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Gradient before a wave, and its sum over the rows: a program takes some columns of a member."""
    member = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        index = member * rows * width + row[:, None] * width + column[None, :]
        inside = (row[:, None] < rows) & (column[None, :] < width)
        grad = tl.load(grad_ptr + index, mask=inside, other=0.0).to(tl.float32)
        kept = tl.load(kept_ptr + index, mask=inside, other=0.0).to(tl.float32)
        inner = tl.where(kept > 0, scale * grad, 0.0) if RELU else grad * kept
        tl.store(inner_ptr + index, inner, mask=inside)
        total += tl.sum(inner, 0)
    tl.store(sum_ptr + member * width + column, total, mask=column < width)


def slope(grad: Tensor, slope_or_value: Tensor, dtype: torch.dtype, relu: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Gradients in u, (E, n, width), and in the biases, (E, width), from those in the values.

    Args:
        grad: Gradients in the values.
        slope_or_value: The slopes of the wave. Under ReLU its values: where one is 0 the slope is 0, elsewhere it is ``scale``.
        dtype: Type of the gradients in u.
        relu: Whether the wave is ReLU.
        scale: Slope of ReLU where it is not 0: 1, or the factor of dropout.
    """
    grad, (members, rows, width) = grad.contiguous(), grad.shape
    inner, total = torch.empty_like(grad, dtype=dtype), grad.new_empty(members, width, dtype=torch.float32)
    launch: Any = _slope
    launch[triton.cdiv(width, SLOPE_COLUMNS), members](
        grad, slope_or_value, inner, total, rows, width, scale, RELU=relu, ROWS=SLOPE_ROWS, COLUMNS=SLOPE_COLUMNS
    )
    return inner, total


@triton.jit
def _sgd(
    value_ptr,
    grad_ptr,
    momentum_ptr,
    copy_ptr,
    rate_ptr,
    size,
    momentum,
    decay,
    COPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A step of SGD with momentum for some entries of a member."""
    member = tl.program_id(1).to(tl.int64)
    within = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = within < size
    index = member * size + within
    value = tl.load(value_ptr + index, mask=inside)
    grad = tl.load(grad_ptr + index, mask=inside).to(tl.float32) + decay * value
    velocity = momentum * tl.load(momentum_ptr + index, mask=inside) + grad
    value -= tl.load(rate_ptr + member) * velocity
    tl.store(momentum_ptr + index, velocity, mask=inside)
    tl.store(value_ptr + index, value, mask=inside)
    if COPY:
        tl.store(copy_ptr + index, value, mask=inside)


def sgd_step(
    state: tuple[Tensor, Tensor, Tensor | None], grad: Tensor, rates: Tensor, momentum: float, decay: float
) -> None:
    """Moves a stack of parameters (E, ...) in place, its velocity, and a copy in less precision; all in one order in memory."""
    value, velocity, copy = state
    size = value[0].numel()
    block = min(4 * BLOCK, triton.next_power_of_2(size))
    launch: Any = _sgd
    launch[triton.cdiv(size, block), len(value)](
        value, grad, velocity, value if copy is None else copy, rates, size, momentum, decay,
        COPY=copy is not None, BLOCK=block,
    )  # fmt: skip
