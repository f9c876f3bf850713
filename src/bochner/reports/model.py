"""The sections of a report on one fitted estimator: its data, how well it predicts, how sure it is, and the prior it has."""

import math
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sklearn.utils.validation import check_is_fitted

from bochner import metrics
from bochner.committee import describe
from bochner.estimators import StationaryClassifier, StationaryRegressor
from bochner.evaluation import class_metrics, regression_metrics
from bochner.layers import StationaryLayer
from bochner.predictive import central_interval
from bochner.reports.page import Section, Table

Arrays = tuple[np.ndarray, np.ndarray]  # rows (n, d) and targets (n,)

SHOWN = 30  # columns or classes in a table
POINTS = 300  # rows in a figure
CURVES = 8  # classes in a figure
BINS = 10  # of confidence
LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
MOVED = 5.0  # standard deviations
SEED = 0  # of the directions and of the draws from the prior
BLUE, RED, GREEN, GREY = "#4472b5", "#d3434e", "#2aab61", "#8a8f98"


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


def _data(train: np.ndarray, test: np.ndarray, columns: list[str]) -> Section:
    table: Table = [["column", "min", "median", "max", "std"]]
    for name, values in list(zip(columns, train.T, strict=True))[:SHOWN]:
        table.append([name, *(_g(float(f(values))) for f in (np.min, np.median, np.max, np.std))])
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


def _regression_row(y: np.ndarray, mean: np.ndarray, std: np.ndarray) -> list[str]:
    found = regression_metrics(y, mean, std)
    r2 = f"{found['r2']:.3f}".replace("-", "−") if "r2" in found else "—"
    return [_g(found["rmse"]), _g(found["nlpd"]), r2, _percent(found["coverage_90"]), _g(found["width_90"])]


def _regression_metrics(y: np.ndarray, mean: np.ndarray, std: np.ndarray, train: np.ndarray) -> Section:
    known = (np.full_like(mean, train.mean()), np.full_like(std, train.std()))
    table = [
        ["", "RMSE", "NLPD", "R²", "90 % interval covers", "its mean width"],
        ["this model", *_regression_row(y, mean, std)],
        ["mean of the training rows", *_regression_row(y, *known)],
    ]
    text = (
        "On the held-out rows, in units of the target. RMSE and NLPD (negative log predictive density): lower is better; R²: "
        "higher. The second line predicts every row with the mean and the standard deviation of the targets learned from."
    )
    return Section("Held-out rows", text, table)


def _interval_calibration(y: np.ndarray, mean: np.ndarray, std: np.ndarray) -> Section:
    """Observed coverage of central intervals; Gaussian ones, as ``predict_interval`` gives them."""
    observed = [metrics.coverage(y, *central_interval(mean, std, level)) for level in LEVELS]
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


def _sorted_figure(y: np.ndarray, mean: np.ndarray, std: np.ndarray, target: str) -> Figure:
    order = np.argsort(mean, kind="stable")
    order = order[np.linspace(0, len(order) - 1, min(len(order), POINTS)).astype(int)]
    figure, axes = _panel()
    place = np.arange(len(order))
    lower, upper = central_interval(mean[order], std[order], 0.9)
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


def _sharpest(estimator: Any, X: np.ndarray) -> int:
    """The column along which the prior varies fastest, of those that vary; the first under hidden layers."""
    varies = np.ptp(X, axis=0) > 0
    if not hasattr(estimator, "lengthscale_") or not varies.any():
        return int(np.argmax(varies))
    return int(np.argmin(np.where(varies, estimator.lengthscale_ / estimator.x_scale_, np.inf)))


def _slice(X: np.ndarray, column: int) -> tuple[np.ndarray, float, float]:
    """Rows along a column from 1.5 ranges below its range to 1.5 above, the others at their median; and the range itself."""
    low, high = float(X[:, column].min()), float(X[:, column].max())
    span = high - low or 1.0
    rows = np.tile(np.median(X, axis=0), (POINTS, 1))
    rows[:, column] = np.linspace(low - 1.5 * span, high + 1.5 * span, POINTS)
    return rows, low, high


def _slice_figure(estimator: Any, train: Arrays, columns: list[str], target: str) -> tuple[Figure, str]:
    """The prediction along one column, inside its training range and outside, and a caption."""
    column = _sharpest(estimator, train[0])
    rows, low, high = _slice(train[0], column)
    figure, axes = _panel()
    axes.axvspan(low, high, color=GREY, alpha=0.15, linewidth=0, label="training range")
    grid = rows[:, column]
    if isinstance(estimator, StationaryRegressor):
        mean, std = estimator.predict(rows, return_std=True)
        lower, upper = central_interval(mean, std, 0.9)
        axes.fill_between(grid, lower, upper, color=BLUE, alpha=0.25, linewidth=0, label="90 % band")
        axes.plot(grid, mean, color=BLUE, label="prediction")
        if len(columns) == 1:
            axes.plot(
                train[0][:POINTS, 0], train[1][:POINTS], ".", color="#22252a", markersize=3.5, label="training rows"
            )
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
    caption = f"Along {columns[column]}: {shown}, inside the training range (shaded) and 1.5 ranges beyond.{rest}"
    return figure, caption


def _predictions(estimator: Any, train: Arrays, columns: list[str], target: str, held: Figure | None) -> Section:
    figure, caption = _slice_figure(estimator, train, columns, target)
    text = "Away from the data the model goes back to its prior, {}; the wider the network, the closer."
    if held is None:
        text = text.format("under which all classes are equally probable")
        return Section("Predictions", text, None, (figure,), (caption,))
    first = f"Held-out rows in the order of their prediction, at most {POINTS}, with 90 % bands."
    return Section("Predictions", text.format("so that its band widens"), None, (held, figure), (first, caption))


def _unlike(estimator: Any, test: np.ndarray) -> Section:
    """Scores of the held-out rows and of the same rows moved away."""
    direction = np.random.default_rng(SEED).standard_normal(test.shape)
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    rows = {"held out": test, "moved away": test + MOVED * direction * estimator.x_scale_}
    scores, threshold = {name: estimator.ood_score(own) for name, own in rows.items()}, estimator.ood_threshold_
    low = max(min(own.min() for own in scores.values()), 1e-8)
    edges = np.geomspace(low, max(2 * low, 1.0), 41)
    figure, axes = _panel()
    table: Table = [["rows", "median score", "flagged"]]
    for (name, own), color in zip(scores.items(), (BLUE, RED), strict=True):
        table.append([name, _g(float(np.median(own))), _percent(np.mean(own > threshold))])
        share = np.full(len(own), 1 / len(own))
        axes.hist(own.clip(low), bins=edges.tolist(), weights=share, color=color, alpha=0.5, label=name)
    axes.axvline(threshold, color="#22252a", linewidth=1, linestyle="--", label="threshold")
    axes.set(xlabel="ood_score", ylabel="share of rows", xscale="log")
    _legend(figure)
    text = (
        f"The score is the share of the prior variance that the training rows leave: 0 among them, 1 far away. Rows above "
        f"{_g(threshold)} are flagged; of rows like the training data {_percent(estimator.false_alarm)} should be. "
        f"Moved away: the held-out rows, each {MOVED:g} standard deviations off in a random direction."
    )
    return Section("Rows unlike the training data", text, table, (figure,), ("Scores of both kinds of rows.",))


# ---------------------------------------------------------------------- the prior


def _prior_figure(estimator: Any) -> Figure:
    """The kernel against distance, and draws from the prior in one dimension; distances in lengthscales."""
    layer = estimator.model_.layer
    kernel, scale = layer.induced_kernel(), layer.lengthscale.detach()
    r = torch.linspace(0, 5, 201, dtype=torch.float64, device=scale.device)
    x = torch.zeros(len(r), layer.in_features, dtype=torch.float64, device=scale.device)
    x[:, 0] = r * scale.reshape(-1)[0]
    figure = Figure(figsize=(5.8, 5.4), layout="constrained")
    above, below = (_plain(axes) for axes in figure.subplots(2, 1))
    above.plot(r.cpu(), kernel(x[:1], x)[0].cpu(), color=BLUE)
    above.set(xlabel="distance, in lengthscales", ylabel="correlation", xlim=(0, 5))
    grid = torch.linspace(-5, 5, 401, dtype=torch.float64)[:, None]
    for number, color in enumerate((BLUE, RED, GREEN)):
        generator = torch.Generator().manual_seed(SEED + number)
        options: Any = {"kernel": layer.spectrum, "activation": layer.activation, "dtype": torch.float64}
        own = StationaryLayer(1, layer.out_features, frequencies="sobol", generator=generator, **options)
        weight = torch.randn(layer.out_features, generator=generator, dtype=torch.float64) / math.sqrt(
            layer.out_features
        )
        with torch.no_grad():
            below.plot(grid[:, 0], estimator.amplitude_ * (own(grid) @ weight), color=color, linewidth=1.2)
    below.set(xlabel="x, in lengthscales", ylabel="f(x)", xlim=(-5, 5))
    return figure


def _prior(estimator: Any, columns: list[str]) -> Section:
    layer, figure = estimator.model_.layer, _prior_figure(estimator)
    text = ""
    if len(estimator.members_) > 1:
        text = f"The prediction is a mixture of networks: {describe(estimator.members_)}, weights in brackets. Here is the first. "
    text += (
        f"Kernel {layer.spectrum}, activation {layer.activation.name}, width {layer.out_features:,}, prior standard deviation "
        f"of f: {_g(estimator.amplitude_)} (in standardised units). "
    )
    captions = ("Above the kernel, below three draws from the prior, in one dimension.",)
    if not hasattr(estimator, "lengthscale_"):
        layers = ", ".join(map(str, estimator.hidden))
        text += f"It stands on what the hidden layers ({layers}) make of the columns, so these have no lengthscales of their own."
        return Section("Prior", text, None, (figure,), captions)
    fitted = estimator.lengthscale_ / estimator.x_scale_
    table: Table = [["column", "start, in std", "fitted, in std", "fitted, in units"]]
    for name, relative, own in list(zip(columns, fitted, estimator.lengthscale_, strict=True))[:SHOWN]:
        table.append([name, _g(math.sqrt(len(columns))), _g(relative), _g(own)])
    text += (
        "A column matters more the shorter its lengthscale; a long one says that the target hardly changes along it."
    )
    return Section("Prior", text + _first("columns", len(columns)), table, (figure,), captions)


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
    X, y = test
    held: Figure | None = None
    if isinstance(estimator, StationaryRegressor):
        mean, std = estimator.predict(X, return_std=True)
        scores = [_regression_metrics(y, mean, std, train[1]), _interval_calibration(y, mean, std)]
        held = _sorted_figure(y, mean, std, target)
    else:
        known = np.isin(y, estimator.classes_)
        if not known.any():
            raise ValueError("The test parameter must hold rows of classes that were learned, got none.")
        X, labels = X[known], np.searchsorted(estimator.classes_, y[known])
        shares = np.array([np.mean(train[1] == label) for label in estimator.classes_])
        p = estimator.predict_proba(X)
        scores = [_class_metrics(labels, p, shares, int((~known).sum())), _reliability(labels, p)]
    away = [_predictions(estimator, train, columns, target, held), _unlike(estimator, X)]
    return [*start, *scores, *away, _prior(estimator, columns)]
