"""Sizes that tell how easily the code is read: modules, depth of imports, long functions, long parameter lists, large classes.

With --walks also the way of three calls through the package: the deepest chain of modules on the call stack.

Run: python benchmarks/house.py [FOLDER] [--walks]    (FOLDER: a checkout, by default this one; prints JSON; walks read boston
from BOCHNER_DATA)
"""

import argparse
import ast
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

LONG_FUNCTION_LINES = 50
MANY_PARAMETERS = 6
MANY_METHODS = 12

# A walk is a command of Python; its module chain is recorded while it runs, on one thread.
WALKS = {
    "estimator fit": """
import numpy as np
from bochner import StationaryRegressor
x = np.random.default_rng(0).normal(size=(220, 3))
with walk():
    StationaryRegressor(hidden_layer_sizes=(8,), random_state=0).fit(x, x[:, 0])
""",
    "table fit": """
import numpy as np
rows = np.random.default_rng(0).normal(size=(100, 3)).round(3)
open("t.csv", "w").write("a,b,y\\n" + "\\n".join(",".join(map(str, row)) for row in rows))
sys.argv = ["bochner", "fit", "t.csv", "--target", "y", "--out", "m.bochner", "--report", "r.html", "--quick"]
from bochner.cli import start
with walk():
    start()
""",
    "UCI run": """
sys.argv = "bochner run uci-regression --protocol paper --sets boston --models rbf-sin --folds 0 --out rows".split()
from bochner.cli import start
with walk():
    start()
""",
}
TRACER = """
import contextlib, json, sys
longest, chain, pushed = [], [], []
def follow(frame, event, _):
    if event == "call":
        name = frame.f_globals.get("__name__", "")
        is_import = frame.f_code.co_name == "<module>"  # of what is imported when it is needed
        new = name.startswith("bochner.") and not is_import and (not chain or chain[-1] != name)
        pushed.append(new)
        if new:
            chain.append(name)
            if len(chain) > len(longest):
                longest[:] = chain
    elif event == "return" and pushed and pushed.pop():
        chain.pop()
@contextlib.contextmanager
def walk():
    sys.setprofile(follow)
    try:
        yield
    except SystemExit as end:
        assert not end.code, end.code
    finally:
        sys.setprofile(None)
        print("WALK" + json.dumps(longest))
"""


def read_modules(source: Path) -> dict[str, ast.Module]:
    """The syntax trees of all modules, by dotted name."""
    trees = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source.parent).with_suffix("").parts
        trees[".".join(parts).removesuffix(".__init__")] = ast.parse(path.read_text())
    return trees


def imported_modules(tree: ast.Module, known: set[str]) -> set[str]:
    """Modules of the package that are imported with this one; not those under TYPE_CHECKING or inside functions."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= (inner & known) if inner <= known else {node.module, *(inner & known)}
    return names & known


def import_depth(trees: dict[str, ast.Module]) -> int:
    """Number of modules in the longest chain of imports."""
    edges = {name: imported_modules(tree, set(trees)) - {name, "bochner"} for name, tree in trees.items()}

    @cache
    def depth(name: str) -> int:
        return 1 + max((depth(other) for other in edges[name] if name not in edges[other]), default=0)

    return max(depth(name) for name in trees)


def is_triton_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it is a kernel for the GPU, whose parameters are its pointers and sizes: it cannot take objects."""
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def measure_functions(trees: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Long functions, long parameter lists outside the command line, and large classes."""
    lengths, parameters, classes = [], [], []
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if (lines := (node.end_lineno or 0) - node.lineno + 1) > LONG_FUNCTION_LINES:
                    lengths.append(f"{name}.{node.name} ({lines})")
                every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                count = len([a for a in every if a.arg not in ("self", "cls")])
                if count > MANY_PARAMETERS and ".cli" not in name and not is_triton_kernel(node):
                    parameters.append(f"{name}.{node.name} ({count})")
            if isinstance(node, ast.ClassDef):
                methods = [n for n in node.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("__")]
                if len(methods) > MANY_METHODS:
                    classes.append(f"{name}.{node.name} ({len(methods)})")
    return {
        "functions_over_50_lines": lengths,
        "functions_over_6_parameters": parameters,
        "classes_over_12_methods": classes,
    }


def module_chains(folder: Path) -> dict[str, list[str]]:
    """For each walk, the longest chain of modules that call each other; one that comes twice in a row counts once.

    Imports within functions are no calls; ``import_depth`` counts imports.
    """
    import tempfile

    chains = {}
    environment = {**os.environ, "PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1"}
    for title, code in WALKS.items():
        with tempfile.TemporaryDirectory() as scratch:
            command = [sys.executable, "-c", TRACER + code]
            done = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, text=True, check=False)
        line = next((line for line in done.stdout.splitlines() if line.startswith("WALK")), None)
        if line is None or done.returncode:
            raise RuntimeError(f"{title} failed: {done.stdout[-1000:]}{done.stderr[-1000:]}")
        chains[title] = [name.removeprefix("bochner.") for name in json.loads(line[4:])]
    return chains


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parents[1])
    parser.add_argument("--walks", action="store_true")
    arguments = parser.parse_args()
    source = arguments.folder / "src" / "bochner"
    trees = read_modules(source)
    text = [path.read_text() for path in source.rglob("*.py")]
    folders = {
        str(p.parent.relative_to(source)): len(list(p.parent.glob("*.py"))) - 1 for p in source.rglob("__init__.py")
    }
    row = {
        "top_level_modules": folders.pop("."),
        "files_of_each_folder": folders,
        "import_depth": import_depth(trees),
        **measure_functions(trees),
        "lines_with_any": sum(len(re.findall(r": Any|-> Any", each)) for each in text),
        "pyright_ignores": sum(each.count("pyright: ignore") for each in text),
        "lines": sum(each.count("\n") for each in text),
    }
    if arguments.walks:
        chains = module_chains(arguments.folder.resolve())
        row["walks"] = {title: {"modules": len(chain), "chain": " → ".join(chain)} for title, chain in chains.items()}
    print(json.dumps(row, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
