"""How the commands print: text and errors. Text of users passes through ``say``, ``note`` and ``guarded`` only."""

import contextlib
import errno
import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from bochner.cli import process
from bochner.errors import PROBLEMS_SHOWN, printable, shortened
from bochner.files import FULL_DISK, temporary_path
from bochner.tables.errors import TableError

# What users write is never markup: a column may be called d:on:d or [/red].
console = Console(highlight=False, markup=False, emoji=False)
errors = Console(stderr=True, highlight=False, markup=False, emoji=False)
MAX_LINES = PROBLEMS_SHOWN + 2  # of a message: a heading and what is left out may be among them


def say(text: str) -> None:
    """Prints a line; control characters in it are written out, so that no name can move the cursor or change colours."""
    console.print(printable(text), soft_wrap=True)


def note(text: str) -> None:
    """Prints a line about progress on stderr."""
    errors.print(printable(f"bochner: {text}"), soft_wrap=True)


@contextlib.contextmanager
def problems() -> Iterator[None]:
    """Turns what users can cause into one message on stderr and exit status 1; signals into 128 plus their number."""
    process.begin()
    try:
        yield
    except KeyboardInterrupt as stop:
        errors.print(printable(process.stop_message(stop)), soft_wrap=True)
        raise typer.Exit(process.exit_code(stop)) from stop
    except OSError as error:
        # Writers name their file: an error of writing without a name is one of standard output, which ``process.start`` handles.
        if error.filename is None and error.errno in (*FULL_DISK, errno.EBADF, errno.EPIPE):
            raise
        _refuse(_disk_message(error), error)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "allocate" not in str(error):
            raise
        _refuse("There is not enough memory; use fewer rows or columns.", error)
    except TableError as error:
        shown = error.problems if len(error.problems) <= MAX_LINES else shortened(error.problems)
        _refuse("\n".join(" ".join(line.split()) for line in shown), error)
    except ValueError as error:
        _refuse(" ".join(str(error).split()), error)


def _disk_message(error: OSError) -> str:
    """The file, what went wrong with it, and which outputs are complete nevertheless."""
    where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
    files = process.kept_files()
    kept = f" Kept: {', '.join(files)}." if files else ""
    return f"{where}{(error.strerror or str(error)).removesuffix('.')}.{kept}"


def _refuse(message: str, error: BaseException) -> None:
    lines = map(printable, message.split("\n"))
    errors.print("\n".join(lines), style="red", soft_wrap=True)
    raise typer.Exit(1) from error


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose errors become messages, see ``problems``."""

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        with problems():
            command(*arguments, **options)

    return run


def make_folder(out: Path) -> Path:
    """Makes an output folder and tries to write there, before any work is done."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = temporary_path(out / "write-test")
        probe.touch()
        probe.unlink(missing_ok=True)
    except OSError as error:
        raise typer.BadParameter(
            f"The folder {printable(str(out))} cannot be written to ({error.strerror}); choose another with --out."
        ) from error
    return out


def has_screen() -> bool:
    """Whether someone sits in front of a screen: then a page may be opened there."""
    window = sys.platform in ("darwin", "win32") or "DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ
    return window and sys.stdout.isatty()
