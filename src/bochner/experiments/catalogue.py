"""Every experiment of the paper by name, and the options of a run.

An experiment checks a request before any work is done, and makes the rows that its file lacks: a second run of the same request
does nothing. The module of an experiment has two functions, ``check`` and ``run``, and is imported when they are needed.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TypeVar

from bochner.errors import unknown_name

PROTOCOLS = ("bochner", "paper")  # the first is the default

Name = TypeVar("Name")


@dataclass(frozen=True)
class Request:
    """The options of a run. An experiment ignores those that are not about it.

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
        report: Called with a line of text after each step.
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


def chosen(option: str, requested: Sequence[Name] | None, known: Iterable[Name]) -> list[Name]:
    """The requested names without repetitions, by default all known ones; a ValueError if one is not known."""
    known = list(known)
    names = list(dict.fromkeys(known if requested is None else requested))
    if not names:
        raise ValueError(
            f"The {option} parameter must name at least one of {', '.join(map(str, known))}, got {requested!r}."
        )
    for name in names:
        if name not in known:
            raise ValueError(unknown_name(option, name, [str(other) for other in known]))
    return names


@dataclass(frozen=True)
class Experiment:
    """An experiment.

    Attributes:
        name: Its name on the command line.
        folder: Folder of its rows, under results.
        module: Name of the module of its ``check`` and ``run``.
    """

    name: str
    folder: str
    module: str

    @property
    def files_by_protocol(self) -> bool:
        """Whether the rows of each protocol are in a file of their own."""
        return self.folder == "toys"

    def check(self, request: Request) -> None:
        """Raises a ValueError where a request cannot be met: an unknown name, a data set that is missing."""
        chosen("protocol", [request.protocol], PROTOCOLS)
        import_module(self.module).check(self.name, request)

    def run(self, request: Request, folder: Path) -> Path:
        """Makes the rows that are missing; returns their file."""
        is_default = request.protocol == PROTOCOLS[0]
        suffix = f"-{request.protocol}" if self.files_by_protocol and not is_default else ""
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
    """All experiments of the paper under one protocol, the quick ones first: classes by both posteriors, CIFAR with both heads."""
    variants = {
        "uci-classification": [{"posterior": "kfac"}, {"posterior": "swag"}],
        "cifar-ood": [{"head": "text"}, {"head": "code"}],
    }
    return [
        (experiment, replace(request, **change))
        for name, experiment in EXPERIMENTS.items()
        for change in variants.get(name, [{}])
    ]
