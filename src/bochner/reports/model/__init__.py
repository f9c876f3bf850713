"""The report on a model for tables, as one interactive HTML file: of a fit, of an evaluation, of predictions.

``rows`` asks the model, ``peers`` measures it beside others, ``columns`` and ``strange`` say what columns do and which rows are
odd, ``parts`` puts their numbers into words, tables and charts, ``reports`` puts the parts in order, ``page`` makes the file.
"""

from bochner.reports.model.collecting import Collected
from bochner.reports.model.reports import Heading, measured_report, predicted_report
from bochner.reports.model.rows import Rows

__all__ = ["Collected", "Heading", "Rows", "measured_report", "predicted_report"]
