"""Features and heads of the estimators, against dense Gaussian processes, logistic regression and refits."""

import threading

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import log_softmax
from scipy.stats import multivariate_normal
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF as SklearnRBF
from sklearn.gaussian_process.kernels import ConstantKernel, WhiteKernel
from sklearn.gaussian_process.kernels import Matern as SklearnMatern
from sklearn.linear_model import LogisticRegression

from bochner.members.compact import CompactHead
from bochner.members.features import JITTER, KernelFeatures, correlation, squared_distances
from bochner.members.heads import (
    GaussianHead,
    SoftmaxHead,
    as_probabilities,
    as_targets,
    find_mode,
    left_out_latent,
    sums_of,
)
from bochner.members.rows import TrainingRows
from bochner.posteriors.feature_rows import FeatureRows
from bochner.priors.spectra import RBF, Matern
from bochner.training.threads import one_thread

AMPLITUDE, NOISE = 1.7, 0.3
LENGTHSCALE = torch.tensor([0.8, 2.5], dtype=torch.float64)
M32 = Matern(1.5)


def table(num, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.uniform(-2, 2, (num, 2))
    return x, np.sin(2 * x[:, 0]) + 0.3 * x[:, 1] + 0.2 * rng.normal(size=num)


def rows_of(x, y, weight=None):
    y = np.asarray(y, dtype=np.float64).reshape(len(x), -1)
    weight = np.ones(len(x)) if weight is None else np.asarray(weight, dtype=np.float64)
    return TrainingRows(torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(weight))


def matern32(x, z):
    """(1 + √3 r) exp(−√3 r), written out."""
    r = np.linalg.norm((x[:, None] - z[None]) / LENGTHSCALE.numpy(), axis=-1) * np.sqrt(3)
    return (1 + r) * np.exp(-r)


def features_at(x):
    return KernelFeatures.at(M32, LENGTHSCALE, torch.from_numpy(x))


def gaussian(x, y, weight=None, anchors=None):
    features = features_at(x if anchors is None else anchors)
    return GaussianHead(features, sums_of(features, rows_of(x, y, weight)), AMPLITUDE, NOISE)


# ------------------------------------------------------------------ features


def test_distances_and_correlations_are_those_of_their_definitions():
    x, z = table(7)[0], table(5, seed=1)[0]
    expected = ((x[:, None] - z[None]) ** 2).sum(-1)
    np.testing.assert_allclose(squared_distances(torch.from_numpy(x), torch.from_numpy(z)), expected, rtol=1e-12)
    scale = LENGTHSCALE.numpy()
    found = correlation(M32, torch.from_numpy(x / scale), torch.from_numpy(z / scale))
    np.testing.assert_allclose(found, matern32(x, z), rtol=1e-10)


def test_products_of_features_are_the_kernel_at_the_anchors_and_nystroem_elsewhere():
    x, new = table(20)[0], table(6, seed=1)[0]
    features = features_at(x)
    at = features(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(at @ at.T, matern32(x, x), atol=10 * JITTER)
    phi = features(torch.from_numpy(new)).numpy()
    cross = matern32(new, x)
    expected = cross @ np.linalg.solve(matern32(x, x) + JITTER * np.eye(20), cross.T)
    np.testing.assert_allclose(phi @ phi.T, expected, atol=1e-9)


def test_features_are_the_same_in_pieces():
    x, _ = table(5000)
    features = features_at(x[:10])
    pieces = list(FeatureRows(features, torch.from_numpy(x).split(4096)))
    assert [len(piece) for piece in pieces] == [4096, 904]
    whole = features(torch.from_numpy(x))
    torch.testing.assert_close(torch.cat(pieces), whole)
    y = x[:, :1] ** 2
    sums = sums_of(features, rows_of(x, y))
    torch.testing.assert_close(sums.gram, whole.mT @ whole)
    torch.testing.assert_close(sums.projection, whole.mT @ torch.from_numpy(y))
    assert (sums.square, sums.count) == (pytest.approx((y**2).sum()), 5000)


def test_features_that_are_too_many_to_keep_are_computed_again(monkeypatch):
    x = torch.from_numpy(table(30)[0])
    features = features_at(x[:10].numpy())
    kept = torch.cat(list(FeatureRows(features, x.split(8))))
    monkeypatch.setattr("bochner.posteriors.feature_rows.MAX_KEPT_FEATURES", 0)
    again = FeatureRows(features, x.split(8))
    assert again.kept is None
    for _ in range(2):  # more than once
        torch.testing.assert_close(torch.cat(list(again)), kept)


# ------------------------------------------------------------------ regression


def test_with_all_rows_as_anchors_the_head_is_the_exact_gaussian_process():
    (x, y), new = table(40), table(25, seed=1)[0]
    gram = AMPLITUDE**2 * matern32(x, x) + NOISE**2 * np.eye(40)
    cross = AMPLITUDE**2 * matern32(new, x)
    mean, variance = gaussian(x, y).predict(torch.from_numpy(new))
    # The anchors' jitter of 1e-8 is divided by a noise of 0.3²: errors of about 1e-6.
    np.testing.assert_allclose(mean, cross @ np.linalg.solve(gram, y), rtol=0, atol=2e-6)
    expected = AMPLITUDE**2 - (cross * np.linalg.solve(gram, cross.T).T).sum(1)
    np.testing.assert_allclose(variance, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("spectrum", "kernel"),
    [(M32, SklearnMatern([0.8, 2.5], nu=1.5)), (RBF(), SklearnRBF([0.8, 2.5]))],
    ids=["matern32", "rbf"],
)
def test_the_head_is_scikit_learns_gaussian_process(spectrum, kernel):
    (x, y), new = table(30), table(25, seed=1)[0]
    peer = GaussianProcessRegressor(ConstantKernel(AMPLITUDE**2) * kernel + WhiteKernel(NOISE**2), optimizer=None)
    expected, std = peer.fit(x, y).predict(new, return_std=True)
    features = KernelFeatures.at(spectrum, LENGTHSCALE, torch.from_numpy(x))
    head = GaussianHead(features, sums_of(features, rows_of(x, y)), AMPLITUDE, NOISE)
    mean, variance = head.predict(torch.from_numpy(new))
    # A smooth kernel's smallest eigenvalues are of the size of the jitter: 1e-8 under a root.
    np.testing.assert_allclose(mean, expected, rtol=0, atol=1e-4)
    np.testing.assert_allclose(variance + NOISE**2, std**2, rtol=0, atol=1e-4)
    assert head.log_evidence == pytest.approx(peer.log_marginal_likelihood_value_, abs=1e-4)


def test_the_evidence_is_the_dense_normal_density():
    x, y = table(40)
    dense = multivariate_normal(np.zeros(40), AMPLITUDE**2 * matern32(x, x) + NOISE**2 * np.eye(40))
    assert gaussian(x, y).log_evidence == pytest.approx(dense.logpdf(y), abs=1e-4)


def test_with_few_anchors_the_head_is_the_deterministic_training_conditional():
    (x, y), new, z = table(60), table(15, seed=1)[0], table(12, seed=2)[0]
    head = gaussian(x, y, anchors=z)
    inner = np.linalg.inv(matern32(z, z) + JITTER * np.eye(12))
    through = AMPLITUDE**2 * matern32(x, z) @ inner @ matern32(z, x)
    cross = AMPLITUDE**2 * matern32(new, z) @ inner @ matern32(z, x)
    gram = through + NOISE**2 * np.eye(60)
    mean, variance = head.predict(torch.from_numpy(new))
    np.testing.assert_allclose(mean, cross @ np.linalg.solve(gram, y), atol=1e-7)
    expected = AMPLITUDE**2 - (cross * np.linalg.solve(gram, cross.T).T).sum(1)
    np.testing.assert_allclose(variance, expected, atol=1e-7)
    assert head.log_evidence == pytest.approx(multivariate_normal(np.zeros(60), gram).logpdf(y), abs=1e-6)


def test_a_row_of_weight_three_is_three_rows():
    (x, y), new = table(20), torch.from_numpy(table(9, seed=1)[0])
    weight = np.ones(20)
    weight[[3, 11]] = 3
    many = np.repeat(np.arange(20), weight.astype(int))
    one, three = gaussian(x, y, weight, anchors=x), gaussian(x[many], y[many], anchors=x)
    for found, expected in zip(one.predict(new), three.predict(new), strict=True):
        torch.testing.assert_close(found, expected)
    assert one.log_evidence == pytest.approx(three.log_evidence)


def test_an_update_is_a_fit_to_all_rows():
    (x, y), new = table(50), torch.from_numpy(table(9, seed=1)[0])
    weight = np.linspace(0.5, 2, 50)
    first = gaussian(x[:30], y[:30], weight[:30], anchors=x[:15])
    before = first.predict(new)[0].clone()
    later = first.updated(rows_of(x[30:], y[30:], weight[30:]))
    whole = gaussian(x, y, weight, anchors=x[:15])
    torch.testing.assert_close(later.mean, whole.mean)
    torch.testing.assert_close(later.factor, whole.factor)
    assert later.log_evidence == pytest.approx(whole.log_evidence)
    torch.testing.assert_close(first.predict(new)[0], before)  # a new head: the old one stays


def test_far_away_the_prior_is_left():
    head = gaussian(*table(40))
    far = torch.tensor([[400.0, 0.0], [-300.0, 500.0]], dtype=torch.float64)
    mean, variance = head.predict(far)
    torch.testing.assert_close(mean, torch.zeros(2, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(variance, torch.full((2,), AMPLITUDE**2, dtype=torch.float64))
    torch.testing.assert_close(head.variance_left(far), torch.ones(2, dtype=torch.float64))


def test_the_covariance_is_dense_and_has_the_variances_on_its_diagonal():
    (x, y), new = table(40), table(12, seed=1)[0]
    head = gaussian(x, y)
    mean, covariance = head.covariance(torch.from_numpy(new))
    expected_mean, variance = head.predict(torch.from_numpy(new))
    torch.testing.assert_close(mean, expected_mean)
    torch.testing.assert_close(covariance.diagonal(), variance)
    gram = AMPLITUDE**2 * matern32(x, x) + NOISE**2 * np.eye(40)
    cross = AMPLITUDE**2 * matern32(new, x)
    expected = AMPLITUDE**2 * matern32(new, new) - cross @ np.linalg.solve(gram, cross.T)
    np.testing.assert_allclose(covariance, expected, rtol=0, atol=2e-6)


# ------------------------------------------------------------------ classes


def labels_of(num, classes, seed=0):
    x, y = table(num, seed)
    return x, np.digitize(y, np.quantile(y, np.arange(1, classes) / classes))


def softmax(x, labels, classes, weight=None, amplitude=AMPLITUDE, anchors=None):
    targets = as_targets(torch.from_numpy(labels), classes).numpy()
    return SoftmaxHead.fit(features_at(x if anchors is None else anchors), rows_of(x, targets, weight), amplitude)


def test_targets_are_one_column_for_two_classes_and_one_for_each_of_more():
    assert as_targets(torch.tensor([0, 1, 1]), 2).tolist() == [[0], [1], [1]]
    assert as_targets(torch.tensor([2, 0]), 3).tolist() == [[0, 0, 1], [1, 0, 0]]


def test_probabilities_are_sigmoid_and_softmax():
    latent = torch.tensor([[0.7], [-40.0]], dtype=torch.float64)
    upper = 1 / (1 + np.exp(-latent.numpy()[:, 0]))
    np.testing.assert_allclose(as_probabilities(latent), np.stack([1 - upper, upper], 1), rtol=1e-12, atol=1e-16)
    three = torch.tensor([[0.3, -1.0, 2.0]], dtype=torch.float64)
    np.testing.assert_allclose(as_probabilities(three), np.exp(log_softmax(three.numpy(), 1)), rtol=1e-12)


def test_the_mode_is_where_scipy_finds_it():
    x, labels = labels_of(12, 3)
    head = softmax(x, labels, 3)
    phi = head.features(torch.from_numpy(x)).numpy()

    def loss(flat):
        w = flat.reshape(12, 3)
        fit = log_softmax(phi @ w, 1)[np.arange(12), labels].sum()
        return 0.5 * (w**2).sum() / AMPLITUDE**2 - fit

    best = minimize(loss, np.zeros(36), method="BFGS", options={"gtol": 1e-5})
    assert loss(head.weights.numpy().ravel()) == pytest.approx(best.fun, abs=1e-6)
    np.testing.assert_allclose(head.weights, best.x.reshape(12, 3), atol=5e-3)  # L-BFGS stops at a slope of 1e-3


@pytest.mark.parametrize("classes", [2, 3])
def test_at_the_mode_the_weights_are_what_the_residuals_teach(classes):
    """The gradient is zero: w = a² Φ'Ω(y − p)."""
    x, labels = labels_of(40, classes)
    weight = np.linspace(0.5, 3, 40)
    head = softmax(x, labels, classes, weight)
    phi, probability = head.features(torch.from_numpy(x)).numpy(), head.probabilities(torch.from_numpy(x)).numpy()
    residual = weight[:, None] * (np.eye(classes)[labels] - probability)
    expected = AMPLITUDE**2 * phi.T @ (residual[:, 1:] if classes == 2 else residual)
    np.testing.assert_allclose(head.weights, expected, atol=2e-2)
    np.testing.assert_allclose(probability.sum(1), 1, rtol=1e-12)


def test_two_classes_share_one_function_and_are_logistic_regression_on_the_features():
    x, labels = labels_of(40, 2)
    head = softmax(x, labels, 2)
    assert head.weights.shape == (40, 1)
    phi, new = head.features(torch.from_numpy(x)).numpy(), torch.from_numpy(table(20, seed=1)[0])
    peer = LogisticRegression(C=AMPLITUDE**2, fit_intercept=False, tol=1e-8, max_iter=5000).fit(phi, labels)
    expected = peer.predict_proba(head.features(new).numpy())
    np.testing.assert_allclose(head.probabilities(new), expected, atol=1e-3)


@pytest.mark.parametrize("classes", [2, 3])
def test_far_away_all_classes_are_equally_probable_and_all_variance_is_left(classes):
    head = softmax(*labels_of(40, classes), classes, amplitude=16.0)
    far = torch.tensor([[400.0, 0.0], [-300.0, 500.0]], dtype=torch.float64)
    torch.testing.assert_close(head.probabilities(far), torch.full((2, classes), 1 / classes, dtype=torch.float64))
    torch.testing.assert_close(head.variance_left(far), torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("classes", [2, 3])
def test_weights_of_classified_rows_are_repeats(classes):
    x, labels = labels_of(20, classes)
    weight = np.ones(20)
    weight[[3, 11]] = 3
    many, new = np.repeat(np.arange(20), weight.astype(int)), torch.from_numpy(table(9, seed=1)[0])
    one = softmax(x, labels, classes, weight)
    three = softmax(x[many], labels[many], classes, anchors=x)
    torch.testing.assert_close(one.probabilities(new), three.probabilities(new), atol=1e-3, rtol=0)
    torch.testing.assert_close(one.variance_left(new), three.variance_left(new))


def test_what_rows_leave_is_a_regression_with_a_noise_of_two_whatever_the_labels():
    x, labels = labels_of(30, 3)
    new = torch.from_numpy(table(9, seed=1)[0])
    features = features_at(x)
    peer = GaussianHead(features, sums_of(features, rows_of(x, labels)), AMPLITUDE, 2.0)  # 1 / 2² is a quarter
    for own in (labels, (labels + 1) % 3):
        torch.testing.assert_close(softmax(x, own, 3).variance_left(new), peer.variance_left(new))


def test_modes_along_amplitudes_are_those_of_single_fits():
    x, labels = labels_of(30, 3)
    rows = rows_of(x, as_targets(torch.from_numpy(labels), 3).numpy())
    new = torch.from_numpy(table(9, seed=1)[0])
    amplitudes = (1.0, 2.0, 4.0)
    for amplitude, head in zip(amplitudes, SoftmaxHead.along(features_at(x), rows, amplitudes), strict=True):
        alone = SoftmaxHead.fit(features_at(x), rows, amplitude)
        assert head.amplitude == amplitude
        torch.testing.assert_close(head.probabilities(new), alone.probabilities(new), atol=2e-3, rtol=0)


def refits(phi, rows, amplitude):
    """The latent functions at every row by a fit without it."""
    found = []
    for i in range(len(rows)):
        others = torch.arange(len(rows)) != i
        own = phi[others]
        gram = own.mT @ (own * rows.weight[others][:, None])
        found.append(phi[i] @ find_mode([own], rows[others], gram, amplitude, None))
    return torch.stack(found)


@pytest.mark.parametrize(("classes", "apart"), [(2, 0.02), (3, 0.1)])
def test_left_out_functions_are_those_of_refits(classes, apart):
    """One Newton step: nearly exact for two classes, whose functions it takes one at a time, and close for more."""
    x, labels = labels_of(40, classes)
    rows = rows_of(x, as_targets(torch.from_numpy(labels), classes).numpy())
    amplitude = 1.0
    head = SoftmaxHead.fit(features_at(x), rows, amplitude)
    phi = head.features(rows.x)
    found = as_probabilities(left_out_latent(phi, rows, head.weights, amplitude))
    expected = as_probabilities(refits(phi, rows, amplitude))
    assert float((found - expected).abs().max()) < apart
    assert np.corrcoef(found.numpy().ravel(), expected.numpy().ravel())[0, 1] > 0.99
    inside = head.probabilities(rows.x)
    assert float((found - expected).abs().mean()) < 0.2 * float((inside - expected).abs().mean())


def test_a_row_that_stands_for_several_is_left_out_as_a_whole():
    x, labels = labels_of(30, 2)
    rows = rows_of(x, as_targets(torch.from_numpy(labels), 2).numpy(), np.where(np.arange(30) % 5 == 0, 2.0, 1.0))
    head = SoftmaxHead.fit(features_at(x), rows, 1.0)
    phi = head.features(rows.x)
    found = left_out_latent(phi, rows, head.weights, 1.0)
    torch.testing.assert_close(found, refits(phi, rows, 1.0), atol=0.1, rtol=0)


# ------------------------------------------------------------------ threads


@pytest.mark.parametrize("wanted", [True, False])
def test_the_number_of_threads_comes_back(wanted):
    own = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with one_thread(wanted):
            assert torch.get_num_threads() == (1 if wanted else 2)
        assert torch.get_num_threads() == 2

        def fail():
            with one_thread(wanted):
                raise RuntimeError("on purpose")

        with pytest.raises(RuntimeError, match="on purpose"):
            fail()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(own)


def test_threads_that_overlap_each_work_on_one_and_get_their_number_back():
    """The second enters while the first is inside, and leaves after it."""
    before = torch.get_num_threads()
    entered, left, seen = threading.Event(), threading.Event(), []

    def second() -> None:
        with one_thread():
            seen.append(torch.get_num_threads())
            entered.set()
            assert left.wait(30)
            seen.append(torch.get_num_threads())
        seen.append(torch.get_num_threads())

    other = threading.Thread(target=second)
    try:
        torch.set_num_threads(2)
        with one_thread():
            other.start()
            assert entered.wait(30)
        assert torch.get_num_threads() == 2
        left.set()
        other.join()
        assert seen == [1, 1, 2]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# ------------------------------------------------------------------ heads as products


@pytest.mark.parametrize("anchors", [40, 15])
def test_a_compact_head_is_the_exact_gaussian_process_where_every_row_is_an_anchor(anchors):
    (x, y), new = table(40), torch.from_numpy(np.concatenate([table(25, seed=1)[0], [[90.0, 0.0]]]))
    head = gaussian(x, y, anchors=x[:anchors])
    mean, variance = CompactHead(head, torch.float64).predict(new)
    if anchors == len(x):
        gram = AMPLITUDE**2 * matern32(x, x) + NOISE**2 * np.eye(40)
        cross = AMPLITUDE**2 * matern32(new.numpy(), x)
        np.testing.assert_allclose(mean, cross @ np.linalg.solve(gram, y), rtol=0, atol=2e-6)
        expected = AMPLITUDE**2 - (cross * np.linalg.solve(gram, cross.T).T).sum(1)
        np.testing.assert_allclose(variance, expected, rtol=0, atol=2e-6)
    torch.testing.assert_close((mean, variance), head.predict(new), rtol=0, atol=1e-6)
    assert float(variance[-1]) == pytest.approx(AMPLITUDE**2, abs=1e-12)  # far away: the prior
    single = CompactHead(head, torch.float32).predict(new)
    assert single[1].dtype == torch.float64
    torch.testing.assert_close(single, head.predict(new), rtol=0, atol=2e-5)


@pytest.mark.parametrize("classes", [2, 3])
def test_a_compact_head_for_classes_says_what_the_head_says(classes):
    x, y = table(60)
    labels = torch.from_numpy(np.digitize(y, [0.0] if classes == 2 else [-0.5, 0.5]))
    rows = TrainingRows(torch.from_numpy(x), as_targets(labels, classes), torch.ones(60, dtype=torch.float64))
    head = SoftmaxHead.fit(features_at(x[:30]), rows, AMPLITUDE)
    head.averaging = 0.5
    new = torch.from_numpy(table(25, seed=1)[0])
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
        compact = CompactHead(head, dtype)
        found = compact.predict(new)
        torch.testing.assert_close(found, head.predict(new), rtol=0, atol=tolerance)
        torch.testing.assert_close(compact.probabilities_of(*found), head.probabilities(new), rtol=0, atol=tolerance)
        torch.testing.assert_close(compact.left_of(*found), head.variance_left(new), rtol=0, atol=tolerance)
