"""Reports on a model for tables: their numbers, computed again from the raw table, and the page as a browser sees it."""

import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
from sklearn.linear_model import RidgeCV

from bochner.reports.model import (
    Collected,
    Heading,
    Rows,
    calibration,
    columns,
    measured_report,
    parts,
    predicted_report,
)
from bochner.reports.model.calibration import ConfidenceGroups, calibration_card
from bochner.reports.model.columns import importances
from bochner.reports.model.page import Page, Part, Table
from bochner.reports.model.peers import Score, verdict_on, within_two_errors
from bochner.reports.model.rows import Answered, number_text
from bochner.reports.model.strange import reasons
from bochner.reports.model.what_if import what_if
from bochner.tables.estimators import TableClassifier, TableRegressor
from bochner.tables.fitting import predict_rows
from browser import needs_axe, needs_browser

EVIL = "<script>document.title='owned'</script>"
OPTIONS = {"kernel": ("matern32",), "hidden_layer_sizes": (), "random_state": 0, "device": "cpu"}


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _table(count=200):
    """A column that matters, one that matters less, a date and one that is noise; and a number to predict."""
    rng = np.random.default_rng(5)
    days = rng.integers(0, 500, count)
    frame = pd.DataFrame(
        {
            "size": rng.uniform(10, 90, count).round(2).astype(str),
            "kind": rng.choice(["a", "b", "c"], count),
            "on": (pd.Timestamp("2024-03-01") + pd.to_timedelta(days, unit="D")).strftime("%Y-%m-%d"),
            "owner": rng.choice(["yes", "no"], count),
        }
    )
    size = frame["size"].astype(float).to_numpy()
    y = 5 * np.sin(size / 15) + 2 * (frame["kind"] == "b").to_numpy() + days / 250 + 0.3 * rng.normal(size=count)
    return frame, y


def _rows(model, frame, y, at):
    part = frame.iloc[at]
    return Rows(part, model.clean(part), [i + 2 for i in at], None if y is None else y[at])


class Case:
    """A model, its rows and the page about it."""

    def __init__(self, model, frame, y, target, title="t.csv: y"):
        train, held = list(range(130)), list(range(130, len(frame)))
        self.model = model.fit(frame.iloc[train], pd.Series(y[train], name=target))
        self.train, self.held = (_rows(self.model, frame, y, at) for at in (train, held))
        self.said = []
        heading = Heading(title, "line", ["read with ';'"])
        self.page = measured_report(self.model, self.held, heading, train=self.train, say=self.said.append)
        self.parts = {part.title: part for part in self.page.parts}


@pytest.fixture(scope="module")
def regression():
    return Case(TableRegressor(**OPTIONS), *_table(), "y")


@pytest.fixture(scope="module")
def classes():
    frame, y = _table()
    return Case(TableClassifier(**OPTIONS), frame, np.where(y > 3, "high", np.where(y > -1, "mid", "low")), "level")


def _replaced(case, column, value, rows=None):
    return (case.held if rows is None else rows).frame.assign(**{column: value})


# ---------------------------------------------------------------------- the answer


def test_scores_are_their_formulas_beside_peers_on_the_same_columns(regression):
    table = regression.parts["Beside other models"].tables[0]
    rows = {line[0]: dict(zip(table.header, line, strict=True)) for line in table.rows}
    assert list(rows) == ["this model", "a linear model", "a random forest", "the mean"]
    y, known = regression.held.y, regression.train.y
    encode = regression.model.estimator_.columns_.transform
    line = RidgeCV(alphas=np.logspace(-3, 3, 7)).fit(
        encode(regression.train.clean), (known - known.mean()) / known.std()
    )
    means = {
        "this model": regression.model.predict(regression.held.frame),
        "a linear model": known.mean() + known.std() * line.predict(encode(regression.held.clean)),
        "the mean": np.full(len(y), known.mean()),
    }
    items = {item["name"]: item for item in regression.page.charts["scores"]["items"]}
    for name, mean in means.items():
        squares = (y - mean) ** 2
        rmse = math.sqrt(squares.mean())
        assert rows[name]["RMSE"] == pytest.approx(rmse, rel=1e-6)
        error = squares.std(ddof=1) / math.sqrt(len(y)) / (2 * rmse)
        assert items[name]["high"] - items[name]["value"] == pytest.approx(2 * error, rel=1e-3)
    std = known.std()
    density = np.exp(-(((y - known.mean()) / std) ** 2) / 2) / (std * math.sqrt(2 * math.pi))
    assert rows["the mean"]["NLPD"] == pytest.approx(-np.log(density).mean(), rel=1e-6)
    assert rows["a random forest"]["RMSE"] < rows["the mean"]["RMSE"]
    low, high = regression.model.predict_interval(regression.held.frame).T
    assert rows["this model"]["90 % interval covers"] == np.mean((low <= y) & (y <= high))


def test_the_first_sentences_answer_how_good_how_sure_and_how_strange(regression, classes):
    good, sure, strange = regression.page.answers
    assert re.match(
        r"On 70 rows that it has not seen, y is typically off by 0\.\d+ \(RMSE\)\. Instead, a linear model: ", good[1]
    )
    assert "better than a linear model, a random forest and the mean" in good[1]
    assert re.match(r"Its 90 % intervals hold the true value in \d+\.\d\s% of 70 rows\.", sure[1])
    flagged = np.sum(regression.model.ood_score(regression.held.frame) > regression.model.ood_threshold_)
    assert strange[1].startswith(f"{flagged} of 70 rows")
    right = np.mean(classes.model.predict(classes.held.frame) == classes.held.y)
    assert f"level is right in {100 * right:.1f}" in classes.page.answers[0][1]
    assert classes.page.answers[1][1].startswith("It is ")


def test_verdicts_allow_for_chance():
    rng = np.random.default_rng(0)
    base = rng.random(400)
    scores = [Score("s", {}, 0.0, 0.0, base + shift + 0.1 * rng.normal(size=400)) for shift in (0, 0.1, -0.1, 0.0)]
    assert [verdict_on(scores[0], other) for other in scores[1:]] == ["better", "worse", "equal"]
    assert within_two_errors(0.88, 0.9, 100)  # a standard error is 0.03
    assert not within_two_errors(0.8, 0.9, 100)


def test_the_verdict_on_classes_names_the_measure_that_it_is_of():
    """A model that is right less often may have the better log loss."""
    model = SimpleNamespace(target_=SimpleNamespace(task="classification", name="y"))
    ours = Score("this model", {"accuracy": 0.9}, 0.2, 0.01, np.full(400, 0.2))
    forest = Score("a random forest", {"accuracy": 0.92}, 0.3, 0.01, np.full(400, 0.3))
    text = parts.error_card(model, [ours, forest], "400 rows")[1]
    assert text.replace("\N{NO-BREAK SPACE}", " ") == (
        "On 400 rows, y is right in 90.0 % (log loss 0.2000). Instead, a random forest: 92.0 % (log loss 0.3000). "
        "By log loss, which counts how sure it is as well, it is better than a random forest."
    )


def test_the_forest_of_classes_is_finite_and_all_models_share_the_rows(classes):
    table = classes.parts["Beside other models"].tables[0]
    rows = {line[0]: dict(zip(table.header, line, strict=True)) for line in table.rows}
    assert all(math.isfinite(line["NLPD"]) for line in rows.values())
    p = classes.model.predict_proba(classes.held.frame)
    own = p[np.arange(len(p)), [list(classes.model.classes_).index(label) for label in classes.held.y]]
    assert rows["this model"]["NLPD"] == pytest.approx(-np.log(own).mean(), rel=1e-6)
    shares = {label: np.mean(classes.train.y == label) for label in classes.model.classes_}
    expected = -np.mean([math.log(shares[label]) for label in classes.held.y])
    assert rows["class shares"]["NLPD"] == pytest.approx(expected, rel=1e-6)


# ---------------------------------------------------------------------- columns


def test_importance_is_the_increase_over_all_pairs_of_rows_up_to_chance(regression):
    found = {own.name: own for own in importances(regression.model, regression.held, regression.said.append)}
    y, count = regression.held.y, len(regression.held)
    before = math.sqrt(np.mean((y - regression.model.predict(regression.held.frame)) ** 2))
    for name in ("size", "kind"):
        pairs = regression.held.frame.iloc[np.repeat(np.arange(count), count)].reset_index(drop=True)
        pairs[name] = np.tile(regression.held.frame[name].to_numpy(), count)
        after = math.sqrt(np.mean((np.repeat(y, count) - regression.model.predict(pairs)) ** 2))
        # The mean of five shuffles has a fifth of the variance of one.
        assert found[name].mean == pytest.approx(after - before, abs=5 * found[name].std / math.sqrt(5))
    assert next(iter(found)) == "size"
    assert abs(found["owner"].mean) < 0.1 * found["kind"].mean
    items = regression.page.charts["importance"]["items"]
    assert [item["name"] for item in items] == list(found)
    assert items[0]["high"] - items[0]["low"] == pytest.approx(2 * found["size"].std, rel=1e-4)
    table = regression.parts["Which columns matter"].tables[0]
    assert table.folded
    assert table.rows == [[own.name, own.mean, own.std] for own in found.values()]
    assert "shuffled among 70 of the held-out rows" in regression.parts["Which columns matter"].text


def test_of_many_columns_the_page_says_how_they_are_chosen_and_all_rows_choose(regression, monkeypatch):
    monkeypatch.setattr(columns, "MAX_MEASURED_COLUMNS", 2)
    monkeypatch.setattr(columns, "SHUFFLED_ROWS", 4 * 6)  # of 4 columns: this many chose before
    said = []
    assert [own.name for own in importances(regression.model, regression.held, said.append)] == ["size", "kind"]
    assert said[0] == "the report shuffles 4 columns of 70 rows, to choose 2 columns"
    text = columns.importance_note(regression.model, regression.held, "error", "these rows")
    assert text.endswith("Of 4 columns 2 are shown: those with the largest increase after one shuffle among 70 rows.")
    assert "shuffled among 30 of these rows" in text
    assert "after one shuffle" not in regression.parts["Which columns matter"].text


def test_dependence_is_the_mean_of_predictions_with_the_cell_replaced(regression):
    rows = regression.held.spread(30)
    for own in regression.page.charts["dependence"]["columns"]:
        assert own["line"] == (own["name"] in ("size", "on"))
        for place in {0, len(own["labels"]) - 1}:
            label = own["labels"][place]
            cell = str(own["x"][place]) if own["name"] == "size" else label
            predicted = regression.model.predict(_replaced(regression, own["name"], cell, rows))
            assert own["mean"][0][place] == pytest.approx(predicted.mean(), rel=1e-4)
            assert own["low"][0][place] == pytest.approx(np.quantile(predicted, 0.1), rel=1e-4)


@pytest.mark.parametrize("kind", ["regression", "classes"])
def test_dependence_is_a_table_as_well(kind, request):
    case = request.getfixturevalue(kind)
    chart, table = case.page.charts["dependence"], case.parts["How predictions move"].tables[0]
    assert table.folded
    expected = [
        (own["name"], own["labels"][i], *named, own["mean"][at][i], own["low"][at][i], own["high"][at][i])
        for own in chart["columns"]
        for at, named in enumerate([[name] for name in chart["classes"]] or [[]])
        for i in range(len(own["labels"]))
    ]
    assert [tuple(line) for line in table.rows] == expected
    assert len(table.header) == len(table.rows[0])


@pytest.mark.parametrize("name", ["size", "kind", "on"])
def test_a_column_without_any_value_is_no_reason_to_stop(name, regression):
    """In an evaluated file it may be empty; there is then nothing to move."""
    frame = regression.held.frame.assign(**{name: ""})
    with pytest.warns(UserWarning, match=f"{name}: 70 cells are missing, none was in training"):
        clean = regression.model.clean(frame)
    rows = Rows(frame, clean, regression.held.places, regression.held.y)
    page = measured_report(regression.model, rows, Heading("t"), say=lambda _: None)
    assert name not in {own["name"] for own in page.charts["dependence"]["columns"]}
    assert name in {item["name"] for item in page.charts["importance"]["items"]}
    assert "<table" in page.render()


def test_without_any_value_there_is_nothing_to_move(regression):
    frame = regression.held.frame.map(lambda _: "")
    with pytest.warns(UserWarning, match="70 cells are missing, none was in training"):
        clean = regression.model.clean(frame)
    rows = Rows(frame, clean, regression.held.places, regression.held.y)
    page = measured_report(regression.model, rows, Heading("t"), say=lambda _: None)
    assert not {"What if", "How predictions move"} & {part.title for part in page.parts}


def test_what_if_shows_the_category_that_a_row_holds():
    """Not the 'other values' that the model sees of it."""
    frame, y = _table(120)
    frame.loc[[3, 17, 40], "kind"] = ["d", "e", "f"]  # rare: they count as one
    model = TableRegressor(**OPTIONS).fit(frame, pd.Series(y, name="y"))
    new = frame.iloc[[5]].assign(kind="Castle")
    assert model.clean(new)["kind"].iloc[0] == "other values"
    row = Rows(new, model.clean(new), [9])
    (own,) = what_if(model, ["kind"], Rows(frame, model.clean(frame), range(120)), row, ["row"])[0][0]["columns"]
    assert own["labels"][own["start"]] == "Castle"
    assert "a" in own["labels"]


def test_what_if_starts_at_the_row_and_moves_one_column(regression):
    chart = regression.page.charts["what_if"]
    assert "one column at a time" in regression.parts["What if"].text
    for row in chart["rows"]:
        at = [list(regression.held.places).index(row["line"])]
        frame = regression.held.frame.iloc[at]
        own = [regression.model.predict(frame)[0], *regression.model.predict_interval(frame)[0]]
        for column in row["columns"]:
            np.testing.assert_allclose(column["answers"][column["start"]], own, rtol=1e-4)
            known = [value for value in column["x"] if value is not None]
            assert known == sorted(known)
    kinds = next(column for column in row["columns"] if column["name"] == "kind")
    moved = frame.assign(kind=kinds["labels"][-1])
    np.testing.assert_allclose(kinds["answers"][-1][1:], regression.model.predict_interval(moved)[0], rtol=1e-4)
    assert kinds["strange"][-1] == pytest.approx(regression.model.ood_score(moved)[0], rel=1e-4)


@pytest.mark.parametrize("kind", ["regression", "classes"])
def test_what_if_moves_the_most_important_columns_together(kind, request):
    case = request.getfixturevalue(kind)
    for row in case.page.charts["together"]["rows"]:
        frame = case.held.frame.iloc[[list(case.held.places).index(row["line"])]]
        assert [own["name"] for own in row["columns"]] == [
            own["name"] for own in case.page.charts["importance"]["items"]
        ][:3]
        sizes = [len(own["labels"]) for own in row["columns"]]
        assert len(row["answers"]) == len(row["strange"]) == math.prod(sizes)
        for choice in ([own["start"] for own in row["columns"]], [0, 0, 1], [size - 1 for size in sizes]):
            cells = {
                own["name"]: str(own["x"][at]) if own["name"] == "size" else own["labels"][at]
                for own, at in zip(row["columns"], choice, strict=True)
            }
            at = np.ravel_multi_index(choice, sizes)
            moved = frame.assign(**cells)
            if kind == "regression":
                expected = [case.model.predict(moved)[0], *case.model.predict_interval(moved)[0]]
            else:
                expected = case.model.predict_proba(moved)[0]
            np.testing.assert_allclose(row["answers"][at], expected, rtol=1e-6)
            assert row["strange"][at] == pytest.approx(case.model.ood_score(moved)[0], rel=1e-6)


def test_the_strange_column_is_named(regression):
    frame = regression.held.frame.iloc[:3].copy()
    frame["kind"] = ["castle", "a", "a"]
    frame["size"] = ["50", "900", "50"]
    frame["on"] = ["2024-09-01", "2024-09-01", ""]
    with pytest.warns(UserWarning, match="on: 1 cells are missing, none was in training"):
        clean = regression.model.clean(frame)
    rows = Rows(frame, clean, [1, 2, 3])
    found = reasons(regression.model, rows, regression.model.estimator_.ood_score(clean))
    assert [name for name, _ in found] == ["kind", "size", "on (days)"]
    assert found[0][1] == "castle: never seen in training"
    size = regression.train.frame["size"].astype(float)
    away = (900 - size.mean()) / size.std(ddof=0)
    assert found[1][1].startswith(f"900: {away:.1f} standard deviations above the mean")
    assert found[2][1].startswith("missing: 0.0")


# ---------------------------------------------------------------------- rows and how sure


def test_worst_errors_strangest_rows_and_groups_are_counted_by_hand(regression):
    y, mean = regression.held.y, regression.model.predict(regression.held.frame)
    worst = regression.parts["The worst errors"].tables[0]
    expected = np.argsort(-np.abs(y - mean))[:10]
    assert [line[0] for line in worst.rows] == [str(regression.held.places[i]) for i in expected]
    assert [line[worst.header.index("size")] for line in worst.rows] == list(
        regression.held.frame["size"].iloc[expected]
    )
    strangest = regression.parts["The strangest rows"].tables[0]
    scores = np.sort(regression.model.ood_score(regression.held.frame))[::-1][:20]
    np.testing.assert_allclose([line[strangest.header.index("strangeness")] for line in strangest.rows], scores)
    groups, levels = regression.parts["Calibration and coverage"].tables
    size, kind = regression.held.frame["size"].astype(float).to_numpy(), regression.held.frame["kind"].to_numpy()
    first = np.argsort(mean)[:18]
    members = {f"prediction {number_text(mean[first[0]])} to {number_text(mean[first[-1]])}": first}
    members |= {f"kind: {level}": np.nonzero(kind == level)[0] for level in "abc"}
    last = np.argsort(size)[-18:]
    members[f"size {number_text(size[last[0]])} to {number_text(size[last[-1]])}"] = last
    assert len(groups.rows) == 4 + 3 + 4
    lines = {line[0]: line[1:4] for line in groups.rows}
    for name, at in members.items():
        low, high = regression.model.predict_interval(regression.held.frame.iloc[at]).T
        inside = np.mean((low <= y[at]) & (y[at] <= high))
        ends = scipy.stats.binom.ppf([0.025, 0.975], len(at), 0.9) / len(at)
        shown = [f"{100 * share:.1f}\N{NO-BREAK SPACE}%" for share in (inside, *ends)]
        assert lines[name] == [len(at), shown[0], f"{shown[1]} to {shown[2]}"]
    for promised, held in levels.rows:
        ends = regression.model.predict_interval(regression.held.frame, float(promised[:-2]) / 100).T
        assert held == f"{100 * np.mean((ends[0] <= y) & (y <= ends[1])):.1f}\N{NO-BREAK SPACE}%"


def test_coverage_groups_keep_equal_numbers_together_and_name_few_categories():
    quarters = calibration._quarters("n", np.array([1.0, 1, 1, 1, 1, 2, np.nan, 3]))
    assert [(name, list(np.nonzero(at)[0])) for name, at in quarters] == [
        ("n 1 to 1", [0, 1, 2, 3, 4]),
        ("n 2 to 3", [5, 7]),
    ]
    assert calibration._quarters("n", np.full(3, np.nan)) == []
    levels = calibration._levels("c", np.array(["x"] * 9 + ["y"] * 10 + [None] * 11, dtype=object))
    assert [(name, int(at.sum())) for name, at in levels] == [("c: missing", 11), ("c: y", 10)]


# ---------------------------------------------------------------------- whether probabilities are right


def _card(sure, right):
    """The card on a model of two classes that is so sure of its class in each row, and right or not."""
    inner = SimpleNamespace(classes_=np.array(["no", "yes"]))
    model = SimpleNamespace(target_=SimpleNamespace(task="classification", name="y"), estimator_=inner)
    y = np.where(right, "yes", "no")
    answered = Answered(
        model, Rows(pd.DataFrame(), pd.DataFrame(), [], y), np.column_stack([1 - sure, sure]), sure, "row"
    )
    return calibration_card(answered, Score("s", {"accuracy": float(right.mean())}, 0.0, 0.0, np.zeros(len(y))))


def _shares(*groups):
    """Rows of groups: how many, how sure the model is, and in which share it is right."""
    sure = np.concatenate([np.full(count, level) for count, level, _ in groups])
    right = np.concatenate([np.arange(count) < round(share * count) for count, _, share in groups])
    return sure, right


def test_errors_in_opposite_directions_do_not_cancel():
    question, text, care = _card(*_shares((200, 0.9, 0.7), (200, 0.6, 0.8)))
    assert question == "Can its probabilities be trusted?"
    assert text.replace("\N{NO-BREAK SPACE}", " ") == (
        "It is 75.0 % sure on average, and right in 75.0 % of 400 rows. "
        "But where it is 90.0 % sure, it is right in 70.0 %: take its probabilities with care."
    )
    assert care
    text, care = _card(*_shares((200, 0.9, 0.9), (200, 0.6, 0.6)))[1:]
    assert text.endswith("That agrees, within chance, also in 2 groups of rows by how sure it is.")
    assert not care


def test_cards_say_in_which_direction_probabilities_are_off():
    text, care = _card(*_shares((200, 0.9, 0.7), (200, 0.7, 0.6)))[1:]
    assert care
    assert text.endswith("It is too sure of itself: take its probabilities with care.")
    text, care = _card(*_shares((200, 0.8, 0.95), (200, 0.6, 0.75)))[1:]
    assert not care
    assert text.endswith("It could be surer than it is.")
    assert _card(*_shares((30, 0.9, 0.9)))[1].endswith(
        "That agrees, within chance. 30 rows say little about a probability."
    )


def test_a_calibrated_model_is_called_off_as_often_as_chance_allows(monkeypatch):
    """Also where it is nearly certain, and chi-square would be far off. Five standard errors of 200 tables."""
    monkeypatch.setattr(calibration, "DRAWS", 1000)
    rng, called = np.random.default_rng(0), {(0.5, 1.0): 0, (0.98, 1.0): 0}
    for ends in called:
        for _ in range(200):
            sure = rng.uniform(*ends, 300)
            called[ends] += ConfidenceGroups.of(sure, rng.random(300) < sure).p_value() < calibration.CHANCE
    assert max(called.values()) / 200 < calibration.CHANCE + 5 * math.sqrt(0.05 * 0.95 / 200)


def test_of_large_groups_the_statistic_is_chi_square():
    sure, right = _shares(*((1000, level, level + 0.018) for level in (0.55, 0.6, 0.65, 0.7, 0.75)))
    statistic = sum(1000 * 0.018**2 / (level * (1 - level)) for level in (0.55, 0.6, 0.65, 0.7, 0.75))
    expected = scipy.stats.chi2.sf(statistic, 5)
    found = ConfidenceGroups.of(sure, right).p_value()
    # Five standard errors of the draws, and steps of 1/1000 in the shares.
    assert found == pytest.approx(expected, abs=5 * math.sqrt(expected * (1 - expected) / calibration.DRAWS) + 0.01)


def test_the_confusion_matrix_and_the_bins_are_counted_by_hand(classes):
    p, y = classes.model.predict_proba(classes.held.frame), classes.held.y
    labels = list(classes.model.classes_)
    predicted = np.array(labels)[p.argmax(1)]
    table = classes.parts["Confusion matrix"].tables[0]
    assert list(table.header) == ["actual", *labels]
    for label, *counts in table.rows:
        assert counts == [np.sum((y == label) & (predicted == other)) for other in labels]
    bins = classes.parts["Reliability"].tables[1]
    assert sum(line[1] for line in bins.rows) == len(y)
    low, high = (float(text) / 100 for text in re.findall(r"\d+", bins.rows[-1][0]))
    own = (p.max(1) > low) & (p.max(1) <= high)
    assert bins.rows[-1][3] == f"{100 * np.mean(predicted[own] == y[own]):.1f}\N{NO-BREAK SPACE}%"


def test_settings_columns_and_versions_stand_at_the_end(regression):
    assert list(regression.parts)[-3:] == ["Columns", "What was made of the file", "Settings"]
    columns = dict(regression.parts["Columns"].tables[0].rows)
    assert columns["owner"] == "yes → 1, no → 0"
    assert columns["on"].startswith("date → days since first")
    settings = dict(regression.parts["Settings"].tables[0].rows)
    assert settings["kernel"] == "matern32"
    assert torch.__version__ in settings["versions"]
    assert any("shuffles 4 columns" in line for line in regression.said)


def test_without_training_rows_the_comparison_is_a_constant_and_says_so(regression):
    page = measured_report(regression.model, regression.held, Heading("t", file="new.csv"), say=lambda _: None)
    assert [line[0] for line in page.parts[0].tables[0].rows] == ["this model", "the mean of these rows"]
    assert page.parts[0].tables[0].rows[1][1] == pytest.approx(np.std(regression.held.y))
    assert page.answers[0][1].startswith("On the 70 rows of new.csv, y is typically off by ")
    assert page.charts["scores"]["xlabel"].startswith("root mean squared error (RMSE) on these rows")
    assert not re.search("held.out|not seen", page.render())  # nobody knows
    with pytest.raises(ValueError, match="must hold rows and their targets, got 0 rows"):
        measured_report(regression.model, regression.held.take([]), Heading("t"), say=lambda _: None)


def test_after_a_fit_to_a_sample_the_page_says_which_rows_each_model_learns_from(regression):
    heading = Heading("t", learnt=1_000_000)
    page = measured_report(regression.model, regression.held, heading, train=regression.train, say=lambda _: None)
    assert "1,000,000 rows learned from, 70 held out" in page.note
    assert page.parts[0].text.startswith(
        "The heads of this model learn from 1,000,000 rows, its columns and networks from a sample of 130. The other models learn "
        "from this sample"
    )
    assert regression.parts["Beside other models"].text.startswith("All models learn from the same rows")


@pytest.mark.parametrize("kind", ["regression", "classes"])
def test_a_single_held_out_row_is_enough_and_says_little(kind, request):
    case = request.getfixturevalue(kind)
    page = measured_report(case.model, case.held.take([3]), Heading("t"), train=case.train, say=lambda _: None)
    assert "1 rows say little about" in page.answers[1][1]
    assert "no different, within chance, from a linear model" in page.answers[0][1]
    assert "<table" in page.render()


def test_predictions_in_pieces_keep_the_same_rows_as_in_one(classes, monkeypatch):
    monkeypatch.setattr("bochner.reports.model.collecting.FIRST_ROWS", 15)
    whole, parts = Collected(classes.model), Collected(classes.model)
    for kept, size in ((whole, 70), (parts, 9)):
        for start in range(0, 70, size):
            own = classes.held.take(range(start, min(70, start + size)))
            kept.take(own.frame, own.places, own.clean, predict_rows(classes.model, own.clean, 0.9))
    pages = [predicted_report(classes.model, kept, Heading("t", "line"), coverage=0.9) for kept in (whole, parts)]
    for one, other in zip(*(page.parts[1].tables[0].rows for page in pages), strict=True):
        assert one[:4] == other[:4]
        np.testing.assert_allclose(one[4:6], other[4:6], rtol=1e-6)
    assert pages[0].parts[2].tables[0].header == pages[1].parts[2].tables[0].header
    assert whole.classes == parts.classes
    assert sum(whole.classes.values()) == whole.rows == 70
    assert len(pages[0].parts[2].tables[0].rows) == 15
    assert [part.title for part in pages[0].parts[:3]] == ["Predictions", "The strangest rows", "Rows"]
    with pytest.raises(ValueError, match="no rows to report on"):
        Collected(classes.model).kept()


# ---------------------------------------------------------------------- the page


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A report on a table that would like to be executed, in a file."""
    frame, y = _table(160)
    names = {"size": EVIL, "kind": 'a "quoted" & 😀 name', "on": "日付", "owner": "</script><!--"}
    kinds = {"a": "<img src=x onerror=alert(1)>", "b": "面" * 10_000, "c": 'it\'s "c"'}
    frame = frame.assign(kind=frame["kind"].map(kinds)).rename(columns=names)
    case = Case(TableRegressor(**OPTIONS), frame, y, f"y {EVIL}", title=f"t.csv: {EVIL}")
    path = tmp_path_factory.mktemp("hostile") / "page.html"
    path.write_text(case.page.render(), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def files(regression, classes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    for name, case in (("regression", regression), ("classes", classes)):
        (folder / f"{name}.html").write_text(case.page.render(), encoding="utf-8")
    return folder


def test_a_page_carries_its_data_as_json_and_loads_nothing(hostile):
    text = hostile.read_text(encoding="utf-8")
    assert len(text.encode()) < 3e6
    assert re.findall(r"<script[^>]*>", text) == ['<script type="application/json" id="charts">', "<script>"]
    data = re.search(r'id="charts">(.*?)</script>', text, re.DOTALL)[1]
    assert "<" not in data
    assert EVIL in {item["name"] for item in json.loads(data)["importance"]["items"]}
    assert "&lt;script&gt;" in text
    assert "面" * 100 not in text
    assert not re.search(r'(src|href)="(?!#|data:)', text)


def test_cells_that_are_numbers_sort_by_their_value():
    table = Table("c", ["a", "b"], [["x", 12345.678], ["y", None]])
    assert table.cells()[0][1] == {"text": "12,346", "value": 12345.678, "shade": 0}
    page = Page("t", "n", [], [Part("p", tables=[table])]).render()
    assert '<td class="number" data-value="12345.678">12,346</td>' in page
    assert '<td dir="auto">—</td>' in page


@needs_browser
def test_charts_show_numbers_as_tables_do(browser, tmp_path):
    """One rule in two languages."""
    rng = np.random.default_rng(0)
    values = [0.0, -0.0, 1.0, -3.5, 0.2, 999.95, 999.96, 9999.7, 1e4, 12345.678, 123456.5, -1234567.8, 999999999.9]
    values += [1e9, -2.5e12, 1e-3, 9.999e-4, 1.234e-4, 1e-4, 9.9996e-5, -1.2e-5, 3e-150]
    values += list(10 ** rng.uniform(-6, 11, 200) * rng.choice([-1, 1], 200))
    assert [number_text(value) for value in values[9:12]] == ["12,346", "123,456", "−1,234,568"]
    items = [{"name": "n", "value": float(f"{value:.10g}")} for value in values]
    page = Page("t", "n", [], [Part("p", charts=[("c", "label")])], {"c": {"type": "bars", "items": items}})
    (tmp_path / "p.html").write_text(page.render(), encoding="utf-8")
    browser.open(tmp_path / "p.html")
    titles = browser.run("[...document.querySelectorAll('svg rect title')].map(title => title.textContent)")
    assert titles == [f"n: {number_text(value)}" for value in values]
    assert browser.errors == []


@needs_browser
def test_numbers_of_charts_are_tables_that_open_by_key(regression, files, browser):
    browser.open(files / "regression.html")
    for title, word in (("Which columns matter", "owner"), ("How predictions move", "2024-")):
        part = f"[...document.querySelectorAll('.part')].find(part => part.innerText.startsWith({title!r}))"
        assert word not in browser.run(f"{part}.querySelector('details').innerText")
        browser.run(f"{part}.querySelector('summary').focus()")
        for kind in ("keyDown", "keyUp"):
            browser.send(
                "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", text="\r", windowsVirtualKeyCode=13
            )
        assert word in browser.run(f"{part}.querySelector('details').innerText")
    first = regression.parts["Which columns matter"].tables[0].rows[0]
    assert [first[0], *map(number_text, first[1:])] == browser.run(
        "[...document.querySelector('details tbody tr').cells].map(cell => cell.textContent)"
    )
    assert browser.errors == []


@needs_browser
def test_texts_from_right_to_left_are_read_so(browser, tmp_path):
    rows = [["שלום, (עולם)", "abc", 3.0]]
    page = Page("שלום: y", "n", [], [Part("p", tables=[Table("c", ["שם", "b", "n"], rows, control=True)])])
    (tmp_path / "p.html").write_text(page.render(), encoding="utf-8")
    browser.open(tmp_path / "p.html")
    found = browser.run(
        "[...document.querySelectorAll('h1, thead th, tbody tr *')].map(x => getComputedStyle(x).direction)"
    )
    assert found == ["rtl", "rtl", "ltr", "ltr", "rtl", "ltr", "ltr"]


@needs_browser
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pages_fit_their_window_with_a_clean_console(width, theme, files, hostile, browser):
    for path in (files / "regression.html", files / "classes.html", hostile):
        browser.open(path, width, theme)
        assert browser.run("document.documentElement.scrollWidth") <= width
        assert browser.run("[...document.querySelectorAll('svg')].every(s => s.getBoundingClientRect().width > 200)")
        bright = browser.run("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]")
        assert (bright > 128) == (theme == "light")
        assert browser.errors == []
        assert browser.requests == [path.as_uri()]


@needs_browser
def test_user_texts_are_shown_and_never_run(hostile, browser):
    browser.open(hostile)
    assert browser.run("document.title") == f"t.csv: {EVIL}"
    assert browser.run("document.querySelectorAll('main script, main img').length") == 0
    seen = browser.run("document.body.innerText")
    for text in (EVIL, 'a "quoted" & 😀 name', "日付", "<img src=x onerror=alert(1)>"):
        assert text in seen
    assert browser.errors == []


@needs_browser
def test_a_script_that_got_into_a_page_would_not_run(files, browser, tmp_path):
    page = (files / "classes.html").read_text(encoding="utf-8")
    (tmp_path / "p.html").write_text(page.replace("<main>", f"<main>{EVIL}"), encoding="utf-8")
    browser.open(tmp_path / "p.html")
    assert browser.run("document.title") == "t.csv: y"
    assert any("Content Security Policy" in text for text in browser.errors)


CHOOSE = """((label, value) => {
  const labels = [...document.querySelector(%r).querySelectorAll('label')];
  const own = labels.find(l => l.textContent.startsWith(label));
  const control = own.querySelector('select, input');
  control.value = value;
  control.dispatchEvent(new Event(control.tagName === 'SELECT' ? 'change' : 'input', {bubbles: true}));
})(%r, %r)"""


def _figure(name):
    return f"[data-chart={name}]"


def _text(browser, selector):
    return browser.run(f"document.querySelector({selector!r}).textContent")


@needs_browser
def test_the_column_and_the_class_of_the_dependence_plot_can_be_chosen(regression, classes, files, browser):
    browser.open(files / "regression.html")
    columns = [own["name"] for own in regression.page.charts["dependence"]["columns"]]
    figure = _figure("dependence")
    assert browser.run(f"document.querySelectorAll('{figure} .band').length") == 1  # a number: a band
    browser.run(CHOOSE % (figure, "Column", str(columns.index("kind"))))
    assert browser.run(f"document.querySelectorAll('{figure} .bar').length") == 3
    assert browser.run(f"document.querySelectorAll('{figure} .whisker').length") == 3
    browser.open(files / "classes.html")
    before = browser.run(f"document.querySelector('{figure} svg').outerHTML")
    browser.run(CHOOSE % (figure, "Class", "2"))
    assert browser.run(f"document.querySelector('{figure} svg').outerHTML") != before
    assert f"probability of {classes.model.classes_[2]}" in _text(browser, figure)
    assert browser.errors == []


@needs_browser
def test_what_if_says_what_the_model_says(regression, files, browser):
    figure = _figure("what_if")
    browser.open(files / "regression.html")
    row = regression.page.charts["what_if"]["rows"][3]
    number = [column["name"] for column in row["columns"]].index("size")
    column = row["columns"][number]
    browser.run(CHOOSE % (figure, "Row", "3"))
    browser.run(CHOOSE % (figure, "Column to move", str(number)))
    assert "(its own value)" in _text(browser, f"{figure} .controls")
    browser.run(CHOOSE % (figure, "size", "0"))
    mean, low, high = column["answers"][0]
    shown = f"{number_text(mean)}; 90 % band from {number_text(low)} to {number_text(high)}; "
    assert _text(browser, f"{figure} .said").startswith(shown)
    assert f"size = {column['labels'][0]}" in _text(browser, f"{figure} .controls")
    assert browser.run(f"document.querySelectorAll('{figure} .chosen').length") == 1
    browser.open(files / "classes.html")
    assert "with probability" in _text(browser, f"{figure} .said")
    assert browser.run(f"document.querySelectorAll('{figure} .bar').length") == 3
    assert browser.errors == []


@needs_browser
@pytest.mark.parametrize("kind", ["regression", "classes"])
def test_what_if_of_several_columns_says_what_the_model_says(kind, request, files, browser):
    case, figure = request.getfixturevalue(kind), _figure("together")
    row = case.page.charts["together"]["rows"][3]
    browser.open(files / f"{kind}.html")
    browser.run(CHOOSE % (figure, "Row", "3"))
    sizes, choice = [len(own["labels"]) for own in row["columns"]], [own["start"] for own in row["columns"]]
    for place, own in enumerate(row["columns"]):
        choice[place] = sizes[place] - 1 if choice[place] == 0 else 0
        browser.run(CHOOSE % (figure, f"{own['name']} = ", str(choice[place])))
        answer = row["answers"][np.ravel_multi_index(choice, sizes)]
        if kind == "regression":
            mean, low, high = map(number_text, answer)
            shown = f"{mean}; 90 % band from {low} to {high}; "
        else:
            shown = f"{case.model.classes_[np.argmax(answer)]}, with probability {number_text(max(answer))}; "
        assert _text(browser, f"{figure} .said").startswith(shown)
        assert f"{own['name']} = {own['labels'][choice[place]]}" in _text(browser, f"{figure} .controls")
    assert browser.run(f"document.querySelectorAll('{figure} .bar').length") == (2 if kind == "regression" else 3)
    assert "(its own value)" not in _text(browser, f"{figure} .controls")
    assert browser.errors == []


@needs_browser
def test_rows_are_read_by_pointer_and_by_keys(regression, files, browser):
    browser.open(files / "regression.html")
    figure = _figure("residuals")
    browser.run(f"document.querySelector('{figure}').scrollIntoView()")
    at = browser.run(
        f"(b => [b.x + 3.5, b.y + 3.5])(document.querySelector('{figure} circle').getBoundingClientRect())"
    )
    browser.send("Input.dispatchMouseEvent", type="mouseMoved", x=at[0], y=at[1])
    assert regression.held.frame["size"].iloc[0].rstrip("0") in _text(browser, f"{figure} .details")
    before = _text(browser, f"{figure} .details")
    browser.run(f"document.querySelector('{figure} .points').focus()")
    browser.key("ArrowRight", 39)
    assert _text(browser, f"{figure} .details") != before
    assert browser.run(f"document.querySelectorAll('{figure} .chosen').length") == 1
    assert browser.errors == []


@needs_browser
def test_predictions_are_read_by_keys(regression, browser, tmp_path):
    """The chart goes by the prediction, the table by the line of the file."""
    kept = Collected(regression.model)
    held = regression.held
    kept.take(held.frame, held.places, held.clean, predict_rows(regression.model, held.clean, 0.9))
    page = predicted_report(regression.model, kept, Heading("t", "line"), coverage=0.9)
    (tmp_path / "p.html").write_text(page.render(), encoding="utf-8")
    browser.open(tmp_path / "p.html")
    figure = _figure("predictions")
    assert browser.run(f"document.querySelectorAll('{figure} .band').length") == 1
    browser.run(f"document.querySelector('{figure} .points').focus()")
    order = np.argsort(regression.model.predict(held.frame))
    for at in order[:2]:
        browser.key("ArrowRight", 39)
        shown = browser.run(f"[...document.querySelectorAll('{figure} dd')].map(cell => cell.textContent)")
        assert shown[0] == str(held.places[at])
        assert held.frame["on"].iloc[at] in shown
    assert browser.errors == []


@needs_browser
def test_tables_are_sorted_and_filtered(regression, files, browser):
    browser.open(files / "regression.html")
    column = (
        "[...document.querySelectorAll('#rows tbody tr')].filter(r => !r.hidden).map(r => r.cells[1].dataset.value)"
    )
    expected = np.sort(regression.model.predict(regression.held.frame))
    for order, values in (("ascending", expected), ("descending", expected[::-1])):
        browser.run("document.querySelectorAll('#rows thead button')[1].click()")
        np.testing.assert_allclose([float(value) for value in browser.run(column)], values, rtol=1e-5)
        assert browser.run("document.querySelectorAll('#rows thead th')[1].getAttribute('aria-sort')") == order
    browser.run(CHOOSE % ("#rows", "Show rows", "2024-05"))
    count = sum("2024-05" in date for date in regression.held.frame["on"])
    assert len(browser.run(column)) == count > 0
    assert f"{count} of 70 rows" in _text(browser, "#rows .controls")
    assert browser.errors == []


@needs_browser
def test_every_control_has_a_label_and_can_be_reached_by_key(files, browser):
    browser.open(files / "classes.html")
    unnamed = "[...document.querySelectorAll('select, input')].filter(c => !c.labels.length).length"
    assert browser.run(unnamed) == 0
    assert browser.run(
        "[...document.querySelectorAll('svg')].every(s => s.getAttribute('aria-label') && s.querySelector('title'))"
    )
    seen = set()
    for _ in range(120):
        browser.key("Tab", 9)
        seen.add(browser.run("document.activeElement.tagName + '.' + document.activeElement.className"))
    assert {"SELECT.", "INPUT.", "SUMMARY.", "DIV.points", "DIV.scroll", "BUTTON.", "A."} <= seen


@needs_axe
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_reports_are_accessible(width, theme, files, hostile, browser):
    for path in (files / "regression.html", files / "classes.html", hostile):
        browser.open(path, width, theme)
        browser.run("document.querySelectorAll('details').forEach(part => (part.open = true))")
        assert browser.serious_findings() == [], path.name
