"""Dates and times of day: in which of many forms a column writes them, and how its cells are then read.

All cells of a column are read in one form. ``dateutil`` is not used: it guesses for each cell separately, so that 01/02 and 13/02
in one column are read in different orders, and it reads '1.5' as a day of this month.
"""

import math
import re
from collections import Counter
from typing import Any

import numpy as np
import pandas as pd

DAYS = (
    "ISO8601",
    *("%d.%m.%Y", "%m/%d/%Y", "%d/%m/%Y", "%Y/%m/%d", "%d-%m-%Y", "%m-%d-%Y", "%Y.%m.%d", "%Y%m%d"),
    *(
        "%d-%b-%y",
        "%a, %d.%m.%Y",
        "%d.%m.%y",
        "%m/%d/%y",
        "%d/%m/%y",
        "%b %Y",
        "%m/%Y",
        "%b-%y",
        "%d %b %y",
        "%d-%m-%y",
    ),
)
MONTH_WORDS = {  # English, German, French, Spanish, Italian, Portuguese, Dutch
    "Jan": "january januar jänner janvier enero gennaio janeiro januari jan janv ene gen",
    "Feb": "february februar février fevrier febrero febbraio fevereiro februari feb févr fevr fév fev",
    "Mar": "march märz maerz mars marzo março marco maart mar mär mrz mrt",
    "Apr": "april avril abril aprile apr avr abr",
    "May": "may mai mayo maggio maio mei mag",
    "Jun": "june juni juin junio giugno junho jun giu",
    "Jul": "july juli juillet julio luglio julho jul juil lug",
    "Aug": "august août aout agosto augustus aug aoû ago",
    "Sep": "september septembre septiembre settembre setembro sep sept set",
    "Oct": "october oktober octobre octubre ottobre outubro oct okt ott out",
    "Nov": "november novembre noviembre novembro nov",
    "Dec": "december dezember décembre decembre diciembre dicembre dezembro dec dez déc dic",
}
MONTHS = {word: month for month, words in MONTH_WORDS.items() for word in words.split()}
CLOCKS = (
    "",
    " %H:%M",
    " %H:%M:%S",
    " %H:%M:%S.%f",
    " %I:%M %p",
    " %I:%M:%S %p",
    ", %H:%M",
    ", %H:%M:%S",
)
TIMES = ("%H:%M", "%H:%M:%S", "%H:%M:%S.%f", "%I:%M %p", "%I:%M:%S %p", "%I %p")
STYLES = frozenset({"ISO8601", *(day + clock for day in DAYS for clock in CLOCKS), *TIMES})
SWAPPED = {"%d/%m": "%m/%d", "%m/%d": "%d/%m", "%d-%m": "%m-%d", "%m-%d": "%d-%m"}
WEEKDAY = re.compile(r"^(?:mon|tue|wed|thu|fri|sat|sun)[a-z]*\.?,? +(?=[\dA-Z])", re.IGNORECASE)
CHINESE_DATE = re.compile(r"(\d{4})年(\d{1,2})月(\d{1,2})日")
ZONE = re.compile(r"([T:]\d\d(?:\d\d){0,2}(?:\.\d+)?) *(?:Z|UTC|GMT|[+-]\d{1,2}(?::?\d{1,2})?)$")
OFFSET = re.compile(r"(?<=\d)(?:Z|(?<=:\d\d)(?P<hours>[+-]\d{1,2}):?(?P<minutes>\d{2})?)$")
YEAR = re.compile(r"(?<!\d)(?:19|20)\d\d(?!\d)")
MONTH = re.compile(r"([^\W\d_]{3,})\.?")
ORDINAL = re.compile(r"(?<=\d)(?:st|nd|rd|th|º)\b")
# What stands beside the name of a month: 12. März 2024, 2 de mayo de 2024.
AROUND_MONTH = re.compile(r"(?<=\d)\.? (?:de )?(?=[A-Z][a-z]{2}\b)|(?<=[A-Z][a-z]{2}) de (?=\d)")
MONTH_NAMES = list(MONTH_WORDS)
NAMED_DATE = re.compile(
    r"\b(?:(?P<day>\d{1,2})(?P<sign>[ -])(?P<month>[A-Z][a-z]{2})(?P=sign)|(?P<first>[A-Z][a-z]{2}) (?P<later>\d{1,2}),? )"
    r"(?P<year>\d{4})\b"
)
LIKE_A_DATE = re.compile(r".*\d.*[-/.: ,].*|\d{8}|[A-Za-z]{3,9}[- ]\d{2,4}|\d{4}年.*")
MAX_DATE_CHARACTERS = 60  # of a cell that is compared with the pattern above, which takes quadratic time


def plain_date(text: str) -> str:
    """A date in numbers where the name of its month stands beside day and year: 12.03.2024 for "12. März 2024" or "March 12, 2024".

    So a column may hold dates with names and dates with numbers. Other names become three English letters: Mar 2024, 12-Mar-24.
    """
    plain = ZONE.sub(r"\1", WEEKDAY.sub("", text.strip()))
    if "年" in plain:
        plain = CHINESE_DATE.sub(r"\1/\2/\3", plain)
    if not MONTH.search(plain):
        return plain
    named = MONTH.sub(lambda word: MONTHS.get(word[1].casefold(), word[0]), plain)
    named = AROUND_MONTH.sub(" ", ORDINAL.sub("", named))
    return NAMED_DATE.sub(_as_numbers, named)


def _as_numbers(match: re.Match[str]) -> str:
    day, month, year = match["day"] or match["later"], match["month"] or match["first"], match["year"]
    return f"{int(day):02d}.{MONTH_NAMES.index(month) + 1:02d}.{year}" if month in MONTH_NAMES else match[0]


def read_dates(texts: Any, style: str) -> pd.DatetimeIndex:
    """Dates in one format; NaT where a text is not such a date. Time zones are left out: a weekday is the local one."""
    stripped = np.array([plain_date(text) for text in texts], dtype=object)
    # utc: pandas reads more forms of zones than ZONE, and refuses several in one column.
    return pd.DatetimeIndex(pd.to_datetime(stripped, format=style, errors="coerce", utc=True)).tz_localize(None)


def read_times(texts: Any, style: str) -> np.ndarray:
    """Hours since midnight; NaN where a text is not a time of day."""
    times = pd.to_datetime(pd.Series(texts, dtype=object).str.strip(), format=style, errors="coerce")
    seconds = times.dt.second + times.dt.microsecond / 1e6
    return (times.dt.hour + times.dt.minute / 60 + seconds / 3600).to_numpy(dtype=float)


def far_zones(texts: Any) -> list[str]:
    """The time zones that texts end with, where they differ by more than the hour of a summer time; else none."""
    found: dict[str, float] = {}
    for text in texts:
        if (match := OFFSET.search(text.strip())) is not None:
            hours, minutes = float(match["hours"] or 0), float(match["minutes"] or 0)
            found.setdefault(match[0].strip(), hours + math.copysign(minutes / 60, hours))
    return sorted(found) if found and max(found.values()) - min(found.values()) > 1 else []


def _date_marks(text: str) -> frozenset[str]:
    """The signs between the parts of a date."""
    return frozenset(text) & frozenset("/:,.-")


def _may_be_a_date(text: str) -> bool:
    return len(text) <= MAX_DATE_CHARACTERS and LIKE_A_DATE.fullmatch(text) is not None


def are_like_dates(levels: Any, share: float) -> bool:
    """Whether at least a share of texts look like dates with four-digit years, in one form or several."""
    return bool(np.mean([YEAR.search(text) is not None and _may_be_a_date(text.strip()) for text in levels]) >= share)


def date_form(text: str) -> str:
    """What differs between forms of dates: the text with 0 for each digit."""
    return re.sub(r"\d", "0", plain_date(text))


def date_style(levels: np.ndarray, share: float) -> tuple[str, bool] | None:
    """The format that reads at least a share of different texts, and whether day and month could be swapped."""
    if np.mean([_may_be_a_date(text.strip()) for text in levels]) < share:
        return None
    levels = np.array([plain_date(text) for text in levels], dtype=object)
    sample = levels[:: max(1, len(levels) // 200)]
    marks, _ = Counter(map(_date_marks, sample)).most_common(1)[0]
    usual = [text for text in sample if _date_marks(text) == marks][:20]
    for day in DAYS:
        for clock in ("",) if day == "ISO8601" else CLOCKS:
            style = day + clock
            if day != "ISO8601" and marks != _date_marks(style):
                continue
            if read_dates(usual, style).notna().mean() < 0.5:
                continue
            read = read_dates(levels, style).notna().mean()
            swapped = next((style.replace(a, b) for a, b in SWAPPED.items() if a in style), None)
            other = 0.0 if swapped is None else read_dates(levels, swapped).notna().mean()
            if read >= share and read >= other:
                return style, bool(read == other)
    return None


def time_style(levels: np.ndarray, share: float) -> str | None:
    """The format that reads at least a share of different texts as times of day."""
    if np.mean([_may_be_a_time(text.strip()) for text in levels]) < share:
        return None
    return next((style for style in TIMES if np.mean(~np.isnan(read_times(levels, style))) >= share), None)


def _may_be_a_time(text: str) -> bool:
    """Whether a text looks like 12:30 or 3 pm, which is quickly seen."""
    return text[:1].isdigit() and (":" in text or text[-1:] in "mM")
