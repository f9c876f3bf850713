"""Feature extractors: what comes before the model layer."""

import torch
from torch import nn
from torch.nn.utils import skip_init


def linear(
    in_features: int, out_features: int, *, bias: bool = True, generator: torch.Generator | None = None
) -> nn.Linear:
    """An ``nn.Linear`` with torch's usual initial distribution, drawn from an explicit generator."""
    layer = skip_init(nn.Linear, in_features, out_features, bias=bias)
    bound = in_features**-0.5
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, -bound, bound, generator=generator)
    return layer  # pyright: ignore[reportReturnType]


class SeededDropout(nn.Module):
    """Dropout whose mask is given from outside: ``fit_map`` draws it from each network's own seed.

    Without a mask, and in evaluation, it passes its input on unchanged.

    Args:
        p: Probability of setting an entry to zero.
        width: Number of features it acts on.
    """

    mask: torch.Tensor

    def __init__(self, p: float, width: int) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"The p parameter must lie in [0, 1), got {p} instead.")
        self.p, self.width = p, width
        self.register_buffer("mask", torch.ones(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiplies by the mask, (..., width)."""
        return x * self.mask if self.training else x


def mlp(
    in_features: int,
    hidden: tuple[int, ...] = (1000, 1000, 500, 25),
    *,
    dropout: float = 0.1,
    generator: torch.Generator | None = None,
) -> nn.Sequential:
    """Fully connected extractor of the paper's UCI networks, d-1000-1000-500-25 by default.

    Every layer is followed by a ReLU, except that the last one, the bottleneck, ends without an activation. Dropout acts
    on the layer before the bottleneck.
    """
    if not hidden or min(hidden) < 1:
        raise ValueError(f"The hidden parameter must name at least one width of 1 or more, got {hidden} instead.")
    layers: list[nn.Module] = []
    for width in hidden[:-1]:
        layers += [linear(in_features, width, generator=generator), nn.ReLU()]
        in_features = width
    if dropout and layers:
        layers.append(SeededDropout(dropout, in_features))
    return nn.Sequential(*layers, linear(in_features, hidden[-1], generator=generator))
