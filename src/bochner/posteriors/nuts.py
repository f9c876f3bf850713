"""NUTS, by NumPyro: samples of lengthscale, weights, biases, output weights and noise, given the extractor's features.

The only file that imports JAX, beside ``nuts_many``, which samples several networks at once. The log joint is assembled from
the same functions as the torch one, with JAX's arrays in place of torch's, and includes the Jacobians of the constrained
parameters.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import MCMC, NUTS
from torch import Tensor

from bochner.activations import link
from bochner.frequencies import draw
from bochner.layers import amplitude_log_prior, layer_log_prior
from bochner.likelihoods import Gaussian, categorical_log_likelihood, gaussian_log_likelihood, noise_log_prior
from bochner.models import Model
from bochner.posteriors.mixture import drawn_outputs, mixture
from bochner.predictive import Predictive
from bochner.spectra import normal_log_prob
from bochner.validation import check_data

# What the shared formulas need of an array module, under torch's names.
_SHARED = ("sin", "cos", "abs", "round", "clip", "where", "exp", "log", "log1p", "tanh", "sum", "concatenate")
JAX = SimpleNamespace(
    **{name: getattr(jnp, name) for name in _SHARED},
    special=jax.scipy.special,
    logsumexp=jax.scipy.special.logsumexp,
)

Arrays = dict[str, Any]


def parameter_names(model: Model) -> list[str]:
    """The sampled parameters: all that require a gradient, except the extractor's."""
    return [name for name, p in model.named_parameters() if not name.startswith("extractor.") and p.requires_grad]


def affine(model: Model, parameters: Arrays) -> tuple[Any, Any]:
    """Slope (k, d) and intercept (k,) of the argument of the wave."""
    activation = model.layer.activation
    slope = parameters["layer.weight"] * (activation.unit * jnp.exp(-parameters["layer.log_lengthscale"]))
    bias = parameters.get("layer.bias")
    if bias is None:
        return slope, jnp.full(len(slope), activation.shift, slope.dtype)
    return slope, activation.unit * (link(bias, JAX) if activation.bias == "uniform" else bias) + activation.shift


def output_weight(parameters: Arrays) -> Any:
    """Weights of the output layer, (c, K), amplitude included."""
    return jnp.exp(parameters["output.log_amplitude"]) * parameters["output.weight"]


def output(model: Model, parameters: Arrays, features: Any) -> Any:
    """F at the extractor's features, (n, d) to (n, c)."""
    slope, intercept = affine(model, parameters)
    f = model.layer.activation.wave(features @ slope.T + intercept, JAX) @ output_weight(parameters).T
    return f + parameters["output.bias"] if "output.bias" in parameters else f


def log_prior(model: Model, parameters: Arrays, *, jacobian: bool) -> Any:
    """Log prior of everything but the extractor."""
    layer = model.layer
    total = layer_log_prior(
        layer.spectrum,
        layer.activation,
        parameters["layer.weight"],
        parameters.get("layer.bias"),
        parameters["layer.log_lengthscale"],
        jacobian=jacobian,
        xp=JAX,
    )
    for name, precision in model.precisions().items():
        if name in ("output.weight", "output.bias"):
            total = total + jnp.sum(normal_log_prob(parameters[name], precision))
    total = total + amplitude_log_prior(parameters["output.log_amplitude"], jacobian=jacobian, xp=JAX)
    if isinstance(model.likelihood, Gaussian):
        total = total + noise_log_prior(parameters["likelihood.log_noise"], jacobian=jacobian, xp=JAX)
    return total


def log_likelihood(f: Any, y: Any, log_noise: Any | None) -> Any:
    """Gaussian where there is noise, else that of classes given as one-hot rows; summed over the rows.

    One output for two classes is the logit of the second.
    """
    if log_noise is not None:
        return jnp.sum(gaussian_log_likelihood(f, y, log_noise, JAX))
    if f.shape[-1] < y.shape[-1]:
        f = jnp.concatenate([0.0 * f, f], -1)
    return jnp.sum(categorical_log_likelihood(f, jnp.sum(f * y, -1), JAX))


def log_joint(model: Model, parameters: Arrays, features: Any, y: Any, *, jacobian: bool = True) -> Any:
    """The log joint of ``Model.log_joint`` without the extractor's prior; class labels come as one-hot rows."""
    f = output(model, parameters, features)
    return log_prior(model, parameters, jacobian=jacobian) + log_likelihood(
        f, y, parameters.get("likelihood.log_noise")
    )


def arrays(model: Model, features: Tensor, y: Tensor) -> tuple[Any, Any]:
    """Inputs and targets in float64, class labels as one-hot rows."""
    regression = isinstance(model.likelihood, Gaussian)
    targets = y if regression else torch.nn.functional.one_hot(y.long(), model.output.out_features)
    return jnp.asarray(features.double().cpu().numpy()), jnp.asarray(targets.double().cpu().numpy())


def held(model: Model) -> Arrays:
    """The parameters that are not sampled, without the extractor's."""
    held = {n: p for n, p in model.named_parameters() if not p.requires_grad and not n.startswith("extractor.")}
    return {n: jnp.asarray(p.detach().double().cpu().numpy()) for n, p in held.items()}


def check_counts(**counts: int) -> None:
    """Raises a ValueError that names the first count below 1."""
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"The {name} parameter must be at least 1, got {value} instead.")


def initial(model: Model, chains: int, seed: int) -> dict[str, np.ndarray]:
    """Over-dispersed starting points: weights and biases from the prior, the rest scattered around the model's values.

    Only for the parameters that are sampled.
    """
    generator = torch.Generator().manual_seed(seed)
    layer, points = model.layer, []
    for _ in range(chains):
        values = {n: p.detach().double().cpu() for n, p in model.named_parameters()}
        weight, bias = draw(layer.spectrum, layer.activation, len(layer.weight), layer.in_features, generator=generator)
        values["layer.weight"] = weight
        if bias is not None:
            values["layer.bias"] = torch.logit((bias / math.pi + 1) / 2) if layer.activation.bias == "uniform" else bias
        shape = values["output.weight"].shape
        draws = torch.randn(shape, generator=generator, dtype=torch.float64)
        values["output.weight"] = draws / model.precisions()["output.weight"] ** 0.5
        for name in parameter_names(model):
            if name.endswith(("log_lengthscale", "log_noise", "log_amplitude")):
                values[name] = values[name] + 0.2 * torch.randn(
                    values[name].shape, generator=generator, dtype=torch.float64
                )
        points.append({n: values[n] for n in parameter_names(model)})
    return {n: np.stack([p[n].numpy() for p in points]) for n in points[0]}


@dataclass(frozen=True)
class Diagnostics:
    """Whether the chains can be trusted.

    Attributes:
        divergences: Number of divergent transitions after warm-up, all chains together.
        r_hat: Largest split R-hat of the function values, or of the class probabilities; near 1 when the chains agree.
        ess: Smallest effective sample size of the same.
    """

    divergences: int
    r_hat: float
    ess: float


class Sampled:
    """Posterior draws of one network.

    Args:
        model: The network.
        samples: Draws of each sampled parameter, (chains, samples, ...).
        divergences: Number of divergent transitions after warm-up.
        leapfrog_steps: Number of gradients after warm-up.
    """

    def __init__(self, model: Model, samples: dict[str, Tensor], *, divergences: int, leapfrog_steps: int) -> None:
        self.model, self.samples = model, samples
        self.divergences, self.leapfrog_steps = divergences, leapfrog_steps

    def outputs(self, x: Tensor, *, group: int = 200) -> Tensor:
        """Function values of every draw, (chains, samples, n, c)."""
        sizes = next(iter(self.samples.values())).shape[:2]
        f = torch.cat(list(self._drawn(x, 1, group)))
        return f.unflatten(0, sizes)

    def _drawn(self, x: Tensor, thin: int, group: int) -> Iterator[Tensor]:
        flat = {n: v.flatten(0, 1)[::thin, None] for n, v in self.samples.items()}
        fixed = {n: v[None] for n, v in self.model.state_dict().items() if n not in flat}
        for start in range(0, len(next(iter(flat.values()))), group):
            yield drawn_outputs(self.model.eval(), {n: v[start : start + group] for n, v in flat.items()}, fixed, x)[
                :, 0
            ]

    def predict(self, x: Tensor, *, thin: int = 1, group: int = 200) -> Predictive:
        """Averages over every ``thin``-th draw, ``group`` of them at a time; each draw brings its own noise."""
        noise = None
        if isinstance(self.model.likelihood, Gaussian):
            drawn = self.samples.get("likelihood.log_noise")
            noise = self.model.likelihood.noise.detach() if drawn is None else drawn.flatten()[::thin].exp()
        return mixture(self.model, (f for part in self._drawn(x, thin, group) for f in part), noise)

    def diagnose(self, x: Tensor) -> Diagnostics:
        """Divergences, R-hat and effective sample size of what the network says at the given inputs.

        That is the function for regression and the probabilities for classes: the softmax leaves the function's level open.
        """
        f = self.outputs(x)
        if f.shape[1] < 4:
            raise ValueError(f"Diagnostics need at least 4 samples for each chain, got {f.shape[1]}.")
        f = f if isinstance(self.model.likelihood, Gaussian) else torch.softmax(f, -1)
        values = f.flatten(2).double().cpu().numpy()
        return Diagnostics(
            self.divergences, float(split_gelman_rubin(values).max()), float(effective_sample_size(values).min())
        )


class Nuts(Sampled):
    """Posterior samples by the No-U-Turn sampler.

    Args:
        model: The network; its extractor is applied once and stays as it is, and so do parameters that require no gradient.
        x: Training inputs, (N, ...).
        y: Training targets.
        warmup: Steps of adaptation for each chain.
        samples: Draws for each chain after that.
        chains: Number of chains.
        chain_method: "vectorized" (one computation) or "parallel" (one device each).
        target_accept: Target acceptance probability of the step size; raise it where transitions diverge.
        max_tree_depth: Largest depth of the trajectory's tree.
        seed: Seed of initial values and of the sampler.
        progress: Whether to show NumPyro's progress bar.
    """

    def __init__(
        self,
        model: Model,
        x: Tensor,
        y: Tensor,
        *,
        warmup: int = 1000,
        samples: int = 1000,
        chains: int = 4,
        chain_method: str = "vectorized",
        target_accept: float = 0.8,
        max_tree_depth: int = 10,
        seed: int = 0,
        progress: bool = False,
    ) -> None:
        check_data(model, x, y)
        check_counts(warmup=warmup, samples=samples, chains=chains)
        with torch.no_grad():
            features = model.eval().extractor(x)
        with jax.enable_x64(True):
            inputs, targets = arrays(model, features, y)
            fixed, points = held(model), initial(model, chains, seed)

            def potential(parameters: Arrays) -> Any:
                return -log_joint(model, fixed | parameters, inputs, targets)

            kernel = NUTS(potential_fn=potential, target_accept_prob=target_accept, max_tree_depth=max_tree_depth)
            mcmc = MCMC(
                kernel,
                num_warmup=warmup,
                num_samples=samples,
                num_chains=chains,
                chain_method=chain_method,
                progress_bar=progress,
            )
            start = {n: jnp.asarray(v if chains > 1 else v[0]) for n, v in points.items()}
            mcmc.run(jax.random.PRNGKey(seed), init_params=start, extra_fields=("diverging", "num_steps"))
            counts = {n: int(np.asarray(v).sum()) for n, v in mcmc.get_extra_fields().items()}
            grouped: Any = mcmc.get_samples(group_by_chain=True)
        # As torch tensors of the model's type.
        drawn = {n: torch.from_numpy(np.array(v)).to(model.layer.weight) for n, v in grouped.items()}
        super().__init__(model, drawn, divergences=counts["diverging"], leapfrog_steps=counts["num_steps"])
