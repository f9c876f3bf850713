"""Columns understood: what each one is, in words that a user reads and in plain data that a model file keeps.

A column becomes one or more columns of numbers, or one of categories, which is what the estimators of ``bochner.estimators`` take:
these scale numbers, and know missing values and categories that they have never seen.

skrub's ``TableVectorizer`` would do a part of it. It knows no currencies, decimal commas or words for 'missing', says nothing of
what it did, and is saved as code (a pickle).
"""

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from bochner.tables import cells
from bochner.tables.binary_files import as_text

READABLE = 0.8  # share of cells that must be numbers, dates or times for a column to be of these
FEW_LEVELS = 20  # different values up to which numbers with some words among them are categories
MOST_LEVELS = 50  # categories of their own; the others are rare
RARE_ROWS = 3  # a category of fewer rows is rare
SENTENCE_WORDS = 3  # words a cell from which on texts that all differ are free text, and not names
TEXT_WORDS = 8  # frequent words of a free text that become columns
WORD_SHARES = (0.05, 0.8)  # shares of rows in which such a word must be
CODE_SHARE = 0.02  # of different cells that must begin with a zero for a column to hold codes
RARE = "other values"
ID_WORDS = frozenset({"id", "ids", "uuid", "guid", "identifier", "sku", "unnamed"})
ID_ENDINGS = frozenset({"key", "ref"})  # as the last word of a name
ID_NAMES = frozenset({"index", "idx", "no", "nr"})  # as the whole name
CODE_WORDS = frozenset({"zip", "zipcode", "plz", "postcode", "postal", "phone", "tel", "mobile", "fax"})
TIME_WORDS = frozenset({"year", "month", "week", "day", "hour", "time", "date", "quarter", "jahr", "monat", "t"})
LEAST_RUN = 10  # whole numbers that follow each other from which on they number the rows
KINDS = ("number", "truth", "date", "time", "category", "text", "dropped")
DATE_PARTS = {
    "month": "month",
    "weekday": "day_of_week",
    "hour": "hour",
}  # beside the days, where they vary; in pandas' words
WORD = re.compile(r"[^\W\d_]{3,}")


@dataclass(frozen=True)
class Column:
    """What a column is and how its cells are read.

    Attributes:
        name: Its name in the table.
        kind: One of KINDS.
        note: What was done with it, for the user.
        decimal: Decimal sign of numbers.
        unit: Currency or unit of numbers.
        style: Format of dates or times.
        first: The first date.
        parts: What dates become ("days", "month", "weekday", "hour"), or the frequent words of a text.
        levels: Categories of their own.
        rare: Whether there were others, which count as one.
        missing: Whether cells were missing in training.
    """

    name: str
    kind: str
    note: str
    decimal: str = "."
    unit: str = ""
    style: str = ""
    first: str = ""
    parts: tuple[str, ...] = ()
    levels: tuple[str, ...] = ()
    rare: bool = False
    missing: bool = False

    @property
    def outputs(self) -> list[str]:
        """Names of the columns that it becomes."""
        if self.kind == "date":
            return [f"{self.name} ({part})" for part in self.parts]
        if self.kind == "text":
            return [f"{self.name} (words)", *(f"{self.name} has '{word}'" for word in self.parts)]
        return [] if self.kind == "dropped" else [self.name]


def as_cells(series: Any) -> Any:
    """A column as numbers or dates where its type says so, else as an array of texts."""
    if isinstance(series.dtype, pd.CategoricalDtype):
        return np.array([as_text(value) for value in series.astype(object)], dtype=object)
    if pd.api.types.is_timedelta64_dtype(series.dtype):
        return series.dt.total_seconds().to_numpy(dtype=float) / 3600  # hours
    if pd.api.types.is_bool_dtype(series.dtype):
        return np.array(["" if pd.isna(value) else str(bool(value)) for value in series], dtype=object)
    if pd.api.types.is_numeric_dtype(series.dtype) and not pd.api.types.is_complex_dtype(series.dtype):
        values = series.to_numpy(dtype=float, na_value=np.nan)
        return np.where(np.isfinite(values), values, np.nan)
    if pd.api.types.is_datetime64_any_dtype(series.dtype):
        return pd.DatetimeIndex(series.dt.tz_localize(None))  # a weekday is that of the place
    return np.array([as_text(value) for value in series], dtype=object)


# ------------------------------------------------------------------ what a column is


def votes_of(values: Any, known: bool = False) -> cells.Votes:
    """What a column's cells, from ``as_cells``, say about the decimal sign; ``known`` where they are known to be numbers."""
    return cells.decimal_votes(values, READABLE, known) if is_text(values) else cells.Votes()


def is_text(values: Any) -> bool:
    """Whether cells from ``as_cells`` are texts."""
    return not isinstance(values, pd.DatetimeIndex) and values.dtype == object


def adapted(column: Column, values: Any, decimal: str | None) -> Column:
    """The same column where a new table writes its numbers or dates in another way.

    Args:
        column: As it was understood in training.
        values: Its cells in the new table, from ``as_cells``.
        decimal: The decimal sign of the new table, from all its columns.
    """
    if not is_text(values):
        return column
    if column.kind == "number":
        return replace(column, decimal=votes_of(values, known=True).sign or decimal or column.decimal)
    if column.kind in ("date", "time"):
        read = read_column(column, values)
        if read.unreadable.sum() > (1 - READABLE) * (~read.absent).sum():
            found = _as_dates(column.name, values, pd.unique(values[~read.absent]))
            if found is not None and found.kind == column.kind:
                return replace(column, style=found.style)
    return column


def understand(name: str, values: Any, decimal: str | None = None, votes: cells.Votes | None = None) -> Column:
    """What a column is, from all its cells.

    Args:
        name: Its name.
        values: Its cells, from ``as_cells``.
        decimal: The decimal sign of the file, for cells that leave a doubt.
        votes: From ``votes_of``, where it is known already.
    """
    column = _understand(name, values, decimal, votes or votes_of(values))
    if column.kind == "dropped":
        return column
    read = read_column(column, values)
    if not (absent := int(read.absent.sum())):
        constant = all(len(pd.unique(part)) == 1 for part in read.values.values())
        return replace(column, kind="dropped", note="dropped, becomes the same in every row") if constant else column
    return replace(column, note=f"{column.note}; {absent} missing", missing=True)


def _understand(name: str, values: Any, decimal: str | None, votes: cells.Votes) -> Column:
    if isinstance(values, pd.DatetimeIndex):
        return _date(name, values, "", "")
    if values.dtype != object:
        return _number(name, values, "number", "")
    absent = cells.is_missing(values, _missing_words(values))
    present, missing = values[~absent], bool(absent.any())
    if not len(present):
        return Column(name, "dropped", "dropped, no values")
    levels = pd.unique(present)
    if set(cells.read_truths(levels).tolist()) == {0.0, 1.0}:
        yes, no = (
            ", ".join(sorted({own.strip() for own in levels if cells.read_truths([own])[0] == v})) for v in (1, 0)
        )
        return Column(name, "truth", f"{yes} → 1, {no} → 0", missing=missing)
    found = _as_numbers(name, values, levels, votes, decimal) or _as_dates(name, values, levels)
    return found or _as_texts(name, present, missing)


def understand_choices(name: str, values: np.ndarray) -> Column:
    """A column of numbers that pandas holds as categories."""
    absent = cells.is_missing(values)
    if len(levels := pd.unique(values[~absent])) < 2:
        return Column(name, "dropped", f"dropped, always '{levels[0]}'" if len(levels) else "dropped, no values")
    column = _category(name, values[~absent], bool(absent.any()))
    return replace(column, note=f"{column.note}; {absent.sum()} missing") if absent.any() else column


def _missing_words(values: np.ndarray) -> frozenset[str]:
    """Words for 'missing' in a column of text: beside '+', '-' is an answer."""
    return cells.MISSING_WORDS - {"-"} if (values == "+").any() else cells.MISSING_WORDS


def _as_numbers(
    name: str, values: np.ndarray, levels: np.ndarray, votes: cells.Votes, file_sign: str | None
) -> Column | None:
    """A column of numbers, with a unit or not; None where it is none."""
    decimal, remark = cells.column_sign(votes, file_sign)
    if (votes.point if decimal == "." else votes.comma) < READABLE or _are_codes(name):
        return None
    absent = cells.is_missing(values, cells.MISSING_NUMBERS)
    numbers = np.where(absent, np.nan, cells.read_numbers(values, decimal))
    unreadable = values[np.isnan(numbers) & ~absent]
    zeros = sum(len(text) > 1 and text[0] == "0" and text.isdigit() for text in levels)
    codes = zeros > max(1, CODE_SHARE * len(levels)) or zeros == len(levels)
    if codes or np.mean(np.isfinite(numbers[~absent])) < READABLE or (len(unreadable) and len(levels) <= FEW_LEVELS):
        return None  # codes such as 007, or 1, 2, 3, 4, 5+
    if np.isfinite(numbers).all() and len(levels) > 2 and all(len(text.strip()) == 8 for text in levels):
        if (style := cells.date_style(levels, 1.0)) is not None:  # 20261118
            return _date(name, cells.read_dates(values, style[0]), style[0], "")
    units = cells.count_units(values[~absent], decimal)
    signs = sorted(unit for unit in units if unit)
    if len(signs) > 1:
        return Column(name, "dropped", f"dropped, several units ({', '.join(signs[:5])})")
    commas = decimal == "," and votes.comma > votes.point
    what = "number" + (f" in {signs[0]}" if signs else "") + (" with decimal commas" if commas else "")
    column = _number(name, numbers, what + (f" ({remark})" if remark else ""), signs[0] if signs else "")
    if signs and units[""]:
        column = _noted(column, f"{units['']} cells without '{signs[0]}', which are taken as they are")
    if len(unreadable):
        column = _noted(column, _uncounted(unreadable))
    return replace(column, decimal=decimal)


def _uncounted(unreadable: np.ndarray) -> str:
    return f"{len(unreadable)} cells that are none, such as '{unreadable[0]}', count as missing"


def _noted(column: Column, remark: str) -> Column:
    """A column that is used with one more remark in its note."""
    return column if column.kind == "dropped" else replace(column, note=f"{column.note}; {remark}")


def _number(name: str, numbers: np.ndarray, what: str, unit: str) -> Column:
    """A column of numbers that are known; ids and constants among them are dropped."""
    present = numbers[np.isfinite(numbers)]
    missing = len(present) < len(numbers)
    if not len(present):
        return Column(name, "dropped", "dropped, no values")
    levels = pd.unique(present)
    if len(levels) == 1 and not missing:
        return Column(name, "dropped", f"dropped, always {present[0]:g}")
    codes = _are_codes(name)
    if (codes or _names_things(name)) and not unit and bool((present == np.round(present)).all()):
        if len(levels) > max(10, len(present) / 2):
            return Column(name, "dropped", _differing(levels, present))
        if len(levels) <= MOST_LEVELS:
            return _category(name, np.array([canonical(str(v)) for v in present], dtype=object), missing)
        if codes:
            return Column(name, "dropped", f"dropped, {len(levels)} different codes")
    if not unit and _are_row_numbers(name, numbers):
        return Column(name, "dropped", f"dropped, numbers the rows ({present[0]:g} to {present[-1]:g})")
    return Column(name, "number", what, unit=unit, missing=missing)


def _differing(levels: np.ndarray, present: np.ndarray) -> str:
    return f"dropped, {'every value differs' if len(levels) == len(present) else 'most values differ'}"


def _words(name: str) -> list[str]:
    """The words of a column's name: ad, id of ad_id and adId."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", str(name))]


def _names_things(name: str) -> bool:
    """Whether the numbers of a column name things, by its name: ad_id, customerId, Unnamed: 0."""
    words = _words(name)
    ends = bool(words) and (words[-1] in ID_ENDINGS or (len(words) == 1 and words[0] in ID_NAMES))
    return ends or bool(ID_WORDS & set(words))


def _are_codes(name: str) -> bool:
    """Whether the numbers of a column are codes, by its name: zip, phone."""
    return bool(CODE_WORDS & set(_words(name)))


def _are_row_numbers(name: str, numbers: np.ndarray) -> bool:
    """Whether numbers are whole and follow each other row by row; years and other times are worth keeping."""
    if len(numbers) < LEAST_RUN or numbers[0] != np.round(numbers[0]) or TIME_WORDS & set(_words(name)):
        return False
    return bool((np.diff(numbers) == 1).all())


def _as_dates(name: str, values: np.ndarray, levels: np.ndarray) -> Column | None:
    """A column of dates, or of times of day; None where it is none."""
    if (found := cells.date_style(levels, READABLE)) is not None:
        style, unclear = found
        order = "month before day" if style.find("%m") < style.find("%d") else "day before month"
        dates = cells.read_dates(values, style)
        column, lost = _date(name, dates, style, f" ({order}, which the cells leave open)" * unclear), dates.isna()
    elif (style := cells.time_style(levels, READABLE)) is not None:
        lost = np.isnan(cells.read_times(values, style))
        column = Column(name, "time", "time → hours", style=style, missing=bool(lost.any()))
    else:
        return None
    unreadable = values[np.asarray(lost) & ~cells.is_missing(values, cells.MISSING_NUMBERS)]
    return _noted(column, _uncounted(unreadable)) if len(unreadable) else column


def _date(name: str, dates: pd.DatetimeIndex, style: str, remark: str) -> Column:
    present = dates.dropna()
    if not len(present):
        return Column(name, "dropped", "dropped, no values")
    if present.nunique() == 1 and len(present) == len(dates):
        return Column(name, "dropped", f"dropped, always {present[0]}")
    parts = ["days", *(part for part, own in DATE_PARTS.items() if getattr(present, own).nunique() > 1)]
    said = ", ".join(["days since first", *parts[1:]])
    first, missing = str(present.min()), len(present) < len(dates)
    return Column(name, "date", f"date{remark} → {said}", style=style, first=first, parts=tuple(parts), missing=missing)


def _as_texts(name: str, present: np.ndarray, missing: bool) -> Column:
    """A column of categories, ids or free text."""
    folded = cells.once_each(present, lambda text: canonical(text).casefold())
    levels, words = pd.unique(folded), np.mean([len(text.split()) for text in present])
    if len(levels) == 1 and not missing:
        return Column(name, "dropped", f"dropped, always '{present[0].strip()}'")
    differing = len(levels) == len(present) > 2 or len(levels) > max(10, len(present) / 2)
    if differing and words < SENTENCE_WORDS:
        return Column(name, "dropped", _differing(levels, present))
    if _are_codes(name) and len(levels) > MOST_LEVELS:
        return Column(name, "dropped", f"dropped, {len(levels)} different codes")
    if differing or (words >= SENTENCE_WORDS and len(levels) > MOST_LEVELS):
        return _text(name, present, missing)
    return _category(name, present, missing)


def canonical(text: str) -> str:
    """A category in its plain form: no blanks around, single ones within, and 1 for 1.0."""
    plain = " ".join(text.split())
    try:
        number = float(plain)
        return str(int(number)) if number.is_integer() and not (plain[0] == "0" and plain.isdigit()) else plain
    except (ValueError, OverflowError):
        return plain


def _category(name: str, present: np.ndarray, missing: bool) -> Column:
    plain = cells.once_each(present, canonical)
    counts = Counter(cells.once_each(plain, str.casefold).tolist())
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    frequent = [level for level, rows in ordered[:MOST_LEVELS] if rows >= RARE_ROWS]
    if len(counts) - len(frequent) < 2 and len(counts) <= MOST_LEVELS:
        frequent = list(counts)
    rare = len(counts) - len(frequent)
    note = f"{len(counts)} categories" + (f", of which {rare} are rare and count as one" if rare else "")
    if (merged := len(set(plain.tolist())) - len(counts)) > 0:
        note += f"; upper and lower case are one ({merged} spelling{'s' * (merged > 1)})"
    return Column(name, "category", note, levels=tuple(sorted(frequent)), rare=rare > 0, missing=missing)


def _text(name: str, present: np.ndarray, missing: bool) -> Column:
    counts = Counter(word for text in present for word in set(WORD.findall(text.casefold())))
    low, high = (share * len(present) for share in WORD_SHARES)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    words = [word for word, rows in ordered if low <= rows <= high][:TEXT_WORDS]
    said = f", and whether it has {', '.join(repr(word) for word in words)}" if words else ""
    return Column(name, "text", f"free text → number of words{said}", parts=tuple(words), missing=missing)


# ------------------------------------------------------------------ what its cells say


@dataclass
class Read:
    """What the cells of a column say.

    Attributes:
        values: The columns that it becomes, by name: floats, or texts with None where they are missing.
        absent: Cells without a value.
        unreadable: Cells with one that cannot be read as what the column is.
    """

    values: dict[str, np.ndarray]
    absent: np.ndarray
    unreadable: np.ndarray


def read_column(column: Column, values: Any) -> Read:
    """Reads the cells of a column, from ``as_cells``, as what it was understood to be."""
    words = cells.MISSING_NUMBERS if column.kind in ("number", "date", "time") else cells.MISSING_WORDS
    if isinstance(values, pd.DatetimeIndex):
        absent = np.asarray(values.isna())
    elif values.dtype == object:
        absent = cells.is_missing(values, words & _missing_words(values) | (words - cells.MISSING_WORDS))
    else:
        absent = np.isnan(values)
    if column.kind == "date":
        dates = _read_date(column, values)
        parts = _date_parts(column, dates)
        return Read(dict(zip(column.outputs, parts, strict=True)), absent, np.asarray(dates.isna()) & ~absent)
    if column.kind in ("category", "text"):
        return Read(_read_texts(column, _as_text_array(values), absent), absent, np.zeros(len(values), dtype=bool))
    numbers = _read_number(column, values)
    return Read({column.name: np.where(absent, np.nan, numbers)}, absent, np.isnan(numbers) & ~absent)


def _read_number(column: Column, values: Any) -> np.ndarray:
    if isinstance(values, pd.DatetimeIndex):
        return np.full(len(values), np.nan)
    if values.dtype != object:
        return values.astype(float)
    if column.kind == "time":
        return cells.read_times(values, column.style)
    if column.kind == "truth":
        truths = cells.read_truths(values)
        numbers = cells.read_numbers(values, column.decimal)  # 1 and 0 are as good as yes and no
        return np.where(np.isnan(truths) & np.isin(numbers, (0.0, 1.0)), numbers, truths)
    return cells.read_numbers(values, column.decimal)


def _read_date(column: Column, values: Any) -> pd.DatetimeIndex:
    if isinstance(values, pd.DatetimeIndex):
        return values
    return cells.read_dates(_as_text_array(values), column.style or "ISO8601")


def _date_parts(column: Column, dates: pd.DatetimeIndex) -> list[np.ndarray]:
    days = np.asarray((dates - pd.Timestamp(column.first)) / pd.Timedelta(days=1), dtype=float)
    known = {part: getattr(dates, own) for part, own in DATE_PARTS.items()} | {"days": days}
    return [np.asarray(known[part], dtype=float) for part in column.parts]


def _as_text_array(values: Any) -> np.ndarray:
    if isinstance(values, pd.DatetimeIndex) or values.dtype != object:
        return np.array([as_text(value) for value in pd.Series(values)], dtype=object)
    return values


def _read_texts(column: Column, texts: np.ndarray, absent: np.ndarray) -> dict[str, np.ndarray]:
    if column.kind == "text":
        count = np.array([len(text.split()) for text in texts], dtype=float)
        found = [set(WORD.findall(text.casefold())) for text in texts]
        flags = [np.array([word in own for own in found], dtype=float) for word in column.parts]
        parts = [np.where(absent, np.nan, part) for part in (count, *flags)]
        return dict(zip(column.outputs, parts, strict=True))
    known = frozenset(column.levels)

    def read(text: str) -> str:
        level = canonical(text).casefold()
        return level if level in known or not column.rare else RARE

    levels = cells.once_each(texts, read)
    levels[absent] = None
    return {column.name: levels}
