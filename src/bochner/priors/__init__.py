"""Priors: an activation and a spectrum together are a prior, and a prior has a kernel.

``activations`` and their bias priors; ``spectra``: spectral densities, which are weight priors; ``kernels`` of infinitely wide
layers; ``frequencies``: how the units of a layer are drawn; ``arrays``: types for formulas that torch and JAX share.
"""
