"""The theorem: an activation and a spectrum are a prior, and a prior is a kernel.

``activations`` and their bias priors, ``spectra`` (spectral densities, which are weight priors), ``kernels`` of infinitely wide
layers, ``frequencies``: how the units of a layer are drawn.
"""
