"""NUTS for several small networks at once, in one vectorised run."""
# JAX and NumPyro declare no types:
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.flatten_util import ravel_pytree
from numpy.typing import NDArray
from numpyro.infer.hmc import HMCState, hmc
from rich.progress import track
from torch import Tensor

from bochner.likelihoods import Gaussian
from bochner.models import Model
from bochner.posteriors.nuts import (
    JAX,
    Arrays,
    affine,
    as_arrays,
    fixed_parameters,
    log_likelihood,
    log_prior,
    output_weight,
    starting_points,
)
from bochner.posteriors.samples import Sampled, Sampling
from bochner.training.checks import check_data

FloatArray, IntArray = NDArray[np.float64], NDArray[np.int64]
Unravel = Callable[[jax.Array], Arrays]  # from a flat position to named parameters
Potential = Callable[[jax.Array], jax.Array]  # minus the log joint at a flat position
PotentialOf = Callable[[jax.Array], Potential]  # the potential of the network with an index


def sample_many(models: Sequence[Model], x: Tensor, y: Tensor, sampling: Sampling | None = None) -> list[Sampled]:
    """Samples several small networks on the same data as one vectorised run, made for a GPU.

    The networks may differ in activation, spectrum and number of units. Every chain carries the index of its network. All
    chains step together and wait for the longest trajectory, so ``max_tree_depth`` decides the time. It matters most for
    heavy-tailed weights, along which trajectories hardly ever turn.

    Args:
        models: The networks, without feature extractors.
        x: Training inputs, (N, d).
        y: Training targets.
        sampling: How long, and how many chains for each network.

    Returns:
        The draws of each network.
    """
    _check_many(models, x, y)
    sampling = sampling or Sampling()
    index = np.repeat(np.arange(len(models)), sampling.chains)
    with jax.enable_x64(True):
        start, sizes, unravel = _start(models, sampling.chains, sampling.seed)
        potential = _potential(models, unravel, sizes, *as_arrays(models[0], x, y))
        drawn, events = _run(potential, start, index, sampling)
        posteriors: list[Sampled] = []
        for i, model in enumerate(models):
            named = jax.vmap(jax.vmap(unravel[i]))(jnp.asarray(drawn[:, index == i, : sizes[i]].swapaxes(0, 1)))
            tensors = {n: torch.from_numpy(np.array(v)).to(model.layer.weight) for n, v in named.items()}
            diverged, steps = (int(v) for v in events[:, index == i].sum(1))
            posteriors.append(Sampled(model, tensors, divergences=diverged, leapfrog_steps=steps))
    return posteriors


def _run(potential: PotentialOf, start: jax.Array, index: IntArray, sampling: Sampling) -> tuple[FloatArray, IntArray]:
    """Flat positions of every draw, (samples, chains, size), and the divergences and gradients of each chain, (2, chains)."""
    init, step = hmc(potential_fn_gen=potential, algo="NUTS")
    which, keys = jnp.asarray(index), jax.random.split(jax.random.PRNGKey(sampling.seed), len(index))
    accept, depth = sampling.target_accept, sampling.max_tree_depth
    warmup, samples = sampling.warmup, sampling.samples

    def begin(position: jax.Array, network: jax.Array, key: jax.Array) -> HMCState:
        return init(
            position, warmup, target_accept_prob=accept, max_tree_depth=depth, model_args=(network,), rng_key=key
        )

    def advance(state: HMCState, network: jax.Array) -> HMCState:
        return step(state, model_args=(network,))

    state, advance_all = jax.vmap(begin)(start, which, keys), jax.jit(jax.vmap(advance))
    drawn, events = np.empty((samples, *start.shape)), np.zeros((2, len(index)), int)
    for t in track(range(-warmup, samples), description="NUTS", disable=not sampling.progress):
        state = advance_all(state, which)
        if t >= 0:
            drawn[t] = state.z
            events += np.stack([state.diverging, state.num_steps])
    return drawn, events


def _start(models: Sequence[Model], chains: int, seed: int) -> tuple[jax.Array, list[int], list[Unravel]]:
    """Flat starting points of all chains, the number of entries that each network uses, and the way back.

    Entries that a network does not use are padding: standard normal, and nothing depends on them.
    """
    vectors: list[FloatArray] = []
    sizes: list[int] = []
    unravel: list[Unravel] = []
    for model in models:
        points = starting_points(model, chains, seed)
        flat = [ravel_pytree({n: v[c] for n, v in points.items()}) for c in range(chains)]
        vectors += [np.asarray(vector) for vector, _ in flat]
        sizes.append(len(flat[0][0]))
        unravel.append(flat[0][1])
    start = np.random.default_rng(seed).standard_normal((len(vectors), max(sizes)))
    for row, vector in zip(start, vectors, strict=True):
        row[: len(vector)] = vector
    return jnp.asarray(start), sizes, unravel


def _check_many(models: Sequence[Model], x: Tensor, y: Tensor) -> None:
    if not models:
        raise ValueError("The models parameter must hold at least one network, got none.")
    for i, model in enumerate(models):
        check_data(model, x, y)
        if not isinstance(model.extractor, torch.nn.Identity) or model.layer.activation.outputs != 1:
            raise ValueError(
                f"The models parameter must hold networks without a feature extractor and with one output for each unit, "
                f"but number {i} is not one; use Nuts for it."
            )
        shape = model.layer.in_features, model.output.out_features
        if shape != (x.shape[-1], models[0].output.out_features):
            raise ValueError(
                f"The models parameter must hold networks of {x.shape[-1]} inputs and {models[0].output.out_features} outputs, "
                f"but number {i} has {shape[0]} and {shape[1]}."
            )


def _parts(model: Model, unravel: Unravel, size: int, units: int) -> Callable[[jax.Array], tuple[jax.Array, ...]]:
    """What is particular to a network, as a function of the flat position and padded to a number of units.

    Slopes and intercepts of the wave's argument, output weights and bias, log noise, and the log prior.
    """
    fixed, missing = fixed_parameters(model), units - len(model.layer.weight)

    def parts(position: jax.Array) -> tuple[jax.Array, ...]:
        p = fixed | unravel(position[:size])
        slope, intercept = affine(model, p)
        slope, intercept = jnp.pad(slope, ((0, missing), (0, 0))), jnp.pad(intercept, (0, missing))
        head = jnp.pad(output_weight(p), ((0, 0), (0, missing)))
        bias = p.get("output.bias", jnp.zeros(model.output.out_features))
        log_noise = p.get("likelihood.log_noise", jnp.zeros(()))
        prior = log_prior(model, p, jacobian=True) - 0.5 * jnp.sum(position[size:] ** 2)
        return slope, intercept, head, bias, log_noise, prior

    return parts


def _potential(
    models: Sequence[Model], unravel: list[Unravel], sizes: list[int], inputs: jax.Array, targets: jax.Array
) -> PotentialOf:
    """Minus the log joint as a function of the flat position, for a given index of the network.

    Under ``vmap`` a switch computes every branch. The branches are small: the products with the data are outside of them.
    """
    units = max(len(model.layer.weight) for model in models)
    branches = [_parts(*each, units) for each in zip(models, unravel, sizes, strict=True)]
    waves = list(dict.fromkeys(model.layer.activation.wave for model in models))
    wave_of = jnp.asarray([waves.index(model.layer.activation.wave) for model in models])
    regression = isinstance(models[0].likelihood, Gaussian)

    def generate(index: jax.Array) -> Potential:
        def potential(position: jax.Array) -> jax.Array:
            slope, intercept, head, bias, log_noise, prior = jax.lax.switch(index, branches, position)
            u = inputs @ slope.T + intercept
            h = jax.lax.switch(wave_of[index], [lambda u, w=wave: w(u, JAX) for wave in waves], u)
            return -(prior + log_likelihood(h @ head.T + bias, targets, log_noise if regression else None))

        return potential

    return generate
