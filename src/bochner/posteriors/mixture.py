"""Predictions that average a network, or a stack of them, over draws of its parameters."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from bochner.likelihoods import Gaussian
from bochner.models import Model
from bochner.predictive import CategoricalPredictive, GaussianPredictive, Predictive

Parameters = dict[str, Tensor]


@torch.no_grad()
def drawn_outputs(model: Model, drawn: Parameters, fixed: Parameters, x: Tensor) -> Tensor:
    """Outputs (S, E, n, c) for drawn parameters (S, E, ...) and fixed ones (E, ...), as one computation."""

    def single(drawn: Parameters, fixed: Parameters) -> Tensor:
        return functional_call(model, drawn | fixed, (x,))

    return vmap(vmap(single), in_dims=(0, None))(drawn, fixed)


def mixture(model: Model, outputs: Iterable[Tensor], noise: Tensor | None) -> Predictive:
    """The equal mixture over draws of the outputs, each (..., n, c)."""
    if isinstance(model.likelihood, Gaussian):
        assert noise is not None
        return GaussianPredictive.from_samples(torch.stack(list(outputs)), noise)
    return CategoricalPredictive.from_logits(outputs)
