"""NUTS, by NumPyro: samples of lengthscale, weights, biases, output weights and noise, given the extractor's features.

The only file that imports JAX. The log joint is assembled from the same functions as the torch one, with JAX's arrays in
place of torch's, and includes the Jacobians of the constrained parameters.
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
from bochner.layers import layer_log_prior
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


def output(model: Model, parameters: Arrays, features: Any) -> Any:
    """F at the extractor's features, (n, d) to (n, c)."""
    activation = model.layer.activation
    u = (features * (activation.unit * jnp.exp(-parameters["layer.log_lengthscale"]))) @ parameters["layer.weight"].T
    bias = parameters.get("layer.bias")
    if bias is not None:
        bias = link(bias, JAX) if activation.bias == "uniform" else bias
        u = u + activation.unit * bias
    f = activation.wave(u + activation.shift, JAX) @ parameters["output.weight"].T
    return f + parameters["output.bias"] if "output.bias" in parameters else f


def log_joint(model: Model, parameters: Arrays, features: Any, y: Any, *, jacobian: bool = True) -> Any:
    """The log joint of ``Model.log_joint`` without the extractor's prior; class labels come as one-hot rows."""
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
    total = total + jnp.sum(normal_log_prob(parameters["output.weight"], layer.out_features))
    if "output.bias" in parameters:
        total = total + jnp.sum(normal_log_prob(parameters["output.bias"], 1.0))
    f = output(model, parameters, features)
    if isinstance(model.likelihood, Gaussian):
        log_noise = parameters["likelihood.log_noise"]
        total = total + noise_log_prior(log_noise, jacobian=jacobian, xp=JAX)
        return total + jnp.sum(gaussian_log_likelihood(f, y, log_noise, JAX))
    return total + jnp.sum(categorical_log_likelihood(f, jnp.sum(f * y, -1), JAX))


@dataclass(frozen=True)
class Diagnostics:
    """Whether the chains can be trusted.

    Attributes:
        divergences: Number of divergent transitions after warm-up, all chains together.
        r_hat: Largest split R-hat of the function values; near 1 when the chains agree.
        ess: Smallest effective sample size of the function values.
    """

    divergences: int
    r_hat: float
    ess: float


class Nuts:
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
        for name, value in (("warmup", warmup), ("samples", samples), ("chains", chains)):
            if value < 1:
                raise ValueError(f"The {name} parameter must be at least 1, got {value} instead.")
        self.model, self.chains = model, chains
        with torch.no_grad():
            features = model.eval().extractor(x).double().cpu().numpy()
        targets = (
            y.double()
            if isinstance(model.likelihood, Gaussian)
            else torch.nn.functional.one_hot(y.long(), model.output.out_features)
        )
        initial = self._initial(seed)
        with jax.enable_x64(True):
            inputs, outputs = jnp.asarray(features), jnp.asarray(targets.cpu().numpy(), dtype=jnp.float64)

            held = {n: p for n, p in model.named_parameters() if not p.requires_grad and not n.startswith("extractor.")}
            fixed = {n: jnp.asarray(p.detach().double().cpu().numpy()) for n, p in held.items()}

            def potential(parameters: Arrays) -> Any:
                return -log_joint(model, fixed | parameters, inputs, outputs)

            kernel = NUTS(potential_fn=potential, target_accept_prob=target_accept, max_tree_depth=max_tree_depth)
            mcmc = MCMC(
                kernel,
                num_warmup=warmup,
                num_samples=samples,
                num_chains=chains,
                chain_method=chain_method,
                progress_bar=progress,
            )
            start = {n: jnp.asarray(v if chains > 1 else v[0]) for n, v in initial.items()}
            mcmc.run(jax.random.PRNGKey(seed), init_params=start, extra_fields=("diverging", "num_steps"))
            self.divergences = int(np.asarray(mcmc.get_extra_fields()["diverging"]).sum())
            self.leapfrog_steps = int(np.asarray(mcmc.get_extra_fields()["num_steps"]).sum())
            grouped: Any = mcmc.get_samples(group_by_chain=True)
            # (chains, samples, ...), as torch tensors of the model's type.
            self.samples = {n: torch.from_numpy(np.array(v)).to(model.layer.weight) for n, v in grouped.items()}

    def _initial(self, seed: int) -> dict[str, np.ndarray]:
        """Over-dispersed starting points: weights and biases from the prior, the rest scattered around the model's values.

        Only for the parameters that are sampled.
        """
        generator = torch.Generator().manual_seed(seed)
        layer, points = self.model.layer, []
        for _ in range(self.chains):
            values = {n: p.detach().double().cpu() for n, p in self.model.named_parameters()}
            weight, bias = draw(
                layer.spectrum, layer.activation, len(layer.weight), layer.in_features, generator=generator
            )
            values["layer.weight"] = weight
            if bias is not None:
                values["layer.bias"] = (
                    torch.logit((bias / math.pi + 1) / 2) if layer.activation.bias == "uniform" else bias
                )
            shape = values["output.weight"].shape
            values["output.weight"] = (
                torch.randn(shape, generator=generator, dtype=torch.float64) / layer.out_features**0.5
            )
            for name in values:
                if name.endswith(("log_lengthscale", "log_noise")):
                    values[name] = values[name] + 0.2 * torch.randn(
                        values[name].shape, generator=generator, dtype=torch.float64
                    )
            points.append({n: values[n] for n in parameter_names(self.model)})
        return {n: np.stack([p[n].numpy() for p in points]) for n in points[0]}

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
        """Divergences, R-hat and effective sample size of the function at the given inputs."""
        f = self.outputs(x).flatten(2).double().cpu().numpy()
        return Diagnostics(self.divergences, float(split_gelman_rubin(f).max()), float(effective_sample_size(f).min()))
