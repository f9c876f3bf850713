"""NUTS: the same log joint as torch's, agreement with the closed form, and calibration on simulated data."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import torch
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer.hmc import hmc

from bochner import RBF, Categorical, Exponential, Gaussian, Matern, Model, StationaryLayer, activations
from bochner.posteriors import nuts
from bochner.posteriors.closed_form import ClosedForm
from bochner.posteriors.nuts import Nuts
from bochner.posteriors.samples import Sampling
from problems import data, regression

SPECTRA = [RBF(), Matern(2.5), Matern(1.5), Exponential(), Matern(1.5, product=True)]


# Every activation and every spectrum with every likelihood: the log joint is a sum of their terms.
PRIORS = list(zip(activations.ACTIVATIONS, itertools.cycle(SPECTRA), strict=False))


@pytest.mark.parametrize("likelihood", [Gaussian, Categorical])
@pytest.mark.parametrize(("name", "spectrum"), PRIORS, ids=str)
def test_torch_and_jax_log_joints_agree(name, spectrum, likelihood):
    """At 100 random parameter draws for each prior, with and without Jacobians, to 1e-10."""
    generator = torch.Generator().manual_seed(0)
    layer = StationaryLayer(
        3, 6, kernel=spectrum, activation=name, lengthscale=torch.ones(3), generator=generator
    ).double()
    classes = 3 if likelihood is Categorical else 2
    model = Model(layer, classes, likelihood(), output_bias=True, generator=generator)
    model.output.log_amplitude.requires_grad_(True)
    x = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    y = (
        torch.tensor([0, 1, 2, 1, 0])
        if likelihood is Categorical
        else torch.randn(5, 2, generator=generator, dtype=torch.float64)
    )
    one_hot = torch.nn.functional.one_hot(y, 3) if likelihood is Categorical else y
    with jax.enable_x64(True):
        inputs = jnp.asarray(x.numpy()), jnp.asarray(one_hot.numpy())
        # Compiled as one function: compiling is what takes time.
        compiled = jax.jit(lambda p: [nuts.log_joint(model, p, *inputs, jacobian=j) for j in (False, True)])
        for _ in range(100):
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
            parameters = {n: jnp.asarray(model.get_parameter(n).detach().numpy()) for n in nuts.parameter_names(model)}
            expected = [model.log_joint(x, y, jacobian=jacobian).item() for jacobian in (False, True)]
            assert np.array(compiled(parameters)) == pytest.approx(expected, rel=1e-10, abs=1e-10)


LONG = Sampling(warmup=200, samples=600, chains=2)


@pytest.fixture(scope="module")
def linear():
    """A network whose other parameters are held: a linear problem with a Gaussian posterior; its data, and samples."""
    model = regression(width=6).requires_grad_(False)
    model.output.weight.requires_grad_(True)
    x, y = data(20)
    return model, x, y, Nuts(model, x, y, LONG)


def test_output_weights_agree_with_the_closed_form(linear):
    """Within 4 Monte Carlo errors."""
    model, x, y, posterior = linear
    assert list(posterior.samples) == ["output.weight"]
    closed = ClosedForm(model, x, y).predict(x[:5])
    f = posterior.outputs(x[:5])[..., 0].numpy()
    ess = effective_sample_size(f)
    draws = f.reshape(-1, 5)
    mean_error = draws.std(0) / np.sqrt(ess)
    assert (np.abs(draws.mean(0) - closed.mean[:, 0].numpy()) / mean_error).max() < 4
    variance = closed.f_variance[:, 0].numpy()
    square_ess = effective_sample_size((f - closed.mean[:, 0].numpy()) ** 2)
    assert (np.abs(draws.var(0) / variance - 1) / np.sqrt(2 / square_ess)).max() < 4


def test_the_same_seed_gives_the_same_draws(linear):
    *problem, posterior = linear
    torch.testing.assert_close(Nuts(*problem, LONG).samples, posterior.samples, rtol=0, atol=0)


def simulate(seed, x):
    """Parameters from the prior, and class labels from them."""
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    layer = StationaryLayer(
        1, 4, kernel="matern32", lengthscale=rng.gamma(2, 1 / 0.5), generator=generator, dtype=torch.float64
    )
    model = Model(layer, 2, Categorical(), generator=generator)
    f = model(x).detach()
    labels = torch.multinomial(torch.softmax(f, -1), 1, generator=generator)[:, 0]
    return model, (f[0, 1] - f[0, 0]).item(), torch.nn.functional.one_hot(labels, 2).double().numpy()


@pytest.mark.slow
def test_simulation_based_calibration():
    """Parameters and data drawn from the prior 300 times: the rank of the true function value among the draws is uniform.

    The posteriors are sampled as one vectorised computation, from starting points drawn from the prior.
    """
    x = torch.linspace(-2, 2, 12, dtype=torch.float64)[:, None]
    number, draws, thin = 300, 19, 8
    problems = [simulate(seed, x) for seed in range(number)]
    starts = [simulate(seed + 10_000, x)[0] for seed in range(number)]
    template = problems[0][0]
    with jax.enable_x64(True):
        inputs = jnp.asarray(x.numpy())
        fixed = nuts.fixed_parameters(template)
        init, step = hmc(
            potential_fn_gen=lambda y: lambda p: -nuts.log_joint(template, fixed | p, inputs, y), algo="NUTS"
        )

        def sample(start, y, key):
            state = init(start, 500, model_args=(y,), rng_key=key, target_accept_prob=0.9, max_tree_depth=6)

            def advance(state, _):
                state = step(state, model_args=(y,))
                f = nuts.outputs(template, fixed | state.z, inputs)
                return state, f[0, 1] - f[0, 0]

            state, _ = jax.lax.scan(advance, state, None, length=500)
            return jax.lax.scan(advance, state, None, length=draws * thin)[1][::thin]

        names = nuts.parameter_names(template)
        start = {n: jnp.stack([jnp.asarray(m.get_parameter(n).detach().numpy()) for m in starts]) for n in names}
        targets = jnp.stack([jnp.asarray(y) for *_, y in problems])
        values = np.asarray(jax.jit(jax.vmap(sample))(start, targets, jax.random.split(jax.random.PRNGKey(0), number)))
    truth = np.array([value for _, value, _ in problems])
    counts = np.bincount((values < truth[:, None]).sum(1) // 2, minlength=10)  # 20 possible ranks in 10 bins of 2
    assert counts.sum() == number
    pvalue = scipy.stats.chisquare(counts).pvalue
    print(f"ranks {counts.tolist()}, p = {pvalue:.3f}")
    assert pvalue > 0.01


def test_diagnostics_and_prediction():
    model = regression(width=5)
    x, y = data(15)
    sampling = Sampling(warmup=50, samples=52, chains=2, max_tree_depth=5)
    posterior = Nuts(model, x, y, sampling)
    diagnosis = posterior.diagnose(x[:3])
    f = posterior.outputs(x[:3])[..., 0].numpy()
    assert diagnosis.r_hat == pytest.approx(max(split_gelman_rubin(f[..., i]) for i in range(3)))
    assert diagnosis.ess == pytest.approx(min(effective_sample_size(f[..., i]) for i in range(3)))
    assert diagnosis.divergences == posterior.divergences
    prediction = posterior.predict(x[:4], thin=4)
    assert prediction.mean.shape == (4, 1)
    assert prediction.samples.shape[0] == 26
    torch.testing.assert_close(prediction.mean, posterior.outputs(x[:4]).flatten(0, 1)[::4].mean(0))
    assert math.isfinite(prediction.log_prob(y[:4]).sum())


def test_bad_arguments():
    x, y = data(10)
    with pytest.raises(ValueError, match="chains parameter must be an integer of at least 1, got 0 instead"):
        Nuts(regression(), x, y, Sampling(chains=0))
    with pytest.raises(ValueError, match="x parameter must be finite"):
        Nuts(regression(), x * math.inf, y)


def small(kernel, activation, units, likelihood=None, outputs=2):
    generator = torch.Generator().manual_seed(units)
    layer = StationaryLayer(2, units, kernel=kernel, activation=activation, generator=generator, dtype=torch.float64)
    likelihood = likelihood or Categorical()
    return Model(layer, 1 if isinstance(likelihood, Gaussian) else outputs, likelihood, generator=generator)


def problem(rows=12):
    x = torch.randn(rows, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x, (x[:, 0] * x[:, 1] > 0).long()


@pytest.mark.slow
def test_networks_without_outputs_return_their_weight_priors():
    """With the output weights held at zero the data say nothing: the draws are the prior, heavy tails and all."""
    spectra = [RBF(), Matern(1.5), Matern(1.5, product=True)]
    models = [small(spectrum, "sin", units) for spectrum, units in zip(spectra, (8, 6, 7), strict=True)]
    for model in models:
        torch.nn.init.zeros_(model.output.weight).requires_grad_(False)
    x, y = problem()
    for model in models:
        posterior = Nuts(model, x, y, Sampling(warmup=300, samples=500, chains=2, max_tree_depth=6, seed=1))
        weight = posterior.samples["layer.weight"]
        assert weight.shape == (2, 500, *model.layer.weight.shape)
        assert "output.weight" not in posterior.samples
        scale = scipy.stats.norm if isinstance(model.layer.spectrum, RBF) else scipy.stats.t(3)
        inside = (weight.abs()[..., None] < torch.tensor(scale.ppf([0.6, 0.8, 0.95]))).double().mean((2, 3)).numpy()
        error = inside.reshape(-1, 3).std(0) / np.sqrt(effective_sample_size(inside))
        assert (np.abs(inside.mean((0, 1)) - [0.2, 0.6, 0.9]) / error).max() < 4


def test_too_few_draws_cannot_be_diagnosed():
    model = small("rbf", "sin", 4)
    samples = {n: torch.from_numpy(v)[None] for n, v in nuts.starting_points(model, 3, 0).items()}
    with pytest.raises(ValueError, match="at least 4 samples for each chain, got 3"):
        nuts.Sampled(model, samples, divergences=0, leapfrog_steps=0).diagnose(problem()[0])
