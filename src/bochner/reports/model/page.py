"""The page of a report: parts with tables and charts in one HTML file that holds its style, script and data.

Texts are escaped by the template. Numbers for charts are JSON in an element that no browser executes, and the only script that may
run is the one whose hash the page's policy names.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

import bochner
from bochner.reports.model.rows import number, number_text

Cell = str | float | int | None


@dataclass(frozen=True)
class Table:
    """A table of a part.

    Attributes:
        caption: Text above it.
        header: Names of its columns.
        rows: Its rows: texts, or numbers, by which it can be sorted.
        control: Whether it can be sorted and filtered.
        shades: A share from 0 to 1 behind each cell after the first; none by default.
        key: Its id on the page; empty for none.
        folded: Whether it stands behind its caption, which opens it: the numbers of a chart.
    """

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    control: bool = False
    shades: Sequence[Sequence[float]] = ()
    key: str = ""
    folded: bool = False

    def is_number(self, place: int) -> bool:
        """Whether a column holds numbers."""
        return any(isinstance(line[place], int | float) for line in self.rows)

    def cells(self) -> list[list[dict[str, Any]]]:
        """The cells as the template takes them."""
        return [[self._cell(cell, row, place) for place, cell in enumerate(line)] for row, line in enumerate(self.rows)]

    def _cell(self, cell: Cell, row: int, place: int) -> dict[str, Any]:
        shade = round(100 * self.shades[row][place - 1]) if self.shades and place else 0
        if cell is None or isinstance(cell, str):
            return {"text": "—" if cell is None else cell, "value": None, "shade": shade}
        return {"text": number_text(float(cell)), "value": number(float(cell)), "shade": shade}


@dataclass(frozen=True)
class Part:
    """A part of the page.

    Attributes:
        title: Its heading.
        text: A paragraph that says how to read it.
        charts: Names of its charts among those of the page, each with a label.
        tables: Its tables.
    """

    title: str
    text: str = ""
    charts: Sequence[tuple[str, str]] = ()
    tables: Sequence[Table] = ()


@dataclass
class Page:
    """The content of a report.

    Attributes:
        title: Title of the page.
        note: A line under the title.
        answers: The cards at the top: a question, its answer in a sentence or two, and whether it is a warning.
        parts: The parts below, in order.
        charts: Data of the charts, by name.
    """

    title: str
    note: str
    answers: list[tuple[str, str, bool]]
    parts: list[Part] = field(default_factory=list)
    charts: dict[str, Any] = field(default_factory=dict)

    def render(self) -> str:
        """The page as HTML."""
        folder = files("bochner.reports.model")
        template, style, script = (folder.joinpath(f"page.{end}").read_text("utf-8") for end in ("html", "css", "js"))
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        # '<' would let a cell end the element; in JSON it can be written otherwise.
        data = json.dumps(self.charts, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace(
            "<", "\\u003c"
        )
        environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        return environment.from_string(template).render(
            page=self,
            style=Markup(style),
            script=Markup(script),
            digest=digest,
            data=Markup(data),
            version=bochner.__version__,
        )
