"""Methods that draw the weights and biases of a model layer at initialisation.

Under all three methods each single unit has exactly the prior distribution. They differ in how the units of one layer depend
on each other, and so in how far the layer's kernel is from its limit.

- ``iid``: independent units, as in the paper.
- ``orthogonal``: blocks of d weight vectors point in mutually orthogonal directions; their lengths are independent draws
  from the prior's distribution of lengths. Needs an isotropic spectrum.
- ``sobol``: a scrambled Sobol sequence over weights *and* biases, mapped through the inverse CDF.
"""
# torch.linalg and other parts of torch declare no types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import math

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from bochner.arguments import generator_device
from bochner.errors import one_of
from bochner.priors.activations import Activation
from bochner.priors.spectra import Spectrum, open_uniform

DRAW_METHODS = ("iid", "orthogonal", "sobol")  # names of the methods, as in the module docstring


def draw(
    spectrum: Spectrum,
    activation: Activation,
    num: int,
    dim: int,
    *,
    method: str = "iid",
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Draws ``num`` units from the prior at unit lengthscale, in float64 on the CPU.

    Returns:
        Weights of shape (num, dim), and biases of shape (num,) or None where the activation has none.
    """
    one_of("frequencies", method, DRAW_METHODS)
    weight_dim = spectrum.uniforms(dim)
    num_uniforms = weight_dim + (activation.bias != "none")
    u = _sobol_points(num, num_uniforms, generator) if method == "sobol" else open_uniform(num, num_uniforms, generator)
    if method == "sobol" and dim > 1:
        # The first Sobol coordinate is the best one. Every phase depends on the bias, but only partly on each weight.
        u = u.roll(-1, dims=1)
    weight = (
        _orthogonal_weights(spectrum, u, dim, generator) if method == "orthogonal" else spectrum.from_uniform(u, dim)
    )
    if activation.bias == "uniform":
        return weight, math.pi * (2 * u[:, -1] - 1)
    return weight, torch.special.ndtri(u[:, -1]) if activation.bias == "normal" else None


def _sobol_points(num: int, dim: int, generator: torch.Generator | None) -> Tensor:
    """Scrambled Sobol points strictly inside the unit cube, (num, dim).

    The first coordinate is an evenly spaced grid under a random shift (a Hammersley set): for numbers of units that are
    not powers of two this halves the error, and each point on its own stays uniform.
    """
    if dim - 1 > SobolEngine.MAXDIM:
        limit = SobolEngine.MAXDIM
        raise ValueError(
            f"Sobol frequencies need at most {limit} dimensions, got {dim - 1}; use 'orthogonal' or 'iid'."
        )
    grid = (
        (open_uniform(1, 1, generator) + torch.arange(num, dtype=torch.float64).reshape(-1, 1) / num)
        .remainder(1.0)
        .clamp(min=2.0**-54)
    )
    if dim == 1:
        return grid
    device = generator_device(generator)
    seed = int(torch.randint(2**31 - 1, (), generator=generator, device=device))
    # The points lie on a grid of 2^-30 that contains 0: half a cell up centres them in their cells.
    points = SobolEngine(dim - 1, scramble=True, seed=seed).draw(num, dtype=torch.float64) + 2.0**-31
    return torch.cat([grid, points], dim=1)


def _orthogonal_weights(spectrum: Spectrum, u: Tensor, dim: int, generator: torch.Generator | None) -> Tensor:
    """Orthogonal directions times lengths from the prior, (num, dim).

    A Haar-distributed orthogonal matrix has uniform rows, so that each row times an independent length of the right
    distribution has the prior distribution.
    """
    if not spectrum.isotropic:
        raise ValueError(
            f"The frequencies parameter 'orthogonal' needs an isotropic spectrum, got {spectrum}; use 'sobol' or 'iid'."
        )
    blocks = math.ceil(len(u) / dim)
    q, r = torch.linalg.qr(torch.special.ndtri(open_uniform(blocks * dim, dim, generator)).reshape(blocks, dim, dim))
    # QR is unique, and Q Haar-distributed, once the diagonal of R is positive.
    directions = (q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]).mT.reshape(-1, dim)[: len(u)]
    return directions * spectrum.from_uniform(u, dim).norm(dim=-1, keepdim=True)
