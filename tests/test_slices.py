"""Annealed slices: the numbers' distributions, likelihoods against dense formulas, and draws against a sum over the prior."""

import math

import numpy as np
import pytest
import scipy.stats
import torch
from numpyro.diagnostics import effective_sample_size

from bochner import Categorical, Gaussian, Matern, Model, StationaryLayer
from bochner.experiments.published import SampledModel
from bochner.posteriors.normal_form import (
    LENGTHSCALE_PRIOR,
    NOISE_PRIOR,
    Particles,
    SampledClassifier,
    SampledRegression,
    from_squares,
)
from bochner.posteriors.samples import Sampling
from bochner.posteriors.slices import _Sampler, slice_sample

X = torch.tensor([[-1.0], [0.2], [0.9], [1.5]], dtype=torch.float64)
Y = torch.tensor([[0.4], [-0.3], [0.8], [0.1]], dtype=torch.float64)
LABELS = torch.tensor([0, 1, 0, 1])


def network(units=3, kernel="rbf", activation="sin", likelihood=None, dim=1, **options):
    generator = torch.Generator().manual_seed(0)
    layer = StationaryLayer(dim, units, kernel=kernel, activation=activation, generator=generator, dtype=torch.float64)
    likelihood = likelihood or Gaussian(0.3)
    classes = 2 if isinstance(likelihood, Categorical) else 1
    return Model(layer, classes, likelihood, amplitude=1.7, generator=generator, **options)


def normal(generator, *shape):
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("output_bias", [False, True])
@pytest.mark.parametrize(("kernel", "activation"), [("rbf", "step"), (Matern(1.5), "sin"), ("exponential", "triangle")])
def test_the_likelihood_integrates_the_output_weights_out(kernel, activation, output_bias, generator):
    target = SampledRegression(network(3, kernel, activation, output_bias=output_bias), X, Y)
    v, shared = normal(generator, 2, 3, target.unit_numbers), normal(generator, 2, target.shared_numbers)
    h, level = target.evaluate(v, shared)
    noise = target.noise(shared)
    for i in range(2):
        units = h[i].numpy()
        covariance = noise[i].item() ** 2 * np.eye(4) + 1.7**2 / 3 * units.T @ units + output_bias
        expected = scipy.stats.multivariate_normal.logpdf(Y[:, 0], np.zeros(4), covariance)
        assert level[i].item() == pytest.approx(expected)


def test_rounding_makes_no_network_more_probable_than_any_can_be(generator):
    """Units that nearly coincide, next to no noise: the Gaussian density has no value above that of its middle, at variance s²."""
    noise, draws = 1e-8, 20_000
    target = SampledRegression(network(2), X, Y)
    apart = 1e-7 * torch.randn(draws, 2, 4, generator=generator, dtype=torch.float64)
    h = torch.randn(draws, 1, 4, generator=generator, dtype=torch.float64) + apart
    level = target.log_likelihood(h, torch.full((draws,), noise, dtype=torch.float64))
    assert bool(torch.isfinite(level).any())
    assert level.max().item() <= -4 * (math.log(noise) + 0.5 * math.log(2 * math.pi))


def classes_network(classes):
    """A network for classes, with an output bias unless the name says otherwise; "one logit" is the published one."""
    layer = network(3, Matern(1.5), "triangle").layer
    if classes == "one logit":
        return SampledModel(layer, Categorical(), torch.Generator().manual_seed(0))
    number, bias = (int(classes[0]), False) if isinstance(classes, str) else (classes, True)
    return Model(layer, number, Categorical(), amplitude=1.7, output_bias=bias)


CLASSES = ["one logit", 2, 3, "2 without bias", "6 without bias"]


@pytest.mark.parametrize("classes", CLASSES)
def test_a_replaced_unit_has_the_likelihood_of_the_new_network(classes, generator):
    target = SampledClassifier(classes_network(classes), X, LABELS)
    v, shared = normal(generator, 5, 3, target.unit_numbers), normal(generator, 5, target.shared_numbers)
    moved = v.clone()
    moved[:, 1] = normal(generator, 5, target.unit_numbers)
    rest = target.without(target.evaluate(v, shared)[0], v, shared, 1)
    for found, expected in zip(
        target.with_unit(rest, moved[:, 1], shared, 1), target.evaluate(moved, shared), strict=True
    ):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("classes", CLASSES)
def test_a_drawn_network_has_the_likelihood_of_its_particle(classes, monkeypatch):
    """The parameters that are handed out, in the model itself, give the likelihood that the sampler worked with."""
    kept = []
    original = SampledClassifier.head
    monkeypatch.setattr(SampledClassifier, "head", lambda *args: kept.append(args[1].level.clone()) or original(*args))
    posterior = slice_sample(
        classes_network(classes), X, LABELS, Sampling(warmup=2, samples=3, chains=2, seed=3), sweeps=1
    )
    logits = posterior.outputs(X).flatten(0, 1)
    assert logits.shape == (6, 4, {3: 3, "6 without bias": 6}.get(classes, 2))
    expected = torch.log_softmax(logits, -1)[:, torch.arange(4), LABELS].sum(-1)
    torch.testing.assert_close(expected, kept[-1])


@pytest.mark.parametrize("product", [False, True])
def test_numbers_have_the_distributions_of_the_priors(product, generator):
    """Kolmogorov–Smirnov tests at a level of one in ten thousand."""
    count = 20_000
    target = SampledRegression(
        network(1, Matern(1.5, product=product), dim=2), torch.zeros(4, 2, dtype=torch.float64), Y
    )
    weight, bias = target.weights(normal(generator, count, 1, target.unit_numbers))
    shared = normal(generator, count, target.shared_numbers)
    assert scipy.stats.kstest(bias[:, 0], scipy.stats.uniform(-math.pi, 2 * math.pi).cdf).pvalue > 1e-4
    for column in weight[:, 0].T:
        assert scipy.stats.kstest(column, scipy.stats.t(3).cdf).pvalue > 1e-4
    # One scale for both, or one for each: the sizes of the coordinates then are dependent or not.
    assert (abs(scipy.stats.spearmanr(*weight[:, 0].abs().T).statistic) > 0.1) is not product
    for value, (shape, rate) in ((target.lengthscale(shared), LENGTHSCALE_PRIOR), (target.noise(shared), NOISE_PRIOR)):
        assert scipy.stats.kstest(value, scipy.stats.gamma(shape, scale=1 / rate).cdf).pvalue > 1e-4
    torch.testing.assert_close(from_squares(torch.tensor([[1.0, 2.0]]), (1.0, 2.5)), torch.tensor([1.0]))


def sampler_of(target, generator, records):
    """What moves particles, without particles of its own. With ``records`` as within a CUDA graph: all tries for all particles."""
    sampler = object.__new__(_Sampler)
    sampler.target, sampler.generator, sampler.records = target, generator, records
    return sampler


@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("kernel", ["rbf", Matern(1.5), Matern(0.5), Matern(1.5, product=True)])
def test_a_stretch_leaves_the_function_and_the_prior_as_they_are(kernel, records, generator):
    """From the prior to the prior by Kolmogorov–Smirnov tests; slopes w/ℓ stay; and given them ℓ has its density, by quadrature."""
    count = 20_000
    target = SampledRegression(
        network(2, kernel, dim=2), torch.randn(4, 2, generator=generator, dtype=torch.float64), Y
    )
    v, shared = normal(generator, count, 2, target.unit_numbers), normal(generator, count, target.shared_numbers)
    particles = Particles(v, shared, *target.evaluate(v, shared))
    sampler = sampler_of(target, generator, records)
    slope = target.weights(v)[0] / target.lengthscale(shared)[:, None, None]
    before = particles.outputs.clone()
    sampler._stretch(particles)
    torch.testing.assert_close(target.weights(v)[0] / target.lengthscale(shared)[:, None, None], slope)
    torch.testing.assert_close(target.evaluate(v, shared)[0], before)
    for numbers in (v[..., : 2 + target.squares].flatten(1), shared[:, : target.lengthscale_numbers]):
        for column in numbers.T:
            assert scipy.stats.kstest(column, "norm").pvalue > 1e-5
    # All particles from one and the same set of slopes: what ℓ comes to after many stretches.
    v, shared = v[:1].repeat(count, 1, 1), shared[:1].repeat(count, 1)
    for _ in range(40):
        sampler._stretch(Particles(v, shared, before, particles.level))
    lengthscale = torch.linspace(1e-3, 40, 40_000, dtype=torch.float64)
    weights = lengthscale[:, None, None] * slope[:1]
    prior = target.layer.spectrum.weight_log_prob(weights).flatten(1).sum(1) + 4 * lengthscale.log()
    density = (prior + lengthscale.log() - lengthscale / 2).exp()
    share = density.cumsum(0) / density.sum()
    assert scipy.stats.kstest(target.lengthscale(shared), lambda x: np.interp(x, lengthscale, share)).pvalue > 1e-4


@pytest.mark.parametrize("product", [False, True])
def test_numbers_drawn_for_given_weights_are_those_of_their_conditional(product, generator):
    """w s is the normal number again, and s² is chi-squared: of as many squares as make it, plus the weights that share it."""
    target = SampledRegression(network(1, Matern(1.5, product=product), dim=2), torch.randn(4, 2).double(), Y)
    weight = torch.tensor([0.7, -2.0], dtype=torch.float64).expand(20_000, 1, 2)
    v = torch.zeros(20_000, 1, target.unit_numbers, dtype=torch.float64)
    target.draw_weights(v, weight, lambda *shape: normal(generator, *shape))
    torch.testing.assert_close(target.weights(v)[0], weight)
    blocks = weight[..., None] if product else weight[..., None, :]
    scale = v[..., 2 : 2 + target.squares].unflatten(-1, (-1, 3)).square().mean(-1)
    torch.testing.assert_close(v[..., :2], weight * scale.sqrt())
    together = scale * (3 + blocks.square().sum(-1))
    for column in together.flatten(1).T:
        assert scipy.stats.kstest(column, scipy.stats.chi2(3 + blocks.shape[-1]).cdf).pvalue > 1e-4


def test_a_draw_of_exactly_zero_is_a_direction_too():
    target = SampledRegression(network(1, "exponential"), X, Y)
    weight = torch.full((3, 1, 1), 2.0, dtype=torch.float64)
    v = torch.zeros(3, 1, target.unit_numbers, dtype=torch.float64)
    target.draw_weights(
        v, weight, lambda *shape: torch.tensor([0.0, 1.0], dtype=torch.float64)[: shape[-1]].expand(shape)
    )
    torch.testing.assert_close(target.weights(v)[0], weight)
    assert bool(torch.isfinite(target.weights(v.zero_())[0]).all())


@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("classes", CLASSES)
def test_output_weights_and_biases_move_by_their_posterior(classes, records, generator):
    """All else fixed: means of the logits after many moves against the prior's draws weighed by their likelihood."""
    target = SampledClassifier(classes_network(classes), X, LABELS)
    count = 4000
    v = normal(generator, 1, 3, target.unit_numbers).repeat(count, 1, 1)
    shared = normal(generator, 1, target.shared_numbers).repeat(count, 1)
    weights, biases = v.clone(), shared.clone()
    weights[..., -target.logits :].normal_(generator=generator)
    biases[:, target.lengthscale_numbers :].normal_(generator=generator)
    logits, level = target.evaluate(weights, biases)
    share = torch.softmax(level, 0)[:, None, None]
    expected = (share * logits).sum(0)
    error = (share.square() * (logits - expected).square()).sum(0).sqrt()
    particles = Particles(v, shared, *target.evaluate(v, shared))
    sampler, state = sampler_of(target, generator, records), (particles.outputs, particles.level)
    others = v[..., : -target.logits], shared[:, : target.lengthscale_numbers]
    kept = [each.clone() for each in others]
    for _ in range(15):
        target.move_head(particles, lambda *shape: normal(generator, *shape), lambda e: sampler._slice(state, e, 1.0))
    for found, known in zip(others, kept, strict=True):
        torch.testing.assert_close(found, known, rtol=0, atol=0)
    for found, known in zip((particles.outputs, particles.level), target.evaluate(v, shared), strict=True):
        torch.testing.assert_close(found, known)
    spread = torch.hypot(error, particles.outputs.std(0) / math.sqrt(count))
    assert ((particles.outputs.mean(0) - expected).abs() / spread).max() < 4


CURVE = torch.linspace(-1.5, 1.5, 8, dtype=torch.float64)[:, None]


@pytest.mark.parametrize("activation", ["sin", "step"])
@pytest.mark.parametrize("likelihood", [Gaussian(0.3), Categorical(), "classes in float32"])
def test_draws_are_those_of_the_posterior(activation, likelihood):
    """One unit: means of what it says against a weighted sum over draws of the prior, within four standard errors of both."""
    generator = torch.Generator().manual_seed(3)
    values = torch.tensor([0.9, -0.8, 0.1, -0.6, 0.7, 1.2, 0.2, 1.0], dtype=torch.float64)
    dtype = torch.float32 if isinstance(likelihood, str) else torch.float64
    likelihood = Categorical() if isinstance(likelihood, str) else likelihood
    model = network(1, "rbf", activation, likelihood)
    regression = isinstance(likelihood, Gaussian)
    y = values[:, None] if regression else (values > 0.3).long()
    target = (SampledRegression if regression else SampledClassifier)(model, CURVE, y)
    v, shared = normal(generator, 200_000, 1, target.unit_numbers), normal(generator, 200_000, target.shared_numbers)
    outputs, level = target.evaluate(v, shared)
    if regression:
        factor, mean = target.posterior(target.features(outputs), target.noise(shared))
        f, spread = (outputs[:, 0] * mean).nan_to_num(), (outputs[:, 0] / factor[:, 0]).nan_to_num()
        said = torch.stack([f, f.square() + spread.square()])
    else:
        p = torch.sigmoid(outputs[:, 0])
        said = torch.stack([p, p.square()])
    share = torch.softmax(level, 0)
    expected = torch.einsum("s,ksn->kn", share, said)
    weighing = torch.einsum("s,ksn->kn", share.square(), (said - expected[:, None]).square()).sqrt()
    posterior = slice_sample(model.to(dtype), CURVE.to(dtype), y, Sampling(warmup=20, samples=400, chains=8, seed=1))
    drawn = posterior.outputs(CURVE.to(dtype)).double()
    drawn = (drawn[..., 0] if regression else torch.softmax(drawn, -1)[..., 1]).flatten(0, 1)
    diagnosis = posterior.diagnose(CURVE.to(dtype))
    assert diagnosis.r_hat < 1.02
    found = torch.stack([drawn, drawn.square()])
    error = found.std(1) / math.sqrt(diagnosis.ess)
    assert ((found.mean(1) - expected).abs() / (error + weighing)).max() < 4


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "activation"), [("rbf", "triangle"), (Matern(1.5), "sin"), ("exponential", "relu")])
def test_slices_and_nuts_agree(kernel, activation):
    """Class probabilities of one network by both samplers, within four Monte Carlo errors."""
    from bochner.posteriors.nuts import Nuts

    model = network(3, kernel, activation, Categorical(), dim=2)
    x = torch.randn(12, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = (x[:, 0] * x[:, 1] > 0).long()
    posteriors = (
        slice_sample(model, x, y, Sampling(warmup=100, samples=400, chains=8)),
        Nuts(model, x, y, Sampling(warmup=1000, samples=2000, chains=4)),
    )
    means, errors = [], []
    for posterior in posteriors:
        p = torch.softmax(posterior.outputs(3 * x[:4]), -1)[..., 1].numpy()
        assert posterior.diagnose(3 * x[:4]).r_hat < 1.02
        means.append(p.mean((0, 1)))
        errors.append(p.reshape(-1, 4).std(0) / np.sqrt(effective_sample_size(p)))
    assert (np.abs(means[0] - means[1]) / np.hypot(*errors)).max() < 4


def test_modes_that_lie_apart_get_their_shares():
    """A likelihood that is high for two signs of one weight: chains would stay in the one where they begin."""
    layer = StationaryLayer(
        1, 1, kernel="rbf", activation="erf", generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    model = Model(layer, 2, Categorical(), amplitude=9.0, generator=torch.Generator().manual_seed(0))
    x = torch.cat([torch.full((40, 1), -2.0), torch.full((40, 1), 2.0)]).double()
    posterior = slice_sample(model, x, (x[:, 0] > 0).long(), Sampling(warmup=10, samples=300, chains=6, seed=2))
    share = (posterior.samples["layer.weight"].flatten(1) > 0).double().mean(1)
    assert bool(
        ((share - 0.5).abs() < 0.15).all()
    )  # 300 particles: a standard error of 0.03, and more after resampling


def test_a_seed_gives_the_same_draws_and_other_networks_are_refused():
    short = Sampling(warmup=2, samples=3, chains=2)
    one, two = (slice_sample(network(output_bias=True), X, Y, short, sweeps=2).samples for _ in range(2))
    assert {n: tuple(v.shape) for n, v in one.items()} == {
        "layer.weight": (2, 3, 3, 1),
        "likelihood.log_noise": (2, 3),
        "layer.log_lengthscale": (2, 3),
        "layer.bias": (2, 3, 3),
        "output.weight": (2, 3, 1, 3),
        "output.bias": (2, 3, 1),
    }
    for name, value in one.items():
        torch.testing.assert_close(value, two[name], rtol=0, atol=0)
    layer = StationaryLayer(1, 4, activation="paired", dtype=torch.float64)
    with pytest.raises(ValueError, match="must be a network without an extractor, with one output for each unit"):
        slice_sample(Model(layer, 2, Categorical()), X, LABELS)
    with pytest.raises(ValueError, match=r"a whole number of degrees of freedom 2ν, got Matern\(nu=0\.7"):
        slice_sample(network(kernel=Matern(0.7)), X, Y)
    with pytest.raises(ValueError, match=r"must be in float64 for regression, got torch\.float32"):
        slice_sample(network().float(), X.float(), Y.float())
    several = StationaryLayer(2, 3, lengthscale=torch.ones(2, dtype=torch.float64), dtype=torch.float64)
    with pytest.raises(ValueError, match="one lengthscale that is learnt"):
        slice_sample(Model(several, 1, Gaussian()), X.repeat(1, 2), Y)
    fixed = network()
    fixed.layer.log_lengthscale.requires_grad_(False)
    with pytest.raises(ValueError, match="one lengthscale that is learnt"):
        slice_sample(fixed, X, Y)


@pytest.mark.gpu
@pytest.mark.parametrize("likelihood", [Gaussian(0.3), Categorical()])
def test_a_graph_draws_from_the_same_posterior(likelihood):
    """On a GPU sweeps are a recorded graph; means of the function agree with the processor's within their errors."""
    y = Y if isinstance(likelihood, Gaussian) else LABELS
    sampling = Sampling(warmup=30, samples=1000, chains=8)
    here = slice_sample(network(2, likelihood=likelihood), X, y, sampling).outputs(X).flatten(0, 1)
    model = network(2, likelihood=likelihood).to("cuda")
    there = slice_sample(model, X.cuda(), y.cuda(), sampling).outputs(X.cuda()).flatten(0, 1).cpu()
    error = torch.hypot(here.std(0), there.std(0)) / math.sqrt(len(here) / 4)
    assert bool(((here.mean(0) - there.mean(0)).abs() < 4 * error).all())
