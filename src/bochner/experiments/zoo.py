"""The paper's sixteen networks by name, in the form of each protocol."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import nn

from bochner.errors import unknown_name
from bochner.experiments.published import PublishedGaussian, PublishedLayer, PublishedModel
from bochner.layers import StationaryLayer
from bochner.likelihoods import Categorical, Gaussian
from bochner.models import Model
from bochner.networks import mlp
from bochner.priors import activations, spectra
from bochner.priors.activations import Activation, MaternWave
from bochner.priors.spectra import Matern

# Kernel and activation of each network, in the order of the paper's tables. Local and ReLU networks have normal weights.
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
    """Names of models, sorted so that those of one activation are neighbours: their model layers run together."""
    return sorted(models, key=lambda name: (MODELS[name][1], list(MODELS).index(name)))


def activation(name: str, protocol: str) -> Activation:
    """An activation by name, in the form of a protocol.

    The published code leaves triangle and periodic ReLU at variance π⁴/96 and divides the local Matérn activation by ν.
    """
    if name.startswith("local_matern"):
        nu = {"local_matern52": 2.5, "local_matern32": 1.5}[name]
        local = activations.local_matern(nu)
        return {"bochner": local, "paper": replace(local, wave=MaternWave(nu, scale=1 / nu))}[protocol]
    ours = activations.resolve_activation(name)
    published = {"triangle": activations.triangle("paper"), "periodic_relu": activations.periodic_relu("paper")}
    return {"bochner": ours, "paper": published.get(name, ours)}[protocol]


@dataclass(frozen=True)
class Shape:
    """Sizes and purpose of a network.

    Attributes:
        protocol: "paper" or "bochner".
        classes: Number of classes, or None for regression.
        width: Number of units of the model layer.
        hidden: Widths of the extractor's layers, where that is fully connected.
        lengthscale: The first lengthscale; None for the protocol's default.
    """

    protocol: str
    classes: int | None
    width: int
    hidden: tuple[int, ...] = ()
    lengthscale: float | None = None


@lru_cache(maxsize=32)
def _extractor(in_features: int, hidden: tuple[int, ...], seed: int) -> nn.Sequential:
    """An untrained extractor from a seed. It is the same for all models, and most of the work of building one."""
    return mlp(in_features, hidden, generator=torch.Generator().manual_seed(seed + 2**32))


def build(name: str, in_features: int, shape: Shape, seed: int) -> Model:
    """The untrained network ``name`` for a table, with all its parameters drawn from ``seed``."""
    extractor = copy.deepcopy(_extractor(in_features, shape.hidden, seed))
    return assemble(name, extractor, shape.hidden[-1], shape, seed)


def assemble(name: str, extractor: nn.Module, features: int, shape: Shape, seed: int) -> Model:
    """The untrained network ``name`` on an extractor with ``features`` outputs, its other parameters drawn from ``seed``."""
    if name not in MODELS:
        raise ValueError(unknown_name("models", name, MODELS))
    return ASSEMBLERS[shape.protocol](name, extractor, features, shape, seed)


def _assemble_ours(name: str, extractor: nn.Module, features: int, shape: Shape, seed: int) -> Model:
    kernel, wave = MODELS[name]
    generator = torch.Generator().manual_seed(seed)
    layer = StationaryLayer(
        features,
        shape.width,
        kernel=kernel,
        activation=activation(wave, "bochner"),
        lengthscale=shape.lengthscale or 1.0,
        generator=generator,
    )
    likelihood = Gaussian() if shape.classes is None else Categorical()
    return Model(layer, shape.classes or 1, likelihood, extractor=extractor, generator=generator)


def _assemble_published(name: str, extractor: nn.Module, features: int, shape: Shape, seed: int) -> Model:
    kernel, wave = MODELS[name]
    spectrum, generator = spectra.resolve_spectrum(kernel), torch.Generator().manual_seed(seed)
    if isinstance(spectrum, Matern):
        spectrum = Matern(spectrum.nu, product=True)
    start = shape.lengthscale or (0.2 if shape.classes is None and name != "relu" else 1.0)
    layer = PublishedLayer(
        features,
        shape.width,
        multiplier=1 / start,
        kernel=spectrum,
        activation=activation(wave, "paper"),
        generator=generator,
    )
    likelihood = PublishedGaussian() if shape.classes is None else Categorical()
    rectified = nn.Sequential(*extractor, nn.ReLU())  # pyright: ignore[reportGeneralTypeIssues]
    return PublishedModel(
        layer,
        shape.classes or 1,
        likelihood,
        extractor=rectified,
        extractor_precision=2.0,
        output_bias=True,
        generator=generator,
    )


ASSEMBLERS = {"bochner": _assemble_ours, "paper": _assemble_published}
