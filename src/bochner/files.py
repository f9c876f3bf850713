"""Writing files so that either the old one is there or the new one."""

import os
from pathlib import Path


def partial(path: Path) -> Path:
    """Where a file grows before it takes its place: beside it, hidden, and of this process alone."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def write_bytes(path: Path, data: bytes) -> None:
    """Replaces a file as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = partial(path)
    try:
        part.write_bytes(data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
