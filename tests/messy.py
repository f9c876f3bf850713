"""Messy tables as people have them: each kind is a function from a plain table of cars to the bytes of a file."""

import io

import numpy as np
import pandas as pd

ROWS = 80
FRENCH = str.maketrans({",": "\u202f", ".": ","})
GERMAN_MONTHS = "Januar Februar März April Mai Juni Juli August September Oktober November Dezember".split()


def cars(rows=ROWS, seed=0):
    """A plain table: numbers, dates, categories and a price that depends on them."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "km": rng.integers(1_000, 200_000, rows),
            "age": rng.integers(0, 15, rows),
            "brand": rng.choice(["Audi", "BMW", "Kia"], rows),
            "listed": pd.Timestamp("2024-01-15") + pd.to_timedelta(rng.integers(0, 600, rows), unit="D"),
            "garage": rng.random(rows) < 0.5,
        }
    )
    price = 30_000 - 0.05 * frame["km"] - 900 * frame["age"] + 4_000 * (frame["brand"] == "BMW")
    return frame.assign(price=(price + rng.normal(0, 500, rows)).round(2))


def csv(frame, **options):
    return frame.to_csv(index=False, **options).encode()


def german(value):
    """1234.5 as 1.234,50."""
    return f"{value:,.2f}".translate(str.maketrans(",.", ".,"))


def indian(value):
    """1234567 as 12,34,567."""
    head, tail = str(value)[:-3], str(value)[-3:]
    pairs = [head[max(0, end - 2) : end] for end in range(len(head), 0, -2)]
    return ",".join([*reversed(pairs), tail])


def with_line(frame, line, at):
    """A CSV file with one more line, after so many others."""
    lines = csv(frame).decode().splitlines()
    return "\n".join([*lines[:at], line, *lines[at:]]).encode()


def replaced(column, change):
    return lambda frame: csv(frame.assign(**{column: change(frame)}))


def some(frame, column, word, every=9):
    """A column with a word in place of every so manyth value."""
    values = frame[column].astype(object).copy()
    values[::every] = word
    return values


def ragged(frame):
    lines = csv(frame).decode().splitlines()
    lines[5] += ",surplus"
    lines[9] = "1,2"
    return "\n".join(lines).encode()


def with_quotes(frame):
    """A CSV file with a quote in front of line 5 and of line 9."""
    lines = csv(frame).decode().splitlines()
    lines[4], lines[8] = f'"{lines[4]}', f'"{lines[8]}'
    return "\n".join(lines).encode()


def excel(frame):
    file = io.BytesIO()
    frame.to_excel(file, index=False)
    return file.getvalue()


def parquet(frame):
    file = io.BytesIO()
    frame.to_parquet(file)
    return file.getvalue()


# Kind: how the file is made, and a line of the summary that says what was done.
FITTED = {
    "plain": (csv, "listed: date → days since first, month, weekday"),
    "semicolons and decimal commas": (
        lambda f: csv(f.assign(fee=f["age"] + 0.25), sep=";", decimal=","),
        "decimal commas",
    ),
    "tabs": (lambda f: csv(f, sep="\t"), "cells separated by tabs"),
    "vertical bars": (lambda f: csv(f, sep="|"), "cells separated by vertical bars"),
    "excel's sep= line": (lambda f: b"sep=;\n" + csv(f, sep=";"), "1 line before the column names left out"),
    "a title above": (lambda f: b"All our cars\n\n" + csv(f), "1 line before the column names left out"),
    "blanks after commas": (lambda f: csv(f).replace(b",", b", "), "garage: True → 1, False → 0"),
    "carriage returns": (lambda f: csv(f, lineterminator="\r\n"), "km: number"),
    "old Mac line ends": (lambda f: csv(f, lineterminator="\r"), "km: number"),
    "delimiter at the end of lines": (lambda f: csv(f).replace(b"\n", b",\n"), "km: number"),
    "byte-order mark": (lambda f: csv(f).decode().encode("utf-8-sig"), "km: number"),
    "two byte-order marks": (lambda f: b"\xef\xbb\xbf" + csv(f).decode().encode("utf-8-sig"), "km: number"),
    "utf-16": (lambda f: csv(f).decode().encode("utf-16"), "read as: UTF-16"),
    "utf-16 without a mark": (lambda f: csv(f).decode().encode("utf-16-le"), "read as: UTF-16"),
    "latin-1": (lambda f: csv(f.assign(brand="Škoda é")).decode().encode("cp1252"), "read as: Latin-1 (Windows-1252)"),
    "quoted cells with line ends": (
        lambda f: csv(f.assign(seller='Smith, "Joe"\r\nLondon')),
        "seller: dropped, always",
    ),
    "an index column without a name": (lambda f: f.to_csv().encode(), "unnamed 1: dropped, every value differs"),
    "ids": (replaced("ad_id", lambda f: [f"AD{i:05}" for i in f.index]), "ad_id: dropped, every value differs"),
    "numbers that are ids": (replaced("adId", lambda f: 7_000 + f.index), "adId: dropped, every value differs"),
    "numbers that name things": (replaced("shop_id", lambda f: f.index % 4), "shop_id: 4 categories"),
    "currency in front": (replaced("fee", lambda f: [f"${v:,.2f}" for v in 900.0 + f["age"]]), "fee: number in $"),
    "currency behind": (
        replaced("fee", lambda f: [f"{german(1000 * v)} €" for v in f["age"]]),
        "fee: number in € with",
    ),
    "currency in the target": (
        replaced("price", lambda f: [f"${v:,.0f}" for v in f["price"]]),
        "the target, number in $",
    ),
    "percent": (replaced("rate", lambda f: [f"{v / 2} %" for v in f["age"]]), "rate: number in %"),
    "thousands": (replaced("km", lambda f: [f"{v:,}" for v in f["km"]]), "km: number"),
    "thousands with blanks": (
        replaced("km", lambda f: [f"{v:,}".replace(",", "\u202f") for v in f["km"]]),
        "km: number",
    ),
    "units": (replaced("km", lambda f: [f"{v} km" for v in f["km"]]), "km: number in km"),
    "yes and no": (replaced("ok", lambda f: np.resize(["Yes", "no", "yes"], len(f))), "ok: Yes, yes → 1, no → 0"),
    "day before month": (
        replaced("listed", lambda f: f["listed"].dt.strftime("%d/%m/%Y")),
        "listed: date → days since first",
    ),
    "american dates": (
        replaced("listed", lambda f: f["listed"].dt.strftime("%m/%d/%y %I:%M %p")),
        "listed: date → days",
    ),
    "written months": (
        replaced("listed", lambda f: f["listed"].dt.strftime("%d %B %Y")),
        "listed: date → days since first",
    ),
    "german months": (
        replaced("listed", lambda f: [f"{d.day}. {GERMAN_MONTHS[d.month - 1]} {d.year}" for d in f["listed"]]),
        "listed: date → days since first",
    ),
    "dates as numbers": (
        replaced("listed", lambda f: f["listed"].dt.strftime("%Y%m%d")),
        "listed: date → days since first",
    ),
    "dates with zones": (
        replaced("listed", lambda f: f["listed"].dt.strftime("%Y-%m-%dT%H:%M:%S+02:00")),
        "listed: date",
    ),
    "times": (replaced("at", lambda f: [f"{i % 24:02}:{i % 60:02}" for i in f.index]), "at: time → hours"),
    "words for missing": (replaced("age", lambda f: some(f, "age", "n/a")), "age: number; 9 missing"),
    "a question mark for missing": (
        replaced("brand", lambda f: some(f, "brand", "?")),
        "brand: 3 categories; 9 missing",
    ),
    "a word among numbers": (
        replaced("km", lambda f: some(f, "km", "ask", 40)),
        "2 cells that are none, such as 'ask'",
    ),
    "open ends": (replaced("doors", lambda f: np.resize(["2", "3", "4", "5+"], len(f))), "doors: 4 categories"),
    "codes with zeros": (replaced("zip", lambda f: np.resize(["02139", "10001"], len(f))), "zip: 2 categories"),
    "an empty column": (replaced("note", lambda _: ""), "note: dropped, no values"),
    "a constant column": (replaced("year", lambda _: 2026), "year: dropped, always 2026"),
    "upper and lower case": (
        replaced("brand", lambda f: np.resize(["Kia", "kia ", "BMW"], len(f))),
        "brand: 2 categories; upper",
    ),
    "rare categories": (
        replaced("brand", lambda f: [f"rare {i}" if i % 20 == 0 else "Kia Rio"[: 3 + 4 * (i % 2)] for i in f.index]),
        "of which 4 are rare and count as one",
    ),
    "free text": (
        replaced("text", lambda f: [f"a nice car number {i} " + "with radio" * (i % 3 == 0) for i in f.index]),
        "text: free text → number of words, and whether it has 'radio', 'with'",
    ),
    "several currencies": (
        replaced("fee", lambda f: np.resize(["$5", "€6", "$7"], len(f))),
        "fee: dropped, several units ($, €)",
    ),
    "a minus behind the number": (
        replaced("fee", lambda f: [f"{abs(v):.2f}{'-' if v < 0 else ' '}" for v in f["age"] - 7.0]),
        "fee: number",
    ),
    "a typographic minus": (
        replaced("fee", lambda f: [f"{v:.1f}".replace("-", "−") for v in f["age"] - 7.0]),
        "fee: number",
    ),
    "blanks that do not break between thousands": (
        replaced("km", lambda f: [f"{v:,}".replace(",", "\u00a0") for v in f["km"]]),
        "km: number",
    ),
    "lakhs": (replaced("km", lambda f: [indian(v) for v in f["km"]]), "km: number"),
    "french amounts": (
        lambda f: csv(f.assign(fee=[f"{v:,.2f}".translate(FRENCH) + "\u00a0€" for v in f["km"]]), sep=";"),
        "fee: number in € with decimal commas",
    ),
    "mixed line ends": (lambda f: csv(f).replace(b"\n", b"\r\n", 40), "km: number"),
    "a column of dashes": (replaced("note", lambda _: "-"), "note: dropped, no values"),
    "errors of a spreadsheet": (
        replaced("age", lambda f: some(f.assign(age=some(f, "age", "#DIV/0!")), "age", "#REF!", 11)),
        "age: number; 16 missing",
    ),
    "blanks of no width": (
        replaced("brand", lambda f: [f"{v}\u200b" if i % 3 else v for i, v in enumerate(f["brand"])]),
        "brand: 3 categories",
    ),
    "a logger's -999": (
        replaced("temp", lambda f: np.where(f.index % 11 == 0, -999.0, f["age"] * 1.5)),
        "temp: number; 8 cells are -999, far from all others: is it a word for missing? They count as numbers",
    ),
    "one and 1.0": (
        replaced("kind", lambda f: np.resize(["a", "1", "1.0", "b"], len(f))),
        "kind: 3 categories; '1', '1.0' are one category",
    ),
    "repeated rows": (lambda f: csv(pd.concat([f, f.head(10)])), "km: number"),
    "a unit in several spellings": (
        replaced("weight", lambda f: np.resize(["5 kg", "6 KG", "7 kg", "4.5 kgs."], len(f))),
        "weight: number in kg; 'KG', 'kg', 'kgs.' are one unit",
    ),
    "one year and two years": (
        replaced("age", lambda f: [f"{v} year{'s' * (v != 1)}" for v in f["age"]]),
        "age: number in years; 'year', 'years' are one unit",
    ),
    "a sign and a code of one currency": (
        replaced("fee", lambda f: np.resize(["$ 5", "6 USD", "$7"], len(f))),
        "fee: number in $; '$', 'USD' are one unit",
    ),
    "words behind numbers": (
        replaced("size", lambda f: np.resize(["2 BHK", "4 Bedroom", "1 RK"], len(f))),
        "size: 3 categories",
    ),
    "numbers with the name of codes": (replaced("mobile_wt", lambda f: 80 + f["km"] % 120), "mobile_wt: number"),
    "years of two digits": (
        replaced("born", lambda f: (f["listed"] - pd.Timedelta(days=20_000)).dt.strftime("%d.%m.%y")),
        "years of two digits: 69-99 are 19.., 00-68 are 20..",
    ),
    "thousands and millions": (
        replaced("worth", lambda f: np.resize(["900k", "1.2m", "1.5M", "0.3b"], len(f))),
        "worth: number; m and b are millions and billions, as beside k",
    ),
    "millions of a currency": (
        replaced("worth", lambda f: np.resize(["£1.2m", "£3bn", "£2B", "£7 million"], len(f))),
        "worth: number in £",
    ),
    "bounds of measurement": (
        replaced("lead", lambda f: some(f.assign(lead=f["age"] + 6), "lead", "<5")),
        "lead: number; 9 cells such as <5 are taken as 5",
    ),
    "a nearly empty column": (
        replaced("pool", lambda f: np.where(f.index == 3, "40", "")),
        "pool: number; 79 missing",
    ),
    "lines of blanks": (lambda f: csv(f).replace(b"\n", b"\n   \n"), "km: number"),
    "xlsx": (excel, "listed: date → days since first"),
    "parquet": (parquet, "listed: date → days since first"),
}

# Kind: how the file is made, and what the one message must say, all of it.
REFUSED = {
    "missing targets": (
        replaced("price", lambda f: some(f, "price", "")),
        ["9 rows that cannot be used", "line 2: the target 'price' is missing", "line 74: the target"],
    ),
    "ragged lines and missing targets": (
        lambda f: ragged(f.assign(price=some(f, "price", "NA", 50))),
        [
            "4 rows",
            "line 6: 7 cells where the first line names 6",
            "line 10: 2 cells",
            "line 2: the target is 'NA'",
            "line 52",
        ],
    ),
    "several problems": (
        lambda f: ragged(f.assign(price=5, ood=1)),
        ["same value in every row ('5')", "line 6: 8 cells", "line 10: 2 cells"],
    ),
    "no usable column": (
        lambda f: csv(f[["price"]].assign(id=f.index, name="x")),
        ["There is no column to predict from", "id: dropped, every value differs", "name: dropped, always 'x'"],
    ),
    "units below the names": (
        lambda f: with_line(f, "km,years,,,,EUR", 1),
        ["1 row that cannot be used", "line 2: the target is 'EUR'"],
    ),
    "two lines of names": (
        lambda f: b"Car,,,Offer,,\n" + csv(f),
        ["got 'price' instead", "It stands in line 2: are these the names of the columns? Remove the lines above it."],
    ),
    "a bank's lines above": (
        lambda f: b"Account;123\nPeriod;2024\n\n" + csv(f, sep=";"),
        ["got 'price' instead", "It stands in line 4"],
    ),
    "footnotes": (lambda f: csv(f) + b"Source: own survey\n* estimated\n", ["2 rows", "line 82: 1 cells", "line 83"]),
    "names once more": (
        lambda f: with_line(f, "km,age,brand,listed,garage,price", 40),
        ["line 41: it repeats the names of the columns"],
    ),
    "sums without a word": (
        lambda f: csv(f) + f"{f['km'].sum()},{f['age'].sum()},,,,{f['price'].sum():.2f}\n".encode(),
        ["line 82: it holds totals of the rows above"],
    ),
    "a grand total": (
        lambda f: csv(f) + f"{f['km'].sum()},,Grand Total (80 cars),,,{f['price'].sum():.2f}\n".encode(),
        ["line 82: it holds totals of the rows above"],
    ),
    "a quote that swallows lines": (
        with_quotes,
        ["1 row that", "line 9: text after a closing quote; a quote makes lines 5 to 9 one row"],
    ),
    "a target of dates": (replaced("price", lambda f: f["listed"]), ["target 'price' holds dates"]),
    "a picture": (lambda _: b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR", ["holds null characters"]),
}
SUFFIXES = {"xlsx": "xlsx", "parquet": "parquet", "tabs": "tsv"}
