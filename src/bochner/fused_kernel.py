"""The Triton kernel of ``fused``: the only file that imports Triton."""

# pyright: reportMissingImports=false
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

BLOCK = 1024  # entries that one program takes
SINE, TRAPEZOID, BUMP, MATERN, RELU = (tl.constexpr(kind) for kind in range(5))


@triton.jit
def _wave(u_ptr, bias_ptr, value_ptr, slope_ptr, total, size, width, a, b, c, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Value and slope of a wave at u + bias, entry by entry; a member has ``size`` entries and a bias for each column."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    index = start + tl.arange(0, BLOCK)
    inside = index < total
    z = tl.load(u_ptr + index, mask=inside) + tl.load(bias_ptr + index // size * width + index % width, mask=inside)
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
    tl.store(value_ptr + index, value, mask=inside)
    if KIND != RELU:
        tl.store(slope_ptr + index, slope, mask=inside)


def wave(u: Tensor, bias: Tensor, plan: tuple[int, float, float, float]) -> tuple[Tensor, Tensor]:
    """Values and slopes at u (E, ..., width) with biases (E, width). Slopes of ReLU are not stored: the tensor is empty."""
    kind, *constants = plan
    u, bias = u.contiguous(), bias.contiguous()
    value = torch.empty_like(u)
    slope = u.new_empty(0) if kind == RELU.value else torch.empty_like(u)
    grid = (triton.cdiv(u.numel(), BLOCK),)
    launch: Any = _wave
    launch[grid](u, bias, value, slope, u.numel(), u[0].numel(), u.shape[-1], *constants, KIND=kind, BLOCK=BLOCK)
    return value, slope
