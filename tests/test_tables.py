"""Rows of UCI experiments beside the paper's tables."""

import re

import numpy as np
import pytest

from bochner.reports import tables
from bochner.reports.blocks import as_markdown

MODELS = (
    "relu local-rbf rbf-sin rbf-tri local-matern52 matern52-sin matern52-tri local-matern32 matern32-sin matern32-tri "
    "rbf-sincos matern52-sincos matern32-sincos rbf-prelu matern52-prelu matern32-prelu"
).split()


def markdown(rows):
    return as_markdown(tables.blocks(rows))


def regression(nlpd, *, model="relu", fold=0, **changes):
    """One row of ``uci-regression``; an NLPD of None is a diverged unit."""
    row = {
        "experiment": "uci-regression",
        "protocol": "paper",
        "posterior": "kfac",
        "set": "boston",
        "model": model,
        "fold": fold,
        "folds": list(range(10)),
        "seed": 0,
        "status": "diverged" if nlpd is None else "ok",
        "nlpd": nlpd,
        "rmse": None if nlpd is None else 0.5,
        "lr": 1e-3,
        "scale": 0.1,
        "seconds": 1.0,
    }
    return row | changes


def ten(nlpd, **changes):
    return [regression(nlpd, fold=fold, **changes) for fold in range(10)]


def classification(nlpd, **changes):
    row = regression(nlpd, experiment="uci-classification", set="covtype", accuracy=0.93, auc=0.99)
    del row["rmse"]
    return row | changes


def only_cell(rows, metric="nlpd"):
    (cell,) = tables.summarise(rows).values()
    return cell[metric]


@pytest.mark.parametrize(
    ("experiment", "posterior", "sets", "metrics", "missing"),
    [
        ("uci-regression", "kfac", ["boston", "concrete", "airfoil", "elevators"], ["nlpd", "rmse"], 0),
        ("uci-classification", "kfac", ["diabetes", "adult", "connect-4", "covtype"], ["nlpd", "accuracy", "auc"], 0),
        ("uci-classification", "swag", ["diabetes", "adult", "connect-4", "covtype"], ["nlpd", "accuracy", "auc"], 2),
    ],
)
def test_paper_has_64_cells_in_its_order(experiment, posterior, sets, metrics, missing):
    table = tables.PAPER[experiment][posterior]
    assert list(table) == sets
    assert all(list(models) == MODELS for models in table.values())
    cells = [cell for models in table.values() for cell in models.values()]
    assert len(cells) == 64
    assert all(list(cell) == metrics for cell in cells)
    assert sum(cell[metric] is None for cell in cells for metric in metrics) == missing * len(metrics)


def test_paper_values_are_those_printed():
    regression_table = tables.PAPER["uci-regression"]["kfac"]
    kfac, swag = (tables.PAPER["uci-classification"][name] for name in ("kfac", "swag"))
    assert regression_table["boston"]["relu"] == {"nlpd": [0.51, 0.32], "rmse": [0.37, 0.07]}
    assert regression_table["elevators"]["rbf-prelu"] == {"nlpd": [0.74, 0.73], "rmse": [0.46, 0.21]}
    assert kfac["connect-4"]["local-matern52"] == {"nlpd": [0.50, 0.01], "accuracy": [0.81, 0.00], "auc": [0.89, 0.00]}
    assert swag["adult"]["matern32-sincos"] == {"nlpd": [0.39, 0.11], "accuracy": [0.81, 0.08], "auc": [0.84, 0.15]}
    assert swag["diabetes"]["rbf-sincos"] == {"nlpd": None, "accuracy": None, "auc": None}


def test_standard_deviation_divides_by_the_number_of_folds():
    cell = only_cell([regression(0.1), regression(0.4, fold=1), regression(0.7, fold=2)])
    np.testing.assert_allclose([cell.mean, cell.std], [0.4, np.sqrt(0.06)])  # (0.09 + 0 + 0.09) / 3
    assert (cell.folds, cell.diverged) == (3, 0)


def test_seeds_are_averaged_within_their_fold():
    cell = only_cell([regression(0.1), regression(0.5, seed=7), regression(0.9, fold=1)])
    np.testing.assert_allclose([cell.mean, cell.std], [0.6, 0.3])  # folds of 0.3 and 0.9
    assert cell.folds == 2


@pytest.mark.parametrize("bad", [regression(None), regression(np.nan), regression(np.inf)])
def test_units_without_a_finite_value_are_left_out_and_counted(bad):
    rows = [bad, *ten(0.4)[1:]]
    cell = only_cell(rows)
    np.testing.assert_allclose([cell.mean, cell.std], [0.4, 0.0], atol=1e-12)
    assert (cell.folds, cell.diverged) == (10, 1)
    text = markdown(rows)
    assert "| relu | 0.40 ± 0.00 †1 | 0.51 ± 0.32 | −0.11 ✓ |" in text
    assert (
        "NLPD: 1 of 1 cells within one of the paper's standard deviations, 1 within two standard errors of its mean; "
        "the mean difference is −0.110 (1 of the 1 with diverged units left out)." in text
    )


def test_a_cell_that_diverged_whole_counts_as_not_within():
    text = markdown(ten(None))
    assert "| relu | — †10 | 0.51 ± 0.32 | — |" in text
    assert "NLPD: 0 of 1 cells" in text
    assert "Beyond one standard deviation: boston relu (ours —, paper 0.51 ± 0.32)." in text


def test_a_sweep_over_more_folds_replaces_one_over_fewer():
    few = [regression(9.0, folds=[0, 1])]
    assert only_cell(ten(0.4) + few).mean == pytest.approx(0.4)
    assert only_cell(few + ten(0.4)).mean == pytest.approx(0.4)


@pytest.mark.parametrize(("nlpd", "within"), [(0.1701, True), (0.1699, False), (0.1899, True), (0.1901, False)])
def test_a_printed_deviation_of_zero_leaves_the_rounding_of_both(nlpd, within):
    """The paper prints 0.18 ± 0.00 for ReLU on covtype: 0.005 for its deviation and 0.005 for its mean."""
    assert only_cell([classification(nlpd)]).within is within


@pytest.mark.parametrize(("nlpd", "within"), [(0.834, True), (0.836, False), (0.186, True), (0.184, False)])
def test_one_of_the_papers_standard_deviations_and_its_rounding(nlpd, within):
    """The paper prints 0.51 ± 0.32 for ReLU on boston."""
    assert only_cell([regression(nlpd)]).within is within


def test_counts_by_hand_and_the_rest_by_name():
    # concrete: ReLU 0.78 ± 0.16, rbf-sin 0.74 ± 0.15, matern52-sin 0.67 ± 0.09.
    rows = [
        *ten(0.80, set="concrete"),
        *ten(1.00, set="concrete", model="rbf-sin"),
        *ten(0.60, set="concrete", model="matern52-sin"),
        *ten(-0.30, set="concrete", model="mine"),
    ]
    text = markdown(rows)
    # Two standard errors are 0.107, 0.100 and 0.060, with 0.005 for rounding; the differences 0.02, 0.26 and −0.07.
    expected = (
        "NLPD: 2 of 3 cells within one of the paper's standard deviations, 1 within two standard errors of its mean; "
        "the mean difference is +0.070. Beyond one standard deviation: concrete rbf-sin (ours 1.00, "
    )
    assert expected + "paper 0.74 ± 0.15)." in text
    assert "RMSE: 3 of 3 cells within one of the paper's standard deviations" in text
    assert "| matern52-sin | 0.60 ± 0.00 | 0.67 ± 0.09 | −0.07 ✓ | 0.50 ± 0.00 | 0.47 ± 0.03 | +0.03 ✓ |" in text
    assert "| mine | −0.30 ± 0.00 | — | — | 0.50 ± 0.00 | — | — |" in text


def test_the_headline_sets_periodic_models_against_the_others():
    rows = [
        *ten(0.5),
        *ten(0.4, model="local-rbf"),
        *ten(0.3, model="rbf-sin"),
        *ten(0.5, model="rbf-tri"),
        *ten(0.9, protocol="bochner"),
    ]
    text = as_markdown([tables.headline(rows)])
    line = "| uci-regression | kfac | paper | boston | 0.40 | 0.30 (rbf-sin) | 0.45 | 0.40 (local-rbf) | ✓ |"
    assert line in text
    assert "bochner" not in text  # a single model is no comparison


def test_the_comparison_gives_the_standard_error_of_paired_differences():
    apart = [0.0, -0.1] * 5
    rows = [regression(0.5 + 0.3 * f, fold=f) for f in range(10)]
    rows += [regression(0.5 + 0.3 * f + d, fold=f, protocol="bochner") for f, d in enumerate(apart)]
    error = np.std(apart, ddof=1) / np.sqrt(10)
    assert f"−0.05 ± {error:.2f} ✓" in as_markdown(tables.comparison(rows))


def test_tables_follow_the_paper_whatever_the_order_of_rows():
    rows = [classification(0.2, posterior="swag"), classification(0.2), regression(0.5, protocol="bochner")]
    rows += [
        regression(0.5, model=model, set=name) for name in ("airfoil", "boston") for model in ("mine", *MODELS[::-1])
    ]
    text = markdown(rows)
    assert re.findall(r"^## (.*)$", text, re.M) == [
        "uci-regression, kfac, protocol paper",
        "uci-regression, kfac, protocol bochner",
        "uci-classification, kfac, protocol paper",
        "uci-classification, swag, protocol paper",
    ]
    assert re.findall(r"^### (.*)$", text, re.M) == ["boston", "airfoil", "boston", "covtype", "covtype"]
    first = text.split("### boston")[1].split("###")[0]
    assert re.findall(r"^\| (\S+) \| 0", first, re.M) == [*MODELS, "mine"]
    assert "| model | NLPD ours | paper | difference | ACC ours | paper | difference | AUC ours |" in text
    assert text.startswith(tables.RULE)


def test_fewer_than_ten_folds_are_marked():
    assert "| relu | 0.50 ± 0.00 n=1 | 0.51 ± 0.32 |" in markdown([regression(0.5)])
    assert "n=1 |" not in markdown(ten(0.5))


def test_a_difference_of_nothing_has_no_minus():
    assert "| +0.00 ✓ | 0.50" in markdown(ten(0.5099))


def test_names_that_the_paper_lacks_have_no_count():
    text = markdown([regression(0.5, set="yacht", posterior="nuts")])
    assert "NLPD: the paper has no value for these cells." in text
    assert "### yacht" in text


def test_latex_is_escaped_balanced_and_even():
    rows = [*ten(0.5), regression(None, model="a_b & 50% [x] {y} #1 $^~\\|"), classification(0.2, set="my_set")]
    text = tables.latex(rows)
    assert text.isascii()
    escaped = (
        r"a\_b \& 50\% {[}x] \{y\} \#1 \$\textasciicircum{}\textasciitilde{}\textbackslash{}$|$ & --- n=1 \dag{}1 & "
    )
    assert escaped in text
    assert r"relu & 0.50 $\pm$ 0.00 & 0.51 $\pm$ 0.32 & $-$0.01 $\checkmark$ & " in text
    assert r"uci-classification, kfac, protocol paper: my\_set" in text
    for environment, count in (("table", 2), ("tabular", 2)):
        assert text.count(rf"\begin{{{environment}}}") == text.count(rf"\end{{{environment}}}") == count
    for columns, body in re.findall(r"\\begin{tabular}{(l+)}\n\\toprule\n(.*?)\\bottomrule", text, re.S):
        lines = [line for line in body.split("\n") if line.endswith(r"\\")]
        assert all(len(re.findall(r"(?<!\\)&", line)) == len(columns) - 1 for line in lines)
    assert len(re.findall(r"(?<!\\)\$", text)) % 2 == 0


def test_comparison_is_paired_over_the_units_of_both():
    """Fold 2 has one protocol only and fold 3 diverged in one: the means are over folds 0 and 1."""
    paper = [regression(value, fold=fold) for fold, value in enumerate([0.4, 0.6, 9.0, 9.0])]
    ours = [regression(v, fold=f, protocol="bochner") for f, v in ((0, 0.2), (1, 0.7), (3, None))]
    worse = [regression(0.5, model="rbf-sin"), regression(0.6, model="rbf-sin", protocol="bochner")]
    alone = [regression(0.5, model="rbf-tri")]
    text = as_markdown(tables.comparison(paper + ours + worse + alone))
    assert "| boston | relu | 0.45 ± 0.25 | 0.50 ± 0.10 | −0.05 ± 0.15 ✓ †1 | 3 |" in text
    assert "| boston | rbf-sin | 0.60 ± 0.00 | 0.50 ± 0.00 | +0.10 | 1 |" in text
    assert "Protocol bochner has the lower NLPD in 1 of 2 cells." in text
    assert "rbf-tri" not in text


def test_comparison_counts_a_cell_whose_pairs_all_diverged():
    text = as_markdown(tables.comparison([regression(0.5), regression(None, protocol="bochner")]))
    assert "| boston | relu | — | — | — †1 | 1 |" in text
    assert "lower NLPD in 0 of 1 cells." in text


def test_comparison_needs_both_protocols():
    with pytest.raises(ValueError, match="no unit has rows under both protocols, bochner and paper"):
        tables.comparison([regression(0.5), regression(0.5, fold=1, protocol="bochner")])


@pytest.mark.parametrize("function", [tables.summarise, tables.blocks, tables.latex, tables.comparison])
def test_no_rows_is_an_error(function):
    with pytest.raises(ValueError, match="There are no rows to report"):
        function([])


@pytest.mark.parametrize(
    "key", ["experiment", "posterior", "protocol", "set", "model", "fold", "folds", "seed", "rmse"]
)
def test_a_missing_key_is_named_with_its_row(key):
    broken = regression(0.5, fold=1)
    del broken[key]
    with pytest.raises(ValueError, match=f"Row 1 has no '{key}'"):
        markdown([regression(0.5), broken])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (regression(0.5), r"Row 1 repeats an earlier row: boston, relu, fold and seed \(0, 0\)"),
        (regression(0.5, experiment="mnist"), "Row 1: experiment must be one of uci-regression.*got 'mnist'"),
        (regression(0.5, status="lost"), "Row 1: status must be 'ok' or 'diverged', got 'lost'"),
    ],
)
def test_a_row_that_cannot_be_placed_is_an_error(row, message):
    with pytest.raises(ValueError, match=message):
        tables.summarise([regression(0.5), row])
