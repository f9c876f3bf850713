"""Data sets of the paper and a few small ones, as plain arrays.

`load` reads one, `load_images` a set of images, `folds` gives the paper's splits, `check` verifies a file and `fetch` downloads
one.
"""

from bochner.datasets.checks import Check, check
from bochner.datasets.images import IMAGES, Images, load_images
from bochner.datasets.loading import NAMES, Dataset, Summary, folds, load, summaries
from bochner.datasets.openml import fetch
from bochner.datasets.tables import data_folder

__all__ = [
    "IMAGES",
    "NAMES",
    "Check",
    "Dataset",
    "Images",
    "Summary",
    "check",
    "data_folder",
    "fetch",
    "folds",
    "load",
    "load_images",
    "summaries",
]
