"""Rows on disk: one JSON line for each result, with everything that is needed to make it again.

One rule tells all experiments what to make again. A unit of work is named by what changes its numbers: experiment, seed,
protocol, and where they vary set, model, folds and posterior. Rows of a unit that are in the file are not made again. The commit,
the versions and the machine are noted in the rows, but do not count: to make rows again, remove them. Sweeps keep many units in
one file (``add_rows``). The theory keeps one unit in a file (``make_once``), and another seed replaces it. The toys write a file
anew after each unit.
"""

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from bochner.files import write_text

Row = dict[str, Any]

# Columns that reports and sweeps read and their types, by the beginning of a file's name; rows may have other columns too.
_UNIT: dict[str, type] = {"protocol": str, "model": str, "seed": int, "posterior": str, "status": str}
_COLUMNS: dict[str, dict[str, type]] = {
    "uci": {**_UNIT, "experiment": str, "set": str, "fold": int, "folds": list},
    "rotated": {**_UNIT, "experiment": str, "angle": float},
    "cifar-ood": {**_UNIT, "head": str, "score": str, "outside": str},
    "activations": {"activation": str, "scaling": str, "z": list, "value": list},
    "covariances": {"activation": str, "kernel": str, "r": list, "monte_carlo": list, "exact": list},
    "gram": {"prior": str, "points": int, "networks": int, "units": int, "infinite": list, "finite": list},
    "gram-error": {"dim": int, "kernel": str, "activation": str, "frequencies": str, "K": int, "error": float},
    "mixture": {"kernel": str, "scaling": str, "r": list, "full": list, "first": list, "difference": list},
    "extrapolation": {"activation": str, "mean": list, "std": list, "grid": list, "x": list, "y": list},
    "banana": {"method": str},
    "toy-1d": {"method": str},
}
_METRICS = ("nlpd", "rmse", "accuracy", "auc", "ece", "confidence", "seconds")  # numbers or null, where a row has them
_TYPE_NAMES = {str: "text", int: "an integer", float: "a number", list: "a list"}
MAX_INTEGER = 2**63  # larger integers overflow in NumPy


def provenance(device: str = "cpu") -> Row:
    """Commit, versions and hardware of this run; part of every row."""
    import bochner

    hardware = (
        torch.cuda.get_device_name() if device.startswith("cuda") else f"{platform.machine()}, {os.cpu_count()} cores"
    )
    return {
        "commit": _commit(),
        "bochner": bochner.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device,
        "hardware": hardware,
    }


def _git(*words: str) -> str:
    here = Path(__file__).parent
    return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True).stdout.strip()


def _commit() -> str | None:
    """The commit that the code is from, marked where the code differs from it; ``BOCHNER_COMMIT`` where that is set.

    Outside a checkout of this package (an installed copy may lie within another repository), None.
    """
    if commit := os.environ.get("BOCHNER_COMMIT"):
        return commit
    try:
        root = Path(_git("rev-parse", "--show-toplevel"))
        if root / "src" / "bochner" not in Path(__file__).parents:
            return None
        changed = _git("status", "--porcelain", "--", str(root / "src"), str(root / "benchmarks"))
        return _git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def read_rows(path: Path) -> list[Row]:
    """All rows of a file; none where there is no file. A last line cut short by a crash is left out.

    Raises:
        ValueError: A line is not a row of the experiment that the file is named after, see ``check_row``.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    complete = lines[:-1]  # what follows the last newline is empty, or a row that was never finished
    return [_read_row(line, f"Line {number} of {path}", path.stem) for number, line in enumerate(complete, 1) if line]


def row_problem(row: Any, name: str) -> str | None:
    """What is wrong with a row of the file ``name``, in a few words: no object, a missing column, a wrong type; else None."""
    if not isinstance(row, dict):
        return "it is no JSON object"
    kinds = [kind for kind in _COLUMNS if name == kind or name.startswith(f"{kind}-")]
    columns = _COLUMNS[max(kinds, key=len)] if kinds else {}
    for column, kind in columns.items():
        if column not in row:
            return f"it has no {column!r}"
        if not _is_of_type(row[column], kind):
            return f"its {column!r} must be {_TYPE_NAMES[kind]}"
    for column in _METRICS if columns else ():
        if row.get(column) is not None and not _is_of_type(row[column], float):
            return f"its {column!r} must be a number or null"
    return None


def _is_of_type(value: object, kind: type) -> bool:
    if isinstance(value, bool) or (isinstance(value, int) and abs(value) >= MAX_INTEGER):
        return False
    return isinstance(value, (int, float) if kind is float else kind)


def _read_row(line: bytes, place: str, name: str) -> Row:
    try:
        row = json.loads(line)
        problem = row_problem(row, name)
    except (ValueError, RecursionError) as error:  # no JSON or UTF-8, thousands of digits, thousands of brackets
        problem = error.msg if isinstance(error, json.JSONDecodeError) else "no JSON that can be read"
        raise ValueError(f"{place} is not a row ({problem}); remove it and run again.") from error
    if problem is not None:
        raise ValueError(f"{place} is not a row ({problem}); remove it and run again.")
    return row


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Replaces a file of rows as a whole: the old one or the new one is there, never half of either."""
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def add_rows(path: Path, new: Iterable[Row], key: Callable[[Row], tuple[Any, ...]]) -> list[Row]:
    """Adds rows to a file that other runs may be writing to as well; a row replaces an older one with the same key.

    Returns:
        All rows, in the order of their keys.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        rows = {key(row): row for row in [*read_rows(path), *new]}
        ordered = [rows[each] for each in sorted(rows)]
        write_rows(path, ordered)
    return ordered


def make_once(
    path: Path,
    unit: Row,
    report: Callable[[str], None],
    make: Callable[[], list[Row]],
    device: str = "cpu",
    **origin: Any,
) -> None:
    """Fills a file with the rows of one unit of work, unless it holds them already.

    Args:
        path: The file.
        unit: The columns that name the unit; they begin every row.
        report: Called with a line that says what was done.
        make: Makes the rows.
        device: Where it computes.
        **origin: Further columns about the origin of the rows.
    """
    old = read_rows(path)
    if old and all(row.get(column) == value for row in old for column, value in unit.items()):
        report(f"{path.stem:<20}  already   {path}")
        return
    start = time.perf_counter()
    rows = make()
    origin["file_seconds"] = round(time.perf_counter() - start, 2)
    write_rows(path, [{**unit, **provenance(device), **origin, **row} for row in rows])
    replaced = f"   replaces {len(old)} rows of another unit" if old else ""
    report(f"{path.stem:<20} {time.perf_counter() - start:7.1f} s   {path}{replaced}")
