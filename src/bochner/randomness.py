"""Random numbers that depend on a seed and a counter alone, for many networks at once.

A stack of networks must draw the same shuffles and dropout masks as each network alone. A generator per network would
mean a loop over them; a hash of (seed, stream, index) does not.
"""

import torch
from torch import Tensor

_GOLDEN, _MIX1, _MIX2 = -7046029254386353131, -4658895280553007687, -7723592293110705685


def _mix(z: Tensor) -> Tensor:
    """The finaliser of SplitMix64, on int64 with wrap-around; arithmetic shifts are masked into logical ones."""
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * _MIX1
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * _MIX2
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


def counter_uniform(seeds: Tensor, stream: int, num: int) -> Tensor:
    """Uniform numbers in [0, 1), (E, num) float64, for integer seeds (E,) and a stream number."""
    index = torch.arange(num, device=seeds.device)
    # Python's integers do not wrap around by themselves.
    offset = (_GOLDEN * (stream + 1) + 2**63) % 2**64 - 2**63
    key = _mix(_mix(seeds.long()[:, None]) + offset)
    bits = _mix(key + _GOLDEN * (index + 1))
    return ((bits >> 11) & 0x1FFFFFFFFFFFFF).double() * 2.0**-53


def counter_permutation(seeds: Tensor, stream: int, num: int) -> Tensor:
    """One random permutation of ``num`` for each seed, (E, num)."""
    return counter_uniform(seeds, stream, num).argsort(dim=1)
