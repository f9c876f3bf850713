"""The paper's sixteen UCI networks by name, under both protocols."""

import copy
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from bochner import activations, spectra
from bochner.activations import Activation, MaternWave, unknown
from bochner.experiments.published import PublishedGaussian, PublishedLayer, PublishedModel
from bochner.layers import StationaryLayer
from bochner.likelihoods import Categorical, Gaussian
from bochner.models import Model
from bochner.networks import mlp
from bochner.spectra import Matern

# Kernel and activation of each model, in the order of the paper's tables. Locally stationary and ReLU models have normal weights.
MODELS: dict[str, tuple[str, str]] = {
    "relu": ("rbf", "relu"),
    "local-rbf": ("rbf", "local_rbf"),
    "rbf-sin": ("rbf", "sin"),
    "rbf-tri": ("rbf", "triangle"),
    "local-matern52": ("rbf", "local_matern52"),
    "matern52-sin": ("matern52", "sin"),
    "matern52-tri": ("matern52", "triangle"),
    "local-matern32": ("rbf", "local_matern32"),
    "matern32-sin": ("matern32", "sin"),
    "matern32-tri": ("matern32", "triangle"),
    "rbf-sincos": ("rbf", "sincos"),
    "matern52-sincos": ("matern52", "sincos"),
    "matern32-sincos": ("matern32", "sincos"),
    "rbf-prelu": ("rbf", "periodic_relu"),
    "matern52-prelu": ("matern52", "periodic_relu"),
    "matern32-prelu": ("matern32", "periodic_relu"),
}


def by_activation(models: Iterable[str]) -> list[str]:
    """Models of one activation side by side: their model layers run together."""
    return sorted(models, key=lambda name: (MODELS[name][1], list(MODELS).index(name)))


def activation(name: str, protocol: str) -> Activation:
    """The activation as a protocol has it.

    The published code leaves triangle and periodic ReLU at variance π⁴/96 and divides the local Matérn activation by ν.
    """
    if name.startswith("local_matern"):
        nu = {"local_matern52": 2.5, "local_matern32": 1.5}[name]
        local = activations.local_matern(nu)
        return local if protocol == "bochner" else replace(local, wave=MaternWave(nu, scale=1 / nu))
    if protocol == "paper" and name == "triangle":
        return activations.triangle("paper")
    if protocol == "paper" and name == "periodic_relu":
        return activations.periodic_relu("paper")
    return activations.resolve(name)


@lru_cache(maxsize=32)
def _extractor(in_features: int, hidden: tuple[int, ...], seed: int) -> nn.Sequential:
    """An extractor as drawn from the seed: the same for all models, and most of the work of building one."""
    return mlp(in_features, hidden, generator=torch.Generator().manual_seed(seed + 2**32))


def build(
    name: str, in_features: int, classes: int | None, *, protocol: str, seed: int, hidden: tuple[int, ...], width: int
) -> Model:
    """The network ``name`` for a table, with all its initial numbers drawn from ``seed``.

    Args:
        name: One of ``MODELS``.
        in_features: Number of inputs.
        classes: Number of classes, or None for regression.
        protocol: "paper" or "bochner".
        seed: Seed of every draw.
        hidden: Widths of the extractor's layers.
        width: Number of units of the model layer.
    """
    start = 0.2 if protocol == "paper" and classes is None and name != "relu" else 1.0
    extractor = copy.deepcopy(_extractor(in_features, hidden, seed))
    return assemble(name, extractor, hidden[-1], classes, protocol=protocol, seed=seed, width=width, lengthscale=start)


def assemble(
    name: str,
    extractor: nn.Module,
    features: int,
    classes: int | None,
    *,
    protocol: str,
    seed: int,
    width: int,
    lengthscale: float,
) -> Model:
    """The network ``name`` on top of an extractor that gives ``features`` features, its other numbers drawn from ``seed``."""
    if name not in MODELS:
        raise ValueError(unknown("models", name, MODELS))
    kernel, wave = MODELS[name]
    spectrum, sigma = spectra.resolve(kernel), activation(wave, protocol)
    generator = torch.Generator().manual_seed(seed)
    likelihood = Gaussian() if classes is None else Categorical()
    common: Any = {"activation": sigma, "generator": generator}
    if protocol == "bochner":
        layer = StationaryLayer(features, width, kernel=spectrum, lengthscale=lengthscale, **common)
        return Model(layer, classes or 1, likelihood, extractor=extractor, generator=generator)
    if isinstance(spectrum, Matern):
        spectrum = Matern(spectrum.nu, product=True)
    layer = PublishedLayer(features, width, multiplier=1 / lengthscale, kernel=spectrum, **common)
    if classes is None:
        likelihood = PublishedGaussian()
    options: Any = {"extractor_precision": 2.0, "output_bias": True, "generator": generator}
    return PublishedModel(layer, classes or 1, likelihood, extractor=nn.Sequential(*extractor, nn.ReLU()), **options)  # pyright: ignore[reportGeneralTypeIssues]
