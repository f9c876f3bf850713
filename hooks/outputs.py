"""The code of a page is run while the site is built, and what each block prints is shown below it.

The blocks of a page share one namespace and run in an empty folder. A block that fails stops the build. With DOCS_RUN=0 in the
environment nothing is run and nothing is shown: for a quick look at the text.
"""

import contextlib
import io
import os
import re
import tempfile
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"^```python\n(.*?)^```\n", re.DOTALL | re.MULTILINE)


def run_page(text: str, name: str = "page") -> str:
    """The page with the output of each python block after it.

    Args:
        text: The page in Markdown.
        name: What to call the page in a traceback.
    """
    namespace: dict[str, Any] = {"__name__": name}

    def replace(match: re.Match[str]) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(match[1], name, "exec"), namespace)
        output = printed.getvalue().rstrip()
        return match[0] + (f'\n```{{.text .output title="prints"}}\n{output}\n```\n' if output else "")

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        text = BLOCK.sub(replace, text)
        left = [path.name for path in Path(folder).iterdir()]
    if left:
        raise RuntimeError(f"The code of {name} leaves files behind: {left}.")
    return text


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Called by MkDocs with the text of each page; pages with `run: false` at their top are left alone."""
    wanted = page.meta.get("run", True) and os.environ.get("DOCS_RUN", "1") != "0"
    if not (wanted and BLOCK.search(markdown)):
        return markdown
    return run_page(markdown, page.file.src_uri)
