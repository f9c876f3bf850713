"""Feature extractors for images: small convolutions, GoogLeNet, and a residual network with bounded weights."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.utils import parametrize

from bochner.arguments import generator_device, positive_number, probability, shown, whole_number
from bochner.networks.columns import linear
from bochner.networks.dropout import SeededDropout

GOOGLENET_NARROWEST = 16  # channels of the narrowest branch of GoogLeNet
POWER_ITERATIONS = 15  # steps that first estimate the largest singular value of a layer's weights


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
            for _ in range(POWER_ITERATIONS):
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
