"""How the commands print: text, errors, and an output that may know few letters, be full or be closed."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import typer
from rich.console import Console

from bochner.tables.errors import TableError, shortened

# What users write is never markup: a column may be called d:on:d or [/red].
console = Console(highlight=False, markup=False, emoji=False)
errors = Console(stderr=True, highlight=False, markup=False, emoji=False)


def say(text: str) -> None:
    """Prints a line."""
    console.print(text, soft_wrap=True)


def note(text: str) -> None:
    """Prints a line about what goes on, on stderr."""
    errors.print(f"bochner: {text}", soft_wrap=True)


@contextlib.contextmanager
def problems() -> Iterator[None]:
    """Turns what users can cause into one message on stderr and exit status 1."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _refuse(f"{where}{error.strerror or error}.", error)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "allocate" not in str(error):
            raise
        _refuse("There is not enough memory; use fewer rows or columns.", error)
    except TableError as error:
        _refuse("\n".join(" ".join(line.split()) for line in shortened(error.problems)), error)
    except ValueError as error:
        _refuse(" ".join(str(error).split()), error)


def _refuse(message: str, error: BaseException) -> None:
    errors.print(message, style="red", soft_wrap=True)
    raise typer.Exit(1) from error


def make_folder(out: Path) -> Path:
    """Makes an output folder, before any work is done."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".bochner-write-test"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise typer.BadParameter(
            f"The folder {out} cannot be written to ({error.strerror}); choose another with --out."
        ) from error
    return out


def has_screen() -> bool:
    """Whether someone sits in front of a screen: then a page may be opened there."""
    window = sys.platform in ("darwin", "win32") or "DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ
    return window and sys.stdout.isatty()


def survive() -> None:
    """Lets letters that standard output does not know become question marks."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
