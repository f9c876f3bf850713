"""Saved models: they come back bit for bit, and anything else is refused without running a thing."""

import copy
import hashlib
import json
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load as parse
from safetensors.torch import save as serialise
from sklearn.base import clone

from bochner import Matern, estimator_base, storage
from bochner.estimators import StationaryClassifier, StationaryRegressor
from bochner.storage import ModelFileError, load, save

LAST = "1.model.extractor.0"  # intervals of a network with hidden layers
KINDS = {
    "regression": (StationaryRegressor, {}),
    "classes": (StationaryClassifier, {}),
    "hidden": (StationaryRegressor, {"kernel": ("rbf", Matern(nu=2.0))}),
    "hidden classes": (StationaryClassifier, {"kernel": (Matern(nu=2.0),)}),
    "laplace": (StationaryClassifier, {"posterior": "laplace"}),
}


@pytest.fixture(scope="module", autouse=True)
def short_training():
    """Sixty rows are enough for hidden layers here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimator_base, "TRAINED_FROM", 60)
        patch.setattr(estimator_base, "EPOCHS", 30)
        yield


def data(kind):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3))
    y = np.sin(x[:, 0]) + 0.1 * rng.normal(size=60)
    return x, np.where(y > 0, "up", "down") if kind is StationaryClassifier else y


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    made = {}
    for name, (kind, options) in KINDS.items():
        hidden = () if name in ("regression", "classes") else (8, 3)
        estimator = kind(width=20, random_state=0, hidden=hidden, networks=2, **options).fit(*data(kind))
        made[name] = (estimator, save(folder / f"{name}.bochner", estimator, table={"a": 1}))
    return made


def answers(estimator):
    x = data(type(estimator))[0] * 2
    first = (
        estimator.predict_proba(x)
        if hasattr(estimator, "classes_")
        else np.stack(estimator.predict(x, return_std=True))
    )
    return first.tobytes() + estimator.ood_score(x).tobytes() + str(estimator.ood_threshold_).encode()


@pytest.mark.parametrize("name", KINDS)
def test_a_new_process_predicts_the_same_bits(name, saved, tmp_path):
    estimator, path = saved[name]
    np.save(tmp_path / "x.npy", data(type(estimator))[0] * 2)
    script = (
        "import sys, numpy as np; from bochner.storage import load; e = load(sys.argv[1]).estimator; x = np.load(sys.argv[2]);"
        "first = e.predict_proba(x) if hasattr(e, 'classes_') else np.stack(e.predict(x, return_std=True));"
        "sys.stdout.buffer.write(first.tobytes() + e.ood_score(x).tobytes() + str(e.ood_threshold_).encode())"
    )
    found = subprocess.run([sys.executable, "-c", script, path, tmp_path / "x.npy"], capture_output=True, check=True)
    assert found.stdout == answers(estimator)


def test_everything_else_comes_back_too(saved):
    for estimator, path in saved.values():
        back = load(path)
        assert back.table == {"a": 1}
        assert back.about["estimator"] == type(estimator).__name__
        assert back.about["rows"] == 60
        assert back.estimator.get_params() == estimator.get_params()
        for name in ("lengthscale_", "classes_", "x_mean_"):
            if hasattr(estimator, name):
                np.testing.assert_array_equal(getattr(back.estimator, name), getattr(estimator, name))
    regressor, path = saved["regression"]
    again = load(path).estimator
    assert again.log_marginal_likelihood_ == regressor.log_marginal_likelihood_
    x, y = data(StationaryRegressor)
    again.partial_fit(x + 1, y)  # the stream goes on where it was saved
    assert again.statistics_.count == 120
    assert [member.posterior.statistics.count for member in again.members_] == [120] * 3


def test_names_of_columns_are_kept(tmp_path):
    import pandas as pd

    x, y = data(StationaryRegressor)
    estimator = StationaryRegressor(width=20, random_state=np.random.RandomState(0)).fit(
        pd.DataFrame(x, columns=list("abc")), y
    )
    back = load(save(tmp_path / "m.bochner", estimator)).estimator
    assert list(back.feature_names_in_) == ["a", "b", "c"]
    assert back.random_state is None


def test_the_file_holds_no_training_row(saved):
    estimator, path = saved["regression"]
    x, _ = data(StationaryRegressor)
    for array in parse(path.read_bytes()).values():
        for row in x:
            assert not np.isin(row, array.numpy()).all()
    assert x[0].tobytes() not in path.read_bytes()
    assert (x[0] - estimator.x_mean_).tobytes() not in path.read_bytes()


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
        (lambda c: c.update(format=1), "has format 1, and this bochner .* reads format 3; it was written by bochner"),
        (lambda c: c.update(estimator="os.system"), "does not hold what a model must hold .KeyError: 'os.system'"),
        (lambda c: c.update(estimator="StationaryRegressor"), "does not hold what a model must hold"),
        (lambda c: c["parameters"].update(width=10**9), "the width does not agree with the weights"),
        (lambda c: c["parameters"].update(width="all"), "The width parameter must be an integer"),
        (lambda c: c["parameters"].update(kernel={"type": "exec"}), "KeyError: 'exec'"),
        (lambda c: c["parameters"].update(surprise=1), "unexpected keyword argument 'surprise'"),
        (lambda c: c["numbers"].update(__class__=1.0), "unknown number __class__"),
        (lambda c: c["numbers"].update(amplitude_="1"), "unknown number amplitude_"),
        (lambda c: c["members"][0].update(weight=0.9), "the weights are not positive, or do not add up to 1"),
        (
            lambda c: [m.update(weight=w) for m, w in zip(c["members"], (-1, 1, 1), strict=True)],
            "weights are not positive",
        ),
        (lambda c: c["members"][0].update(kernel={"type": "exec"}), "KeyError: 'exec'"),
        (lambda c: c["members"].clear(), "the weights are not positive, or do not add up to 1"),
        (lambda c: c.update(classes=["a", "b", "c"]), "does not hold what a model must hold"),
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
        (lambda t: {k: v for k, v in t.items() if k != "gram"}, "KeyError: 'gram'"),
        (lambda t: t | {"x_mean": t["x_mean"] * torch.nan}, "x_mean is not finite"),
        (
            lambda t: t | {"0.mean": t["0.mean"][:3].contiguous()},
            "mean parameter must have a column for each of 2 classes",
        ),
        (lambda t: t | {"gram": -t["gram"]}, "is not positive definite"),
        (lambda t: t | {"gram": t["gram"][:3, :3].contiguous()}, "the width does not agree with the sums"),
        (lambda t: {k: v for k, v in t.items() if k != "1.model.layer.weight"}, "KeyError: 'layer.weight'"),
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
    path = resigned(saved["hidden classes"][1], tmp_path / "edited.bochner", lambda _: None, tensors)
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
        ValueError, match="must be a fitted StationaryRegressor or StationaryClassifier, got dict instead"
    ):
        save(tmp_path / "m", {})
    with pytest.raises(ValueError, match="got StationaryRegressor without a fit instead"):
        save(tmp_path / "m", StationaryRegressor())


def test_what_could_not_be_read_back_is_not_written(saved, tmp_path):
    estimator = (
        clone(saved["regression"][0])
        .set_params(width=np.int64(20), random_state=np.int64(3))
        .fit(*data(StationaryRegressor))
    )
    back = load(save(tmp_path / "m.bochner", estimator)).estimator  # parameters as a grid search sets them
    assert (back.width, back.random_state) == (20, 3)
    estimator.set_params(width=40)
    with pytest.raises(ValueError, match=r"could not be read back, so it is not written .the width does not agree"):
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
        assert answers(other) == answers(estimator)


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
