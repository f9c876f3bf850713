"""The page of ``bochner demo``."""

from typing import TYPE_CHECKING

from bochner.reports.page import Section

if TYPE_CHECKING:
    from bochner.experiments.demo import Demo


def demo_sections(demo: "Demo") -> list[Section]:
    """The lines of the demonstration and its picture."""
    caption = "How sure each network is of its class: over the plane, and against the distance (mean of all directions)"
    return [Section("Who is sure far from the data?", "\n\n".join(demo.lines()), None, (demo.figure,), (caption,))]
