"""Feature extractors for columns of numbers: linear layers with ReLU, and intervals of each column."""

from collections.abc import Sequence

import torch
from torch import nn

from bochner.arguments import finite_tensor, generator_device, probability, shown, whole_number
from bochner.networks.dropout import SeededDropout


def linear(
    in_features: int, out_features: int, *, bias: bool = True, generator: torch.Generator | None = None
) -> nn.Linear:
    """An ``nn.Linear`` with torch's usual initial distribution, drawn from an explicit generator."""
    in_features = whole_number("in_features", in_features)
    out_features = whole_number("out_features", out_features)
    generator_device(generator)
    with torch.random.fork_rng(devices=[]):  # torch first draws weights from its global state; they are replaced
        layer = nn.Linear(in_features, out_features, bias=bias)
    bound = in_features**-0.5
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, -bound, bound, generator=generator)
    return layer


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
    if not isinstance(hidden, Sequence) or isinstance(hidden, str) or not hidden:
        raise ValueError(
            f"The hidden parameter must name at least one width of 1 or more, got {shown(hidden)} instead."
        )
    hidden = tuple(whole_number("hidden", width) for width in hidden)
    dropout = probability("dropout", dropout, zero=True)
    layers: list[nn.Module] = []
    for width in hidden[:-1]:
        layers += [linear(in_features, width, generator=generator), nn.ReLU()]
        in_features = width
    if dropout and layers:
        layers.append(SeededDropout(dropout, in_features))
    return nn.Sequential(*layers, linear(in_features, hidden[-1], generator=generator))


class Intervals(nn.Module):
    r"""Passes every column on, and beside it how much of each of its intervals lies below the value.

    An interval from $l$ to $l + w$ gives $\operatorname{clamp}((x - l) / w, 0, 1) - \tfrac12$. Layers that follow can then learn a
    steep step or a value that stands out as easily as a slope. Beyond the outermost intervals only the columns themselves change.
    This is the piecewise linear encoding of Gorishniy et al. (2022). It is a module, so that it is part of the network, on its
    device and in its file; scikit-learn's ``SplineTransformer`` of degree 1 would be neither.

    Args:
        column: Which column each interval divides.
        left: Where it begins.
        width: How long it is.
    """

    column: torch.Tensor
    left: torch.Tensor
    width: torch.Tensor

    def __init__(self, column: torch.Tensor, left: torch.Tensor, width: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("column", column)
        self.register_buffer("left", left)
        self.register_buffer("width", width)

    @classmethod
    def of(cls, x: torch.Tensor, most: int, total: int) -> "Intervals":
        """Intervals between quantiles of the distinct values of each column of standardised rows x, (n, d).

        Values count as distinct from the fourth decimal on. A column of two values or fewer has none: it is a step already.

        Args:
            x: The rows.
            most: Number of intervals of a column, at most.
            total: Number of intervals of all columns, at most.
        """
        if finite_tensor("x", x).ndim != 2:
            raise ValueError(f"The x parameter must have shape (n, d), got {tuple(x.shape)} instead.")
        most, total = whole_number("most", most, least=0), whole_number("total", total, least=0)
        x = x if x.is_floating_point() else x.double()
        # In float32, as in training: values that differ there stay apart.
        distinct = {k: v.round(decimals=4).float().unique() for k, v in enumerate(x.mT)} if total > 1 else {}
        divided = {column: values for column, values in distinct.items() if len(values) > 2}
        most = min(most, total // max(1, len(divided)))
        column, left, width = [x.new_empty(0, dtype=torch.long)], [x.new_empty(0)], [x.new_empty(0)]
        for number, values in divided.items() if most > 1 else ():
            at = torch.linspace(0, len(values) - 1, min(most, len(values) - 1) + 1, dtype=torch.float64)
            knots = values[at.round().long().to(x.device)]
            column.append(torch.full_like(knots[1:], number, dtype=torch.long))
            left.append(knots[:-1])
            width.append(knots.diff())
        return cls(torch.cat(column), torch.cat(left).to(x), torch.cat(width).to(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., d) to (..., d + number of intervals)."""
        x = x if x.is_floating_point() else x.to(self.left)
        covered = (x.index_select(-1, self.column) - self.left) / self.width
        return torch.cat([x, covered.clamp(0, 1) - 0.5], -1)
