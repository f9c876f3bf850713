"""Bias and wave in one operation: against plain operators, on a GPU by the kernel, elsewhere by the fall-back."""

import pytest
import torch
from torch import nn
from torch.func import vmap

from bochner import activations, fused
from bochner.engine import stacked
from bochner.experiments.zoo import MODELS, activation, build
from bochner.networks import SeededDropout, mlp
from bochner.training import Recipe, fit_map, sgd

GPU = pytest.mark.skipif(not fused.available(), reason="needs a GPU and Triton")
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
WAVES = ["sin", "triangle", "periodic_relu", "relu", "local_rbf", "local_matern32", "local_matern52"]


def wave_of(name):
    return activation(name, "paper").wave


@pytest.mark.parametrize("name", WAVES)
def test_every_wave_of_the_tables_has_a_plan(name):
    assert fused.plan(wave_of(name)) is not None
    assert fused.plan(activations.erf().wave) is None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", WAVES)
def test_value_and_gradients_are_those_of_plain_operators(name, device, generator):
    """In float32 against float64, under vmap and as a stack; phases up to ±40."""
    wave = wave_of(name)
    u = 10 * torch.randn(3, 7, 130, generator=generator)
    bias, weight = torch.randn(3, 130, generator=generator), torch.randn(3, 7, 130, generator=generator)
    exact = [v.double().requires_grad_() for v in (u, bias)]
    expected = wave(exact[0] + exact[1][:, None])
    slopes = torch.autograd.grad((expected * weight).sum(), exact)
    for run in (fused.bias_wave, vmap(fused.bias_wave, in_dims=(0, 0, None))):
        own = [v.to(device).requires_grad_() for v in (u, bias)]
        found = run(*own, wave)
        gradients = torch.autograd.grad((found * weight.to(device)).sum(), own)
        torch.testing.assert_close(found.double().cpu(), expected.detach(), rtol=1e-4, atol=2e-5)
        for gradient, slope in zip(gradients, slopes, strict=True):
            torch.testing.assert_close(gradient.double().cpu(), slope, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_a_plain_sequence_is_that_of_vmap(device, generator):
    modules = [nn.Sequential(*mlp(4, (9, 8, 5), generator=generator), nn.ReLU()).to(device) for _ in range(3)]
    assert fused.is_plain(modules[0])
    assert not fused.is_plain(nn.Sequential(nn.BatchNorm1d(4)))
    assert not fused.is_plain(nn.Sequential(nn.Linear(4, 4, bias=False)))
    numbers = {
        n: torch.stack([dict(m.named_parameters())[n] for m in modules]) for n, _ in modules[0].named_parameters()
    }
    place = next(str(i) for i, layer in enumerate(modules[0]) if isinstance(layer, SeededDropout))
    numbers[f"{place}.mask"] = (torch.rand(3, 6, 8, generator=generator) > 0.3).float().to(device)
    x = torch.randn(3, 6, 4, generator=generator).to(device)
    torch.testing.assert_close(fused.sequence(modules[0], numbers, x), stacked(modules[0], numbers, x))


@GPU
@pytest.mark.parametrize("name", ["relu", "rbf-sin", "matern32-tri", "rbf-prelu", "local-matern52", "local-rbf"])
def test_training_on_a_gpu_is_that_on_a_cpu(name, generator):
    x, y = torch.randn(40, 3, generator=generator), torch.randn(40, 1, generator=generator)
    assert name in MODELS
    shape = {"protocol": "paper", "hidden": (20, 16, 5), "width": 30}
    nets = {d: [build(name, 3, None, seed=s, **shape).to(d) for s in range(2)] for d in ("cpu", "cuda")}
    for device, own in nets.items():
        fit_map(own, x.to(device), y.to(device), Recipe(3, 10, sgd, 1e-3, 0.01), seed=[0, 1])
    for cpu, gpu in zip(nets["cpu"], nets["cuda"], strict=True):
        for (n, p), q in zip(cpu.named_parameters(), gpu.parameters(), strict=True):
            torch.testing.assert_close(q.cpu(), p, rtol=1e-3, atol=1e-4, msg=n)
