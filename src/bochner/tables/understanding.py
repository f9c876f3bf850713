"""Columns understood: what each column of a table is, from its cells and its name.

``skrub.TableVectorizer`` is not used: to it '$1,200', '12,5' and '3 kg' are texts, and it does not say in words what it did.
"""

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from bochner.errors import listed, shown
from bochner.tables import cells, dates
from bochner.tables.cells import plain_form
from bochner.tables.columns import (
    DATE_PARTS,
    READABLE_SHARE,
    UNIT_SOMETIMES,
    WORD,
    Column,
    is_text,
    missing_words,
    read_column,
    votes_of,
)

FEW_LEVELS = 20  # different values up to which numbers with some words among them are categories
MAX_LEVELS = 50  # categories that are kept; the others are rare
MIN_LEVEL_ROWS = 3  # a category of fewer rows is rare
SENTENCE_WORDS = 3  # mean words a cell from which on texts that all differ are free text, and not names
MAX_TEXT_WORDS = 8  # frequent words of a free text that become columns
WORD_SHARES = (0.05, 0.8)  # shares of rows in which such a word must be
CODE_SHARE = 0.02  # share of different cells that must begin with a zero for a column to hold codes
# Numbers that instruments, surveys and data bases write for a missing one.
CODES_FOR_MISSING = frozenset({*(-(10.0**k - 1) for k in range(2, 8)), *(10.0**k - 1 for k in range(3, 11)), 1e10})
COUNTING_SHARE = 0.95  # share of steps of one between numbers that count the rows
MIN_ROW_NUMBERS = 10  # whole numbers that follow each other from which on they number the rows
ID_WORDS = frozenset({"id", "ids", "uuid", "guid", "identifier", "sku", "unnamed"})
ID_ENDINGS = frozenset({"key", "ref"})  # as the last word of a name
ID_NAMES = frozenset({"index", "idx", "no", "nr"})  # as the whole name
CODE_WORDS = frozenset({"zip", "zipcode", "plz", "postcode", "postal", "phone", "tel", "mobile", "fax"})
CODE_DIGITS = 4  # least number of digits of most values in a column of such codes
TIME_WORDS = frozenset({"year", "month", "week", "day", "hour", "time", "date", "quarter", "jahr", "monat", "t"})
FAR_YEAR = 2200  # first year that stands for no date at all, as in 9999-12-31
ROW_NUMBERS = "dropped, numbers the rows"  # how the note of such a column begins
FAR_GROUPED = 50.0  # times that numbers such as 1,500 are larger than all others where a note asks about the comma
PLAIN_YEARS = (2000, 2039)  # first and last year that everybody writes with two digits


def understand(
    name: str, values: Any, decimal: str | None = None, votes: cells.Votes | None = None, keep: bool = False
) -> Column:
    """What a column is, from all its cells.

    Args:
        name: Its name.
        values: Its cells, from ``as_cells``.
        decimal: The decimal sign of the file, for cells that leave a doubt.
        votes: From ``votes_of``, where it is known already.
        keep: Whether the user says that it holds no ids, codes or numbers of the rows.
    """
    column = _classify(name, values, decimal, votes or votes_of(values), keep)
    if column.kind == "dropped":
        return column
    read = read_column(column, values)
    if not (absent := int(read.absent.sum())):
        constant = all(len(pd.unique(part)) == 1 for part in read.values.values())
        why = "texts that share no words" if column.kind == "text" else "becomes the same in every row"
        return replace(column, kind="dropped", note=f"dropped, {why}") if constant else column
    return replace(column, note=f"{column.note}; {absent} missing", missing=True)


def _classify(name: str, values: Any, decimal: str | None, votes: cells.Votes, keep: bool) -> Column:
    """A column by its type or, where it holds text, by the first of truths, numbers, dates and texts that fits."""
    if isinstance(values, pd.DatetimeIndex):
        return _date(name, values, "", "")
    if values.dtype != object:
        return _number(name, values, "number", "", keep)
    absent = cells.is_missing(values, missing_words(values))
    present, missing = cells.leave_out(values, absent), bool(absent.any())
    if not len(present):
        return Column(name, "dropped", "dropped, no values")
    levels = pd.unique(present)
    answers = cells.leave_out(levels, cells.is_missing(levels, cells.MISSING_NUMBERS))
    if cells.plain_numbers(present) is None and set(cells.read_truths(answers).tolist()) == {0.0, 1.0}:
        truths = cells.read_truths(answers)
        yes, no = (", ".join(sorted({text.strip() for text in answers[truths == v]})) for v in (1, 0))
        return Column(name, "truth", f"{yes} → 1, {no} → 0", missing=missing or len(answers) < len(levels))
    column = _as_numbers(name, values, levels, votes, decimal, keep) or _as_dates(name, values, levels)
    column = column or _as_texts(name, present, missing, keep)
    if column.kind == "dropped" and not column.parts and dates.are_like_dates(levels, READABLE_SHARE):
        ordered = sorted(levels.tolist(), key=dates.date_form)
        some = listed(ordered[:: max(1, len(levels) - 1)][:2])
        if dates.date_form(ordered[0]) == dates.date_form(ordered[-1]):
            return replace(
                column, note=f"dropped, dates in a form that is not known ({some}); write them as 2024-01-31"
            )
        return replace(column, note=f"dropped, dates written in several ways ({some}); write them in one")
    return column


def understand_choices(name: str, values: np.ndarray) -> Column:
    """A column of numbers that pandas holds as categories."""
    absent = cells.is_missing(values)
    if len(levels := pd.unique(values[~absent])) < 2:
        return Column(name, "dropped", f"dropped, always '{shown(levels[0])}'" if len(levels) else "dropped, no values")
    column = _category(name, values[~absent], bool(absent.any()))
    return replace(column, note=f"{column.note}; {absent.sum()} missing") if absent.any() else column


def adapted(column: Column, values: Any, decimal: str | None, votes: cells.Votes | None) -> Column:
    """The same column for new rows that write its numbers or dates in another way.

    Args:
        column: As it was understood in training.
        values: Its cells in the new rows, from ``as_cells``.
        decimal: The decimal sign of the new rows, from all their columns.
        votes: What a column of numbers says about the sign.
    """
    if not is_text(values):
        return column
    if column.kind == "number":
        sign = (votes.sign if votes else "") or decimal or column.decimal
        return column if sign == column.decimal else replace(column, decimal=sign)
    if column.kind in ("date", "time"):
        read = read_column(column, values)
        if read.unreadable.sum() > (1 - READABLE_SHARE) * (~read.absent).sum():
            now = _as_dates(column.name, values, pd.unique(values[~read.absent]))
            if now is not None and now.kind == column.kind:
                return replace(column, style=now.style)
    return column


def _as_numbers(
    name: str, values: np.ndarray, levels: np.ndarray, votes: cells.Votes, file_sign: str | None, keep: bool
) -> Column | None:
    """A column of numbers, with a unit or without; None where it does not hold numbers."""
    decimal, remark = cells.column_sign(votes, file_sign)
    if (votes.point if decimal == "." else votes.comma) < READABLE_SHARE:
        return None
    absent, amounts = cells.is_missing(values, cells.MISSING_NUMBERS), cells.has_thousands(levels)
    numbers = np.where(absent, np.nan, cells.read_numbers(values, decimal, amounts))
    readable = np.isfinite(numbers)
    unreadable = values[~readable & ~absent]
    bounds = np.zeros(0) if cells.plain_numbers(values) is not None else values[_are_bounds(values) & readable]
    if (
        (not keep and (_have_zeros_in_front(levels) or _are_codes(name, numbers[readable])))
        or np.mean(readable[~absent]) < READABLE_SHARE
        or (len(unreadable) and len(levels) <= FEW_LEVELS)
        or 2 * len(pd.unique(bounds)) > len(levels)
    ):
        return None  # codes such as 007; 1, 2, 3, 4, 5+; <18 and >18
    if readable.all() and len(levels) > 2 and all(len(text.strip()) == 8 for text in levels):
        if (style := dates.date_style(levels, 1.0)) is not None:  # 20261118
            return _date(name, dates.read_dates(values, style[0]), style[0], "")
    counts = cells.count_units(cells.leave_out(values, absent), decimal, amounts)
    units = cells.unit_spellings(counts)
    if len(units) > 1:
        return _in_several_units(name, units)
    unit = units[0][0] if units else ""
    commas = decimal == "," and votes.comma > votes.point
    what = "number" + (f" in {unit}" if unit else "") + (" with decimal commas" if commas else "")
    column = _number(name, numbers, what + (f" ({remark})" if remark else ""), unit, keep)
    remarks = _describe_units(units, counts[""])
    if amounts and any(cells.SHORT_MILLIONS.search(text) for text in levels):
        remarks.append("m and b are millions and billions, as beside k")
    if len(bounds):
        value = cells.read_numbers(bounds[:1], decimal, amounts)[0]
        remarks.append(f"{len(bounds)} cells such as {shown(bounds[0].strip())} are taken as {value:g}")
    if len(unreadable):
        remarks.append(_describe_unreadable(unreadable))
    if grouped := _far_grouped(levels, numbers[readable], decimal):
        remarks.append(grouped)
    for remark in remarks:
        column = _with_remark(column, remark)
    return replace(column, decimal=decimal, style=cells.AMOUNTS if amounts and column.kind == "number" else "")


def _far_grouped(levels: np.ndarray, numbers: np.ndarray, decimal: str) -> str:
    """What is said of numbers such as 1,500 that lie far above all others, such as 1.400: the comma may be a decimal sign."""
    mark = {".": ",", ",": "."}[decimal]
    grouped = [text for text in levels if mark in text and decimal not in text]
    values = cells.read_numbers(grouped, decimal) if grouped else np.zeros(0)
    least = np.abs(values[np.isfinite(values)]).min(initial=np.inf)
    others = np.abs(numbers[np.abs(numbers) < least])
    if not np.isfinite(least) or not len(others) or least < FAR_GROUPED * others.max():
        return ""
    number = int((np.abs(numbers) >= least).sum())
    cell = shown(grouped[0])
    return f"{number} cells such as '{cell}' are {values[0]:g}, far above all others: is '{mark}' a decimal sign there?"


def _have_zeros_in_front(levels: np.ndarray) -> bool:
    """Whether different texts are codes such as 007."""
    zeros = sum(len(text) > 1 and text.isdigit() for text in levels if text[:1] == "0")
    return zeros > max(1, CODE_SHARE * len(levels)) or zeros == len(levels)


def _in_several_units(name: str, units: list[list[str]]) -> Column | None:
    """A column whose numbers are in several units is dropped; None where the units are words, as in 2 rooms and 1 studio."""
    if sum(cells.is_measure(spellings[0]) for spellings in units) < 2:
        return None
    signs = sorted(spellings[0] for spellings in units)
    return Column(name, "dropped", f"dropped, several units ({', '.join(signs[:5])})")


def _describe_units(units: list[list[str]], bare: int) -> list[str]:
    """What is said of a unit, from its spellings and the number of cells without it."""
    if not units:
        return []
    remarks = [f"{listed(sorted(units[0]))} are one unit"] if len(units[0]) > 1 else []
    return remarks + ([f"{bare} {UNIT_SOMETIMES} '{units[0][0]}', which are taken as they are"] if bare else [])


def _are_bounds(texts: np.ndarray) -> np.ndarray:
    """Which texts are bounds such as <5."""
    return cells.once_each(texts, lambda text: cells.BOUND.match(text) is not None).astype(bool)


def _describe_unreadable(unreadable: np.ndarray) -> str:
    """What is said of cells that are not what the rest of the column is."""
    return f"{len(unreadable)} cells that are none, such as '{shown(unreadable[0])}', count as missing"


def _with_remark(column: Column, remark: str) -> Column:
    """The column with one more remark in its note, unless it is dropped."""
    return column if column.kind == "dropped" else replace(column, note=f"{column.note}; {remark}")


def _number(name: str, numbers: np.ndarray, what: str, unit: str, keep: bool) -> Column:
    """A column of numbers that have been read; ids, row numbers and constants are dropped, and codes are categories.

    Args:
        name: The column's name.
        numbers: Its numbers, NaN where they are missing.
        what: What its note says if it is used as a number.
        unit: Its currency or unit, or "".
        keep: Whether it is used as a number whatever its name is.
    """
    present = numbers[np.isfinite(numbers)]
    missing = len(present) < len(numbers)
    if not len(present):
        return Column(name, "dropped", "dropped, no values")
    levels = pd.unique(present)
    if len(levels) == 1 and not missing:
        return Column(name, "dropped", f"dropped, always {present[0]:g}")
    codes = _are_codes(name, present)
    if not keep and (codes or _names_ids(name)) and not unit and bool((present == np.round(present)).all()):
        if len(levels) > max(10, len(present) / 2):
            return Column(name, "dropped", _describe_ids(levels, present))
        if len(levels) <= MAX_LEVELS:
            return _category(name, np.array([plain_form(str(v)) for v in present], dtype=object), missing)
        if codes:
            return Column(name, "dropped", f"dropped, {len(levels)} different codes")
    if code := code_for_missing(present):
        what += (
            f"; {code[1]} cells are {code[0]:g}, far from all others: is it a word for missing? They count as numbers"
        )
    if not keep and not unit and _are_row_numbers(name, numbers):
        return Column(name, "dropped", f"{ROW_NUMBERS} ({present[0]:g} to {present[-1]:g})")
    return Column(name, "number", what, unit=unit, missing=missing)


def code_for_missing(present: np.ndarray) -> tuple[float, int] | None:
    """The least or largest number and how often it comes, where it is -99, 999, 9999 or so and far from all others."""
    for code in (float(present.min()), float(present.max())):
        others = present[present != code]
        count = len(present) - len(others)
        if code not in CODES_FOR_MISSING or count < 2 or not len(others):
            continue
        if min(abs(others.min() - code), abs(others.max() - code)) > others.max() - others.min():
            return code, count
    return None


def _describe_ids(levels: np.ndarray, present: np.ndarray) -> str:
    """Why a column of ids is dropped."""
    return f"dropped, {'every value differs' if len(levels) == len(present) else 'most values differ'}"


def _words(name: str) -> list[str]:
    """The words of a column's name: ad, id of ad_id and adId."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", str(name))]


def _names_ids(name: str) -> bool:
    """Whether the numbers of a column are ids, by the column's name: ad_id, customerId, Unnamed: 0."""
    words = _words(name)
    ends = bool(words) and (words[-1] in ID_ENDINGS or (len(words) == 1 and words[0] in ID_NAMES))
    return ends or bool(ID_WORDS & set(words))


def _are_codes(name: str, numbers: np.ndarray) -> bool:
    """Whether the numbers of a column are codes, by the column's name (zip, phone) and their digits."""
    if not CODE_WORDS & set(_words(name)) or not len(numbers) or (numbers != np.round(numbers)).any():
        return False
    return bool(np.mean(np.abs(numbers) >= 10 ** (CODE_DIGITS - 1)) >= READABLE_SHARE)


def _are_written_codes(name: str, texts: np.ndarray) -> bool:
    """Whether the texts of a column are codes, by the column's name and their digits."""
    if not CODE_WORDS & set(_words(name)):
        return False
    return bool(np.mean([sum(map(str.isdigit, text)) >= CODE_DIGITS for text in texts]) >= READABLE_SHARE)


def _are_row_numbers(name: str, numbers: np.ndarray) -> bool:
    """Whether numbers count the rows; years and other times that do are kept."""
    if len(numbers) < MIN_ROW_NUMBERS or numbers[0] != np.round(numbers[0]) or TIME_WORDS & set(_words(name)):
        return False
    steps = np.diff(numbers)  # some rows may be left out
    return bool((steps >= 1).all() and np.mean(steps == 1) >= COUNTING_SHARE)


def _as_dates(name: str, values: np.ndarray, levels: np.ndarray) -> Column | None:
    """A column of dates or of times of day; None where it holds neither."""
    if (dated := dates.date_style(levels, READABLE_SHARE)) is not None:
        style, unclear = dated
        order = "month before day" if style.find("%m") < style.find("%d") else "day before month"
        days = dates.read_dates(values, style)
        column, unread = _date(name, days, style, f" ({order}, which the cells leave open)" * unclear), days.isna()
        if "%y" in style and not ((days.year >= PLAIN_YEARS[0]) & (days.year <= PLAIN_YEARS[1]))[days.notna()].all():
            column = _with_remark(column, "years of two digits: 69-99 are 19.., 00-68 are 20..")
        if len(zones := dates.far_zones(levels)) > 1:
            column = _with_remark(column, f"several time zones ({listed(zones)}), each of which is taken as local time")
    elif (style := dates.time_style(levels, READABLE_SHARE)) is not None:
        unread = np.isnan(dates.read_times(values, style))
        column = Column(name, "time", "time → hours", style=style, missing=bool(unread.any()))
    else:
        return None
    unreadable = values[np.asarray(unread) & ~cells.is_missing(values, cells.MISSING_NUMBERS)]
    return _with_remark(column, _describe_unreadable(unreadable)) if len(unreadable) else column


def _date(name: str, days: pd.DatetimeIndex, style: str, remark: str) -> Column:
    """A column of dates that have been read: days since the first one and those of their parts that vary."""
    present = days.dropna()
    if not len(present):
        return Column(name, "dropped", "dropped, no values")
    if present.nunique() == 1 and len(present) == len(days):
        return Column(name, "dropped", f"dropped, always {present[0]}")
    parts = [
        "days",
        *(part for part, name_in_pandas in DATE_PARTS.items() if getattr(present, name_in_pandas).nunique() > 1),
    ]
    shown_parts = ", ".join(["days since first", *parts[1:]])
    first, missing = str(present.min()), len(present) < len(days)
    if far := int((np.asarray(present.year) >= FAR_YEAR).sum()):
        remark += f" ({far} cells such as {str(present.max())[:10]} are far after all others: do they mean no date?)"
    return Column(
        name, "date", f"date{remark} → {shown_parts}", style=style, first=first, parts=tuple(parts), missing=missing
    )


def _as_texts(name: str, present: np.ndarray, missing: bool, keep: bool) -> Column:
    """A column of categories, ids or free text."""
    folded = cells.once_each(present, lambda text: plain_form(text).casefold())
    levels, words = pd.unique(folded), np.mean([len(text.split()) for text in present])
    if len(levels) == 1 and not missing:
        return Column(name, "dropped", f"dropped, always '{shown(present[0].strip())}'")
    mostly_different = len(levels) == len(present) > 2 or len(levels) > max(10, len(present) / 2)
    if not keep and mostly_different and words < SENTENCE_WORDS:
        return Column(name, "dropped", _describe_ids(levels, present))
    if not keep and len(levels) > MAX_LEVELS and _are_written_codes(name, present):
        return Column(name, "dropped", f"dropped, {len(levels)} different codes")
    if mostly_different or (words >= SENTENCE_WORDS and len(levels) > MAX_LEVELS):
        return _text(name, present, missing)
    return _category(name, present, missing)


def _category(name: str, present: np.ndarray, missing: bool) -> Column:
    """A column of categories; rare ones count as one."""
    plain = cells.once_each(present, plain_form)
    counts = Counter(cells.once_each(plain, str.casefold).tolist())
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    frequent = [level for level, rows in ordered[:MAX_LEVELS] if rows >= MIN_LEVEL_ROWS]
    if len(counts) - len(frequent) < 2 and len(counts) <= MAX_LEVELS:
        frequent = list(counts)
    rare = len(counts) - len(frequent)
    share = 1 - sum(counts[level] for level in frequent) / len(present) if rare else 0.0
    note = f"{len(counts)} categories" + (f", of which {rare} are rare and count as one" if rare else "")
    if (merged := len(set(plain.tolist())) - len(counts)) > 0:
        note += f"; upper and lower case are one ({merged} spelling{'s' * (merged > 1)})"
    if equal := _equal_numbers(present, plain):
        note += f"; {listed(equal)} are one category"
    return Column(name, "category", note, levels=tuple(sorted(frequent)), rare=share, missing=missing)


def _equal_numbers(present: np.ndarray, plain: np.ndarray) -> list[str]:
    """Spellings of the first number that is written in several ways, such as 1 and 1.0; none if there is no such number.

    Args:
        present: The cells.
        plain: Their plain forms.
    """
    spellings: dict[str, set[str]] = {}
    for level, text in zip(plain.tolist(), cells.once_each(present, cells.single_blanks).tolist(), strict=True):
        spellings.setdefault(level, set()).add(text)
    return next((sorted(written) for _, written in sorted(spellings.items()) if len(written) > 1), [])


def _text(name: str, present: np.ndarray, missing: bool) -> Column:
    """A column of free text: its number of words, and whether it holds each of its frequent words."""
    counts = Counter(word for text in present for word in set(WORD.findall(text.casefold())))
    low, high = (share * len(present) for share in WORD_SHARES)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    words = [word for word, rows in ordered if low <= rows <= high][:MAX_TEXT_WORDS]
    remark = f", and whether it has {', '.join(repr(word) for word in words)}" if words else ""
    return Column(name, "text", f"free text → number of words{remark}", parts=tuple(words), missing=missing)
