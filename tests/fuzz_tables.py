"""Generated malformed tables are read, understood, encoded and written: python tests/fuzz_tables.py --seconds 60 --seed 1.

Each case is a file. It must be read with as many rows as it has and written so that it comes back equal, or be refused with an
error of this package that names the file. Anything else is a violation: another exception, more than ten seconds, rows that are
lost, cells that change. A case depends on the seed and its number alone, so that ``--first 123 --cases 1`` repeats it.
"""

import argparse
import io
import json
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from bochner.tables.errors import TableError
from bochner.tables.files.reading import Source, open_table, read_table
from bochner.tables.files.writing import check_output_kind, writer
from bochner.tables.fitting import read_training
from bochner.tables.table import Table
from bochner.tables.targets import Target

SHOWN_VIOLATIONS = 8  # of each rule; the others are counted
SECONDS_PER_CASE = 10  # of the processor
DELIMITERS = ",;\t|"
WORDS = ("red", "Blue", "blue ", "yes", "no", "N/A", "", "-", "nan", "none", "pos", " pos", "1", "1.0", "x y z w", "+")
ODD = (
    "é",
    "\ufeff",
    '"',
    "''",
    "\r",
    "\n",
    "\r\n",
    "\t",
    "\x1b[31m",
    "[/red]",
    ":on:",
    "🙂",
    "\u2028",
    "\x85",
    "\x0b",
    "=1+1",
)
HUGE = ("1e60", "1e-200", "1e308", "-1e309", "9007199254740993", "1" * 400, "0x1F", "1_000", "inf", "٣", "1e5000", "１")


@dataclass
class Case:
    """A file.

    Attributes:
        suffix: How its name ends.
        content: Its bytes.
        records: Rows in it, with the line of names and titles; None where damage leaves that open.
    """

    suffix: str
    content: bytes
    records: int | None = None


# ------------------------------------------------------------------ cells and tables


def junk(rng: random.Random) -> str:
    """A text of any characters."""
    return "".join(rng.choice([*ODD, *WORDS, chr(rng.randrange(1, 0x500))]) for _ in range(rng.randrange(5)))


def long_cell(rng: random.Random) -> str:
    """A text of many characters, some of which look like a number or a date."""
    return rng.choice(["1", "1,", "a ", "1 ", "12.", "-", "9" * 9 + "e"]) * rng.choice([50, 2000, 40_000])


def number(rng: random.Random) -> str:
    """A number in some form."""
    value = rng.gauss(0, 10.0 ** rng.randrange(-3, 7))
    forms = ("{:.3f}", "{:.0f}", "{:,.2f}", "${:,.2f}", "{:g} km", "{:e}", "{:.1f}%", "({:.2f})", " {:.2f} ")
    text = rng.choice(forms).format(value)
    return text.translate(str.maketrans(",.", ".,")) if rng.random() < 0.2 else text


def day(rng: random.Random) -> str:
    """A date or a time in some form."""
    form = rng.choice(["%Y-%m-%d", "%d.%m.%Y", "%m/%d/%y", "%Y-%m-%dT%H:%M:%S+02:00", "%H:%M", "%B %d, %Y", "%Y%m%d"])
    return time.strftime(form, time.gmtime(rng.randrange(2**31)))


CELLS: dict[str, Callable[[random.Random], str]] = {
    "whole": lambda rng: str(rng.randrange(-9, 200)),
    "number": number,
    "huge": lambda rng: rng.choice(HUGE),
    "day": day,
    "word": lambda rng: rng.choice(WORDS),
    "junk": junk,
    "long": long_cell,
    "truth": lambda rng: rng.choice(["yes", "No", "TRUE", "y", "0", "1"]),
    "label": lambda rng: rng.choice(["0", "1", "0.0", "1.0", " 1", "1 ", "0,0", "1e0"]),
    "blank": lambda rng: rng.choice(["", " ", "\t"]),
}


def column(rng: random.Random, rows: int) -> list[str]:
    """Cells of one kind, some of another kind among them; of numbers and dates most in one form."""
    kinds = list(CELLS)
    kind, other = rng.choice(kinds), rng.choice(kinds)
    share = rng.choice([0, 0, 0.05, 0.5])
    if kind == "long":
        return [long_cell(rng) if i == 0 else number(rng) for i in range(rows)]
    return [CELLS[other if rng.random() < share and other != "long" else kind](rng) for _ in range(rows)]


def names(rng: random.Random, count: int) -> list[str]:
    """Column names: most are plain and different; some are empty, equal or odd."""
    plain = [f"c{number}" for number in range(count)]
    if rng.random() < 0.6:
        return plain
    odd = ["", " ", "c0", "1", "2.5", "customer_id", "zip", "date", "__index_level_0__", "unnamed 1", "y_mean"]
    return [name if rng.random() < 0.5 else rng.choice([*odd, junk(rng)]) for name in plain]


def table(rng: random.Random) -> list[list[str]]:
    """Names and rows."""
    rows, width = rng.choice([0, 1, 3, 12, 12, 30, 40]), rng.choice([1, 2, 3, 3, 4, 6])
    columns = [column(rng, rows) for _ in range(width)]
    for number in range(rng.choice([0, 0, 2, 3])):  # what can be learnt from, and predicted
        columns[-1 - number % width] = [f"{rng.gauss(0, 1):.3f}" for _ in range(rows)]
    return [names(rng, width), *map(list, zip(*columns, strict=True))]


# ------------------------------------------------------------------ files


def written(rng: random.Random, rows: list[list[str]], delimiter: str, end: str) -> str:
    """Rows as text; every cell that needs quotes has them."""
    always = rng.random() < 0.2

    def cell(text: str, alone: bool) -> str:
        needs = any(sign in text for sign in ('"', "\r", "\n", delimiter)) or (alone and not text) or always
        return '"' + text.replace('"', '""') + '"' if needs or text.startswith("\ufeff") else text

    return end.join(delimiter.join(cell(text, len(row) == 1) for text in row) for row in rows) + end * (
        rng.random() < 0.8
    )


def text_file(rng: random.Random, rows: list[list[str]], encodings: tuple[str, ...] = ("utf-8", "utf-8-sig")) -> Case:
    """A well-formed text file."""
    text = written(rng, rows, rng.choice(DELIMITERS), rng.choice(["\n", "\r\n", "\r"]))
    content = text.encode(rng.choice(encodings), errors="replace")
    return Case(rng.choice([".csv", ".tsv", ".txt"]), content, len(rows))


def plain(rng: random.Random) -> Case:
    """A well-formed file of odd cells."""
    return text_file(rng, table(rng))


def encoded(rng: random.Random) -> Case:
    """A file in any encoding, with marks or without."""
    return text_file(rng, table(rng), ("utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "cp1252", "latin-1", "utf-32"))


def marked(rng: random.Random) -> Case:
    """Several byte-order marks."""
    case = plain(rng)
    return Case(case.suffix, b"\xef\xbb\xbf" * rng.randrange(1, 4) + case.content, case.records)


def ragged(rng: random.Random) -> Case:
    """Rows with too many cells or too few."""
    rows = table(rng)
    for row in rows[rng.randrange(2) :]:
        if rng.random() < 0.1:
            row[rng.randrange(len(row) + 1) :] = [""] * rng.randrange(3) + ["surplus"] * rng.randrange(1, 3)
        elif rng.random() < 0.05:
            row.append("")
    return text_file(rng, rows)


def titled(rng: random.Random) -> Case:
    """Lines above the names, and empty lines."""
    rows = table(rng)
    case = text_file(rng, [*([["All we know"]] if len(rows[0]) > 1 else []), *rows])
    ends = b"\n" * rng.randrange(3)
    return Case(case.suffix, ends + case.content + ends, case.records if len(rows[0]) > 1 or not ends else None)


def trailing(rng: random.Random) -> Case:
    """A delimiter at the end of all lines, or of those after the names."""
    rows = table(rng)
    for row in rows[rng.randrange(2) :]:
        row.append("")
    return text_file(rng, rows)


def cut(rng: random.Random) -> Case:
    """A file that ends early."""
    case = rng.choice([plain, encoded])(rng)
    return Case(case.suffix, case.content[: rng.randrange(len(case.content) + 1)])


def flipped(rng: random.Random) -> Case:
    """A file with some wrong bytes, or bytes put in."""
    case = rng.choice([plain, encoded, ragged])(rng)
    content = bytearray(case.content)
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(content) + 1)
        content[at : at + rng.randrange(2)] = rng.choice([b'"', b"\0", b"\r", b"\n", b",", b";", rng.randbytes(3)])
    return Case(case.suffix, bytes(content))


def random_bytes(rng: random.Random) -> Case:
    """No table at all."""
    content = rng.choice(
        [b"", b"\n", b" ", b"\0", b"\xef\xbb\xbf", rng.randbytes(300), b"a,b\n", b"PK\3\4", b'"', b"PAR1"]
    )
    return Case(rng.choice([".csv", ".txt", ".parquet", ".xlsx"]), content * rng.choice([1, 1, 3]))


def parquet(rng: random.Random) -> Case:
    """A Parquet file of many types, whole or damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = rng.choice([0, 1, 12, 30])
    big = [None, 2**53 + 1, -(2**63), 2**63 - 1, 0]
    kinds: list[tuple[object, Callable[[], object]]] = [
        (pa.int64(), lambda: rng.choice(big)),
        (pa.float64(), lambda: rng.choice([None, float("nan"), float("inf"), 1e-310, rng.gauss(0, 1)])),
        (pa.float32(), lambda: rng.gauss(0, 1)),
        (pa.string(), lambda: rng.choice([None, junk(rng), "nul\0", ""])),
        (pa.binary(), lambda: rng.randbytes(3)),
        (pa.bool_(), lambda: rng.choice([None, True, False])),
        (pa.decimal128(20, 4), lambda: None),
        (pa.list_(pa.int64()), lambda: [1, None]),
        (pa.duration("ns"), lambda: rng.randrange(-(2**62), 2**62)),
        (pa.timestamp("ns"), lambda: rng.randrange(-(2**62), 2**62)),
        (pa.timestamp("s"), lambda: rng.randrange(-(2**50), 2**50)),
        (
            pa.timestamp("us", tz=rng.choice(["UTC", "Europe/Berlin", "+01:30", "Mars/Base"])),
            lambda: rng.randrange(2**50),
        ),
        (pa.time64("ns"), lambda: rng.randrange(86_400 * 10**9)),
        (pa.date32(), lambda: rng.randrange(-(2**31), 2**31)),
        (pa.dictionary(pa.int8(), pa.string()), lambda: rng.choice(["a", None, "b"])),
        (pa.struct([("x", pa.int64())]), lambda: {"x": 1}),
    ]
    chosen = [rng.choice(kinds) for _ in range(rng.randrange(1, 5))]
    if rng.random() < 0.5:
        chosen.append((pa.float64(), lambda: rng.gauss(0, 1)))
    arrays = []
    for kind, make in chosen:
        values = [make() for _ in range(rows)]
        try:
            arrays.append(pa.array(values, kind))
        except pa.ArrowException:
            arrays.append(pa.array(values, pa.int64()).cast(kind, safe=False))
    file = io.BytesIO()
    content = pa.Table.from_arrays(arrays, names(rng, len(arrays)))
    if rng.random() < 0.3:
        content = content.add_column(0, "__index_level_0__", pa.array(range(rows), pa.int64()))
    pq.write_table(content, file, version="2.6", store_schema=rng.random() < 0.8)
    return damaged(rng, Case(".parquet", file.getvalue(), rows + 1))


def xlsx(rng: random.Random) -> Case:
    """An Excel file, whole or damaged."""
    import openpyxl

    rows = table(rng)
    book = openpyxl.Workbook()
    sheet = book.active
    illegal = dict.fromkeys(range(32))
    for row in rows:
        sheet.append([None if not text else _native(text.translate(illegal)[:1000]) for text in row])
    if rng.random() < 0.2:
        book.create_sheet("second")
    file = io.BytesIO()
    book.save(file)
    return damaged(rng, Case(".xlsx", file.getvalue()))


def _native(text: str) -> object:
    try:
        return float(text) if abs(float(text)) < 1e300 else text
    except ValueError:
        return text if not text.startswith("=") else "=1/0"


def damaged(rng: random.Random, case: Case) -> Case:
    """The same file, in every third case with wrong bytes."""
    if rng.random() < 0.66:
        return case
    content = bytearray(case.content)
    for _ in range(rng.randrange(1, 4)):
        content[rng.randrange(len(content))] = rng.randrange(256)
    return Case(case.suffix, bytes(content[: rng.choice([len(content), rng.randrange(len(content))])]))


KINDS = (plain, encoded, marked, ragged, titled, trailing, cut, flipped, random_bytes, parquet)


# ------------------------------------------------------------------ what must hold


class ViolationError(Exception):
    """What must not be."""


class HangError(BaseException):
    """A case that takes too long; no exception that the package might catch."""


def check(case: Case, folder: Path, rng: random.Random) -> str:
    """Runs one case; "read", "refused when read" and so on; a ViolationError where a rule is broken."""
    path = folder / f"table{case.suffix}"
    path.write_bytes(case.content)

    def own(work: Callable[[], object]) -> bool:
        """Whether work is refused."""
        try:
            work()
        except TableError as error:
            if path.name not in str(error):
                raise ViolationError(f"unnamed file: {error}") from error
            return True
        return False

    found: dict[str, object] = {}
    outcome = "read"
    if own(lambda: found.update(source=open_table(path))):
        return "refused"
    source = found["source"]
    try:
        piece = read_table(source)
    except TableError as error:
        if path.name not in str(error):
            raise ViolationError(f"unnamed file: {error}") from error
        return "refused"
    texts = piece.texts
    dialect = source.dialect
    rows = len(texts) + len(source.bad)
    if case.records is not None:
        before = 1 + (dialect.skipped if dialect else 0)
        if rows + before != case.records and not (dialect and dialect.skipped and source.notes == []):
            raise ViolationError(
                f"lost rows: {case.records} records were written, {rows} rows and {before} lines before them read"
            )
    if dialect is not None and b'"' not in case.content:
        text = case.content.decode(dialect.encoding).replace("\r\n", "\n").replace("\r", "\n")
        lines = [line for line in text.lstrip("\ufeff").split("\n") if line != ""][dialect.skipped + 1 :]
        filled = sum(line.strip() != "" or dialect.delimiter in line for line in lines)
        if len(source.names) > 1 and rows != filled:
            raise ViolationError(f"lost rows: {filled} filled lines below the names, {rows} rows read")
    target = rng.choice([*source.names, source.names[-1]])
    task = rng.choice(["auto", "regression", "classification"])
    if own(lambda: read_training(path, target, task=task, skip_bad=rng.random() < 0.5)):
        outcome = "read, not fitted"
    understand(texts, target, task)
    for suffix in (".csv", ".parquet"):
        outcome += come_back(source, folder / f"out{suffix}")
    return outcome


def understand(texts: pd.DataFrame, target: str, task: str) -> None:
    """Columns and target: plain data, one output row for each row."""
    try:
        learnt = Target.learn(target, texts[target], task)
        values, bad = learnt.values(texts[target])
        if not len(values) == len(bad) == len(texts):
            raise ViolationError("lost rows: targets")
        if Target.from_json(json.loads(json.dumps(learnt.to_json()))) != learnt:
            raise ViolationError("not plain data: target")
    except TableError:
        pass
    try:
        learnt = Table.learn(texts.drop(columns=target))
    except TableError:
        return
    if Table.from_json(json.loads(json.dumps(learnt.to_json()))) != learnt:
        raise ViolationError("not plain data: columns")
    clean = learnt.transform(texts)
    if len(clean) != len(texts):
        raise ViolationError("lost rows: encoding")
    for part in (texts.iloc[:1], texts.iloc[::-1]):
        again = learnt.adapted(part)[0].transform(part)
        if len(again) != len(part):
            raise ViolationError("lost rows: encoding")


def come_back(source: Source, out: Path) -> str:
    """Writes a table with two more columns, and reads it again."""
    out.unlink(missing_ok=True)
    pieces = list(source.pieces(7))
    added = [{"y_new": np.arange(len(p.texts)) / 7, "ood": np.zeros(len(p.texts), dtype=bool)} for p in pieces]

    def write() -> None:
        check_output_kind(out, source)
        with writer(out, source, ".") as take:
            for piece, columns in zip(pieces, added, strict=True):
                take(piece, columns)

    try:
        write()
    except TableError:
        if out.exists():
            raise ViolationError("half an output: a refused output exists") from None
        return f", no {out.suffix}"
    again = open_table(out)
    found = read_table(again).texts
    if again.names != [*source.names, "y_new", "ood"]:
        raise ViolationError(f"changed names: {out.suffix} from {source.names} to {again.names}")
    texts = pd.concat([piece.texts for piece in pieces])
    if found[source.names].to_numpy().tolist() != texts.to_numpy().tolist() or again.bad:
        raise ViolationError(f"changed cells: {out.suffix}")
    return ""


def run(seed: int, number: int, folder: Path) -> tuple[str, str, str]:
    """The kind of a case, its outcome, and what broke."""
    rng = random.Random(f"{seed}-{number}")
    kind = xlsx if number % 40 == 0 else rng.choice(KINDS)
    signal.setitimer(signal.ITIMER_PROF, SECONDS_PER_CASE)
    try:
        return kind.__name__, check(kind(rng), folder, rng), ""
    except ViolationError as error:
        return kind.__name__, "violation", str(error)
    except HangError:
        return kind.__name__, "violation", "hang: " + traceback.format_exc(limit=-3)
    except Exception as error:
        return kind.__name__, "violation", f"traceback: {error!r} {traceback.format_exc(limit=-3)}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def ring(*_: object) -> None:
    """Ends a case that takes too long."""
    raise HangError


def main() -> int:
    """Runs cases until the time is over; 1 where one breaks a rule."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--cases", type=int, default=10**9, help="most cases")
    options = parser.parse_args()
    warnings.simplefilter("error")
    signal.signal(signal.SIGPROF, ring)
    counts: Counter[tuple[str, str]] = Counter()
    shown: Counter[str] = Counter()
    ends, number = time.monotonic() + options.seconds, options.first
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < ends and number < options.first + options.cases:
            kind, outcome, broken = run(options.seed, number, Path(folder))
            rule = broken.partition(":")[0]
            counts[kind, f"{outcome} ({rule})" if broken else outcome] += 1
            if broken:
                shown[rule] += 1
                if shown[rule] <= SHOWN_VIOLATIONS:
                    print(f"seed {options.seed}, case {number}, {kind}: {broken[:1500]}", flush=True)
            number += 1
    for (kind, outcome), count in sorted(counts.items()):
        print(f"{kind:<14} {outcome:<40} {count}")
    print(f"{number - options.first} cases, {shown.total()} violations {dict(shown)}, seed {options.seed}")
    return int(shown.total() > 0)


if __name__ == "__main__":
    sys.exit(main())
