"""The estimators without arguments: the paper's ten folds, sets that were not looked at while choosing, and what a fit costs.

    BOCHNER_DATA=folder python benchmarks/default.py folds [--sets boston ...] [--folds 0 1 ...] [--seeds 0 1 2]
    BOCHNER_DATA=folder python benchmarks/default.py folds --models wide one-length ...     # variants: what the parts are worth
    python benchmarks/default.py unseen
    python benchmarks/default.py cost [--rows 500 5000 50000 500000]
    BOCHNER_DATA=folder python benchmarks/default.py boston
    python benchmarks/default.py report

Rows go to results/default (--out); a row that is there is not made again. Targets are standardised by the training rows.
"""

import argparse
import contextlib
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from rich.progress import track
from sklearn.datasets import load_diabetes, make_friedman1, make_friedman2, make_friedman3
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import Matern as MaternKernel
from sklearn.gaussian_process.kernels import WhiteKernel
from sklearn.linear_model import BayesianRidge
from sklearn.model_selection import KFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from bochner import estimator_base
from bochner.datasets import folds, load
from bochner.estimators import StationaryClassifier, StationaryRegressor
from bochner.evaluation import class_metrics, regression_metrics
from bochner.experiments.rows import Row, add_rows, provenance, read_rows
from bochner.likelihoods import Gaussian
from bochner.posteriors.closed_form import tune_marginal
from bochner.posteriors.gp import GaussianProcess
from bochner.spectra import RBF, Matern

REGRESSION = ("boston", "concrete", "airfoil", "elevators")
CLASSES = ("diabetes", "adult", "connect-4")
KERNELS = {"matern32": Matern(1.5), "matern52": Matern(2.5), "rbf": RBF()}
VARIANTS: dict[str, tuple[Row, Row]] = {  # parameters and constants that differ from the default
    "bochner": ({}, {}),
    "wide": ({"hidden": ()}, {}),
    "wide-matern32": ({"hidden": (), "kernel": "matern32"}, {}),
    "wide-tuned-at-500": ({"hidden": ()}, {"TUNING_WIDTH": 500}),
    "rbf": ({"kernel": "rbf"}, {}),
    "one-length": ({}, {"LENGTHS": (1,)}),
    "one-network": ({"networks": 1}, {}),
    "no-intervals": ({}, {"INTERVALS": 0}),
}
GP_STEPS, REPEATS, FAR, DIRECTIONS = 100, 7, 100.0, 200
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

Split = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def far_rows(x: np.ndarray) -> np.ndarray:
    """Rows a hundred standard deviations from the mean in random directions."""
    z = np.random.default_rng(0).standard_normal((DIRECTIONS, x.shape[1]))
    scale = x.std(0)
    return x.mean(0) + FAR * z / np.linalg.norm(z, axis=1, keepdims=True) * np.where(scale > 0, scale, 1.0)


def shares(estimator: Any) -> Row:
    """What wide and trained networks count for, and how many networks there are."""
    wide = sum(m.weight for m in estimator.members_ if isinstance(m.model.extractor, torch.nn.Identity))
    return {"wide_weight": wide, "networks": len(estimator.members_)}


def fit(kind: Any, split: Split, seed: int, variant: str) -> Any:
    """The default, or a variant of it."""
    parameters, constants = VARIANTS[variant]
    with contextlib.ExitStack() as changed:
        for name, value in constants.items():
            changed.enter_context(mock.patch.object(estimator_base, name, value))
        return kind(random_state=seed, **parameters).fit(split[0], split[1])


def regressor(split: Split, seed: int, variant: str = "bochner") -> Row:
    x, _, new, truth = split
    model = fit(StationaryRegressor, split, seed, variant)
    _, std = model.predict(far_rows(x), return_std=True)
    ratio = std / model.prior_std_
    far = {"far_mean": float(ratio.mean()), "far_low": float(np.quantile(ratio, 0.05))}
    return regression_metrics(truth, *model.predict(new, return_std=True)) | far | shares(model)


def classifier(split: Split, seed: int, variant: str = "bochner") -> Row:
    x, _, new, truth = split
    model = fit(StationaryClassifier, split, seed, variant)
    away = np.abs(model.predict_proba(far_rows(x)) - 1 / len(model.classes_)).max(1)
    far = {"far_mean": float(away.mean()), "far_high": float(np.quantile(away, 0.95))}
    return class_metrics(truth, model.predict_proba(new)) | far | shares(model)


def process(name: str) -> Callable[[Split, int], Row]:
    """An exact Gaussian process with a lengthscale for each column, by type-II maximum likelihood."""

    def run(split: Split, seed: int) -> Row:  # noqa: ARG001
        mean, scale = split[0].mean(0), split[0].std(0)
        x, new = (
            torch.from_numpy((v - mean) / np.where(scale > 0, scale, 1.0)).to(DEVICE) for v in (split[0], split[2])
        )
        start = torch.full((x.shape[1],), float(np.sqrt(x.shape[1])), dtype=torch.float64)
        options: Any = {"lengthscale": start, "noise": 0.3, "steps": GP_STEPS, "lr": 0.1}
        gp = GaussianProcess(KERNELS[name], x, torch.from_numpy(split[1])[:, None].to(DEVICE), **options)
        found = gp.predict(new)
        return regression_metrics(split[3], found.mean[:, 0].cpu().numpy(), found.std[:, 0].cpu().numpy())

    return run


def standardised(x: np.ndarray, y: np.ndarray, train: np.ndarray, test: np.ndarray) -> Split:
    if y.dtype.kind != "f":
        return x[train], y[train], x[test], y[test]
    mean, scale = y[train].mean(), y[train].std()
    return x[train], (y[train] - mean) / scale, x[test], (y[test] - mean) / scale


def timed(split: Split, seed: int, model: Callable[[Split, int], Row]) -> Row:
    start = time.perf_counter()
    found = model(split, seed)
    return found | {"seconds": time.perf_counter() - start, "threads": torch.get_num_threads()}


def run_folds(options: argparse.Namespace) -> None:
    path = options.out / "folds.jsonl"
    done = {key(row) for row in read_rows(path)}
    for name in options.sets:
        data = load(name)
        own = classifier if data.y.dtype.kind != "f" else regressor
        models = {variant: partial(own, variant=variant) for variant in VARIANTS}
        if own is regressor:
            models |= {f"gp-{kernel}": process(kernel) for kernel in KERNELS}
        wanted = [
            (model, fold, seed)
            for model in models
            for seed in ([0] if model.startswith("gp-") else options.seeds)
            for fold in options.folds
            if model in options.models and (name, model, fold, seed) not in done
        ]
        for model, fold, seed in track(wanted, description=name, disable=not sys.stderr.isatty()):
            split = standardised(data.x, data.y, *folds(len(data.x))[fold])
            found = timed(split, seed, models[model])
            head = {"set": name, "model": model, "fold": fold, "seed": seed, "rows": len(split[0])}
            add_rows(path, [head | found | provenance(DEVICE)], key)
            print(name, model, fold, seed, {k: round(v, 3) for k, v in found.items()}, flush=True)


def key(row: Row) -> tuple[Any, ...]:
    return row["set"], row["model"], row["fold"], row["seed"]


# ---------------------------------------------------------------------- sets that were not looked at


def gaussian(estimator: Any) -> Callable[[Split, int], Row]:
    """A scikit-learn estimator that gives a standard deviation."""

    def run(split: Split, seed: int) -> Row:  # noqa: ARG001
        model = make_pipeline(StandardScaler(), estimator).fit(split[0], split[1])
        return regression_metrics(split[3], *model.predict(split[2], return_std=True))

    return run


def boosting(split: Split, seed: int) -> Row:
    """Gradient boosting, with the residuals of a tenth of the rows for a standard deviation."""
    x, y, new, truth = split
    order = np.random.default_rng(seed).permutation(len(x))
    held, learn = order[: len(x) // 10], order[len(x) // 10 :]
    first = HistGradientBoostingRegressor(random_state=seed).fit(x[learn], y[learn])
    std = float(np.sqrt(np.mean((y[held] - first.predict(x[held])) ** 2)))
    mean = HistGradientBoostingRegressor(random_state=seed).fit(x, y).predict(new)
    return regression_metrics(truth, mean, np.full(len(mean), std))


def unseen() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """scikit-learn's diabetes, and three generated sets."""
    made = {
        "friedman1": make_friedman1(1000, noise=1.0, random_state=0),
        "friedman2": make_friedman2(1000, noise=100.0, random_state=0),
        "friedman3": make_friedman3(1000, noise=0.1, random_state=0),
    }
    progression: Any = load_diabetes(return_X_y=True)
    return {"diabetes-progression": progression, **made}


def peers(columns: int) -> dict[str, Callable[[Split, int], Row]]:
    """The default and scikit-learn's estimators; its process with one lengthscale, from three starts, and with one a column."""

    def gp(lengthscale: Any, restarts: int) -> Callable[[Split, int], Row]:
        kernel = 1.0 * MaternKernel(lengthscale, nu=1.5) + WhiteKernel(0.1)
        return gaussian(GaussianProcessRegressor(kernel, normalize_y=True, n_restarts_optimizer=restarts))

    return {
        "bochner": regressor,
        "GaussianProcessRegressor": gp(1.0, 2),
        "GaussianProcessRegressor-ARD": gp(np.ones(columns), 0),
        "BayesianRidge": gaussian(BayesianRidge()),
        "HistGradientBoosting": boosting,
    }


def run_unseen(options: argparse.Namespace) -> None:
    path = options.out / "unseen.jsonl"
    done = {key(row) for row in read_rows(path)}
    for name, (x, y) in unseen().items():
        models = peers(x.shape[1])
        for fold, (train, test) in enumerate(KFold(10, shuffle=True, random_state=0).split(x)):
            for model, run in models.items():
                if (name, model, fold, 0) in done or fold not in options.folds or name not in (options.sets or [name]):
                    continue
                split = standardised(x, y, train, test)
                found = timed(split, 0, run)
                head = {"set": name, "model": model, "fold": fold, "seed": 0, "rows": len(train)}
                add_rows(path, [head | found | provenance(DEVICE)], key)
                print(name, model, fold, {k: round(v, 3) for k, v in found.items()}, flush=True)


# ---------------------------------------------------------------------- what a fit costs


def peak() -> int:
    """Most memory that this process has held, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_cost(options: argparse.Namespace) -> None:
    """Each size in a process of its own, so that its peak is its own."""
    if len(options.rows) > 1:
        for rows in options.rows:
            command = [sys.executable, __file__, "cost", "--rows", str(rows), "--out", str(options.out)]
            subprocess.run(command, check=True)
        return
    (rows,) = options.rows
    x, y = make_friedman1(rows, n_features=10, noise=1.0, random_state=0)
    before = peak()
    found = timed((x, y, x[:1000], y[:1000]), 0, regressor)
    found = {name: found[name] for name in ("seconds", "threads", "rmse", "networks", "wide_weight")}
    row = {"set": "friedman1", "rows": rows, "bytes": peak(), "bytes_before": before, **found, **provenance(DEVICE)}
    add_rows(options.out / "cost.jsonl", [row], lambda r: (r["set"], r["rows"]))
    print(row, flush=True)


def run_boston(options: argparse.Namespace) -> None:
    """On boston's first fold: our tuning of a wide network, GPyTorch's of an exact GP, as many steps each; and whole fits."""
    data = load("boston")
    split = standardised(data.x, data.y, *folds(len(data.x))[0])
    x = torch.from_numpy((split[0] - split[0].mean(0)) / split[0].std(0))
    y, start = torch.from_numpy(split[1])[:, None], torch.full((x.shape[1],), float(np.sqrt(x.shape[1]))).double()
    wide = StationaryRegressor(random_state=0, hidden=(), device="cpu")

    def tune() -> None:
        layer: Any = {"kernel": "matern32", "lengthscale": start, "width": 1000}
        model = wide._network(x.shape[1], 1, Gaussian(0.3), 0, None, **layer).float()
        tune_marginal(model, x.float(), y.float(), steps=GP_STEPS, lr=0.1)

    runs = {
        "bochner_tuning": tune,
        "gpytorch_tuning": lambda: GaussianProcess(
            Matern(1.5), x, y, lengthscale=start, noise=0.3, steps=GP_STEPS, lr=0.1
        ),
        "gpytorch_own_matern": lambda: own_kernel(x, y, GP_STEPS),
        "bochner_fit_wide": lambda: wide.fit(split[0], split[1]),
        "bochner_fit": lambda: StationaryRegressor(random_state=0, device="cpu").fit(split[0], split[1]),
    }
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(REPEATS + 1):  # in turn, so that a slow minute hits all; the first warms up
        for name, run in runs.items():
            if "fit" not in name or len(taken[name]) < 2:
                began = time.perf_counter()
                run()
                taken[name].append(time.perf_counter() - began)
    found = {name: float(np.median(own[1:])) for name, own in taken.items()}
    row = {"set": "boston", "steps": GP_STEPS, "repeats": REPEATS, "threads": torch.get_num_threads()} | found
    add_rows(options.out / "boston.jsonl", [row | provenance("cpu")], lambda r: (r["set"],))
    print(row)


def own_kernel(x: torch.Tensor, y: torch.Tensor, steps: int) -> None:
    """GPyTorch's exact GP with GPyTorch's own Matérn, in float64."""
    import gpytorch

    class Exact(gpytorch.models.ExactGP):
        def __init__(self, likelihood: Any) -> None:
            super().__init__(x, y[:, 0], likelihood)
            self.mean = gpytorch.means.ZeroMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(1.5, ard_num_dims=x.shape[1]))

        def forward(self, rows: torch.Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(rows), self.kernel(rows))  # pyright: ignore

    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    model = Exact(likelihood).double().train()
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        (-objective(model(x), y[:, 0])).backward()  # pyright: ignore
        optimizer.step()


# ---------------------------------------------------------------------- the report


def cell(values: list[float]) -> str:
    return f"{np.mean(values):.3f} ± {np.std(values):.3f}"


def table(rows: list[Row], columns: tuple[str, ...]) -> list[str]:
    """A line for each set and model: mean ± standard deviation over folds (and seeds) of each column."""
    lines = [f"| set | model | fits | {' | '.join(columns)} |", "|---" * (len(columns) + 3) + "|"]
    for name in dict.fromkeys(row["set"] for row in rows):
        for model in dict.fromkeys(row["model"] for row in rows if row["set"] == name):
            own = [row for row in rows if (row["set"], row["model"]) == (name, model)]
            cells = [cell([r[c] for r in own]) if all(c in r for r in own) else "" for c in columns]
            lines.append(f"| {name} | {model} | {len(own)} | {' | '.join(cells)} |")
    return lines


def less(rows: list[Row], model: str, other: str) -> np.ndarray:
    """NLPD of a model less that of another in each fold that both have, seeds averaged."""
    found = [
        [[r["nlpd"] for r in rows if (r["model"], r["fold"]) == (m, f)] for f in range(10)] for m in (model, other)
    ]
    return np.array([np.mean(own) - np.mean(peer) for own, peer in zip(*found, strict=True) if own and peer])


def error(values: np.ndarray) -> str:
    return f"{values.mean():+.3f} ± {values.std(ddof=1) / len(values) ** 0.5:.3f}"


def paired(rows: list[Row]) -> list[str]:
    """The default's NLPD less that of the best process; ± is the standard error."""
    lines = ["| set | process | folds | difference of NLPD | folds where it is better |", "|---|---|---|---|---|"]
    for name in dict.fromkeys(row["set"] for row in rows):
        own = [row for row in rows if row["set"] == name]
        processes = {row["model"] for row in own if row["model"].startswith("gp-")}
        best = min(processes, key=lambda m: np.mean([row["nlpd"] for row in own if row["model"] == m]))
        change = less(own, "bochner", best)
        lines.append(f"| {name} | {best} | {len(change)} | {error(change)} | {(change < 0).sum()} |")
    return lines


def worth(rows: list[Row]) -> list[str]:
    """NLPD of each variant less that of the default, seed 0; ± is the standard error."""
    sets = [name for name in (*REGRESSION, *CLASSES) if any((r["set"], r["model"]) == (name, "wide") for r in rows)]
    lines = [f"| variant | {' | '.join(sets)} |", "|---" * (len(sets) + 1) + "|"]
    for variant in [name for name in VARIANTS if name != "bochner"]:
        own = [less([r for r in rows if r["set"] == name and r["seed"] == 0], variant, "bochner") for name in sets]
        lines.append(f"| {variant} | {' | '.join(error(change) if len(change) else '' for change in own)} |")
    return lines


def run_report(options: argparse.Namespace) -> None:
    """Writes every table to default.md beside the rows."""
    found = read_rows(options.out / "folds.jsonl")
    lines = [
        "# The default in numbers",
        "",
        "Made by `python benchmarks/default.py report`. ± is the standard deviation.",
    ]
    parts = (
        ("Regression", REGRESSION, ("nlpd", "rmse", "coverage_90", "far_mean", "far_low", "wide_weight", "seconds")),
        ("Classes", CLASSES, ("nlpd", "accuracy", "ece", "far_mean", "far_high", "wide_weight", "seconds")),
    )
    for title, names, columns in parts:
        if own := [row for row in found if row["set"] in names]:
            lines += ["", f"## {title}, ten folds", "", *table(own, columns)]
    lines += ["", "## The default against the exact process", "", *paired([r for r in found if r["set"] in REGRESSION])]
    lines += ["", "## What the parts are worth: NLPD of variants less that of the default, seed 0", "", *worth(found)]
    if rows := read_rows(options.out / "unseen.jsonl"):
        lines += ["", "## Sets that were not looked at", "", *table(rows, ("nlpd", "rmse", "coverage_90", "seconds"))]
    if rows := read_rows(options.out / "cost.jsonl"):
        lines += ["", "## Cost", "", "| rows | seconds | peak memory, GiB | networks |", "|---|---|---|---|"]
        lines += [f"| {r['rows']:,} | {r['seconds']:.1f} | {r['bytes'] / 2**30:.2f} | {r['networks']} |" for r in rows]
    for r in read_rows(options.out / "boston.jsonl"):
        lines += ["", f"## Boston, {r['steps']} steps", "", "| what | seconds |", "|---|---|"]
        names = [name for name in r if name.startswith(("bochner_", "gpytorch_"))]
        lines += [f"| {name.replace('_', ' ')} | {r[name]:.2f} |" for name in names]
    (options.out / "default.md").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    runs = {"folds": run_folds, "unseen": run_unseen, "cost": run_cost, "boston": run_boston, "report": run_report}
    parser.add_argument("what", choices=runs)
    parser.add_argument("--sets", nargs="*", default=None)
    parser.add_argument("--folds", nargs="*", type=int, default=list(range(10)))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    processes = [f"gp-{kernel}" for kernel in KERNELS]
    parser.add_argument("--models", nargs="*", choices=[*VARIANTS, *processes], default=["bochner", *processes])
    parser.add_argument("--rows", nargs="*", type=int, default=[500, 5_000, 50_000, 500_000])
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "default")
    options = parser.parse_args()
    options.sets = options.sets or ([*REGRESSION, *CLASSES] if options.what == "folds" else None)
    options.out.mkdir(parents=True, exist_ok=True)
    runs[options.what](options)


if __name__ == "__main__":
    main()
