"""The model layer: the last hidden layer of a network, which carries the stationary prior."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bochner.arguments import (
    described,
    finite_tensor,
    generator_device,
    is_dense,
    positive_number,
    shown,
    whole_number,
)
from bochner.priors import activations, spectra
from bochner.priors.activations import Activation, link, unlink
from bochner.priors.arrays import Array, ArrayModule
from bochner.priors.frequencies import draw
from bochner.priors.kernels import InducedKernel, induced_kernel
from bochner.priors.spectra import Spectrum, check_lengthscale, log_gamma_log_prob, normal_log_prob, open_uniform


def layer_log_prior(
    spectrum: Spectrum,
    activation: Activation,
    parameters: Mapping[str, Array | None],
    *,
    jacobian: bool,
    xp: ArrayModule = torch,
) -> Array:
    """Log prior density of a model layer's weight, log_lengthscale and bias, if any; see ``StationaryLayer.log_prior``."""
    weight, bias, log_lengthscale = parameters["weight"], parameters.get("bias"), parameters["log_lengthscale"]
    assert weight is not None
    assert log_lengthscale is not None
    total = xp.sum(spectrum.weight_log_prob(weight, xp)) + xp.sum(log_gamma_log_prob(log_lengthscale, 2.0, 0.5, xp))
    if jacobian:
        total = total + xp.sum(log_lengthscale)
    if bias is None:
        return total
    if activation.bias == "normal":
        return total + xp.sum(normal_log_prob(bias, 1.0))
    if jacobian:
        # Uniform density 1/2π times db/db̂ = 2π sigmoid(b̂) sigmoid(−b̂).
        magnitude = xp.abs(bias)
        return total - xp.sum(magnitude + 2 * xp.log1p(xp.exp(-magnitude)))
    return total - math.prod(bias.shape) * math.log(2 * math.pi)


def _check_device(device: torch.device | str | None) -> None:
    """Raises a ValueError unless torch knows the device, and sees a GPU where one is asked for."""
    try:
        kind = "cpu" if device is None else torch.device(device).type
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"The device parameter must name a device of torch, got {shown(device)} instead.") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"The device parameter asks for a GPU ({device}), but torch sees none; use device='cpu'.")


class StationaryLayer(nn.Module):
    r"""A hidden layer whose prior over functions is a stationary Gaussian process at infinite width.

    $$ h_k(x) = \sigma(w_k^\top x / \ell + b_k), \qquad w_k \sim p(w),\; b_k \sim \mathrm{Uniform}(-\pi, \pi) $$

    Put it before a linear output layer with weights N(0, 1/out_features): then the covariance of the outputs is the
    kernel that ``kernel`` and ``activation`` induce. It works inside any ``nn.Module``.

    Args:
        in_features: Number of inputs d.
        out_features: Number of outputs K. Under "paired" these are K/2 frequencies with a sine and a cosine each.
        kernel: The weight prior: a Spectrum, or one of "rbf", "matern52", "matern32", "exponential".
        activation: An Activation or its name.
        lengthscale: Initial lengthscale: a number, or a tensor of d numbers (ARD).
        frequencies: How units are drawn: "iid", "orthogonal" or "sobol".
        generator: Source of randomness; None takes torch's global one.
        device: Where the parameters live.
        dtype: Their floating-point type.

    Attributes:
        weight: Weights at unit lengthscale, shaped as those of ``nn.Linear``.
        bias: Unconstrained biases; ``linked_bias`` is what is added. None where the activation has no bias.
        log_lengthscale: Logarithm of the lengthscale. Turn off its ``requires_grad`` to hold it fixed.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        kernel: str | Spectrum = "rbf",
        activation: str | Activation = "sin",
        lengthscale: float | Tensor = 1.0,
        frequencies: str = "iid",
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.spectrum = spectra.resolve_spectrum(kernel)
        self.activation = activations.resolve_activation(activation)
        in_features = whole_number("in_features", in_features)
        out_features = whole_number("out_features", out_features)
        _check_device(device)
        if out_features % self.activation.outputs:
            raise ValueError(
                f"The out_features parameter must be even under '{self.activation.name}', a sine and a cosine for each "
                f"frequency, got {out_features} instead."
            )
        scale = check_lengthscale(lengthscale)
        if scale.ndim and len(scale) != in_features:
            raise ValueError(
                f"The lengthscale parameter must be a number or {in_features} numbers, got {len(scale)} instead."
            )
        self.in_features, self.out_features = in_features, out_features
        num_units = out_features // self.activation.outputs
        weight, bias = draw(
            self.spectrum, self.activation, num_units, in_features, method=frequencies, generator=generator
        )
        dtype = dtype or torch.get_default_dtype()
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"The dtype parameter must be torch.float32 or torch.float64 (phases need it), got {dtype} instead."
            )
        self.weight = nn.Parameter(weight.to(device, dtype))
        if self.activation.bias == "uniform" and bias is not None:
            bias = unlink(bias)
        self.bias = None if bias is None else nn.Parameter(bias.to(device, dtype))
        self.log_lengthscale = nn.Parameter(scale.log().to(device, dtype))
        self.phase = nn.Identity()  # forward hooks on it see the argument of the wave

    @property
    def lengthscale(self) -> Tensor:
        """The lengthscale, which divides the input: one number, or one per input."""
        return self.log_lengthscale.exp()

    @property
    def linked_bias(self) -> Tensor | None:
        """The bias that is added: within (−π, π) where its prior is uniform."""
        if self.bias is None or self.activation.bias == "normal":
            return self.bias
        return link(self.bias)

    def intercept(self) -> Tensor | None:
        """The constant in the argument of the wave, in its units, (units,); None where there is none."""
        unit, shift = self.activation.unit, self.activation.shift
        bias = self.linked_bias
        if bias is not None:
            return unit * bias + shift
        return self.weight.new_full((len(self.weight),), shift) if shift else None

    def forward(self, x: Tensor) -> Tensor:
        """Features of each row: (..., in_features) to (..., out_features).

        Phases are computed in the precision of the weights, under autocast too: a bfloat16 phase of size 10 is off by 0.03.
        """
        if not is_dense(x):
            raise ValueError(f"The layer expects a dense tensor x of real numbers, got {described(x)} instead.")
        if x.ndim == 0 or x.shape[-1] != self.in_features:
            raise ValueError(
                f"The layer expects {self.in_features} input features in x, got an input of shape {tuple(x.shape)}."
            )
        if x.device != self.weight.device:
            raise ValueError(
                f"The layer expects x on its own device, {self.weight.device}, got one on {x.device} instead."
            )
        bias = self.intercept()
        with torch.autocast(x.device.type, enabled=False):
            if x.dtype in (torch.float16, torch.bfloat16):
                x = x.to(self.weight.dtype)
            elif x.is_floating_point() and x.dtype != self.weight.dtype:
                raise ValueError(f"The layer expects x in its own type, {self.weight.dtype}, got {x.dtype} instead.")
            x = x * (self.activation.unit / self.lengthscale)
            if torch.compiler.is_compiling() and bias is not None:
                u = F.linear(x, self.weight) + bias  # a compiler fuses link and sum into the wave's kernel
            else:
                u = F.linear(x, self.weight, bias)
            return self.activation.wave(self.phase(u))

    def log_prior(self, *, jacobian: bool = False) -> Tensor:
        """Log prior density of weights, biases and lengthscale.

        The lengthscale has a Gamma(2, rate 0.5) prior, for each input under ARD.

        Args:
            jacobian: Whether to count the change of variables to the unconstrained parameters ``bias`` and
                ``log_lengthscale``: yes for sampling, no for MAP estimates, as in the paper.
        """
        parameters = {"weight": self.weight, "bias": self.bias, "log_lengthscale": self.log_lengthscale}
        return layer_log_prior(self.spectrum, self.activation, parameters, jacobian=jacobian)

    def log_prior_slopes(self, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gradients of ``log_prior`` in ``parameters``, in closed form. Those that are zero everywhere are left out.

        Args:
            parameters: Values under the layer's parameter names. They may be those of many layers, stacked along first dimensions.
        """
        slopes = {}
        if "weight" in parameters:
            slopes["weight"] = self.spectrum.weight_score(parameters["weight"])
        if "bias" in parameters and self.activation.bias == "normal":
            slopes["bias"] = -parameters["bias"]
        if "log_lengthscale" in parameters:
            slopes["log_lengthscale"] = 1 - 0.5 * parameters["log_lengthscale"].exp()
        return slopes

    def induced_kernel(self) -> InducedKernel:
        """The kernel of the layer's prior at infinite width and its present lengthscale."""
        return induced_kernel(self.activation, self.spectrum, lengthscale=self.lengthscale.detach())

    def extra_repr(self) -> str:
        """Shows the prior when the module is printed."""
        return f"{self.in_features}, {self.out_features}, kernel={self.spectrum}, activation='{self.activation.name}'"


def amplitude_log_prior(log_amplitude: Array, *, jacobian: bool, xp: ArrayModule = torch) -> Array:
    """Log density of the amplitude under Gamma(2, rate 1), whose mode is 1; with ``jacobian``, as a density of its logarithm."""
    return log_gamma_log_prob(log_amplitude, 2.0, 1.0, xp) + (log_amplitude if jacobian else 0.0)


class OutputLayer(nn.Linear):
    r"""The linear layer after the model layer: $f = a\,Vh + b$ with prior weights $V_{ck} \sim \mathrm{N}(0, 1/K)$.

    The model layer keeps its weights at unit lengthscale; this layer keeps them at unit amplitude. The amplitude a is the prior
    standard deviation of f. Changing it changes no other prior.

    Args:
        in_features: Number of features K.
        out_features: Number of outputs.
        amplitude: Initial amplitude a. It is fixed unless ``log_amplitude.requires_grad`` is turned on. A MAP fit would
            make it too large, so ``tune_marginal`` and samplers change it instead.
        bias: Whether there is a bias, which the amplitude does not multiply; it starts at zero.
        generator: Source of randomness; None takes torch's global one.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        amplitude: float = 1.0,
        bias: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        in_features = whole_number("in_features", in_features)
        out_features = whole_number("out_features", out_features)
        amplitude, device = positive_number("amplitude", amplitude), generator_device(generator)
        # Torch draws initial weights from its global random state; that state stays as it was.
        with torch.random.fork_rng(devices=[]):
            super().__init__(in_features, out_features, bias=bias)
        normal = torch.randn(self.weight.shape, generator=generator, device=device, dtype=torch.float64)
        self.weight = nn.Parameter(normal / in_features**0.5)
        if bias:
            nn.init.zeros_(self.bias)
        self.log_amplitude = nn.Parameter(torch.tensor(math.log(amplitude), dtype=torch.float64), requires_grad=False)

    @property
    def has_bias(self) -> bool:
        """Whether there is a bias; torch declares one in any case."""
        return self.bias is not None

    @property
    def amplitude(self) -> Tensor:
        """Prior standard deviation of f."""
        return self.log_amplitude.exp()

    def forward(self, input: Tensor) -> Tensor:
        """Outputs of each row of features: (..., in_features) to (..., out_features)."""
        return F.linear(input, self.amplitude * self.weight, self.bias)


@dataclass(frozen=True)
class WidthError:
    """Errors of a layer's covariance at finite width, as largest absolute differences.

    Attributes:
        kernel: Difference from the induced kernel.
        stationarity: Difference after shifting all inputs together.
    """

    kernel: float
    stationarity: float


@torch.no_grad()
def width_error(
    layer: StationaryLayer, x: Tensor, *, shifts: int = 10, generator: torch.Generator | None = None
) -> WidthError:
    """Measures how far a layer of finite width is from its induced kernel, on inputs x, (n, in_features).

    The covariance of the layer is h(x)·h(x')/K with its present weights. The shifts are random vectors, uniform within the
    spread of the inputs in either direction.
    """
    shifts = whole_number("shifts", shifts)
    if not isinstance(layer, StationaryLayer):
        raise ValueError(f"The layer parameter must be a StationaryLayer, got {shown(layer)} instead.")
    if (x := finite_tensor("x", x).to(layer.weight)).ndim != 2 or x.shape[1] != layer.in_features:
        raise ValueError(
            f"The x parameter must have shape (n, {layer.in_features}) with n ≥ 1, got {tuple(x.shape)} instead."
        )

    def covariance(inputs: Tensor) -> Tensor:
        h = layer(inputs)
        return h @ h.mT / layer.out_features

    layer_covariance = covariance(x)
    spread = (x.max(0).values - x.min(0).values).clamp(min=1.0)
    offsets = (2 * open_uniform(shifts, x.shape[-1], generator).to(x) - 1) * spread
    changes = torch.stack([(covariance(x + offset) - layer_covariance).abs().max() for offset in offsets])
    kernel_error = (layer_covariance - layer.induced_kernel()(x)).abs().max()
    return WidthError(float(kernel_error), float(changes.max()))
