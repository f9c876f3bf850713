"""Checks of training data, before any work is done."""

import torch
from torch import Tensor

from bochner.likelihoods import Categorical
from bochner.models import Model


def check_data(model: Model, x: Tensor, y: Tensor) -> None:
    """Raises a ValueError that names what is wrong with the training data, if anything is."""
    if len(x) == 0 or len(x) != len(y):
        raise ValueError(
            f"The x and y parameters must have the same number of rows, at least 1, got {len(x)} and {len(y)} instead."
        )
    device = model.layer.weight.device
    for name, value in (("x", x), ("y", y)):
        if value.device != device:
            raise ValueError(
                f"The {name} parameter must be on the model's device, {device}, got {value.device} instead."
            )
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            count = int((~torch.isfinite(value)).sum())
            raise ValueError(
                f"The {name} parameter must be finite, got {count} NaN or infinite entries; drop or impute those rows first."
            )
    if x.dtype in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"The x parameter must be float32 or float64 (statistics overflow in less), got {x.dtype}; call x.float() first."
        )
    outputs = model.output.out_features
    if isinstance(model.likelihood, Categorical):
        if y.is_floating_point() or y.ndim != 1:
            raise ValueError(
                f"The y parameter must hold integer class labels of shape (N,), got {y.dtype} of shape {tuple(y.shape)} instead."
            )
        low, high = int(y.min()), int(y.max())
        if low < 0 or high >= outputs:
            raise ValueError(f"The y parameter must hold labels from 0 to {outputs - 1}, got {low} to {high} instead.")
        if low == high:
            raise ValueError(
                f"The y parameter must hold at least two classes, got only class {low}: there is nothing to learn."
            )
    elif y.shape[1:] != (outputs,):
        raise ValueError(f"The y parameter must have shape (N, {outputs}), got {tuple(y.shape)} instead.")
