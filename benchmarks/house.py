"""Sizes that tell how easily the code is read: modules, depth of imports, long functions, many parameters, large classes.

python benchmarks/house.py [FOLDER]
"""

import ast
import json
import re
import sys
from functools import cache
from pathlib import Path

SRC = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]) / "src" / "bochner"


def modules() -> dict[str, ast.Module]:
    found = {}
    for path in sorted(SRC.rglob("*.py")):
        parts = path.relative_to(SRC.parent).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = ast.parse(path.read_text())
    return found


def imports(tree: ast.Module, known: set[str]) -> set[str]:
    """Modules of the package that are imported when this one is; not those under TYPE_CHECKING or inside functions."""
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (inner & known) if inner <= known else {node.module, *(inner & known)}
    return found & known


def _is_triton_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(decorator) == "triton.jit" for decorator in node.decorator_list)


def main() -> None:
    trees = modules()
    known = set(trees)
    edges = {name: imports(tree, known) - {name, "bochner"} for name, tree in trees.items()}

    @cache
    def depth(name: str) -> int:
        return 1 + max((depth(other) for other in edges[name] if name not in edges[other]), default=0)

    functions, parameters, classes = [], [], []
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if (lines := (node.end_lineno or 0) - node.lineno + 1) > 50:
                    functions.append(f"{name}.{node.name} ({lines})")
                every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                count = len([a for a in every if a.arg not in ("self", "cls")])
                # A Triton kernel takes every pointer, size and constant as an argument: that list is Triton's.
                if count > 6 and ".cli" not in name and not _is_triton_kernel(node):
                    parameters.append(f"{name}.{node.name} ({count})")
            if isinstance(node, ast.ClassDef):
                methods = [n for n in node.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("__")]
                if len(methods) > 12:
                    classes.append(f"{name}.{node.name} ({len(methods)})")
    text = [path.read_text() for path in SRC.rglob("*.py")]
    top = [path.name for path in SRC.glob("*.py") if path.name != "__init__.py"]
    folders = {
        p.name: len(list(p.glob("*.py"))) - 1 for p in SRC.iterdir() if p.is_dir() and (p / "__init__.py").exists()
    }
    row = {
        "top_level_modules": len(top),
        "folders": folders,
        "import_depth": max(depth(name) for name in trees),
        "functions_over_50_lines": functions,
        "functions_over_6_parameters": parameters,
        "classes_over_12_methods": classes,
        "lines_with_any": sum(len(re.findall(r": Any|-> Any", each)) for each in text),
        "pyright_ignores": sum(each.count("pyright: ignore") for each in text),
        "lines": sum(each.count("\n") for each in text),
    }
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
