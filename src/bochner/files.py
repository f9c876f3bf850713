"""Writing files so that either the old one is there or the new one."""

import contextlib
import stat
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

NAME_KEPT = 100  # characters of a file's name in that of its temporary file: names may have 255 bytes


def check_outputs(outputs: Sequence[Path], inputs: Sequence[Path] = ()) -> None:
    """Raises a ValueError unless every output can be written, all are different files, and none is an input.

    They are compared as they will be: links are followed, and './m' is 'm'.
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
        if any(_same(path, other) for other in inputs):
            raise ValueError(f"The output {path} is an input of this command; choose another name.")
        for other in outputs[:number]:
            if _same(path, other):
                raise ValueError(f"The outputs {other} and {path} are one file; choose another name.")
        probe = partial(path)
        try:
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ValueError(
                f"The output {path} cannot be written ({error.strerror}); choose another folder."
            ) from error


def _same(path: Path, other: Path) -> bool:
    both = path.exists() and other.exists()
    return path.resolve() == other.resolve() or (both and path.samefile(other))


def _check_regular(path: Path) -> None:
    if path.exists() and not path.is_file():
        raise ValueError(f"The output {path} is not a regular file; choose another name.")


def partial(path: Path) -> Path:
    """Where a file grows before it takes its place: beside what the path leads to, hidden, and of this call alone."""
    target = path.resolve()
    return target.with_name(f".{target.name[:NAME_KEPT]}.{uuid.uuid4().hex[:12]}.tmp")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, which takes the place of a file when all went well, through links and with the old file's mode."""
    _check_regular(path)
    target, part = path.resolve(), partial(path)
    try:
        yield part
        with contextlib.suppress(FileNotFoundError):
            part.chmod(stat.S_IMODE(target.stat().st_mode))
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def write_bytes(path: Path, data: bytes) -> None:
    """Replaces a file as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part:
        part.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """Replaces a text file as a whole."""
    write_bytes(path, text.encode())
