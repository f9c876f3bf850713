"""Rows on disk: one JSON line per unit of work, each with what it takes to make it again."""

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


def provenance(device: str = "cpu") -> Row:
    """Commit, versions and hardware, for every row."""
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
    if given := os.environ.get("BOCHNER_COMMIT"):
        return given
    try:
        root = Path(_git("rev-parse", "--show-toplevel"))
        if root / "src" / "bochner" not in Path(__file__).parents:
            return None
        changed = _git("status", "--porcelain", "--", str(root / "src"), str(root / "benchmarks"))
        return _git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def read_rows(path: Path) -> list[Row]:
    """All rows of a file; none where there is no file. A last line cut short by a crash is left out."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    complete = lines[:-1]  # what follows the last newline is empty, or a row that was never finished
    rows = []
    for number, line in enumerate(complete, start=1):
        try:
            rows += [json.loads(line)] if line else []
        except json.JSONDecodeError as error:
            raise ValueError(f"Line {number} of {path} is not a row ({error.msg}); remove it and run again.") from error
    return rows


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Replaces a file of rows as a whole: the old one or the new one is there, never half of either."""
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def add_rows(path: Path, found: Iterable[Row], key: Callable[[Row], tuple[Any, ...]]) -> list[Row]:
    """Puts rows into a file that other runs may be writing to as well; a row with the key of an old one replaces it.

    Returns:
        All rows, in the order of their keys.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        rows = {key(row): row for row in [*read_rows(path), *found]}
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
        unit: What every row says first, and what tells whether they are there.
        report: Called with a line that says what was done.
        make: Makes the rows.
        device: Where it computes.
        **origin: What every row says beside its provenance.
    """
    have = read_rows(path)
    if have and all(have[0].get(key) == value for key, value in unit.items()):
        report(f"{path.stem:<20}  already   {path}")
        return
    start = time.perf_counter()
    rows = make()
    write_rows(path, [{**unit, **provenance(device), **origin, **row} for row in rows])
    report(f"{path.stem:<20} {time.perf_counter() - start:7.1f} s   {path}")
