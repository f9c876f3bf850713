"""Saved models: they come back bit for bit, and anything else is refused without running a thing."""

import copy
import hashlib
import json
import os
import pickle
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load as parse
from safetensors.torch import save as serialise
from sklearn.base import clone

from bochner import Matern, storage
from bochner.estimators import Settings, StationaryClassifier, StationaryRegressor
from bochner.storage import ModelFileError, load, save
from bochner.tables.estimators import TableClassifier, TableRegressor

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


@pytest.mark.parametrize("name", KINDS)
def test_a_new_process_predicts_the_same_bits(name, saved, tmp_path):
    estimator, path = saved[name]
    x = pd.DataFrame(data(name)[0])
    x.to_pickle(tmp_path / "x.pkl")
    script = (
        "import sys, numpy as np, pandas as pd; from bochner.storage import load; e = load(sys.argv[1]).estimator;"
        "x = pd.read_pickle(sys.argv[2]); x = x if hasattr(e, 'feature_names_in_') or hasattr(e, 'table_') else x.to_numpy();"
        "first = e.predict_proba(x) if hasattr(e, 'classes_') else np.stack(e.predict(x, return_std=True));"
        "sys.stdout.buffer.write(first.tobytes() + e.ood_score(x).tobytes() + str(e.ood_threshold_).encode())"
    )
    found = subprocess.run([sys.executable, "-c", script, path, tmp_path / "x.pkl"], capture_output=True, check=True)
    assert found.stdout == answers(estimator, data(name)[0])


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


def resigned(path, target, change, tensors=lambda found: found):
    """A copy with edited JSON and tensors under a correct checksum: what a careful attacker would make."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    content = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["bochner"])
    change(content)
    made = serialise(tensors(parse(data)), metadata={"bochner": json.dumps(content), "sha256": "0" * 64})
    digest = hashlib.sha256(made).hexdigest().encode()
    target.write_bytes(made.replace(b'"sha256":"' + b"0" * 64, b'"sha256":"' + digest, 1))
    return target


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(format=1), "has format 1, and this bochner .* reads format 6; it was written by bochner"),
        (lambda c: c.update(estimator="os.system"), "does not hold what a model must hold .KeyError: 'os.system'"),
        (lambda c: c.update(estimator="StationaryRegressor"), "does not hold what a model must hold"),
        (lambda c: c["parameters"].update(hidden_layer_sizes=[-1]), "hidden_layer_sizes parameter must be"),
        (lambda c: c["parameters"].update(kernel={"type": "exec"}), "KeyError: 'exec'"),
        (lambda c: c["parameters"].update(surprise=1), "unexpected keyword argument 'surprise'"),
        (lambda c: c["parameters"].update(settings={"surprise": 1}), "unexpected keyword argument 'surprise'"),
        (lambda c: c.update(ood_threshold=float("nan")), "ood_threshold is nan"),
        (lambda c: c.update(ood_threshold="0.9"), "ood_threshold is '0.9'"),
        (lambda c: c["columns"][0].update(scale=0.0), "the scale of column 0 is 0.0"),
        (lambda c: c["columns"].pop(), "the number of columns"),
        (lambda c: c["mixtures"][0]["members"][0].update(weight=0.9), "the weights do not add up to 1"),
        (lambda c: c["mixtures"][0]["members"][0].update(weight=-1), "a weight is -1"),
        (lambda c: c["mixtures"][0]["members"][0].update(amplitude=0), "an amplitude is 0"),
        (lambda c: c["mixtures"][0]["members"][0].update(averaging=2.0), "the averaging is not a share"),
        (lambda c: c["mixtures"][0]["members"][0].update(network=0), "a network is missing"),
        (lambda c: c["mixtures"][0]["members"][0].update(kernel={"type": "exec"}), "KeyError: 'exec'"),
        (lambda c: c["mixtures"][0]["members"].clear(), "the weights do not add up to 1"),
        (lambda c: c["mixtures"].clear(), "there must be one mixture"),
        (lambda c: c["mixtures"][0].update(networks=10**9), "does not hold what a model must hold"),
        (lambda c: c.update(classes=["a", "b", "c"]), "a head's sizes do not agree"),
        (lambda c: c.update(classes=["a", "a"]), "the classes are not different"),
        (lambda c: c.update(class_type="O8x"), "does not hold what a model must hold"),
        (lambda c: c.pop("parameters"), "KeyError: 'parameters'"),
    ],
)
def test_edited_json_is_refused_even_under_a_correct_checksum(change, message, saved, tmp_path):
    path = resigned(saved["classes"][1], tmp_path / "edited.bochner", change)
    with pytest.raises(ModelFileError, match=message):
        load(path)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (lambda t: {k: v for k, v in t.items() if k != "0.member0.gram"}, "KeyError: 'gram'"),
        (lambda t: t | {"novelty.left": t["novelty.left"] * torch.nan}, "novelty.left is not finite"),
        (lambda t: t | {"novelty.left": t["novelty.left"].flip(0).contiguous()}, "values are not sorted"),
        (lambda t: cut(t, "novelty.factor"), "the sizes of the score"),
        (lambda t: cut(t, "0.member0.weights"), "a head's sizes do not agree"),
        (lambda t: cut(t, "0.member0.gram"), "a head's sizes do not agree"),
        (lambda t: t | {"0.member0.gram": -1e9 * t["0.member0.gram"]}, "positive-definite"),
        (lambda t: t | {"0.member0.lengthscale": -t["0.member0.lengthscale"]}, "a lengthscale is not positive"),
        (lambda t: t | {"0.member0.anchors": t["0.member0.anchors"].float()}, "a head's sizes do not agree"),
    ],
)
def test_edited_tensors_are_refused_even_under_a_correct_checksum(tensors, message, saved, tmp_path):
    path = resigned(saved["classes"][1], tmp_path / "edited.bochner", lambda _: None, tensors)
    with pytest.raises(ModelFileError, match=message):
        load(path)


def cut(tensors, name):
    """Without the last entry of a tensor."""
    return tensors | {name: tensors[name][:-1].contiguous()}


@pytest.mark.parametrize(
    "tensors",
    [
        lambda t: t | {f"{LAST}.column": t[f"{LAST}.column"] + 100},
        lambda t: t | {f"{LAST}.column": t[f"{LAST}.column"] - 100},
        lambda t: t | {f"{LAST}.column": t[f"{LAST}.column"].double()},
        lambda t: t | {f"{LAST}.width": 0 * t[f"{LAST}.width"]},
        lambda t: cut(t, f"{LAST}.left"),
        lambda t: t | {f"{LAST}.{name}": t[f"{LAST}.{name}"][None] for name in ("column", "left", "width")},
    ],
)
def test_edited_intervals_are_refused(tensors, saved, tmp_path):
    path = resigned(saved["classes on networks"][1], tmp_path / "edited.bochner", lambda _: None, tensors)
    with pytest.raises(ModelFileError, match="the intervals do not agree with the columns"):
        load(path)


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
    assert not {"pickle", "torch.load"} & set(storage.__dict__)


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
        (lambda c: c.update(table=[]), "does not hold what a model must hold"),
        (lambda c: c["table"].update(columns=[]), "the columns are not a list"),
        (lambda c: c["table"]["columns"].pop(0), "the columns do not fit the estimator"),
        (lambda c: c["table"].update(drop="b"), "the columns to leave out"),
        (lambda c: c["table"]["target"].update(task="classification"), "does not fit the target"),
        (lambda c: c["table"]["target"].update(name=5), "the target is not described"),
        (lambda c: _column(c, "a").update(kind="exec"), "the column 'a' is not as it must be"),
        (lambda c: _column(c, "a").update(decimal="x"), "the column 'a' is not as it must be"),
        (lambda c: _column(c, "a").pop("unit"), "a column is not described"),
        (lambda c: _column(c, "d").update(levels=[1]), "the column 'd' is not as it must be"),
        (lambda c: _column(c, "day").update(style="%Q"), "the column 'day' is not as it must be"),
        (lambda c: _column(c, "day").update(first="soon"), "the column 'day' is not as it must be"),
        (lambda c: _column(c, "day").update(parts=["__class__"]), "the column 'day' is not as it must be"),
        (lambda c: _column(c, "day").update(parts=["days"]), "the columns do not fit the estimator"),
    ],
)
def test_edited_columns_are_refused(change, message, saved, tmp_path):
    path = resigned(saved["raw table"][1], tmp_path / "edited.bochner", change)
    with pytest.raises(ModelFileError, match=message):
        load(path)


def test_what_could_not_be_read_back_is_not_written(saved, tmp_path):
    estimator = clone(saved["regression"][0]).set_params(false_alarm=np.float64(0.1), random_state=np.int64(3))
    estimator.fit(*data("regression"))
    back = load(save(tmp_path / "m.bochner", estimator)).estimator  # parameters as a grid search sets them
    assert (back.false_alarm, back.random_state) == (0.1, 3)
    estimator.ood_threshold_ = "high"
    with pytest.raises(ValueError, match=r"could not be read back, so it is not written .ood_threshold is 'high'"):
        save(tmp_path / "n.bochner", estimator)
    assert not (tmp_path / "n.bochner").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_gpu_is_not_blamed_on_the_file(saved):
    with pytest.raises(ValueError, match=r"asks for a GPU .'cuda'., but torch sees none"):
        load(saved["regression"][1], device="cuda")


@pytest.mark.parametrize("name", KINDS)
def test_fitted_estimators_can_be_copied_and_pickled(name, saved):
    estimator, _ = saved[name]
    for other in (copy.deepcopy(estimator), pickle.loads(pickle.dumps(estimator))):
        assert answers(other, data(name)[0]) == answers(estimator, data(name)[0])


def test_a_failed_write_leaves_the_old_file_and_nothing_else(saved, tmp_path, monkeypatch):
    estimator, _ = saved["regression"]
    target = tmp_path / "m.bochner"
    target.write_bytes(b"old")
    monkeypatch.setattr(
        storage.Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(OSError, match="No space left"):
        save(target, estimator)
    assert target.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["m.bochner"]
