"""Tables larger than memory: samples, sums, engines, and the fits that they make."""

import math
import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
import torch

from bochner.cli.files import Files
from bochner.cli.jobs import fit_file, predict_file
from bochner.estimators import Settings, StationaryClassifier, StationaryRegressor
from bochner.members.heads import GaussianHead, SoftmaxHead, as_targets, sums_of
from bochner.members.member import Inputs
from bochner.members.rows import TrainingRows
from bochner.streaming import tables as streamed_tables
from bochner.streaming.engines import check_engine, map_portions
from bochner.streaming.moments import MomentCollector, add_sums, from_lower_half, row_keys
from bochner.streaming.sample import Sample
from bochner.streaming.tables import TableSampler
from bochner.tables.errors import TableError
from bochner.tables.estimators import TableClassifier, TableRegressor
from bochner.tables.files.reading import Portion, open_table, read_table
from bochner.tables.fitting import Names, read_training, split_rows

ROWS = 3000
SMALL = Settings(
    sample_rows=600,
    wide_anchors=60,
    class_anchors=60,
    judging_rows=100,
    tuning_rows=60,
    network_rows=300,
    most_steps=150,
)
OPTIONS = {"random_state": 0, "settings": SMALL, "hidden_layer_sizes": (10, 5), "kernel": "matern32"}


def make_rows(rows=ROWS, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 3))
    return x, np.sin(2 * x[:, 0]) + x[:, 1] + 0.2 * rng.normal(size=rows)


def in_batches(x, y, size=500):
    return [(x[start : start + size], y[start : start + size]) for start in range(0, len(x), size)]


# ------------------------------------------------------------------ the sample


def test_a_sample_is_uniform_keeps_every_class_and_the_order_of_the_table():
    sample, generator = Sample(1000), np.random.default_rng(0)
    labels = np.array(["a", "b"], dtype=object)[(np.arange(20_000) == 7777).astype(int)]
    for start in range(0, 20_000, 1500):
        at = np.arange(start, min(start + 1500, 20_000))
        sample.add((pd.DataFrame({"row": at}), labels[at]), 0, generator)
    frame, kept = sample.in_order()
    rows = frame["row"].to_numpy()
    assert sample.rows == 20_000
    assert 1000 <= len(rows) <= 1002
    assert (np.diff(rows) > 0).all()
    assert (kept == "b").sum() == 1
    counts = np.bincount(rows * 10 // 20_000, minlength=10)
    assert ((counts - 100) ** 2 / 100).sum() < 27.9  # chi-square with 9 degrees of freedom, 0.999


def test_samples_of_portions_merge_and_keep_the_lowest_targets():
    whole_table = Sample(50)
    for portion in range(4):
        part, generator = Sample(50), np.random.default_rng(portion)
        y = np.arange(1000.0) + 1000 * portion
        part.add((y[:, None], y), portion, generator)
        whole_table.merge(part)
    _, y = whole_table.in_order()
    assert whole_table.rows == 4000
    assert len(y) in (50, 51, 52)
    assert set(y[:2]) == {0.0, 1.0}
    assert (np.diff(y) > 0).all()


def test_a_key_that_is_too_large_saves_room_and_changes_nothing():
    samples = []
    for bound in (False, True):
        total = Sample(50)
        for portion in range(5):
            part = Sample(50, total.largest_key if bound else 1.0)
            generator = np.random.default_rng([0, portion])
            for start in range(0, 400, 40):
                rows = 1000 * portion + start + np.arange(40)
                part.add((rows, (rows == 3210).astype(float)), portion, generator)
            total.merge(part)
        samples.append(total.in_order())
    np.testing.assert_array_equal(*(rows for rows, _ in samples))
    assert 3210 in samples[0][0]


def test_few_rows_are_all_kept_in_order():
    sample, x = Sample(10), np.arange(6.0)
    sample.add((x[:4, None], x[:4]), 0, np.random.default_rng(0))
    sample.add((x[4:, None], x[4:]), 0, np.random.default_rng(0))
    assert sample.in_order()[1].tolist() == x.tolist()


def test_the_lowest_of_targets_in_text_is_kept_whatever_the_decimal_sign():
    for low in ("-1,5", "$-3.25"):
        sample = Sample(5)
        y = np.array([f"{k},5" for k in range(2000)], dtype=object)
        y[1234] = low
        sample.add((np.zeros((2000, 1)), y), 0, np.random.default_rng(1))
        assert low in sample.in_order()[1]


def test_keys_of_rows():
    x = np.array([[0.0, 1.0], [-0.0, 1.0], [1.0, 0.0], [0.0, 2.0]])
    keys = row_keys(x, np.zeros(4))
    assert keys[0] == keys[1]
    assert len(set(keys.tolist())) == 3
    grid = np.stack(np.meshgrid(np.arange(300.0), np.arange(300.0)), -1).reshape(
        -1, 2
    )  # bits of whole numbers end in zeros
    assert len(np.unique(row_keys(grid, np.zeros(len(grid))))) == len(grid)


# ------------------------------------------------------------------ the sums


@pytest.fixture(scope="module")
def regressor():
    x, y = make_rows()
    return StationaryRegressor(**OPTIONS).fit_batches(in_batches(x, y))


def test_with_few_rows_it_is_fit():
    x, y = make_rows(400)
    options = OPTIONS | {"hidden_layer_sizes": ()}
    new = make_rows(50, seed=1)[0]
    whole_fit = StationaryRegressor(**options).fit(x, y).predict(new, return_std=True)
    batches = StationaryRegressor(**options).fit_batches(in_batches(x, y, 150)).predict(new, return_std=True)
    np.testing.assert_array_equal(whole_fit, batches)


def test_heads_have_the_posterior_of_all_rows(regressor):
    """Independent: the sums over all rows at once by ``sums_of``, and the normal equations by NumPy."""
    x, y = make_rows()
    inputs = Inputs(regressor._inputs(x), regressor.mixtures_[0].extractors)
    networks = set()
    for member in regressor.mixtures_[0].members:
        networks.add(member.network)
        target = member.map.forward(torch.from_numpy(y))[:, None]
        rows = TrainingRows(inputs.of(member.network), target, torch.ones(len(x), dtype=torch.float64))
        expected = sums_of(member.head.features, rows)
        # Features are at most 1. Networks compute theirs in float32, and pieces of another size round in another way.
        rounding = 1e-9 if member.network is None else 4 * ROWS * torch.finfo(torch.float32).eps
        torch.testing.assert_close(member.head.sums.gram, expected.gram, rtol=1e-10, atol=rounding)
        assert member.head.sums.count == ROWS
        projection = member.head.sums.projection
        torch.testing.assert_close(
            projection, expected.projection, rtol=1e-9, atol=rounding * float(target.abs().max())
        )
        if member.network is None:  # else the sums of its own features: they round in another way here
            phi = member.head.features(rows.x)
            gram, projection = phi.mT @ phi, phi.mT @ target
        else:
            gram = member.head.sums.gram
        precision = gram.numpy() / member.head.noise**2 + np.eye(len(gram)) / member.head.amplitude**2
        mean = np.linalg.solve(precision, projection.numpy() / member.head.noise**2)
        np.testing.assert_allclose(member.head.mean.numpy(), mean, rtol=1e-6, atol=1e-8)
    assert networks > {None}


def test_it_is_better_than_its_sample(regressor):
    x, y = make_rows(500, seed=2)
    sample = StationaryRegressor(**OPTIONS).fit(*(part[:600] for part in make_rows()))
    assert regressor.log_prob(x, y).mean() > sample.log_prob(x, y).mean() + 0.01
    assert regressor.score(x, y) > 0.9
    covered = regressor.predict_interval(x)
    assert 0.85 < ((y > covered[:, 0]) & (y < covered[:, 1])).mean() < 0.95
    assert regressor.ood_score(np.full((1, 3), 30.0)) > regressor.ood_threshold_


def _log_posterior(head, rows):
    """Log posterior of a head's weights in nats a row."""
    full = torch.cat([1 - rows.y, rows.y], 1) if rows.y.shape[1] == 1 else rows.y
    logs = (replace(head, averaging=0.0).probabilities(rows.x) * full).sum(1).log().sum()
    return float(logs - 0.5 * head.weights.square().sum() / head.amplitude**2) / len(rows)


@pytest.mark.parametrize("classes", [2, 3])
def test_heads_for_classes_are_at_their_modes(classes):
    x, y = make_rows()
    labels = np.digitize(y, [0.0] if classes == 2 else [-0.8, 0.8])
    model = StationaryClassifier(**OPTIONS | {"hidden_layer_sizes": ()}).fit_batches(in_batches(x, labels))
    (member,) = model.mixtures_[0].members
    targets = as_targets(torch.from_numpy(labels), classes)
    rows = TrainingRows(model._inputs(x), targets, torch.ones(len(x), dtype=torch.float64))
    mode = SoftmaxHead.fit(member.head.features, rows, member.head.amplitude)
    at_sample, near, best = (
        _log_posterior(head, rows)
        for head in (
            SoftmaxHead.fit(member.head.features, rows[torch.arange(600)], member.head.amplitude),
            member.head,
            mode,
        )
    )
    assert at_sample + 0.8 * (best - at_sample) < near <= best + 1e-6
    torch.testing.assert_close(member.head.gram, mode.gram, rtol=1e-9, atol=1e-9)


def test_class_sums_are_the_slope_and_bound_the_curvature():
    """Independent: automatic differentiation of the log likelihood."""
    x, y = make_rows(200)
    labels = np.digitize(y, [-0.8, 0.8])
    model = StationaryClassifier(**OPTIONS | {"hidden_layer_sizes": ()}).fit(x, labels)
    collector = MomentCollector(model, *[np.zeros(0, dtype=np.uint64)] * 3)
    moments, weight = collector.empty(), np.linspace(0.5, 2, 200)
    collector.take(moments, x, labels, weight)
    head = model.mixtures_[0].members[0].head
    _, curvature, slope, value = moments.sums[0][0]
    phi = head.features(model._inputs(x))

    def log_likelihood(weights):
        logs = torch.log_softmax(phi @ weights, 1)[torch.arange(200), torch.from_numpy(labels)]
        return (torch.from_numpy(weight) * logs).sum()

    torch.testing.assert_close(value, log_likelihood(head.weights))
    torch.testing.assert_close(slope, torch.func.grad(log_likelihood)(head.weights))
    hessian = -torch.func.hessian(log_likelihood)(head.weights).reshape(head.weights.numel(), -1)
    bound = torch.kron(from_lower_half(curvature), torch.eye(3, dtype=torch.float64))
    assert torch.linalg.eigvalsh(bound - hessian).min() > -1e-8


def test_rows_that_judge_or_are_held_out_teach_nothing_and_are_counted():
    x, y = make_rows(300)
    model = StationaryRegressor(**OPTIONS | {"hidden_layer_sizes": ()}).fit(x, y)
    keys = row_keys(model._inputs(x).numpy(), y)
    collector = MomentCollector(model, keys[[5, 2]], keys[10:20], keys[:0])
    moments, twice = collector.empty(), np.concatenate([x, x[:3]])
    collector.take(moments, twice, np.concatenate([y, y[:3]]), np.ones(303))
    assert moments.judging.tolist() == [1.0, 2.0]
    assert (moments.rows, moments.held) == (303, 10)
    expected, rest = collector.empty(), np.r_[0, 1, 3, 4, 6:10, 20:300, 0, 1]
    add_sums(
        model.mixtures_, expected.sums, model._inputs(x[rest]), y[rest], torch.ones(len(rest), dtype=torch.float64)
    )
    for total, part in zip(moments.sums[0][0], expected.sums[0][0], strict=True):
        torch.testing.assert_close(total, part, rtol=1e-12, atol=1e-10)


def test_of_common_rows_a_fifth_judges_and_a_fifth_is_held_out_whatever_the_pieces():
    x, y = make_rows(300)
    model = StationaryRegressor(**OPTIONS | {"hidden_layer_sizes": ()}).fit(x, y)
    keys = row_keys(model._inputs(x).numpy(), y)
    collector = MomentCollector(model, keys[[0, 1]], keys[[0, 2]], keys[:2])  # rows 0 and 1 are common, 2 is not
    many = np.repeat([0, 1, 2], 5000)
    moments, pieces = collector.empty(3), collector.empty(3)
    collector.take(moments, x[many], y[many], np.ones(len(many)))
    for at in np.split(many, [1, 4000, 9000]):
        collector.take(pieces, x[at], y[at], np.ones(len(at)))
    assert moments.judging == pytest.approx([1000, 1000], abs=100)  # 3.5 standard deviations of a binomial count
    assert moments.held == pytest.approx(5000 + 1000, abs=100)
    assert float(moments.sums[0][0].weight) == len(many) - moments.held - moments.judging.sum()
    assert pieces.held == moments.held
    np.testing.assert_array_equal(pieces.judging, moments.judging)
    elsewhere = collector.empty(4)
    collector.take(elsewhere, x[many], y[many], np.ones(len(many)))
    assert elsewhere.judging.tolist() != moments.judging.tolist()


def make_cells(rows, seed=0):
    """Rows with six different inputs and five different targets."""
    rng = np.random.default_rng(seed)
    x = np.column_stack([rng.integers(0, 3, rows), rng.integers(0, 2, rows)]).astype(float)
    return x, np.clip(np.round(3 + x[:, 0] - x[:, 1] + rng.normal(size=rows)), 1, 5)


def test_a_table_of_few_different_rows_is_learnt():
    """Every row of the sample judges there, and no row would be left to learn from."""
    x, y = make_cells(20_000)
    new_x, new_y = make_cells(4000, seed=1)
    options = OPTIONS | {"hidden_layer_sizes": ()}
    cell = x @ [2, 1]
    frequency = np.array([[np.mean(y[cell == c] == v) for v in np.unique(y)] for c in range(6)])
    std = np.array([y[cell == c].std() for c in range(6)])
    at = (new_x @ [2, 1]).astype(int)

    regressor = StationaryRegressor(**options).fit_batches(in_batches(x, y))
    predicted = regressor.predict(new_x, return_std=True)[1]
    assert np.abs(np.log(predicted / std[at])).max() < 0.35  # the noise of a regression is the same everywhere
    gaussian = np.mean(
        0.5 * np.log(2 * np.pi * std[at] ** 2) + 0.5 * ((new_y - frequency[at] @ range(1, 6)) / std[at]) ** 2
    )
    assert -regressor.log_prob(new_x, new_y).mean() < gaussian + 0.05

    classifier = StationaryClassifier(**options).fit_batches(in_batches(x, y))
    assert np.abs(classifier.predict_proba(new_x) - frequency[at]).max() < 0.06
    best = -np.mean(np.log(frequency[at, new_y.astype(int) - 1]))
    assert -classifier.log_prob(new_x, new_y).mean() < best + 0.01


def test_weights_and_several_targets():
    x, y = make_rows(1500)
    both = np.stack([y, -2 * y], 1)
    options = OPTIONS | {"hidden_layer_sizes": ()}
    model = StationaryRegressor(**options).fit_batches(
        [(x[:700], both[:700], np.full(700, 2.0)), (x[700:], both[700:])]
    )
    assert [mixture.members[0].head.sums.count for mixture in model.mixtures_] == [2200.0, 2200.0]
    mean = model.predict(x[:20])
    np.testing.assert_allclose(mean[:, 1], -2 * mean[:, 0], atol=0.05)


# ------------------------------------------------------------------ tables and datasets


def make_frame(rows=ROWS, seed=0):
    x, y = make_rows(rows, seed)
    rng = np.random.default_rng(seed + 100)
    frame = pd.DataFrame(x, columns=["a", "b", "c"])
    frame["city"] = rng.choice(["Oslo", "Rom", "Wien"], rows)
    frame["when"] = pd.Timestamp("2024-01-01") + pd.to_timedelta(rng.integers(0, 900, rows), unit="D")
    frame["y"] = y + (frame["city"] == "Oslo")
    return frame


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("large")
    frame = make_frame()
    for number in range(3):
        part = frame[number * 1000 : (number + 1) * 1000]
        columns = list(frame.columns)[:: 1 if number else -1]  # columns may come in any order
        pq.write_table(pa.table(part[columns]), path / f"part-{number}.parquet", row_group_size=300)
    return path


@pytest.fixture(autouse=True)
def small_portions(monkeypatch):
    monkeypatch.setattr(streamed_tables, "PORTION_ROWS", 500)


def fit_folder(path, out, target="y", engine="local", skip_bad=False, drop=(), **options):
    sampler = TableSampler(target, 600, 0, engine, [].append)
    rows = read_training(path, target, Names(drop), "auto", skip_bad, sampler)
    bad_rows = out.with_suffix(".csv") if skip_bad else None
    options = OPTIONS | {"hidden_layer_sizes": ()} | options
    return fit_file(Files(path, out, None, bad_rows), rows, share=0.2, drop=drop, engine=engine, **options)


@pytest.fixture(scope="module")
def fitted(folder, tmp_path_factory):
    streamed_tables.PORTION_ROWS, before = 500, streamed_tables.PORTION_ROWS
    done = fit_folder(folder, tmp_path_factory.mktemp("fitted") / "m.bochner")
    streamed_tables.PORTION_ROWS = before
    return done


def test_a_folder_is_fitted_in_pieces(fitted, folder, tmp_path):
    assert fitted.metrics["rows"] == 120
    assert fitted.metrics["r2"] > 0.85
    assert fitted.fitted.learnt == ROWS - 120  # no row is equal to a held-out one
    lines = "\n".join(fitted.summary)
    assert re.search(r"3,000 rows: columns and networks are learnt from 60[0-2] of them, heads from all", lines)
    (count,) = {round(m.head.sums.count) for m in fitted.model.estimator_.mixtures_[0].members}
    assert count == ROWS - 120
    out = tmp_path / "p.parquet"
    done = predict_file(Files(folder, out), fitted.written[0], coverage=0.9, device="cpu")
    assert done.rows == ROWS
    again = pq.read_table(out).to_pandas()
    frame = make_frame()
    np.testing.assert_allclose(again["a"], frame["a"])
    np.testing.assert_allclose(again["y_mean"], fitted.model.predict(frame.drop(columns="y")), rtol=1e-9)


@pytest.mark.parametrize("ending", ["csv", "csv.gz", "feather", "arrow"])
def test_other_kinds_of_files_give_the_same_rows(tmp_path, ending):
    frame = make_frame(50)
    path = tmp_path / f"t.{ending}"
    frame.to_feather(path) if ending in ("feather", "arrow") else frame.to_csv(path, index=False)
    frame.to_parquet(tmp_path / "t.parquet")
    found, expected = (read_table(open_table(p)) for p in (path, tmp_path / "t.parquet"))
    assert found.texts["city"].tolist() == frame["city"].tolist()
    np.testing.assert_allclose(found.frame["a"].astype(float), expected.frame["a"], rtol=0)
    assert found.texts["when"].str[:10].tolist() == expected.texts["when"].str[:10].tolist()


def test_a_pattern_names_files(folder):
    source = open_table(folder / "part-[12].parquet")
    assert [file.path.name for file in source.files] == ["part-1.parquet", "part-2.parquet"]
    places = [place for piece in source.pieces() for place in piece.places]
    assert (places[0], places[-1]) == ("1 of part-1.parquet", "1000 of part-2.parquet")


def test_portions_cover_every_row_once(folder):
    source = open_table(folder)
    portions = source.portions(500)
    assert len(portions) == 6  # 600 + 400 rows of each file
    rows = [float(a) for portion in portions for piece in source.pieces(portion=portion) for a in piece.frame["a"]]
    assert rows == make_frame()["a"].tolist()
    assert [(portion.file, portion.start) for portion in portions] == [
        (0, 0),
        (0, 600),
        (1, 0),
        (1, 600),
        (2, 0),
        (2, 600),
    ]
    (piece,) = source.pieces(portion=Portion(1, (2,), 600))
    assert piece.places[0] == "601 of part-1.parquet"


def test_a_dataset_and_a_table_of_arrow(folder):
    options = OPTIONS | {"hidden_layer_sizes": ()}
    dataset = pyarrow.dataset.dataset(folder)
    assert TableRegressor(**options).fit_batches(dataset, target="y").score(*split(make_frame(300, 5))) > 0.85
    table = pa.table(make_frame())
    model = TableClassifier(**options).fit_batches(table, target="city")
    assert set(model.classes_) == {"Oslo", "Rom", "Wien"}
    frame = make_frame()
    last = np.arange(ROWS) >= ROWS - 40  # the last batch has other things there
    frame["city"] = np.where(last, [f"x{row}" for row in range(ROWS)], frame["city"])
    frame.loc[2500, "b"] = np.nan
    batches = [(frame[at : at + 40].drop(columns="y"), frame["y"][at : at + 40]) for at in range(0, ROWS, 40)]
    with pytest.warns(
        UserWarning, match="city: 40 of 3000 cells hold values not seen in training, such as 'x2960'"
    ) as said:
        TableRegressor(**options).fit_batches(batches)
    assert "The table differs from the sample that columns are learnt from" in str(said[0].message)
    assert "b: 1 cells are missing, none was in training" in str(said[0].message)
    with pytest.raises(ValueError, match=r"The target parameter must be one of \['a'.*got 'price' instead"):
        TableRegressor().fit_batches(table, target="price")
    with pytest.raises(ValueError, match=r"must name the target's column of a dataset, got None"):
        TableRegressor().fit_batches(table)


def split(frame):
    return frame.drop(columns="y"), frame["y"]


def test_a_rare_class_and_a_late_negative_target_are_learnt(tmp_path):
    frame = make_frame()
    frame["kind"] = np.where(np.arange(ROWS) == 2000, "rare", frame["city"])
    frame["money"] = np.exp(frame["y"])
    frame.loc[2500, "money"] = -5.0
    frame.to_parquet(tmp_path / "t.parquet", row_group_size=500)
    classes = fit_folder(tmp_path / "t.parquet", tmp_path / "c.bochner", "kind")
    assert classes.fitted.learnt + len(classes.fitted.held) + classes.fitted.left_out >= ROWS - 1
    money = fit_folder(tmp_path / "t.parquet", tmp_path / "r.bochner", "money", drop=["kind"])
    assert math.isfinite(money.metrics["nlpd"])


# ------------------------------------------------------------------ bad input


def test_batches_that_cannot_be_used():
    x, y = make_rows(50)
    model = StationaryRegressor(hidden_layer_sizes=())
    with pytest.raises(ValueError, match=r"batches parameter must be an iterable .* got generator instead"):
        model.fit_batches((x, y) for _ in range(3))
    with pytest.raises(ValueError, match=r"must give tuples .* got ndarray as number 0 instead"):
        model.fit_batches([x])
    with pytest.raises(ValueError, match="X and y must have the same number of rows, got 50 and 49"):
        model.fit_batches([(x, y[1:])])
    with pytest.raises(ValueError, match="must give at least one row, got none"):
        model.fit_batches([])
    with pytest.raises(ValueError, match=r"target parameter must be None for batches of \(X, y\), got 'y'"):
        model.fit_batches([(x, y)], target="y")


def test_batches_need_the_same_columns_and_may_be_lists_or_weigh_nothing():
    x, y = make_rows(60)
    model = StationaryRegressor(**OPTIONS | {"hidden_layer_sizes": ()})
    lists = [(x[:30].tolist(), y[:30].tolist()), (x[30:].tolist(), y[30:].tolist(), [0.0] * 30)]
    expected = StationaryRegressor(**model.get_params()).fit(x[:30], y[:30]).predict(x)
    np.testing.assert_array_equal(model.fit_batches(lists).predict(x), expected)
    frame = pd.DataFrame(x, columns=["a", "b", "c"])
    with pytest.raises(ValueError, match="same columns in every batch, but number 1 lacks 'c'"):
        model.fit_batches([(frame, y), (frame[["a", "b"]], y)])
    with pytest.raises(ValueError, match="same columns in every batch, but number 1 has 'd' in addition"):
        model.fit_batches([(frame, y), (frame.assign(d=1.0), y)])


class Changing:
    """Batches that differ from pass to pass: other rows, or fewer."""

    def __init__(self, *, fewer):
        self.passes, self.fewer = 0, fewer

    def __iter__(self):
        self.passes += 1
        x, y = make_rows(900, seed=0 if self.fewer else self.passes)
        yield from in_batches(x, y)[: -self.passes + 1 if self.fewer and self.passes > 1 else None]


def test_batches_that_change_between_the_passes_leave_the_estimator_as_it_was():
    x, y = make_rows(80)
    model = StationaryRegressor(**OPTIONS | {"hidden_layer_sizes": ()}).fit(x, y)
    before = model.predict(x)
    with pytest.raises(ValueError, match="must give the same rows each time that it is gone through, got others"):
        model.fit_batches(Changing(fewer=False))
    with pytest.raises(ValueError, match=r"must give the same rows each time .* got 900 rows and then 500"):
        model.fit_batches(Changing(fewer=True))
    np.testing.assert_array_equal(model.predict(x), before)


def test_a_search_for_modes_that_is_cut_short_says_so_and_keeps_the_best_weights(monkeypatch, capsys):
    monkeypatch.setattr("bochner.streaming.learning.MAX_PASSES", 1)
    monkeypatch.setattr("bochner.streaming.learning.MIN_GAIN", 0.0)
    x, y = make_rows()
    options = OPTIONS | {"hidden_layer_sizes": (), "verbose": True}
    model = StationaryClassifier(**options).fit_batches(in_batches(x, y > 0))
    assert "after 1 passes over all rows heads for classes are not at their modes yet" in capsys.readouterr().err
    assert model.score(x, y > 0) > 0.93


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the process's memory from /proc")
def test_memory_that_is_free_again_is_given_back():
    def pages():
        return int(Path("/proc/self/statm").read_text().split()[1])

    kept = [bytearray(2000) for _ in range(60_000)]  # too small for pieces of their own
    last, full = kept[-1], pages()
    del kept
    streamed_tables.give_back_memory()
    assert len(last) == 2000
    assert pages() < full - 20_000  # of about 30,000 pages


def test_bad_rows_beyond_a_number_are_counted_only(tmp_path, monkeypatch):
    monkeypatch.setattr("bochner.tables.files.reading.MAX_LISTED_ROWS", 25)
    frame = make_frame()
    frame.loc[::50, "y"] = np.nan
    frame.to_parquet(tmp_path / "t.parquet", row_group_size=500)
    with pytest.raises(TableError, match=r"^A sample of \S+t\.parquet has \d+ rows that cannot be used"):
        fit_folder(tmp_path / "t.parquet", tmp_path / "m.bochner")
    done = fit_folder(tmp_path / "t.parquet", tmp_path / "m.bochner", skip_bad=True)
    lines = done.written[-1].read_text().splitlines()
    assert len(done.table.bad) == 60
    assert len(lines) == 1 + 25 + 1
    assert "and 35 more rows that are not listed" in lines[-1]


def test_the_lowest_targets_of_a_sample_are_never_held_out(tmp_path):
    frame = make_frame()
    frame["money"] = np.exp(frame["y"])
    frame.loc[[100, 2000, 2900], "money"] = [-5.0, -4.0, -3.0]
    frame.to_parquet(tmp_path / "t.parquet", row_group_size=500)
    rows = read_training(
        tmp_path / "t.parquet", "money", Names(["y"]), read=TableSampler("money", 600, 0, "local", [].append)
    )
    lowest = set(np.argsort(rows.y)[:2].tolist())
    for seed in range(12):  # a fifth is held out: one of twelve splits would hold them both out in 0.04 of cases each
        train, held = split_rows(rows, 0.5, seed)
        assert lowest <= set(train.tolist())
        assert sorted([*train, *held]) == list(range(len(rows.y)))


def test_files_of_a_folder_that_do_not_fit_together(tmp_path):
    frame = make_frame(30)
    frame.to_csv(tmp_path / "a.csv", index=False)
    frame.drop(columns="b").to_csv(tmp_path / "b.csv", index=False)
    with pytest.raises(
        TableError, match=r"b\.csv lacks the column 'b' that a\.csv has; all files need the same columns"
    ):
        open_table(tmp_path)
    frame.assign(b2=1).to_csv(tmp_path / "b.csv", index=False)
    with pytest.raises(TableError, match=r"b\.csv has the column 'b2' that a\.csv does not have"):
        open_table(tmp_path)
    frame.to_parquet(tmp_path / "c.parquet")
    with pytest.raises(TableError, match=r"holds files of several kinds, \.csv and \.parquet; give a pattern"):
        open_table(tmp_path)
    with pytest.raises(TableError, match="No file fits the pattern"):
        open_table(tmp_path / "z*.csv")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TableError, match="is a folder without a file that ends in"):
        open_table(tmp_path / "empty")
    (tmp_path / "years" / "year=2025").mkdir(parents=True)
    frame.to_parquet(tmp_path / "years" / "year=2025" / "a.parquet")
    with pytest.raises(
        TableError, match=r"years has tables in folders of its own, such as .*; give the pattern \S+/\*/\*\.parquet"
    ):
        open_table(tmp_path / "years")
    assert len(open_table(tmp_path / "years" / "*" / "*.parquet").files) == 1
    frame.to_csv(tmp_path / "years" / "b.csv", index=False)
    with pytest.raises(TableError, match=r"/\*/\*\.parquet for those, or \S+/\*\.csv for the others"):
        open_table(tmp_path / "years")


def test_a_piece_of_another_type_is_one_line_and_no_file(tmp_path):
    frame = make_frame()
    for number in range(12):
        part = frame[number * 250 : (number + 1) * 250]
        part = part.assign(a="seventeen") if number == 10 else part
        part.to_parquet(tmp_path / f"part-{number:02}.parquet")
    out = tmp_path / "m.bochner"
    with pytest.raises(TableError) as raised:
        fit_folder(tmp_path / "part-*.parquet", out)
    (line,) = raised.value.problems
    assert "from row 1 of part-10.parquet on: Column 'a' held numbers in training, and now 'seventeen'." in line
    assert not out.exists()


def test_files_whose_types_do_not_fit_together_are_one_line(tmp_path):
    frame = make_frame(40)
    frame.to_parquet(tmp_path / "a.parquet")
    frame.assign(a="seventeen").to_parquet(tmp_path / "b.parquet")
    with pytest.raises(
        TableError, match=r"types that do not fit together \(.*Field a has.*\); give it one type in all files"
    ):
        fit_folder(tmp_path, tmp_path / "m.bochner")
    with pytest.raises(ValueError, match=r"batches parameter cannot be read to its end \(.*seventeen"):
        TableRegressor(**OPTIONS).fit_batches(pyarrow.dataset.dataset(tmp_path), target="y")


def test_a_batch_may_hold_nothing_but_rows_that_judge():
    x, y = make_rows(900)
    batches = [*in_batches(x, y), *[(x[row : row + 1], y[row : row + 1]) for row in range(150)]]
    options = OPTIONS | {"hidden_layer_sizes": ()}
    model = StationaryRegressor(**options).fit_batches(batches)
    assert model.mixtures_[0].members[0].head.sums.count == pytest.approx(1050)


@pytest.mark.parametrize("ending", ["parquet", "csv.gz", "feather"])
def test_a_truncated_file_is_one_line(tmp_path, ending):
    frame, path = make_frame(2000), tmp_path / f"t.{ending}"
    {"parquet": frame.to_parquet, "feather": frame.to_feather, "csv.gz": frame.to_csv}[ending](path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(TableError, match=r"t\.\S+ (is not a \w+|cannot be)") as raised:
        read_table(open_table(path))
    assert "\n" not in str(raised.value)


def test_rows_without_a_target_are_named_or_left_out(tmp_path):
    frame = make_frame()
    frame.loc[[7, 2900], "y"] = np.nan
    path = tmp_path / "t.parquet"
    frame.to_parquet(path, row_group_size=500)
    with pytest.raises(TableError, match=r"rows? that cannot be used"):
        fit_folder(path, tmp_path / "m.bochner")
    done = fit_folder(path, tmp_path / "m.bochner", skip_bad=True)
    assert [row.place for row in done.table.bad] == ["row 8", "row 2901"]
    assert done.written[-1].exists()


# ------------------------------------------------------------------ engines


def test_unknown_engines():
    with pytest.raises(ValueError, match="engine parameter must be one of local, ray, got 'spark'"):
        check_engine("spark")


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False, logging_level="error")
    yield ray
    ray.shutdown()


@pytest.mark.filterwarnings("ignore")  # of Ray's own code
def test_ray_gives_the_same_answer(cluster, folder, fitted, tmp_path):
    assert cluster.is_initialized()
    done = fit_folder(folder, tmp_path / "m.bochner", engine="ray")
    frame = make_frame(100, seed=3).drop(columns="y")
    here, there = (model.predict(frame, return_std=True) for model in (fitted.model, done.model))
    np.testing.assert_allclose(here, there, rtol=1e-10)
    assert done.metrics == pytest.approx(fitted.metrics, rel=1e-10)


@pytest.mark.filterwarnings("ignore")
def test_a_worker_killed_half_way_changes_nothing_and_paths_may_be_relative(
    cluster, folder, fitted, tmp_path, monkeypatch
):
    assert cluster.is_initialized()
    marker = str(tmp_path / "died")

    class DiesOnce(streamed_tables._Learning):  # a class inside a function travels to the workers as it is
        def __call__(self, task):
            if task.number == 3 and not Path(marker).exists():
                Path(marker).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__call__(task)

    monkeypatch.setattr(streamed_tables, "_Learning", DiesOnce)
    monkeypatch.chdir(folder.parent)  # the workers are where the cluster was started
    done = fit_folder(Path(folder.name), tmp_path / "m.bochner", engine="ray")
    assert Path(marker).exists()
    frame = make_frame(100, seed=3).drop(columns="y")
    here, there = (model.predict(frame, return_std=True) for model in (fitted.model, done.model))
    np.testing.assert_allclose(here, there, rtol=1e-10)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_answer_does_not_depend_on_the_number_of_workers(folder, tmp_path):
    """With trained networks too, whose features are computed in float32."""
    ray = pytest.importorskip("ray")
    networks = {"hidden_layer_sizes": (10, 5)}
    frame = make_frame(100, seed=3).drop(columns="y")
    expected = fit_folder(folder, tmp_path / "m.bochner", **networks).model.predict(frame, return_std=True)
    for workers in (1, 2, 4):
        ray.init(num_cpus=workers, log_to_driver=False, include_dashboard=False, logging_level="error")
        done = fit_folder(folder, tmp_path / f"m{workers}.bochner", engine="ray", **networks)
        ray.shutdown()
        assert any(member.network is not None for member in done.model.estimator_.mixtures_[0].members)
        np.testing.assert_allclose(done.model.predict(frame, return_std=True), expected, rtol=1e-10)


@pytest.mark.filterwarnings("ignore")
def test_a_killed_worker_is_replaced_and_an_error_is_told(cluster, tmp_path):
    assert cluster.is_initialized()

    def die_once(marker):  # functions inside another one travel to the workers as they are
        if not Path(marker).exists():
            Path(marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid()

    def refuse(number):
        if number == 3:
            raise TableError("portion 3 cannot be read")
        return number

    pids = list(map_portions(die_once, [str(tmp_path / "died")], "ray"))
    assert len(pids) == 1
    assert pids[0] != os.getpid()
    assert (tmp_path / "died").exists()
    with pytest.raises(TableError, match="portion 3 cannot be read"):
        list(map_portions(refuse, range(6), "ray"))
    with pytest.raises(TableError, match="A worker of Ray has died 4 times at the same portion of the table"):
        list(map_portions(lambda _: os.kill(os.getpid(), signal.SIGKILL), [0], "ray"))
    with pytest.raises(TableError, match="The model is on a GPU, and Ray knows of none: use --device cpu"):
        list(map_portions(refuse, [0], "ray", gpus=1))


# ------------------------------------------------------------------ one batch after the other


def test_forgetting_weighs_earlier_rows_less():
    """Independent: a head with the earlier rows at a weight of 0.9²."""
    x, y = make_rows(300)
    model = StationaryRegressor(**OPTIONS | {"hidden_layer_sizes": ()}).fit(x[:100], y[:100])
    for at in (slice(100, 200), slice(200, 300)):
        model.partial_fit(x[at], y[at], forgetting_factor=0.9)
    weight = torch.from_numpy(np.repeat([0.81, 0.9, 1.0], 100))
    for member in model.mixtures_[0].members:
        target = member.map.forward(torch.from_numpy(y))[:, None]
        sums = sums_of(member.head.features, TrainingRows(model._inputs(x), target, weight))
        expected = GaussianHead(member.head.features, sums, member.head.amplitude, member.head.noise)
        torch.testing.assert_close(member.head.mean, expected.mean, rtol=1e-6, atol=1e-8)
    with pytest.raises(ValueError, match=r"forgetting_factor parameter must lie above 0 and be at most 1, got 1\.5"):
        model.partial_fit(x[:5], y[:5], forgetting_factor=1.5)


@pytest.mark.parametrize("classes", [2, 3])
def test_classes_take_in_more_rows(classes):
    x, y = make_rows(1200)
    labels = np.digitize(y, [0.0] if classes == 2 else [-0.8, 0.8])
    options = OPTIONS | {"hidden_layer_sizes": ()}
    first = StationaryClassifier(**options).fit(x[:200], labels[:200])
    new_x, new_y = make_rows(600, seed=4)
    new = np.digitize(new_y, [0.0] if classes == 2 else [-0.8, 0.8])
    before = first.log_prob(new_x, new).mean()
    for start in range(200, 1200, 250):
        first.partial_fit(x[start : start + 250], labels[start : start + 250])
    (member,) = first.mixtures_[0].members
    targets = as_targets(torch.from_numpy(labels), classes)
    rows = TrainingRows(first._inputs(x), targets, torch.ones(len(x), dtype=torch.float64))
    mode = SoftmaxHead.fit(member.head.features, rows, member.head.amplitude)
    torch.testing.assert_close(member.head.gram, mode.gram, rtol=1e-9, atol=1e-9)
    after = first.log_prob(new_x, new).mean()
    assert after > before + 0.01
    # What Laplace's approximation loses here is a third of what the rows bring, at most.
    first.mixtures_[0].members[0].head.weights.copy_(mode.weights)
    best = first.log_prob(new_x, new).mean()
    assert best - after < (best - before) / 3


def test_the_first_batch_needs_every_class():
    x, y = make_rows(40)
    with pytest.raises(ValueError, match="first y must hold a row of every class, and lacks '7'"):
        StationaryClassifier(hidden_layer_sizes=()).partial_fit(x, y > 0, classes=[False, True, 7])


# ------------------------------------------------------------------ what a hostile reader found


def test_batches_whose_columns_come_in_another_order_are_aligned():
    x, y = make_rows(900)
    frame = pd.DataFrame(x)  # columns without text names
    same = in_batches(frame, pd.Series(y))
    other = [(X if number % 2 else X[[2, 0, 1]], target) for number, (X, target) in enumerate(same, start=1)]
    model = StationaryRegressor(**OPTIONS | {"hidden_layer_sizes": ()})
    expected = model.fit_batches(same).predict(frame[:20])
    np.testing.assert_array_equal(model.fit_batches(other).predict(frame[:20]), expected)


def test_a_dash_is_a_category_in_every_piece_where_it_is_one(tmp_path):
    rng = np.random.default_rng(0)
    sign = np.repeat(["+", "-"], 1500)
    frame = pd.DataFrame({"test": sign, "age": rng.normal(size=3000)})
    frame["y"] = 10 * (sign == "+") + 0.3 * rng.normal(size=3000)
    frame["sign"] = sign
    (tmp_path / "t").mkdir()
    for number in range(6):
        frame[500 * number : 500 * number + 500].to_csv(tmp_path / "t" / f"{number}.csv", index=False)
    done = fit_folder(tmp_path / "t", tmp_path / "m.bochner", drop=("sign",))
    assert done.metrics["rmse"] < 0.4
    assert "missing" not in "".join(done.summary)
    (means,) = {round(float(v), 1) for v in done.model.predict(frame.iloc[[1600]])}
    assert abs(means) < 0.5  # alone, without a '+' beside it
    done = fit_folder(tmp_path / "t", tmp_path / "c.bochner", target="sign", drop=("test",))
    assert done.metrics["accuracy"] > 0.95


def test_a_last_row_of_totals_is_refused_as_in_memory(tmp_path):
    frame = make_frame(2000)[["a", "b", "y"]].assign(place="north")
    frame.loc[len(frame)] = {"a": np.nan, "b": np.nan, "y": frame["y"].sum(), "place": "Total"}
    path = tmp_path / "t.csv"
    frame.to_csv(path, index=False)
    with pytest.raises(TableError, match="line 2002: it holds totals of the rows above"):
        fit_folder(path, tmp_path / "m.bochner")
    done = fit_folder(path, tmp_path / "m.bochner", skip_bad=True)
    assert done.fitted.learnt == 2000 - done.metrics["rows"]


def test_rows_that_come_twice_say_no_more_than_once():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 3))
    y = np.sin(2 * x[:, 0]) + x[:, 1] + 0.3 * rng.normal(size=120)
    options = OPTIONS | {"hidden_layer_sizes": (), "settings": None}
    once = StationaryRegressor(**options).fit(x[:80], y[:80])
    twice = StationaryRegressor(**options).fit(np.tile(x[:80], (2, 1)), np.tile(y[:80], 2))
    weighted = StationaryRegressor(**options).fit(x[:80], y[:80], sample_weight=np.full(80, 2.0))
    np.testing.assert_allclose(weighted.predict(x), twice.predict(x))
    assert twice.noise_ == pytest.approx(once.noise_, rel=0.3)
    assert float(np.mean(twice.log_prob(x[80:], y[80:]))) > float(np.mean(once.log_prob(x[80:], y[80:]))) - 0.2
