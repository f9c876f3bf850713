"""Random crops of images, from a seed and a counter."""

import torch
import torch.nn.functional as F
from torch import Tensor

from bochner.training.randomness import counter_uniform


def shift(images: Tensor, most: int, seed: int, stream: int, *, mirror: bool = False) -> Tensor:
    """Images (n, c, h, w), each moved by up to ``most`` pixels along both axes and padded with zeros.

    With ``mirror`` half of them are mirrored. The channels of the result are last in memory: convolutions on a GPU are faster so.
    """
    num, _, height, width = images.shape
    draws = counter_uniform(torch.tensor([seed], device=images.device), stream, 3 * num).reshape(3, num, 1, 1)
    top, left = ((2 * most + 1) * draws[:2]).long()
    rows = top + torch.arange(height, device=images.device)[:, None]
    columns = torch.arange(width, device=images.device).expand(num, 1, width)
    if mirror:
        columns = torch.where(draws[2] < 0.5, columns, width - 1 - columns)
    index = torch.arange(num, device=images.device)[:, None, None]
    return F.pad(images, (most,) * 4).permute(0, 2, 3, 1)[index, rows, left + columns].permute(0, 3, 1, 2)
