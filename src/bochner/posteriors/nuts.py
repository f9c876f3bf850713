"""NUTS, by NumPyro: samples of lengthscale, weights, biases, output weights and noise, given the extractor's features.

The only file that imports JAX; ``samples`` takes R-hat and effective sample sizes from NumPyro. The log joint is assembled from the
same functions as the torch one, with JAX's arrays in place of torch's, and includes the Jacobians of the constrained parameters.
"""
# JAX and NumPyro declare no types:
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import torch
from numpyro.infer import MCMC, NUTS
from torch import Tensor

from bochner.layers import amplitude_log_prior, layer_log_prior
from bochner.likelihoods import Gaussian, categorical_log_likelihood, gaussian_log_likelihood, noise_log_prior
from bochner.models import Model
from bochner.posteriors.samples import Sampled, Sampling
from bochner.priors.activations import link, unlink
from bochner.priors.frequencies import draw
from bochner.priors.spectra import normal_log_prob
from bochner.training.checks import check_data

# What the shared formulas need of an array module, under torch's names.
_SHARED = ("sin", "cos", "abs", "round", "clip", "where", "exp", "log", "log1p", "tanh", "sum", "concatenate")
JAX = SimpleNamespace(
    **{name: getattr(jnp, name) for name in _SHARED},
    special=jax.scipy.special,
    logsumexp=jax.scipy.special.logsumexp,
)

START_SCATTER = 0.2  # standard deviation of the log scales at which chains start, around the model's

Arrays = dict[str, jax.Array]  # parameters by their names in the model


def parameter_names(model: Model) -> list[str]:
    """The sampled parameters: all that require a gradient, except the extractor's."""
    return [name for name, p in model.named_parameters() if not name.startswith("extractor.") and p.requires_grad]


def affine(model: Model, parameters: Arrays) -> tuple[jax.Array, jax.Array]:
    """Slope, (k, d), and intercept, (k,), of the argument of each unit's wave, as a function of the extractor's features."""
    activation = model.layer.activation
    slope = parameters["layer.weight"] * (activation.unit * jnp.exp(-parameters["layer.log_lengthscale"]))
    bias = parameters.get("layer.bias")
    if bias is None:
        return slope, jnp.full(len(slope), activation.shift, slope.dtype)
    return slope, activation.unit * (link(bias, JAX) if activation.bias == "uniform" else bias) + activation.shift


def output_weight(parameters: Arrays) -> jax.Array:
    """Weights of the output layer, (c, K), amplitude included."""
    return jnp.exp(parameters["output.log_amplitude"]) * parameters["output.weight"]


def outputs(model: Model, parameters: Arrays, features: jax.Array) -> jax.Array:
    """Outputs of the network at the extractor's features: (n, d) to (n, c)."""
    slope, intercept = affine(model, parameters)
    f = model.layer.activation.wave(features @ slope.T + intercept, JAX) @ output_weight(parameters).T
    return f + parameters["output.bias"] if "output.bias" in parameters else f


def log_prior(model: Model, parameters: Arrays, *, jacobian: bool) -> jax.Array:
    """Log prior of everything but the extractor."""
    layer = model.layer
    of_layer = {name.removeprefix("layer."): value for name, value in parameters.items() if name.startswith("layer.")}
    total = layer_log_prior(layer.spectrum, layer.activation, of_layer, jacobian=jacobian, xp=JAX)
    for name, precision in model.precisions().items():
        if name in ("output.weight", "output.bias"):
            total = total + jnp.sum(normal_log_prob(parameters[name], precision))
    total = total + amplitude_log_prior(parameters["output.log_amplitude"], jacobian=jacobian, xp=JAX)
    if isinstance(model.likelihood, Gaussian):
        total = total + noise_log_prior(parameters["likelihood.log_noise"], jacobian=jacobian, xp=JAX)
    return total


def log_likelihood(f: jax.Array, y: jax.Array, log_noise: jax.Array | None) -> jax.Array:
    """Gaussian where there is noise, else that of classes given as one-hot rows; summed over the rows.

    One output for two classes is the logit of the second.
    """
    if log_noise is not None:
        return jnp.sum(gaussian_log_likelihood(f, y, log_noise, JAX))
    if f.shape[-1] < y.shape[-1]:
        f = jnp.concatenate([0.0 * f, f], -1)
    return jnp.sum(categorical_log_likelihood(f, jnp.sum(f * y, -1), JAX))


def log_joint(
    model: Model, parameters: Arrays, features: jax.Array, y: jax.Array, *, jacobian: bool = True
) -> jax.Array:
    """The log joint of ``Model.log_joint`` without the extractor's prior; class labels come as one-hot rows."""
    f = outputs(model, parameters, features)
    return log_prior(model, parameters, jacobian=jacobian) + log_likelihood(
        f, y, parameters.get("likelihood.log_noise")
    )


def as_arrays(model: Model, features: Tensor, y: Tensor) -> tuple[jax.Array, jax.Array]:
    """Inputs and targets in float64, class labels as one-hot rows."""
    regression = isinstance(model.likelihood, Gaussian)
    targets = y if regression else torch.nn.functional.one_hot(y.long(), model.output.out_features)
    return jnp.asarray(features.double().cpu().numpy()), jnp.asarray(targets.double().cpu().numpy())


def fixed_parameters(model: Model) -> Arrays:
    """The parameters that are not sampled, without the extractor's."""
    fixed = {n: p for n, p in model.named_parameters() if not p.requires_grad and not n.startswith("extractor.")}
    return {n: jnp.asarray(p.detach().double().cpu().numpy()) for n, p in fixed.items()}


def starting_points(model: Model, chains: int, seed: int) -> dict[str, np.ndarray]:
    """Starting points of the chains, wider apart than the posterior: each sampled parameter as (chains, ...).

    Weights and biases are drawn from the prior. Logarithms of scales get normal noise of standard deviation START_SCATTER.
    """
    generator = torch.Generator().manual_seed(seed)
    layer = model.layer
    points: list[dict[str, Tensor]] = []
    for _ in range(chains):
        values = {n: p.detach().double().cpu() for n, p in model.named_parameters()}
        weight, bias = draw(layer.spectrum, layer.activation, len(layer.weight), layer.in_features, generator=generator)
        values["layer.weight"] = weight
        if bias is not None:
            values["layer.bias"] = unlink(bias) if layer.activation.bias == "uniform" else bias
        shape = values["output.weight"].shape
        draws = torch.randn(shape, generator=generator, dtype=torch.float64)
        values["output.weight"] = draws / model.precisions()["output.weight"] ** 0.5
        for name in parameter_names(model):
            if name.endswith(("log_lengthscale", "log_noise", "log_amplitude")):
                values[name] = values[name] + START_SCATTER * torch.randn(
                    values[name].shape, generator=generator, dtype=torch.float64
                )
        points.append({n: values[n] for n in parameter_names(model)})
    return {n: np.stack([p[n].numpy() for p in points]) for n in points[0]}


class Nuts(Sampled):
    """Posterior samples by the No-U-Turn sampler.

    Args:
        model: The network; its extractor is applied once and stays as it is, and so do parameters that require no gradient.
        x: Training inputs, (N, ...).
        y: Training targets.
        sampling: How long, and how many chains.
        chain_method: "vectorized" (one computation) or "parallel" (one device each).
    """

    def __init__(
        self,
        model: Model,
        x: Tensor,
        y: Tensor,
        sampling: Sampling | None = None,
        *,
        chain_method: str = "vectorized",
    ) -> None:
        check_data(model, x, y)
        sampling = sampling or Sampling()
        with torch.no_grad():
            features = model.eval().extractor(x)
        with jax.enable_x64(True):
            inputs, targets = as_arrays(model, features, y)
            fixed, points = fixed_parameters(model), starting_points(model, sampling.chains, sampling.seed)

            def potential(parameters: Arrays) -> jax.Array:
                return -log_joint(model, fixed | parameters, inputs, targets)

            depth, accept = sampling.max_tree_depth, sampling.target_accept
            mcmc = MCMC(
                NUTS(potential_fn=potential, target_accept_prob=accept, max_tree_depth=depth),
                num_warmup=sampling.warmup,
                num_samples=sampling.samples,
                num_chains=sampling.chains,
                chain_method=chain_method,
                progress_bar=sampling.progress,
            )
            start = {n: jnp.asarray(v if sampling.chains > 1 else v[0]) for n, v in points.items()}
            mcmc.run(jax.random.PRNGKey(sampling.seed), init_params=start, extra_fields=("diverging", "num_steps"))
            counts = {n: int(np.asarray(v).sum()) for n, v in mcmc.get_extra_fields().items()}
            grouped = mcmc.get_samples(group_by_chain=True)
        # As torch tensors of the model's type.
        drawn = {n: torch.from_numpy(np.array(v)).to(model.layer.weight) for n, v in grouped.items()}
        super().__init__(model, drawn, divergences=counts["diverging"], leapfrog_steps=counts["num_steps"])
