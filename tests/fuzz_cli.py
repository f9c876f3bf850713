"""Fuzzes the command line: random command lines against one small model and a few tables, in one process.

    python tests/fuzz_cli.py --seconds 60 --seed 0

Every command line must end with exit code 0, or with a refusal: exit code 1 or 2, a message, no traceback. It must change no
file but its outputs, and leave no temporary file behind. Prints counts by class; exit code 1 on a violation.
"""

import argparse
import collections
import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from typer.testing import CliRunner

from bochner.cli import app, jobs

NAMES = [
    "plain",
    "x[/red]",
    "[bold]b[/bold]",
    "d:on:d",
    "é 漢字",
    "a\nb",
    "\x1b[31mred",
    "-dash",
    "half\udcff",
    "a,b",
    '"q"',
    " ",
    "n" * 300,
]
NUMBERS = [
    "0",
    "-1",
    "0.5",
    "1",
    "nan",
    "inf",
    "1e400",
    "-0.0",
    str(2**31),
    str(2**70),
    "9" * 5000,
    "١",
    "²",
    "x",
    "",
    "[/x]",
]
MESSAGE_LINES = 40  # longest message; typer draws a box around its own, which repeats long words
CHARACTERS_PER_LINE = 30  # of words that are repeated
LONGEST_SECONDS = 120.0  # a command line that takes longer counts as a hang


def make_files(folder: Path) -> dict[str, list[str]]:
    """Tables, a model, rows and odd files; their paths by kind."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"d:on:d": rng.normal(size=40), "[/red]": rng.choice(["u", "v"], 40)})
    frame["y"] = frame["d:on:d"] + 0.1 * rng.normal(size=40)
    tables = [folder / "t.csv", folder / "x[b]:on:.csv", folder / "t.parquet", folder / "t.tsv"]
    for table in tables[:2]:
        frame.to_csv(table, index=False)
    frame.to_parquet(tables[2])
    frame.to_csv(tables[3], index=False, sep="\t")
    model = folder / "m[b]:on:.bochner"
    options = ["--target", "y", "--out", model, "--hidden", "", "--kernel", "rbf"]
    result = CliRunner().invoke(app, ["fit", *map(str, [tables[0], *options])])
    assert result.exit_code == 0, result.output
    odd = {
        "empty.csv": b"",
        "binary.csv": bytes(range(256)),
        "short.csv": b"a,b\n1\n",
        "t.doc": b"hello",
        "bad.parquet": b"PAR1",
        "bad.xlsx": b"PK",
        "bad.bochner": model.read_bytes()[:-50],
        "words.csv": b"d:on:d,[/red],y\nmuch,u,[/x]\n",
    }
    for name, content in odd.items():
        (folder / name).write_bytes(content)
    (folder / "folder.csv").mkdir()
    (folder / "broken.csv").symlink_to(folder / "nothing")
    (folder / "loop.csv").symlink_to(folder / "loop.csv")
    (folder / "link.csv").symlink_to(tables[0])
    os.link(tables[0], folder / "hard.csv")
    os.mkfifo(folder / "fifo.csv")
    unreadable = folder / "secret.csv"
    unreadable.write_bytes(b"a,y\n1,2\n")
    unreadable.chmod(0)
    (folder / "shut").mkdir(mode=0o555)
    special = ["folder.csv", "broken.csv", "loop.csv", "link.csv", "hard.csv", "fifo.csv", "secret.csv", "none.csv"]
    files = [str(path) for path in tables]
    return {"table": files, "odd": [str(folder / name) for name in [*odd, *special]], "model": [str(model)]}


ROW = {"experiment": "uci-regression", "protocol": "paper", "posterior": "kfac", "set": "boston", "model": "relu"} | {
    "fold": 0,
    "folds": [0],
    "seed": 0,
    "status": "ok",
    "nlpd": 1.0,
    "rmse": 1.0,
    "seconds": 1.0,
}
VALUES = [None, True, "x", "[/x]", -1, 1.5, 10**30, float("nan"), float("inf"), [], [[1]], {}, {"a": 1}, "relu", "ok"]
LINES = ["1", "null", '"x"', "[]", "{}", "[" * 50_000, "9" * 5_000, "NaN", "{", "\x00", '{"a": 1e999}', '{"a": ' * 2000]
FILES = (
    "uci-regression uci-classification rotated-digits cifar-ood gram mixture extrapolation toy-1d banana activations "
    "covariances gram-error"
).split()
RESULTS = Path(__file__).parents[1] / "results"


def example_rows(name: str) -> list[dict[str, object]]:
    """Rows of an experiment, as committed."""
    found = sorted(RESULTS.glob(f"*/{name}.jsonl"))
    return [json.loads(line) for line in found[0].read_text().splitlines()[:30]] if found else [dict(ROW)]


def write_rows_file(rng: random.Random, folder: Path, name: str) -> Path:
    """A file of rows of which some are damaged; returns the folder to report on."""
    kind = next((path.parent.name for path in RESULTS.glob(f"*/{name}.jsonl")), "uci")
    target = folder / kind
    target.mkdir(parents=True)
    rows = example_rows(name)
    lines = [json.dumps(row) for row in rows]
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.4:
            lines.insert(rng.randint(0, len(lines)), rng.choice(LINES))
            continue
        row = dict(rng.choice(rows))
        column = rng.choice(list(row))
        if rng.random() < 0.5:
            del row[column]
        else:
            row[column] = rng.choice(VALUES)
        lines[rng.randrange(len(lines))] = json.dumps(row)
    (target / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder if rng.random() < 0.5 else target


class Fuzz:
    """Makes command lines in a folder of its own."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = random.Random(seed)
        self.folder = folder
        self.inputs = folder / "inputs"
        self.inputs.mkdir()
        self.paths = make_files(self.inputs)
        self.number = 0

    def table(self) -> str:
        return self.rng.choice(self.paths["table"] if self.rng.random() < 0.6 else self.paths["odd"])

    def model(self) -> str:
        draw = self.rng.random()
        return self.paths["model"][0] if draw < 0.8 else self.rng.choice([*self.paths["odd"], *self.paths["table"]])

    def output(self, suffix: str, inputs: Sequence[str] = ()) -> str:
        """A new file, an input of the command under any name, a device, a folder: what someone may give as an output."""
        out = self.work / (self.rng.choice(NAMES) + suffix)
        choice = self.rng.random()
        if choice < 0.5:
            return str(out)
        if choice < 0.75 and inputs:
            path = Path(self.rng.choice(inputs))
            link = self.work / "link.csv"
            link.unlink(missing_ok=True)
            link.symlink_to(path)
            return str(
                self.rng.choice([path, f"{path.parent}/./{path.name}", path.parent / ".." / "inputs" / path.name, link])
            )
        devices = ["-", "/dev/null", "/dev/full", "/dev/stdout", "", "."]
        folders = [self.work, self.work / "no" / "x.csv", self.inputs / "fifo.csv"]
        if os.geteuid():  # root may write everywhere
            folders.append(self.inputs / "shut" / "o.csv")
        return str(self.rng.choice([*devices, *folders]))

    def some(self, **options: list[str]) -> list[str]:
        """Some of the options, with an unknown one now and then."""
        words: list[str] = []
        for name, values in options.items():
            if self.rng.random() < 0.3:
                words += [f"--{name.replace('_', '-')}", self.rng.choice(values)]
        return [*words, *(["--" + self.rng.choice(NAMES)] if self.rng.random() < 0.03 else [])]

    def command(self) -> list[str]:
        """A command line. A fit is refused before it works, or it would take seconds."""
        self.number += 1
        self.work = self.folder / f"work{self.number}"
        self.work.mkdir()
        kind = self.rng.choice(
            ["fit", "predict", "predict", "evaluate", "info", "data", "run", "report", "report", "odd"]
        )
        return getattr(self, f"_{kind}")()

    def _fit(self) -> list[str]:
        table, target = self.table(), self.rng.choice(["y", *NAMES])
        options = self.some(
            test=NUMBERS,
            seed=NUMBERS,
            hidden=NUMBERS,
            false_alarm=NUMBERS,
            budget=NUMBERS,
            kernel=["[/x]", ",", "rbf,"],
            task=["[/x]", "regression"],
            drop=[*NAMES, "d:on:d"],
            keep=[*NAMES, "d:on:d"],
            device=["cpu", "cuda", "[/x]"],
            report=[self.output(".html", [table])],
        )
        return ["fit", table, "--target", target, "--out", self.output(".bochner", [table]), *options]

    def _predict(self) -> list[str]:
        model, table = self.model(), self.table()
        out = self.output(self.rng.choice([".csv", ".parquet", ""]), [model, table])
        options = self.some(
            coverage=NUMBERS, report=[self.output(".html", [model, table, out])], device=["cpu", "[/x]"]
        )
        return ["predict", model, table, "--out", out, *options, *self.flags()]

    def flags(self) -> list[str]:
        return [flag for flag in ("--json", "--skip-bad-rows") if self.rng.random() < 0.2]

    def _evaluate(self) -> list[str]:
        return ["evaluate", self.model(), self.table(), *self.flags(), *self.some(device=["cpu", "[/x]"])]

    def _info(self) -> list[str]:
        return ["info", self.model(), *(["--json"] if self.rng.random() < 0.5 else [])]

    def _data(self) -> list[str]:
        command = self.rng.choice(["list", "check", "check"])
        return ["data", command, *([self.rng.choice([*NAMES, "boston", "iris"])] if command == "check" else [])]

    def _run(self) -> list[str]:
        name = self.rng.choice([*NAMES, "uci-regression", "uci-classification", "cifar-ood", "rotated-mnist"])
        options = self.some(
            seed=NUMBERS,
            workers=NUMBERS,
            folds=[*NUMBERS, "0,[/x]"],
            sets=NAMES,
            models=NAMES,
            device=["cpu", "cuda", "[/x]"],
            engine=["[/x]", "local"],
            protocol=["[/x]", "paper"],
            posterior=["[/x]", "swag"],
            head=["[/x]"],
        )
        return ["run", name, "--out", self.output(""), *options]

    def _report(self) -> list[str]:
        folder = write_rows_file(self.rng, self.work / "rows", self.rng.choice(FILES))
        return ["report", str(folder), "--out", str(self.work / "out")]

    def _odd(self) -> list[str]:
        words = [*NAMES, *NUMBERS, "fit", "predict", "--help", "--version", "--", "data", "demo"]
        return [word for word in self.rng.choices(words, k=self.rng.randint(0, 4)) if word != "demo"]

    def environment(self) -> dict[str, str]:
        """Hostile environment variables, without a data set that a run could start with."""
        values = {"BOCHNER_DATA": str(self.work / self.rng.choice(["[/red]", "x:on:", "none"]))}
        options = {"COLUMNS": ["40", "x", "100000"], "NO_COLOR": ["1"], "FORCE_COLOR": ["1"], "TERM": ["dumb", "[/x]"]}
        options["BOCHNER_COMMIT"] = ["[/x]"]
        return values | {name: self.rng.choice(few) for name, few in options.items() if self.rng.random() < 0.2}


def contents(folder: Path) -> dict[str, object]:
    """What every path of a folder holds, to see that a command changed nothing."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        regular = path.is_file() and not path.is_symlink()
        found[str(path)] = (path.lstat().st_mode, path.lstat().st_ino, path.read_bytes() if regular else None)
    return found


def violations(fuzz: Fuzz, words: list[str], result: Any, seconds: float, before: dict[str, object]) -> list[str]:
    """What a command did that it must not."""
    problems = []
    error = result.exception
    if error is not None and not isinstance(error, SystemExit):
        problems.append("traceback: " + "".join(traceback.format_exception(error))[-3000:])
    elif result.exit_code not in (0, 1, 2):
        problems.append(f"exit code {result.exit_code}")
    said = [line for line in result.stderr.splitlines() if not line.startswith("bochner: ")]
    if result.exit_code and not said and not result.stdout:
        problems.append("no message")
    if len(said) > MESSAGE_LINES + sum(map(len, words)) / CHARACTERS_PER_LINE:
        problems.append(f"a message of {len(said)} lines")
    if "\x1b[31mred" in result.stderr + result.stdout:
        problems.append("control characters of a name reach the screen")
    if contents(fuzz.inputs) != before:
        problems.append("an input changed, or a file appeared beside it")
    for left in fuzz.folder.rglob(".*.tmp"):
        problems.append(f"left behind: {left}")
    if seconds > LONGEST_SECONDS:
        problems.append(f"took {seconds:.0f} s")
    return problems


def never_fit(*_: object, **__: object) -> None:
    """Stands in for the fit of a command line that nothing was wrong with: only what is before it is fuzzed."""
    raise ValueError("Nothing is wrong with this command line.")


def one(fuzz: Fuzz) -> tuple[str, list[str], list[str]]:
    """Runs one command line: its class, its words and what is wrong."""
    words = fuzz.command()
    before = contents(fuzz.inputs)
    start = time.monotonic()
    here = Path.cwd()
    os.chdir(fuzz.work)
    try:
        result = CliRunner(env=fuzz.environment()).invoke(app, words)
    finally:
        os.chdir(here)
    problems = violations(fuzz, words, result, time.monotonic() - start, before)
    with contextlib.suppress(OSError):
        shutil.rmtree(fuzz.work)
    return f"{words[0] if words else ''}: exit {result.exit_code}"[:60], words, problems


def main() -> None:
    """Fuzzes for a time; prints counts by class, and every violation."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    counts: collections.Counter[str] = collections.Counter()
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        fuzz = Fuzz(options.seed, Path(folder))
        jobs.fitting.fit_table = never_fit
        end = time.monotonic() + options.seconds
        while time.monotonic() < end:
            kind, words, problems = one(fuzz)
            counts[
                kind if kind.split(":")[0] in ("fit", "predict", "evaluate", "info", "data", "run", "report") else "odd"
            ] += 1
            for problem in problems:
                bad += 1
                print(f"VIOLATION in case {fuzz.number} of seed {options.seed}: {words!r:.400}\n{problem}", flush=True)
        (fuzz.inputs / "secret.csv").chmod(0o600)
    print(f"seed {options.seed}: {sum(counts.values())} command lines, {bad} violations")
    for kind, count in sorted(counts.items()):
        print(f"  {kind:<20} {count}")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
