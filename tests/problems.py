"""Small problems that several test files use."""

import contextlib
from datetime import timedelta

import torch

from bochner import Categorical, Gaussian, Model, StationaryLayer
from bochner.networks import mlp


def regression(
    seed=0,
    *,
    width=12,
    hidden=None,
    noise=0.3,
    output_bias=False,
    outputs=1,
    activation="sin",
    kernel="matern32",
    amplitude=1.0,
):
    generator = torch.Generator().manual_seed(seed)
    extractor = None
    if hidden is not None:
        extractor = mlp(3, hidden, dropout=0.0, generator=generator).double()
    layer = StationaryLayer(
        3 if hidden is None else hidden[-1],
        width,
        kernel=kernel,
        activation=activation,
        lengthscale=0.8,
        generator=generator,
        dtype=torch.float64,
    )
    options = {"amplitude": amplitude, "output_bias": output_bias, "generator": generator}
    return Model(layer, outputs, Gaussian(noise), extractor=extractor, **options)


def classification(seed=0, *, width=12, classes=3, hidden=None, amplitude=1.0):
    generator = torch.Generator().manual_seed(seed)
    extractor = None
    if hidden is not None:
        extractor = mlp(3, hidden, dropout=0.0, generator=generator).double()
    layer = StationaryLayer(
        3 if hidden is None else hidden[-1], width, lengthscale=0.8, generator=generator, dtype=torch.float64
    )
    return Model(layer, classes, Categorical(), extractor=extractor, amplitude=amplitude, generator=generator)


def data(num=25, *, outputs=1, classes=None, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num, 3, generator=generator, dtype=torch.float64)
    if classes:
        return x, (x[:, 0] * 2 + x[:, 1]).round().long().remainder(classes)
    y = torch.sin(2 * x[:, :1]) + 0.1 * torch.randn(num, outputs, generator=generator, dtype=torch.float64)
    return x, y


@contextlib.contextmanager
def one_of_two(rank, path):
    """Makes this process number ``rank`` of two that work together, or leaves it alone where that is None."""
    if rank is None:
        yield
        return
    options = {"rank": rank, "world_size": 2, "timeout": timedelta(minutes=2)}
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}.meet", **options)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
