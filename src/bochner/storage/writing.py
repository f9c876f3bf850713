"""A fitted estimator as JSON and tensors: what ``bochner.storage.schema`` describes."""

import dataclasses
from collections.abc import Mapping
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from bochner.estimators import StationaryClassifier
from bochner.estimators.classification import ClassMixture
from bochner.estimators.regression import RegressionMixture
from bochner.estimators.spread import Spread
from bochner.members.extractors import Extractors
from bochner.members.heads import GaussianHead
from bochner.members.member import Member
from bochner.priors.spectra import Spectrum
from bochner.storage.container import Json, Tensors, versions
from bochner.storage.schema import CONSTANTS


def estimator_parts(estimator: Any) -> tuple[Json, Tensors]:
    """JSON and tensors that describe a fitted estimator, for tables or for numbers and categories."""
    table = None
    if hasattr(estimator, "table_"):
        table = {
            "columns": estimator.table_.to_json(),
            "target": estimator.target_.to_json(),
            "drop": list(map(str, estimator.drop)),
            "keep": list(map(str, estimator.keep)),
        }
        estimator = estimator.estimator_
    content: Json = versions() | {
        "estimator": type(estimator).__name__,
        "constants": CONSTANTS,
        "parameters": _parameters(estimator),
        "ood_threshold": estimator.ood_threshold_,
        "features": int(estimator.n_features_in_),
        "feature_names": list(estimator.feature_names_in_) if hasattr(estimator, "feature_names_in_") else None,
        "columns": [dataclasses.asdict(column) for column in estimator.columns_.columns],
        "unseen": estimator.columns_.unseen,
        "table": table,
    }
    if isinstance(estimator, StationaryClassifier):
        kind = estimator.classes_.dtype.str
        content |= {"classes": estimator.classes_.tolist(), "class_type": "U" if kind[1] == "U" else kind}
    else:
        content["one_target"] = bool(estimator._one_target)
    novelty = estimator.novelty_
    tensors = {"factor": packed(novelty.factor), "left": novelty.left, "leverage": novelty.leverage}
    tensors = _prefixed("novelty.", tensors)
    content["mixtures"] = []
    for number, mixture in enumerate(estimator.mixtures_):
        described, held = _mixture_parts(mixture)
        content["mixtures"].append(described)
        tensors |= _prefixed(f"{number}.", held)
    return content, tensors


def _prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> Tensors:
    return {prefix + name: value for name, value in tensors.items()}


def _parameters(estimator: Any) -> Json:
    """The parameters of the constructor."""
    seed = estimator.random_state
    return estimator.get_params(deep=False) | {
        "kernel": _kernel_to_json(estimator.kernel),
        "hidden_layer_sizes": list(estimator.hidden_layer_sizes),
        "random_state": int(seed) if isinstance(seed, Integral) else None,
        "verbose": bool(estimator.verbose),
        "settings": None if estimator.settings is None else dataclasses.asdict(estimator.settings),
    }


def _kernel_to_json(kernel: Any) -> Any:
    if isinstance(kernel, tuple | list):
        return [_kernel_to_json(one) for one in kernel]
    return kernel if isinstance(kernel, str) else _spectrum_to_json(kernel)


def _spectrum_to_json(spectrum: Spectrum) -> Json:
    fields = [field.name for field in dataclasses.fields(spectrum) if field.init]  # pyright: ignore[reportArgumentType]
    return {"type": type(spectrum).__name__} | {name: getattr(spectrum, name) for name in fields}


def _mixture_parts(mixture: RegressionMixture | ClassMixture) -> tuple[Json, Tensors]:
    content: Json = {"members": [], "networks": None}
    tensors: Tensors = {}
    for number, member in enumerate(mixture.members):
        described, held = _member_parts(member)
        content["members"].append(described)
        tensors |= _prefixed(f"member{number}.", held)
    if mixture.extractors is not None:
        content["networks"] = {"count": len(mixture.extractors.modules), "widths": _widths(mixture.extractors)}
        for number, module in enumerate(mixture.extractors.modules):
            tensors |= _prefixed(f"network{number}.", module.state_dict())
    if isinstance(mixture, RegressionMixture):
        content["spread"], held = _spread_parts(mixture.spread)
        tensors |= held
    return content, tensors


def _widths(extractors: Extractors) -> list[int]:
    """Widths of a network's layers, from the network: the estimator's parameter may have been set anew since the fit."""
    return [module.out_features for module in extractors.modules[0].modules() if isinstance(module, nn.Linear)]


def _member_parts(member: Member) -> tuple[Json, Tensors]:
    head = member.head
    content: Json = {
        "weight": member.weight,
        "network": member.network,
        "kernel": _spectrum_to_json(head.features.spectrum),
        "amplitude": head.amplitude,
    }
    tensors = {"lengthscale": head.features.lengthscale, "anchors": head.features.anchors}
    if isinstance(head, GaussianHead):
        sums = head.sums
        content |= {"noise": head.noise, "square": float(sums.square), "total": sums.count}
        content["map"] = dataclasses.asdict(member.map)
        tensors |= {"gram": packed(sums.gram), "projection": sums.projection}
    else:
        content["averaging"] = head.averaging
        tensors |= {"gram": packed(head.gram), "weights": head.weights}
    return content, tensors


def _spread_parts(spread: Spread) -> tuple[Json, Tensors]:
    content: Json = {"constant": spread.constant, "mean_only": spread.mean_only, "lengthscale": None}
    if spread.features is None or spread.weights is None:
        return content, {}
    content["lengthscale"] = float(spread.features.lengthscale[0])
    return content, {"spread.anchors": spread.features.anchors, "spread.weights": spread.weights}


def packed(matrix: Tensor) -> Tensor:
    """The lower triangle of a symmetric matrix, row by row."""
    return matrix[tuple(torch.tril_indices(len(matrix), len(matrix)))]
