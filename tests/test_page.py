"""The HTML report: its page, what it says about a fitted estimator, what it shows of results, and how a browser sees it."""

import html
import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from scipy.interpolate import CubicSpline
from scipy.special import ndtr
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LinearRegression

from bochner.estimators import Settings, StationaryClassifier, StationaryRegressor
from bochner.experiments.rows import read_rows
from bochner.reports import tables
from bochner.reports.model import model_sections
from bochner.reports.page import Section, render, write
from bochner.reports.results import _from_markdown, results_sections

RESULTS = Path(__file__).parents[1] / "results"
EVIL = "<script>alert('a')</script>"
COLUMNS = [EVIL, "cost in $ and $", "a_name_that_never_ends_" * 6]


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _rows(count=200):
    rng = np.random.default_rng(3)
    X = rng.normal(size=(count, 3)) * [2.0, 30.0, 0.1] + [5.0, -100.0, 3.0]
    return X, 4 * np.sin(X[:, 0]) + X[:, 1] / 20 + 0.4 * rng.normal(size=count)


@pytest.fixture(scope="module")
def regression():
    """An estimator, what it learned from, what was held out, and the sections by title."""
    X, y = _rows()
    train, test = (X[:120], y[:120]), (X[120:], y[120:])
    estimator = StationaryRegressor(random_state=0, device="cpu").fit(*train)
    sections = model_sections(estimator, train, test, columns=COLUMNS, target="price & <b>")
    return estimator, train, test, {section.title: section for section in sections}


@pytest.fixture(scope="module")
def classification():
    X, y = _rows()
    labels = np.where(y > -5, "sold", "not <sold>")
    train, test = (X[:120], labels[:120]), (X[120:], labels[120:])
    estimator = StationaryClassifier(random_state=0, device="cpu").fit(*train)
    sections = model_sections(estimator, train, test, columns=["a", "b", "c"], target="outcome")
    return estimator, train, test, {section.title: section for section in sections}


def _number(text: str) -> float:
    return float(text.replace("−", "-").replace(",", "").removesuffix("\N{NO-BREAK SPACE}%"))


def _figure(label: str = "x") -> Figure:
    figure = Figure(figsize=(4, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1, 2], [1, 3, 2], "o-")
    axes.imshow(np.eye(3))
    axes.set_xlabel(label)
    return figure


# ---------------------------------------------------------------------- the page


def test_a_page_is_the_same_every_time_and_ids_are_unique_and_all_there():
    sections = [Section("One", figures=(_figure(), _figure())), Section("One", figures=(_figure(),))]
    page = render("Twice", sections)
    assert render("Twice", sections) == page
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids)) > 20
    used = set(re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', page))
    assert {a or b for a, b in used} <= set(ids)
    assert {"section-1", "section-2"} <= {a for a, _ in used}


def test_nothing_is_loaded_from_elsewhere_and_nothing_runs():
    page = render("Alone", [Section("Figure", figures=(_figure(),))])
    assert set(re.findall(r"https?://[^\"' )>]*", page)) == {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert not re.search(r"<script|<link|@import|<!--|<metadata|<\?xml", page)
    assert page.count("<!DOCTYPE") == 1
    assert '<html lang="en">' in page
    assert 'name="viewport"' in page
    assert 'href="data:image/png;base64,' in page


def test_texts_are_escaped_wherever_they_stand():
    section = Section(EVIL, f"{EVIL}\n\nsecond", [[EVIL, "b"], [EVIL, "2"]], (_figure(EVIL),), (f'"{EVIL}',))
    page = render(EVIL, [section], note=EVIL)
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 9
    assert 'aria-label="&#34;&lt;script&gt;' in page
    assert "<p>second</p>" in page


def test_text_of_a_figure_that_looks_like_an_id_stays_as_it_is():
    page = render("Ids", [Section("Figure", figures=(_figure('id="a" url(#b)'),))])
    assert 'id="a" url(#b)</text>' in html.unescape(page)


def test_names_in_other_scripts_are_drawn_by_the_browser():
    assert "面积</text>" in render("Script", [Section("Figure", figures=(_figure("面积"),))])


def test_columns_of_numbers_are_set_to_the_right_and_the_first_is_a_heading():
    table = [["name", "value", "text"], ["a", "−1.5", "x"], ["b", "—", "2 of 3"], ["c", "+3 ✓", "y"]]
    page = render("Table", [Section("Table", table=table)])
    assert '<th scope="col" class="number">value</th><th scope="col">text</th>' in page
    assert '<th scope="row"><span>a</span></th><td class="number">−1.5</td><td>x</td>' in page
    assert '<th scope="col">value</th>' in render("Table", [Section("Header only", table=[["name", "value"]])])


def test_only_wide_figures_scroll_on_a_phone():
    wide = Figure(figsize=(10, 3))
    assert 'class="wide"' in render("Wide", [Section("Wide", figures=(wide,))])
    assert 'class="wide"' not in render("Narrow", [Section("Narrow", figures=(_figure(),))])


def test_a_section_that_does_not_fit_together_says_why():
    with pytest.raises(ValueError, match=r"'A' must have a caption for each of its 1 figures or none, got 2"):
        Section("A", figures=(_figure(),), captions=("a", "b"))
    with pytest.raises(ValueError, match=r"'B' must have a header and lines of its length, got lengths \[1, 2\]"):
        Section("B", table=[["a", "b"], ["c"]])
    with pytest.raises(ValueError, match=r"'C' must have a header and lines of its length, got lengths \[\]"):
        Section("C", table=[])


def test_writing_replaces_the_file_and_leaves_nothing_else(tmp_path):
    path, sections = tmp_path / "new" / "report.html", [Section("Ünïcode", "ℓ ± σ")]
    for title in ("first", "second"):
        assert write(path, title, sections, note="n") == path
        assert path.read_text(encoding="utf-8") == render(title, sections, note="n")
    assert list(path.parent.iterdir()) == [path]


# ---------------------------------------------------------------------- regression


def test_the_data_and_the_target_are_summarised(regression):
    _, (X, y), (_, y_test), sections = regression
    assert sections["Data"].text.startswith("120 rows to learn from, 80 held out, 3 columns.")
    for line, values in zip(sections["Data"].table[1:], X.T, strict=True):
        ordered = np.sort(values)
        expected = [
            ordered[0],
            (ordered[59] + ordered[60]) / 2,
            ordered[-1],
            math.sqrt(np.mean((values - values.mean()) ** 2)),
        ]
        np.testing.assert_allclose([_number(text) for text in line[1:]], expected, rtol=1e-3)
    assert [line[0] for line in sections["Data"].table[1:]] == COLUMNS
    for line, values in zip(sections["Target"].table[1:], (y, y_test), strict=True):
        np.testing.assert_allclose(
            [_number(line[1]), _number(line[4])], [min(values), sum(values) / len(values)], rtol=1e-3
        )


def _density(estimator, X, y):
    """Density of each target, the slope of its level, from 101 quantiles of its row; as normal scores they nearly lie on a line."""
    scores = np.linspace(-5, 5, 101)
    found = []
    for own, value in zip(estimator.predict_quantiles(X, ndtr(scores)), y, strict=True):
        spline = CubicSpline(own, scores)
        found.append(math.exp(-(spline(value) ** 2) / 2) / math.sqrt(2 * math.pi) * spline(value, 1))
    return np.array(found)


def test_held_out_metrics_of_regression_are_their_formulas(regression):
    estimator, (_, y_train), (X, y), sections = regression
    header, ours, baseline = sections["Held-out rows"].table
    assert header == ["", "RMSE", "NLPD", "R²", "90 % interval covers", "its mean width"]
    low, high = estimator.predict_interval(X, 0.9).T
    gauss = y_train.mean(), y_train.std()
    density = np.exp(-(((y - gauss[0]) / gauss[1]) ** 2) / 2) / (gauss[1] * math.sqrt(2 * math.pi))
    ends = gauss[0] - 1.6448536 * gauss[1], gauss[0] + 1.6448536 * gauss[1]
    for line, m, log_density, (lower, upper) in (
        (ours, estimator.predict(X), np.log(_density(estimator, X, y)), (low, high)),
        (baseline, gauss[0], np.log(density), ends),
    ):
        inside = (lower <= y) & (y <= upper)
        r2 = 1 - np.sum((y - m) ** 2) / np.sum((y - y.mean()) ** 2)
        expected = [math.sqrt(np.mean((y - m) ** 2)), -np.mean(log_density), r2, 100 * inside.mean()]
        expected.append(np.mean(upper - lower))
        np.testing.assert_allclose([_number(text) for text in line[1:]], expected, rtol=1e-3, atol=6e-4)
    assert _number(ours[1]) < _number(baseline[1])


def test_the_calibration_table_counts_targets_inside_the_intervals(regression):
    estimator, _, (X, y), sections = regression
    table = sections["Calibration"].table
    assert [_number(line[0]) for line in table[1:]] == [10, 20, 30, 40, 50, 60, 70, 80, 90, 95]
    for nominal, observed in table[1:]:
        ends = estimator.predict_interval(X, _number(nominal) / 100)
        count = sum(low <= value <= high for value, (low, high) in zip(y, ends, strict=True))
        assert observed == f"{100 * (count / 80):.1f}\N{NO-BREAK SPACE}%"


def test_predictions_are_drawn_sorted_and_along_the_column_that_matters_most(regression):
    estimator, (X, _), (X_test, y_test), sections = regression
    held, along = (figure.axes[0] for figure in sections["Predictions"].figures)
    order = np.argsort(estimator.predict(X_test))
    np.testing.assert_allclose(held.lines[0].get_ydata(), estimator.predict(X_test)[order])
    np.testing.assert_array_equal(held.lines[1].get_ydata(), y_test[order])
    # Over all pairs of test rows, the first column's value changes the prediction most when it is that of another row.
    changes = []
    for column in range(3):
        pairs = np.repeat(X_test, 80, axis=0)
        pairs[:, column] = np.tile(X_test[:, column], 80)
        changes.append(np.mean(np.abs(estimator.predict(pairs) - np.repeat(estimator.predict(X_test), 80))))
    assert np.argmax(changes) == 0
    assert along.get_xlabel() == EVIL
    grid, low, high = np.asarray(along.lines[0].get_xdata()), X[:, 0].min(), X[:, 0].max()
    np.testing.assert_allclose([grid[0], grid[-1]], [low - 1.5 * (high - low), high + 1.5 * (high - low)])
    rows = np.stack([grid, np.full(len(grid), np.median(X[:, 1])), np.full(len(grid), np.median(X[:, 2]))], axis=1)
    low, high = estimator.predict_quantiles(rows, [0.05, 0.95]).T
    np.testing.assert_allclose(along.lines[0].get_ydata(), estimator.predict(rows))
    band = along.collections[0].get_paths()[0].vertices
    np.testing.assert_allclose([band[:, 1].min(), band[:, 1].max()], [low.min(), high.max()], rtol=1e-6)
    assert (high - low)[0] > 3 * (high - low)[len(rows) // 2]


def test_rows_that_were_moved_away_are_flagged_more_often(regression):
    estimator, (train, _), (X, _), sections = regression
    section = sections["Rows unlike the training data"]
    (_, _, held), (_, _, moved) = section.table[1:]
    flagged = sum(score > estimator.ood_threshold_ for score in estimator.ood_score(X)) / 80
    assert held == f"{100 * flagged:.1f}\N{NO-BREAK SPACE}%"
    assert _number(moved) > _number(held) + 30
    away = np.random.default_rng(0).standard_normal(X.shape)
    away = X + 5 * away / np.sqrt(np.sum(away**2, axis=1))[:, None] * [
        np.sqrt(np.mean((c - c.mean()) ** 2)) for c in train.T
    ]
    assert moved == f"{100 * np.mean(estimator.ood_score(away) > estimator.ood_threshold_):.1f}\N{NO-BREAK SPACE}%"
    axes = section.figures[0].axes[0]
    assert axes.lines[0].get_xdata()[0] == estimator.ood_threshold_
    shares = np.array([bar.get_height() for bar in axes.patches]).reshape(2, 40)
    np.testing.assert_allclose(shares.sum(1), 1)


def test_the_members_of_a_regression_are_listed(regression):
    estimator, (_, y), _, sections = regression
    section, members = sections["Model"], estimator.mixtures_[0].members
    assert section.table[0] == ["stands on", "kernel", "lengthscale", "target", "weight"]
    names = {"Matern(nu=1.5, product=False)": "Matern, ν = 1.5", "RBF()": "RBF"}
    for line, member in zip(section.table[1:], members, strict=True):
        assert line[:2] == ["columns", names[str(member.head.features.spectrum)]]
        assert line[3] == "as it is"  # the map is the identity: sums of waves and lines need no other
        assert line[4] == f"{member.weight:.2f}"
    isotropic = [
        line
        for line, m in zip(section.table[1:], members, strict=True)
        if len(set(m.head.features.lengthscale.tolist())) == 1
    ]
    shown = [line[2] for line in section.table[1:]]
    assert [line[2] for line in isotropic] == [f"{members[0].head.features.lengthscale[0]:.4g}"]
    assert shown.count("one for each column") == len(shown) - 1 > 0
    assert f"{len(members)} on the columns (1.00)" in section.text
    prior, noise = map(
        float, re.search(r"prior standard deviation is ([\d.]+), .* noise ([\d.]+), both", section.text).groups()
    )
    # Far away every member has mean 0 and the variance of its f and its noise, in standard deviations of y.
    variance = sum(m.weight * (m.head.amplitude**2 + m.head.noise**2) for m in members)
    factor = math.exp(estimator.mixtures_[0].spread.constant)
    assert prior == pytest.approx(factor * math.sqrt(variance) * y.std(), rel=1e-3)
    assert noise == pytest.approx(0.4, rel=0.3)  # the rows were made with 0.4; 120 of them say it to a tenth or so


def test_maps_networks_and_classes_are_named():
    X, y = _rows(60)
    settings = replace(Settings(), network_rows=50, least_steps=20, member_floor=0.0)
    options = {"hidden_layer_sizes": (6, 4), "settings": settings, "random_state": 0, "device": "cpu"}
    for target, words in ((np.exp(y), {"its logarithm", "as it is"}), (np.sinh(y), {"as it is"})):
        estimator = StationaryRegressor(**options).fit(X, target)
        by = {
            s.title: s for s in model_sections(estimator, (X, target), (X, target), columns=["a", "b", "c"], target="y")
        }
        assert words <= {line[3] for line in by["Model"].table[1:]}
        assert {line[0] for line in by["Model"].table[1:]} == {"columns", "networks"}
        for own in {member.map for member in estimator.mixtures_[0].members if member.map.kind == "power"}:
            assert f"Yeo–Johnson, λ = {own.power:.2f}" in {line[3] for line in by["Model"].table[1:]}
    labels = np.where(y > -5, "a", "b")
    estimator = StationaryClassifier(**options).fit(X, labels)
    by = {s.title: s for s in model_sections(estimator, (X, labels), (X, labels), columns=["a", "b", "c"], target="y")}
    assert by["Model"].table[0] == ["stands on", "kernel", "lengthscale", "weight"]
    assert "prior standard deviation" not in by["Model"].text
    np.testing.assert_allclose(
        sum(float(line[3]) for line in by["Model"].table[1:]), 1, atol=0.005 * len(by["Model"].table)
    )


def test_one_column_shows_its_training_rows_and_a_single_held_out_row_has_no_r2():
    X, y = _rows(40)
    estimator = StationaryRegressor(random_state=0, device="cpu").fit(X[:, :1], y)
    train, test = (X[:, :1], y), (X[:1, :1], y[:1])
    sections = {s.title: s for s in model_sections(estimator, train, test, columns=["a"], target="b")}
    np.testing.assert_array_equal(sections["Predictions"].figures[1].axes[0].lines[1].get_ydata(), y)
    assert sections["Held-out rows"].table[1][3] == "—"
    assert "Other columns" not in sections["Predictions"].captions[1]


def test_many_columns_are_cut_and_a_constant_one_is_not_sliced():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, 35))
    X[:, 0] = 7.0
    y = X[:, 1] + 0.1 * rng.normal(size=40)
    estimator = StationaryRegressor(random_state=0, device="cpu").fit(X, y)
    new = X.copy()
    new[:, 0] = np.linspace(-1e3, 1e3, 40)  # constant in training, and now it matters more than all others
    names = [f"c{i}" for i in range(35)]
    sections = {s.title: s for s in model_sections(estimator, (X, y), (new, y), columns=names, target="y")}
    assert len(sections["Data"].table) == 31
    assert "The first 30 of 35 columns are shown." in sections["Data"].text
    sections = {s.title: s for s in model_sections(estimator, (X, y), (X, y), columns=names, target="y")}
    assert sections["Predictions"].captions[1].startswith("Along c1:")


def test_missing_numbers_are_left_out_of_summaries():
    X, y = _rows(60)
    X[::7, 1] = np.nan
    estimator = StationaryRegressor(random_state=0, device="cpu").fit(X, y)
    sections = {s.title: s for s in model_sections(estimator, (X, y), (X, y), columns=["a", "b", "c"], target="y")}
    there = X[~np.isnan(X[:, 1]), 1]
    shown = [_number(text) for text in sections["Data"].table[2][1:]]
    np.testing.assert_allclose(shown, [there.min(), np.median(there), there.max(), there.std()], rtol=1e-3)
    assert np.isfinite(sections["Predictions"].figures[1].axes[0].lines[0].get_ydata()).all()


# ---------------------------------------------------------------------- classification


def test_held_out_metrics_of_classes_are_their_formulas(classification):
    estimator, (_, y_train), (X, y), sections = classification
    header, ours, baseline = sections["Held-out rows"].table
    assert header == ["", "accuracy", "NLPD", "ECE", "AUC"]
    p, second = estimator.predict_proba(X), y == "sold"
    own = np.where(second, p[:, 1], p[:, 0])
    pairs = p[second, 1][:, None] - p[~second, 1][None, :]
    expected = [np.mean(own > 0.5), -np.mean(np.log(own)), np.mean(pairs > 0) + np.mean(pairs == 0) / 2]
    np.testing.assert_allclose([_number(ours[i]) for i in (1, 2, 4)], expected, rtol=1e-3, atol=6e-4)
    share = np.mean(y_train == "sold")
    right = second == (share > 0.5)
    log = np.where(second, math.log(share), math.log(1 - share))
    expected = [right.mean(), -log.mean(), abs(right.mean() - max(share, 1 - share)), 0.5]
    np.testing.assert_allclose([_number(text) for text in baseline[1:]], expected, rtol=1e-3, atol=6e-4)


def test_the_reliability_table_and_the_classes_are_counted(classification):
    estimator, (_, y_train), (X, y), sections = classification
    p = estimator.predict_proba(X).max(1)
    right = estimator.predict(X) == y
    for limits, count, confidence, accuracy in sections["Calibration"].table[1:]:
        low, high = (float(text) / 100 for text in re.findall(r"\d+", limits))
        own = (p > low) & (p <= high)
        assert int(count) == own.sum() > 0
        expected = [100 * p[own].mean(), 100 * right[own].mean()]
        np.testing.assert_allclose([_number(confidence), _number(accuracy)], expected, atol=0.051)
    assert sum(int(line[1]) for line in sections["Calibration"].table[1:]) == 80
    for line in sections["Target"].table[1:]:
        assert (int(line[1]), int(line[3])) == (np.sum(y_train == line[0]), np.sum(y == line[0]))


def test_the_slice_of_a_classifier_shows_probabilities_that_add_up(classification):
    estimator, _, _, sections = classification
    axes = sections["Predictions"].figures[0].axes[0]
    np.testing.assert_allclose(np.sum([line.get_ydata() for line in axes.lines[:2]], axis=0), 1, atol=1e-9)
    assert [line.get_label() for line in axes.lines] == [*estimator.classes_, "prior"]
    np.testing.assert_array_equal(axes.lines[2].get_ydata(), 0.5)


def test_classes_that_were_not_learned_are_left_out_and_counted(classification):
    estimator, train, (X, _), _ = classification
    odd = np.where(np.arange(80) < 3, "returned", "sold")
    by = {s.title: s for s in model_sections(estimator, train, (X, odd), columns=["a", "b", "c"], target="t")}
    assert " 3 held-out rows of classes that were not learned are left out" in by["Held-out rows"].text
    assert by["Held-out rows"].table[1][4] == "—"  # of the others all are of one class
    with pytest.raises(ValueError, match="must hold rows of classes that were learned, got none"):
        model_sections(estimator, train, (X, np.full(80, "new")), columns=["a", "b", "c"], target="t")


def test_what_does_not_fit_is_refused(regression):
    estimator, train, test, _ = regression
    with pytest.raises(ValueError, match="a StationaryRegressor or a StationaryClassifier, got LinearRegression"):
        model_sections(LinearRegression(), train, test, columns=COLUMNS, target="t")
    with pytest.raises(ValueError, match=r"train parameter must hold rows of 2 columns.* got shapes \(120, 3\)"):
        model_sections(estimator, train, test, columns=["a", "b"], target="t")
    with pytest.raises(ValueError, match=r"test parameter must hold rows of 3 columns.*\(80, 3\) and \(79,\)"):
        model_sections(estimator, train, (test[0], test[1][:-1]), columns=COLUMNS, target="t")
    with pytest.raises(NotFittedError, match="not fitted"):
        model_sections(StationaryRegressor(), train, test, columns=COLUMNS, target="t")


# ---------------------------------------------------------------------- results


@pytest.fixture(scope="module")
def results():
    return results_sections(RESULTS)


def test_the_results_of_this_repository_are_all_shown(results):
    titles = [section.title for section in results]
    assert len(titles) == len(set(titles))
    assert sum(title.startswith("Theory: ") for title in titles) == 6
    assert sum(title.startswith("Toys: ") for title in titles) == 5
    assert all(section.captions and all(section.captions) for section in results if section.figures)
    assert {"Images: rotated-mnist", "Images: cifar-ood, head text", "UCI: both protocols"} <= set(titles)
    assert len(next(s for s in results if s.title == "Images: rotated-mnist").figures) == 2


def test_differences_are_coloured_by_whether_they_are_near():
    table = [["model", "difference", "other"], ["a", "+0.01 ✓", "1"], ["b", "−0.50", "2"], ["c", "—", "3"]]
    page = render("t", [Section("s", table=table)])
    assert '<td class="number near">+0.01 ✓</td>' in page
    assert '<td class="number far">−0.50</td>' in page
    assert '<td class="number">—</td>' in page


def test_results_say_how_they_were_made(results):
    (section,) = [s for s in results if s.title == "UCI: how the rows were made"]
    assert (
        "bochner run uci-regression --posterior kfac --protocol paper. Made in 280 s, on NVIDIA H200, by commit 5f5e813."
        in section.text
    )
    assert any("Periodic models against the others" in s.title for s in results)


def test_tables_of_results_hold_the_numbers_of_their_rows(results):
    by = {section.title: section for section in results}
    table = by["uci-regression, kfac, protocol paper: boston"].table
    assert table[0][:4] == ["model", "NLPD ours", "paper", "difference"]
    rows = [
        r
        for r in read_rows(RESULTS / "uci" / "uci-regression.jsonl")
        if (r["set"], r["protocol"]) == ("boston", "paper")
    ]
    for line in table[1:]:
        values = [row["nlpd"] for row in rows if row["model"] == line[0] and row["status"] == "ok"]
        assert abs(float(line[1].split(" ")[0].replace("−", "-")) - np.mean(values)) <= 0.00501
    assert by["UCI: how to read the tables"].text == tables.RULE


def test_markdown_becomes_sections():
    text = "rule\n\n## one\n\n- a\n- b\n\n### set\n\n| x | y |\n| --- | --- |\n| 1\\|2 |  |\n\n## two\n\nlast\n"
    assert _from_markdown(text, "T", prefix="p ") == [
        Section("T", "rule"),
        Section("p one", "a\n\nb"),
        Section("p one: set", "", [["x", "y"], ["1|2", ""]]),
        Section("p two", "last"),
    ]


def test_folders_are_optional_but_one_must_hold_rows(tmp_path):
    with pytest.raises(
        ValueError, match=r"no rows in the folders theory, toys, uci, images of .*; make some with bochner run"
    ):
        results_sections(tmp_path)
    (tmp_path / "theory").mkdir()
    shutil.copy(RESULTS / "theory" / "mixture.jsonl", tmp_path / "theory")
    assert [section.title for section in results_sections(tmp_path)] == ["Theory: the error of keeping one harmonic"]


# ---------------------------------------------------------------------- in a browser

CHROMIUM = shutil.which("chromium")
FLAGS = (
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
    ),
    *("--disable-component-update", "--disable-sync", "--enable-logging=stderr", "--v=0"),
)
browser = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
WRAPPER = """<!DOCTYPE html><meta charset="utf-8"><body data-found=""><script>
window.onload = () => {
  document.body.dataset.found = JSON.stringify([...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument, root = page.documentElement, style = x => getComputedStyle(page.querySelector(x));
    return {inner: frame.contentWindow.innerWidth, scroll: root.scrollWidth, height: root.scrollHeight,
            paper: style("body").backgroundColor, card: style(".picture").backgroundColor,
            tables: [...page.querySelectorAll(".table")].map(t => [t.clientWidth, t.scrollWidth]),
            figures: [...page.querySelectorAll("svg")].map(s => s.getBoundingClientRect().width)};
  }));
};
</script>%s"""


def _open(folder: Path, page: str, *options: str) -> tuple[str, list[str]]:
    """The document as chromium has it in the end, and what it wrote to the console."""
    path = folder / "page.html"
    path.write_text(page, encoding="utf-8")
    profile = folder / f"profile-{len(list(folder.iterdir()))}"
    command = [str(CHROMIUM), *FLAGS, *options, f"--user-data-dir={profile}", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def _measure(folder: Path, page: str, *options: str) -> list[dict]:
    """The page laid out at 1280 and at 390 pixels; in frames, as a window of chromium is never narrower than 500."""
    frames = [
        f'<iframe width="{w}" height="900" style="border: 0" srcdoc="{html.escape(page)}"></iframe>'
        for w in (1280, 390)
    ]
    document, console = _open(folder, WRAPPER % "".join(frames), *options)
    assert console == []
    return json.loads(html.unescape(re.search(r'data-found="([^"]*)"', document)[1]))


@browser
@pytest.mark.parametrize("kind", ["regression", "classification", "results"])
def test_pages_fit_a_desk_and_a_phone(kind, request, tmp_path):
    found = request.getfixturevalue(kind)
    # Of the results, what is widest: a figure of eleven inches and a table of twelve columns.
    sections = [found[4], replace(found[-1], figures=(), captions=())] if kind == "results" else list(found[3].values())
    page = render("A title " + "without_end_" * 12, sections, note="A note.")
    assert _open(tmp_path, page)[1] == []
    desk, phone = _measure(tmp_path, page)
    for width, seen in ((1280, desk), (390, phone)):
        assert seen["inner"] == width
        assert seen["scroll"] <= seen["inner"]
        assert seen["height"] > 900
        assert all(inner <= width - 30 for inner, _ in seen["tables"])
    if kind == "results":
        assert any(scroll > inner for inner, scroll in phone["tables"])
        assert phone["figures"] == [672]  # legible, in its own scroller
    else:
        assert all(width <= 360 for width in phone["figures"])


@browser
def test_in_the_dark_the_page_is_dark_and_figures_stay_on_light_cards(tmp_path):
    page = render("Dark", [Section("Figure", figures=(_figure(),))])
    light, _ = _measure(tmp_path, page, "--blink-settings=preferredColorScheme=1")
    dark, _ = _measure(tmp_path, page, "--blink-settings=preferredColorScheme=0")
    brightness = [
        sum(map(int, re.findall(r"\d+", seen[key]))) / 3 for seen in (light, dark) for key in ("paper", "card")
    ]
    assert brightness[0] > 240
    assert brightness[1] > 240
    assert brightness[2] < 40
    assert brightness[3] > 230


@browser
def test_a_script_that_got_into_a_page_would_not_run_and_would_be_noticed(tmp_path):
    page = render("Safe", [Section("Text", "words")]).replace(
        "</body>", "<script>document.title = 'changed'</script></body>"
    )
    document, console = _open(tmp_path, page)
    assert "<title>Safe</title>" in document
    assert any("Content Security Policy" in line for line in console)
