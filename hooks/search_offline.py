"""The search index as a script as well: a page opened from a folder may load scripts, but not JSON."""

from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority


@event_priority(-100)
def on_post_build(config: Any, **_: object) -> None:
    """Called by MkDocs when the site is written."""
    folder = Path(config.site_dir) / "search"
    folder.joinpath("search_index.js").write_text(f"var __index = {folder.joinpath('search_index.json').read_text()}")
