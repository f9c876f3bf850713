"""Every experiment of the paper by name, and what may be asked of it.

An experiment checks a request before any work is done, and makes the rows that its file lacks: a second run of the same request
finds them and stops. The module of an experiment holds the two functions, ``check`` and ``run``, and is imported when it is used.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from bochner.errors import unknown_name

PROTOCOLS = ("bochner", "paper")


@dataclass(frozen=True)
class Request:
    """What is asked of an experiment. What does not concern it is left aside.

    Attributes:
        seed: Seed of every draw.
        protocol: "bochner", or "paper" for what the published code did.
        device: "cpu" or "cuda".
        posterior: UCI: "kfac" or, for classes, "swag".
        sets: UCI: names of data sets; None for all.
        models: UCI and images: names of models; None for all.
        folds: UCI: numbers of folds; None for all ten.
        engine: UCI: where jobs run, "local", "ray" or "dask".
        workers: UCI: jobs at a time.
        head: CIFAR: "text" or "code".
        progress: Whether to show bars.
        report: Called with a line for everything that is done.
    """

    seed: int = 0
    protocol: str = "bochner"
    device: str = "cpu"
    posterior: str = "kfac"
    sets: tuple[str, ...] | None = None
    models: tuple[str, ...] | None = None
    folds: tuple[int, ...] | None = None
    engine: str = "local"
    workers: int = 1
    head: str = "text"
    progress: bool = False
    report: Callable[[str], None] = lambda _: None


def chosen(option: str, given: Sequence[Any] | None, known: Iterable[Any]) -> list[Any]:
    """The names that were given, all known ones by default; a ValueError where one is not known."""
    known = list(known)
    names = list(dict.fromkeys(known if given is None else given))
    if not names:
        raise ValueError(
            f"The {option} parameter must name at least one of {', '.join(map(str, known))}, got {given!r}."
        )
    for name in names:
        if name not in known:
            raise ValueError(unknown_name(option, name, [str(each) for each in known]))
    return names


@dataclass(frozen=True)
class Experiment:
    """An experiment.

    Attributes:
        name: Its name on the command line.
        folder: Where its rows go, under results.
        module: Where its ``check`` and ``run`` are.
    """

    name: str
    folder: str
    module: str

    def check(self, request: Request) -> None:
        """Raises a ValueError where a request cannot be met: an unknown name, a data set that is missing."""
        chosen("protocol", [request.protocol], PROTOCOLS)
        import_module(self.module).check(self.name, request)

    def run(self, request: Request, folder: Path) -> Path:
        """Makes the rows that are missing; returns their file. Toys under "paper" have one of their own."""
        suffix = "-paper" if self.folder == "toys" and request.protocol == "paper" else ""
        path = folder / f"{self.name}{suffix}.jsonl"
        import_module(self.module).run(self.name, request, path)
        return path


_MODULES = {
    "bochner.experiments.theory": (
        "theory",
        ("activations", "covariances", "gram", "mixture", "gram-error", "extrapolation"),
    ),
    "bochner.experiments.toys": ("toys", ("banana", "banana-width", "toy-1d")),
    "bochner.experiments.uci.sweep": ("uci", ("uci-regression", "uci-classification")),
    "bochner.experiments.images.rotation": ("images", ("rotated-digits", "rotated-mnist")),
    "bochner.experiments.images.ood": ("images", ("cifar-ood",)),
}
EXPERIMENTS = {name: Experiment(name, folder, module) for module, (folder, names) in _MODULES.items() for name in names}


def everything(request: Request) -> list[tuple[Experiment, Request]]:
    """All experiments of the paper under a protocol, the quick ones first: classes by both posteriors, CIFAR with both heads."""
    variants = {
        "uci-classification": [{"posterior": "kfac"}, {"posterior": "swag"}],
        "cifar-ood": [{"head": "text"}, {"head": "code"}],
    }
    return [
        (experiment, replace(request, **change))
        for name, experiment in EXPERIMENTS.items()
        for change in variants.get(name, [{}])
    ]
