"""Taps of a network's layers: they record each layer's inputs and the gradients in its pre-activations."""
# torch.linalg and other parts of torch declare no types:
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownLambdaType=false

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.utils.hooks import RemovableHandle

from bochner.layers import OutputLayer, StationaryLayer
from bochner.likelihoods import Gaussian
from bochner.models import Model
from bochner.posteriors.mixture import BATCH_NORMS, EXCHANGE_LOCK, Parameters
from bochner.priors.activations import link

INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
NORMALISATIONS = (*BATCH_NORMS, *INSTANCE_NORMS, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)  # whose scales stay as trained


@dataclass(frozen=True)
class Tap:
    """A layer with weights whose input is recorded and whose pre-activation gets a small addition, to differentiate in it.

    Attributes:
        name: Dotted name in the model.
        module: The layer.
        precision: Prior precision of its weights.
        bias_precision: Prior precision of its bias.
    """

    name: str
    module: nn.Module
    precision: float
    bias_precision: float

    @property
    def weight(self) -> Tensor:
        """The weights of the layer."""
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def nudged(self) -> nn.Module:
        """The module whose output is the pre-activation."""
        return self.module.phase if isinstance(self.module, StationaryLayer) else self.module

    @property
    def has_bias(self) -> bool:
        """Whether the weight matrix carries a bias as its last column."""
        return getattr(self.module, "bias", None) is not None

    @property
    def circular(self) -> bool:
        """Whether the bias is a phase behind the sigmoid link."""
        return isinstance(self.module, StationaryLayer) and self.module.activation.bias == "uniform"

    def rows(self, x: Tensor) -> Tensor:
        """Input as (n, T, fan_in): what multiplies the weight matrix, with a 1 for the bias."""
        module, one = self.module, 1.0
        if isinstance(module, nn.Conv2d):
            x = F.unfold(x, module.kernel_size, module.dilation, module.padding, module.stride).mT  # pyright: ignore[reportArgumentType]
        elif isinstance(module, StationaryLayer):
            one = module.activation.unit  # the wave's unit multiplies weights and bias alike
            x = (x * (one / module.lengthscale)).reshape(len(x), -1, module.in_features)
        else:
            x = x.reshape(len(x), -1, x.shape[-1])
            x = module.amplitude * x if isinstance(module, OutputLayer) else x
        return torch.cat([x, torch.full_like(x[..., :1], one)], -1) if self.has_bias else x

    def precisions(self, like: Tensor) -> Tensor:
        """Prior precision of every column of the weight matrix, the bias last, (fan_in,)."""
        fan_in = like.shape[-1]
        tau = like.new_full((fan_in,), self.precision)
        if self.has_bias:
            tau[-1] = self.bias_precision
        return tau

    def gradients(self, g: Tensor) -> Tensor:
        """Gradient in the pre-activation as (n, T, fan_out)."""
        return g.flatten(-2).mT if isinstance(self.module, nn.Conv2d) else g.reshape(len(g), -1, g.shape[-1])

    def weights(self, parameters: Parameters) -> Tensor:
        """Weight matrices, (E, fan_out, fan_in), the bias as the last column; that of the model layer is the linked one."""
        weight = parameters[f"{self.name}.weight"].flatten(2)
        if not self.has_bias:
            return weight
        bias = parameters[f"{self.name}.bias"]
        return torch.cat([weight, (link(bias) if self.circular else bias)[..., None]], -1)

    def parameters(self, weights: Tensor) -> Parameters:
        """The module's own parameters for weight matrices (..., fan_out, fan_in)."""
        matrix = weights[..., :-1] if self.has_bias else weights
        named = {f"{self.name}.weight": matrix.reshape(*weights.shape[:-2], *self.weight.shape)}
        if self.has_bias:
            named[f"{self.name}.bias"] = _unlink(weights[..., -1]) if self.circular else weights[..., -1]
        return named


def _unlink(bias: Tensor) -> Tensor:
    """Unconstrained bias of a phase: wrapped into (−π, π), which changes nothing, then the inverse of the link."""
    turn = (bias / (2 * math.pi) + 0.5).remainder(1.0)
    return torch.logit(turn, eps=1e-7 if bias.dtype == torch.float32 else 1e-15)


def taps(model: Model, *, fan_in: bool = False) -> list[Tap]:
    """All linear and convolutional layers of a network that are not frozen, with the prior precision of each.

    A warning names other layers with weights.

    With ``fan_in`` the precision of the extractor's weights is that of the model times the number of inputs of their layer.
    """
    covered: list[Tap] = []
    left_out: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, StationaryLayer | nn.Linear | nn.Conv2d | OutputLayer) and _is_frozen(module):
            continue
        if isinstance(module, StationaryLayer):
            # A phase is uniform on the circle; a Gaussian of the same variance stands for that.
            phase = 3 / math.pi**2 if module.activation.bias == "uniform" else 1.0
            covered.append(Tap(name, module, module.spectrum.precision(module.in_features), phase))
        elif module is model.output:
            covered.append(Tap(name, module, float(model.layer.out_features), 1.0))
        elif isinstance(module, nn.Linear | nn.Conv2d):
            if isinstance(module, nn.Conv2d) and (module.groups, module.padding_mode, type(module.padding)) != (
                1,
                "zeros",
                tuple,
            ):
                raise ValueError(
                    f"The layer {name} must have groups=1 and numeric zero padding to be covered, got {module}."
                )
            if "weight" not in dict(module.named_parameters(recurse=False)):
                raise ValueError(
                    f"The layer {name} computes its weight (weight norm or another parametrisation): the posterior cannot cover "
                    "it. torch.nn.utils.parametrize.remove_parametrizations makes it an ordinary one; "
                    "structure='last_layer' leaves it alone."
                )
            tau = model.extractor_precision
            covered.append(Tap(name, module, tau * module.weight[0].numel() if fan_in else tau, tau))
        elif is_left_out(module):
            left_out.append(f"{name} ({type(module).__name__})")
    if left_out:
        warnings.warn(
            f"Laplace covers linear, Conv2d and model layers: the weights of {', '.join(left_out)} stay as they are, as if they "
            "were known. Freeze them (requires_grad=False) to say so; structure='last_layer' covers the output layer alone.",
            stacklevel=3,
        )
    if not covered:
        raise ValueError("The model parameter must have a layer that is not frozen (requires_grad), got none.")
    return covered


def _is_frozen(module: nn.Module) -> bool:
    """Whether a module has parameters, none of which is trained."""
    parameters = list(module.parameters(recurse=False))
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


def is_left_out(module: nn.Module) -> bool:
    """Whether a module trains parameters that no tap covers; scales of normalisation layers do not count."""
    if isinstance(module, (*NORMALISATIONS, OutputLayer, Gaussian)):
        return False
    return any(parameter.requires_grad for parameter in module.parameters(recurse=False))


class Listener:
    """Runs a network and reports, for each tapped layer, its input and the gradient in its pre-activation."""

    def __init__(self, model: Model, layers: list[Tap], x: Tensor) -> None:
        self.model, self.layers = model, layers
        self.shapes: list[torch.Size] = []
        with torch.no_grad():
            self._forward({}, x[:1], None)

    def _forward(self, parameters: Parameters, x: Tensor, nudges: list[Tensor] | None) -> tuple[Tensor, list[Tensor]]:
        rows: dict[str, Tensor] = {}
        shapes: dict[str, torch.Size] = {}
        handles: list[RemovableHandle] = []
        for i, tap in enumerate(self.layers):

            def hear(_: nn.Module, args: tuple[Tensor, ...], tap: Tap = tap) -> None:
                if tap.name in rows:
                    raise ValueError(
                        f"The layer {tap.name} is used more than once in a forward pass: the posterior cannot cover it."
                    )
                rows[tap.name] = tap.rows(args[0])

            def nudge(_: nn.Module, __: tuple[Tensor, ...], output: Tensor, i: int = i, tap: Tap = tap) -> Tensor:
                shapes[tap.name] = output.shape[1:]
                return output if nudges is None else output + nudges[i]

            handles += [tap.module.register_forward_pre_hook(hear), tap.nudged.register_forward_hook(nudge)]
        try:
            f = functional_call(self.model, parameters, (x,))
        finally:
            for handle in handles:
                handle.remove()
        missing = [tap.name for tap in self.layers if tap.name not in shapes]
        if missing:
            raise ValueError(
                f"The layers {', '.join(missing)} took no part in the forward pass: the posterior cannot cover them."
            )
        self.shapes = [shapes[tap.name] for tap in self.layers]
        return f, [rows[tap.name] for tap in self.layers]

    def __call__(
        self, parameters: Parameters, x: Tensor, weigh: Callable[[Parameters, Tensor], Tensor]
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Outputs (n, out), rows (n, T, fan_in) and gradients (c, n, T, fan_out) of every layer.

        ``weigh(parameters, f)`` gives the cotangents (c, n, out) that are pulled back.
        """
        like = self.model.layer.weight  # inputs may be integers
        nudges = [like.new_zeros(len(x), *shape) for shape in self.shapes]
        with EXCHANGE_LOCK:
            f, pullback, rows = vjp(lambda n: self._forward(parameters, x, n), nudges, has_aux=True)  # pyright: ignore[reportAssignmentType]
        (grads,) = vmap(pullback)(weigh(parameters, f))
        return f, rows, [vmap(tap.gradients)(g) for tap, g in zip(self.layers, grads, strict=True)]


def likelihood_root(model: Model, parameters: Parameters, f: Tensor) -> Tensor:
    r"""Columns of a root of the likelihood's Hessian in f, (c, n, out): $\sum_c s_c s_c^\top = \Lambda_n$.

    Gaussian: the unit vectors over s. Categorical: $\mathrm{diag}(\sqrt p) - p\sqrt p^\top$.
    """
    eye = torch.eye(f.shape[-1], dtype=f.dtype, device=f.device)
    if isinstance(model.likelihood, Gaussian):
        return (eye * torch.exp(-parameters["likelihood.log_noise"]))[:, None, :].expand(-1, len(f), -1)
    p = torch.softmax(f, -1)
    return (p.sqrt()[:, :, None] * (eye - p[:, None, :])).transpose(0, 1)


def unit_cotangents(_: Parameters, f: Tensor) -> Tensor:
    """The unit vectors over outputs, (out, n, out): pulling them back gives the Jacobian."""
    return torch.eye(f.shape[-1], dtype=f.dtype, device=f.device)[:, None, :].expand(-1, len(f), -1)
