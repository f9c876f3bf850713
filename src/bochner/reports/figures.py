"""Writing figures to files."""

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from bochner.files import replacing


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a figure in the format of the file's suffix; an SVG is the same, byte for byte, for the same rows."""
    with matplotlib.rc_context({"svg.hashsalt": "bochner", "svg.fonttype": "path"}), replacing(path) as part:
        figure.savefig(part, format=path.suffix.removeprefix("."), metadata={"Date": None, "Creator": None})
