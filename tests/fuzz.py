"""Runs every generator of hostile input for a share of the time: the scripts ``fuzz_*.py`` beside this file.

Each takes --seconds and --seed, prints its counts, and ends with 1 where something was neither right nor refused in plain words.

Run: python tests/fuzz.py --seconds 300 --seed 0
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
GRACE_SECONDS = 120  # for a script to start and to end; past it, it hangs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    scripts = sorted(FOLDER.glob("fuzz_*.py"))
    share = arguments.seconds / len(scripts)
    paths = [str(FOLDER.parent / "src"), str(FOLDER), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    failed = []
    for script in scripts:
        print(f"{script.name}: {share:.0f} s with seed {arguments.seed}", flush=True)
        command = [sys.executable, str(script), "--seconds", str(share), "--seed", str(arguments.seed)]
        try:
            done = subprocess.run(command, env=environment, check=False, timeout=share + GRACE_SECONDS)
            code = done.returncode
        except subprocess.TimeoutExpired:
            print(f"{script.name} hangs.")
            code = 1
        failed += [script.name] if code else []
    print(f"failed: {', '.join(failed)}" if failed else "every case was right, or refused in plain words")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
