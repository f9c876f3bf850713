"""Text and tables of a report before they are Markdown, LaTeX or a page."""

from collections.abc import Iterable
from dataclasses import dataclass

Table = list[list[str]]  # the header, then the lines


class MissingRowsError(ValueError):
    """Raised by a figure or table whose rows are not all there; the message says which rows are missing."""


@dataclass(frozen=True)
class Block:
    """A piece of a report: lines of text, then a table.

    Attributes:
        title: The heading; empty for none.
        part: A smaller heading under it; empty for none.
        text: Lines; several become a list.
        table: The header, then the lines of a table.
    """

    title: str = ""
    part: str = ""
    text: tuple[str, ...] = ()
    table: Table | None = None


def markdown_table(table: Table) -> str:
    """A table in Markdown."""
    lines = [table[0], ["---"] * len(table[0]), *table[1:]]
    return "\n".join("| " + " | ".join(text.replace("|", r"\|") for text in line) + " |" for line in lines)


def as_markdown(blocks: Iterable[Block]) -> str:
    """Blocks in Markdown: a heading where the title changes, a smaller one for a part."""
    parts, title = [], ""
    for block in blocks:
        if block.title and block.title != title:
            parts.append(f"## {block.title}")
            title = block.title
        if block.part:
            parts.append(f"### {block.part}")
        if block.text:
            mark = "- " if len(block.text) > 1 else ""
            parts.append("\n".join(mark + line for line in block.text))
        if block.table is not None:
            parts.append(markdown_table(block.table))
    return "\n\n".join(parts) + "\n"
