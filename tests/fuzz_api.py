"""Odd calls of every public method of the estimators, by the hundred: right answers, or errors that name the argument.

    python tests/fuzz_api.py --seconds 60 --seed 0

A call ends in one of these ways:

- ``answered``: the result has the right shape, and no NaN;
- ``accepted``: a fit whose arguments passed all checks (the work itself is left out, so that a call takes milliseconds);
- ``refused``: a ValueError, TypeError or NotFittedError that names the argument, and an estimator that is as it was;
- anything else is a violation.
"""

import argparse
import copy
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import scipy.sparse
import torch
from sklearn.exceptions import NotFittedError

from bochner.estimators import Settings, StationaryClassifier, StationaryRegressor
from bochner.estimators.base import StationaryEstimator
from bochner.priors.spectra import Matern
from bochner.tables.estimators import TableClassifier, TableRegressor

ROWS = 12
TINY = replace(Settings(), folds=2, tuning_rows=10, judging_rows=10, tuning_steps=1, wide_anchors=10)
QUICK = {"kernel": "rbf", "hidden_layer_sizes": (), "settings": TINY, "random_state": 0}
ARGUMENTS = ("X", "y", "sample_weight", "quantiles", "coverage", "n_samples", "random_state")
PARAMETERS = ("kernel", "hidden_layer_sizes", "false_alarm", "device", "random_state", "verbose", "settings", "budget")


class Accepted(Exception):  # not an error: a sign
    """Raised where the work of a fit would begin."""


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        name: The model, the method, the argument and what it was given.
        argument: Name of the argument.
        call: Makes the call.
        shape: Shape of the right answer; None for a fit.
        model: The estimator, which a refused call must leave as it was.
    """

    name: str
    argument: str
    call: Callable[[], Any]
    shape: Any
    model: Any


# ------------------------------------------------------------------ odd values


def odd_objects() -> dict[str, Any]:
    """Values that are no array."""
    return {
        "None": None,
        "text": "abc",
        "empty text": "",
        "bytes": b"\xff",
        "object": object(),
        "class": dict,
        "function": len,
        "generator": (number for number in range(3)),
        "set": {1, 2},
        "dict": {"a": [1, 2]},
        "empty list": [],
        "ragged list": [[1.0], [1.0, 2.0]],
        "list of None": [None, None],
        "huge integers": [[10**400, 1]] * 2,
        "range": range(ROWS),
        "complex number": 1j,
        "0-d": np.float64(1.5),
        "NaN": float("nan"),
        "timestamp": pd.Timestamp("2024-01-01"),
        "NA": pd.NA,
        "slice": slice(1),
        "index": pd.Index([1, 2, 3]),
        "0-d tensor": torch.tensor(1.0),
    }


def variants(plain: np.ndarray, rng: np.random.Generator) -> dict[str, Any]:
    """Arrays like a numeric one, of other types and shapes and with other values."""
    spoiled = {name: plain.astype(float).copy() for name in ("nan", "inf", "-inf", "huge", "beyond", "tiny")}
    values = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf, "huge": 1e99, "beyond": 1e200, "tiny": 5e-324}
    for name, array in spoiled.items():
        array.flat[rng.integers(array.size)] = values[name]
    tensor = torch.from_numpy(plain.astype(float))
    frame = pd.DataFrame(plain.reshape(len(plain), -1)).rename(columns=str)
    matrix = plain.reshape(len(plain), -1)
    return spoiled | {
        "float32": plain.astype(np.float32),
        "float16": plain.astype(np.float16),
        "longdouble": plain.astype(np.longdouble),
        "int8": plain.astype(np.int8),
        "uint64": abs(plain).astype(np.uint64),
        "bool": plain > 0,
        "complex": plain.astype(complex),
        "complex that is real": (plain + 0j),
        "text numbers": plain.astype(str),
        "texts": np.full(plain.shape, "a"),
        "bytes": np.full(plain.shape, b"a"),
        "objects": plain.astype(object),
        "objects with None": np.where(plain > 0, plain, None),
        "objects with lists": np.frompyfunc(lambda _: [1], 1, 1)(plain),
        "dates": plain.astype("datetime64[s]"),
        "durations": plain.astype("timedelta64[s]"),
        "records": np.zeros(len(plain), dtype=[("a", float), ("b", int)]),
        "masked": np.ma.masked_array(plain, mask=plain > 0),
        "read only": _read_only(plain),
        "reversed": plain[::-1],
        "column order": np.asfortranarray(plain),
        "list": plain.tolist(),
        "tuple": tuple(plain.tolist()),
        "list of arrays": list(plain),
        "no rows": plain[:0],
        "one row": plain[:1],
        "fewer rows": plain[:-1],
        "0-d": plain.reshape(-1)[0],
        "one dimension": plain.reshape(-1),
        "one column": matrix[:, :1],
        "no columns": matrix[:, :0],
        "one column more": np.column_stack([matrix, matrix]),
        "3-d": plain.reshape(*matrix.shape, 1),
        "sparse": scipy.sparse.csr_matrix(matrix),
        "sparse array": scipy.sparse.coo_array(matrix),
        "tensor": tensor,
        "tensor with a graph": tensor.clone().requires_grad_() * 1.0,
        "tensor that requires grad": tensor.clone().requires_grad_(),
        "bfloat16": tensor.bfloat16(),
        "complex tensor": tensor + 0j,
        "conjugated tensor": (tensor + 0j).conj(),
        "sparse tensor": tensor.to_sparse(),
        "meta tensor": tensor.to("meta"),
        "list of tensors": list(tensor),
        "generator": (row for row in plain),
        "iterator": iter(plain.tolist()),
        "memory view": memoryview(np.ascontiguousarray(plain)),
        "frame": frame,
        "empty frame": pd.DataFrame(),
        "frame of equal names": frame.set_axis(["a"] * frame.shape[1], axis=1),
        "frame of mixed names": frame.set_axis([0, *map(str, range(1, frame.shape[1]))], axis=1),
        "frame of many indices": frame.set_axis(pd.MultiIndex.from_product([["a"], frame.index])),
        "frame of levels": frame.set_axis(pd.MultiIndex.from_product([["a"], frame.columns]), axis=1),
        **{f"frame of {kind}": _typed(frame, kind) for kind in ("Int64", "Float64", "boolean", "string", "category")},
        "frame of missing Int64": frame.round().astype("Int64").mask(frame > 0),
        "frame of dates": frame.astype("datetime64[s]"),
        "frame of dates with zones": frame.astype("datetime64[s]").apply(lambda c: c.dt.tz_localize("UTC")),
        "frame of durations": frame.astype("timedelta64[s]"),
        "frame of periods": frame.astype("datetime64[s]").apply(lambda c: c.dt.to_period("D")),
        "frame of sparse columns": frame.astype(pd.SparseDtype(float)),
        "frame of complex numbers": frame.astype(complex),
        "frame of complex objects": frame.astype(complex).astype(object),
        "frame of lists": frame.map(lambda _: [1]),
        "frame of mixed objects": frame.astype(object).mask(frame > 0, "a"),
        "series": pd.Series(plain.reshape(-1)[: len(plain)]),
        "series of texts": pd.Series(["a", "b"] * (len(plain) // 2)),
        "series of Int64": pd.Series(np.arange(len(plain)), dtype="Int64"),
        "series of missing Int64": pd.Series([None, *range(len(plain) - 1)], dtype="Int64"),
        "series of categories": pd.Series(["a", "b"] * (len(plain) // 2), dtype="category"),
        "series of dates": pd.Series(pd.date_range("2024-01-01", periods=len(plain))),
    }


def _read_only(array: np.ndarray) -> np.ndarray:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def _typed(frame: pd.DataFrame, kind: str) -> pd.DataFrame:
    return (frame > 0).astype("boolean") if kind == "boolean" else frame.round().astype(kind)


NUMBERS: dict[str, Any] = {
    "zero": 0,
    "one": 1,
    "half": 0.5,
    "negative": -0.5,
    "huge": 1e300,
    "huge integer": 10**400,
    "inf": float("inf"),
    "True": True,
    "NumPy number": np.float32(0.5),
    "array of one": np.array([0.5]),
    "array": np.array([0.2, 0.7]),
    "tensor of one": torch.tensor([0.5]),
    "tensor that requires grad": torch.tensor(0.5, requires_grad=True),
    "decimal text": "0.5",
    "list": [0.5],
    "nested list": [[0.5], [0.4]],
    "texts": ["a"],
    "complex array": np.array([0.5 + 0j]),
    "dates": np.array(["2024-01-01"], dtype="datetime64[D]"),
}
PARAMETER_VALUES: dict[str, dict[str, Any]] = {
    "kernel": {
        "names": ("rbf", "matern32"),
        "list": ["rbf"],
        "unknown": "rbff",
        "empty": (),
        "mixed": ("rbf", 3),
        "array": np.array(["rbf"]),
        "class": Matern,
        "product": Matern(1.5, product=True),
        "spectrum": Matern(2.5),
        "nested": (("rbf",),),
    },
    "hidden_layer_sizes": {
        "integers": (5, 5),
        "list": [5],
        "bool": (True,),
        "float": (5.0,),
        "NumPy": (np.int64(5),),
        "array": np.array([5, 5]),
        "negative": (-5,),
        "huge": (10**9, 10**9),
        "huge integer": (10**400,),
        "text": ("5",),
    },
    "device": {
        "cpu": "cpu",
        "auto": "auto",
        "object": torch.device("cpu"),
        "unknown": "gpu",
        "array": np.array(["cpu"]),
    },
    "random_state": {
        "integer": 3,
        "negative": -1,
        "large": 2**32,
        "float": 1.5,
        "generator": np.random.default_rng(0),
        "state": np.random.RandomState(0),
        "module": np.random,
        "text": "0",
        "array": np.array([0]),
        "torch": torch.Generator(),
    },
    "verbose": {"array": np.array([1, 2]), "frame": pd.DataFrame({"a": [1]}), "zero": 0},
    "settings": {"dict": {}, "class": Settings, "settings": Settings()},
    "false_alarm": NUMBERS,
    "budget": NUMBERS,
}
SETTINGS_VALUES = {
    "zero": 0,
    "negative": -1,
    "text": "3",
    "NaN": float("nan"),
    "inf": float("inf"),
    "None": None,
    "half": 0.5,
}


# ------------------------------------------------------------------ calls


def fitted_models(tables: bool = True) -> dict[str, Any]:
    """A few small estimators, each fitted once: name to model; with those for tables as they are."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 2))
    y = x[:, 0] + 0.1 * rng.normal(size=ROWS)
    frame = pd.DataFrame({"a": x[:, 0], "b": x[:, 1]})
    mixed = frame.assign(c=["p", "q"] * (ROWS // 2))
    labels = np.where(y > 0, "up", "down")
    models: dict[str, Any] = {
        "regressor": StationaryRegressor(**QUICK).fit(x, y),
        "two targets": StationaryRegressor(**QUICK).fit(x, np.column_stack([y, -y])),
        "logarithm": StationaryRegressor(**QUICK).fit(x, np.exp(3 * y)),
        "categories": StationaryRegressor(**QUICK).fit(mixed, y),
        "classifier": StationaryClassifier(**QUICK).fit(x, (y > 0).astype(int)),
        "texts": StationaryClassifier(**QUICK).fit(mixed, labels),
        "dates": StationaryClassifier(**QUICK).fit(x, (y > 0).astype("datetime64[D]")),
    }
    if tables:
        models["table regressor"] = TableRegressor(**QUICK).fit(frame, y)
        models["table classifier"] = TableClassifier(**QUICK).fit(frame, labels)
    return models


def _plain(name: str) -> tuple[Any, Any]:
    """Rows and targets that a model takes."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(ROWS, 2))
    frame = pd.DataFrame({"a": x[:, 0], "b": x[:, 1]})
    y = 0.5 + rng.random(ROWS)
    targets = {
        "two targets": np.column_stack([y, y]),
        "classifier": np.arange(ROWS) % 2,
        "dates": (np.arange(ROWS) % 2).astype("datetime64[D]"),
    } | {each: np.array(["down", "up"] * (ROWS // 2)) for each in ("texts", "table classifier")}
    if name in ("categories", "texts"):
        return frame.assign(c="p"), targets.get(name, y)
    return (frame if "table" in name else x), targets.get(name, y)


def _methods(name: str, model: Any, rows: int) -> dict[str, tuple[tuple[str, ...], Any]]:
    """Methods of a model: the arguments that vary, and the shape of the right answer for so many rows."""
    two = (2,) if name == "two targets" else ()
    methods: dict[str, tuple[tuple[str, ...], Any]] = {
        "ood_score": (("X",), (rows,)),
        "log_prob": (("X", "y"), (rows,)),
        "score": (("X", "y", "sample_weight"), ()),
        "fit": (("X", "y", "sample_weight"), None),
    }
    if hasattr(model, "predict_proba"):
        return methods | {"predict": (("X",), (rows,)), "predict_proba": (("X",), (rows, 2))}
    if isinstance(model, StationaryRegressor):
        methods["partial_fit"] = (("X", "y", "sample_weight"), None)
    return methods | {
        "predict": (("X",), (rows, *two)),
        "predict_quantiles": (("X", "quantiles"), None),
        "predict_interval": (("X", "coverage"), (rows, 2, *two)),
        "sample_y": (("X", "n_samples", "random_state"), None),
    }


def cases(models: dict[str, Any], seed: int) -> Iterator[Case]:
    """Every odd value for every argument of every method, then odd parameters; the seed decides what is spoiled where."""
    rng = np.random.default_rng(seed)
    for name, model in models.items():
        x, y = _plain(name)
        plain = {"X": x, "y": y, "sample_weight": np.ones(ROWS)}
        odd_values = {argument: _values(argument, plain, rng) for argument in ARGUMENTS}
        for method, (arguments, shape) in _methods(name, model, ROWS).items():
            for argument in arguments:
                for odd, value in odd_values[argument].items():
                    given = {each: plain[each] for each in arguments if each in plain and each != "sample_weight"}
                    given[argument] = value
                    right = shape if argument != "X" else None  # odd rows may be another number of rows
                    label = f"{name}.{method}({argument}={odd})"
                    target = _fresh(model) if method in ("fit", "partial_fit") else model
                    yield Case(label, argument, _bind(target, method, given), right, target)
    for name in [each for each in ("regressor", "classifier", "table regressor", "table classifier") if each in models]:
        kind = type(models[name])
        x, y = _plain(name)
        for parameter in PARAMETERS:
            for odd, value in (odd_objects() | PARAMETER_VALUES[parameter]).items():
                model = kind(**(QUICK | {parameter: value}))
                yield Case(
                    f"{kind.__name__}({parameter}={odd})", parameter, _bind(model, "fit", {"X": x, "y": y}), None, model
                )
        unfitted = kind(**QUICK)
        for method in _methods(name, models[name], ROWS):
            if method not in ("fit", "partial_fit"):
                given = {"X": x, "y": y} if method in ("log_prob", "score") else {"X": x}
                yield Case(f"{kind.__name__}().{method}", "fitted", _bind(unfitted, method, given), None, unfitted)
    for field in vars(Settings()):
        for odd, value in SETTINGS_VALUES.items():
            yield Case(f"Settings({field}={odd})", field, _setting(field, value), None, None)


def _setting(field: str, value: Any) -> Callable[[], Any]:
    return lambda: Settings(**{field: value})


def _bind(model: Any, method: str, given: dict[str, Any]) -> Callable[[], Any]:
    return lambda: getattr(model, method)(**given)


def _fresh(model: Any) -> Any:
    """A copy, so that a fit that is accepted does not change the model of other cases."""
    return copy.copy(model)


def _state(model: Any) -> list[Any]:
    """All objects that a model predicts with: nothing in them is changed in place."""
    parts = [value for _, value in sorted(vars(model).items())]
    for mixture in getattr(getattr(model, "estimator_", model), "mixtures_", []):
        parts += [mixture, *mixture.members, *(member.head for member in mixture.members)]
    return parts


def _is_same(before: list[Any], after: list[Any]) -> bool:
    return len(before) == len(after) and all(a is b for a, b in zip(before, after, strict=True))


def _values(argument: str, plain: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    if argument in ("quantiles", "coverage", "n_samples"):
        return odd_objects() | NUMBERS
    if argument == "random_state":
        return odd_objects() | PARAMETER_VALUES["random_state"]
    base = plain[argument]
    if isinstance(base, pd.DataFrame):
        base = base[["a", "b"]].to_numpy()
    if base.dtype.kind not in "biuf":
        base = rng.normal(size=base.shape)
    return odd_objects() | variants(base, rng) | {"as it is": plain[argument]}


# ------------------------------------------------------------------ outcomes


def outcome(case: Case) -> tuple[str, str]:
    """How a call ends: answered, accepted, refused or a kind of violation; and the message."""
    before = _state(case.model) if case.model is not None else []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about columns that become one-dimensional, and casts
            answer = case.call()
    except Accepted:
        return "accepted", ""
    except (ValueError, TypeError) as error:
        message = f"{type(error).__name__}: {error}"
        if case.argument == "fitted":
            return ("refused", message) if isinstance(error, NotFittedError) else ("wrong error", message)
        if not re.search(rf"\b{case.argument}\b", str(error)) and not _names_column(case, str(error)):
            return "nameless", message
        if case.model is not None and not _is_same(before, _state(case.model)):
            return "changed by a refused call", message
        return "refused", message
    except Exception as error:
        return "raw error", f"{type(error).__name__}: {error}"
    if case.argument == "fitted":
        return "answered without a fit", ""
    if isinstance(answer, np.ndarray | float):
        if case.shape is not None and np.shape(answer) != case.shape:
            return "wrong shape", f"{np.shape(answer)} instead of {case.shape}"
        if answer.dtype.kind == "f" if isinstance(answer, np.ndarray) else True:
            return ("not a number", "") if np.isnan(answer).any() else ("answered", "")
    return "answered", ""


def _names_column(case: Case, message: str) -> bool:
    """Tables: an error may name a column, or the target, instead of the argument."""
    return "able" in case.name.split(".")[0] and bool(re.search(r"'[ab01y]'|[Cc]olumn|target|table", message))


def run(
    models: dict[str, Any], seed: int, until: float = float("inf"), share: float = 1.0
) -> tuple[Counter[str], list[str]]:
    """Makes a random share of the calls of a seed, or as many as there is time for: counts by outcome, and the violations."""
    rng = np.random.default_rng(seed)
    counts: Counter[str] = Counter()
    violations: list[str] = []

    def stop(*_: Any) -> Any:
        raise Accepted

    with mock.patch.object(StationaryEstimator, "_fit_mixtures", stop):
        for case in cases(models, seed):
            if time.perf_counter() > until:
                break
            if rng.random() > share:
                continue
            kind, message = outcome(case)
            counts[kind] += 1
            if kind not in ("answered", "accepted", "refused"):
                violations.append(f"{kind}: {case.name}: {' '.join(message.split())[:200]}")
    return counts, violations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    until, seed = time.perf_counter() + options.seconds, options.seed
    counts: Counter[str] = Counter()
    violations: list[str] = []
    models = fitted_models()
    while time.perf_counter() < until:
        more, wrong = run(models, seed, until)
        counts, seed, violations = counts + more, seed + 1, violations + wrong
    print(f"odd calls of the estimators, seeds {options.seed} to {seed - 1}:", dict(counts))
    print("\n".join(sorted(set(violations))))
    sys.exit(bool(violations))


if __name__ == "__main__":
    main()
