"""Runs the units of a sweep through joblib and keeps their rows: what is there is skipped, what is new is added whole."""

import functools
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import joblib
import torch

from bochner import datasets
from bochner.experiments.catalogue import Request, chosen
from bochner.experiments.rows import Row, add_rows, read_rows
from bochner.experiments.uci.kfac import SETS, run_set
from bochner.experiments.uci.protocols import FOLDS, Config
from bochner.experiments.zoo import MODELS, by_activation

ENGINES = ("local", "ray", "dask")
POSTERIORS = ("kfac", "swag")
MODELS_PER_JOB = {"adult": 8, "connect-4": 8, "covtype": 1}  # models that train together on a GPU; all, for other sets
PARENT_CHECK_SECONDS = 1.0  # time between two looks of a worker process whether its parent lives


def _key(row: Row) -> tuple[Any, ...]:
    """The unit of work that a row belongs to."""
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
        ordered, per_job = by_activation(models), MODELS_PER_JOB.get(name, len(MODELS))
        if config.posterior == "kfac":
            jobs += [(name, ordered[i : i + per_job]) for i in range(0, len(ordered), per_job)]
            continue
        groups = [list(some) for _, some in itertools.groupby(ordered, key=lambda model: MODELS[model][1])]
        parts = [some[i : i + per_job] for some in groups for i in range(0, len(some), per_job)]
        jobs += [(name, part) for part in sorted(parts, key=len)]
    return jobs


@dataclass(frozen=True)
class _Process:
    """How a job runs, in whatever process.

    Attributes:
        threads: Number of threads; with the same number everywhere, sums come out the same everywhere.
        progress: Whether to show bars.
        data: The data folder that the user chose; None for the default.
        parent: The process that a local worker belongs to; None for workers of Ray and Dask.
    """

    threads: int
    progress: bool
    data: str | None
    parent: int | None

    def prepare(self) -> None:
        """Applies the settings to this process, and ties it to its parent where it is a local worker."""
        torch.set_num_threads(self.threads)
        if self.data is not None:
            os.environ["BOCHNER_DATA"] = self.data
        if self.parent is not None and self.parent != os.getpid():
            _end_with(self.parent)


@functools.cache
def _end_with(parent: int) -> None:
    """Lets this worker process end soon after its parent does, however that ends, and leaves Ctrl-C to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _work(process: _Process, config: Config, name: str, models: list[str]) -> list[Row]:
    """Does one job."""
    process.prepare()
    return run_set(config, name, models, progress=process.progress)


def check(name: str, request: Request) -> None:
    """Raises an error unless all names are known and the data sets are there and undamaged."""
    chosen("posterior", [request.posterior], POSTERIORS)
    chosen("engine", [request.engine], ENGINES)
    chosen("models", request.models, MODELS)
    chosen("folds", request.folds, FOLDS)
    if request.posterior == "swag" and name != "uci-classification":
        raise ValueError("The posterior 'swag' is part of uci-classification only, as in the paper.")
    for each in chosen("sets", request.sets, SETS[name]):
        result = datasets.check(each)
        if result.status == "missing":
            datasets.load(each)  # raises the error that says where the file belongs and how to get it
        if result.status == "bad":
            raise ValueError(f"The data set {each} cannot be used. {result.message}")


def run(name: str, request: Request, path: Path) -> None:
    """Makes the rows that are missing from a file."""
    make = Config.swag if request.posterior == "swag" else Config
    folds = tuple(chosen("folds", request.folds, FOLDS))
    config = make(experiment=name, protocol=request.protocol, seed=request.seed, folds=folds, device=request.device)
    sweep(config, chosen("sets", request.sets, SETS[name]), chosen("models", request.models, MODELS), path, request)


def sweep(config: Config, sets: Sequence[str], models: Sequence[str], path: Path, request: Request) -> list[Row]:
    """Makes the rows that are missing from ``path`` and returns all of them.

    Args:
        config: Settings of the sweep.
        sets: Names of data sets.
        models: Names of models.
        path: File of rows; replaced as a whole whenever a job is done.
        request: Where jobs run, how many at a time, and who is told.
    """
    rows = read_rows(path)
    jobs = units(config, pending(config, sets, models, rows))
    process = _Process(
        threads=torch.get_num_threads(),
        progress=request.progress and request.workers == 1,
        data=os.environ.get("BOCHNER_DATA"),
        parent=os.getpid() if request.engine == "local" else None,
    )
    calls = [joblib.delayed(_work)(process, config, name, some) for name, some in jobs]
    for number, new in enumerate(_results(calls, request.engine, request.workers), start=1):
        rows = add_rows(path, new, _key)
        first = new[0]
        names = ", ".join(dict.fromkeys(row["model"] for row in new))
        total = first["seconds"] * len({row["model"] for row in new})
        request.report(f"[{number}/{len(jobs)}] {first['set']}: {names}  {total:.1f} s")
    return rows


def _results(calls: list[Any], engine: str, workers: int) -> Iterator[list[Row]]:
    """Results in the order in which they are done."""
    if engine == "local":
        yield from _local_results(calls, workers)
        return
    try:
        if engine == "ray":
            from ray.util.joblib import register_ray

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


def _local_results(calls: list[Any], workers: int) -> Iterator[list[Row]]:
    """Results of processes on this machine; the processes end at once where the sweep is interrupted."""
    finished = False
    try:
        yield from joblib.Parallel(workers, return_as="generator_unordered")(calls)  # pyright: ignore[reportReturnType]
        finished = True
    finally:
        if workers > 1 and not finished:
            from joblib.externals.loky import get_reusable_executor

            get_reusable_executor().shutdown(wait=False, kill_workers=True)
