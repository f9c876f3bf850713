"""Odd calls of layers, networks, training and posteriors: each gives a right result or an error that names the argument.

A call that works gets one or two odd arguments: another type or shape, NaN, nothing, a huge or negative number, an unknown name. It
must then give finite numbers of the right shape, or raise a ValueError or TypeError whose message holds the argument's name.

    python tests/fuzz_posteriors.py --seconds 60 --seed 0

prints how many calls of each class were accepted, refused or wrong, and exits with 1 where any was wrong.
"""

import argparse
import random
import re
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from bochner import (
    ClosedForm,
    ClosedFormClassifier,
    Gaussian,
    Laplace,
    Model,
    Recipe,
    StationaryLayer,
    Swag,
    fit_map,
    metrics,
    networks,
    swap_head,
    tune_marginal,
    width_error,
)
from bochner.layers import OutputLayer
from bochner.posteriors.closed_form_classifier import Solver
from bochner.posteriors.gp import GaussianProcess, GaussianProcessClassifier
from bochner.posteriors.samples import Sampling
from bochner.posteriors.slices import slice_sample
from bochner.posteriors.swag import Snapshots
from bochner.predictive import CategoricalPredictive, GaussianPredictive, Predictive
from bochner.priors.spectra import Matern
from bochner.training import StackRows, fit_stacks
from problems import classification, data, regression

ROWS, COLUMNS, CLASSES, WIDTH = 12, 3, 3, 6  # of the problems
NOT_FINITE = (float("nan"), float("inf"), -float("inf"))


def rows(num: int = ROWS) -> Tensor:
    return data(num)[0]


def targets() -> Tensor:
    return data(ROWS)[1]


def labels() -> Tensor:
    return torch.arange(ROWS) % CLASSES


def regressor() -> Model:
    return regression(width=WIDTH, hidden=(4, 3))


def classifier() -> Model:
    return classification(width=WIDTH, hidden=(4, 3), classes=CLASSES)


def odd_tensors(valid: Tensor) -> dict[str, Any]:
    """Odd values for inputs or targets."""
    floats = valid if valid.is_floating_point() else valid.double()
    spoilt = {str(v): floats.clone() for v in NOT_FINITE}
    for name, value in spoilt.items():
        value.view(-1)[1] = float(name)
    return spoilt | {
        "none": None,
        "list": valid.tolist(),
        "array": valid.numpy(),
        "text": "rows",
        "number": 3,
        "mapping": {"rows": valid},
        "generator": (row for row in valid),
        "no rows": valid[:0],
        "no dimension": valid.flatten()[0],
        "flat": valid.flatten(),
        "one dimension more": valid[..., None],
        "one dimension before": valid[None],
        "fewer rows": valid[:-1],
        "more rows": torch.cat([valid, valid[:1]]),
        "twice as wide": torch.cat([valid, valid], -1),
        "no columns": valid.reshape(len(valid), -1)[:, :0],
        "first column": valid.reshape(len(valid), -1)[:, 0],
        "float32": valid.float(),
        "float16": valid.half(),
        "bfloat16": valid.bfloat16(),
        "complex": valid.to(torch.complex128),
        "boolean": valid > 0,
        "integer": valid.long(),
        "small integers": valid.abs().to(torch.uint8),
        "negative": -valid - 1,
        "large": valid * 7 + 5,
        "huge": floats * 1e300,
        "requires grad": floats.clone().requires_grad_(),
        "not contiguous": torch.stack([valid, valid], -1)[..., 0],
        "sparse": floats.to_sparse(),
        "meta": valid.to("meta"),
        "zeros": torch.zeros_like(valid),
    }


ODD_STEPS = (
    0,
    -1,
    1.5,
    "3",
    None,
    float("nan"),
    float("inf"),
    [1],
    (),
    torch.tensor(2),
    torch.tensor([1, 2]),
    np.int64(2),
    1j,
)
ODD_WHOLE = (*ODD_STEPS, 2**70)
ODD_POSITIVE = (
    0,
    -1.0,
    *NOT_FINITE,
    "1",
    None,
    [],
    [1.0, 2.0],
    {},
    torch.ones(()),
    torch.ones(2),
    10**400,
    1e300,
    5e-324,
    1j,
    np.float32(2),
)
ODD_NAMES = ("", "nonsense", "KFAC", 3, None, 1.5, ["kfac"], object(), b"rbf", nn.Linear)
ODD_MODELS = (None, "model", 3, [], (), [None], {}, Model, nn.Linear(3, 1), torch.ones(3))
ODD_GENERATORS = (3, "seed", random.Random(0), np.random.default_rng(0), torch.ones(2))
ODD_SEEDS = ("seed", 1.5, [], [1, 2, 3], None, float("nan"), 2**70, ["a"], torch.ones(2))
ODD_RANGES = (*ODD_POSITIVE, 2.0, 1.0, -0.5)
ODD_DTYPES = (torch.int64, torch.float16, torch.complex128, "float64", "float16", 3, np.float64)
ODD_DEVICES = ("gpu", "cuda:99", "cuda", 3.5, "", ["cpu"], "tpu")
ODD_MODULES = ("network", 3, nn.ReLU(), nn.Sequential(), [], nn.Linear, nn.Sequential(nn.Linear(3, 2), nn.ReLU()), {})


def odd_loaders(regress: bool) -> dict[str, Any]:
    """Odd loaders in the place of inputs."""
    x, y = rows(), targets() if regress else labels()
    pairs = [(x[:6], y[:6]), (x[6:], y[6:])]
    return {
        "empty": [],
        "generator": (pair for pair in pairs),
        "inputs alone": [x],
        "empty batch": [pairs[0], (x[:0], y[:0])],
        "no pairs": [(), ()],
        "numbers": [1, 2],
        "texts": ["ab", "cd"],
        "mappings without targets": [{"pixels": x}],
        "mappings": [{"pixels": x, "labels": y}],
        "rows differ": [(x, y[:-1])],
        "columns differ": [pairs[0], (x[6:, :2], y[6:])],
        "arrays": [(x.numpy(), y.numpy())],
        "lists": [(x.tolist(), y.tolist())],
        "three": [(x, x, y)],
        "nan": [pairs[0], (x[6:] * float("nan"), y[6:])],
        "text targets": [(x, "labels")],
        "none targets": [(x, None)],
        "batches that are lists": [list(pair) for pair in pairs],
        "text": "loader",
        "number": 3,
        "mapping": {"x": x},
    }


@dataclass
class Call:
    """A call that works, as named arguments, and the odd values of each argument.

    Attributes:
        name: Name of what is called.
        run: Makes the call and checks its result.
        valid: Values of the arguments with which it works, made anew for every call.
        odd: For each argument odd values, made from the valid one.
        ways: Other names that an error may use for an argument.
    """

    name: str
    run: Callable[..., Any]
    valid: Callable[[], dict[str, Any]]
    odd: dict[str, Callable[[Any], Any]]
    ways: dict[str, str] = field(default_factory=dict)


def values(*odd: Any) -> Callable[[Any], dict[str, Any]]:
    """Odd values that do not depend on the valid one."""
    return lambda _: {f"{number}: {' '.join(repr(value).split())[:40]}": value for number, value in enumerate(odd)}


def passed_on(valid: Tensor) -> dict[str, Any]:
    """Odd values for the forward pass of a module or a density: those that are not finite are passed on, as torch does."""
    return {name: value for name, value in odd_tensors(valid).items() if name not in (*map(str, NOT_FINITE), "huge")}


WHOLE, POSITIVE, NAMES, GENERATORS = (
    values(*ODD_WHOLE),
    values(*ODD_POSITIVE),
    values(*ODD_NAMES),
    values(*ODD_GENERATORS),
)
MODELS, SEEDS = values(*ODD_MODELS), values(*ODD_SEEDS)
STEPS = values(*ODD_STEPS)  # of numbers of steps: without those that are merely slow


def finite(value: Tensor, *shape: int) -> None:
    """Asserts that a tensor is finite, and its shape where one is given."""
    assert not shape or value.shape == shape, f"shape {tuple(value.shape)}, expected {shape}"
    assert bool(torch.isfinite(value).all()), "not finite"


def answers(posterior: Any, outputs: int | None = 1, x: Tensor | None = None, **options: Any) -> Predictive:
    """The prediction of a posterior, after checking it."""
    x = rows(5) if x is None else x
    answer = posterior.predict(x, **options)
    sound(answer, len(x) if isinstance(x, Tensor) else None, outputs)
    return answer


def sound(answer: Predictive, num: int | None, outputs: int | None) -> None:
    """Asserts that a prediction holds finite numbers of the right shape, as far as it is known."""
    value = answer.mean if isinstance(answer, GaussianPredictive) else answer.probabilities
    finite(value, value.shape[-2] if num is None else num, value.shape[-1] if outputs is None else outputs)
    assert answer.entropy.shape == value.shape[:-1]
    finite(answer.marginal_variance)
    assert bool((answer.ood_score >= 0).all())


def trained(fit: Any, *models: Model) -> None:
    """Asserts that training gave finite losses, or said that it diverged, and finite parameters in any case."""
    assert bool((torch.isfinite(fit.loss).all(0) | fit.diverged).all())
    for model in models:
        for parameter in model.parameters():
            finite(parameter)


FITTED: dict[str, Any] = {}  # posteriors that calls of predict share


def fitted(name: str) -> Any:
    """A posterior that several calls share."""
    if name not in FITTED:
        torch.manual_seed(0)
        x, y, c = rows(), targets(), labels()
        drawn = {
            n: p.detach().expand(1, 4, *p.shape).clone()
            for n, p in regressor().named_parameters()
            if "extractor" not in n
        }
        from bochner.posteriors.samples import Sampled

        makers = {
            "ClosedForm": lambda: ClosedForm(regressor(), x, y),
            "ClosedFormClassifier": lambda: ClosedFormClassifier(classifier(), x, c),
            "Laplace": lambda: Laplace(regressor(), x, y),
            "Laplace classes": lambda: Laplace(classifier(), x, c),
            "Swag": lambda: Swag(regressor(), x, y, Snapshots(1e-3, 3, 2)),
            "Swag classes": lambda: Swag(classifier(), x, c, Snapshots(1e-3, 3, 2)),
            "GaussianProcess": lambda: GaussianProcess(Matern(1.5), x, y),
            "GaussianProcessClassifier": lambda: GaussianProcessClassifier(Matern(1.5), x, c, steps=1),
            "Sampled": lambda: Sampled(regressor(), drawn, divergences=0, leapfrog_steps=0),
        }
        FITTED[name] = makers[name]()
    return FITTED[name]


def regression_arguments(**more: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"model": regressor(), "x": rows(), "y": targets(), **more}


def class_arguments(**more: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"model": classifier(), "x": rows(), "y": labels(), **more}


RECIPE = {"epochs": 2, "batch_size": 5, "lr": 1e-3}
DATA = {"model": MODELS, "x": odd_tensors, "y": odd_tensors}


def _run_recipe(**fields: Any) -> None:
    model = regressor()
    trained(fit_map(model, rows(), targets(), Recipe(**(RECIPE | fields))), model)


def _run_layer(**arguments: Any) -> None:
    layer = StationaryLayer(**arguments)
    finite(layer(torch.ones(2, layer.in_features, dtype=layer.weight.dtype)), 2, layer.out_features)
    finite(layer.log_prior())


def _run_model(**arguments: Any) -> None:
    model = Model(**arguments)
    extra = (
        model.extractor[0].in_features
        if isinstance(model.extractor, nn.Sequential) and len(model.extractor)
        else COLUMNS
    )
    finite(model(torch.ones(2, extra, dtype=torch.float64)), 2, arguments["out_features"])
    finite(model.log_prior())


def _run_swapped(**arguments: Any) -> None:
    finite(swap_head(**arguments)(torch.ones(2, COLUMNS)))


def _run_fit(**arguments: Any) -> None:
    trained(fit_map(recipe=Recipe(**RECIPE), **arguments), arguments["model"])


def _run_stacks(**arguments: Any) -> None:
    model = arguments.pop("model")
    models = [regressor() for _ in range(2)] if isinstance(model, Model) else model
    seed = arguments.pop("seed")
    trained(fit_stacks(models, StackRows(**arguments), Recipe(**RECIPE), seed=seed), *models)


def _run_swag(model: Any, x: Any, y: Any, **settings: Any) -> None:
    answers(Swag(model, x, y, Snapshots(**settings)))


def _run_classifier(model: Any, x: Any, y: Any, samples: Any, generator: Any, **settings: Any) -> None:
    answers(ClosedFormClassifier(model, x, y, samples=samples, solver=Solver(**settings), generator=generator), CLASSES)


def _run_process(steps: Any, lr: Any, **arguments: Any) -> None:
    answers(GaussianProcess(**arguments).tune(steps=steps, lr=lr))


def _run_class_process(samples: Any, **arguments: Any) -> None:
    arguments = {name: value for name, value in arguments.items() if name not in ("amplitude", "lr")}
    answers(GaussianProcessClassifier(**arguments), None, samples=samples)


def _run_tune(**arguments: Any) -> None:
    history = tune_marginal(**arguments)
    assert all(np.isfinite(history))


def _run_tune_prior(**arguments: Any) -> None:
    posterior = Laplace(classifier(), rows(), labels())
    assert all(m > 0 for m in posterior.tune_prior(**arguments))
    answers(posterior, CLASSES)


def _run_set_prior(**arguments: Any) -> None:
    posterior = Laplace(regressor(), rows(), targets())
    posterior.set_prior(**arguments)
    answers(posterior)


def _run_update(**arguments: Any) -> None:
    posterior = ClosedForm(regressor(), rows(), targets())
    posterior.update(**arguments)
    answers(posterior)


def _run_sampling(**arguments: Any) -> None:
    sampling = Sampling(**({"warmup": 1, "samples": 4, "chains": 2} | arguments))
    if sampling.warmup + sampling.samples < 50 and sampling.chains < 10:
        answers(slice_sample(regression(width=3), rows(), targets(), sampling))


def _run_draws(**arguments: Any) -> None:
    finite(fitted("ClosedForm").sample(**arguments))


def _run_slices(**arguments: Any) -> None:
    answers(slice_sample(sampling=Sampling(warmup=1, samples=4, chains=2), **arguments))


def _run_metric(name: str) -> Callable[..., None]:
    return lambda **arguments: finite(torch.tensor(getattr(metrics, name)(**arguments)))


def _run_network(make: Callable[..., nn.Module], *shape: int) -> Callable[..., None]:
    def run(**arguments: Any) -> None:
        finite(make(**arguments).eval()(torch.ones(shape)))

    return run


def _predictions() -> list[Call]:
    """Calls of ``predict`` with odd inputs."""
    calls = []
    for name in ("ClosedForm", "Laplace", "Swag", "GaussianProcess", "Sampled"):

        def run(name=name, **a):
            return answers(fitted(name), **a)

        calls.append(Call(f"{name}.predict", run, lambda: {"x": rows(5)}, {"x": odd_tensors}))
    for name in ("ClosedFormClassifier", "Laplace classes", "Swag classes", "GaussianProcessClassifier"):

        def run(name=name, **a):
            return answers(fitted(name), CLASSES, **a)

        calls.append(Call(f"{name}.predict", run, lambda: {"x": rows(5)}, {"x": odd_tensors}))

    def loaders(_):
        return {
            k: [b[0] if isinstance(b, tuple) and b else b for b in v] if isinstance(v, list) else v
            for k, v in odd_loaders(True).items()
        }

    for name in ("ClosedForm", "Laplace", "Swag"):

        def run(name=name, **a):
            return answers(fitted(name), **a)

        calls.append(
            Call(
                f"{name}.predict of a loader", run, lambda: {"x": [rows(5)]}, {"x": loaders}, {"x": "x|[Bb]atch|loader"}
            )
        )
    options: dict[str, dict[str, Any]] = {
        "Laplace classes": {"samples": WHOLE, "chunk": WHOLE, "generator": GENERATORS},
        "Swag": {"num": WHOLE, "group": WHOLE, "generator": GENERATORS},
        "Sampled": {"thin": WHOLE, "group": WHOLE},
        "ClosedFormClassifier": {"chunk": WHOLE},
    }
    good = {"samples": 4, "chunk": 8, "num": 3, "group": 2, "thin": 1, "generator": torch.Generator()}
    for name, odd in options.items():
        outputs = CLASSES if "lass" in name else 1

        def run(name=name, outputs=outputs, **a):
            return answers(fitted(name), outputs, **a)

        calls.append(Call(f"{name}.predict", run, lambda odd=odd: {k: good[k] for k in odd}, odd))
    drawn = {"x": odd_tensors, "num": WHOLE, "group": WHOLE, "generator": GENERATORS}

    def run(**a):
        return sound(fitted("Laplace").predict_samples(**a), len(a["x"]), 1)

    calls.append(
        Call(
            "Laplace.predict_samples",
            run,
            lambda: {"x": rows(5), "num": 3, "group": 2, "generator": torch.Generator()},
            drawn,
        )
    )
    return calls


def _fits() -> list[Call]:
    """Calls that learn from rows."""
    loaders = {kind: lambda _, kind=kind: odd_loaders(kind) for kind in (True, False)}
    batch = {"x": "x|y|[Bb]atch|loader", "y": "y|x|loader"}
    lists = {"model": "model|networks|models", "models": "models|model"}
    makers: dict[str, Any] = {"ClosedForm": ClosedForm, "Laplace": Laplace}
    calls = [
        Call(n, lambda make=m, **a: answers(make(**a)), regression_arguments(), DATA, lists) for n, m in makers.items()
    ]
    makers = {"ClosedFormClassifier": ClosedFormClassifier, "Laplace classes": Laplace}
    calls += [
        Call(n, lambda make=m, **a: answers(make(**a), CLASSES), class_arguments(), DATA, lists)
        for n, m in makers.items()
    ]
    makers = {
        "ClosedForm": ClosedForm,
        "Laplace": Laplace,
        "Swag": lambda **a: Swag(snapshots=Snapshots(1e-3, 2, 2), **a),
    }
    for name, make in makers.items():

        def run(make=make, **a):
            return answers(make(**a))

        calls.append(
            Call(
                f"{name} from a loader",
                run,
                lambda: {"model": regressor(), "x": [(rows(), targets())]},
                {"x": loaders[True]},
                batch,
            )
        )

    def run(**a):
        return answers(ClosedFormClassifier(**a), CLASSES)

    calls.append(
        Call(
            "ClosedFormClassifier from a loader",
            run,
            lambda: {"model": classifier(), "x": [(rows(), labels())]},
            {"x": loaders[False]},
            batch,
        )
    )

    def run(**a):
        return _run_fit(**a)

    for regress, make in ((True, regressor), (False, classifier)):
        calls.append(
            Call(
                "fit_map from a loader",
                run,
                lambda make=make, r=regress: {"model": make(), "x": [(rows(), targets() if r else labels())]},
                {"x": loaders[regress]},
                batch,
            )
        )
    index = values(
        None,
        [[1, 2]],
        torch.ones(1, 2),
        torch.tensor([1, 2]),
        torch.tensor([[0, 99]]),
        torch.tensor([[-1, 0]]),
        torch.tensor([[0, 1], [1, 2]]),
        torch.ones(1, 0).long(),
        "rows",
        3,
        torch.tensor([[True, False]]),
    )
    numbers = values(0, -1, 1.5, "3", float("nan"), float("inf"), [1], 2**70, 1j)
    more = {"seed": SEEDS, "rows": index, "num_data": numbers}
    good = {"seed": 1, "rows": torch.arange(8)[None], "num_data": 12}
    calls.append(Call("fit_map", _run_fit, regression_arguments(**good), DATA | more, lists))
    calls.append(Call("fit_map classes", _run_fit, class_arguments(**good), DATA | more, lists))
    good = {"seed": [1, 2], "rows": torch.arange(8).expand(2, -1)}
    calls.append(
        Call("fit_stacks", _run_stacks, regression_arguments(**good), DATA | {"seed": SEEDS, "rows": index}, lists)
    )
    good = {"lr": 1e-3, "epochs": 3, "rank": 2, "batch_size": 5, "seed": 0, "precision": "float32"}
    odd = DATA | {
        "lr": POSITIVE,
        "epochs": STEPS,
        "rank": WHOLE,
        "batch_size": WHOLE,
        "seed": SEEDS,
        "precision": NAMES,
    }
    calls.append(
        Call(
            "Swag",
            _run_swag,
            regression_arguments(**good),
            odd,
            lists | {"epochs": "epochs|rank", "lr": "lr|learning rate"},
        )
    )
    good = {"steps": 2, "prior_std": 1.0}
    odd = DATA | {"steps": STEPS, "prior_std": POSITIVE}
    calls.append(Call("tune_marginal", _run_tune, regression_arguments(**good), odd, lists))
    odd = {"structure": NAMES, "prior": NAMES, "chunk": WHOLE}
    good = {"structure": "kfac", "prior": "trained", "chunk": 100}
    calls.append(Call("Laplace", lambda **a: answers(Laplace(**a)), regression_arguments(**good), odd))
    odd = {"samples": WHOLE, "steps": STEPS, "full_limit": WHOLE, "chunk": WHOLE, "generator": GENERATORS}
    good = {"samples": 4, "steps": 10, "full_limit": 100, "chunk": 100, "generator": torch.Generator()}
    calls.append(
        Call(
            "ClosedFormClassifier",
            _run_classifier,
            class_arguments(**good),
            odd,
        )
    )
    calls.append(
        Call("ClosedForm", lambda **a: answers(ClosedForm(**a)), regression_arguments(chunk=5), {"chunk": WHOLE})
    )
    calls.append(
        Call(
            "ClosedForm.update",
            _run_update,
            lambda: {"x": rows(), "y": targets()},
            {"x": odd_tensors, "y": odd_tensors},
        )
    )
    multipliers = values(
        (),
        0,
        -1.0,
        "1",
        None,
        float("nan"),
        float("inf"),
        [1.0, "a"],
        [0.0],
        {},
        torch.ones(2),
        1j,
        [1.0, 2.0],
        [[1.0]],
    )
    calls.append(Call("Laplace.set_prior", _run_set_prior, lambda: {"multipliers": 2.0}, {"multipliers": multipliers}))
    odd = {"x": odd_tensors, "y": odd_tensors, "multipliers": multipliers}
    calls.append(
        Call(
            "Laplace.tune_prior", _run_tune_prior, lambda: {"x": rows(), "y": labels(), "multipliers": (1.0, 2.0)}, odd
        )
    )
    odd = {"x": odd_tensors, "num": WHOLE, "generator": GENERATORS}
    calls.append(
        Call("ClosedForm.sample", _run_draws, lambda: {"x": rows(4), "num": 2, "generator": torch.Generator()}, odd)
    )
    kernel = {"kernel": values(None, "rbf", 3, Matern), "lengthscale": POSITIVE, "amplitude": POSITIVE}
    good = {"kernel": Matern(1.5), "x": rows(), "lengthscale": 1.0, "amplitude": 1.0, "steps": 1, "lr": 0.05}
    odd = kernel | {"x": odd_tensors, "y": odd_tensors, "steps": STEPS, "lr": POSITIVE}
    calls.append(
        Call(
            "GaussianProcess",
            _run_process,
            lambda: good | {"y": targets(), "noise": 0.5},
            odd | {"noise": POSITIVE},
        )
    )
    more = {"samples": WHOLE, "seed": values("seed", 1.5, None, float("nan"), 2**70)}
    calls.append(
        Call(
            "GaussianProcessClassifier",
            _run_class_process,
            lambda: good | {"y": labels(), "samples": 3, "seed": 0},
            {name: odd[name] for name in ("kernel", "x", "y", "lengthscale", "steps")} | more,
        )
    )
    odd = {"x": odd_tensors, "y": odd_tensors, "sweeps": STEPS, "model": MODELS}
    calls.append(
        Call(
            "slice_sample",
            _run_slices,
            lambda: {"model": regression(width=3), "x": rows(), "y": targets(), "sweeps": 1},
            odd,
        )
    )
    return calls


def _builders() -> list[Call]:
    """Calls that make layers, networks and settings."""

    def layer():
        return StationaryLayer(COLUMNS, WIDTH, dtype=torch.float64)

    scales = values(*ODD_POSITIVE, torch.ones(5), torch.tensor([1.0, -1.0, 1.0]), torch.ones(3, 3))
    odd = {
        "in_features": WHOLE,
        "out_features": WHOLE,
        "kernel": NAMES,
        "activation": NAMES,
        "lengthscale": scales,
        "frequencies": NAMES,
        "generator": GENERATORS,
        "device": values(*ODD_DEVICES),
        "dtype": values(*ODD_DTYPES),
    }
    good = {
        "in_features": 3,
        "out_features": 6,
        "kernel": "rbf",
        "activation": "sin",
        "lengthscale": 1.0,
        "frequencies": "iid",
    }
    calls = [
        Call(
            "StationaryLayer",
            _run_layer,
            lambda: good | {"generator": torch.Generator(), "device": "cpu", "dtype": torch.float32},
            odd,
        )
    ]
    calls.append(Call("StationaryLayer()", lambda **a: finite(layer()(**a)), lambda: {"x": rows(4)}, {"x": passed_on}))
    odd = {
        "layer": values(None, "layer", nn.Linear(3, 6), StationaryLayer),
        "out_features": WHOLE,
        "likelihood": values(None, "gaussian", Gaussian, nn.MSELoss()),
        "extractor": values(*ODD_MODULES),
        "amplitude": POSITIVE,
        "extractor_precision": POSITIVE,
        "output_bias": values("yes", None, 3, []),
        "generator": GENERATORS,
    }
    good_model = {
        "out_features": 1,
        "extractor": None,
        "amplitude": 1.0,
        "extractor_precision": 1.0,
        "output_bias": False,
    }
    calls.append(
        Call(
            "Model",
            _run_model,
            lambda: good_model | {"layer": layer(), "likelihood": Gaussian(), "generator": torch.Generator()},
            odd,
            {"extractor": "extractor|input"},
        )
    )
    calls.append(Call("Model()", lambda **a: finite(regressor()(**a)), lambda: {"x": rows(4)}, {"x": passed_on}))
    counts = values(0, -1, "3", float("nan"), float("inf"), [1], 1j, 5)
    calls.append(
        Call(
            "Model.log_joint",
            lambda **a: finite(regressor().log_joint(**a)),
            lambda: {"x": rows(), "y": targets(), "num_data": 20},
            {"x": passed_on, "y": passed_on, "num_data": counts},
            {"x": "x|y"},
        )
    )
    calls.append(
        Call(
            "Model.log_joint classes",
            lambda **a: finite(classifier().log_joint(**a)),
            lambda: {"x": rows(), "y": labels()},
            {"x": passed_on, "y": passed_on},
            {"x": "x|y"},
        )
    )

    def network():
        return nn.Sequential(nn.Linear(COLUMNS, 4), nn.ReLU(), nn.Linear(4, 2))

    odd = {
        "network": values(None, *ODD_MODULES),
        "width": WHOLE,
        "likelihood": values("gaussian", Gaussian, 3),
        "amplitude": POSITIVE,
        "head": values(3, "", "nonsense", "0", nn.Linear, []),
        "generator": GENERATORS,
        "kernel": NAMES,
        "lengthscale": POSITIVE,
    }
    calls.append(
        Call(
            "swap_head",
            _run_swapped,
            lambda: {
                "network": network(),
                "width": 6,
                "likelihood": None,
                "amplitude": 1.0,
                "head": "2",
                "generator": torch.Generator(),
                "kernel": "rbf",
                "lengthscale": 1.0,
            },
            odd,
            {"network": "network|head", "width": "width|out_features"},
        )
    )
    odd = {"layer": values(None, "layer", nn.Linear(3, 6)), "x": odd_tensors, "shifts": WHOLE, "generator": GENERATORS}

    def run(**a):
        return finite(torch.tensor(width_error(**a).kernel))

    calls.append(
        Call(
            "width_error",
            run,
            lambda: {"layer": layer(), "x": rows(), "shifts": 2, "generator": torch.Generator()},
            odd,
        )
    )

    def run(**a):
        return finite(OutputLayer(**a)(torch.ones(2, a["in_features"], dtype=torch.float64)))

    calls.append(
        Call(
            "OutputLayer",
            run,
            lambda: {"in_features": 3, "out_features": 2, "amplitude": 1.0, "generator": torch.Generator()},
            {"in_features": WHOLE, "out_features": WHOLE, "amplitude": POSITIVE, "generator": GENERATORS},
        )
    )
    calls.append(
        Call("Gaussian", lambda **a: finite(Gaussian(**a).log_prior()), lambda: {"noise": 0.3}, {"noise": POSITIVE})
    )
    return calls + _networks() + _settings()


def _networks() -> list[Call]:
    """Calls that make feature extractors."""
    share = values("0", None, float("nan"), 1.0, -0.1, 2, [], 1j, True)
    hidden = values((), 3, None, "4", (0,), (-1, 2), (1.5,), (2**70,), [4, 3], ("4",), {}, (float("nan"),))
    calls = [
        Call(
            "mlp",
            _run_network(networks.mlp, 2, 3),
            lambda: {"in_features": 3, "hidden": (4, 2), "dropout": 0.1},
            {"in_features": WHOLE, "hidden": hidden, "dropout": share, "generator": GENERATORS},
        )
    ]
    calls[0].run = lambda **a: finite(networks.mlp(**a).eval()(torch.ones(2, a["in_features"])))
    calls.append(
        Call(
            "linear",
            lambda **a: finite(networks.linear(**a)(torch.ones(2, a["in_features"]))),
            lambda: {"in_features": 3, "out_features": 2},
            {"in_features": WHOLE, "out_features": WHOLE, "generator": GENERATORS},
        )
    )
    odd = {
        "in_features": WHOLE,
        "out_features": WHOLE,
        "kernel": WHOLE,
        "padding": values(-1, "x", 1.5, None, 2**70, []),
    }
    calls.append(
        Call(
            "conv",
            lambda **a: finite(networks.conv(**a)(torch.ones(2, a["in_features"], 8, 8))),
            lambda: {"in_features": 2, "out_features": 2, "kernel": 3, "padding": 1},
            odd,
        )
    )
    calls.append(
        Call(
            "digit_net",
            _run_network(networks.digit_net, 1, 1, 8, 8),
            lambda: {"side": 8, "out_features": 2, "dropout": 0.1},
            {"side": STEPS, "out_features": WHOLE, "dropout": share},
        )
    )
    calls.append(
        Call(
            "SeededDropout",
            lambda **a: finite(networks.SeededDropout(a["p"], a["shape"])(torch.ones(2, 3))),
            lambda: {"p": 0.1, "shape": 3},
            {"p": share, "shape": WHOLE},
        )
    )
    calls.append(
        Call(
            "googlenet",
            _run_network(networks.googlenet, 1, 3, 32, 32),
            lambda: {"width": 16},
            {"width": values(0, -1, 1.5, "3", None, 1000, 2**70, [])},
        )
    )
    odd = {
        "width": values(0, -1, 1.5, "3", None, 2**70),
        "blocks": values(0, None, "2", (1.5,), (-1,), ("a",), 3),
        "bound": POSITIVE,
    }
    calls.append(
        Call(
            "residual_net",
            _run_network(networks.residual_net, 1, 3, 8, 8),
            lambda: {"width": 2, "blocks": (1,), "bound": 3.0},
            odd,
        )
    )
    calls.append(
        Call(
            "Intervals.of",
            lambda **a: finite(networks.Intervals.of(**a)(a["x"])),
            lambda: {"x": rows(), "most": 3, "total": 9},
            {"x": odd_tensors, "most": WHOLE, "total": WHOLE},
        )
    )
    return calls


def _settings() -> list[Call]:
    """Settings, predictions and metrics."""
    odd = {
        "epochs": STEPS,
        "batch_size": WHOLE,
        "lr": POSITIVE,
        "scale_lr": values(*(v for v in ODD_POSITIVE if v is not None)),
        "explosion": POSITIVE,
        "precision": NAMES,
        "optimizer": values(None, "adam", torch.optim.AdamW, 3),
        "schedule": values(None, "cosine", 3, lambda _: float("nan"), lambda _: "a"),
    }
    calls = [Call("Recipe", _run_recipe, lambda: {}, odd)]
    odd = {
        "warmup": STEPS,
        "samples": STEPS,
        "chains": STEPS,
        "target_accept": values("0", None, float("nan"), 1.0, -0.1, 2, []),
        "max_tree_depth": WHOLE,
        "seed": values("seed", 1.5, None, float("nan"), 2**70, [1]),
    }
    calls.append(Call("Sampling", _run_sampling, lambda: {}, odd))

    def gaussian():
        return GaussianPredictive(torch.zeros(ROWS, 1).double(), torch.ones(ROWS, 1).double(), torch.ones(()).double())

    def classes():
        return CategoricalPredictive.from_logits([torch.zeros(ROWS, CLASSES).double()])

    coverage = values(0, 1, -0.5, 2, float("nan"), "0.9", None, [0.5], 1j, np.float64(0.5))
    calls.append(
        Call(
            "GaussianPredictive.interval",
            lambda **a: [finite(end) for end in gaussian().interval(**a)],
            lambda: {"coverage": 0.9},
            {"coverage": coverage},
        )
    )
    calls.append(
        Call(
            "GaussianPredictive.log_prob",
            lambda **a: finite(gaussian().log_prob(**a)),
            lambda: {"y": targets()},
            {"y": odd_tensors},
            {"y": "y|targets"},
        )
    )
    calls.append(
        Call(
            "CategoricalPredictive.log_prob",
            lambda **a: finite(classes().log_prob(**a)),
            lambda: {"y": labels()},
            {"y": odd_tensors},
            {"y": "y|targets"},
        )
    )
    arrays = values(
        None,
        "a",
        [],
        [1.0],
        np.full(ROWS, np.nan),
        np.ones((ROWS, 2)),
        np.zeros(ROWS + 1),
        {},
        3,
        ["a"] * ROWS,
        np.zeros(ROWS, complex),
    )
    p = np.full((ROWS, CLASSES), 1 / CLASSES)
    calls.append(
        Call(
            "rmse",
            _run_metric("rmse"),
            lambda: {"y": np.zeros(ROWS), "mean": np.ones(ROWS)},
            {"y": arrays, "mean": arrays},
        )
    )
    calls.append(
        Call(
            "nlpd",
            _run_metric("nlpd"),
            lambda: {"log_prob": np.zeros(ROWS), "target_scale": 1.0},
            {"log_prob": arrays, "target_scale": POSITIVE},
        )
    )
    for name in ("accuracy", "brier", "ece", "auc"):
        calls.append(
            Call(
                name,
                _run_metric(name),
                lambda: {"y": labels().numpy(), "probabilities": p},
                {
                    "y": lambda v: arrays(v) | {"negative": -labels().numpy() - 1, "large": labels().numpy() + 9},
                    "probabilities": arrays,
                },
                {"y": "y|labels"},
            )
        )
    calls.append(
        Call("ece", _run_metric("ece"), lambda: {"y": labels().numpy(), "probabilities": p, "bins": 5}, {"bins": WHOLE})
    )
    return calls


def calls() -> list[Call]:
    """All calls."""
    return [*_builders(), *_fits(), *_predictions()]


@dataclass(frozen=True)
class Case:
    """A call with odd arguments: the number of the call, and for each argument the label of its odd value."""

    call: Call
    odd: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return f"{self.call.name}({', '.join(f'{name}={label}' for name, label in self.odd)})"


def single_cases() -> list[Case]:
    """Every call with each odd value of each argument."""
    cases = []
    for call in calls():
        valid = call.valid()
        for name, odd in call.odd.items():
            cases += [Case(call, ((name, label),)) for label in odd(valid.get(name))]
    return cases


def pair(rng: random.Random, cases: list[Case]) -> Case:
    """Two odd arguments of one call."""
    first = rng.choice(cases)
    others = [case for case in cases if case.call is first.call and case.odd[0][0] != first.odd[0][0]]
    return Case(first.call, first.odd + rng.choice(others).odd) if others else first


def outcome(case: Case) -> tuple[str, str]:
    """'accepted', 'refused' or 'wrong', and the message."""
    arguments = case.call.valid()
    for name, label in case.odd:
        arguments[name] = case.call.odd[name](arguments.get(name))[label]
    threads = torch.get_num_threads()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case.call.run(**arguments)
    except (ValueError, TypeError) as error:
        pattern = "|".join(case.call.ways.get(name, name) for name, _ in case.odd)
        named = re.search(rf"\b({pattern})\b", str(error)) is not None
        return ("refused", str(error)) if named else ("wrong", f"{type(error).__name__} without the name: {error}")
    except Exception as error:  # any other error is what this program looks for
        last = traceback.extract_tb(error.__traceback__)[-1]
        return "wrong", f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {error}"
    if torch.get_num_threads() != threads:
        return "wrong", "changed the number of threads"
    return "accepted", ""


def main() -> None:
    """Runs cases for a given time and prints counts by class."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--all", action="store_true", help="every single odd argument once")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rng, singles = random.Random(arguments.seed), single_cases()
    end, counts, wrong = time.monotonic() + arguments.seconds, {}, []
    queue = list(singles) if arguments.all else []
    while (arguments.all and queue) or (not arguments.all and time.monotonic() < end):
        case = queue.pop(0) if queue else (pair(rng, singles) if rng.random() < 0.3 else rng.choice(singles))
        kind, message = outcome(case)
        counts.setdefault(case.call.name, Counter())[kind] += 1
        if kind == "wrong":
            wrong.append(f"{case}: {message[:300]}")
    for name, count in sorted(counts.items()):
        print(f"{name:40s} accepted {count['accepted']:5d}  refused {count['refused']:5d}  wrong {count['wrong']:5d}")
    total = sum(counts.values(), Counter())
    print(f"seed {arguments.seed}: {sum(total.values())} calls, {total['wrong']} wrong")
    print("\n".join(sorted(set(wrong))))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
