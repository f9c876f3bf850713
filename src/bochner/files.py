"""Writing files atomically: after a crash either the old file is there or the new one."""

import contextlib
import errno
import glob
import os
import re
import stat
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

MAX_STEM_CHARACTERS = 100  # characters of a file's name in its temporary file's name, as names may have 255 bytes
LEFTOVER_SECONDS = 86_400  # age from which a temporary file is a leftover, where the system has no locks
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # what only a write can meet


def check_outputs(outputs: Sequence[Path], inputs: Sequence[Path] = ()) -> None:
    """Raises a ValueError unless every output can be written, all are different files, and none is an input.

    Paths are compared after following links, so './m' is 'm'. Removes what killed runs left of the same outputs.
    """
    for number, path in enumerate(outputs):
        if path.is_dir():
            raise ValueError(f"The output {path} is a folder; give a file name.")
        target = _followed(path)
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
        remove_leftovers(path)
        probe = temporary_path(path)
        try:
            probe.touch()
            probe.unlink(missing_ok=True)
        except OSError as error:
            raise ValueError(
                f"The output {path} cannot be written ({error.strerror}); choose another folder."
            ) from error


def _followed(path: Path) -> Path:
    """The file that a path leads to; not ``Path.resolve``, which raises a RuntimeError for links in a circle."""
    return Path(os.path.realpath(path))


def _is_same_file(path: Path, other: Path) -> bool:
    both_exist = path.exists() and other.exists()
    return _followed(path) == _followed(other) or (both_exist and path.samefile(other))


def _check_regular(path: Path) -> None:
    if _followed(path).is_symlink():
        raise ValueError(f"The output {path} is a link that leads back to itself; choose another name.")
    stream = path.is_symlink() and path.readlink().is_relative_to("/proc")  # /dev/stdout, even where it leads to a file
    if stream or (path.exists() and not path.is_file()):
        raise ValueError(f"The output {path} is not a regular file; choose another name.")


def temporary_path(path: Path) -> Path:
    """A new hidden path beside the file that ``path`` leads to: the file is written there before it is moved into place."""
    target = _followed(path)
    return target.with_name(f"{_temporary_prefix(target)}{uuid.uuid4().hex[:12]}.tmp")


def _temporary_prefix(target: Path) -> str:
    return f".{target.name[:MAX_STEM_CHARACTERS]}."


def remove_leftovers(path: Path) -> None:
    """Removes temporary files that killed processes left of an output.

    A living writer holds a lock on its temporary file, and the system frees that lock when the writer dies. Without locks,
    the age of the file decides. A file that cannot be removed stays.
    """
    target = _followed(path)
    prefix = _temporary_prefix(target)
    name = re.compile(re.escape(prefix) + r"[0-9a-f]{12}\.tmp")
    with contextlib.suppress(OSError):
        for leftover in target.parent.glob(f"{glob.escape(prefix)}*.tmp"):
            if name.fullmatch(leftover.name):
                with contextlib.suppress(OSError):
                    _remove_unless_locked(leftover)


def _remove_unless_locked(leftover: Path) -> None:
    if fcntl is None:
        if time.time() - leftover.stat().st_mtime > LEFTOVER_SECONDS:
            leftover.unlink()
        return
    handle = os.open(leftover, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        leftover.unlink()
    finally:
        os.close(handle)


@contextlib.contextmanager
def _locked(part: Path) -> Iterator[None]:
    """Makes a temporary file and holds its lock, see ``remove_leftovers``."""
    if fcntl is None:  # an open file could not be moved there
        yield
        return
    handle = _open_locked(part)
    try:
        yield
    finally:
        os.close(handle)


def _open_locked(part: Path) -> int:
    """Opens a file under a lock; again if another process removed it between the opening and the lock."""
    while True:
        handle = os.open(part, os.O_RDWR | os.O_CREAT, 0o666)
        if fcntl is not None:
            with contextlib.suppress(OSError):  # a disk of a network may have no locks
                fcntl.flock(handle, fcntl.LOCK_EX)
        if _is_open_file(handle, part):
            return handle
        os.close(handle)


def _is_open_file(handle: int, path: Path) -> bool:
    return path.exists() and os.path.samestat(os.fstat(handle), path.stat())


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a temporary path to write to, and moves it to ``path`` if nothing fails. Links are followed, and the mode is kept.

    A disk error names ``path``.
    """
    _check_regular(path)
    remove_leftovers(path)
    target, part = _followed(path), temporary_path(path)
    try:
        with _locked(part):
            yield part
            with contextlib.suppress(FileNotFoundError):
                part.chmod(stat.S_IMODE(target.stat().st_mode))
            part.replace(target)
    except OSError as error:
        if error.filename == str(part) or (error.filename is None and error.errno in FULL_DISK):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        part.unlink(missing_ok=True)


def write_bytes(path: Path, data: bytes) -> None:
    """Replaces the contents of a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part:
        part.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """Replaces the contents of a text file atomically; half characters, as in names of files that are no UTF-8, become '?'."""
    write_bytes(path, text.encode(errors="replace"))
