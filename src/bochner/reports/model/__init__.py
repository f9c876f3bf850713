"""The report on a model for tables, as one interactive HTML file: of a fit, of an evaluation, of predictions.

``rows`` calls the model, ``peers`` scores it beside other models, ``calibration`` judges how sure it is, ``columns`` computes the
effect of columns, ``what_if`` moves values of single rows, ``strange`` explains strange rows, ``collecting`` keeps rows of long
tables, ``parts`` makes sentences, tables and charts, ``reports`` puts the parts in order, and ``page`` makes the file.
"""

from bochner.reports.model.collecting import Collected
from bochner.reports.model.reports import Heading, measured_report, predicted_report
from bochner.reports.model.rows import Rows

__all__ = ["Collected", "Heading", "Rows", "measured_report", "predicted_report"]
