r"""A stationary prior of infinite width as a finite set of features.

A layer of stationary units and an output layer with weights N(0, a²/K) is, at infinite width, a Gaussian process with covariance
$a^2\kappa(x - x')$. Conditioned on its values at *anchors* $z_1, \dots, z_M$ it is a linear model with M features,

$$ f(x) = \phi(x)^\top w + r(x), \quad \phi(x) = L^{-1}\kappa(Z, x), \quad LL^\top = \kappa(Z, Z), $$

$w \sim \mathrm{N}(0, a^2 I)$,

and a rest $r$ of variance $a^2(1 - \lVert\phi(x)\rVert^2)$. The rest is zero at the anchors, and has the whole prior variance far
from them. Where every row is an anchor the features are exact. Otherwise the rest is ignored when w is fitted, and its variance is
added to every prediction (the 'deterministic training conditional' of Quiñonero-Candela and Rasmussen, 2005).
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from bochner.priors.spectra import Spectrum, euclidean
from bochner.training.threads import one_thread

JITTER = 1e-8  # added to the prior variance of 1: keeps κ(Z, Z) positive definite where anchors lie close together
FEATURE_CHUNK_ROWS = 4096  # rows whose features are computed at a time


def squared_distances(x: Tensor, z: Tensor) -> Tensor:
    """Squared Euclidean distances of all pairs of rows, by one matrix product."""
    return (x.square().sum(-1)[:, None] + z.square().sum(-1)[None, :]).addmm(x, z.mT, alpha=-2).clamp(min=0)


def correlation(spectrum: Spectrum, x: Tensor, z: Tensor) -> Tensor:
    """Kernel κ of all pairs of rows, which must be divided by the lengthscale already."""
    return spectrum.correlation(squared_distances(x, z).sqrt())


@dataclass
class KernelFeatures:
    """The map from rows to features φ(x) of a stationary prior, for given anchors.

    Attributes:
        spectrum: The kernel's spectral density.
        lengthscale: Lengthscale of each input, (d,).
        anchors: The anchors z, (M, d), divided by the lengthscale.
        factor: Lower Cholesky factor L of κ(Z, Z).
    """

    spectrum: Spectrum
    lengthscale: Tensor
    anchors: Tensor
    factor: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        with one_thread():  # the same bits on every machine
            # Exact distances: those by matrix products are off by more than the jitter where rows lie very far apart.
            matrix = self.spectrum.correlation(euclidean(self.anchors, self.anchors))
            matrix.diagonal().add_(JITTER)
            self.factor = torch.linalg.cholesky(matrix)

    @classmethod
    def at(cls, spectrum: Spectrum, lengthscale: Tensor, x: Tensor) -> "KernelFeatures":
        """Features with anchors at the rows of x, (M, d), not yet divided by the lengthscale."""
        return cls(spectrum, lengthscale, x / lengthscale)

    def __call__(self, x: Tensor) -> Tensor:
        """Features of each row, (n, d) to (n, M)."""
        nearness = correlation(self.spectrum, self.anchors, x / self.lengthscale)
        return torch.linalg.solve_triangular(self.factor, nearness, upper=False).mT
