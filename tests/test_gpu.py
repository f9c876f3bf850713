"""What only a GPU shows: training as a graph, kernels, and numbers that agree with those of a CPU."""

import pytest
import torch

from bochner import ClosedForm, ClosedFormClassifier, Laplace, Snapshots, Swag
from bochner.experiments.zoo import MODELS, Shape, build
from bochner.predictive import GaussianPredictive
from bochner.training import Recipe, fit_map, fused, stack
from bochner.training.optimizers import adam, sgd
from problems import classification, data, regression

pytestmark = pytest.mark.gpu


def values_of(answer):
    gaussian = isinstance(answer, GaussianPredictive)
    return (answer.mean, answer.f_variance) if gaussian else (answer.log_probabilities, answer.expected_entropy)


def test_triton_is_there():
    assert fused.available()


@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("batch_size", [10, 16])  # batches of one size, and of two
def test_training_as_graphs_is_training_step_by_step(optimizer, batch_size, generator, monkeypatch):
    """The same steps on the same batches and dropout masks: losses and parameters agree to rounding."""
    x, y = (torch.randn(40, width, generator=generator).cuda() for width in (3, 1))
    captured, capture = [], stack.Stack._capture
    recipe = Recipe(3, batch_size, optimizer, 1e-3, 0.01)

    def trained():
        nets = [build("matern32-tri", 3, Shape("paper", None, 30, (20, 16, 5)), seed).cuda() for seed in range(2)]
        return fit_map(nets, x, y, recipe, seed=[0, 1]), nets

    monkeypatch.setattr(stack.Stack, "_capture", lambda self, rows: captured.append(rows) or capture(self, rows))
    graphs, first = trained()
    assert sorted(captured) == ([10] if batch_size == 10 else [8, 16])
    monkeypatch.setattr(stack.Stack, "_capture", lambda self, rows: lambda: self._step(rows))
    steps, second = trained()
    torch.testing.assert_close(graphs.loss, steps.loss, rtol=1e-5, atol=1e-6)
    for one, other in zip(first, second, strict=True):
        for p, q in zip(one.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-3), ("tf32", 1e-2), ("bfloat16", 3e-2)])
@pytest.mark.parametrize("name", ["relu", "rbf-sin", "matern32-tri", "rbf-prelu", "local-matern52", "local-rbf"])
def test_training_on_a_gpu_is_that_on_a_cpu(name, precision, tolerance, generator):
    x, y = torch.randn(40, 3, generator=generator), torch.randn(40, 1, generator=generator)
    assert name in MODELS
    shape = Shape("paper", None, 30, (20, 16, 5))
    nets = {d: [build(name, 3, shape, s).to(d) for s in range(2)] for d in ("cpu", "cuda")}
    for device, members in nets.items():
        fit_map(members, x.to(device), y.to(device), Recipe(3, 10, sgd, 1e-3, 0.01, precision=precision), seed=[0, 1])
    for cpu, gpu in zip(nets["cpu"], nets["cuda"], strict=True):
        for (n, p), q in zip(cpu.named_parameters(), gpu.parameters(), strict=True):
            torch.testing.assert_close(q.cpu(), p, rtol=tolerance, atol=0.1 * tolerance, msg=n)


@pytest.mark.parametrize("name", ["closed form", "kfac", "full", "swag"])
@pytest.mark.parametrize("classes", [None, 3])
def test_predictions_on_a_gpu_are_those_on_a_cpu(name, classes):
    """Posteriors of the same network on the same rows, in float64."""
    x, y = data(30, classes=classes)
    makers = {
        "closed form": ClosedFormClassifier if classes else ClosedForm,
        "kfac": Laplace,
        "full": lambda *a: Laplace(*a, structure="full"),
        "swag": lambda *a: Swag(*a, Snapshots(1e-3, 4, 2)),
    }
    answers = []
    for device in ("cpu", "cuda"):
        model = (classification if classes else regression)(hidden=(5, 4), width=8).to(device)
        posterior = makers[name](model, x.to(device), y.to(device))
        draws = {"generator": torch.Generator().manual_seed(0)} if name == "swag" else {}
        answers.append(values_of(posterior.predict(x[:9].to(device), **draws)))
    for cpu, gpu in zip(*answers, strict=True):
        torch.testing.assert_close(gpu.cpu(), cpu, rtol=1e-6, atol=1e-8)
