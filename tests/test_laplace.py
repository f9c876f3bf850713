"""Laplace posteriors: against dense matrices, against curvlinops, against the closed form, and stacked against single."""

import copy
import dataclasses
import math
import re
from concurrent.futures import ThreadPoolExecutor

import curvlinops
import numpy as np
import pytest
import torch
from torch import nn

from bochner import Categorical, Gaussian, Model, Recipe, StationaryLayer, Swag, fit_map
from bochner.posteriors.closed_form import ClosedForm
from bochner.posteriors.laplace import Laplace, taps
from bochner.posteriors.swag import Snapshots
from problems import classification, data, regression

STRUCTURES = ["kfac", "diagonal", "full"]


def convolutional(seed=0, *, likelihood):
    torch.manual_seed(seed)
    extractor = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 2, stride=2), nn.Flatten(), nn.Linear(8, 4)
    ).double()
    generator = torch.Generator().manual_seed(seed)
    layer = StationaryLayer(4, 6, generator=generator, dtype=torch.float64)
    return Model(layer, 3 if likelihood is Categorical else 1, likelihood(), extractor=extractor, generator=generator)


def weight_names(laplace):
    return [n for tap in laplace.layers for n in tap.parameters(tap.weights(laplace.parameters))]


def dense_jacobian(laplace, x):
    """d f / d weights of the covered layers, (n, c, P), by autograd; the model layer's bias is the linked one."""
    flat = [tap.weights(laplace.parameters)[0] for tap in laplace.layers]

    def f(weights):
        parameters = {k: v[0] for k, v in laplace.parameters.items()}
        for tap, w in zip(laplace.layers, weights, strict=True):
            parameters |= tap.parameters(w)
        return torch.func.functional_call(laplace.model, parameters, (x,))

    jacobians = torch.func.jacrev(f)(flat)
    return torch.cat([j.flatten(2) for j in jacobians], -1)


def prior_diagonal(laplace):
    """The prior's precision, written out: extractor τ, output K and 1, model layer by its curvature, phases 3/π²."""
    model, parts = laplace.model, []
    nu = getattr(model.layer.spectrum, "nu", None)
    layer = 1.0 if nu is None else (nu + model.layer.in_features / 2) / nu
    for tap in laplace.layers:
        weights = tap.weights(laplace.parameters)[0]
        weight, bias = {"layer": (layer, 3 / math.pi**2), "output": (model.layer.out_features, 1.0)}.get(
            tap.name, (1.0, 1.0)
        )
        column = torch.full((weights.shape[1],), float(weight), dtype=torch.float64)
        if tap.has_bias:
            column[-1] = bias
        parts.append(column.repeat(len(weights)))
    return torch.cat(parts)


def hessian_of_likelihood(model, f):
    if isinstance(model.likelihood, Gaussian):
        return torch.eye(f.shape[-1]).double().expand(len(f), -1, -1) / model.likelihood.noise.detach() ** 2
    p = torch.softmax(f, -1)
    return torch.diag_embed(p) - p[:, :, None] * p[:, None, :]


MODELS = {
    "mlp-regression": lambda: (regression(hidden=(5, 4), width=6, output_bias=True), data(20)),
    "mlp-classes": lambda: (classification(hidden=(5, 4), width=6), data(20, classes=3)),
    "triangle": lambda: (regression(hidden=(5, 4), width=6, activation="triangle"), data(20)),
    "conv-classes": lambda: (
        convolutional(likelihood=Categorical),
        (torch.randn(12, 1, 4, 4, generator=torch.Generator().manual_seed(1)).double(), torch.arange(12) % 3),
    ),
    "conv-regression": lambda: (
        convolutional(likelihood=Gaussian),
        (torch.randn(12, 1, 4, 4, generator=torch.Generator().manual_seed(1)).double(), torch.randn(12, 1).double()),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_full_and_diagonal_are_the_gauss_newton_matrix(name):
    model, (x, y) = MODELS[name]()
    full = Laplace(model, x, y, structure="full", chunk=7)
    j = dense_jacobian(full, x)
    f = model(x).detach()
    ggn = torch.einsum("ncp,ncd,ndq->pq", j, hessian_of_likelihood(model, f), j)
    precision = ggn + torch.diag(prior_diagonal(full))
    ((factor,),) = full.state
    torch.testing.assert_close(factor[0] @ factor[0].T, precision, rtol=1e-9, atol=1e-9)
    _, covariance = full.output_moments(x, chunk=5)
    torch.testing.assert_close(covariance[0], j @ torch.linalg.inv(precision) @ j.mT, rtol=1e-7, atol=1e-10)
    diagonal = Laplace(model, x, y, structure="diagonal", chunk=7)
    variances = torch.cat([v[0].flatten() for (v,) in diagonal.state])
    torch.testing.assert_close(variances, 1 / precision.diagonal(), rtol=1e-9, atol=1e-12)
    _, covariance = diagonal.output_moments(x)
    torch.testing.assert_close(covariance[0], (j * variances) @ j.mT, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_kfac_prediction_is_that_of_the_dense_kronecker_product(name):
    model, (x, y) = MODELS[name]()
    laplace = Laplace(model, x, y, chunk=7)
    kron = torch.block_diag(*(torch.kron(b[0], a[0]) for a, b in laplace.curvature.factors))
    inverse = torch.linalg.inv(kron + torch.diag(prior_diagonal(laplace)))
    j = dense_jacobian(laplace, x)
    expected = j @ inverse @ j.mT
    _, covariance = laplace.output_moments(x, chunk=5)
    torch.testing.assert_close(covariance[0], expected, rtol=1e-7, atol=1e-10)


class Plain(nn.Module):
    """The same network with an ordinary linear model layer, which curvlinops understands."""

    def __init__(self, model):
        super().__init__()
        self.extractor, layer, self.output = model.extractor, model.layer, model.output
        self.linear = nn.Linear(layer.in_features, layer.out_features).double()
        with torch.no_grad():
            self.linear.weight.copy_(layer.weight)
            self.linear.bias.copy_(layer.linked_bias)
        self.lengthscale, self.activation = layer.lengthscale.detach(), layer.activation

    def forward(self, x):
        return self.output(self.activation(self.linear(self.extractor(x) / self.lengthscale)))


@pytest.mark.parametrize("name", ["mlp-regression", "mlp-classes", "conv-regression", "conv-classes"])
def test_kfac_is_that_of_curvlinops(name):
    """Products A ⊗ B agree with curvlinops' KFAC (type-2 Fisher, expand) for every layer."""
    model, (x, y) = MODELS[name]()
    plain = Plain(model)
    regression_ = isinstance(model.likelihood, Gaussian)
    loss = nn.MSELoss(reduction="sum") if regression_ else nn.CrossEntropyLoss(reduction="sum")
    # MSE summed has Hessian 2 in f; a Gaussian of noise s has 1/s².
    scale = 0.5 / model.likelihood.noise.item() ** 2 if regression_ else 1.0
    params = {n: p for n, p in plain.named_parameters() if p.requires_grad}
    operator = curvlinops.KFACLinearOperator(
        plain,
        loss,
        list(params.values()),
        [(x, y)],
        fisher_type="type-2",
        kfac_approx="expand",
        check_deterministic=False,
    )
    dense = operator @ torch.eye(operator.shape[1]).double()
    laplace = Laplace(model, x, y, chunk=100)
    names = list(params)
    offsets, start = {}, 0
    for n, p in params.items():
        offsets[n] = slice(start, start + p.numel())
        start += p.numel()
    assert start == len(dense)
    assert len(names) == len(weight_names(laplace))
    for tap, (a, b) in zip(laplace.layers, laplace.curvature.factors, strict=True):
        name_ = "linear" if tap.name == "layer" else tap.name
        block = dense[offsets[f"{name_}.weight"], offsets[f"{name_}.weight"]] * scale
        fan_in = a.shape[-1] - tap.has_bias
        ours = torch.kron(b[0], a[0][:fan_in, :fan_in])
        torch.testing.assert_close(ours, block, rtol=1e-6, atol=1e-9)
        if tap.has_bias:
            bias = dense[offsets[f"{name_}.bias"], offsets[f"{name_}.bias"]] * scale
            torch.testing.assert_close(b[0] * a[0][-1, -1], bias, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("output_bias", [False, True])
def test_last_layer_laplace_is_the_closed_form(output_bias):
    """A linear-Gaussian problem: closed form and full Laplace on the output layer agree to 1e-8."""
    model = regression(width=15, output_bias=output_bias)
    x, y = data(30)
    x_new = torch.linspace(-3, 3, 9, dtype=torch.float64)[:, None].expand(-1, 3)
    closed = ClosedForm(model, x, y)
    with torch.no_grad():
        model.output.weight.copy_(closed.mean[:15].T)  # the MAP estimate
        if output_bias:
            model.output.bias.copy_(closed.mean[15])
    prediction, expected = Laplace(model, x, y, structure="last_layer").predict(x_new), closed.predict(x_new)
    torch.testing.assert_close(prediction.mean, expected.mean, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(prediction.f_variance, expected.f_variance, rtol=1e-8, atol=1e-12)


def test_kfac_is_exact_for_one_linear_layer_with_gaussian_noise():
    """A ⊗ B is the Gauss–Newton matrix itself there: KFAC over the output layer alone predicts what the closed form does."""
    model = regression(width=15, output_bias=True)
    x, y = data(30)
    closed = ClosedForm(model, x, y)
    with torch.no_grad():
        model.output.weight.copy_(closed.mean[:15].T)
        model.output.bias.copy_(closed.mean[15])
    laplace = Laplace(model, x, y)
    index = [tap.name for tap in laplace.layers].index("output")
    only = Laplace(model, x, y, structure="last_layer")
    only.curvature, only.state = laplace.curvature, [laplace.state[index]]
    x_new = data(9, seed=4)[0]
    torch.testing.assert_close(only.predict(x_new).mean, closed.predict(x_new).mean, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(only.predict(x_new).f_variance, closed.predict(x_new).f_variance, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("own_data", [False, True])
@pytest.mark.parametrize("kind", ["regression", "classes"])
def test_a_stack_equals_single_fits(structure, own_data, kind):
    make = (
        (lambda s: regression(s, hidden=(5, 4), width=6))
        if kind == "regression"
        else (lambda s: classification(s, hidden=(5, 4), width=6))
    )
    models = [make(seed) for seed in range(3)]
    sets = [data(20, classes=None if kind == "regression" else 3, seed=s if own_data else 1) for s in range(3)]
    x = torch.stack([s[0] for s in sets]) if own_data else sets[0][0]
    y = torch.stack([s[1] for s in sets]) if own_data else sets[0][1]
    x_new = data(6, seed=9)[0]
    mean, covariance = Laplace(models, x, y, structure=structure, chunk=8).output_moments(x_new)
    for i, model in enumerate(models):
        alone = Laplace(model, *sets[i], structure=structure, chunk=8).output_moments(x_new)
        torch.testing.assert_close(mean[i], alone[0][0], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(covariance[i], alone[1][0], rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_samples_have_the_posterior_covariance(structure, generator):
    """Weights drawn 20,000 times, pushed through the Jacobian: the linearised variance, within five standard errors."""
    model = regression(hidden=(4, 3), width=5)
    x, y = data(20)
    laplace = Laplace(model, x, y, structure=structure)
    deviations = torch.cat([d[:, 0].flatten(1) for d in laplace.curvature.sample(laplace.state, 20_000, generator)], -1)
    j = dense_jacobian(laplace, x[:3])[:, 0]
    draws = deviations @ j.T
    expected = laplace.output_moments(x[:3])[1][0, :, 0, 0]
    assert ((draws.var(0) / expected - 1).abs() / (2 / 20_000) ** 0.5).max() < 5


def test_sampled_and_linearised_predictions_agree_where_the_network_is_linear(generator):
    """The output layer alone: f is linear in its weights, so that only Monte Carlo error separates the two."""
    laplace = Laplace(regression(width=15), *data(30), structure="last_layer")
    x = data(8, seed=5)[0]
    sampled, linear = laplace.predict_samples(x, 20_000, group=5000, generator=generator), laplace.predict(x)
    assert ((sampled.mean - linear.mean).abs() / (linear.f_variance / 20_000).sqrt()).max() < 5
    assert ((sampled.f_variance / linear.f_variance - 1).abs() / (2 / 20_000) ** 0.5).max() < 5


def test_pi_damping_factors_the_prior():
    """In units of the prior's standard deviations: (B + 1/π) ⊗ (A + π), with π² the ratio of mean eigenvalues."""
    model = regression(hidden=(5, 4), width=6)
    laplace = Laplace(model, *data(20), structure="kfac_pi")
    sizes = [t.weights(laplace.parameters)[0].numel() for t in laplace.layers]
    for (a, b), (u_b, u_a, v), tau in zip(
        laplace.curvature.factors, laplace.state, prior_diagonal(laplace).split(sizes), strict=True
    ):
        unit = tau[: a.shape[-1]].rsqrt()
        a, b = unit[:, None] * a[0] * unit, b[0]
        pi = ((a.trace() / len(a)) / (b.trace() / len(b))).sqrt()
        left, right = b + torch.eye(len(b)).double() / pi, a + pi * torch.eye(len(a)).double()
        basis = torch.kron(u_b[0], u_a[0])
        covariance = basis @ torch.diag(v[0].flatten()) @ basis.T
        scale = torch.kron(torch.ones(len(b)).double(), unit)
        torch.testing.assert_close(
            covariance, scale[:, None] * torch.linalg.inv(torch.kron(left, right)) * scale, rtol=1e-8, atol=1e-10
        )


def test_classification_predictions_are_probabilities(generator):
    model = classification(hidden=(5, 4), width=6)
    x, y = data(30, classes=3)
    laplace = Laplace(model, x, y)
    for prediction in (laplace.predict(x, generator=generator), laplace.predict_samples(x, 20, generator=generator)):
        torch.testing.assert_close(prediction.probabilities.sum(-1), torch.ones(30).double())
        assert (prediction.mutual_information >= 0).all()


def test_lengthscale_and_noise_stay_outside_the_curvature():
    names = weight_names(Laplace(regression(hidden=(5, 4), width=6), *data(20)))
    assert not any("lengthscale" in n or "noise" in n for n in names)


def test_circular_biases_survive_the_round_trip():
    model = regression(width=8)
    tap = next(t for t in Laplace(model, *data(20)).layers if t.name == "layer")
    weights = tap.weights({k: v[None] for k, v in model.state_dict().items()})
    weights[..., -1] += 6 * torch.pi
    parameters = tap.parameters(weights)
    torch.testing.assert_close(parameters["layer.bias"][0], model.layer.bias.detach(), rtol=1e-9, atol=1e-9)


def test_bad_arguments():
    model = regression(hidden=(5, 4), width=6)
    x, y = data(20)
    with pytest.raises(
        ValueError, match=r"structure parameter must be one of kfac, .*got 'kfax' instead\. Did you mean 'kfac'\?"
    ):
        Laplace(model, x, y, structure="kfax")
    with pytest.raises(ValueError, match="x parameter must be finite, got 3 NaN"):
        Laplace(model, x.clone().index_fill(0, torch.tensor([0]), float("nan")), y)
    for mode in ("circular", "reflect"):
        extractor = nn.Sequential(nn.Conv2d(1, 1, 3, padding=1, padding_mode=mode), nn.Flatten())
        with pytest.raises(ValueError, match="zero padding to be covered"):
            Laplace(
                Model(StationaryLayer(16, 4), 2, Categorical(), extractor=extractor),
                torch.zeros(4, 1, 4, 4),
                torch.arange(4) % 2,
            )
    shared = nn.Linear(3, 3).double()
    twice = Model(StationaryLayer(3, 4, dtype=torch.float64), 1, Gaussian(), extractor=nn.Sequential(shared, shared))
    with pytest.raises(ValueError, match=r"layer extractor.0 is used more than once"):
        Laplace(twice, x, y)
    with pytest.raises(ValueError, match=r"networks of a stack must have the same structure.*number 1 differs"):
        Laplace([regression(), regression(activation="triangle")], x, y)
    wide = regression(hidden=(200, 100), width=6)
    with pytest.raises(ValueError, match="full posterior covers at most 20000 weights, got"):
        Laplace(wide, x, y, structure="full")
    grouped = Model(
        StationaryLayer(8, 4), 2, Categorical(), extractor=nn.Sequential(nn.Conv2d(2, 2, 1, groups=2), nn.Flatten())
    )
    with pytest.raises(ValueError, match=r"layer extractor.0 must have groups=1 and numeric zero padding"):
        Laplace(grouped, torch.zeros(4, 2, 2, 2), torch.arange(4) % 2)


class Tokens(nn.Module):
    """Rows as sequences of three numbers: a convolution, a recurrent layer, or a table of vectors."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        if isinstance(self.layer, nn.Embedding):
            return self.layer(x.sign().long() + 1).mean(1)
        if isinstance(self.layer, nn.Conv1d):
            return self.layer(x[:, None]).mean(-1)
        return self.layer(x[..., None])[0][:, -1]


LEFT_OUT = [nn.Conv1d(1, 4, 2), nn.GRU(1, 4, batch_first=True), nn.LSTM(1, 4, batch_first=True), nn.Embedding(3, 4)]


@pytest.mark.parametrize("layer", LEFT_OUT, ids=lambda layer: type(layer).__name__)
def test_layers_whose_weights_are_left_out_are_named(layer):
    """No posterior over weights that nobody asked about: a warning, until they are frozen or the last layer is meant alone."""
    extractor = nn.Sequential(Tokens(copy.deepcopy(layer)), nn.LayerNorm(4)).double()
    model = Model(StationaryLayer(4, 6, dtype=torch.float64), 1, Gaussian(), extractor=extractor)
    x, y = data(10)
    name = f"extractor.0.layer ({type(layer).__name__})"
    with pytest.warns(UserWarning, match=f"the weights of {re.escape(name)} stay as they are"):
        posterior = Laplace(model, x, y)
    assert [tap.name for tap in posterior.layers] == ["layer", "output"]
    Laplace(model, x, y, structure="last_layer")
    extractor[0].requires_grad_(False)
    torch.testing.assert_close(Laplace(model, x, y).predict(x).f_variance, posterior.predict(x).f_variance)


# ------------------------------------------------------------------ the prior's precision


@pytest.mark.parametrize("structure", [*STRUCTURES, "last_layer"])
def test_a_multiplied_prior_is_that_of_a_model_with_that_prior(structure, monkeypatch):
    """The same posterior, made again from layers whose precisions are multiplied before anything is computed."""
    model, (x, y), new = classification(hidden=(5, 4), width=6), data(25, classes=3), data(9, seed=2)[0]
    posterior = Laplace(model, x, y, structure=structure)
    posterior.set_prior(37.0)

    def multiplied(*values):
        name, module, precision, bias_precision = values
        return taps.Tap(name, module, 37 * precision, 37 * bias_precision)

    monkeypatch.setattr("bochner.posteriors.laplace.posterior.Tap", multiplied)
    monkeypatch.setattr(
        "bochner.posteriors.laplace.posterior.taps",
        lambda model, **_: [multiplied(*(getattr(t, f.name) for f in dataclasses.fields(t))) for t in taps.taps(model)],
    )
    again = Laplace(model, x, y, structure=structure)
    for found, expected in zip(posterior.output_moments(new), again.output_moments(new), strict=True):
        torch.testing.assert_close(found, expected)


def test_the_prior_is_chosen_by_held_out_rows():
    """The smallest multiplier within a standard error of the best, by the noise-free likelihood of a regression."""
    model, (x, y), (new, truth) = regression(width=6), data(25), data(30, seed=2)
    posterior = Laplace(model, x, y)
    tried = (0.1, 10.0, 1000.0)
    chosen = posterior.tune_prior(new, truth, multipliers=tried)
    assert posterior.temperature == 1.0
    logs = []
    for multiplier in tried:
        posterior.set_prior(multiplier)
        logs.append(posterior.predict(new).log_prob(truth).numpy())
    best = logs[int(np.argmax([log.mean() for log in logs]))]
    fair = [m for m, log in zip(tried, logs, strict=True) if (best - log).mean() <= (best - log).std() / 30**0.5]
    assert chosen == [fair[0]] * 2
    with pytest.raises(ValueError, match=r"multipliers parameter must be positive and finite, got 0\.0"):
        posterior.set_prior(0.0)
    with pytest.raises(ValueError, match="needs at least two held-out rows, got 1"):
        posterior.tune_prior(new[:1], truth[:1])
    with pytest.raises(ValueError, match="under structure='kfac', but not under 'kfac_pi'"):
        Laplace(model, x, y, structure="kfac_pi").set_prior(2.0)


def test_the_temperature_is_that_under_which_held_out_rows_are_most_probable():
    """Against a fine grid from 1 on, for a network that is too sure and for one that is not."""
    (x, y), held = data(60, classes=3), data(200, classes=3, seed=2)
    found = []
    for factor in (1.0, 0.1):
        model = classification(width=30)
        fit_map(model, x, y, Recipe(60, 20, lr=0.02))
        with torch.no_grad():
            model.output.weight *= factor
        posterior = Laplace(model, x, y, structure="last_layer")
        posterior.tune_prior(*held, multipliers=(1e8,))  # as narrow as can be: the network itself
        with torch.no_grad():
            outputs = model(held[0])
        grid = np.exp(np.linspace(0, 2, 201))
        spread = 0.5 * (np.log(grid) / 0.5) ** 2 / 200
        losses = [torch.nn.functional.cross_entropy(outputs / t, held[1]).item() for t in grid] + spread
        assert posterior.temperature == pytest.approx(grid[np.argmin(losses)], rel=0.02)
        own = posterior.predict(held[0]).log_prob(held[1]).mean().item()
        assert own == pytest.approx(-(losses - spread)[np.argmin(losses)], abs=1e-3)
        found.append(posterior.temperature)
    assert found[0] > 1.2
    assert found[1] == 1.0


@pytest.mark.parametrize("structure", ["last_layer", "full", "kfac", "diagonal"])
def test_the_marginal_likelihood_is_that_of_the_closed_form_where_it_is_exact(structure):
    """One linear layer, Gaussian noise: the evidence of Bayesian linear regression, under any multiplier."""
    model = regression(width=1 if structure == "diagonal" else 6, amplitude=1.4)
    model.layer.requires_grad_(False)
    x, y = data(25)
    with torch.no_grad():  # the mode
        model.output.weight.copy_((ClosedForm(model, x, y).mean / 1.4).mT)
    posterior = _output_alone(model, x, y, structure)
    for multiplier in (1.0, 3.0):
        posterior.set_prior(multiplier)
        with torch.no_grad():
            model.output.log_amplitude.fill_(math.log(1.4 / multiplier**0.5))
        closed = ClosedForm(model, x, y)
        with torch.no_grad():
            model.output.log_amplitude.fill_(math.log(1.4))
        # Away from the mode Laplace's evidence has a slope; correct for it by the quadratic that is exact here.
        weights = closed.mean / 1.4 - model.output.weight.detach().mT
        precision = 1.4**2 * closed.factor @ closed.factor.mT
        correction = 0.5 * float(weights.mT @ precision @ weights)
        expected = closed.log_marginal_likelihood - correction
        assert float(posterior.log_marginal_likelihood) == pytest.approx(expected, rel=1e-9)


def _output_alone(model, x, y, structure):
    """The posterior of the output layer alone, whatever its structure."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "bochner.posteriors.laplace.posterior.taps",
            lambda model, **_: [tap for tap in taps.taps(model) if tap.module is model.output],
        )
        return Laplace(model, x, y, structure=structure)


def test_without_rows_the_marginal_likelihood_chooses_and_the_model_layer_stays():
    model, (x, y) = regression(hidden=(5, 4), width=8), data(40)
    fit_map(model, x, y, Recipe(80, 20, lr=0.01))
    posterior = Laplace(model, x, y, prior="fan_in")
    before = float(posterior.log_marginal_likelihood)
    tried = (0.01, 0.1, 1.0, 10.0, 100.0)
    shared = posterior.tune_prior(multipliers=tried)
    assert shared[2] == 1.0  # the model layer
    assert len({shared[0], shared[1], shared[3]}) == 1
    best = float(posterior.log_marginal_likelihood)
    for multiplier in tried:
        posterior.set_prior([multiplier, multiplier, 1.0, multiplier])
        assert float(posterior.log_marginal_likelihood) <= best
    apart = posterior.tune_prior(per_layer=True, multipliers=tried)
    assert apart[2] == 1.0
    assert float(posterior.log_marginal_likelihood) >= best >= before


def test_the_prior_may_grow_with_the_number_of_inputs():
    model, (x, y) = regression(hidden=(5, 4), width=8), data(20)
    trained, fan_in = Laplace(model, x, y), Laplace(model, x, y, prior="fan_in")
    assert [tap.precision for tap in trained.layers] == pytest.approx([1, 1, trained.layers[2].precision, 8])
    assert [tap.precision for tap in fan_in.layers] == pytest.approx([3, 5, trained.layers[2].precision, 8])
    assert [tap.bias_precision for tap in fan_in.layers[:2]] == [1, 1]
    with pytest.raises(ValueError, match="prior parameter must be one of trained, fan_in, got 'wide' instead"):
        Laplace(model, x, y, prior="wide")


def test_held_out_rows_choose_a_multiplier_for_each_layer():
    model, (x, y), held = classification(hidden=(5, 4), width=8), data(40, classes=3), data(60, classes=3, seed=2)
    posterior = Laplace(model, x, y)
    tried = (0.1, 10.0, 1000.0)
    posterior.tune_prior(*held, multipliers=tried)
    shared = posterior.predict(held[0]).log_prob(held[1]).mean()
    chosen = posterior.tune_prior(*held, per_layer=True, multipliers=tried)
    assert len(chosen) == 4
    assert set(chosen) <= set(tried)
    assert posterior.predict(held[0]).log_prob(held[1]).mean() >= shared - 1e-3
    assert posterior.prior_multipliers == chosen


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's own, of weight norm under vmap
def test_a_layer_that_computes_its_weight_is_named(generator):
    extractor = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))).double()
    layer = StationaryLayer(4, 8, generator=generator, dtype=torch.float64)
    model = Model(layer, 1, Gaussian(), extractor=extractor)
    x, y = data(10)
    with pytest.raises(ValueError, match=r"layer extractor.0 computes its weight .*remove_parametrizations"):
        Laplace(model, x, y)
    assert Laplace(model, x, y, structure="last_layer").predict(x).mean.shape == (10, 1)


def test_a_row_is_answered_alike_alone_and_among_others():
    model, (x, y) = classification(width=6), data(25, classes=3)
    posterior = Laplace(model, x, y)
    together = posterior.predict(x).probabilities
    torch.testing.assert_close(torch.cat([posterior.predict(row[None]).probabilities for row in x]), together)
    torch.testing.assert_close(posterior.predict([x[:4], x[4:]]).probabilities, together)


def test_sampled_networks_are_divided_by_the_temperature_too():
    model, (x, y) = classification(width=6), data(25, classes=3)
    posterior = Laplace(model, x, y)
    posterior.temperature = 1e6
    for prediction in (posterior.predict(x), posterior.predict_samples(x, 5), posterior.predict_samples([x], 5)):
        torch.testing.assert_close(prediction.probabilities, torch.full((25, 3), 1 / 3).double(), rtol=0, atol=1e-4)


def test_whole_numbers_may_be_inputs():
    torch.manual_seed(0)
    extractor = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(12, 4)).double()
    model = Model(StationaryLayer(4, 6, dtype=torch.float64), 2, Categorical(), extractor=extractor)
    extractor[0].requires_grad_(False)  # Laplace leaves a table of vectors out, and warns unless it is frozen
    x, y = torch.randint(10, (20, 3)), torch.arange(20) % 2
    assert Laplace(model, x, y).predict(x).probabilities.shape == (20, 2)


@pytest.mark.parametrize("kind", ["samples", "swag", "beside the network"])
def test_threads_leave_the_network_and_each_other_alone(kind):
    model, (x, y) = classification(width=6), data(25, classes=3)
    posterior = Swag(model, x, y, Snapshots(lr=1e-3, epochs=3, rank=2)) if kind == "swag" else Laplace(model, x, y)
    before = {n: v.clone() for n, v in model.state_dict().items()}

    def ask(i):
        if kind == "beside the network" and i % 2:
            return model(x).detach()
        generator = torch.Generator().manual_seed(0)
        if kind == "samples":
            return posterior.predict_samples(x, 4, generator=generator).probabilities
        return posterior.predict(x, generator=generator).probabilities

    alone = [ask(0), ask(1)]
    with ThreadPoolExecutor(4) as pool:
        for i, found in enumerate(pool.map(ask, range(24))):
            torch.testing.assert_close(found, alone[i % 2], rtol=0, atol=0)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_threads_may_predict_together():
    model, (x, y) = regression(hidden=(5, 4), width=6), data(25)
    posterior = Laplace(model, x, y)
    inputs = [data(20, seed=seed)[0] for seed in range(24)]
    alone = [posterior.predict(new).f_variance for new in inputs]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda new: posterior.predict(new).f_variance, inputs))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_a_model_in_training_mode_is_taken_in_evaluation_mode():
    x, y = data(40)
    extractor = nn.Sequential(nn.Linear(x.shape[1], 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)).to(x)
    model = Model(StationaryLayer(3, 20, activation="paired", dtype=x.dtype), 1, Gaussian(0.3), extractor=extractor)
    trained = Laplace(model.train(), x, y).predict(x).variance
    assert not model.training
    torch.testing.assert_close(Laplace(model, x, y).predict(x).variance, trained)


def test_frozen_layers_are_known():
    """With all but the output layer frozen the posterior is that of a linear model; with all frozen there is none."""
    x, y = data(40)
    model = Model(StationaryLayer(x.shape[1], 20, activation="paired", dtype=x.dtype), 1, Gaussian(0.3))
    model.layer.requires_grad_(False)
    posterior = ClosedForm(model, x, y)
    with torch.no_grad():
        model.output.weight.copy_(posterior.mean.mT)
    found = Laplace(model, x, y, structure="full").predict(x)
    torch.testing.assert_close(found.f_variance, posterior.predict(x).f_variance)
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="must have a layer that is not frozen"):
        Laplace(model, x, y)
