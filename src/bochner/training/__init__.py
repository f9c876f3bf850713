"""MAP training, of one network or of a stack of networks as a single computation.

``map`` holds ``fit_map`` and its recipes. Behind it: ``checks`` of what comes in, ``batches`` of rows of tensors and
loaders, the ``stack`` engine with its networks' ``parts`` and their ``optimizers``, ``randomness`` from seeds and counters,
``fused`` kernels for a GPU, and how many ``threads`` work.
"""

from bochner.training.map import Fit, Recipe, StackRows, fit_map, fit_stacks

__all__ = ["Fit", "Recipe", "StackRows", "fit_map", "fit_stacks"]
