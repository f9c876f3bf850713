"""Data sets of the paper and a few small ones, as plain arrays.

`load` reads one, `folds` gives the paper's splits, `check` verifies a file and `fetch` downloads one.
"""

from bochner.datasets.checks import Check, check
from bochner.datasets.loading import NAMES, Dataset, Summary, data_folder, folds, load, summaries
from bochner.datasets.openml import fetch

__all__ = ["NAMES", "Check", "Dataset", "Summary", "check", "data_folder", "fetch", "folds", "load", "summaries"]
