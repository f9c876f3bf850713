"""Bias and wave in one operation: against plain operators, on a GPU by the kernel, elsewhere by the fall-back."""

import pytest
import torch
from torch import nn

from bochner import activations
from bochner.experiments.zoo import Shape, activation, build
from bochner.networks import SeededDropout, mlp
from bochner.training import fused
from bochner.training.map import Recipe, fit_map
from bochner.training.optimizers import Entry, StackedSGD, sgd
from bochner.training.parts import stacked

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WAVES = ["sin", "triangle", "periodic_relu", "relu", "local_rbf", "local_matern32", "local_matern52"]


def wave_of(name):
    return activation(name, "paper").wave


@pytest.mark.parametrize("name", WAVES)
def test_every_wave_of_the_tables_has_a_plan(name):
    assert fused.kernel_wave(wave_of(name)) is not None
    assert fused.kernel_wave(activations.erf().wave) is None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", WAVES)
def test_value_and_gradients_are_those_of_plain_operators(name, device, generator):
    """In float32 against float64; phases up to ±40."""
    wave = wave_of(name)
    u = 10 * torch.randn(3, 7, 130, generator=generator)
    bias, weight = torch.randn(3, 130, generator=generator), torch.randn(3, 7, 130, generator=generator)
    exact = [v.double().requires_grad_() for v in (u, bias)]
    expected = wave(exact[0] + exact[1][:, None])
    slopes = torch.autograd.grad((expected * weight).sum(), exact)
    own = [v.to(device).requires_grad_() for v in (u, bias)]
    found = fused.bias_wave(*own, wave)
    gradients = torch.autograd.grad((found * weight.to(device)).sum(), own)
    torch.testing.assert_close(found.double().cpu(), expected.detach(), rtol=1e-4, atol=2e-5)
    for gradient, slope in zip(gradients, slopes, strict=True):
        torch.testing.assert_close(gradient.double().cpu(), slope, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_relu_with_dropout_has_its_gradient(device, generator):
    u, bias = torch.randn(4, 70, 130, generator=generator), torch.randn(4, 130, generator=generator)
    weight = torch.randn(4, 70, 130, generator=generator).to(device)
    kept = (torch.rand(2, 70, 130, generator=generator) > 0.3).float().to(device) / 0.7
    group = torch.tensor([1, 0, 1, 1], device=device)
    plain, own = ([v.to(device).requires_grad_() for v in (u, bias)] for _ in range(2))
    expected = (plain[0] + plain[1][:, None]).relu() * kept[group]
    found = fused.bias_wave(*own, activations.relu().wave, dropout=fused.Dropout(kept, group, 1 / 0.7))
    torch.testing.assert_close(found, expected)
    slopes = torch.autograd.grad((expected * weight).sum(), plain)
    gradients = torch.autograd.grad((found * weight).sum(), own)
    for gradient, slope in zip(gradients, slopes, strict=True):
        torch.testing.assert_close(gradient, slope, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_a_product_of_bfloat16_is_summed_and_returned_in_float32(device, generator):
    x, weight = (torch.randn(3, n, 40, generator=generator).bfloat16().to(device) for n in (7, 5))
    exact = [v.detach().double().requires_grad_() for v in (x, weight)]
    expected = exact[0] @ exact[1].mT
    own = [v.requires_grad_() for v in (x, weight)]
    found = fused.wide_product(*own)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    slopes = torch.autograd.grad(expected.square().sum(), exact)
    gradients = torch.autograd.grad(found.square().sum(), own)
    for gradient, slope in zip(gradients, slopes, strict=True):
        torch.testing.assert_close(gradient.double(), slope, rtol=0.02, atol=0.2)


@pytest.mark.parametrize("device", DEVICES)
def test_stacked_sgd_is_torchs_for_every_member(device, generator):
    """Rates, momentum and weight decay over three steps; and the copy in bfloat16 follows."""
    start = torch.randn(3, 5, 40, generator=generator).to(device)
    gradients = torch.randn(3, 3, 5, 40, generator=generator).to(device)
    rates = [0.1, 0.2, 0.05]
    value, copy = start.clone(), start.bfloat16()
    optimizer = StackedSGD([Entry(value, rates, 0.3, copy)])
    theirs = [v.clone() for v in start]
    groups = [{"params": [v], "lr": rate, "weight_decay": 0.3} for v, rate in zip(theirs, rates, strict=True)]
    reference = sgd(groups)
    for factor, gradient in zip((1.0, 0.5, 0.25), gradients, strict=True):
        optimizer.set_factor(factor)
        optimizer.step([gradient])
        for group, rate, own, slope in zip(reference.param_groups, rates, theirs, gradient, strict=True):
            group["lr"], own.grad = factor * rate, slope.clone()
        reference.step()
    torch.testing.assert_close(value, torch.stack(theirs))
    torch.testing.assert_close(copy, value.bfloat16(), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("device", DEVICES)
def test_a_plain_sequence_is_that_of_vmap(device, generator):
    modules = [nn.Sequential(*mlp(4, (9, 8, 5), generator=generator), nn.ReLU()).to(device) for _ in range(3)]
    assert fused.is_plain(modules[0])
    assert not fused.is_plain(nn.Sequential(nn.BatchNorm1d(4)))
    assert not fused.is_plain(nn.Sequential(nn.Linear(4, 4, bias=False)))
    assert not fused.is_plain(nn.Sequential(nn.ReLU(), nn.Linear(4, 4)))
    tensors = {
        n: torch.stack([dict(m.named_parameters())[n] for m in modules]) for n, _ in modules[0].named_parameters()
    }
    place = next(str(i) for i, layer in enumerate(modules[0]) if isinstance(layer, SeededDropout))
    masks = (torch.rand(2, 6, 8, generator=generator) > 0.3).float().to(device)
    group = torch.tensor([0, 1, 0], device=device)
    x = torch.randn(3, 6, 4, generator=generator).to(device)
    found = fused.sequence(modules[0], tensors, x, {place: fused.Dropout(masks, group, 1.0)})
    torch.testing.assert_close(found, stacked(modules[0], tensors | {f"{place}.mask": masks[group]}, x))


@pytest.mark.parametrize("device", DEVICES)
def test_products_in_bfloat16_train_the_same_networks(device, monkeypatch):
    """Losses follow those in float32 to a few thousandths of what training gains; weights themselves are not rounded."""
    monkeypatch.setattr(fused, "multiplies_bfloat16", lambda device: device.type == "cpu" or fused.available())
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 5, generator=generator).to(device)
    y = x[:, :1].sin() + 0.1 * torch.randn(200, 1, generator=generator).to(device)
    fits, networks = {}, {}
    for precision in ("float32", "bfloat16"):
        shape = Shape("bochner", None, 50, (64, 32, 10), 3.0)
        networks[precision] = [build(name, 5, shape, 0).to(device) for name in ("rbf-sin", "rbf-tri")]
        recipe = Recipe(40, 50, sgd, [1e-3, 3e-4], 0.01, precision=precision)
        fits[precision] = fit_map(networks[precision], x, y, recipe, seed=[0, 1]).loss
    gained = fits["float32"][0] - fits["float32"][-1]
    difference = (fits["bfloat16"] - fits["float32"]).abs()
    assert bool((gained > 0.2).all())
    assert bool((difference.max(0).values < 0.02 * gained).all())
    assert bool((difference[-1] > 0).all())
    weight = networks["bfloat16"][0].extractor[0].weight
    assert weight.dtype == torch.float32
    assert not torch.equal(weight, weight.bfloat16().float())
