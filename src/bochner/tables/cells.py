"""Single cells: how texts are read as numbers with units and as truths, and which words mean that a value is missing.

All cells of a column are read by one rule, which depends on all of them. Dates and times are read in ``dates``.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

# Lower case. Words of the second set mean that a number or a date is missing; among categories 'none' is an answer.
MISSING_WORDS = frozenset(
    {"", "na", "n/a", "n.a.", "#n/a", "#na", "nan", "<na>", "nat", "null", "?", "-", "--", "–", "—"}
    | {
        "#div/0!",
        "#value!",
        "#ref!",
        "#name?",
        "#num!",
        "#null!",
        "#nv",
        "#wert!",
        "#bezug!",
        "#zahl!",
        "#valeur!",
    }  # of Excel
)
MISSING_NUMBERS = (
    MISSING_WORDS
    | {"none", "nil", ".", "..", "...", "missing", "unknown", "tbd", "not specified", "no answer", "prefer not to say"}
    | {
        "unbekannt",
        "k.a.",
        "k. a.",
        "keine angabe",
        "inconnu",
        "non renseigné",
        "desconocido",
        "sconosciuto",
        "onbekend",
    }
)
TRUTHS = {
    word: truth
    for truth, words in ((1.0, "true yes y t ja oui sí si on"), (0.0, "false no n f nein non off"))
    for word in words.split()
}

CURRENCIES = (
    r"US\$|R\$|A\$|C\$|[$€£¥₹₩₽₺₫₴₦₱฿₪]|USD|EUR|GBP|CHF|JPY|CNY|INR|SEK|NOK|DKK|PLN|CZK|HUF|RON|CAD|AUD|NZD|BRL|MXN|RUB|"
    r"TRY|ZAR|KRW|SGD|HKD|ILS|THB|kr\.?|zł|Kč|Rs\.?|Fr\.?"
)
MEASURES = r"%|‰|°[CF]?|(?:k|c|m)?m[²³]?|m2|(?:k|m)?g|lbs?|h|hrs?|min|s|ms|m?l|k?Wh?|hp|mph|km/h|[kMGT]B|sqft|ft"
UNITS = rf"{MEASURES}|\s[^\W\d_]{{1,12}}\.?"
# Names of each unit in lower case and without an s at the end; the first one stands for all of them.
UNIT_SPELLINGS = (
    "usd $ us$ dollar; eur € euro; gbp £; jpy ¥ yen; inr ₹ rs rupee; krw ₩; rub ₽; try ₺; vnd ₫; uah ₴; ngn ₦; php ₱; thb ฿; "
    "ils ₪; brl r$; aud a$; cad c$; pln zł; czk kč; % percent pct; m² m2 sqm; m meter metre; km kilometer kilometre; "
    "in inch inche; ft foot feet; mi mile; g gram; kg kilogram; lb pound; oz ounce; l liter litre; s sec second; "
    "min minute; h hr hour; day d; week wk; month mo; year yr"
)
UNIT_NAMES = {name: names[0] for names in map(str.split, UNIT_SPELLINGS.split(";")) for name in names}
CASE_TELLS = frozenset({"m", "g", "mw", "mj", "mpa", "mhz", "mv"})  # in lower case: other units in upper case
FEW_TEXTS = 100  # texts up to which a dictionary finds the different ones sooner than pandas does
BLANKS = " \u00a0\u202f\u2009"
# Blanks of no width, byte-order marks and marks of direction: they come with copied text.
INVISIBLE = dict.fromkeys([0x200B, 0x200E, 0x200F, *range(0x202A, 0x202F), 0x2060, *range(0x2066, 0x206A), 0xFEFF])


def _number_pattern(decimal: str, multiples: str) -> re.Pattern[str]:
    """A number under one decimal sign, with separators of thousands, a multiple such as k, and a currency or unit."""
    separators = {".": ",", ",": "."}[decimal] + "'’" + BLANKS
    whole = rf"[1-9]\d{{0,2}}(?P<separator>[{separators}])(?:\d{{2,3}}(?P=separator))*\d{{3}}|\d+|(?=[{decimal}]\d)"
    number = rf"(?P<number>(?:{whole})(?:[{decimal}]\d*)?(?:[eE][-+]?\d+)?)"
    signs = r"(?P<minus>[-−–])?\+?"
    prefix = rf"(?P<prefix>{CURRENCIES})?[{BLANKS}]*"
    times = rf"(?P<times>(?:{multiples}){AMOUNT_END})?"
    suffix = rf"[{BLANKS}]*(?P<suffix>(?:{CURRENCIES}|{UNITS})(?:/(?:\d{{1,4}}[{BLANKS}]?)?[^\W\d_]{{1,6}}[²³]?)?)?"
    # Accountants write (12.50) for −12.50, and SAP writes 12.50-.
    inside = rf"{signs}{prefix}(?P<inner>[-−])?{number}(?P<behind>[-−])?{times}{suffix}"
    return re.compile(rf"(?P<bracket>\()?{inside}(?(bracket)\))")


AMOUNT_END = rf"(?=[{BLANKS}]*(?:{CURRENCIES})?\)?$)"
MULTIPLES = (
    rf"[kKM]|[{BLANKS}]?(?:[bB]n|[tT]housand|[tT]sd\.?|[mM]illions?|[bB]illions?|M(?:io|rd)\.?)"  # 12k, 1.5M, 3bn
)
AMOUNT_MULTIPLES = rf"{MULTIPLES}|[{BLANKS}]?(?:[kKmMbB]|[mM]n)"  # where amounts of money are meant also 1.2m and 2B
AMOUNTS = "amounts"  # style of a column of numbers in which these are meant everywhere
THOUSANDS = re.compile(rf"\d[kK]{AMOUNT_END}")
SHORT_MILLIONS = re.compile(rf"\d[{BLANKS}]?(?:[mM]n|[mbB]){AMOUNT_END}")
CURRENCY = re.compile(CURRENCIES)
MEASURE = re.compile(f"{CURRENCIES}|{MEASURES}", re.IGNORECASE)
ABOUT = re.compile(r"^(?:ca\.?|approx\.?|about|[~≈<>])\s*(?=\D?\d)", re.IGNORECASE)
BOUND = re.compile(r"\s*[<>]\s*\D?\d")  # <5 and >5
NO_CENTS = re.compile(r"(?<=\d)[.,][-–—]{1,2}(?=\s|$)")  # 12,- €
MULTIPLIERS = {"k": 1e3, "t": 1e3, "m": 1e6, "b": 1e9}  # by the first letter
NUMBERS = {
    (decimal, multiples): _number_pattern(decimal, multiples)
    for decimal in ".,"
    for multiples in (MULTIPLES, AMOUNT_MULTIPLES)
}


def as_text(value: object) -> str:
    """A cell as text, from which the same value can be read again; empty where it is missing."""
    if isinstance(value, str):
        return value
    missing = pd.isna(value)  # pyright: ignore[reportArgumentType, reportCallIssue]
    if isinstance(missing, bool | np.bool_) and missing:  # of a cell that is an array, it is an array
        return ""
    return value.isoformat() if hasattr(value, "isoformat") else str(value)  # pyright: ignore[reportAttributeAccessIssue]


PLAIN_NUMBER = re.compile(r"[-+]?(?:\d{1,400}\.?\d{0,400}|\.\d{1,400})(?:[eE][-+]?\d{1,3})?")


def single_blanks(text: str) -> str:
    """A text without invisible characters and blanks around it, with single blanks within, and é as one letter."""
    if not text.isascii():
        text = unicodedata.normalize("NFC", text.translate(INVISIBLE))
    return " ".join(text.split())


def plain_form(text: str, decimal: str = ".") -> str:
    """A category or label in the form in which equal ones are equal: no blanks around it, single ones within, and 1 for 1.0.

    Codes such as 007 stay. No digit is lost, however many there are. é is one letter, also where it is written as e and an accent.
    """
    plain = single_blanks(text)
    number = plain.replace(decimal, ".")
    if PLAIN_NUMBER.fullmatch(number) is None or (plain[0] == "0" and plain.isdigit()):
        return plain
    digits = format(Decimal(number), "f")
    if "." in digits:
        digits = digits.rstrip("0").rstrip(".")
    return "0" if digits == "-0" else digits


def once_each(texts: Any, read: Callable[[str], Any]) -> np.ndarray:
    """The results of a function for every text; it is called once for each different text."""
    if len(texts) <= FEW_TEXTS:  # as in a request with one row: a dictionary is ready before pandas has begun
        results: dict[str, Any] = {}
        for text in texts:
            if text not in results:
                results[text] = read(text)
        answers = np.empty(len(texts), dtype=object)
        answers[:] = [results[text] for text in texts]
        return answers
    codes, levels = pd.factorize(np.asarray(texts, dtype=object))
    return (
        np.array([read(level) for level in levels], dtype=object)[codes] if len(levels) else np.zeros(0, dtype=object)
    )


def is_missing(texts: Any, words: frozenset[str] = MISSING_WORDS) -> np.ndarray:
    """Which texts mean that there is no value."""
    if plain_numbers(texts) is not None:  # no such word is a number; this is far quicker
        return np.zeros(len(texts), dtype=bool)
    return once_each(texts, lambda text: text.strip().lower() in words).astype(bool)


def leave_out(texts: np.ndarray, absent: np.ndarray) -> np.ndarray:
    """The texts without the absent ones; the same array where none is absent."""
    return texts[~absent] if absent.any() else texts


def as_number(text: str, decimal: str, amounts: bool = False) -> tuple[float, str] | None:
    """A number and its unit; None where the text is not a number.

    With ``amounts``, as beside every currency, 1.2m and 3b are millions and billions.
    """
    visible = text if text.isascii() else text.translate(INVISIBLE)
    bare = ABOUT.sub("", NO_CENTS.sub("", visible.strip().strip("'").strip()))
    multiples = AMOUNT_MULTIPLES if amounts or CURRENCY.search(bare) else MULTIPLES
    match = NUMBERS[decimal, multiples].fullmatch(bare)
    if match is None or (match["prefix"] and match["suffix"]):
        return None
    digits = match["number"]
    if match["separator"]:
        if "e" in digits.lower():  # nobody writes 1,234e5
            return None
        digits = digits.replace(match["separator"], "")
    elif match["behind"] and decimal not in digits:  # 2- may be a grade
        return None
    value = float(digits.replace(decimal, ".")) * _multiplier(match["times"] or "")
    negative = bool(match["minus"] or match["inner"] or match["behind"] or match["bracket"])
    return (-value if negative else value), (match["prefix"] or match["suffix"] or "").strip()


def _multiplier(multiple: str) -> float:
    """What a word behind a number multiplies it by."""
    letters = multiple.strip(BLANKS).lower()
    return 1e9 if letters.startswith("mrd") else MULTIPLIERS.get(letters[:1], 1.0)


def as_plain_number(text: str) -> float:
    """A number as programs write it; NaN where the text is not such a number, or not a finite one."""
    try:
        value = float(text)
    except ValueError:
        return np.nan
    return value if np.isfinite(value) and "_" not in text else np.nan


_last_plain: tuple[Any, np.ndarray | None] = ((), None)  # the cells that were asked for last, and the answer


def plain_numbers(texts: Any) -> np.ndarray | None:
    """All texts as numbers where all are written as programs write them, which is quick; else None.

    Every question about a column begins with this one, so the last answer is kept. Nobody may change the texts in place.
    """
    global _last_plain
    asked, values = _last_plain  # read at once: threads may differ
    if asked is not texts:
        values = _plain_numbers(texts)
        _last_plain = texts, values
    return values if values is None else values.copy()


def _plain_numbers(texts: Any) -> np.ndarray | None:
    try:
        values = np.asarray(texts, dtype=object).astype(float)
    except ValueError:
        return None
    return values if np.isfinite(values).all() and "_" not in "".join(texts) else None


def read_numbers(texts: Any, decimal: str, amounts: bool = False) -> np.ndarray:
    """Finite numbers; NaN where a text is not one. For ``amounts`` see ``as_number``."""
    if decimal == "." and (values := plain_numbers(texts)) is not None:
        return values

    def read(text: str) -> float:
        if (decimal == "." or "." not in text) and (plain := as_plain_number(text)) == plain:
            return plain
        number = as_number(text, decimal, amounts)
        return np.nan if number is None or not np.isfinite(number[0]) else number[0]

    return once_each(texts, read).astype(float)


def has_thousands(texts: Any) -> bool:
    """Whether one of the texts is a number of thousands such as 900k, so that 1.2m beside it is in millions."""
    return plain_numbers(texts) is None and any(THOUSANDS.search(text) is not None for text in texts)


def count_units(texts: Any, decimal: str, amounts: bool = False) -> Counter[str]:
    """How many of the numbers among texts are in each unit; "" stands for no unit."""
    if plain_numbers(texts) is not None:
        return Counter({"": len(texts)})

    def read(text: str) -> str | None:
        if as_plain_number(text) == as_plain_number(text):
            return ""
        number = as_number(text, decimal, amounts)
        return None if number is None else number[1]

    counts = Counter(once_each(texts, read).tolist())
    del counts[None]
    return counts


def unit_key(unit: str) -> str:
    """One name for all spellings of a unit: kg, KG and kgs; $ and USD."""
    if "/" in unit:
        return "/".join(map(unit_key, unit.split("/")))
    plain = unit.rstrip(".")
    folded = plain.casefold()
    if folded in CASE_TELLS:
        return plain
    single = folded[:-1] if len(folded) > 2 and folded.endswith("s") else folded
    return UNIT_NAMES.get(single, single)


def unit_spellings(counts: Counter[str]) -> list[list[str]]:
    """The spellings of each unit, the most frequent first, from ``count_units``."""
    by_key: dict[str, list[str]] = {}
    for unit, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        by_key.setdefault(unit_key(unit), []).append(unit)
    return [spellings for key, spellings in by_key.items() if key]


def is_measure(unit: str) -> bool:
    """Whether a unit is a currency or a physical one, and not any word behind a number, as in 4 bedrooms."""
    main = unit.partition("/")[0]
    return unit_key(main) in UNIT_NAMES or MEASURE.fullmatch(main) is not None


# ------------------------------------------------------------------ the decimal sign

FEW_LEVELS = 20  # largest number of different cells in a column of lists of choices such as 1,2
LIST_OF_CHOICES = re.compile(r"\d{1,2}[.,]\d{1,2}")
POINT_GROUPS = re.compile(r"\s*[-+]?[1-9]\d{0,2}\.\d{3}(?!\d)")  # may be a whole number with points between thousands
VOTING_LEVELS = 2000  # number of different cells from which a column's decimal sign is decided


class Votes(NamedTuple):
    """Evidence from the different cells of a column about the decimal sign.

    Attributes:
        point: Share that are numbers with a decimal point.
        comma: Share that are numbers with a decimal comma.
        sign: The decimal sign where the cells leave no doubt, else "".
        open: The sign in cells that are different numbers under the two decimal signs, such as 2.596; or "".
        grouped: Whether all other cells are whole numbers up to 999, as in columns where the sign separates thousands.
    """

    point: float = 0.0
    comma: float = 0.0
    sign: str = ""
    open: str = ""
    grouped: bool = False


def decimal_votes(texts: np.ndarray, share: float, known: bool = False) -> Votes:
    """Evidence from a column about the decimal sign.

    Args:
        texts: Its cells.
        share: Share of its different cells that must be numbers.
        known: Whether the column is known to hold numbers, so that 1,2 is no list of choices.
    """
    present = leave_out(texts, is_missing(texts, MISSING_NUMBERS))
    levels = pd.unique(present)
    levels = levels[:: len(levels) // VOTING_LEVELS + 1]
    if not len(levels):
        return Votes()
    amounts = has_thousands(levels)
    points = read_numbers(levels, ".", amounts)
    if plain_numbers(levels) is not None:  # with a point, only those like 2.596 are numbers under both signs
        both = np.array([POINT_GROUPS.match(text) is not None for text in levels])
        commas = np.where(["." in text for text in levels], np.nan, points)
        commas[both] = read_numbers(levels[both], ",")
    else:
        commas = read_numbers(levels, ",", amounts)
    point, comma = float(np.isfinite(points).mean()), float(np.isfinite(commas).mean())
    sign = "" if point == comma or max(point, comma) < share else "." if point > comma else ","
    if sign and not known and len(levels) <= FEW_LEVELS and 3 * len(levels) <= len(present):
        if all(LIST_OF_CHOICES.fullmatch(text.strip()) for text in levels):
            sign = ""  # answers such as 1,2 and 3,4
    differ = np.isfinite(points) & np.isfinite(commas) & (points != commas)
    small = np.isfinite(points) & (points == commas) & (np.abs(points) < 1000)
    marks = {"." if "." in text else "," for text in levels[differ]}
    readable = np.isfinite(points) | np.isfinite(commas)
    grouped = bool(len(marks) == 1 and small.any() and (small | differ)[readable].all())
    return Votes(point, comma, sign, marks.pop() if len(marks) == 1 else "", grouped)


def file_sign(votes: Iterable[Votes]) -> str | None:
    """The decimal sign of most columns that leave no doubt; None where no sign has more of them."""
    counts = Counter(column.sign for column in votes)
    return None if counts["."] == counts[","] else "." if counts["."] > counts[","] else ","


def column_sign(votes: Votes, decimal: str | None) -> tuple[str, str]:
    """The decimal sign of a column, and what the user is told where neither its cells nor the file's sign decide it."""
    if votes.sign or decimal:
        return votes.sign or decimal or ".", ""
    sign = {".": ",", ",": "."}[votes.open] if votes.open and votes.grouped else "."
    name = {".": "point", ",": "comma"}.get(votes.open, "")
    use = "as decimal sign" if votes.open == sign else "between thousands"
    return sign, f"{name} taken {use}, which the cells leave open" if name else ""


def read_truths(texts: Any) -> np.ndarray:
    """1 for words for yes, 0 for words for no, NaN for other texts."""
    return once_each(texts, lambda text: TRUTHS.get(text.strip().lower(), np.nan)).astype(float)
