"""Writing files atomically: after a crash either the old file is there or the new one."""

import contextlib
import stat
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

MAX_STEM_CHARACTERS = 100  # characters of a file's name in its temporary file's name, as names may have 255 bytes


def check_outputs(outputs: Sequence[Path], inputs: Sequence[Path] = ()) -> None:
    """Raises a ValueError unless every output can be written, all are different files, and none is an input.

    Paths are compared after following links, so './m' is 'm'.
    """
    for number, path in enumerate(outputs):
        if path.is_dir():
            raise ValueError(f"The output {path} is a folder; give a file name.")
        target = path.resolve()
        if not target.parent.is_dir():
            raise ValueError(
                f"The folder {target.parent if path.is_symlink() else path.parent} for the output does not exist; make it first."
            )
        _check_regular(path)
        if any(_is_same_file(path, other) for other in inputs):
            raise ValueError(f"The output {path} is an input of this command; choose another name.")
        for other in outputs[:number]:
            if _is_same_file(path, other):
                raise ValueError(f"The outputs {other} and {path} are one file; choose another name.")
        probe = temporary_path(path)
        try:
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ValueError(
                f"The output {path} cannot be written ({error.strerror}); choose another folder."
            ) from error


def _is_same_file(path: Path, other: Path) -> bool:
    both_exist = path.exists() and other.exists()
    return path.resolve() == other.resolve() or (both_exist and path.samefile(other))


def _check_regular(path: Path) -> None:
    if path.exists() and not path.is_file():
        raise ValueError(f"The output {path} is not a regular file; choose another name.")


def temporary_path(path: Path) -> Path:
    """A new hidden path beside the file that ``path`` leads to: the file is written there before it is moved into place."""
    target = path.resolve()
    return target.with_name(f".{target.name[:MAX_STEM_CHARACTERS]}.{uuid.uuid4().hex[:12]}.tmp")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a temporary path to write to, and moves it to ``path`` if nothing fails. Links are followed, and the mode is kept."""
    _check_regular(path)
    target, part = path.resolve(), temporary_path(path)
    try:
        yield part
        with contextlib.suppress(FileNotFoundError):
            part.chmod(stat.S_IMODE(target.stat().st_mode))
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def write_bytes(path: Path, data: bytes) -> None:
    """Replaces the contents of a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part:
        part.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """Replaces the contents of a text file atomically."""
    write_bytes(path, text.encode())
