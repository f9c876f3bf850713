"""Networks, likelihoods and the log joint, against densities from SciPy."""

import math

import numpy as np
import pytest
import scipy.stats
import torch
from scipy.interpolate import interp1d
from torch import nn

from bochner import Categorical, ClosedFormClassifier, Gaussian, Model, Recipe, StationaryLayer, fit_map, swap_head
from bochner.networks import Intervals, mlp


def regression(**options):
    generator = torch.Generator().manual_seed(0)
    layer = StationaryLayer(3, 10, kernel="matern52", generator=generator, dtype=torch.float64)
    return Model(layer, 1, Gaussian(0.3), generator=generator, **options)


def data(generator):
    x = torch.randn(7, 3, generator=generator, dtype=torch.float64)
    return x, torch.randn(7, 1, generator=generator, dtype=torch.float64)


def test_log_joint_of_a_regression_network(generator):
    extractor = mlp(3, (4, 3), dropout=0.0).double()
    model = regression(extractor=extractor, extractor_precision=2.0, output_bias=True, amplitude=1.7)
    x, y = data(generator)
    weight = 1.7 * model.output.weight
    f = (model.layer(extractor(x)) @ weight.mT + model.output.bias).detach().numpy()
    expected = scipy.stats.norm(f, 0.3).logpdf(y.numpy()).sum()
    expected += model.layer.log_prior().item()
    expected += scipy.stats.norm(0, math.sqrt(1 / 10)).logpdf(model.output.weight.detach().numpy()).sum()
    expected += scipy.stats.norm.logpdf(model.output.bias.item())
    expected += scipy.stats.gamma(0.5, scale=1).logpdf(0.3) + scipy.stats.gamma(2.0, scale=1).logpdf(1.7)
    for p in extractor.parameters():
        expected += scipy.stats.norm(0, math.sqrt(1 / 2)).logpdf(p.detach().numpy()).sum()
    assert model.log_joint(x, y).item() == pytest.approx(expected, rel=1e-12)


def test_minibatches_estimate_the_log_joint_without_bias(generator):
    model = regression()
    x, y = data(generator)
    parts = [model.log_joint(x[i : i + 1], y[i : i + 1], num_data=7) for i in range(7)]
    torch.testing.assert_close(torch.stack(parts).mean(), model.log_joint(x, y))


def test_classification_likelihood_is_the_softmax(generator):
    layer = StationaryLayer(3, 10, generator=generator, dtype=torch.float64)
    model = Model(layer, 4, Categorical(), generator=generator)
    x = torch.randn(7, 3, generator=generator, dtype=torch.float64)
    y = torch.tensor([0, 1, 2, 3, 0, 1, 2])
    expected = torch.log_softmax(model(x), -1)[torch.arange(7), y].sum()
    torch.testing.assert_close(model.log_likelihood(x, y), expected)
    torch.testing.assert_close(model.log_joint(x, y), expected + model.log_prior())


def test_noise_jacobian():
    likelihood = Gaussian(0.3)
    difference = likelihood.log_prior(jacobian=True) - likelihood.log_prior()
    assert difference.item() == pytest.approx(math.log(0.3))


def test_prior_functions_have_the_induced_covariance():
    """4,000 networks drawn from the prior: outputs at three points, within five standard errors."""
    x = torch.tensor([[0.0], [0.5], [2.0]], dtype=torch.float64)
    outputs = []
    for seed in range(4000):
        generator = torch.Generator().manual_seed(seed)
        layer = StationaryLayer(1, 20, kernel="matern32", generator=generator, dtype=torch.float64)
        outputs.append(Model(layer, 1, Gaussian(), generator=generator)(x).detach()[:, 0])
    f = torch.stack(outputs)
    products = f[:, :, None] * f[:, None, :]
    z = math.sqrt(3) * (x - x.T).abs()
    deviation = (products.mean(0) - (1 + z) * torch.exp(-z)) / (products.std(0) / math.sqrt(4000))
    assert deviation.abs().max() < 5


def test_global_random_state_is_left_alone():
    state = torch.get_rng_state()
    generator = torch.Generator().manual_seed(0)
    extractor = mlp(3, (4, 3), generator=generator)
    model = Model(StationaryLayer(3, 8, generator=generator), 1, Gaussian(), extractor=extractor, generator=generator)
    swap_head(model.extractor, width=4, generator=generator)
    torch.testing.assert_close(torch.get_rng_state(), state, rtol=0, atol=0)


def test_a_model_keeps_the_modules_that_it_is_given():
    """As other containers do: nothing is copied, so that training the model trains what was given."""
    layer, likelihood, extractor = StationaryLayer(3, 8), Gaussian(0.3), nn.Linear(2, 3)
    model = Model(layer, 1, likelihood, extractor=extractor)
    assert model.layer is layer
    assert model.likelihood is likelihood
    assert model.extractor is extractor
    assert likelihood.noise.dtype == torch.float32
    double = Model(StationaryLayer(3, 8, dtype=torch.float64), 1, Gaussian(0.3))
    assert double.likelihood.noise.item() == pytest.approx(0.3, rel=1e-15)


def test_networks_of_a_stack_that_share_parameters_are_refused(generator):
    x, y = data(generator)
    likelihood = Gaussian(0.3)
    models = [Model(StationaryLayer(3, 8, dtype=torch.float64), 1, likelihood) for _ in range(2)]
    with pytest.raises(ValueError, match="networks of a stack must not share parameters"):
        fit_map(models, x, y, Recipe(1))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int64])
def test_labels_of_any_integer_type_and_leading_dimensions(dtype, generator):
    f = torch.randn(2, 3, 3, generator=generator)
    y = torch.tensor([[0, 1, 2], [2, 1, 0]], dtype=dtype)
    expected = torch.log_softmax(f, -1).gather(-1, y.long()[..., None])[..., 0]
    torch.testing.assert_close(Categorical()(f, y), expected)
    with pytest.raises(ValueError, match=r"targets y must hold labels from 0 to 2: .*out of bounds"):
        Categorical()(f[0], torch.tensor([0, -100, 1]))


def test_output_weights_depend_on_the_generator_alone():
    torch.manual_seed(1)
    first = regression().output.weight
    torch.manual_seed(2)
    torch.testing.assert_close(regression().output.weight, first, rtol=0, atol=0)


@pytest.mark.parametrize("head", [None, "2"])
def test_swap_head_keeps_the_features_and_the_original(head, generator):
    network = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    before = network(torch.ones(2, 6))
    model = swap_head(network, width=12, head=head, kernel="matern32", activation="triangle", generator=generator)
    x = torch.randn(4, 6, generator=generator)
    torch.testing.assert_close(model.extractor(x), network[1](network[0](x)))
    assert model(x).shape == (4, 3)
    assert isinstance(model.likelihood, Categorical)
    torch.testing.assert_close(network(torch.ones(2, 6)), before)


def test_swap_head_of_a_nested_network_and_of_a_bare_linear(generator):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten())
            self.fc = nn.Linear(2 * 6 * 6, 1)

        def forward(self, x):
            return self.fc(self.body(x))

    model = swap_head(Net(), width=16, generator=generator)
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 1)
    assert isinstance(model.likelihood, Gaussian)
    assert swap_head(nn.Linear(4, 2), width=8)(torch.zeros(1, 4)).shape == (1, 2)


def test_swap_head_of_a_network_that_registers_another_layer_last(generator):
    """The layer to replace goes by the order of registration: where that is another one, the first use says so."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.fc = nn.Linear(4, 5), nn.Linear(5, 3)
            self.auxiliary = nn.Linear(5, 2)

        def forward(self, x):
            return self.fc(self.body(x))

    with pytest.raises(ValueError, match=r"features of shape \(n, 5\), got torch.float32 of shape \(2, 3\).*head="):
        swap_head(Net(), width=6, generator=generator)(torch.zeros(2, 4))
    assert swap_head(Net(), width=6, head="fc", generator=generator)(torch.zeros(2, 4)).shape == (2, 3)


def test_paper_network_has_the_papers_shape():
    widths = [m.out_features for m in mlp(12) if isinstance(m, nn.Linear)]
    assert widths == [1000, 1000, 500, 25]
    kinds = [type(m).__name__ for m in mlp(12)]
    assert kinds == ["Linear", "ReLU", "Linear", "ReLU", "Linear", "ReLU", "SeededDropout", "Linear"]


def test_bad_arguments(generator):
    layer = StationaryLayer(3, 10, generator=generator)
    with pytest.raises(ValueError, match="out_features parameter must be an integer of at least 1, got 0 instead"):
        Model(layer, 0, Gaussian())
    with pytest.raises(ValueError, match="out_features parameter must be at least 2 for classes, got 1 instead"):
        Model(layer, 1, Categorical())
    with pytest.raises(ValueError, match="extractor_precision parameter must be positive and finite, got 0 instead"):
        Model(layer, 1, Gaussian(), extractor_precision=0)
    with pytest.raises(ValueError, match="layer parameter must be a StationaryLayer, got Linear"):
        Model(nn.Linear(1, 3), 1, Gaussian())
    with pytest.raises(ValueError, match=r"likelihood parameter must be Gaussian\(\) or Categorical\(\), got <class"):
        Model(layer, 1, Gaussian)
    with pytest.raises(ValueError, match=r"num_data parameter must be at least the number of rows of x, 2, got 1\."):
        Model(layer, 1, Gaussian()).log_joint(torch.zeros(2, 3), torch.zeros(2, 1), num_data=1)
    with pytest.raises(
        ValueError, match=r"head '0' must be the last module of its nn.Sequential, but LogSoftmax comes after it"
    ):
        swap_head(nn.Sequential(nn.Linear(2, 2), nn.LogSoftmax(-1)), width=3)
    with pytest.raises(ValueError, match="noise parameter must be positive and finite, got 0 instead"):
        Gaussian(0)
    with pytest.raises(ValueError, match=r"noise parameter must be positive and finite, got tensor.*meta"):
        Gaussian(torch.tensor(1.0, device="meta"))
    with pytest.raises(
        ValueError, match=r"targets y must have the shape of the outputs, \(2, 1\), got torch.float32 of shape \(2,\)"
    ):
        Model(layer, 1, Gaussian()).log_likelihood(torch.zeros(2, 3), torch.zeros(2))
    with pytest.raises(ValueError, match=r"targets y must be integer class labels of shape \(2,\), got torch.float32"):
        Model(layer, 2, Categorical()).log_likelihood(torch.zeros(2, 3), torch.zeros(2))
    with pytest.raises(
        ValueError, match=r"network parameter must contain an nn.Linear to replace, got ReLU without one"
    ):
        swap_head(nn.ReLU(), width=3)
    with pytest.raises(
        ValueError, match=r"head parameter must name an nn.Linear of the network \(0\), got 'fc' instead"
    ):
        swap_head(nn.Sequential(nn.Linear(2, 2)), width=3, head="fc")
    with pytest.raises(
        ValueError, match=r"hidden parameter must name at least one width of 1 or more, got \(\) instead"
    ):
        mlp(3, ())


# ---------------------------------------------------------------------- intervals of columns


def test_intervals_are_those_of_scipys_piecewise_linear_interpolation(generator):
    x = torch.randn(500, 3, generator=generator, dtype=torch.float64)
    x[:, 1] = x[:, 1].round()  # whole numbers: an interval between neighbours
    beside = Intervals.of(x, 5, 100)
    new = 3 * torch.randn(200, 3, generator=generator, dtype=torch.float64)
    found = beside(new)
    assert (found[:, :3] == new).all()
    for column in range(3):
        own = found[:, 3:][:, beside.column == column] + 0.5
        values = x[:, column].round(decimals=4).float().unique().double().numpy()
        count = min(5, len(values) - 1)
        assert own.shape[1] == count
        knots = values[np.linspace(0, len(values) - 1, count + 1).round().astype(int)]
        # Together they count the intervals below a value.
        expected = interp1d(knots, np.arange(count + 1), bounds_error=False, fill_value=(0, count))(new[:, column])
        np.testing.assert_allclose(own.sum(1).numpy(), expected, atol=1e-9)
        assert ((own > 0) & (own < 1)).sum(1).max() <= 1


def test_a_column_of_two_values_has_no_intervals_and_three_have_two():
    column = torch.arange(12.0)
    x = torch.stack([torch.zeros(12), column % 2, column % 3], 1)
    assert Intervals.of(x, 16, 100).column.tolist() == [2, 2]
    assert (Intervals.of(x[:, :2], 16, 100)(x) == x).all()
    assert (Intervals.of(x, 0, 100)(x) == x).all()
    assert (Intervals.of(x, 16, 1)(x) == x).all()


def test_all_columns_together_stay_within_the_total():
    x = torch.stack([torch.arange(60.0) % number for number in (1, 2, 60, 60, 4)], 1) / 17
    assert Intervals.of(x, 16, 1000).column.bincount().tolist() == [0, 0, 16, 16, 3]
    assert Intervals.of(x, 16, 20).column.bincount().tolist() == [0, 0, 6, 6, 3]  # only those that have any share it
    assert len(Intervals.of(x, 16, 5).column) == 0


def test_values_that_differ_too_little_are_one():
    x = torch.tensor([0, 1e-6, 1, 1 + 1e-6, 2, 2 + 1e-5], dtype=torch.float64)[:, None]
    beside = Intervals.of(x, 16, 100)
    assert beside.left.tolist() == [0, 1]
    assert torch.isfinite(beside(1e6 * x)).all()


@pytest.mark.parametrize("end", [torch.nn.functional.relu, lambda z: torch.log_softmax(z, 1)])
def test_what_follows_the_swapped_layer_is_found_at_the_first_fit(end):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 2)

        def forward(self, x):
            return end(self.last(torch.tanh(self.first(x))))

    model, x = swap_head(Net(), width=20), torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="must end with the layer 'last' that swap_head replaced"):
        ClosedFormClassifier(model, x, torch.arange(12) % 2)
