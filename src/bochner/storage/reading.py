"""A fitted estimator from JSON and tensors that ``bochner.storage.schema`` has judged."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bochner.estimators.classification import ClassMixture
from bochner.estimators.classifier import StationaryClassifier
from bochner.estimators.columns import MAX_INPUT, Column, Columns
from bochner.estimators.novelty import Novelty
from bochner.estimators.regression import RegressionMixture
from bochner.estimators.regressor import StationaryRegressor
from bochner.estimators.spread import Spread
from bochner.estimators.targets import TargetMap
from bochner.members.extractors import Extractors, make_extractor, scaled
from bochner.members.features import KernelFeatures
from bochner.members.heads import GaussianHead, SoftmaxHead
from bochner.members.member import Inputs, Member
from bochner.members.settings import Settings
from bochner.networks import Intervals
from bochner.posteriors.closed_form import Statistics
from bochner.priors.spectra import RBF, Exponential, Matern, Spectrum
from bochner.storage.container import Json, Tensors
from bochner.storage.rules import TensorRule, require
from bochner.tables.estimators import TableClassifier, TableRegressor
from bochner.tables.table import Table
from bochner.tables.targets import Target

ESTIMATORS: dict[str, Any] = {"StationaryRegressor": StationaryRegressor, "StationaryClassifier": StationaryClassifier}
TABLE_ESTIMATORS: dict[str, Any] = {"StationaryRegressor": TableRegressor, "StationaryClassifier": TableClassifier}
SPECTRUM_CLASSES: dict[str, Any] = {"RBF": RBF, "Matern": Matern, "Exponential": Exponential}
# Entries of the rows that every model must predict finite numbers for.
TRIAL_INPUTS = (0.0, 1.0, -1.0, 10.0, MAX_INPUT, -MAX_INPUT)
TRIAL_QUANTILES = (0.01, 0.5, 0.99)


def check_values(rules: Mapping[str, TensorRule], tensors: Tensors) -> None:
    """Raises a WrongValue unless the entries of all tensors are in their ranges."""
    for name, rule in rules.items():
        rule.check_values(name, tensors[name])


def build_estimator(content: Json, tensors: Tensors, device: str) -> Any:
    """The estimator that the contents of a file describe, after a trial prediction.

    Args:
        content: JSON that ``estimator_rules`` has judged.
        tensors: Tensors whose shapes it has judged, and whose values ``check_values`` has.
        device: "auto", "cpu" or "cuda".

    Raises:
        ValueError: A matrix is not positive definite, or the trial prediction is not finite.
    """
    estimator = ESTIMATORS[content["estimator"]](**_parameters(content["parameters"]) | {"device": device})
    estimator.check_parameters()
    columns = Columns(tuple(_column(described) for described in content["columns"]), float(content["unseen"]))
    estimator.columns_, estimator.n_features_in_ = columns, len(columns.columns)
    if content["feature_names"] is not None:
        estimator.feature_names_in_ = np.array(content["feature_names"], dtype=object)
    estimator.ood_threshold_ = float(content["ood_threshold"])
    place = torch.device(estimator._device())
    tensors = {name: value.to(place) for name, value in tensors.items()}
    estimator.novelty_ = _novelty(_under(tensors, "novelty"), len(columns.group))
    estimator.mixtures_ = [
        _mixture(described, _under(tensors, str(number)), columns)
        for number, described in enumerate(content["mixtures"])
    ]
    if "classes" in content:
        estimator.classes_ = _classes(content["classes"], content["class_type"])
        _try_classifier(estimator, _trial_rows(columns).to(place))
    else:
        estimator._one_target = content["one_target"]
        estimator._describe()
        _try_regressor(estimator, _trial_rows(columns).to(place))
    return estimator if content["table"] is None else _for_tables(content["table"], estimator)


def _under(tensors: Tensors, prefix: str) -> Tensors:
    """The tensors whose names begin with a prefix and a point, without these."""
    return {name.partition(".")[2]: value for name, value in tensors.items() if name.partition(".")[0] == prefix}


def _parameters(described: Json) -> Json:
    settings = described["settings"]
    return described | {
        "kernel": _kernel(described["kernel"]),
        "hidden_layer_sizes": tuple(described["hidden_layer_sizes"]),
        "settings": None if settings is None else Settings(**settings),
    }


def _kernel(described: Any) -> Any:
    if isinstance(described, list):
        return tuple(_kernel(one) for one in described)
    return described if isinstance(described, str) else _spectrum(described)


def _spectrum(described: Json) -> Spectrum:
    return SPECTRUM_CLASSES[described["type"]](**{name: value for name, value in described.items() if name != "type"})


def _column(described: Json) -> Column:
    categories = described["categories"]
    sequences = {"categories": None if categories is None else tuple(categories), "shares": tuple(described["shares"])}
    return Column(**described | sequences)


def _classes(labels: list[Any], kind: str) -> np.ndarray:
    dtype = None if kind == "U" else np.dtype(object) if kind == "|O" else np.dtype(kind)
    return np.array(labels, dtype=dtype)


# ------------------------------------------------------------------ what predicts


def _mixture(described: Json, tensors: Tensors, columns: Columns) -> RegressionMixture | ClassMixture:
    members = []
    for number, one in enumerate(described["members"]):
        head, target_map = _head(one, _under(tensors, f"member{number}"))
        members.append(Member(float(one["weight"]), head, one["network"], target_map))
    extractors = None if described["networks"] is None else _extractors(described["networks"], tensors, columns)
    no_rows = np.zeros(0), torch.zeros(0, dtype=torch.int64)  # the rows that judged the members are not kept
    if "spread" not in described:
        return ClassMixture(members, extractors, *no_rows)
    return RegressionMixture(members, extractors, _spread(described["spread"], tensors), *no_rows)


def _head(described: Json, tensors: Tensors) -> tuple[GaussianHead | SoftmaxHead, TargetMap | None]:
    """A head and, for regression, the map of its target."""
    features = KernelFeatures(_spectrum(described["kernel"]), tensors["lengthscale"], tensors["anchors"])
    lower = unpacked(tensors["gram"], len(tensors["anchors"]))
    gram, amplitude = lower + lower.tril(-1).mT, float(described["amplitude"])
    if "averaging" in described:
        return SoftmaxHead(features, gram, amplitude, tensors["weights"], float(described["averaging"])), None
    square = torch.tensor(described["square"], dtype=torch.float64, device=gram.device)
    sums = Statistics(gram, tensors["projection"], square, float(described["total"]))
    return GaussianHead(features, sums, amplitude, float(described["noise"])), TargetMap(**described["map"])


def unpacked(entries: Tensor, size: int) -> Tensor:
    """A lower triangle from its entries, row by row."""
    matrix = torch.zeros(size, size, dtype=torch.float64, device=entries.device)
    matrix[tuple(torch.tril_indices(size, size))] = entries
    return matrix


def _novelty(tensors: Tensors, inputs: int) -> Novelty:
    factor = unpacked(tensors["factor"], inputs + 1)
    require(bool((factor.diagonal() > 0).all()), "novelty.factor must have a positive diagonal")
    return Novelty(factor, tensors["left"], tensors["leverage"])


def _spread(described: Json, tensors: Tensors) -> Spread:
    constant, mean_only = float(described["constant"]), described["mean_only"]
    if described["lengthscale"] is None:
        return Spread(constant, mean_only=mean_only)
    anchors = tensors["spread.anchors"]
    lengthscale = torch.full_like(anchors[0], described["lengthscale"])
    return Spread(constant, KernelFeatures(RBF(), lengthscale, anchors), tensors["spread.weights"], mean_only)


def _extractors(described: Json, tensors: Tensors, columns: Columns) -> Extractors:
    modules: list[nn.Module] = []
    for number in range(described["count"]):
        state = _under(tensors, f"network{number}")
        intervals = Intervals(state["0.column"], state["0.left"], state["0.width"])
        generator = torch.Generator().manual_seed(0)  # the weights that it draws are replaced
        extractor = make_extractor(intervals, columns.plain, described["widths"], generator)
        module = scaled(extractor, torch.ones_like(state["2.lengthscale"]))
        module.load_state_dict(state)
        modules.append(module.to(state["2.lengthscale"].device).eval().requires_grad_(False))
    return Extractors(modules, columns.plain, len(columns.columns), described["widths"][-1])


def _for_tables(described: Json, estimator: Any) -> Any:
    """The estimator for tables around the one that learns from numbers and categories."""
    table, target = Table.from_json(described["columns"]), Target.from_json(described["target"])
    estimator_for_tables = TABLE_ESTIMATORS[type(estimator).__name__](
        **estimator.get_params(deep=False), drop=tuple(described["drop"]), keep=tuple(described["keep"])
    )
    estimator_for_tables.table_, estimator_for_tables.target_, estimator_for_tables.estimator_ = (
        table,
        target,
        estimator,
    )
    estimator_for_tables.n_features_in_ = len(table.columns)
    return estimator_for_tables


# ------------------------------------------------------------------ trial predictions


def _trial_rows(columns: Columns) -> Tensor:
    """Rows of inputs near the training data and as far from it as inputs can be."""
    return torch.tensor(TRIAL_INPUTS, dtype=torch.float64)[:, None].repeat(1, len(columns.group))


def _require_finite(values: Tensor, what: str) -> None:
    require(bool(torch.isfinite(values).all()), f"{what} at a trial row is not finite")


@torch.no_grad()
def _try_regressor(estimator: StationaryRegressor, rows: Tensor) -> None:
    described = np.r_[estimator.noise_, estimator.prior_std_, estimator.log_marginal_likelihood_]
    require(bool(np.isfinite(described).all()), "the noise, the prior or the evidence is not finite")
    for mixture in estimator.mixtures_:
        inputs = Inputs(rows, mixture.extractors)
        predicted = mixture.predict(inputs)
        mean, std = predicted.moments()
        _require_finite(mean, "the mean")
        _require_finite(std, "the standard deviation")
        require(bool((std > 0).all()), "the standard deviation at a trial row is zero")
        for level in TRIAL_QUANTILES:
            _require_finite(predicted.quantile(level), "a quantile")
        _require_finite(estimator.novelty_(rows, mixture.left(inputs)), "the score")


@torch.no_grad()
def _try_classifier(estimator: StationaryClassifier, rows: Tensor) -> None:
    (mixture,) = estimator.mixtures_
    inputs = Inputs(rows, mixture.extractors)
    _require_finite(mixture.probabilities(inputs), "a probability")
    _require_finite(estimator.novelty_(rows, mixture.left(inputs)), "the score")
