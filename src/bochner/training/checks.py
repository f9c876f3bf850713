"""Checks of training data, before any work is done."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bochner.arguments import as_sequence, dense_tensor, finite_tensor
from bochner.likelihoods import Categorical
from bochner.models import Model


def as_list(model: Model | Sequence[Model]) -> list[Model]:
    """One network or several as a list, after checking that they are Models."""
    models: list[Model] = as_sequence(model)
    if not models:
        raise ValueError("The model parameter must be a network or a list of at least one, got an empty list.")
    for member in models:
        check_model(member)
    parameters = [id(p) for member in models for p in member.parameters()]
    if len(set(parameters)) < len(parameters):
        raise ValueError(
            "The networks of a stack must not share parameters; give each a layer and likelihood of its own."
        )
    return models


def as_stack(model: Model | Sequence[Model]) -> list[Model]:
    """One network or several as a list, after checking that they differ in their numbers only.

    A stack computes with the first network's activation, spectrum, likelihood and structure.
    """
    models = as_list(model)

    def description(m: Model) -> tuple[object, ...]:
        shapes = [(n, p.shape, p.requires_grad) for n, p in m.named_parameters()]
        return m.layer.activation, m.layer.spectrum, repr(m), m.extractor_precision, shapes

    for i, member in enumerate(models[1:], start=1):
        if description(member) != description(models[0]):
            raise ValueError(
                f"The networks of a stack must have the same structure, prior and trainable parameters, but number {i} differs."
            )
    return models


def equal_runs(values: Sequence[object]) -> list[slice]:
    """Slices over which consecutive values are equal."""
    ends = [i for i in range(1, len(values) + 1) if i == len(values) or values[i] != values[i - 1]]
    return [slice(start, stop) for start, stop in zip([0, *ends], ends, strict=False)]


def activation_runs(models: Sequence[Model]) -> list[slice]:
    """Consecutive members of one activation, after checking that nothing else differs but the spectrum and the numbers."""

    def head(m: Model) -> tuple[object, ...]:
        shapes = [(n, p.shape, p.requires_grad) for n, p in m.layer.named_parameters()]
        return m.layer.activation, type(m.layer), shapes

    def rest(m: Model) -> tuple[object, ...]:
        shapes = [(n, p.shape, p.requires_grad) for n, p in m.named_parameters() if not n.startswith("layer.")]
        return repr(m.extractor), repr(m.likelihood), repr(m.output), m.precisions(), shapes

    first = rest(models[0])
    for i, member in enumerate(models[1:], start=1):
        if rest(member) != first:
            raise ValueError(
                "The networks of a stack must have the same extractor, outputs, likelihood and Gaussian priors; "
                f"number {i} differs."
            )
    return equal_runs([head(m) for m in models])


def check_model(model: object) -> None:
    """Raises a ValueError unless the network is a Model, which has a likelihood and a prior."""
    if not isinstance(model, Model):
        raise ValueError(
            f"The model parameter must be a bochner Model, got {type(model).__name__} instead; "
            "swap_head makes a Model of a network, Model(layer, outputs, likelihood, extractor=network) too."
        )


def check_data(model: Model, x: Tensor, y: Tensor, *, whole: bool = True) -> None:
    """Raises a ValueError that says what is wrong with training data: whole, or a batch of them.

    One row of whole data is put through the network, to see that it takes such rows.
    """
    check_model(model)
    device = model.layer.weight.device
    sizes = [len(v) if v.ndim else 0 for v in (dense_tensor("x", x), dense_tensor("y", y))]
    if sizes[0] == 0 or sizes[0] != sizes[1]:
        raise ValueError(
            f"The x and y parameters must have the same number of rows, at least 1, got {sizes[0]} and {sizes[1]} instead."
        )
    for name, value in (("x", x), ("y", y)):
        if value.device != device:
            raise ValueError(
                f"The {name} parameter must be on the model's device, {device}, got {value.device} instead."
            )
        finite_tensor(name, value)
    _check_types(model, x, y)
    _check_targets(model, y, whole=whole)
    if whole:
        check_takes(model, x)


def check_takes(model: Model, x: Tensor) -> None:
    """Raises a ValueError unless the network takes a row such as the first one; the network stays as it was."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad():
            model.eval()(x[:1])
            _check_end(model.extractor, x[:1])
    finally:
        for module, training in modes:
            module.training = training


def _check_end(extractor: nn.Module, x: Tensor) -> None:
    """Raises a ValueError where a network whose last layer was swapped returns something else than what that layer would see."""
    name = getattr(extractor, "swapped_layer", None)
    if name is None:
        return
    seen: list[Tensor] = []
    with extractor.get_submodule(name).register_forward_hook(lambda *call: seen.append(call[-1].clone())):
        outputs = extractor(x)
    if not seen or seen[-1].numel() != outputs.numel() or not torch.equal(seen[-1].flatten(), outputs.flatten()):
        raise ValueError(
            f"The model parameter must end with the layer {name!r} that swap_head replaced, but what the network returns is not "
            "what this layer saw. Take away what comes after it, such as a softmax, or name the last layer in head=."
        )


def _check_types(model: Model, x: Tensor, y: Tensor) -> None:
    dtype = model.layer.weight.dtype
    if x.dtype in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"The x parameter must be float32 or float64 (statistics overflow in less), got {x.dtype}; call x.float() first."
        )
    for name, value in (("x", x), ("y", y)):
        if value.is_floating_point() and value.dtype != dtype:
            raise ValueError(
                f"The {name} parameter must have the model's type, {dtype}, got {value.dtype}; convert one of them."
            )


def _check_targets(model: Model, y: Tensor, *, whole: bool) -> None:
    outputs = model.output.out_features
    if isinstance(model.likelihood, Categorical):
        if y.is_floating_point() or y.ndim != 1:
            raise ValueError(
                f"The y parameter must hold integer class labels of shape (N,), got {y.dtype} of shape {tuple(y.shape)} instead."
            )
        low, high = int(y.min()), int(y.max())
        if low < 0 or high >= outputs:
            raise ValueError(f"The y parameter must hold labels from 0 to {outputs - 1}, got {low} to {high} instead.")
        if low == high and whole:
            raise ValueError(
                f"The y parameter must hold at least two classes, got only class {low}: there is nothing to learn."
            )
    elif not y.is_floating_point() or y.shape[1:] != (outputs,):
        raise ValueError(
            f"The y parameter must hold floats of shape (N, {outputs}), got {y.dtype} of shape {tuple(y.shape)} instead."
        )
