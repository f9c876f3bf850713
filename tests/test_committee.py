"""Committees: weights, calibration and moments against formulas and optimisers of others, and the whole of it on data."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import softmax
from scipy.stats import chi, norm, uniform
from torch import nn

from bochner import Gaussian, Model, StationaryLayer, committee, estimator_base
from bochner.committee import (
    AMPLITUDES,
    FACTORS,
    NOISES,
    Member,
    agreed,
    describe,
    mixed,
    noise_factor,
    noise_scores,
    stacking_weights,
)
from bochner.estimators import StationaryClassifier, StationaryRegressor
from bochner.networks import mlp
from bochner.posteriors.closed_form import ClosedForm
from bochner.predictive import GaussianPredictive
from bochner.training import Fit, Recipe


def network(width=12, extractor=None):
    generator = torch.Generator().manual_seed(0)
    layer = StationaryLayer(2, width, kernel="rbf", activation="paired", generator=generator, dtype=torch.float64)
    return Model(layer, 1, Gaussian(0.3), extractor=extractor, generator=generator)


def rows(num, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2, 2, (num, 2))
    return x, np.sin(2 * x[:, 0]) * x[:, 1] + 0.1 * rng.normal(size=num)


def tensors(num, seed=0):
    x, y = rows(num, seed)
    return torch.from_numpy(x), torch.from_numpy(y)[:, None]


# ---------------------------------------------------------------------- training


@pytest.mark.parametrize(
    ("bad", "left"),
    [
        ("diverged once", [0, 1, 2]),
        ("diverged twice", []),
        ("scattered once", [0, 1, 2]),
        ("scattered twice", [0, 1, 2]),
    ],
)
def test_networks_that_go_astray_are_trained_again_at_a_third_of_the_rate(bad, left, monkeypatch):
    calls, said, rows = [], [], torch.arange(6).reshape(3, 2)

    def fit(models, x, y, recipe, *, seed, rows, progress):  # noqa: ARG001
        calls.append((recipe.lr, seed, rows.tolist(), [model.number for model in models]))
        now = [s == 8 and ("twice" in bad or len(calls) == 1) for s in seed]
        for model, own in zip(models, now, strict=True):
            model.extractor[0].weight.data.fill_(1000.0 if own and "scattered" in bad else 1.0)
        return Fit(torch.zeros(1, len(models)), torch.tensor([own and "diverged" in bad for own in now]))

    def make(number):
        model = network(extractor=mlp(2, (2,), dropout=0.0))
        model.number = number
        return model.float()

    monkeypatch.setattr(committee, "fit_map", fit)
    x, y = tensors(6)
    options = {"seeds": [7, 8, 9], "say": said.append, "progress": False}
    found = committee.train_together(make, x, y, rows, Recipe(5, 2, lr=0.3), **options)
    assert calls == [
        (0.3, [7, 8, 9], rows.tolist(), [0, 1, 2]),
        (pytest.approx(0.1), [8], [[2, 3]], [1]),
    ]
    assert [model.number for model in found] == left
    assert all(model.layer.weight.dtype == torch.float64 and not model.training for model in found)
    assert said[1] == "1 of them went astray"
    assert ("1 of them is still astray, and kept" in said) == (bad == "scattered twice")


def test_one_rate_is_for_all_networks():
    with pytest.raises(
        ValueError, match=r"recipe parameter must have one learning rate for all networks, got \(0.1, 0.2\)"
    ):
        committee.train_together(None, None, None, None, Recipe(lr=(0.1, 0.2)), seeds=[1, 2], say=print, progress=False)


@pytest.mark.parametrize(("spread", "expected"), [(0.8, False), (1.25, True)])
def test_rows_are_scattered_from_ten_lengthscales_on(spread, expected):
    model, x = network(extractor=mlp(2, (2,), dropout=0.0).double()), tensors(200)[0]
    model.extractor[0].weight.data.copy_(torch.diag(spread * committee.APART / x.std(0)))
    assert committee.scattered(model, x) == expected
    model.layer.log_lengthscale.data += np.log(2.0)
    assert not committee.scattered(model, x)


def test_a_scattered_network_can_say_nothing():
    """Its closed form does not get beyond the mean, where one that keeps rows together learns them."""
    (x, y), (new, truth) = tensors(300), tensors(200, seed=1)
    for factor, hopeless in ((1.0, False), (1000.0, True)):
        model = network(width=200, extractor=mlp(2, (2,), dropout=0.0).double())
        model.extractor[0].weight.data.copy_(factor * torch.eye(2))
        assert committee.scattered(model, x) == hopeless
        error = (ClosedForm(model, x, y).predict(new).mean - truth).square().mean() / truth.var()
        assert (float(error) > 0.9) == hopeless
    assert not committee.scattered(network(), 1000 * x)  # without hidden layers lengthscales are tuned


# ---------------------------------------------------------------------- weights


def test_weights_are_those_of_the_largest_posterior():
    densities = torch.from_numpy(np.random.default_rng(0).normal(0, 2, (3, 40)))
    prior = torch.tensor([2.0, 1.0, 0.5], dtype=torch.float64)

    def loss(free):
        weights = softmax([0, *free])
        mixture = np.log((weights[:, None] * np.exp(densities.numpy())).sum(0))
        return -mixture.sum() - (prior.numpy() * np.log(weights)).sum()

    best = softmax([0, *minimize(loss, [0, 0], tol=1e-12).x])
    np.testing.assert_allclose(stacking_weights(densities, prior).numpy(), best, rtol=1e-4)


def test_a_part_that_is_always_better_takes_all_but_one_row_each():
    densities = torch.tensor([[0.0] * 98, [-50.0] * 98], dtype=torch.float64)
    found = stacking_weights(densities, torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(found, torch.tensor([0.99, 0.01], dtype=torch.float64))


# ---------------------------------------------------------------------- noise and amplitude


def test_noise_is_judged_by_the_closed_form_under_each():
    model, (x, y), (new, truth) = network(), tensors(60), tensors(30, seed=1)
    scores, amplitudes = noise_scores(model, x, y, new, truth)
    for index in (8, 20, 30):
        model.likelihood.log_noise.data.fill_(np.log(NOISES[index]))
        posterior = ClosedForm(model, x, y, amplitude=float(amplitudes[index]))
        assert float(posterior.predict(new).log_prob(truth).mean()) == pytest.approx(float(scores[index]), rel=1e-6)
    fixed, ones = noise_scores(model, x, y, new, truth, amplitude=1.0)
    assert float(ClosedForm(model, x, y).predict(new).log_prob(truth).mean()) == pytest.approx(
        float(fixed[30]), rel=1e-8
    )
    assert (ones == 1).all()


def test_the_amplitude_is_the_one_of_the_largest_evidence():
    model, (x, y) = network(), tensors(60)
    _, amplitudes = noise_scores(model, x, y, x, y)
    model.likelihood.log_noise.data.fill_(np.log(NOISES[20]))

    def evidence(factor):
        return ClosedForm(model, x, y, amplitude=factor * float(amplitudes[20])).log_marginal_likelihood

    step = AMPLITUDES[1] / AMPLITUDES[0]
    assert evidence(1.0) > max(evidence(step), evidence(1 / step))


def test_the_second_moment_far_away_is_the_prior_variance():
    """At that amplitude, for features of random phases: E(φ·w)² = a², in mean and variance together."""
    model, (x, y) = network(width=40), tensors(400)
    _, amplitudes = noise_scores(model, x, y, x, y)
    best = next(
        i for i, a in enumerate(amplitudes.tolist()) if a < 10
    )  # of the smallest noise under which it does not explode
    model.likelihood.log_noise.data.fill_(np.log(NOISES[best]))
    posterior = ClosedForm(model, x, y, amplitude=float(amplitudes[best]))
    far = 1e4 * torch.randn(20_000, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = posterior.predict(far)
    moment = float((found.mean.square() + found.variance).mean())
    assert moment == pytest.approx(float(amplitudes[best]) ** 2, rel=0.1)  # amplitudes are nine hundredths apart
    assert float(found.variance.mean()) < 0.7 * moment  # the variance alone is less


def test_hopeless_noise_stays_finite():
    model, (x, y) = network(width=50), tensors(50)
    scores, amplitudes = noise_scores(model, x, y, x[:5], y[:5] + 100)
    assert torch.isfinite(scores).all()
    assert float(amplitudes.max()) <= max(AMPLITUDES)


# ---------------------------------------------------------------------- mixtures


def parts():
    generator = torch.Generator().manual_seed(0)
    draw = torch.rand(3, 2, 4, 1, generator=generator, dtype=torch.float64)
    noises = (0.1, 0.4, 0.2)
    return [
        GaussianPredictive(m, v, torch.tensor(s, dtype=torch.float64)) for (m, v), s in zip(draw, noises, strict=True)
    ]


def test_moments_are_those_of_draws_from_the_mixture():
    weights, found = (0.5, 0.3, 0.2), parts()
    mixture = mixed(list(zip(weights, found, strict=True)))
    rng = np.random.default_rng(0)
    chosen = rng.choice(3, size=400_000, p=weights)
    mean, std = (np.stack([getattr(p, name)[:, 0].numpy() for p in found])[chosen] for name in ("mean", "std"))
    drawn = rng.normal(mean, std)
    np.testing.assert_allclose(mixture.mean[:, 0].numpy(), drawn.mean(0), atol=0.006)
    np.testing.assert_allclose(mixture.std[:, 0].numpy(), drawn.std(0), rtol=0.006)


def test_a_mixture_of_one_is_itself():
    part = parts()[0]
    found = mixed([(1.0, part)])
    assert (found.mean == part.mean).all()
    assert (found.variance == part.variance).all()


def members_of(*weights, groups):
    return [Member(network(), None, weight, group) for weight, group in zip(weights, groups, strict=True)]


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_agreed_is_the_mean_over_whether_the_networks_know_something(classes):
    """Bayes' rule with scipy's densities of the distance from even probabilities."""
    p = np.random.default_rng(0).dirichlet(np.linspace(0.5, 2, classes), (7, 50))
    members = members_of(*[0.2] * 4, *[0.2 / 3] * 3, groups=(0, 0, 0, 0, 2, 2, 2))
    found = agreed(members, torch.from_numpy(p)).numpy()
    mean = 0.8 * p[:4].mean(0) + 0.2 * p[4:].mean(0)
    error = 0.8**2 * p[:4].var(0, ddof=1).sum(1) / 4 + 0.2**2 * p[4:].var(0, ddof=1).sum(1) / 3
    distance = np.linalg.norm(mean - 1 / classes, axis=1)
    spread = np.sqrt(error / (classes - 1))
    nothing = 10 * chi.pdf(np.maximum(distance, spread * np.sqrt(classes - 2)), classes - 1, scale=spread)
    corner = np.linalg.norm(np.eye(classes)[0] - 1 / classes)  # as far as it can be
    something = uniform.pdf(distance, scale=corner)
    share = np.maximum(something / (something + nothing), 0.01)
    assert 0.1 < share.mean() < 0.9
    np.testing.assert_allclose(found, 1 / classes + share[:, None] * (mean - 1 / classes), rtol=1e-10)


def test_networks_that_agree_are_taken_at_their_word_and_one_of_a_kind_too():
    p = torch.tensor([[0.7, 0.3]], dtype=torch.float64)
    pair = members_of(0.5, 0.5, groups=(0, 0))
    torch.testing.assert_close(agreed(pair, torch.stack([p, p])), p)
    torch.testing.assert_close(agreed(members_of(1.0, groups=(0,)), p[None]), p)
    apart = agreed(pair, torch.stack([p, 1.01 - p]))
    assert 0.5 < float(apart[0, 0]) < 0.501  # the order stays
    assert (agreed(pair, torch.full((2, 1, 2), 0.5, dtype=torch.float64)) == 0.5).all()
    # Two kinds may differ: how much each counts has been weighed.
    torch.testing.assert_close(agreed(members_of(0.01, 0.99, groups=(0, 1)), torch.stack([1 - p, p])), 0.98 * p + 0.01)
    torch.testing.assert_close(agreed(pair, torch.stack([p, p]).float()), p.float())
    tiny = torch.tensor([[1, 1e-18, 1e-30]], dtype=torch.float64)
    torch.testing.assert_close(agreed(pair, torch.stack([tiny, tiny])), tiny, atol=0, rtol=1e-12)


@pytest.mark.parametrize(("number", "most"), [(3, 0.3), (6, 0.12), (18, 0.05)])
def test_the_average_over_random_networks_is_closer_to_uniform(number, most):
    """Networks that say random things, as far from the data: the share of their distance that is left, by quadrature."""
    generator = torch.Generator().manual_seed(0)
    p = 0.5 + 0.1 * torch.randn(number, 40_000, 1, generator=generator, dtype=torch.float64)
    both = torch.cat([p, 1 - p], -1)
    found = agreed(members_of(*[1 / number] * number, groups=[0] * number), both)
    left = (found - 0.5).abs().mean() / (both.mean(0) - 0.5).abs().mean()
    spread = 0.1 / number**0.5  # of the average; the networks tell it but for a factor
    t, factor = np.meshgrid(np.linspace(0, 8, 801), np.linspace(1e-3, 5, 2001), indexing="ij")
    nothing = 10 * 2 * norm.pdf(t / factor) / (factor * spread)  # of |p̄ - ½|, which is at most ½
    share = np.maximum(2 / (2 + nothing), 0.01)
    weight = t * norm.pdf(t) * chi.pdf(factor, number - 1, scale=(number - 1) ** -0.5)
    expected = (share * weight).sum() / weight.sum()
    assert float(left) == pytest.approx(expected, rel=0.03)
    assert expected < most


@pytest.mark.parametrize("classes", [2, 3, 10, 100])
def test_more_disagreement_does_not_bring_trust_back(classes):
    """The same average, said by two networks that disagree more and more."""
    corner = torch.eye(classes, dtype=torch.float64)
    mean, way = 1 / classes + 0.2 * (corner[0] - 1 / classes), (corner[0] - corner[1]) / 2**0.5
    pair, away = members_of(0.5, 0.5, groups=(0, 0)), []
    for size in np.linspace(0.01, 0.7, 70):  # the root of the variance of their average
        found = agreed(pair, torch.stack([mean + size * way, mean - size * way])[:, None])
        away.append(float((found - 1 / classes).norm() / (mean - 1 / classes).norm()))
    assert away[0] == pytest.approx(1, rel=1e-6)
    assert min(away) < 0.05
    assert max(away[int(np.argmin(away)) :]) < 0.12  # under what is as wide as can be, little is known of either


def test_the_factor_finds_the_noise_and_is_careful():
    generator = torch.Generator().manual_seed(0)
    zeros = torch.zeros(5000, 1, dtype=torch.float64)
    part = GaussianPredictive(zeros, zeros, torch.tensor(1.0, dtype=torch.float64))
    y = 0.7 * torch.randn(5000, 1, generator=generator, dtype=torch.float64)
    assert noise_factor([[(1.0, part)]], [y]) == pytest.approx(
        0.725, abs=0.026
    )  # two units of log density are two hundredths here
    assert noise_factor([[(1.0, part)]], [3 * y]) == max(FACTORS)
    few = GaussianPredictive(zeros[:10], zeros[:10], part.noise)
    assert noise_factor([[(1.0, few)]], [y[:10]]) > 0.9


def test_a_committee_is_described():
    members = [Member(network(), None, 0.25), Member(network(extractor=mlp(2, (4, 2), dropout=0.0)), None, 0.75)]
    assert describe(members) == "1 wide (0.25), 1 with hidden layers (0.75)"


# ---------------------------------------------------------------------- in the estimators


@pytest.fixture(scope="module")
def quick():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimator_base, "EPOCHS", 60)
        yield {"width": 60, "hidden": (30, 4), "networks": 3, "random_state": 0}


@pytest.fixture(scope="module")
def fitted(quick):
    return StationaryRegressor(**quick).fit(*rows(400))


def test_networks_are_judged_by_rows_that_they_have_not_seen(quick, monkeypatch):
    seen, judged = [], []
    train, wide, deep = (getattr(StationaryRegressor, f"_{name}") for name in ("trained", "judged_wide", "judged_deep"))

    def trained(self, x, y, rows, *others, **options):
        seen.append([set(own) for own in rows.tolist()])
        return train(self, x, y, rows, *others, **options)

    def judge(self, group, x, y, rows, blocks):
        judged.append([set(block.tolist()) for block in blocks])
        return deep(self, group, x, y, rows, blocks)

    monkeypatch.setattr(StationaryRegressor, "_trained", trained)
    monkeypatch.setattr(StationaryRegressor, "_judged_deep", judge)
    known = []
    tune = StationaryRegressor._tuned

    def tuned(self, x, rows, *others):
        known.append({tuple(row) for row in x[rows[:1000]].tolist()})
        return tune(self, x, rows, *others)

    def judge_wide(self, group, x, y, order, blocks):
        seen_by_wide = known[-3:]  # one for each kernel
        for block in blocks:
            assert not any(own & {tuple(row) for row in x[block].tolist()} for own in seen_by_wide)
        return wide(self, group, x, y, order, blocks)

    monkeypatch.setattr(StationaryRegressor, "_tuned", tuned)
    monkeypatch.setattr(StationaryRegressor, "_judged_wide", judge_wide)
    StationaryRegressor(**quick).fit(*rows(401))
    assert len(known) == 6
    assert len(seen) == len(judged) == 3  # lengths of training
    for networks, blocks in zip(seen, judged, strict=True):
        assert [len(block) for block in blocks] == [20] * 3
        assert [len(own) for own in networks] == [361] * 3
        for i, block in enumerate(blocks):
            strangers = [j for j, own in enumerate(networks) if not own & block]
            assert strangers == sorted({i, (i + 1) % 3})


def test_a_committee_learns_and_knows_its_noise(fitted):
    new, truth = rows(300, seed=1)
    mean, std = fitted.predict(new, return_std=True)
    assert np.sqrt(np.mean((mean - truth) ** 2)) < 0.2
    assert 0.8 < np.mean(np.abs(mean - truth) < 1.645 * std) < 0.98
    assert sum(member.weight for member in fitted.members_) == pytest.approx(1)
    assert any(not isinstance(member.model.extractor, nn.Identity) for member in fitted.members_)
    far = 100 * np.array([[np.cos(t), np.sin(t)] for t in np.linspace(0, 6, 50)])
    ratio = fitted.predict(far, return_std=True)[1] / fitted.prior_std_
    assert ratio.mean() > 0.95


def test_samples_have_the_committees_moments(fitted):
    new, _ = rows(5, seed=2)
    mean, std = fitted.predict(new, return_std=True)
    drawn = fitted.sample_y(new, 4000, random_state=3)
    np.testing.assert_allclose(drawn.mean(1), mean, atol=5 * std.max() / np.sqrt(4000))
    np.testing.assert_allclose(drawn.std(1), std, rtol=0.1)
    assert (fitted.sample_y(new, 3, random_state=3) == fitted.sample_y(new, 3, random_state=3)).all()


def test_later_rows_reach_every_network(quick):
    x, y = rows(500)
    model = StationaryRegressor(**quick).fit(x[:400], y[:400])
    weights = [member.weight for member in model.members_]
    model.partial_fit(x[400:], y[400:])
    assert {member.posterior.statistics.count for member in model.members_} == {500}
    assert [member.weight for member in model.members_] == weights


@pytest.mark.parametrize("networks", [1, 2])
def test_few_networks_are_enough(quick, networks, monkeypatch):
    monkeypatch.setattr(StationaryRegressor, "_weights", lambda *_: torch.tensor([0.0, 0.9, 0.1, 0.0]))
    model = StationaryRegressor(**{**quick, "networks": networks}).fit(*rows(300))
    assert [member.group for member in model.members_] == [0, *[1] * networks, *[2] * networks]
    assert model.score(*rows(200, seed=1)) > 0.8


def test_classes_are_a_mixture_too(quick):
    x, y = rows(400)
    model = StationaryClassifier(**quick).fit(x, y > 0)
    new, truth = rows(300, seed=1)
    assert model.score(new, truth > 0) > 0.85
    p = model.predict_proba(new)
    np.testing.assert_allclose(p.sum(1), 1, rtol=1e-12)
    each = torch.stack([m.posterior.predict(model._inputs(new)).probabilities for m in model.members_])
    np.testing.assert_allclose(p, agreed(model.members_, each).numpy(), rtol=1e-12)
    average = sum(m.weight * own for m, own in zip(model.members_, each, strict=True))
    assert (average.argmax(1).numpy() == p.argmax(1)).all()
    far = model.predict_proba(100 * new / np.linalg.norm(new, axis=1, keepdims=True))
    assert np.abs(far - 0.5).mean() < 0.05


@pytest.mark.parametrize("kind", [StationaryRegressor, StationaryClassifier])
def test_few_rows_tune_under_a_prior(kind, monkeypatch):
    given, tune = [], estimator_base.tune_marginal

    def tuned(*arguments, prior_std, **options):
        given.append(prior_std)
        return tune(*arguments, prior_std=prior_std, **options | {"steps": 1})

    monkeypatch.setattr(estimator_base, "tune_marginal", tuned)
    for number, expected in ((299, 1.0), (300, math.inf)):
        x, y = rows(number)
        kind(width=20, hidden=(), kernel="rbf").fit(x, y if kind is StationaryRegressor else y > 0)
        assert set(given) == {expected}
        given.clear()


def test_wide_networks_serve_alone_where_nearly_every_row_is_a_class_of_its_own(quick, monkeypatch):
    monkeypatch.setattr(estimator_base, "TRAINED_FROM", 30)
    x, _ = rows(40)
    with pytest.warns(UserWarning, match="greater than 50%"):
        model = StationaryClassifier(**quick, kernel="rbf").fit(x, np.minimum(np.arange(40), 29))
    assert len(model.members_) == 1


def test_many_rows_are_judged_at_once_and_few_block_by_block(quick, monkeypatch):
    heads = []
    head = StationaryRegressor._head
    monkeypatch.setattr(
        StationaryRegressor, "_head", lambda self, *given: heads.append(len(given[2])) or head(self, *given)
    )
    monkeypatch.setattr(estimator_base, "BLOCK", 5)
    monkeypatch.setattr(estimator_base, "EPOCHS", 3)
    StationaryRegressor(**quick, kernel="rbf").fit(*rows(401))
    assert heads[0] == 386  # without three blocks of five rows
    heads.clear()
    monkeypatch.setattr(estimator_base, "BLOCK", 20)
    StationaryRegressor(**quick, kernel="rbf").fit(*rows(401))
    assert heads[:3] == [381] * 3


@pytest.mark.parametrize("num", [400, 1600])
def test_the_amplitude_of_wide_classifiers_is_not_chosen_on_blocks(quick, num, monkeypatch):
    held, blocks = [], []
    choose, judge = StationaryClassifier._best_amplitude, StationaryClassifier._judged_wide

    def chosen(self, x, y, trials):
        if isinstance(trials[0][0].extractor, nn.Identity):
            held.append(torch.cat([own for *_, own in trials]))
        return choose(self, x, y, trials)

    def judged(self, group, x, y, order, given):
        blocks.extend(given)
        assert not torch.isin(held[-1], torch.cat(given)).any()
        return judge(self, group, x, y, order, given)

    monkeypatch.setattr(StationaryClassifier, "_best_amplitude", chosen)
    monkeypatch.setattr(StationaryClassifier, "_judged_wide", judged)
    monkeypatch.setattr(estimator_base, "EPOCHS", 3)
    x, y = rows(num)
    StationaryClassifier(**{**quick, "width": 20, "kernel": "rbf"}).fit(x, y > 0)
    assert len(blocks) == 3


def test_groups_of_many_networks_count_as_much_as_groups_of_few(quick, monkeypatch):
    monkeypatch.setattr(estimator_base, "EPOCHS", 3)
    given = torch.tensor([0.5, 0.3, 0.16, 0.04])
    monkeypatch.setattr(StationaryRegressor, "_weights", lambda *_: given)
    model = StationaryRegressor(**{**quick, "networks": 10, "kernel": "rbf"}).fit(*rows(300))
    assert describe(model.members_) == "1 wide (0.52), 20 with hidden layers (0.48)"
    monkeypatch.setattr(StationaryRegressor, "_weights", lambda *_: given.flip(0))
    model = StationaryRegressor(**{**quick, "kernel": ("rbf", "matern32")}).fit(*rows(300))
    assert [isinstance(m.model.extractor, nn.Identity) for m in model.members_] == [True] + 9 * [False]
