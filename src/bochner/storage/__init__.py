"""Models in files: numbers and names, never code.

- ``container``: the file format, its checksum and its signature.
- ``rules``: kinds of rules that values from files must follow.
- ``schema``: the rules for every field; ``tensors``: for every tensor.
- ``writing`` and ``reading``: an estimator as JSON and tensors, and back.
- ``models``: ``save`` and ``load``.
- ``attached``: the same for a StationaryHead.

A file is judged in this order: the format version; the sizes in the header, which must be those of the file; every field of the
JSON and the shape of every tensor; the checksum and the signature; every entry of the tensors; a trial prediction. Like any
Gaussian process a model holds training rows: the anchors of its heads.
"""

from bochner.storage.container import ModelFileError
from bochner.storage.models import SavedModel, load, save

__all__ = ["ModelFileError", "SavedModel", "load", "save"]
