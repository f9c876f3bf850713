"""The gallery: each script of examples/ is run while the site is built, and shown with what it prints and draws.

With DOCS_RUN=0 in the environment the scripts are shown without being run.
"""

import ast
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PLACE = "<!-- gallery -->"


def run_example(script: Path) -> tuple[str, dict[str, bytes]]:
    """The output of a script, and the figures that it writes, by name."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100", "PYTHONIOENCODING": "utf-8"}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        end = subprocess.run([sys.executable, str(script)], cwd=folder, env=environment, capture_output=True, text=True)
        if end.returncode:
            raise RuntimeError(f"{script.name} failed: {end.stderr}")
        return end.stdout.rstrip(), {path.name: path.read_bytes() for path in sorted(Path(folder).glob("*.svg"))}


def section(script: Path, printed: str, figures: list[str]) -> str:
    """A script as Markdown: its first sentence, its figures, what it prints, and its code folded away."""
    source = script.read_text()
    about = (ast.get_docstring(ast.parse(source)) or script.stem).split("\n\nRun:")[0]
    title, _, rest = about.partition("\n")
    parts = [f"## {script.stem.replace('_', ' ').capitalize()}", f"**{title}**", rest.strip()]
    parts += [f"![{title}](gallery/{name})" for name in figures]
    if printed:
        parts.append(f'```{{.text title="prints"}}\n{printed}\n```')
    code = "\n".join("    " + line for line in ["```python", *source.splitlines(), "```"])
    parts.append(f'??? example "examples/{script.name}"\n\n{code}')
    return "\n\n".join(part for part in parts if part)


def on_files(files: Any, config: Any, **_: object) -> Any:
    """Called by MkDocs with all files of the site: runs the scripts and adds their figures."""
    scripts = sorted((ROOT / "examples").glob("*.py"))
    results = [("", {}) for _ in scripts]
    if os.environ.get("DOCS_RUN", "1") != "0":
        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(run_example, scripts))
    sections = []
    for script, (printed, figures) in zip(scripts, results, strict=True):
        for name, content in figures.items():
            files.append(File.generated(config, f"gallery/{name}", content=content))
        sections.append(section(script, printed, list(figures)))
    page = files.get_file_from_path("gallery.md")
    page.content_string = page.content_string.replace(PLACE, "\n\n".join(sections))
    return files
