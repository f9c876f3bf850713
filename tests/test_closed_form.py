"""The closed-form posterior against dense Gaussian algebra written out here."""

import math

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
import torch

from bochner import Gaussian, Model, StationaryLayer
from bochner.posteriors import closed_form, feature_rows
from bochner.posteriors.closed_form import ClosedForm, cholesky, dual_log_marginal, tune_marginal
from bochner.posteriors.closed_form_classifier import ClosedFormClassifier, Solver, average_classes
from problems import classification, data, regression


def dense(model, x, amplitude, outputs_bias):
    """Prior covariance of f at x, as a Gaussian process with the features' kernel."""
    phi = model.features(x).detach()
    kernel = amplitude**2 * phi @ phi.T / phi.shape[-1]
    return kernel + 1.0 if outputs_bias else kernel


@pytest.mark.parametrize("chunk", [7, 1000])
@pytest.mark.parametrize("output_bias", [False, True])
@pytest.mark.parametrize("outputs", [1, 2])
def test_prediction_is_the_gaussian_process_with_the_features_kernel(output_bias, outputs, chunk):
    model = regression(output_bias=output_bias, outputs=outputs, amplitude=1.7)
    x, y = data(outputs=outputs)
    x_new = torch.linspace(-4, 4, 11, dtype=torch.float64)[:, None].expand(-1, 3)
    posterior = ClosedForm(model, x, y, chunk=chunk)
    joint = dense(model, torch.cat([x, x_new]), 1.7, output_bias)
    k, ks, kss = joint[:25, :25] + 0.09 * torch.eye(25, dtype=torch.float64), joint[:25, 25:], joint[25:, 25:]
    mean = ks.T @ torch.linalg.solve(k, y)
    covariance = kss - ks.T @ torch.linalg.solve(k, ks)
    prediction = posterior.predict(x_new)
    torch.testing.assert_close(prediction.mean, mean, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(
        prediction.f_variance, covariance.diagonal()[:, None].expand(-1, outputs), rtol=1e-8, atol=1e-10
    )
    torch.testing.assert_close(posterior.covariance(x_new), covariance, rtol=1e-8, atol=1e-10)
    evidence = sum(
        scipy.stats.multivariate_normal(np.zeros(25), k.numpy()).logpdf(y[:, j].numpy()) for j in range(outputs)
    )
    assert posterior.log_marginal_likelihood == pytest.approx(evidence, rel=1e-9)


def test_function_samples_have_the_posterior_moments(generator):
    model = regression()
    x, y = data()
    posterior = ClosedForm(model, x, y)
    draws = posterior.sample(x[:4], 40_000, generator=generator)[..., 0]
    covariance = posterior.covariance(x[:4])
    error = (covariance.diagonal()[:, None] * covariance.diagonal() + covariance**2).sqrt() / math.sqrt(40_000)
    assert ((torch.cov(draws.T) - covariance).abs() / error).max() < 5
    assert (
        (draws.mean(0) - posterior.predict(x[:4]).mean[:, 0]).abs() / (covariance.diagonal() / 40_000).sqrt()
    ).max() < 5


def test_streamed_evidence_gradient_is_that_of_the_dense_evidence():
    """One step of tune_marginal with plain gradients: compare with autograd through the dense covariance."""
    x, y = data()
    model = regression(amplitude=1.3)

    def evidence(log_lengthscale, log_noise, log_amplitude):
        parameters = {"layer.log_lengthscale": log_lengthscale}
        phi = torch.func.functional_call(Features(model), {f"model.{k}": v for k, v in parameters.items()}, (x,))
        k = torch.exp(2 * log_amplitude) * phi @ phi.T / 12 + torch.exp(2 * log_noise) * torch.eye(
            25, dtype=torch.float64
        )
        return torch.distributions.MultivariateNormal(torch.zeros(25).double(), k).log_prob(y[:, 0])

    class Features(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.model = inner

        def forward(self, x):
            return self.model.features(x)

    start = tuple(torch.tensor(v, dtype=torch.float64) for v in (math.log(0.8), math.log(0.3), math.log(1.3)))
    expected = torch.func.grad(evidence, argnums=(0, 1, 2))(*start)
    captured = []
    original = torch.optim.Adam.step

    def spy(self, *args):
        captured.extend(p.grad.clone() for p in self.param_groups[0]["params"])
        return original(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.Adam, "step", spy)
        patch.setattr(closed_form, "CHUNK_ROWS", 6)
        history = tune_marginal(model, x, y, steps=1)
    assert history[0] == pytest.approx(evidence(*start).item(), rel=1e-9)
    torch.testing.assert_close([-g for g in captured], list(expected), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("output_bias", [False, True])
def test_the_dual_evidence_is_the_primal_one(output_bias, monkeypatch):
    monkeypatch.setattr(closed_form, "STRIP_COLUMNS", 7)  # 25 rows: four strips, the last one narrow
    model = regression(output_bias=output_bias, outputs=2, amplitude=1.7)
    x, y = data(outputs=2)
    dual, _ = dual_log_marginal(model, x, y)
    assert dual == pytest.approx(ClosedForm(model, x, y).log_marginal_likelihood, rel=1e-10)


def test_tuning_by_the_dual_form_takes_the_steps_of_the_primal_one(monkeypatch):
    monkeypatch.setattr(closed_form, "STRIP_COLUMNS", 7)
    x, y = data()
    ways = []
    for fewer in (True, False):
        model = regression(width=40)  # 25 rows
        if not fewer:
            monkeypatch.setattr(closed_form, "fewer_rows", lambda *_: False)
        history = tune_marginal(model, x, y, steps=5)
        ways.append([model.amplitude.item(), *history, *model.layer.lengthscale.detach().reshape(-1).tolist()])
    np.testing.assert_allclose(ways[0], ways[1], rtol=1e-8)


@pytest.mark.parametrize("fewer", [True, False])
def test_tuning_under_a_prior_reaches_the_mode_of_the_posterior(fewer, monkeypatch):
    """Where the log joint by the dense covariance has no slope in the logarithms of lengthscales, noise and amplitude."""
    monkeypatch.setattr(closed_form, "fewer_rows", lambda *_: fewer)
    x, y = data()
    options = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float64}
    layer = StationaryLayer(3, 30, kernel="rbf", activation="paired", lengthscale=torch.ones(3).double(), **options)
    model = Model(layer, 1, Gaussian(0.3)).double()

    def loss(logs):
        with torch.no_grad():
            layer.log_lengthscale.copy_(torch.from_numpy(logs[:3]).reshape(layer.log_lengthscale.shape))
        covariance = dense(model, x, np.exp(logs[4]), outputs_bias=False).numpy() + np.exp(2 * logs[3]) * np.eye(25)
        apart = logs[:3] - logs[:3].mean()
        squares = apart @ apart + (logs[3] - np.log(0.3)) ** 2 + logs[4] ** 2
        return 0.5 * squares / 0.5**2 - scipy.stats.multivariate_normal(np.zeros(25), covariance).logpdf(
            y[:, 0].numpy()
        )

    history = tune_marginal(model, x, y, steps=400, prior_std=0.5)
    assert not model.output.log_amplitude.requires_grad  # held again
    scales = [*layer.lengthscale.detach().flatten().tolist(), model.likelihood.noise.item(), model.amplitude.item()]
    found = np.log(scales)
    assert loss(found) == pytest.approx(-history[-1], abs=1e-6)
    assert np.abs(scipy.optimize.approx_fprime(found, loss)).max() < 1e-3
    assert np.abs(scipy.optimize.approx_fprime(found + 0.1, loss)).max() > 0.1
    with pytest.raises(ValueError, match="prior_std parameter must be positive and finite, got 0 instead"):
        tune_marginal(model, x, y, prior_std=0)


def test_rows_that_come_later_give_the_posterior_of_all():
    model = regression(outputs=2, amplitude=1.3)
    x, y = data(outputs=2)
    posterior = ClosedForm(model, x[:10], y[:10])
    posterior.update(x[10:], y[10:])
    whole = ClosedForm(model, x, y)
    torch.testing.assert_close(posterior.mean, whole.mean, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(posterior.factor, whole.factor, rtol=1e-10, atol=1e-12)
    assert posterior.log_marginal_likelihood == pytest.approx(whole.log_marginal_likelihood, rel=1e-12)
    back = ClosedForm.from_statistics(model, whole.statistics)
    assert torch.equal(back.mean, whole.mean)


def test_class_probabilities_are_the_integral_over_gaussian_outputs():
    """Two classes: only the difference of the outputs counts, and a quadrature rule integrates its sigmoid."""
    mean = torch.tensor([[0.3, -0.4], [2.0, 0.0]], dtype=torch.float64)
    root = torch.tensor([[1.5, 0.0], [0.7, 0.9]], dtype=torch.float64)
    covariance = (root @ root.T).expand(2, 2, 2)
    spread = math.sqrt(covariance[0, 0, 0] + covariance[0, 1, 1] - 2 * covariance[0, 0, 1])
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    found = average_classes(mean, covariance, samples=4096, seed=3).probabilities
    for row, m in zip(found, mean, strict=True):
        sigmoid = 1 / (1 + np.exp(-(float(m[0] - m[1]) + spread * nodes)))
        assert row[0].item() == pytest.approx(float(weights @ sigmoid / weights.sum()), abs=2e-4)
    # Equal means and variances: no class may be favoured, however few the draws.
    even = average_classes(torch.zeros(1, 5), 1e4 * torch.eye(5)[None], samples=10, seed=0).probabilities
    torch.testing.assert_close(even, torch.full((1, 5), 0.2, dtype=torch.float64), rtol=0, atol=1e-12)


def test_features_that_are_too_many_to_keep_are_computed_again(monkeypatch):
    model, (x, y) = classification(), data(classes=3)
    kept = ClosedFormClassifier(model, x, y, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(feature_rows, "MAX_KEPT_FEATURES", 0)
    streamed = ClosedFormClassifier(model, x, y, solver=Solver(chunk=7), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(kept.mean, streamed.mean, rtol=1e-6, atol=1e-8)
    with pytest.raises(ValueError, match=r"mean parameter must have a column for each of 4 classes, got \(12, 3\)"):
        ClosedFormClassifier.from_moments(model, kept.mean, kept.factor, classes=4, samples=5, seed=0)


@pytest.mark.parametrize("train_features", [False, True])
def test_tuning_raises_the_evidence(train_features):
    model = regression(noise=1.0)
    x, y = data(60)
    history = tune_marginal(model, x, y, steps=60, train_features=train_features)
    assert history[-1] > history[0] + 10
    assert ClosedForm(model, x, y).log_marginal_likelihood > history[0] + 10


def test_intervals_of_simulated_data_cover_at_their_nominal_rate():
    """Data drawn from the prior 1,000 times: coverage of new targets within two standard errors."""
    generator = torch.Generator().manual_seed(0)
    layer = StationaryLayer(1, 60, activation="paired", kernel="matern32", generator=generator, dtype=torch.float64)
    model = Model(layer, 1, Gaussian(0.2), generator=generator)
    x = torch.linspace(-3, 3, 31, dtype=torch.float64)[:, None]
    phi = model.features(x).detach()
    hits = {0.5: 0, 0.9: 0, 0.95: 0}
    for _ in range(1000):
        f = phi @ torch.randn(60, 1, generator=generator, dtype=torch.float64) / math.sqrt(60)
        y = f + 0.2 * torch.randn(31, 1, generator=generator, dtype=torch.float64)
        train = torch.randperm(31, generator=generator)[:15]
        test = int(torch.randint(31, (), generator=generator))
        prediction = ClosedForm(model, x[train], y[train]).predict(x[test : test + 1])
        new = f[test] + 0.2 * torch.randn(1, generator=generator, dtype=torch.float64)
        for level in hits:
            low, high = prediction.interval(level)
            hits[level] += int(low[0] <= new <= high[0])
    for level, count in hits.items():
        assert abs(count / 1000 - level) <= 2 * math.sqrt(level * (1 - level) / 1000)


def test_float32_on_the_cpu_survives_small_noise():
    """Products of float32 features are summed in float64: the evidence is that of the float64 network."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3000, 3, generator=generator)
    y = torch.sin(x[:, :1])
    evidences = []
    for dtype in (torch.float32, torch.float64):
        layer = StationaryLayer(
            3, 100, lengthscale=2.0, generator=torch.Generator().manual_seed(1), dtype=torch.float32
        ).to(dtype)
        evidences.append(ClosedForm(Model(layer, 1, Gaussian(0.02)), x.to(dtype), y.to(dtype)).log_marginal_likelihood)
    assert evidences[0] == pytest.approx(evidences[1], rel=1e-3)


def test_predictions_do_not_depend_on_batch_or_chance():
    extractor = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.5)).double()
    model = Model(StationaryLayer(3, 8, dtype=torch.float64), 1, Gaussian(), extractor=extractor)
    x, y = data()
    posterior = ClosedForm(model, x, y)
    model.train()
    torch.testing.assert_close(posterior.predict(x[:1]).mean, posterior.predict(x).mean[:1])
    assert extractor[0].running_mean.abs().max() == 0


def test_duplicated_features_are_no_obstacle():
    model = regression()
    with torch.no_grad():
        model.layer.weight[6:] = model.layer.weight[:6]
        model.layer.bias[6:] = model.layer.bias[:6]
    x, y = data()
    prediction = ClosedForm(model, x, y).predict(x)
    assert torch.isfinite(prediction.mean).all()
    assert (prediction.f_variance > 0).all()


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e6])
def test_outputs_that_move_together_leave_the_probabilities_what_they_are(size):
    """A singular covariance of any size: what is added to factorise it must not be of one size."""
    mean = torch.tensor([[0.3, -0.4, 0.1]], dtype=torch.float64)
    together = size * torch.ones(1, 3, 3, dtype=torch.float64)
    found = average_classes(mean, together, samples=300, seed=0).probabilities
    torch.testing.assert_close(found, torch.softmax(mean, 1), rtol=0, atol=1e-4)


def test_cholesky_climbs_the_jitter_ladder_and_gives_up_with_a_reason():
    singular = torch.ones(3, 3, dtype=torch.float64)
    with pytest.warns(UserWarning, match="not positive definite to rounding: 1e-12 of its mean diagonal was added"):
        factor = cholesky(singular)
    torch.testing.assert_close(factor @ factor.T, singular, rtol=0, atol=1e-5)
    with pytest.warns(UserWarning, match="1e-12 of its mean diagonal was added"):
        factors = cholesky(torch.stack([singular, 1e8 * singular]))  # jitter in proportion to each
    torch.testing.assert_close(factors[1], 1e4 * factors[0], rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match=r"not positive definite even after jitter of 1e-6"):
        cholesky(-torch.eye(3))


@pytest.mark.parametrize("full_limit", [4000, 0])
def test_classifier_mode_and_precision_are_those_of_the_log_joint(full_limit):
    model = classification(amplitude=1.5)
    x, y = data(40, classes=3)
    posterior = ClosedFormClassifier(model, x, y, solver=Solver(full_limit=full_limit, chunk=11))
    phi = model.features(x).detach()

    def loss(w):
        return (
            -torch.log_softmax(phi @ w.reshape(3, 12).T, -1).gather(1, y[:, None]).sum()
            + 0.5 * 12 / 1.5**2 * w.square().sum()
        )

    w = posterior.mean.T.reshape(-1)
    assert torch.func.grad(loss)(w).abs().max() < (1e-9 if full_limit else 1e-5)
    hessian = torch.func.hessian(loss)(w)
    if full_limit:
        torch.testing.assert_close(posterior.factor @ posterior.factor.T, hessian, rtol=1e-6, atol=1e-6)
    else:
        for j in range(3):
            block = hessian[12 * j : 12 * j + 12, 12 * j : 12 * j + 12]
            torch.testing.assert_close(posterior.factor[j] @ posterior.factor[j].T, block, rtol=1e-6, atol=1e-6)
    mean, covariance = posterior.logit_moments(x[:5])
    jacobian = torch.stack([torch.kron(torch.eye(3).double(), p[None]) for p in phi[:5]])
    inverse = torch.linalg.inv(hessian)
    if full_limit:
        torch.testing.assert_close(covariance, jacobian @ inverse @ jacobian.mT, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(mean, phi[:5] @ posterior.mean)
    prediction = posterior.predict(x)
    torch.testing.assert_close(prediction.probabilities.sum(-1), torch.ones(40).double())
    torch.testing.assert_close(posterior.predict(x).probabilities, prediction.probabilities, rtol=0, atol=0)


def test_far_from_the_data_predictions_return_to_the_prior():
    model = regression(width=500, activation="paired")
    x, y = data()
    far = 1e3 + torch.randn(20, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    prediction = ClosedForm(model, x, y).predict(far)
    assert prediction.f_variance.mean() > 0.9
    assert prediction.mean.abs().mean() < 0.3


def test_bad_data_is_refused_before_any_work():
    model, classifier = regression(), classification()
    x, y = data()
    with pytest.raises(ValueError, match=r"y parameter must be finite, got 1 NaN or infinite entries"):
        ClosedForm(model, x, torch.where(torch.arange(25)[:, None] == 3, math.nan, y))
    with pytest.raises(ValueError, match=r"x parameter must be float32 or float64.*got torch.float16"):
        ClosedForm(model, x.half(), y)
    with pytest.raises(ValueError, match="must have the same number of rows, at least 1, got 25 and 24"):
        ClosedForm(model, x, y[1:])
    with pytest.raises(
        ValueError, match=r"y parameter must hold floats of shape \(N, 1\), got torch.float64 of shape \(25,\) instead"
    ):
        ClosedForm(model, x, y[:, 0])
    with pytest.raises(ValueError, match="at least two classes, got only class 1"):
        ClosedFormClassifier(classifier, x, torch.ones(25, dtype=torch.long))
    with pytest.raises(ValueError, match="labels from 0 to 2, got 0 to 3 instead"):
        ClosedFormClassifier(classifier, x, torch.arange(25) % 4)
    with pytest.raises(ValueError, match="ClosedForm needs a Gaussian likelihood"):
        ClosedForm(classifier, x, y)
    with pytest.raises(ValueError, match="ClosedFormClassifier needs a Categorical likelihood"):
        ClosedFormClassifier(model, x, y)
    with pytest.raises(ValueError, match=r"x parameter must be a tensor, got ndarray instead; torch\.as_tensor"):
        ClosedForm(model, x.numpy(), y)
    with pytest.raises(ValueError, match="must be a bochner Model, got Linear instead; swap_head makes a Model"):
        ClosedForm(torch.nn.Linear(2, 1), x, y)
    with pytest.raises(ValueError, match="x parameter must be on the model's device, cpu, got meta instead"):
        ClosedForm(model, x.to("meta"), y)


def test_a_batch_of_one_row():
    prediction = ClosedForm(regression(), *data(1)).predict(data(1)[0])
    assert prediction.mean.shape == (1, 1)


def test_held_out_rows_choose_amplitude_and_noise():
    """No pair on a grid makes them more probable; other rows gain too, and the model keeps what was chosen."""
    x, y = data(60)
    held, others = data(50, seed=1), data(200, seed=2)
    model = regression(noise=0.02)
    posterior = ClosedForm(model, x, y)

    def log_probability(rows, posterior):
        return float(posterior.predict(rows[0]).log_prob(rows[1]).mean())

    before = log_probability(others, posterior)
    amplitude, noise = posterior.tune_prior(*held)
    assert (amplitude, noise) == (model.amplitude.item(), model.likelihood.noise.item())
    best = log_probability(held, posterior)
    assert best == pytest.approx(log_probability(held, ClosedForm(model, x, y)), abs=1e-9)
    assert log_probability(others, posterior) > before
    for a in (0.25, 0.7, 0.95, 1.05, 1.4, 4.0):
        for s in (0.25, 0.7, 0.95, 1.05, 1.4, 4.0):
            with torch.no_grad():
                model.output.log_amplitude.fill_(math.log(a * amplitude))
                model.likelihood.log_noise.fill_(math.log(s * noise))
            assert log_probability(held, ClosedForm(model, x, y)) <= best + 1e-5
    with pytest.raises(ValueError, match="y parameter"):
        posterior.tune_prior(x, y[:5])
