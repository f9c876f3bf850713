"""A report as one HTML file: text, tables and figures in it, nothing loaded from elsewhere, no script."""

import io
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import matplotlib
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape
from matplotlib.figure import Figure

import bochner
from bochner.files import write_text
from bochner.reports.blocks import Table

WIDE = 7.0  # inches: wider figures are not shrunk on a phone, where they would be illegible; they scroll
_NUMBER = re.compile(r"[+−-]?\d|[—-]?$")  # the beginning of a number, a dash, or an empty cell


@dataclass(frozen=True)
class Section:
    """A section of a report: a title, then text, a table and figures, each optional.

    Attributes:
        title: The heading, also in the table of contents.
        text: Paragraphs, separated by empty lines.
        table: The header, then the lines, all of the same length.
        figures: Drawn in this order.
        captions: One for each figure, or none at all.
    """

    title: str
    text: str = ""
    table: Table | None = None
    figures: tuple[Figure, ...] = ()
    captions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.captions and len(self.captions) != len(self.figures):
            raise ValueError(
                f"The section {self.title!r} must have a caption for each of its {len(self.figures)} figures or none, "
                f"got {len(self.captions)}."
            )
        if self.table is not None and (not self.table or len({len(line) for line in self.table}) > 1):
            lengths = sorted({len(line) for line in self.table})
            raise ValueError(
                f"The table of section {self.title!r} must have a header and lines of its length, got lengths {lengths}."
            )


def _svg(figure: Figure, number: int, label: str) -> Markup:
    """A figure as inline SVG: without prolog, comments and metadata, and with ids that are unique on the page."""
    text, prefix = io.StringIO(), f"figure-{number}-"
    settings: Any = {"svg.hashsalt": f"bochner-{number}", "svg.fonttype": "none"}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        # A name in a script that matplotlib's font lacks is measured roughly; the browser draws it with its own font.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font", category=UserWarning)
        # Each drawing moves the layout a little: it is computed once and then fixed, so that the page is the same every time.
        if figure.get_layout_engine() is not None:
            figure.draw_without_rendering()
            figure.set_layout_engine("none")
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    start, rest = svg.split(">", 1)
    width, height = (float(size) for size in re.findall(r'\b(?:width|height)="([\d.]+)pt"', start))
    # Only in tags: what is between them is the text of the figure.
    rest = re.sub(
        r"<[^>]*>", lambda tag: re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}", tag[0]), rest, flags=re.DOTALL
    )
    kind = ' class="wide"' if figure.get_figwidth() > WIDE else ""
    # Points to CSS pixels, 96 to 72.
    size = f'viewBox="0 0 {width:g} {height:g}" style="--width: {width * 4 / 3:.0f}px"'
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    opening = f'<svg {names} {size}{kind} role="img" aria-label="{escape(label)}">'
    return Markup(opening + re.sub(r"\n\s*", "\n", rest).strip())


def _cells(table: Table | None) -> list[list[tuple[str, str]]]:
    """The texts of a table, each with the class of its column: "number" where all cells look like one, after the first.

    Cells of a column called "difference" are coloured too: "near" where they carry a ✓, "far" where they hold a number without it.
    """
    if table is None:
        return []
    columns = list(zip(*table, strict=True))
    numbers = [len(table) > 1 and all(map(_NUMBER.match, texts[1:])) for texts in columns[1:]]
    kinds = ["", *("number" if number else "" for number in numbers)]

    def coloured(text: str, title: str, kind: str) -> tuple[str, str]:
        color = "" if title != "difference" or text == title or text == "—" else "near" if "✓" in text else "far"
        return text, " ".join(filter(None, (kind, color)))

    return [[coloured(*each) for each in zip(line, table[0], kinds, strict=True)] for line in table]


def _views(sections: Sequence[Section]) -> list[dict[str, Any]]:
    """The sections as the template takes them."""
    views, count = [], 0
    for section in sections:
        pictures = []
        for index, figure in enumerate(section.figures):
            count += 1
            caption = section.captions[index] if section.captions else ""
            label = caption or f"{section.title}, figure {index + 1}"
            wide = figure.get_figwidth() > WIDE
            pictures.append({"svg": _svg(figure, count, label), "caption": caption, "label": label, "wide": wide})
        cells = _cells(section.table)
        views.append(
            {
                "title": section.title,
                "paragraphs": [part.strip() for part in section.text.split("\n\n") if part.strip()],
                "table": bool(cells),
                "header": cells[0] if cells else [],
                "lines": cells[1:],
                "figures": pictures,
            }
        )
    return views


def render(title: str, sections: Sequence[Section], *, note: str = "") -> str:
    """The report as HTML: the same, byte for byte, for the same sections.

    Args:
        title: Title of the page.
        sections: Its sections, in order; the table of contents lists them.
        note: A sentence under the title, such as what the report is about and when it was made.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files("bochner.reports").joinpath("page.html").read_text(encoding="utf-8"))
    return template.render(title=title, sections=_views(sections), note=note, version=bochner.__version__)


def write(path: Path, title: str, sections: Sequence[Section], *, note: str = "") -> Path:
    """Writes the report into a file, replacing it as a whole; returns its path."""
    write_text(path, render(title, sections, note=note))
    return path
