"""Feature extractors: what comes before the model layer."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from bochner.arguments import finite_tensor, generator_device, positive_number, probability, shown, whole_number

GOOGLENET_NARROWEST = 16  # channels of the narrowest branch of GoogLeNet
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)  # that fit_map can seed


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


class SeededDropout(nn.Module):
    """Dropout whose mask is given from outside: ``fit_map`` draws it from each network's own seed.

    Without a mask, and in evaluation, it passes its input on unchanged.

    Args:
        p: Probability of setting an entry to zero.
        shape: Sizes of the mask of a row: those of the features it acts on, or 1 where entries go together.
    """

    mask: torch.Tensor

    def __init__(self, p: float, *shape: int) -> None:
        super().__init__()
        shape = tuple(whole_number("shape", size) for size in shape)
        self.p, self.shape, self.width = probability("p", p, zero=True), shape, math.prod(shape)
        self.register_buffer("mask", torch.ones(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiplies by the mask, (..., width)."""
        if not self.training or self.mask.ndim == 0:
            return x * self.mask if self.training else x
        return x * self.mask.unflatten(-1, self.shape)


@contextlib.contextmanager
def seeded_dropout(extractors: Sequence[nn.Module], example: torch.Tensor) -> Iterator[None]:
    """Puts a ``SeededDropout`` in the place of every ``nn.Dropout`` for a while: each network then has masks of its own.

    Args:
        extractors: Networks of one structure.
        example: Some inputs, whose passage through the first network tells the sizes.
    """
    names = [n for n, m in extractors[0].named_modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
    shapes = _output_shapes(extractors[0], names, example) if names else {}
    names = [name for name in names if name in shapes]  # some layers go past theirs: torch's transformer, in evaluation
    before: list[dict[str, Any]] = [{name: e.get_submodule(name) for name in names} for e in extractors]
    try:
        for extractor, layers in zip(extractors, before, strict=True):
            for name, layer in layers.items():
                mask = shapes[name] if type(layer) is nn.Dropout else (shapes[name][0], *[1] * (len(shapes[name]) - 1))
                extractor.set_submodule(name, SeededDropout(layer.p, *mask).train(layer.training))
        yield
    finally:
        for extractor, layers in zip(extractors, before, strict=True):
            for name, layer in layers.items():
                extractor.set_submodule(name, layer.train(extractor.training))


def _output_shapes(network: nn.Module, names: list[str], example: torch.Tensor) -> dict[str, torch.Size]:
    """Sizes of a row at the named modules, without the first."""
    shapes: dict[str, torch.Size] = {}
    odd = [n for n in names if type(network.get_submodule(n)) not in DROPOUTS]
    if odd or "" in names:
        raise ValueError(f"The networks may hold nn.Dropout and nn.Dropout1d to 3d, got {odd or network} instead.")

    def hear(name: str) -> Any:
        return lambda _, __, output: shapes.__setitem__(name, output.shape[1:])

    handles = [network.get_submodule(name).register_forward_hook(hear(name)) for name in names]
    training = network.training
    try:
        with torch.no_grad():
            network.eval()(example)
    finally:
        network.train(training)
        for handle in handles:
            handle.remove()
    return shapes


class Intervals(nn.Module):
    r"""Passes every column on, and beside it how much of each of its intervals lies below the value.

    An interval from $l$ to $l + w$ gives $\operatorname{clamp}((x - l) / w, 0, 1) - \tfrac12$. Layers that follow can then learn a
    steep step or a value that stands out as easily as a slope. Beyond the outermost intervals only the columns themselves change.

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


def conv(
    in_features: int,
    out_features: int,
    kernel: int,
    *,
    padding: int = 0,
    bias: bool = True,
    generator: torch.Generator | None = None,
) -> nn.Conv2d:
    """A square ``nn.Conv2d`` with torch's usual initial distribution, drawn from an explicit generator."""
    sizes = {"in_features": in_features, "out_features": out_features, "kernel": kernel}
    in_features, out_features, kernel = (whole_number(name, value) for name, value in sizes.items())
    padding = whole_number("padding", padding, least=0)
    generator_device(generator)
    with torch.random.fork_rng(devices=[]):
        layer = nn.Conv2d(in_features, out_features, kernel, padding=padding, bias=bias)
    bound = (in_features * kernel**2) ** -0.5
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, -bound, bound, generator=generator)
    return layer


def digit_net(
    side: int, out_features: int = 25, *, dropout: float = 0.1, generator: torch.Generator | None = None
) -> nn.Sequential:
    """Convolutional extractor of the paper's MNIST networks, for grey images (n, 1, side, side).

    Two 3×3 convolutions with 32 and 64 channels, each with a ReLU; 2×2 maximum pooling, dropout, and a linear layer without an
    activation. The paper does not say where it pools.
    """
    side, dropout = whole_number("side", side, least=6), probability("dropout", dropout, zero=True)
    width = 64 * ((side - 4) // 2) ** 2
    return nn.Sequential(
        conv(1, 32, 3, generator=generator),
        nn.ReLU(),
        conv(32, 64, 3, generator=generator),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        SeededDropout(dropout, width),
        linear(width, out_features, generator=generator),
    )


def _unit(in_features: int, out_features: int, kernel: int, generator: torch.Generator | None = None) -> nn.Sequential:
    """Convolution, BatchNorm, ReLU."""
    layer = conv(in_features, out_features, kernel, padding=kernel // 2, bias=False, generator=generator)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu", generator=generator)
    return nn.Sequential(layer, nn.BatchNorm2d(out_features), nn.ReLU(inplace=True))


class Inception(nn.Module):
    """A block of GoogLeNet: four branches side by side.

    Args:
        in_features: Channels that come in.
        one: Channels of the 1×1 branch.
        three: Channels of the 3×3 branch, reduced and final.
        five: The same of the branch with the wider view: two 3×3 convolutions, which see 5×5.
        pool: Channels of the pooling branch.
        generator: Source of randomness.
    """

    def __init__(
        self,
        in_features: int,
        one: int,
        three: tuple[int, int],
        five: tuple[int, int],
        pool: int,
        *,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.out_features = one + three[1] + five[1] + pool
        self.branches = nn.ModuleList(
            [
                _unit(in_features, one, 1, generator),
                nn.Sequential(_unit(in_features, three[0], 1, generator), _unit(*three, 3, generator)),
                nn.Sequential(
                    _unit(in_features, five[0], 1, generator),
                    _unit(*five, 3, generator),
                    _unit(five[1], five[1], 3, generator),
                ),
                nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), _unit(in_features, pool, 1, generator)),
            ]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Branches joined along the channels."""
        return torch.cat([branch(x) for branch in self.branches], 1)


def googlenet(*, width: int = 1, generator: torch.Generator | None = None) -> nn.Sequential:
    """GoogLeNet for 32×32 colour images, without its last linear layer: (n, 3, 32, 32) to (n, 1024).

    The table of blocks is Szegedy et al.'s (2015); as is usual for small images the stem is one 3×3 convolution, nothing is
    pooled before the first block, and convolutions carry BatchNorm. ``width`` divides every number of channels, for tests.
    """
    blocks: list[tuple[int, tuple[int, int], tuple[int, int], int] | None] = [
        (64, (96, 128), (16, 32), 32),
        (128, (128, 192), (32, 96), 64),
        None,
        (192, (96, 208), (16, 48), 64),
        (160, (112, 224), (24, 64), 64),
        (128, (128, 256), (24, 64), 64),
        (112, (144, 288), (32, 64), 64),
        (256, (160, 320), (32, 128), 128),
        None,
        (256, (160, 320), (32, 128), 128),
        (384, (192, 384), (48, 128), 128),
    ]
    if not whole_number("width", width) <= GOOGLENET_NARROWEST:
        raise ValueError(f"The width parameter must be at most {GOOGLENET_NARROWEST}, got {width} instead.")
    channels = 192 // width
    layers: list[nn.Module] = [_unit(3, channels, 3, generator)]
    for block in blocks:
        if block is None:
            layers.append(nn.MaxPool2d(3, stride=2, padding=1))
            continue
        one, three, five, pool = block
        inception = Inception(
            channels,
            one // width,
            (three[0] // width, three[1] // width),
            (five[0] // width, five[1] // width),
            pool // width,
            generator=generator,
        )
        layers.append(inception)
        channels = inception.out_features
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


class Bounded(nn.Module):
    """A parametrization that keeps the largest singular value of a layer's weights, as a matrix, below a bound.

    One step of power iteration for each forward pass in training estimates it. Weights below the bound are left as they are.

    Args:
        weight: The weights, (out, ...).
        bound: Largest singular value.
        generator: Source of the first estimate.
    """

    left: torch.Tensor

    def __init__(self, weight: torch.Tensor, bound: float, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.bound = bound
        self.register_buffer("left", nn.functional.normalize(torch.randn(len(weight), generator=generator), dim=0))
        with torch.no_grad():
            for _ in range(15):
                self._iterate(weight.flatten(1))

    def _iterate(self, matrix: torch.Tensor) -> torch.Tensor:
        right = nn.functional.normalize(matrix.mT @ self.left, dim=0)
        self.left.copy_(nn.functional.normalize(matrix @ right, dim=0))
        return right

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """The weights, divided by what they exceed the bound by."""
        matrix = weight.flatten(1)
        if self.training:
            with torch.no_grad():
                self._iterate(matrix.detach())
        size = (matrix.mT @ self.left.clone()).norm()
        return weight * (self.bound / size).clamp(max=1.0)


class Residual(nn.Module):
    """A residual block, x + F(x), whose F cannot change distances by more than a bounded factor.

    Args:
        in_features: Channels that come in.
        out_features: Channels that go out.
        stride: 2 to halve the sides of the image.
        bound: Largest singular value of a convolution's weights.
        generator: Source of randomness.
    """

    def __init__(
        self, in_features: int, out_features: int, stride: int, bound: float, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        first, second = _unit(in_features, out_features, 3, generator), _unit(out_features, out_features, 3, generator)
        shrink = nn.AvgPool2d(stride) if stride > 1 else nn.Identity()
        self.branch = nn.Sequential(*first, shrink, second[0], second[1])
        self.shortcut: nn.Module = nn.Identity()
        if in_features != out_features:
            narrow = conv(in_features, out_features, 1, bias=False, generator=generator)
            self.shortcut = nn.Sequential(nn.AvgPool2d(stride), narrow, nn.BatchNorm2d(out_features))
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                parametrize.register_parametrization(layer, "weight", Bounded(layer.weight, bound, generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the branch and what goes past it."""
        return nn.functional.relu(self.shortcut(x) + self.branch(x))


def residual_net(
    *,
    width: int = 64,
    blocks: tuple[int, ...] = (2, 2, 2, 2),
    bound: float = 3.0,
    generator: torch.Generator | None = None,
) -> nn.Sequential:
    """A residual network for small colour images that keeps different images apart: (n, 3, h, w) to (n, 8 · width).

    A network may map images that it has never seen onto ones that it has; then nothing behind it can tell. Residual connections
    keep distances from vanishing, and bounded weights keep them from exploding, as in SNGP (Liu et al., 2020) and DUE (van
    Amersfoort et al., 2021).

    Args:
        width: Channels of the first stage; every later stage has twice as many, and half the side.
        blocks: Number of blocks of each stage.
        bound: Largest singular value of the weights of a convolution.
        generator: Source of randomness.
    """
    width, bound = whole_number("width", width), positive_number("bound", bound)
    if not isinstance(blocks, Sequence) or isinstance(blocks, str):
        raise ValueError(f"The blocks parameter must be a sequence of counts, got {shown(blocks)} instead.")
    blocks = tuple(whole_number("blocks", count, least=0) for count in blocks)
    layers: list[nn.Module] = [_unit(3, width, 3, generator)]
    channels = width
    for stage, count in enumerate(blocks):
        for number in range(count):
            out = width * 2**stage
            layers.append(Residual(channels, out, 2 if stage > 0 and number == 0 else 1, bound, generator))
            channels = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
