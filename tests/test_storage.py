"""Saved models: they come back bit for bit, and anything else is refused without running a thing."""

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone

from bochner import Matern, storage
from bochner.estimators import Settings, StationaryClassifier, StationaryRegressor
from bochner.storage import ModelFileError, container, load, models, reading, rules, save, schema, writing
from bochner.tables.estimators import TableClassifier, TableRegressor
from forging import Parts, sealed, unsealed

LAST = "0.network0.0"  # intervals of a network
NETWORKS = Settings(network_rows=60, least_steps=10, most_steps=10, member_floor=0.0)
KINDS = {
    "regression": (StationaryRegressor, {"hidden_layer_sizes": ()}),
    "classes": (StationaryClassifier, {"hidden_layer_sizes": ()}),
    "networks": (
        StationaryRegressor,
        {"kernel": ("rbf", Matern(nu=2.5)), "settings": NETWORKS, "hidden_layer_sizes": (8, 3)},
    ),
    "classes on networks": (
        StationaryClassifier,
        {"kernel": (Matern(nu=2.5),), "settings": NETWORKS, "hidden_layer_sizes": (8, 3)},
    ),
    "several targets": (StationaryRegressor, {"hidden_layer_sizes": ()}),
    "table": (StationaryRegressor, {"hidden_layer_sizes": ()}),
    "raw table": (TableRegressor, {"hidden_layer_sizes": (), "drop": ("b",)}),
    "raw classes": (TableClassifier, {"hidden_layer_sizes": (), "kernel": "rbf"}),
}


def data(name):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3))
    y = np.sin(x[:, 0]) + 0.1 * rng.normal(size=60)
    if KINDS[name][0] is StationaryClassifier:
        return x, np.where(y > 0, "up", "down")
    if name in ("table", "raw table", "raw classes"):
        frame = pd.DataFrame(x, columns=list("abc")).assign(d=np.where(x[:, 2] > 0, "u", "v"))
        frame.loc[:4, "a"] = np.nan
        if name == "table":
            return frame, np.exp(y)
        days = pd.date_range("2026-01-01", periods=60).strftime("%d.%m.%Y")
        frame = frame.assign(
            day=days, id=[f"n{i}" for i in range(60)], fee=[f"€ {v:.2f}".replace(".", ",") for v in y + 9]
        )
        return frame, [f"${v:.2f}" for v in np.exp(y)] if name == "raw table" else np.where(y > 0, " up", "down")
    return x, np.stack([y, y**2], 1) if name == "several targets" else y


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    made = {}
    for name, (kind, options) in KINDS.items():
        estimator = kind(random_state=0, **options).fit(*data(name))
        made[name] = (estimator, save(folder / f"{name}.bochner", estimator))
    return made


def answers(estimator, x):
    first = (
        estimator.predict_proba(x)
        if hasattr(estimator, "classes_")
        else np.stack(estimator.predict(x, return_std=True))
    )
    return first.tobytes() + estimator.ood_score(x).tobytes() + str(estimator.ood_threshold_).encode()


NEW_PROCESS = """
import sys
sys.path.insert(0, "tests")
from test_storage import *
for name in KINDS:
    sys.stdout.buffer.write(answers(load(f"{sys.argv[1]}/{name}.bochner").estimator, data(name)[0]))
"""


def test_a_new_process_predicts_the_same_bits(saved):
    folder = saved["table"][1].parent
    found = subprocess.run([sys.executable, "-c", NEW_PROCESS, folder], capture_output=True, check=True)
    assert found.stdout == b"".join(answers(estimator, data(name)[0]) for name, (estimator, _) in saved.items())


@pytest.mark.parametrize("key", [None, b"secret"])
def test_the_same_model_gives_the_same_bytes(key, saved, tmp_path):
    for name, (estimator, path) in saved.items():
        first = save(tmp_path / "first", estimator, key=key).read_bytes()
        again = save(tmp_path / "again", load(tmp_path / "first", key=key).estimator, key=key).read_bytes()
        assert first == save(tmp_path / "copy", copy.deepcopy(estimator), key=key).read_bytes()
        assert first == again
        assert (first == path.read_bytes()) == (key is None), name


def test_everything_else_comes_back_too(saved):
    for estimator, path in saved.values():
        back = load(path)
        assert back.about["estimator"] == type(estimator).__name__
        assert back.estimator.get_params() == estimator.get_params() | {"device": "auto"}
        if hasattr(estimator, "table_"):
            assert back.estimator.summary_ == estimator.summary_
            assert (back.estimator.table_, back.estimator.target_) == (estimator.table_, estimator.target_)
        else:
            assert back.estimator.columns_ == estimator.columns_
        if hasattr(estimator, "classes_"):
            np.testing.assert_array_equal(back.estimator.classes_, estimator.classes_)
    regressor, path = saved["regression"]
    again = load(path).estimator
    assert again.log_marginal_likelihood_ == regressor.log_marginal_likelihood_
    x, y = data("regression")
    again.partial_fit(x + 1, y)  # the stream goes on where it was saved
    assert {member.head.sums.count for member in again.mixtures_[0].members} == {120.0}


def test_names_of_columns_and_categories_are_kept(saved, tmp_path):
    back = load(saved["table"][1]).estimator
    assert list(back.feature_names_in_) == ["a", "b", "c", "d"]
    assert back.columns_.columns[3].categories == ("u", "v")
    x, y = data("regression")
    model = StationaryRegressor(hidden_layer_sizes=(), random_state=np.random.RandomState(0)).fit(x, y)
    assert load(save(tmp_path / "m.bochner", model)).estimator.random_state is None


# ------------------------------------------------------------------ refusals


def test_two_hundred_damaged_copies_are_refused(saved, tmp_path):
    whole = saved["classes"][1].read_bytes()
    rng = np.random.default_rng(0)
    header = 8 + int.from_bytes(whole[:8], "little")
    copies = [whole[: int(n)] for n in rng.integers(0, len(whole), 60)] + [b"", whole + b"x", whole[1:]]
    for place in [*range(12), *rng.integers(8, header, 65), *rng.integers(header, len(whole), 60)]:
        at = int(place)
        copies.append(whole[:at] + bytes([whole[at] ^ (1 << int(rng.integers(8)))]) + whole[at + 1 :])
    assert len(copies) == 200
    for damaged in copies:
        path = tmp_path / "damaged.bochner"
        path.write_bytes(damaged)
        with pytest.raises(ModelFileError, match=r"is not a model of bochner|is damaged or was edited"):
            load(path)


def edited(path, target, change=lambda _: None, tensors=lambda found: found):
    """A copy with edited JSON and tensors under a correct checksum: what a careful attacker would make."""
    parts = Parts.of(path.read_bytes())
    change(parts.content)
    target.write_bytes(Parts(parts.content, tensors(parts.tensors)).data())
    return target


MEMBER = r"mixtures\[0\]\.members\[0\]\."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(format=1), "has format 1, and this bochner .* reads format 8; it was written by bochner"),
        (lambda c: c.update(format="8"), "format must be a whole number from 0 to 1000000, got '8' instead"),
        (lambda c: c.pop("format"), "it has no format"),
        (
            lambda c: c.update(estimator="os.system"),
            "estimator must be 'StationaryRegressor' or .* got 'os.system' instead",
        ),
        (lambda c: c.update(estimator="StationaryRegressor"), r"lacks \['one_target'\]"),
        (
            lambda c: c.update(constants={"kernel jitter": 1e-9}),
            "constants must be {.*}, got {'kernel jitter': 1e-09} instead",
        ),
        (lambda c: c["parameters"].update(hidden_layer_sizes=[-1]), r"hidden_layer_sizes\[0\] must be a whole number"),
        (lambda c: c["parameters"].update(hidden_layer_sizes=[1] * 1000), "must be a list of 0 to 100 entries"),
        (
            lambda c: c["parameters"].update(kernel={"type": "exec"}),
            "parameters.kernel.type must be .* got 'exec'",
        ),
        (lambda c: c["parameters"].update(kernel="exec"), "parameters.kernel must be .* got 'exec'"),
        (lambda c: c["parameters"].update(surprise=1), r"parameters has \['surprise'\], which is not known"),
        (lambda c: c["parameters"].update(settings={"surprise": 1}), "parameters.settings lacks"),
        (lambda c: c["parameters"].update(verbose=3), "parameters.verbose must be true or false, got 3"),
        (lambda c: c["parameters"].update(false_alarm=1.5), "parameters.false_alarm must be a number from 1e-12 to 1"),
        (lambda c: c.update(ood_threshold=float("nan")), "NaN is not a number"),
        (lambda c: c.update(ood_threshold="0.9"), "ood_threshold must be a number from 0 to 1, got '0.9' instead"),
        (lambda c: c.update(ood_threshold=1.5), "ood_threshold must be a number from 0 to 1, got 1.5 instead"),
        (lambda c: c["columns"][0].update(scale=0.0), r"columns\[0\].scale must be a number from"),
        (lambda c: c["columns"][0].update(missing=1.0), r"columns\[0\] is not a column of numbers"),
        (lambda c: c["columns"][0].update(name="x"), r"columns\[0\] has another name"),
        (lambda c: c["columns"][0].update(name="\ud800"), r"columns\[0\].name must be a text"),
        (lambda c: c["columns"].pop(), "the number of columns must be that of the features"),
        (lambda c: c["mixtures"][0]["members"][0].update(weight=0.9), "the weights of .* must add up to 1, got"),
        (lambda c: c["mixtures"][0]["members"][0].update(weight=-1), MEMBER + "weight must be a number"),
        (lambda c: c["mixtures"][0]["members"][0].update(amplitude=0), MEMBER + "amplitude must be a number"),
        (lambda c: c["mixtures"][0]["members"][0].update(averaging=2.0), MEMBER + "averaging must be a number"),
        (lambda c: c["mixtures"][0]["members"][0].update(network=0), "lacks a network"),
        (lambda c: c["mixtures"][0]["members"][0].update(kernel={}), MEMBER + "kernel must be an object with 'type'"),
        (lambda c: c["mixtures"][0]["members"].clear(), "members must be a list of 1 to 10000 entries"),
        (lambda c: c["mixtures"].clear(), "mixtures must be a list of 1 to 1 entries"),
        (lambda c: c["mixtures"][0].update(networks={"count": 10**9, "widths": [1]}), "networks.count must be a whole"),
        (lambda c: c["mixtures"][0].update(networks={"count": 1, "widths": [30_000, 30_000]}), "the tensors lack"),
        (lambda c: c.update(classes=["a", "b", "c"]), r"0.member0.weights must be torch.float64 of shape \(60, 3\)"),
        (lambda c: c.update(classes=["a", "a"]), "the classes must be sorted and differ"),
        (lambda c: c.update(classes=["a", 1]), "the classes must be of their type"),
        (lambda c: c.update(classes=["a", 1], class_type="|O"), "the classes must all be of one type"),
        (lambda c: c.update(classes=[1, 300], class_type="|u1"), "the classes must fit into their type"),
        (lambda c: c.update(classes=["a", "b\0"]), r"classes\[1\] must be at most 10000 characters, none of them NUL"),
        (lambda c: c.update(classes=["a", "b" * 10_001]), r"classes\[1\] must be at most 10000 characters"),
        (
            lambda c: c.update(classes=[*(f"{n:04d}" for n in range(3000)), "b" * 10_000]),
            "the classes must take at most 16777216 characters, got 30010000",
        ),
        (lambda c: c.update(class_type="<U500000000"), "class_type must be .* got '<U500000000' instead"),
        (lambda c: c.pop("parameters"), r"lacks \['parameters'\]"),
    ],
)
def test_edited_json_is_refused_even_under_a_correct_checksum(change, message, saved, tmp_path):
    with pytest.raises(ModelFileError, match=message):
        load(edited(saved["classes"][1], tmp_path / "edited.bochner", change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["mixtures"].append(c["mixtures"][0]), "one target must have one mixture"),
        (
            lambda c: c["columns"][3].update(categories=["v", "u"]),
            "the categories of column 'd' must be sorted and differ",
        ),
        (
            lambda c: c["columns"][3].update(categories=["u", "u"]),
            "the categories of column 'd' must be sorted and differ",
        ),
        (lambda c: c["columns"][3].update(shares=[1.0]), "column 'd' must have a share for each category"),
        (lambda c: c["columns"][3].update(shares=[0.9, 0.9]), "the shares of column 'd' must add up to 1"),
        (lambda c: c.update(feature_names=["a", "b", "c", "a"]), "the names of columns must differ from each other"),
        (lambda c: c.update(feature_names=["a", "b"]), "there must be a name for each column"),
        (lambda c: c["mixtures"][0]["members"][0]["map"].update(low=1e100), "must have low below high"),
        (
            lambda c: c["mixtures"][0]["members"][0]["map"].update(kind="exec"),
            "map.kind must be 'identity' or 'log' or 'power', got 'exec'",
        ),
        (lambda c: c["mixtures"][0]["members"][0]["map"].update(scale=1e110, spread=1e110), "is not finite"),
    ],
)
def test_edited_columns_and_maps_of_a_regressor_are_refused(change, message, saved, tmp_path):
    with pytest.raises(ModelFileError, match=message):
        load(edited(saved["table"][1], tmp_path / "edited.bochner", change))


def test_numbers_without_a_point_are_numbers_however_large(saved, tmp_path):
    path, x = saved["table"][1], data("table")[0].assign(d="strange")
    whole = load(edited(path, tmp_path / "whole", lambda c: c.update(unseen=2**63))).estimator
    point = load(edited(path, tmp_path / "point", lambda c: c.update(unseen=2.0**63))).estimator
    assert answers(whole, x) == answers(point, x)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (lambda t: {k: v for k, v in t.items() if k != "0.member0.gram"}, r"the tensors lack \['0.member0.gram'\]"),
        (lambda t: t | {"more": torch.zeros(3)}, r"the tensors \['more'\] are not known"),
        (lambda t: t | {"novelty.left": t["novelty.left"] * torch.nan}, "novelty.left must hold numbers from 0 to 1"),
        (lambda t: t | {"novelty.left": t["novelty.left"].flip(0).contiguous()}, "novelty.left must be sorted"),
        (lambda t: t | {"novelty.factor": -t["novelty.factor"]}, "novelty.factor must have a positive diagonal"),
        (lambda t: t | {"novelty.left": torch.zeros(3, 0, dtype=torch.float64)}, "novelty.left must be torch.float64"),
        (lambda t: t | {"novelty.left": torch.zeros(0, dtype=torch.float64)}, "must have 1 to 10000000 rows"),
        (lambda t: cut(t, "novelty.factor"), r"novelty.factor must be torch.float64 of shape \(10,\)"),
        (lambda t: cut(t, "0.member0.weights"), r"0.member0.weights must be torch.float64 of shape"),
        (lambda t: cut(t, "0.member0.gram"), r"0.member0.gram must be torch.float64 of shape"),
        (
            lambda t: t | {"0.member0.gram": -1e9 * t["0.member0.gram"]},
            r"precision matrix is not positive definite even after jitter of 1e-6; fetch",
        ),
        (
            lambda t: t | {"0.member0.lengthscale": -t["0.member0.lengthscale"]},
            "lengthscale must hold numbers from 1e-60",
        ),
        (lambda t: t | {"0.member0.anchors": t["0.member0.anchors"].float()}, "got torch.float32 of shape"),
        (
            lambda t: t | {"0.member0.anchors": t["0.member0.anchors"].half()},
            "0.member0.anchors must hold F64 or F32 or I64",
        ),
    ],
)
def test_edited_tensors_are_refused_even_under_a_correct_checksum(tensors, message, saved, tmp_path):
    with pytest.raises(ModelFileError, match=message):
        load(edited(saved["classes"][1], tmp_path / "edited.bochner", tensors=tensors))


def cut(tensors, name):
    """Without the last entry of a tensor."""
    return tensors | {name: tensors[name][:-1].contiguous()}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (lambda t: t | {f"{LAST}.column": t[f"{LAST}.column"] + 100}, "must hold numbers from 0 to 2"),
        (lambda t: t | {f"{LAST}.column": t[f"{LAST}.column"] - 100}, "must hold numbers from 0 to 2"),
        (lambda t: t | {f"{LAST}.column": t[f"{LAST}.column"].double()}, "must be torch.int64"),
        (lambda t: t | {f"{LAST}.width": 0 * t[f"{LAST}.width"]}, "must hold numbers from 1e-09"),
        (lambda t: cut(t, f"{LAST}.left"), f"{LAST}.left must be torch.float32 of shape"),
        (
            lambda t: t | {f"{LAST}.{name}": t[f"{LAST}.{name}"][None] for name in ("column", "left", "width")},
            "must be torch.int64 of shape",
        ),
        (
            lambda t: t | {"0.network0.1.0.weight": t["0.network0.1.0.weight"] * 1e38},
            "0.network0.1.0.weight must hold numbers from -1e\\+12",
        ),
    ],
)
def test_edited_networks_are_refused(tensors, message, saved, tmp_path):
    with pytest.raises(ModelFileError, match=message):
        load(edited(saved["classes on networks"][1], tmp_path / "edited.bochner", tensors=tensors))


# ------------------------------------------------------------------ signatures


def test_a_signed_file_is_read_with_its_key_alone(saved, tmp_path):
    estimator, plain = saved["regression"]
    x = data("regression")[0]
    path = save(tmp_path / "signed.bochner", estimator, key=b"secret")
    assert answers(load(path, key=b"secret").estimator, x) == answers(estimator, x)
    with pytest.raises(ModelFileError, match=r"was signed with another key, or edited since"):
        load(path, key=b"another")
    with pytest.raises(ModelFileError, match=r"is signed; give its key, if you trust it: load.path, key=\.\.\.\)"):
        load(path)
    with pytest.raises(ModelFileError, match=r"has no signature; load it without a key, if you trust it: load.path\)"):
        load(plain, key=b"secret")
    for key in ("secret", b"", 5):
        with pytest.raises(ValueError, match="The key parameter must be bytes, at least one, got"):
            load(plain, key=key)
        with pytest.raises(ValueError, match="The key parameter must be bytes, at least one, got"):
            save(tmp_path / "unwritten", estimator, key=key)
    assert not (tmp_path / "unwritten").exists()


def test_an_edited_signed_file_is_refused_though_its_checksum_is_right(saved, tmp_path):
    path = save(tmp_path / "signed.bochner", saved["regression"][0], key=b"secret")
    whole = path.read_bytes()
    for place in (len(whole) - 1, whole.index(b"false_alarm") + 18):
        changed = unsealed(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        path.write_bytes(sealed(changed))
        with pytest.raises(ModelFileError, match="was signed with another key, or edited since"):
            load(path, key=b"secret")
    unsigned = edited(saved["regression"][1], tmp_path / "unsigned.bochner", lambda c: c.update(ood_threshold=0.5))
    with pytest.raises(ModelFileError, match="has no signature"):
        load(unsigned, key=b"secret")


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def test_a_pickle_is_never_unpickled(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.bochner").write_bytes(pickle.dumps(Bomb()))
    torch.save({"a": Bomb()}, "b.bochner")
    whole = saved["classes"][1].read_bytes()
    (tmp_path / "c.bochner").write_bytes(whole + pickle.dumps(Bomb()))
    for name in ("a", "b", "c"):
        with pytest.raises(ModelFileError, match=r"is not a model of bochner|is damaged or was edited"):
            load(f"{name}.bochner")
    assert not (tmp_path / "exploded").exists()
    modules = (container, models, reading, rules, schema, storage, writing)
    assert not any({"pickle", "joblib"} & set(module.__dict__) for module in modules)


def test_what_is_not_a_file_is_said(tmp_path):
    with pytest.raises(
        ModelFileError, match=r"does not exist; give the file that 'bochner fit' or bochner\.storage\.save wrote"
    ):
        load(tmp_path / "none.bochner")
    with pytest.raises(ModelFileError, match="is a folder, not a file"):
        load(tmp_path)


def test_only_fitted_estimators_are_saved(tmp_path):
    with pytest.raises(
        ValueError, match=r"must be a fitted TableRegressor or .* or StationaryClassifier, got dict instead"
    ):
        save(tmp_path / "m", {})
    with pytest.raises(ValueError, match="got StationaryRegressor without a fit instead"):
        save(tmp_path / "m", StationaryRegressor())
    with pytest.raises(ValueError, match="got TableClassifier without a fit instead"):
        save(tmp_path / "m", TableClassifier())


def _column(content, name):
    return next(own for own in content["table"]["columns"] if own["name"] == name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(table=[]), r"table must be an object, got \[\] instead"),
        (lambda c: c["table"].update(columns=[]), "table.columns must be a list of 1 to"),
        (lambda c: c["table"]["columns"].pop(0), "the table's columns must become those of the estimator"),
        (
            lambda c: c["table"]["columns"].append(c["table"]["columns"][0]),
            "the names of the table's columns must differ",
        ),
        (lambda c: c["table"].update(drop="b"), "table.drop must be a list"),
        (lambda c: c["table"].update(drop=["x"]), "the columns to leave out must be in the table"),
        (lambda c: c["table"].update(keep=["x"]), "the columns to keep must be in the table, and not left out"),
        (lambda c: c["table"].update(keep=["b"]), "the columns to keep must be in the table, and not left out"),
        (lambda c: _column(c, "d").update(style="amounts"), "the column 'd' must have no style of numbers"),
        (lambda c: c["table"]["target"].update(task="classification"), "the target must fit the estimator"),
        (lambda c: c["table"]["target"]["column"].update(kind="truth"), "the column of the target must fit its task"),
        (lambda c: c["table"]["target"].update(name=5), "table.target.name must be a text, got 5 instead"),
        (lambda c: _column(c, "a").update(kind="exec"), "kind must be .* got 'exec' instead"),
        (lambda c: _column(c, "a").update(kind="category"), "categories of the table must be those of the estimator"),
        (lambda c: _column(c, "a").update(kind="time"), "the column 'a' must have the format of a time"),
        (lambda c: _column(c, "a").update(decimal="x"), "decimal must be .* got 'x' instead"),
        (lambda c: _column(c, "a").update(parts=["x"]), "the column 'a' must have no parts"),
        (lambda c: _column(c, "a").update(levels=["x"]), "the column 'a' must have no levels"),
        (lambda c: _column(c, "a").pop("unit"), r"lacks \['unit'\]"),
        (lambda c: _column(c, "d").update(levels=[1]), r"levels\[0\] must be a text, got 1 instead"),
        (lambda c: _column(c, "d").update(levels=["u", "u"]), "the levels of the column 'd' must differ"),
        (lambda c: _column(c, "day").update(style="%Q"), "style must be one of"),
        (lambda c: _column(c, "day").update(style="%H:%M"), "the column 'day' must have the format of a date"),
        (lambda c: _column(c, "day").update(first="soon"), "the column 'day' must have a first date"),
        (lambda c: _column(c, "day").update(first="2026-01-01T00:00Z"), "the column 'day' must have a first date"),
        (lambda c: _column(c, "day").update(parts=["__class__"]), "the column 'day' must have parts of a date"),
        (lambda c: _column(c, "day").update(parts=["days"]), "the table's columns must become those of the estimator"),
    ],
)
def test_edited_columns_of_a_table_are_refused(change, message, saved, tmp_path):
    with pytest.raises(ModelFileError, match=message):
        load(edited(saved["raw table"][1], tmp_path / "edited.bochner", change))


def test_what_could_not_be_read_back_is_not_written(saved, tmp_path):
    estimator = clone(saved["regression"][0]).set_params(false_alarm=np.float64(0.1), random_state=np.int64(3))
    estimator.fit(*data("regression"))
    back = load(save(tmp_path / "m.bochner", estimator)).estimator  # parameters as a grid search sets them
    assert (back.false_alarm, back.random_state) == (0.1, 3)
    estimator.ood_threshold_ = "high"
    with pytest.raises(
        ValueError, match=r"could not be read back, so it is not written .ood_threshold must be a number"
    ):
        save(tmp_path / "n.bochner", estimator)
    assert not (tmp_path / "n.bochner").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_gpu_is_not_blamed_on_the_file(saved):
    with pytest.raises(ValueError, match=r"asks for a GPU .'cuda'., but torch sees none"):
        load(saved["regression"][1], device="cuda")


def test_a_wrong_device_is_not_blamed_on_the_file(saved):
    with pytest.raises(ValueError, match=r"^The device parameter must be one of auto, cpu, cuda, got 'gpu' instead"):
        load(saved["regression"][1], device="gpu")


def test_too_little_memory_is_not_blamed_on_the_file(saved, monkeypatch):
    def build(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("bochner.storage.models.build_estimator", build)
    with pytest.raises(RuntimeError, match=r"^DefaultCPUAllocator"):
        load(saved["regression"][1])


@pytest.mark.parametrize("name", KINDS)
def test_fitted_estimators_can_be_copied_and_pickled(name, saved):
    estimator, _ = saved[name]
    for other in (copy.deepcopy(estimator), pickle.loads(pickle.dumps(estimator))):
        assert answers(other, data(name)[0]) == answers(estimator, data(name)[0])


def test_a_failed_write_leaves_the_old_file_and_nothing_else(saved, tmp_path, monkeypatch):
    estimator, _ = saved["regression"]
    target = tmp_path / "m.bochner"
    target.write_bytes(b"old")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        save(target, estimator)
    assert target.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["m.bochner"]
