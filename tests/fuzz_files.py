"""Forged model files for a given time: python tests/fuzz_files.py --seconds 60 --seed 1.

Prints how many were refused and how many are right. Ends with 1 where one crashed, gave wrong numbers, took more than ten seconds,
or more memory than its size and 500 MB.
"""

import argparse
import itertools
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from forging import Template, forgeries, outcome, templates

SLOW = 10  # seconds after which a file counts as a hang
MEMORY = 500  # megabytes that a file may take beyond its size


def _memory(field: str) -> float:
    """Megabytes that this process holds (VmRSS) or held at most since the last reset (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


class _Alarm(BaseException):
    """Raised after SLOW seconds; not an Exception that the library could catch."""


def _alarm(*_: object) -> None:
    raise _Alarm


def judge(path: Path, template: Template) -> str:
    """The outcome of a file, with time and memory watched."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak of memory
    before = _memory("VmRSS")
    signal.signal(signal.SIGALRM, _alarm)
    signal.alarm(SLOW)
    try:
        result = outcome(path, template)
    except _Alarm:
        result = f"hang: more than {SLOW} s"
    finally:
        signal.alarm(0)
    used = _memory("VmHWM") - before - path.stat().st_size / 2**20
    return f"memory: {used:.0f} MB" if used > MEMORY else result


def cases(seed: int, folder: Path):
    """(kind of model, change, outcome) of one forged file after another, without end."""
    made = templates(folder)
    sources = {name: forgeries(template, seed) for name, template in made.items()}
    rng, path = random.Random(seed), folder / "forged.bochner"
    while True:
        name = rng.choice(list(sources))
        change, data = next(sources[name])
        path.write_bytes(data)
        yield name, change, judge(path, made[name])


def main() -> int:
    """Runs for the given time or number of files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--files", type=int, default=10**9)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    options = parser.parse_args()
    print(f"forged model files: seed {options.seed}", flush=True)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        found = cases(options.seed, Path(folder))
        end = time.monotonic() + options.seconds
        for name, change, result in itertools.islice(found, options.files):
            counts[result.partition(":")[0]] += 1
            if result not in ("refused", "right"):
                print(f"{name}: {change}: {result}", flush=True)
            if time.monotonic() > end:
                break
    print(", ".join(f"{count} {result}" for result, count in sorted(counts.items())))
    return int(bool(set(counts) - {"refused", "right"}))


if __name__ == "__main__":
    sys.exit(main())
