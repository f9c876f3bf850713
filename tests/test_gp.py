"""Gaussian processes against scikit-learn, and against the networks whose limit they are."""

import math

import numpy as np
import pytest
import torch
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process import kernels as sk

from bochner import RBF, Exponential, Gaussian, Matern, Model, StationaryLayer, induced_kernel
from bochner.posteriors.closed_form import ClosedForm
from bochner.posteriors.gp import GaussianProcess, GaussianProcessClassifier
from bochner.posteriors.laplace import Laplace
from bochner.priors.kernels import arccos0, arccos1, erf_nn, matern_nn, rbf_nn
from problems import data, regression

KERNELS = {
    "rbf": RBF(),
    "matern32": Matern(1.5),
    "matern22": Matern(2.2),
    "exponential": Exponential(),
    "product": Matern(1.5, product=True),
    "triangle": induced_kernel("triangle", "matern32", tolerance=1e-4),
    "arccos0": arccos0,
    "arccos1": arccos1,
    "erf": erf_nn,
    "rbf_nn": rbf_nn,
    "matern_nn": lambda x, x2: matern_nn(x, x2, nu=1.5),
}


@pytest.mark.parametrize("ard", [False, True])
@pytest.mark.parametrize(("ours", "theirs"), [(RBF(), sk.RBF), (Matern(1.5), lambda s: sk.Matern(s, nu=1.5))])
def test_regression_is_that_of_scikit_learn(ours, theirs, ard):
    x, y = data(25)
    x_new = data(7, seed=5)[0]
    lengthscale = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64) if ard else 0.7
    gp = GaussianProcess(ours, x, y, lengthscale=lengthscale, amplitude=1.5, noise=0.2)
    kernel = sk.ConstantKernel(1.5**2) * theirs(np.asarray(lengthscale)) + sk.WhiteKernel(0.04)
    reference = GaussianProcessRegressor(kernel, optimizer=None).fit(x.numpy(), y[:, 0].numpy())
    mean, std = reference.predict(x_new.numpy(), return_std=True)
    prediction = gp.predict(x_new)
    np.testing.assert_allclose(prediction.mean[:, 0].numpy(), mean, atol=1e-7)
    np.testing.assert_allclose(prediction.std[:, 0].numpy(), std, atol=1e-7)
    assert gp.log_marginal_likelihood == pytest.approx(reference.log_marginal_likelihood_value_, rel=1e-7)


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_of_the_package_fits_and_its_evidence_rises(name):
    x, y = data(25)
    start = GaussianProcess(KERNELS[name], x, y).log_marginal_likelihood
    gp = GaussianProcess(KERNELS[name], x, y).tune(steps=30)
    assert gp.log_marginal_likelihood > start
    prediction = gp.predict(x)
    assert torch.isfinite(prediction.log_prob(y)).all()
    assert (prediction.f_variance > 0).all()


def test_closed_form_full_laplace_and_gp_on_the_same_features_agree():
    """A linear-Gaussian problem: worst relative difference of mean and variance 1e-8 among the three."""
    model = regression(width=15)
    x, y = data(30)
    x_new = data(9, seed=4)[0]

    def features(a, b):
        return model.features(a).detach() @ model.features(b).detach().T / 15

    closed = ClosedForm(model, x, y)
    with torch.no_grad():
        model.output.weight.copy_(closed.mean.T)
    gp = GaussianProcess(features, x, y, noise=0.3).predict(x_new)
    laplace = Laplace(model, x, y, structure="last_layer").predict(x_new)
    for other in (gp, laplace):
        torch.testing.assert_close(other.mean, closed.predict(x_new).mean, rtol=1e-8, atol=1e-12)
        torch.testing.assert_close(other.f_variance, closed.predict(x_new).f_variance, rtol=1e-8, atol=1e-12)


def test_wide_networks_approach_their_gaussian_process():
    x, y = data(40)
    x_new = data(15, seed=4)[0]
    gp = GaussianProcess(Matern(1.5), x, y, lengthscale=1.5, noise=0.2).predict(x_new)

    def error(width):
        generator = torch.Generator().manual_seed(0)
        options = {"kernel": "matern32", "activation": "paired", "frequencies": "sobol", "generator": generator}
        layer = StationaryLayer(3, width, lengthscale=1.5, dtype=torch.float64, **options)
        prediction = ClosedForm(Model(layer, 1, Gaussian(0.2)), x, y).predict(x_new)
        return (prediction.mean - gp.mean).abs().mean() + (prediction.f_variance - gp.f_variance).abs().mean()

    assert error(2048) < error(64) / 3


def test_classification_learns_and_reverts(generator):
    x = torch.randn(60, 2, generator=generator, dtype=torch.float64)
    y = (x[:, 0] * x[:, 1] > 0).long()
    posterior = GaussianProcessClassifier(Matern(1.5), x, y, steps=60)
    assert (posterior.predict(x).probabilities.argmax(-1) == y).double().mean() > 0.85
    far = posterior.predict(torch.full((1, 2), 100.0, dtype=torch.float64))
    assert abs(far.probabilities[0, 0] - 0.5) < 0.1
    torch.testing.assert_close(posterior.predict(x).probabilities, posterior.predict(x).probabilities, rtol=0, atol=0)


def test_bad_arguments():
    x, y = data(5)
    with pytest.raises(ValueError, match="y parameter must be finite, got 5 NaN"):
        GaussianProcess(RBF(), x, y * math.nan)
    with pytest.raises(ValueError, match=r"y parameter must have shape \(N, 1\), got \(5, 2\) instead"):
        GaussianProcess(RBF(), x, y.expand(5, 2))
    with pytest.raises(ValueError, match=r"x parameter must have shape \(N, d\).*got \(5,\) and 5 instead"):
        GaussianProcess(RBF(), x[:, 0], y)
    with pytest.raises(ValueError, match="integer labels from 0 of at least two classes"):
        GaussianProcessClassifier(RBF(), x, torch.zeros(5, dtype=torch.long))
