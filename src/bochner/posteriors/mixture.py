"""Predictions that average a network, or a stack of them, over draws of its parameters."""

import threading
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from bochner.likelihoods import Gaussian
from bochner.models import Model
from bochner.predictive import CategoricalPredictive, GaussianPredictive, Predictive

Parameters = dict[str, Tensor]
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)  # layers with running statistics
EXCHANGE_LOCK = threading.Lock()  # held while a module computes with exchanged parameters: one thread at a time


@torch.no_grad()
def drawn_outputs(model: Model, drawn: Parameters, fixed: Parameters, x: Tensor, *, own: bool = False) -> Tensor:
    """Outputs (S, E, n, c) for drawn parameters (S, E, ...) and fixed ones (E, ...), as one computation.

    Inputs are (n, ...), or one set for each network, (E, n, ...), with ``own``.
    """

    def single(drawn: Parameters, fixed: Parameters, x: Tensor) -> Tensor:
        return functional_call(model, drawn | fixed, (x,))

    members = vmap(single, in_dims=(0, 0, 0 if own else None))
    with EXCHANGE_LOCK:
        return vmap(members, in_dims=(0, None, None))(drawn, fixed, x)


def mixture(model: Model, outputs: Iterable[Tensor], noise: Tensor | None) -> Predictive:
    """The equal mixture over draws of the outputs, each (..., n, c)."""
    if isinstance(model.likelihood, Gaussian):
        assert noise is not None
        return GaussianPredictive.from_samples(torch.stack(list(outputs)), noise)
    return CategoricalPredictive.from_logits(outputs)
