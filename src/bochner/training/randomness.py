"""Random numbers that depend on a seed and a counter alone, for many networks at once.

A stack of networks must draw the same shuffles and dropout masks as each network alone. A hash of (seed, stream, index)
gives them for all networks in one operation; generators would need a loop. Streams are numbered: epochs of shuffles from
0, dropout masks from ``DROPOUT_STREAMS``, so that no two draws share numbers.
"""

import torch
from torch import Tensor

DROPOUT_STREAMS = 2**40  # number of the first stream of dropout masks; the streams below are of shuffles, one an epoch

# The odd constants of SplitMix64 as signed numbers: 2⁶⁴ over the golden ratio, and two factors.
GOLDEN_FACTOR, _MIX1, _MIX2 = -7046029254386353131, -4658895280553007687, -7723592293110705685


def _mix(z: Tensor) -> Tensor:
    """The finaliser of SplitMix64, on int64 with wrap-around; arithmetic shifts are masked into logical ones."""
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * _MIX1
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * _MIX2
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


def _bits(seeds: Tensor, stream: int | Tensor, num: int) -> Tensor:
    """Random int64, (E, num). The stream may be a tensor, so that a CUDA graph can advance it."""
    index = torch.arange(num, device=seeds.device)
    stream = torch.as_tensor(stream, device=seeds.device)
    key = _mix(_mix(seeds.long()[:, None]) + GOLDEN_FACTOR * (stream + 1))
    return _mix(key + GOLDEN_FACTOR * (index + 1))


def counter_uniform(seeds: Tensor, stream: int | Tensor, num: int) -> Tensor:
    """Uniform numbers in [0, 1), (E, num) float64, for integer seeds (E,) and a stream number."""
    return ((_bits(seeds, stream, num) >> 11) & 0x1FFFFFFFFFFFFF).double() * 2.0**-53


def counter_mask(seeds: Tensor, stream: int | Tensor, num: int, p: float) -> Tensor:
    """Booleans (E, num) that are False with probability p, to 16 bits: four of them from every random integer."""
    sixteen = _bits(seeds, stream, -(-num // 4)).view(torch.int16)[:, :num]
    return sixteen >= round(p * 65536) - 32768


def counter_permutation(seeds: Tensor, stream: int, num: int) -> Tensor:
    """One random permutation of ``num`` for each seed, (E, num)."""
    return counter_uniform(seeds, stream, num).argsort(dim=1)
