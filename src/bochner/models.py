"""The whole network: feature extractor, model layer, output layer and likelihood, with its log joint density."""

import copy
from operator import attrgetter

import torch
from torch import Tensor, nn

from bochner.arguments import dense_tensor, described, positive_number, shown, whole_number
from bochner.layers import OutputLayer, StationaryLayer, amplitude_log_prior
from bochner.likelihoods import Categorical, Gaussian, Likelihood
from bochner.priors.spectra import normal_log_prob


class Model(nn.Module):
    r"""A network with a prior on every parameter.

    $$ \log p(y, \theta) = \sum_{n=1}^N \log p(y_n \mid f(x_n)) + \log p(\theta) $$

    The prior is that of the model layer (weights, biases, lengthscale), that of the output layer (N(0, 1/K) on the weights at unit
    amplitude, N(0, 1) on the bias, Gamma on the amplitude), Gamma on the noise, and N(0, 1/``extractor_precision``) on every
    parameter of the extractor (that is L2).

    As other containers of modules do, a model keeps the modules that it is given: training it trains them, and two models
    that are given the same module share it. The likelihood is moved to the layer's device and type.

    Args:
        layer: The model layer.
        out_features: Number of outputs: 1 for regression, the number of classes for classification.
        likelihood: ``Gaussian()`` or ``Categorical()``.
        extractor: Any module whose output has ``layer.in_features`` features; nothing by default.
        amplitude: Prior standard deviation of each output; see ``OutputLayer``.
        extractor_precision: Prior precision of the extractor's parameters.
        output_bias: Whether the output layer has a bias. Without one the prior over functions is the layer's kernel alone.
        generator: Source of randomness for the output weights.
    """

    def __init__(
        self,
        layer: StationaryLayer,
        out_features: int,
        likelihood: Likelihood,
        *,
        extractor: nn.Module | None = None,
        amplitude: float = 1.0,
        extractor_precision: float = 1.0,
        output_bias: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(layer, StationaryLayer):
            raise ValueError(f"The layer parameter must be a StationaryLayer, got {layer} instead.")
        if not isinstance(likelihood, Gaussian | Categorical):
            raise ValueError(f"The likelihood parameter must be Gaussian() or Categorical(), got {likelihood} instead.")
        out_features = whole_number("out_features", out_features)
        if isinstance(likelihood, Categorical) and out_features < 2:
            raise ValueError(f"The out_features parameter must be at least 2 for classes, got {out_features} instead.")
        if extractor is not None and not isinstance(extractor, nn.Module):
            raise ValueError(f"The extractor parameter must be a module or None, got {shown(extractor)} instead.")
        if not isinstance(output_bias, bool):
            raise ValueError(f"The output_bias parameter must be True or False, got {shown(output_bias)} instead.")
        extractor_precision = positive_number("extractor_precision", extractor_precision)
        self.extractor = nn.Identity() if extractor is None else extractor
        self.layer = layer
        output = OutputLayer(
            layer.out_features, out_features, amplitude=amplitude, bias=output_bias, generator=generator
        )
        self.output = output.to(layer.weight)
        self.likelihood = likelihood.to(layer.weight)
        self.extractor_precision = extractor_precision

    @property
    def amplitude(self) -> Tensor:
        """Prior standard deviation of each output."""
        return self.output.amplitude

    def features(self, x: Tensor) -> Tensor:
        """Features of each row, which the output layer multiplies: (n, ...) to (n, K)."""
        try:
            z = self.extractor(x)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except (RuntimeError, TypeError, IndexError, AttributeError, NotImplementedError) as error:
            raise ValueError(f"The extractor fails at the x parameter, {described(x)}: {error}") from error
        if not isinstance(z, Tensor) or z.ndim != 2 or z.shape[1] != self.layer.in_features:
            raise ValueError(
                f"The extractor must turn the x parameter, {described(x)}, into features of shape (n, "
                f"{self.layer.in_features}), got {described(z)} instead. "
                "If swap_head made this network, name its last layer: head=..."
            )
        return self.layer(z)

    def forward(self, x: Tensor) -> Tensor:
        """Output f(x): (n, ...) to (n, out_features)."""
        return self.output(self.features(x))

    def log_prior(self, *, jacobian: bool = False) -> Tensor:
        """Log prior density of all parameters; ``jacobian`` as in ``StationaryLayer.log_prior``."""
        total = self.layer.log_prior(jacobian=jacobian) + self.likelihood.log_prior(jacobian=jacobian)
        total = total + amplitude_log_prior(self.output.log_amplitude, jacobian=jacobian)
        for name, precision in self.precisions().items():
            total = total + normal_log_prob(attrgetter(name)(self), precision).sum()
        return total

    def precisions(self) -> dict[str, float]:
        """Precision of every parameter with a Gaussian prior outside the model layer."""
        names = {f"extractor.{name}": self.extractor_precision for name, _ in self.extractor.named_parameters()}
        names["output.weight"] = float(self.layer.out_features)
        return names | {"output.bias": 1.0} if self.output.has_bias else names

    def log_likelihood(self, x: Tensor, y: Tensor) -> Tensor:
        """Log likelihood, summed over the rows of x and y."""
        return self.likelihood(self(x), y).sum()

    def log_joint(self, x: Tensor, y: Tensor, *, num_data: int | None = None, jacobian: bool = False) -> Tensor:
        """Log likelihood of all data plus log prior.

        Args:
            x: Inputs, (b, ...).
            y: Targets, (b, out_features) for Gaussian, (b,) integers for Categorical.
            num_data: Size N of the data set when the rows are a minibatch: the likelihood then counts N/b times.
            jacobian: As in ``StationaryLayer.log_prior``.
        """
        if dense_tensor("x", x).ndim == 0 or len(x) == 0:
            raise ValueError(f"The x parameter must have at least 1 row, got shape {tuple(x.shape)} instead.")
        scale = 1.0
        if num_data is not None:
            if whole_number("num_data", num_data) < len(x):
                raise ValueError(
                    f"The num_data parameter must be at least the number of rows of x, {len(x)}, got {num_data}."
                )
            scale = num_data / len(x)
        return scale * self.log_likelihood(x, y) + self.log_prior(jacobian=jacobian)


def swap_head(
    network: nn.Module,
    *,
    width: int,
    likelihood: Likelihood | None = None,
    amplitude: float = 1.0,
    head: str | None = None,
    generator: torch.Generator | None = None,
    **layer_options: object,
) -> Model:
    """Replaces the final linear layer of a network by a stationary model layer and a fresh output layer.

    The network is copied, not changed; its other weights are kept and become the feature extractor. Dropout, BatchNorm and
    weight norm stay in it.

    Args:
        network: Any module with an ``nn.Linear`` at its end.
        width: Number of outputs of the model layer.
        likelihood: Defaults to Gaussian for one output and Categorical for more.
        amplitude: Prior standard deviation of each output.
        head: Dotted name of the linear layer to replace; by default the last ``nn.Linear`` that the network
            registers. Where that is not the last one to be used, or where something follows it such as a softmax, the first
            fit raises an error.
        generator: Source of randomness.
        **layer_options: Passed on to ``StationaryLayer``.
    """
    if not isinstance(network, nn.Module):
        raise ValueError(f"The network parameter must be a module, got {shown(network)} instead.")
    width = whole_number("width", width)
    name, old = _last_linear(network, head)
    extractor: nn.Module = nn.Identity()
    if name:
        # The older weight norm keeps a computed weight beside its parameters, which torch would not copy.
        computed = [
            v for m in network.modules() for v in m.__dict__.values() if isinstance(v, Tensor) and not v.is_leaf
        ]
        extractor = copy.deepcopy(network, {id(v): v.detach().clone() for v in computed})
        extractor.set_submodule(name, nn.Identity())
        extractor.__dict__["swapped_layer"] = name  # what it returns must be what this layer would see: ``check_takes``
    weight = old.weight
    options = {"device": weight.device, "dtype": weight.dtype, "generator": generator, **layer_options}
    layer = StationaryLayer(old.in_features, width, **options)  # pyright: ignore[reportArgumentType]
    if likelihood is None:
        likelihood = Gaussian() if old.out_features == 1 else Categorical()
    return Model(layer, old.out_features, likelihood, extractor=extractor, amplitude=amplitude, generator=generator)


def _last_linear(network: nn.Module, head: str | None) -> tuple[str, nn.Linear]:
    """Name and layer of a network's last linear layer, or of the one that is named."""
    linears = {name: module for name, module in network.named_modules() if isinstance(module, nn.Linear)}
    if not linears:
        raise ValueError(
            f"The network parameter must contain an nn.Linear to replace, got {type(network).__name__} without one."
        )
    name = next(reversed(linears)) if head is None else head
    if not isinstance(name, str) or name not in linears:
        raise ValueError(
            f"The head parameter must name an nn.Linear of the network ({', '.join(linears)}), got {shown(name)} instead."
        )
    last = linears[name]
    parent = network.get_submodule(name.rpartition(".")[0]) if "." in name else network
    if isinstance(parent, nn.Sequential) and parent is not last and parent[-1] is not last:
        after = ", ".join(type(m).__name__ for m in list(parent)[[m is last for m in parent].index(True) + 1 :])
        raise ValueError(
            f"The head {name!r} must be the last module of its nn.Sequential, but {after} comes after it; remove that first."
        )
    return name, last
