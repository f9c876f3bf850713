"""The files of a table, and what their names say of their kind."""

from pathlib import Path

from bochner.tables.errors import TableError

TEXT_SUFFIXES = (".csv", ".tsv", ".txt")
ARROW_SUFFIXES = (".parquet", ".feather", ".arrow")
SUFFIXES = (*TEXT_SUFFIXES, *(f"{suffix}.gz" for suffix in TEXT_SUFFIXES), *ARROW_SUFFIXES, ".xlsx")
PATTERN_CHARACTERS = "*?["  # a path that holds one of them, and is no file, is a pattern


def suffix_of(path: Path) -> str:
    """What tells the kind of a table: the ending of its file in small letters, and for packed text the two last ones."""
    name = path.name.lower()
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), path.suffix.lower())


def is_text_file(path: Path) -> bool:
    """Whether a table is a text file, packed by gzip or not."""
    return suffix_of(path).removesuffix(".gz") in TEXT_SUFFIXES


def files_of(path: Path) -> list[Path]:
    """The files of a table, in the order of their names: a file, those of a folder, or those of a pattern such as part-*.csv.

    Raises:
        TableError: There is none, or one of them cannot be used.
    """
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if _is_visible_table(file))
        inner = next(
            (file for file in sorted(path.glob("*/*")) if _is_visible_table(file) and file.parent.name[0] not in "._"),
            None,
        )
        if inner is not None:
            kind = suffix_of(inner)
            choice = f"{path}/*/*{kind}" + (
                f" for those, or {path}/*{suffix_of(files[0])} for the others" if files else ""
            )
            raise TableError(f"{path} has tables in folders of its own, such as {inner}; give the pattern {choice}.")
        if not files:
            raise TableError(f"{path} is a folder without a file that ends in one of {', '.join(SUFFIXES)}.")
    elif not path.exists() and any(character in str(path) for character in PATTERN_CHARACTERS):
        root, pattern = (Path(path.anchor), path.relative_to(path.anchor)) if path.anchor else (Path(), path)
        files = sorted(file for file in root.glob(str(pattern)) if file.is_file())
        if not files:
            raise TableError(f"No file fits the pattern {path}; check the name and the folder.")
    else:
        files = [path]
    for file in files:
        _check_file(file)
    kinds = sorted({suffix_of(file) for file in files})
    if len(kinds) > 1:
        raise TableError(
            f"{path} holds files of several kinds, {' and '.join(kinds)}; give a pattern such as *{kinds[0]}."
        )
    return files


def _is_visible_table(file: Path) -> bool:
    return file.is_file() and suffix_of(file) in SUFFIXES and file.name[0] not in "._"


def _check_file(path: Path) -> None:
    """Raises a TableError unless the path is a readable file of a known kind."""
    if not path.exists():
        raise TableError(f"{path} does not exist; check the name and the folder.")
    if not path.is_file():
        raise TableError(f"{path} is not a regular file; write it to one first.")
    if suffix_of(path) not in SUFFIXES:
        raise TableError(f"{path} must end in one of {', '.join(SUFFIXES)}; convert or rename it.")
    if path.stat().st_size == 0:
        raise TableError(f"{path} is empty; it needs a line of column names and at least one row.")
