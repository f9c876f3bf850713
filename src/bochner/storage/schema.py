"""What the file of an estimator holds: every field with its type and range. Its tensors are in ``bochner.storage.tensors``.

``estimator_rules`` judges a file by its JSON and the declared sizes of its tensors, before any tensor is read or anything is built.
It returns the rules that the values of the tensors must follow. For a StationaryHead see ``bochner.storage.attached``.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from bochner.estimators import columns, spread, targets
from bochner.members import extractors, features, heads
from bochner.members.settings import Settings
from bochner.priors.spectra import SPECTRA
from bochner.storage.container import FORMAT, Json
from bochner.storage.rules import (
    Entry,
    Rule,
    TensorRule,
    check_entries,
    label,
    list_of,
    number,
    one_of,
    optional,
    record,
    require,
    tagged,
    text,
    truth,
    whole,
)
from bochner.storage.tensors import tensor_rules
from bochner.tables import cells, dates
from bochner.tables.columns import DATE_PARTS, KINDS, STYLES
from bochner.tables.columns import Column as TableColumn

MAX_MEMBERS = 10_000
MAX_LAYERS = 100
# Largest size of all labels together, in characters: NumPy pads every label to the length of the longest one.
MAX_LABEL_CHARACTERS = 16 * 2**20

# Constants of the formulas that saved models predict with. They are in every file: a model that was saved under other values would
# predict other numbers, so it is refused.
CONSTANTS = {
    "kernel jitter": features.JITTER,
    "class curvature": heads.MAX_CURVATURE,
    "columns past networks": extractors.BYPASS_DIVISOR,
    "farthest input": columns.MAX_INPUT,
    "widest spread": spread.MAX_LOG_FACTOR,
    "largest mapped target": targets.MAX_LOG,
    "quadrature nodes": targets.QUADRATURE_NODES,
}
SHARE = number(0.0, 1.0)
POSITIVE = number(1e-60, 1e60)
FINITE = number(-1e110, 1e110)
VERSIONS = {"format": one_of(FORMAT), "bochner": text, "torch": text}
KERNEL = tagged(
    "type",
    {
        "RBF": {},
        "Matern": {"nu": number(1e-3, 1e6), "product": one_of(False)},
        "Exponential": {"product": one_of(False)},
    },
)


def _kernel_name(value: Any, place: str) -> None:
    (one_of(*SPECTRA) if isinstance(value, str) else KERNEL)(value, place)


def _kernel_choice(value: Any, place: str) -> None:
    (list_of(_kernel_name, shortest=1, longest=100) if isinstance(value, list) else _kernel_name)(value, place)


# ------------------------------------------------------------------ JSON of estimators

SETTINGS = record(
    {
        field.name: whole(0, 10**12) if isinstance(field.default, int) else number(0.0, 1e12)
        for field in dataclasses.fields(Settings)
    }
)
PARAMETERS = record(
    {
        "kernel": _kernel_choice,
        "hidden_layer_sizes": list_of(whole(1, 10**6), longest=MAX_LAYERS),
        "false_alarm": number(1e-12, 1 - 1e-12),
        "device": one_of("auto", "cpu", "cuda"),
        "random_state": optional(whole(0, 2**32 - 1)),
        "verbose": truth,
        "settings": optional(SETTINGS),
        "budget": optional(number(1e-9, 1e12)),
    }
)
COLUMN = record(
    {
        "name": text,
        "mean": FINITE,
        "scale": number(1e-200, 1e110),
        "missing": SHARE,
        "categories": optional(list_of(label, shortest=1)),
        "shares": list_of(SHARE),
    }
)
TARGET_MAP = record(
    {
        "kind": one_of("identity", "log", "power"),
        "mean": FINITE,
        "scale": number(1e-150, 1e110),
        "power": number(0.0, 2.0),
        "centre": FINITE,
        "spread": number(1e-60, 1e110),
        "low": FINITE,
        "high": FINITE,
    }
)
MEMBER = {"weight": number(1e-12, 1.0), "network": optional(whole(0, 1000)), "kernel": KERNEL, "amplitude": POSITIVE}
SUMS = {"noise": POSITIVE, "square": number(0.0, 1e250), "total": number(1e-60, 1e60), "map": TARGET_MAP}
SPREAD = record({"constant": number(-1e3, 1e3), "mean_only": truth, "lengthscale": optional(POSITIVE)})
NETWORKS = record({"count": whole(1, 1000), "widths": list_of(whole(1, 10**6), shortest=1, longest=MAX_LAYERS)})
MIXTURE = {"networks": optional(NETWORKS)}
REGRESSION_MIXTURE = record(
    MIXTURE | {"members": list_of(record(MEMBER | SUMS), shortest=1, longest=MAX_MEMBERS), "spread": SPREAD}
)
CLASS_MIXTURE = record(
    MIXTURE | {"members": list_of(record(MEMBER | {"averaging": SHARE}), shortest=1, longest=MAX_MEMBERS)}
)
TABLE_COLUMN = record(
    {
        **dict.fromkeys((field.name for field in dataclasses.fields(TableColumn)), text),
        "kind": one_of(*KINDS),
        "decimal": one_of(".", ","),
        "style": one_of(*sorted(STYLES)),
        "parts": list_of(label),
        "levels": list_of(label),
        "rare": number(0.0, 1.0),
        "missing": truth,
    }
)
TASKS = {"regression": "number", "classification": "category"}  # and the kind of column that the target is
TABLE = record(
    {
        "columns": list_of(TABLE_COLUMN, shortest=1),
        "target": record({"name": text, "task": one_of(*TASKS), "column": TABLE_COLUMN, "note": text}),
        "drop": list_of(text),
        "keep": list_of(text),
    }
)
ESTIMATOR = VERSIONS | {
    "constants": one_of(CONSTANTS),
    "parameters": PARAMETERS,
    "ood_threshold": SHARE,
    "features": whole(1, 10**6),
    "feature_names": optional(list_of(text, shortest=1)),
    "columns": list_of(COLUMN, shortest=1),
    "unseen": number(1.0, 1e100),
    "table": optional(TABLE),
}


def _class_label(value: Any, place: str) -> None:
    """A label: a text, a truth value or a number."""
    rule = label if isinstance(value, str) else truth if isinstance(value, bool) else number(-(2.0**63), 2.0**64)
    rule(value, place)


CLASS_TYPES = ("|b1", "|i1", "|u1", *(f"<{kind}{size}" for kind in "iuf" for size in (2, 4, 8)), "U", "|O")
ESTIMATORS: dict[str, Rule] = {
    "StationaryRegressor": record(
        ESTIMATOR
        | {
            "estimator": one_of("StationaryRegressor"),
            "one_target": truth,
            "mixtures": list_of(REGRESSION_MIXTURE, shortest=1, longest=MAX_MEMBERS),
        }
    ),
    "StationaryClassifier": record(
        ESTIMATOR
        | {
            "estimator": one_of("StationaryClassifier"),
            "classes": list_of(_class_label, shortest=2),
            "class_type": one_of(*CLASS_TYPES),
            "mixtures": list_of(CLASS_MIXTURE, shortest=1, longest=1),
        }
    ),
}


# ------------------------------------------------------------------ relations between fields


def _different(values: list[Any], what: str) -> None:
    require(len(set(values)) == len(values), f"{what} must differ from each other")


def _check_label_memory(labels: list[str], what: str) -> None:
    size = len(labels) * max(map(len, labels), default=0)
    require(size <= MAX_LABEL_CHARACTERS, f"{what} must take at most {MAX_LABEL_CHARACTERS} characters, got {size}")


def _check_columns(content: Json) -> None:
    names = content["feature_names"]
    require(len(content["columns"]) == content["features"], "the number of columns must be that of the features")
    if names is not None:
        require(len(names) == content["features"], "there must be a name for each column")
        _different(names, "the names of columns")
    for place, column in enumerate(content["columns"]):
        categories, name = column["categories"], column["name"]
        known = (
            name == str(place) and categories is None if names is None else name in (str(place), f"'{names[place]}'")
        )
        require(known or (names is None and name[:1] == name[-1:] == "'"), f"columns[{place}] has another name")
        if categories is None:
            require(not column["shares"] and column["missing"] < 1, f"columns[{place}] is not a column of numbers")
            continue
        require(categories == sorted(set(categories)), f"the categories of column {name} must be sorted and differ")
        _check_label_memory(categories, f"the categories of column {name}")
        shares = column["shares"]
        require(len(shares) == len(categories), f"column {name} must have a share for each category")
        require(abs(sum(shares) - 1) < 1e-6, f"the shares of column {name} must add up to 1")


def _check_members(content: Json) -> None:
    for place, mixture in enumerate(content["mixtures"]):
        total = sum(member["weight"] for member in mixture["members"])
        require(abs(total - 1) < 1e-3, f"the weights of mixtures[{place}] must add up to 1, got {total:g}")
        count = 0 if mixture["networks"] is None else mixture["networks"]["count"]
        for member in mixture["members"]:
            require(member["network"] is None or member["network"] < count, f"mixtures[{place}] lacks a network")
            target_map = member.get("map", {"low": 0, "high": 1})
            require(target_map["low"] < target_map["high"], f"the map of mixtures[{place}] must have low below high")


def _check_classes(content: Json) -> None:
    labels, kind = content["classes"], content["class_type"].strip("<|")[0]
    allowed = {"b": bool, "i": int, "u": int, "f": float, "U": str}.get(kind)
    require(
        all(type(label_value) is allowed for label_value in labels) or allowed is None,
        "the classes must be of their type",
    )
    same = len({type(label_value) for label_value in labels}) == 1
    require(same, "the classes must all be of one type")
    require(all(a < b for a, b in itertools.pairwise(labels)), "the classes must be sorted and differ")
    if isinstance(labels[0], str):
        _check_label_memory(labels, "the classes")
    elif kind in "biuf":
        dtype = np.dtype(content["class_type"])
        inside = kind in "bf" or np.iinfo(dtype).min <= labels[0] <= labels[-1] <= np.iinfo(dtype).max
        require(inside, "the classes must fit into their type")
        require(np.array(labels).astype(dtype).tolist() == labels, "the classes must fit into their type")


def _check_table(content: Json) -> None:
    """Checks a table's columns, which become the columns of the estimator."""
    table, names = content["table"], content["feature_names"]
    _different([column["name"] for column in table["columns"]], "the names of the table's columns")
    for column in [*table["columns"], table["target"]["column"]]:
        _check_table_column(column)
    columns = [TableColumn(**column) for column in table["columns"]]
    outputs = [(name, column.kind == "category") for column in columns for name in column.outputs]
    require(names == [name for name, _ in outputs], "the table's columns must become those of the estimator")
    categorical = [column["categories"] is not None for column in content["columns"]]
    require(
        categorical == [category for _, category in outputs], "categories of the table must be those of the estimator"
    )
    known = {column["name"] for column in table["columns"]}
    require(set(table["drop"]) <= known, "the columns to leave out must be in the table")
    require(
        set(table["keep"]) <= known - set(table["drop"]), "the columns to keep must be in the table, and not left out"
    )
    task, expected = table["target"]["task"], "regression" if "one_target" in content else "classification"
    require(task == expected and content.get("one_target", True), "the target must fit the estimator")
    require(table["target"]["column"]["kind"] == TASKS[task], "the column of the target must fit its task")


def _check_table_column(column: Json) -> None:
    kind, parts, levels, where = column["kind"], column["parts"], column["levels"], f"the column {column['name']!r:.60}"
    _different(parts, f"the parts of {where}")
    _different(levels, f"the levels of {where}")
    _check_label_memory(levels, f"the levels of {where}")
    dash = kind == "category" and parts == ["-"]  # a class that is called so
    require(kind in ("date", "text") or not parts or dash, f"{where} must have no parts")
    require(kind == "category" or not levels, f"{where} must have no levels")
    require(kind == "number" or column["style"] != cells.AMOUNTS, f"{where} must have no style of numbers")
    if kind == "time":
        require(column["style"] in dates.TIMES, f"{where} must have the format of a time")
    if kind == "date":
        require(column["style"] not in dates.TIMES, f"{where} must have the format of a date")
        require(len(parts) > 0 and set(parts) <= {"days", *DATE_PARTS}, f"{where} must have parts of a date")
        first = pd.to_datetime(column["first"], errors="coerce", format="ISO8601")
        require(not pd.isna(first) and first.tzinfo is None, f"{where} must have a first date")


def estimator_rules(content: Json, entries: Mapping[str, Entry]) -> dict[str, TensorRule]:
    """Judges the JSON of an estimator's file and the declared sizes of its tensors.

    Returns:
        The rules for the values of the tensors.

    Raises:
        WrongValue: Something is not as in any file that ``save`` wrote.
    """
    one_of(*ESTIMATORS)(content.get("estimator"), "estimator")
    ESTIMATORS[content["estimator"]](content, "")
    _check_columns(content)
    _check_members(content)
    if "classes" in content:
        _check_classes(content)
    else:
        require(len(content["mixtures"]) == 1 or not content["one_target"], "one target must have one mixture")
    if content["table"] is not None:
        _check_table(content)
    rules = tensor_rules(content, entries)
    check_entries(rules, entries)
    return rules
