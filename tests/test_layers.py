"""The model layer as an ordinary module: shapes, transforms, state, prior."""

import math
import pickle

import pytest
import scipy.stats
import torch
from torch import nn

from bochner import RBF, Matern, StationaryLayer, activations, width_error
from bochner.priors import spectra

NAMES = list(activations.ACTIVATIONS)


def make(name="sin", **options):
    options = {"kernel": "matern32", "lengthscale": 0.7, "generator": torch.Generator().manual_seed(0), **options}
    return StationaryLayer(3, 8, activation=name, **options)


@pytest.mark.parametrize("name", NAMES)
def test_forward_is_the_formula(name, generator):
    layer = make(name, dtype=torch.float64, lengthscale=torch.tensor([0.5, 1.0, 2.0]))
    x = torch.randn(2, 5, 3, generator=generator, dtype=torch.float64)
    z = (x / torch.tensor([0.5, 1.0, 2.0])) @ layer.weight.T
    if layer.bias is not None:
        z = z + (
            2 * math.pi * torch.sigmoid(layer.bias) - math.pi if layer.activation.bias == "uniform" else layer.bias
        )
    torch.testing.assert_close(layer(x), layer.activation(z))
    assert layer(x).shape == (2, 5, 8)


def test_initial_linked_bias_is_uniform():
    layer = StationaryLayer(2, 20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert layer.linked_bias is not None
    uniform = scipy.stats.uniform(-math.pi, 2 * math.pi)
    assert scipy.stats.kstest(layer.linked_bias.detach().numpy(), uniform.cdf).pvalue > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_state_dict_round_trip(name, generator):
    first, second = make(name), make(name, generator=torch.Generator().manual_seed(5))
    second.load_state_dict(first.state_dict())
    x = torch.randn(4, 3, generator=generator)
    torch.testing.assert_close(first(x), second(x), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["sin", "paired", "triangle", "periodic_relu", "local_matern"])
def test_compile_agrees_with_eager_forward_and_backward(name, generator):
    layer = make(name)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(6, 3, generator=generator)
    expected = torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
    actual = torch.autograd.grad(compiled(x).square().sum(), list(layer.parameters()))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_a_stack_of_layers_under_vmap_equals_each_alone(name, generator):
    # In float64: single-precision products differ by more between batched and single ones on some processors.
    layers = [make(name, generator=torch.Generator().manual_seed(seed)).double() for seed in range(3)]
    params, buffers = torch.func.stack_module_state(layers)
    x = torch.randn(3, 5, 3, generator=generator, dtype=torch.float64)

    def loss(params, x):
        return torch.func.functional_call(layers[0], (params, buffers), (x,)).square().sum()

    stacked = torch.func.vmap(torch.func.grad(loss))(params, x)
    for i, layer in enumerate(layers):
        alone = torch.autograd.grad(layer(x[i]).square().sum(), list(layer.parameters()), allow_unused=True)
        for name_, grad in zip(dict(layer.named_parameters()), alone, strict=True):
            torch.testing.assert_close(
                stacked[name_][i], torch.zeros_like(stacked[name_][i]) if grad is None else grad, rtol=1e-9, atol=1e-9
            )


def test_autocast_keeps_the_phase_in_full_precision(generator):
    layer = make("sin")
    x = 10 * torch.randn(50, 3, generator=generator)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = layer(x)
    torch.testing.assert_close(inside, layer(x), rtol=0, atol=1e-6)
    assert layer(x.to(torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype(dtype):
    layer = make(dtype=dtype)
    assert {p.dtype for p in layer.parameters()} == {dtype}
    assert layer(torch.zeros(1, 3, dtype=dtype)).dtype == dtype


@pytest.mark.gpu
def test_cuda_equals_cpu(generator):
    cpu, gpu = make(dtype=torch.float64), make(dtype=torch.float64, device="cuda")
    x = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(gpu(x.cuda()).cpu(), cpu(x))


@pytest.mark.parametrize("name", ["sin", "sincos", "relu"])
@pytest.mark.parametrize("ard", [False, True])
def test_log_prior_is_the_sum_of_densities(name, ard):
    lengthscale = torch.tensor([0.5, 1.0, 2.0]) if ard else 0.7
    layer = make(name, dtype=torch.float64, lengthscale=lengthscale)
    scale = layer.lengthscale.detach().numpy()
    expected = scipy.stats.multivariate_t([0, 0, 0], shape=1, df=3).logpdf(layer.weight.detach().numpy()).sum()
    expected += scipy.stats.gamma(2, scale=1 / 0.5).logpdf(scale).sum()
    if name == "sin":
        expected += 8 * scipy.stats.uniform(-math.pi, 2 * math.pi).logpdf(0)
    if name == "relu":
        assert layer.bias is not None
        expected += scipy.stats.norm.logpdf(layer.bias.detach().numpy()).sum()
    assert layer.log_prior().item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kernel", [RBF(), Matern(1.5), Matern(2.5, product=True)])
@pytest.mark.parametrize("name", ["sin", "sincos", "relu"])
def test_slopes_of_the_log_prior_are_its_gradients(name, kernel, generator):
    """The closed forms against autograd, for one layer and for two stacked ones; a flat prior has no slope."""
    options = {
        "kernel": kernel,
        "activation": name,
        "lengthscale": torch.tensor([0.5, 2.0, 3.0]),
        "generator": generator,
    }
    layers = [StationaryLayer(3, 8, **options, dtype=torch.float64) for _ in range(2)]
    own = [dict(layer.named_parameters()) for layer in layers]
    stacked = {n: torch.stack([p[n].detach() for p in own]) for n in own[0]}
    slopes = layers[0].log_prior_slopes(stacked)
    for i, layer in enumerate(layers):
        gradients = torch.autograd.grad(layer.log_prior(), list(own[i].values()), allow_unused=True)
        for n, gradient in zip(own[i], gradients, strict=True):
            if gradient is None:
                assert n not in slopes
            else:
                torch.testing.assert_close(slopes[n][i], gradient, msg=n)
                torch.testing.assert_close(layer.log_prior_slopes({n: own[i][n].detach()})[n], gradient)
    torch.testing.assert_close(
        spectra.Spectrum.weight_score(kernel, stacked["weight"]), kernel.weight_score(stacked["weight"])
    )


def test_jacobian_is_the_derivative_of_the_links():
    layer = make("sin", dtype=torch.float64)
    assert layer.bias is not None
    slope = torch.func.vmap(torch.func.grad(lambda raw: 2 * math.pi * torch.sigmoid(raw) - math.pi))(
        layer.bias.detach()
    )
    expected = slope.log().sum() + layer.log_lengthscale.exp().log()
    actual = layer.log_prior(jacobian=True) - layer.log_prior()
    assert actual.item() == pytest.approx(expected.item(), rel=1e-12)


def test_width_error_shrinks_with_width_and_is_zero_for_paired(generator):
    x = torch.linspace(-2, 2, 20, dtype=torch.float64)[:, None]

    def error(width, name):
        layer = StationaryLayer(
            1, width, activation=name, generator=torch.Generator().manual_seed(0), dtype=torch.float64
        )
        return width_error(layer, x, generator=generator)

    assert error(20_000, "sin").kernel < error(20, "sin").kernel / 5
    assert error(20_000, "sin").stationarity < error(20, "sin").stationarity / 5
    assert error(20, "paired").stationarity < 1e-12
    assert error(20, "sincos").stationarity > 0.1


def test_trains_inside_any_module(generator):
    """A few steps of Adam fit a sine; the lengthscale moves too."""
    layer = StationaryLayer(1, 64, kernel=RBF(), generator=generator)
    net = nn.Sequential(layer, nn.Linear(64, 1))
    x = torch.linspace(-2, 2, 50)[:, None]
    y = torch.sin(3 * x)
    before = layer.lengthscale.item()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(200):
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        optimizer.step()
    assert loss.item() < 1e-2
    assert layer.lengthscale.item() != before


@pytest.mark.parametrize("name", NAMES)
def test_a_whole_layer_can_be_pickled(name, generator):
    layer = make(name)
    x = torch.randn(4, 3, generator=generator)
    torch.testing.assert_close(pickle.loads(pickle.dumps(layer))(x), layer(x), rtol=0, atol=0)


def test_repr_names_the_prior():
    assert "kernel=Matern(nu=1.5, product=False), activation='sin'" in repr(make())


def test_bad_arguments(generator):
    with pytest.raises(ValueError, match="out_features parameter must be an integer of at least 1, got 0 instead"):
        StationaryLayer(3, 0)
    with pytest.raises(ValueError, match="in_features parameter must be an integer of at least 1, got 0 instead"):
        StationaryLayer(0, 3)
    with pytest.raises(ValueError, match=r"out_features parameter must be an integer of at least 1, got 8\.5 instead"):
        StationaryLayer(3, 8.5)
    with pytest.raises(
        ValueError, match=r"dtype parameter must be torch.float32 or torch.float64.*got torch.float16 instead"
    ):
        StationaryLayer(3, 8, dtype=torch.float16)
    if not torch.cuda.is_available():
        with pytest.raises(
            ValueError, match=r"device parameter asks for a GPU \(cuda\), but torch sees none; use device='cpu'"
        ):
            StationaryLayer(3, 8, device="cuda")
    with pytest.raises(ValueError, match="shifts parameter must be an integer of at least 1, got 0 instead"):
        width_error(make(), torch.zeros(2, 3), shifts=0)
    with pytest.raises(ValueError, match=r"out_features parameter must be even under 'paired'.*got 7 instead"):
        StationaryLayer(3, 7, activation="paired")
    with pytest.raises(ValueError, match=r"lengthscale parameter must be positive and finite.*got nan instead"):
        StationaryLayer(3, 8, lengthscale=math.nan)
    with pytest.raises(ValueError, match="lengthscale parameter must be a number or 3 numbers, got 2 instead"):
        StationaryLayer(3, 8, lengthscale=torch.ones(2))
    with pytest.raises(ValueError, match=r"got 'sign' instead\. Did you mean 'sin'\?"):
        StationaryLayer(3, 8, activation="sign")
    with pytest.raises(ValueError, match="nu parameter must be positive and finite, got 0 instead"):
        StationaryLayer(3, 8, kernel=Matern(0))
    with pytest.raises(ValueError, match=r"layer expects 3 input features in x, got an input of shape \(5, 4\)"):
        make()(torch.zeros(5, 4))
    with pytest.raises(ValueError, match=r"x parameter must have at least 1 row, got shape \(0, 3\) instead"):
        width_error(make(), torch.zeros(0, 3), generator=generator)
