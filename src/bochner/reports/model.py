"""The sections of a report on one fitted estimator: its data, how well it predicts, how sure it is, and what it is made of."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sklearn.utils.validation import check_is_fitted

from bochner import metrics
from bochner.estimators import StationaryClassifier, StationaryRegressor
from bochner.estimators.members import Member, describe
from bochner.estimators.targets import TargetMap
from bochner.evaluation import class_metrics, mixture_metrics, regression_metrics
from bochner.reports.page import Section, Table
from bochner.spectra import Spectrum

Arrays = tuple[Any, np.ndarray]  # rows (n, d), an array or a DataFrame, and targets (n,)

SHOWN = 30  # columns or classes in a table
POINTS = 300  # rows in a figure
SHUFFLED = 300  # rows whose columns are shuffled to see which matters
CURVES = 8  # classes in a figure
BINS = 10  # of confidence
LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
MOVED = 5.0  # standard deviations
SEED = 0  # of the directions and of the orders in which columns are shuffled
BLUE, RED, GREY = "#4472b5", "#d3434e", "#8a8f98"


def _g(value: float) -> str:
    return f"{value:.4g}".replace("-", "−")


def _percent(share: float) -> str:
    return f"{100 * share:.1f}\N{NO-BREAK SPACE}%"


def _short(name: Any, size: int = 50) -> str:
    """A name in a figure: cut where it is long, and with no dollar read as mathematics."""
    text = str(name)
    return (text if len(text) <= size else f"{text[: size - 1]}…").replace("$", r"\$")


def _first(what: str, count: int) -> str:
    return f" The first {SHOWN} of {count} {what} are shown." if count > SHOWN else ""


def _panel(width: float = 5.8, height: float = 3.5) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, _plain(figure.subplots())


def _plain(axes: Axes) -> Axes:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    return axes


def _legend(figure: Figure) -> None:
    """Above the axes, where no curve can be."""
    figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=8)


# ---------------------------------------------------------------------- data


def _numeric(X: Any, column: int) -> np.ndarray | None:
    """A column of numbers; None for one of categories."""
    values = X.iloc[:, column] if isinstance(X, pd.DataFrame) else X[:, column]
    return np.asarray(values) if pd.api.types.is_numeric_dtype(values.dtype) else None


def _with_column(X: Any, column: int, values: np.ndarray) -> Any:
    """Rows with other values in a column."""
    changed = X.copy()
    if isinstance(changed, pd.DataFrame):
        return changed.assign(**{changed.columns[column]: values})
    changed[:, column] = values
    return changed


def _data(train: Any, test: Any, columns: list[str]) -> Section:
    table: Table = [["column", "min", "median", "max", "std"]]
    for number, name in enumerate(columns[:SHOWN]):
        values = _numeric(train, number)
        if values is None:
            table.append([name, f"{train.iloc[:, number].nunique()} categories", "", "", ""])
        else:
            table.append([name, *(_g(float(f(values))) for f in (np.nanmin, np.nanmedian, np.nanmax, np.nanstd))])
    text = f"{len(train):,} rows to learn from, {len(test):,} held out, {len(columns):,} columns. The table is of the former."
    return Section("Data", text + _first("columns", len(columns)), table)


def _target(estimator: Any, train: np.ndarray, test: np.ndarray, target: str) -> Section:
    if isinstance(estimator, StationaryRegressor):
        parts = {"learned from": train, "held out": test}
        table: Table = [["rows", "min", "median", "max", "mean", "std"]]
        for name, values in parts.items():
            table.append([name, *(_g(float(f(values))) for f in (np.min, np.median, np.max, np.mean, np.std))])
        return Section("Target", f"{target}, a number.", table)
    table = [["class", "learned from", "share", "held out", "share"]]
    for label in estimator.classes_[:SHOWN]:
        own = (train == label, test == label)
        table.append([str(label), *(text for part in own for text in (f"{part.sum():,}", _percent(part.mean())))])
    count = len(estimator.classes_)
    return Section("Target", f"{target}, one of {count} classes." + _first("classes", count), table)


# ---------------------------------------------------------------------- regression


def _regression_row(found: dict[str, float]) -> list[str]:
    r2 = f"{found['r2']:.3f}".replace("-", "−") if "r2" in found else "—"
    return [_g(found["rmse"]), _g(found["nlpd"]), r2, _percent(found["coverage_90"]), _g(found["width_90"])]


def _regression_metrics(estimator: StationaryRegressor, test: Arrays, train: np.ndarray) -> Section:
    X, y = test
    ours = mixture_metrics(y, estimator.predict(X), estimator.log_prob(X, y), estimator.predict_interval(X, 0.9))
    known = regression_metrics(y, np.full(len(y), train.mean()), np.full(len(y), train.std()))
    table = [
        ["", "RMSE", "NLPD", "R²", "90 % interval covers", "its mean width"],
        ["this model", *_regression_row(ours)],
        ["mean of the training rows", *_regression_row(known)],
    ]
    text = (
        "On the held-out rows, in units of the target. RMSE and NLPD (negative log predictive density): lower is better; R²: "
        "higher. The second line predicts every row with the mean and the standard deviation of the targets learned from."
    )
    return Section("Held-out rows", text, table)


def _interval_calibration(estimator: StationaryRegressor, test: Arrays) -> Section:
    """Observed coverage of central intervals, those of ``predict_interval``."""
    X, y = test
    half = np.array(LEVELS) / 2
    ends = estimator.predict_quantiles(X, np.concatenate([0.5 - half, 0.5 + half])).reshape(len(y), 2, len(LEVELS))
    observed = [metrics.coverage(y, ends[:, 0, k], ends[:, 1, k]) for k in range(len(LEVELS))]
    figure, axes = _panel(height=4.2)
    axes.plot([0, 1], [0, 1], "--", color=GREY, linewidth=1, label="perfect")
    axes.plot(LEVELS, observed, "o-", color=BLUE, markersize=4, label="this model")
    axes.set(xlabel="nominal coverage", ylabel="observed coverage", xlim=(0, 1), ylim=(0, 1.02))
    axes.legend(frameon=False)
    table = [
        ["nominal", "observed"],
        *([_percent(level), _percent(share)] for level, share in zip(LEVELS, observed, strict=True)),
    ]
    text = "How often the central interval of a nominal coverage holds the target. Above the line: too unsure; below: too sure."
    return Section("Calibration", text, table, (figure,), ("Observed against nominal coverage of central intervals.",))


def _sorted_figure(estimator: StationaryRegressor, test: Arrays, target: str) -> Figure:
    X, y = test
    mean = estimator.predict(X)
    order = np.argsort(mean, kind="stable")
    order = order[np.linspace(0, len(order) - 1, min(len(order), POINTS)).astype(int)]
    figure, axes = _panel()
    place = np.arange(len(order))
    lower, upper = estimator.predict_interval(X, 0.9)[order].T
    axes.fill_between(place, lower, upper, color=BLUE, alpha=0.25, linewidth=0, label="90 % band")
    axes.plot(place, mean[order], color=BLUE, linewidth=1.2, label="prediction")
    axes.plot(place, y[order], ".", color="#22252a", markersize=3.5, label="observed")
    axes.set_xlabel("held-out rows, sorted by prediction")
    axes.set_ylabel(_short(target))
    _legend(figure)
    return figure


# ---------------------------------------------------------------------- classification


def _class_row(y: np.ndarray, p: np.ndarray) -> list[str]:
    found = class_metrics(y, p)
    cells = [f"{found['accuracy']:.3f}", _g(found["nlpd"]), f"{found['ece']:.3f}"]
    if p.shape[1] == 2:
        cells.append(f"{found['auc']:.3f}" if "auc" in found else "—")
    return cells


def _class_metrics(y: np.ndarray, p: np.ndarray, shares: np.ndarray, left_out: int) -> Section:
    two = p.shape[1] == 2
    table = [
        ["", "accuracy", "NLPD", "ECE", *(["AUC"] if two else [])],
        ["this model", *_class_row(y, p)],
        ["class shares of the training rows", *_class_row(y, np.tile(shares, (len(y), 1)))],
    ]
    text = (
        f"On the held-out rows. Accuracy{' and AUC' * two}: higher is better; NLPD (negative log predictive probability) and ECE "
        "(expected calibration error): lower. The second line gives every row the class shares of the rows learned from."
    )
    if left_out:
        text += f" {left_out:,} held-out rows of classes that were not learned are left out, here and below."
    return Section("Held-out rows", text, table)


def _reliability(y: np.ndarray, p: np.ndarray) -> Section:
    """Accuracy against confidence in bins of equal width, those of ``metrics.ece``."""
    confidence, right = p.max(1), p.argmax(1) == y
    index = np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)
    table: Table = [["confidence", "rows", "mean confidence", "accuracy"]]
    points = []
    for number in np.unique(index):
        own = index == number
        points.append((confidence[own].mean(), right[own].mean(), own.mean()))
        limits = f"{100 * number / BINS:.0f} to {100 * (number + 1) / BINS:.0f} %"
        table.append([limits, f"{own.sum():,}", *(_percent(value) for value in points[-1][:2])])
    x, height, share = np.array(points).T
    figure, axes = _panel(height=4.2)
    axes.plot([0, 1], [0, 1], "--", color=GREY, linewidth=1, label="perfect")
    axes.plot(x, height, "-", color=BLUE, linewidth=1)
    axes.scatter(x, height, s=20 + 300 * share, color=BLUE, label="this model")
    axes.set(xlabel="mean confidence", ylabel="accuracy", xlim=(0, 1.04), ylim=(0, 1.04))
    axes.legend(frameon=False, markerscale=0.6, loc="upper left")
    text = "How often the most probable class is right, against its probability. Below the line: too sure."
    return Section("Calibration", text, table, (figure,), ("Reliability diagram; larger dots stand for more rows.",))


# ---------------------------------------------------------------------- away from the data


def _answers(estimator: Any, X: Any) -> np.ndarray:
    """What the estimator says of each row: means, (n,), or class probabilities, (n, c)."""
    return estimator.predict(X) if isinstance(estimator, StationaryRegressor) else estimator.predict_proba(X)


def _varying(X: Any) -> list[int]:
    """Columns of numbers that are not constant."""
    columns = [(number, _numeric(X, number)) for number in range(X.shape[1])]
    return [number for number, own in columns if own is not None and np.nanmax(own) > np.nanmin(own)]


def _most_used(estimator: Any, train: Any, test: Any) -> int:
    """The column whose values, shuffled among the test rows, change the predictions most; of the numbers that vary in training.

    The change is the mean absolute one, of the prediction or of the class probabilities.
    """
    rng = np.random.default_rng(SEED)
    rows = test[:SHUFFLED]
    before, changes = _answers(estimator, rows), np.full(train.shape[1], -1.0)
    for column in _varying(train):
        values: Any = _numeric(rows, column)
        shuffled = _with_column(rows, column, rng.permutation(values))
        changes[column] = np.abs(_answers(estimator, shuffled) - before).mean()
    return int(np.argmax(changes))


def _slice(X: Any, column: int) -> tuple[Any, np.ndarray, float, float]:
    """Rows along a column from 1.5 ranges below its range to 1.5 above, the others at their median; its values; its range."""
    own: Any = _numeric(X, column)
    low, high = float(np.nanmin(own)), float(np.nanmax(own))
    span = high - low or 1.0
    grid = np.linspace(low - 1.5 * span, high + 1.5 * span, POINTS)
    if isinstance(X, pd.DataFrame):  # categories are at the most frequent one
        numbers = X.median(numeric_only=True)
        middle = {name: numbers[name] if name in numbers else v.mode(dropna=False)[0] for name, v in X.items()}
        rows: Any = pd.DataFrame({name: [value] * POINTS for name, value in middle.items()})
    else:
        rows = np.tile(np.nanmedian(X, axis=0), (POINTS, 1))
    return _with_column(rows, column, grid), grid, low, high


def _slice_figure(estimator: Any, train: Arrays, test: Any, columns: list[str], target: str) -> tuple[Figure, str]:
    """The prediction along one column, inside its training range and outside, and a caption."""
    column = _most_used(estimator, train[0], test)
    rows, grid, low, high = _slice(train[0], column)
    figure, axes = _panel()
    axes.axvspan(low, high, color=GREY, alpha=0.15, linewidth=0, label="training range")
    if isinstance(estimator, StationaryRegressor):
        lower, upper = estimator.predict_interval(rows, 0.9).T
        axes.fill_between(grid, lower, upper, color=BLUE, alpha=0.25, linewidth=0, label="90 % band")
        axes.plot(grid, estimator.predict(rows), color=BLUE, label="prediction")
        if len(columns) == 1:
            shown_rows = _numeric(train[0], 0)[:POINTS]  # pyright: ignore[reportOptionalSubscript]
            axes.plot(shown_rows, train[1][:POINTS], ".", color="#22252a", markersize=3.5, label="training rows")
        axes.set_ylabel(_short(target))
        shown = "the prediction with its 90 % band"
    else:
        p = estimator.predict_proba(rows)
        chosen = np.sort(np.argsort(-p.max(0), kind="stable")[:CURVES])
        for index in chosen:
            axes.plot(grid, p[:, index], label=_short(estimator.classes_[index], 16))
        axes.axhline(1 / p.shape[1], color=GREY, linestyle=":", linewidth=1, label="prior")
        axes.set(ylim=(0, 1.02), ylabel="probability")
        shown = "class probabilities" + (f" (the {CURVES} largest)" if p.shape[1] > CURVES else "")
    axes.set_xlabel(_short(columns[column]))
    _legend(figure)
    rest = " Other columns are at their median." if len(columns) > 1 else ""
    if len(columns) > 1:
        rest += " It is the column whose values, shuffled among the held-out rows, change the predictions most."
    caption = f"Along {columns[column]}: {shown}, inside the training range (shaded) and 1.5 ranges beyond.{rest}"
    return figure, caption


def _predictions(estimator: Any, train: Arrays, test: Arrays, columns: list[str], target: str) -> Section:
    figures: list[tuple[Figure, str]] = []
    if _varying(train[0]):
        figures.append(_slice_figure(estimator, train, test[0], columns, target))
    text = "Away from the data the model goes back to its prior, {}."
    if not isinstance(estimator, StationaryRegressor):
        text = text.format("under which all classes are equally probable")
        return Section("Predictions", text, None, *(tuple(part) for part in zip(*figures, strict=True)))
    first = f"Held-out rows in the order of their prediction, at most {POINTS}, with 90 % bands."
    figures.insert(0, (_sorted_figure(estimator, test, target), first))
    drawn, captions = zip(*figures, strict=True)
    return Section("Predictions", text.format("so that its band widens"), None, drawn, captions)


def _moved(train: Any, test: Any) -> Any:
    """Rows, each some standard deviations of the training columns off in a random direction; categories stay."""
    numbers = [number for number in range(train.shape[1]) if _numeric(train, number) is not None]
    direction = np.random.default_rng(SEED).standard_normal((len(test), len(numbers)))
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    for place, number in enumerate(numbers):
        step = MOVED * direction[:, place] * np.nanstd(_numeric(train, number))  # pyright: ignore[reportArgumentType, reportCallIssue]
        test = _with_column(test, number, _numeric(test, number) + step)
    return test


def _unlike(estimator: Any, train: Any, test: Any) -> Section:
    """Scores of the held-out rows and of the same rows moved away."""
    rows = {"held out": test, "moved away": _moved(train, test)}
    scores, threshold = {name: estimator.ood_score(own) for name, own in rows.items()}, estimator.ood_threshold_
    edges = np.linspace(0, 1, 41)
    figure, axes = _panel()
    table: Table = [["rows", "median score", "flagged"]]
    for (name, own), color in zip(scores.items(), (BLUE, RED), strict=True):
        table.append([name, _g(float(np.median(own))), _percent(np.mean(own > threshold))])
        share = np.full(len(own), 1 / len(own))
        axes.hist(own, bins=edges.tolist(), weights=share, color=color, alpha=0.5, label=name)
    axes.axvline(threshold, color="#22252a", linewidth=1, linestyle="--", label="threshold")
    axes.set(xlabel="ood_score", ylabel="share of rows")
    _legend(figure)
    text = (
        "The score says how strange a row is: 0.95 if one ordinary row in twenty looks as strange, 1 if none does. Rows above "
        f"{_g(threshold)} are flagged; of rows like the training data {_percent(estimator.false_alarm)} should be. "
        f"Moved away: the held-out rows, each {MOVED:g} standard deviations of the training columns off in a random direction."
    )
    return Section("Rows unlike the training data", text, table, (figure,), ("Scores of both kinds of rows.",))


# ---------------------------------------------------------------------- what it is made of


def _kernel_name(spectrum: Spectrum) -> str:
    nu = getattr(spectrum, "nu", None)
    return type(spectrum).__name__ if nu is None else f"{type(spectrum).__name__}, ν = {nu:g}"


def _lengthscale(member: Member) -> str:
    """The lengthscale that all inputs of a member share, or that they have one for each column."""
    own = member.head.features.lengthscale
    return _g(float(own[0])) if bool((own == own[0]).all()) else "one for each column"


def _target_map(own: TargetMap) -> str:
    return {"identity": "as it is", "log": "its logarithm"}.get(own.kind, f"Yeo–Johnson, λ = {own.power:.2f}")


def _model(estimator: Any) -> Section:
    """The members of the mixture, and the two numbers that say how sure a regression can be."""
    regression = isinstance(estimator, StationaryRegressor)
    members = estimator.mixtures_[0].members
    table: Table = [["stands on", "kernel", "lengthscale", *(["target"] if regression else []), "weight"]]
    for member in members:
        line = ["columns" if member.network is None else "networks", _kernel_name(member.head.features.spectrum)]
        target = [_target_map(member.map)] if regression else []
        table.append([*line, _lengthscale(member), *target, f"{member.weight:.2f}"])
    text = (
        f"The prediction is a mixture of heads with stationary priors: {describe(members)}, their share in brackets. Lengthscales "
        "are in standard deviations of the columns; on networks, in units of what these make of them."
    )
    if regression:
        text += (
            f" The prior standard deviation is {_g(estimator.prior_std_)}, that of the noise {_g(estimator.noise_)}, both in units "
            "of the target."
        )
    return Section("Model", text, table)


# ---------------------------------------------------------------------- all of it


def _check(estimator: Any, train: Arrays, test: Arrays, columns: list[str]) -> None:
    if not isinstance(estimator, StationaryRegressor | StationaryClassifier):
        kinds = "a StationaryRegressor or a StationaryClassifier"
        raise ValueError(f"The estimator parameter must be {kinds}, got {type(estimator).__name__} instead.")
    check_is_fitted(estimator)
    for name, (X, y) in (("train", train), ("test", test)):
        if X.ndim != 2 or X.shape[1] != len(columns) or y.shape != X.shape[:1] or not len(X):
            raise ValueError(
                f"The {name} parameter must hold rows of {len(columns)} columns, as named, and a target for each, "
                f"got shapes {X.shape} and {y.shape} instead."
            )


def model_sections(
    estimator: StationaryRegressor | StationaryClassifier,
    train: Arrays,
    test: Arrays,
    *,
    columns: list[str],
    target: str,
) -> list[Section]:
    """What there is to say about a fitted estimator, in tables and figures.

    Args:
        estimator: The estimator, fitted to ``train``.
        train: Rows, (n, d), and targets that it learned from.
        test: Held-out rows and targets.
        columns: Names of the d columns.
        target: Name of the target.

    Raises:
        ValueError: The estimator is of another kind, shapes do not fit, or no held-out row is of a class that was learned.
    """
    _check(estimator, train, test, columns)
    start = [_data(train[0], test[0], columns), _target(estimator, train[1], test[1], target)]
    if isinstance(estimator, StationaryRegressor):
        scores = [_regression_metrics(estimator, test, train[1]), _interval_calibration(estimator, test)]
    else:
        X, y = test
        known = np.isin(y, estimator.classes_)
        if not known.any():
            raise ValueError("The test parameter must hold rows of classes that were learned, got none.")
        test = X[known], y[known]
        labels = np.searchsorted(estimator.classes_, test[1])
        shares = np.array([np.mean(train[1] == label) for label in estimator.classes_])
        p = estimator.predict_proba(test[0])
        scores = [_class_metrics(labels, p, shares, int((~known).sum())), _reliability(labels, p)]
    away = [_predictions(estimator, train, test, columns, target), _unlike(estimator, train[0], test[0])]
    return [*start, *scores, *away, _model(estimator)]
