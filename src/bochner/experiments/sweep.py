"""Runs the units of a sweep through joblib and keeps their rows: what is there is skipped, what is new is added whole."""

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import joblib
import torch

from bochner.activations import unknown
from bochner.experiments.rows import add_rows, read_rows
from bochner.experiments.uci import Config, run_set
from bochner.experiments.zoo import MODELS, by_activation

Row = dict[str, Any]

ENGINES = ("local", "ray", "dask")
MODELS_PER_JOB = {"adult": 8, "connect-4": 8, "covtype": 1}  # on a GPU, where not all


def _key(row: Row) -> tuple[Any, ...]:
    return (*tuple(row[k] for k in ("protocol", "posterior", "set", "model", "fold", "seed")), tuple(row["folds"]))


def pending(config: Config, sets: Sequence[str], models: Sequence[str], have: Sequence[Row]) -> dict[str, list[str]]:
    """Models of each set that lack the row of some fold."""
    known = {_key(row) for row in have}

    def missing(name: str, model: str) -> bool:
        unit = {"protocol": config.protocol, "posterior": config.posterior, "set": name, "model": model}
        unit |= {"seed": config.seed, "folds": config.folds}
        return any(_key({**unit, "fold": fold}) not in known for fold in config.folds)

    left = {name: [m for m in models if missing(name, m)] for name in sets}
    return {name: todo for name, todo in left.items() if todo}


def units(config: Config, left: dict[str, list[str]]) -> list[tuple[str, list[str]]]:
    """Jobs: on a GPU models that train as one stack, as many as take minutes; one model at a time elsewhere.

    By KFAC that is a set with all its models, eight of a large one, one of covtype. SWAG under "paper" takes the models of one
    activation. The larger sets, which the tables have last, come first, so that several workers end together.
    """
    single = [(name, [model]) for name, models in left.items() for model in models]
    if not config.device.startswith("cuda") or (config.posterior, config.protocol) == ("swag", "bochner"):
        return single
    jobs: list[tuple[str, list[str]]] = []
    for name, models in reversed(left.items()):
        ordered, most = by_activation(models), MODELS_PER_JOB.get(name, len(MODELS))
        if config.posterior == "kfac":
            jobs += [(name, ordered[i : i + most]) for i in range(0, len(ordered), most)]
            continue
        groups = [list(some) for _, some in itertools.groupby(ordered, key=lambda model: MODELS[model][1])]
        parts = [some[i : i + most] for some in groups for i in range(0, len(some), most)]
        jobs += [(name, part) for part in sorted(parts, key=len)]
    return jobs


def _work(config: Config, name: str, models: list[str], threads: int, progress: bool, folder: str | None) -> list[Row]:
    """One job, in whatever process: with the same number of threads everywhere, sums come out the same everywhere."""
    torch.set_num_threads(threads)
    if folder is not None:
        os.environ["BOCHNER_DATA"] = folder
    return run_set(config, name, models, progress=progress)


def sweep(
    config: Config,
    sets: Sequence[str],
    models: Sequence[str],
    path: Path,
    *,
    engine: str = "local",
    workers: int = 1,
    progress: bool = False,
    report: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Makes the rows that are missing from ``path`` and returns all of them.

    Args:
        config: Settings of the sweep.
        sets: Names of data sets.
        models: Names of models.
        path: File of rows; replaced as a whole whenever a job is done.
        engine: Where jobs run: "local", or joblib's backends "ray" and "dask".
        workers: Jobs that run at a time.
        progress: Whether training shows a progress bar.
        report: Called with a line for every job that is done.
    """
    rows = read_rows(path)
    jobs = units(config, pending(config, sets, models, rows))
    folder = os.environ.get("BOCHNER_DATA")
    calls = [
        joblib.delayed(_work)(config, name, some, torch.get_num_threads(), progress and workers == 1, folder)
        for name, some in jobs
    ]
    for number, found in enumerate(_results(calls, engine, workers), start=1):
        rows = add_rows(path, found, _key)
        first = found[0]
        names = ", ".join(dict.fromkeys(row["model"] for row in found))
        total = first["seconds"] * len({row["model"] for row in found})
        report(f"[{number}/{len(jobs)}] {first['set']}: {names}  {total:.1f} s")
    return rows


def _results(calls: list[Any], engine: str, workers: int) -> Iterator[list[Row]]:
    """Results as they come in."""
    if engine not in ENGINES:
        raise ValueError(unknown("engine", engine, ENGINES))
    if engine == "local":
        yield from joblib.Parallel(workers, return_as="generator_unordered")(calls)  # pyright: ignore[reportReturnType]
        return
    try:
        if engine == "ray":
            from ray.util.joblib import register_ray  # pyright: ignore[reportMissingImports]

            register_ray()
        else:
            from dask.distributed import Client  # pyright: ignore[reportMissingImports]

            Client.current(allow_global=True)
    except ImportError as error:
        raise ValueError(f"The engine '{engine}' needs a package that is not installed ({error.name}).") from error
    with joblib.parallel_config(engine, n_jobs=workers):
        # These backends give nothing back before everything is done: a batch at a time, so that rows are kept as they come.
        for start in range(0, len(calls), workers):
            yield from joblib.Parallel()(calls[start : start + workers])  # pyright: ignore[reportReturnType]
