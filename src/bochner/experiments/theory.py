"""The paper's theory as numbers: activations, covariances, Gram matrices, mixture error, and error against width.

Each experiment is a function of a frozen configuration that returns rows; ``EXPERIMENTS`` names them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bochner.experiments.catalogue import Request
from bochner.experiments.rows import Row, make_once
from bochner.layers import StationaryLayer
from bochner.likelihoods import Gaussian
from bochner.models import Model
from bochner.posteriors.closed_form import ClosedForm, tune_marginal
from bochner.priors import activations, spectra
from bochner.priors.activations import Activation
from bochner.priors.frequencies import draw
from bochner.priors.kernels import arccos0, arccos1, erf_nn, induced_kernel, matern_nn, rbf_nn
from bochner.priors.spectra import RBF, Exponential, Matern, Spectrum

PERIODIC = ("sin", "sincos", "triangle", "periodic_relu")

# Paper, Fig. "gram-comparison": mean absolute error of a sinusoidal network's Gram matrix, read from the source.
PAPER_GRAM_ERROR = {
    "rbf": {5: 0.309305, 10: 0.18886, 50: 0.0940903, 100: 0.0475922, 500: 0.0507275, 1000: 0.0226722, 5000: 0.00609189},
    "matern32": {
        5: 0.576658,
        10: 0.193571,
        50: 0.0720818,
        100: 0.0612155,
        500: 0.0374068,
        1000: 0.0205772,
        5000: 0.00702051,
    },
    "exponential": {
        5: 0.385309,
        10: 0.211374,
        50: 0.0917824,
        100: 0.0625705,
        500: 0.0285404,
        1000: 0.0224113,
        5000: 0.0126504,
    },
}


@dataclass(frozen=True)
class Config:
    """Sizes of the theory experiments; the defaults are the paper's where it states them."""

    seed: int = 0
    monte_carlo: int = 5000
    gram_points: int = 41
    gram_units: int = 10
    gram_networks: int = 1000
    error_points: int = 50
    error_widths: tuple[int, ...] = (5, 10, 50, 100, 500, 1000, 5000)
    error_draws: int = 20


def _generator(config: Config) -> torch.Generator:
    return torch.Generator().manual_seed(config.seed)


def _round(values: Tensor, digits: int = 10) -> list[Any]:
    """Values rounded to more digits than a figure shows, and fewer than float64 has, so that files stay small."""
    return [float(f"{v:.{digits}g}") for v in values.flatten().tolist()]


def activation_curves(_: Config) -> list[Row]:
    """The periodic activations over two periods, under the paper's scaling and ours (Fig. "activations", first)."""
    z = torch.linspace(-2 * math.pi, 2 * math.pi, 401, dtype=torch.float64)
    rows = []
    for name in PERIODIC:
        variants: dict[str, Activation] = {"unit": activations.resolve_activation(name)}
        if name == "triangle":
            variants["paper"] = activations.triangle(scaling="paper")
        if name == "periodic_relu":
            variants["paper"] = activations.periodic_relu(scaling="paper")
        rows += [{"activation": name, "scaling": s, "z": _round(z), "value": _round(a(z))} for s, a in variants.items()]
    return rows


def covariances(config: Config) -> list[Row]:
    """Covariance functions by Monte Carlo and exactly (Fig. "activations", second)."""
    r = torch.linspace(0, 4, 81, dtype=torch.float64)[:, None]
    origin = torch.zeros(1, 1, dtype=torch.float64)
    generator = _generator(config)
    rows = []
    for kernel in ("rbf", "matern52", "matern32", "exponential"):
        for name in PERIODIC:
            weight, bias = draw(
                spectra.resolve_spectrum(kernel),
                activations.resolve_activation(name),
                config.monte_carlo,
                1,
                generator=generator,
            )
            phase = torch.zeros(1, dtype=torch.float64) if bias is None else bias
            sigma = activations.resolve_activation(name)
            estimate = (sigma(r @ weight.T + phase) * sigma(phase.expand(1, config.monte_carlo))).mean(1)
            exact = induced_kernel(name, kernel)(r, origin)[:, 0]
            rows.append(
                {
                    "kernel": kernel,
                    "activation": name,
                    "r": _round(r),
                    "monte_carlo": _round(estimate),
                    "exact": _round(exact),
                    "worst": float((estimate - exact).abs().max()),
                }
            )
    return rows


# The nine priors of the paper's Gram figure: infinite-width kernel, activation, and the weight prior of the network.
NINE: dict[str, tuple[Callable[[Tensor], Tensor], Activation, Spectrum | None]] = {
    "ArcCos-1 ~ ReLU": (arccos1, activations.relu(), RBF()),
    "ArcCos-0 ~ Step": (arccos0, activations.step(), RBF()),
    "NN ~ Sigmoid": (erf_nn, activations.erf(), RBF()),
    "RBF-NN (local)": (lambda x: rbf_nn(x, lengthscale=math.sqrt(0.5)), activations.local_rbf(), None),
    "Matérn-3/2-NN (local)": (lambda x: matern_nn(x, nu=1.5), activations.local_matern(1.5), None),
    "Exp-NN (local)": (lambda x: matern_nn(x, nu=0.5), activations.local_matern(0.5), None),
    "RBF": (lambda x: RBF().kernel(x), activations.sin(), RBF()),
    "Matérn-3/2": (lambda x: Matern(1.5).kernel(x), activations.sin(), Matern(1.5)),
    "Exponential": (lambda x: Exponential().kernel(x), activations.sin(), Exponential()),
}


def gram_matrices(config: Config) -> list[Row]:
    """Nine Gram matrices over [−3, 3], infinite width and finite (Figs. "gram" and "gram-finite").

    The finite one averages over networks of a few units. Locally stationary units there have weights ±1 and normal
    biases: that is the network of the RBF-NN kernel exactly, and of the Matérn-NN kernels only roughly and up to a factor.
    ``mean_difference`` compares the two after dividing each by its largest entry.
    """
    x = torch.linspace(-3, 3, config.gram_points, dtype=torch.float64)[:, None]
    generator = _generator(config)
    rows = []
    for name, (kernel, activation, spectrum) in NINE.items():
        num = config.gram_networks * config.gram_units
        weight, bias = draw(spectrum or RBF(), activation, num, 1, generator=generator)
        weight = weight if spectrum is not None else weight.sign()
        h = activation(x @ weight.T + (0.0 if bias is None else bias))
        infinite, finite = kernel(x), h @ h.T / num
        rows.append(
            {
                "prior": name,
                "points": config.gram_points,
                "units": config.gram_units,
                "networks": config.gram_networks,
                "infinite": _round(infinite, 5),
                "finite": _round(finite, 5),
                "mean_difference": float((_normalised(finite) - _normalised(infinite)).abs().mean()),
            }
        )
    return rows


def _normalised(gram: Tensor) -> Tensor:
    """A Gram matrix divided by its largest entry: kernels that are known up to a factor become comparable."""
    return gram / gram.abs().max()


def mixture_error(_: Config) -> list[Row]:
    """Error of replacing triangle and periodic ReLU by their first harmonic (Fig. "triangle_approx")."""
    r = torch.linspace(0, 5, 101, dtype=torch.float64)[:, None]
    origin = torch.zeros(1, 1, dtype=torch.float64)
    rows = []
    for kernel in ("rbf", "matern32", "exponential"):
        first = spectra.resolve_spectrum(kernel).kernel(r, origin)[:, 0]
        for scaling in ("paper", "unit"):
            full = induced_kernel(activations.triangle(scaling=scaling), kernel)(r, origin)[:, 0]
            difference = full - first
            rows.append(
                {
                    "kernel": kernel,
                    "scaling": scaling,
                    "r": _round(r),
                    "first": _round(first),
                    "full": _round(full),
                    "difference": _round(difference),
                    "worst": float(difference.abs().max()),
                }
            )
    return rows


def gram_error(config: Config) -> list[Row]:
    """Mean absolute error of the Gram matrix against the number of units K (Fig. "gram-comparison").

    Inputs: an even grid on [−3, 3] in one dimension, N(0, I/d) in five. Paired features count frequencies, so that K
    of them make 2K outputs.
    """
    inputs = [
        torch.linspace(-3, 3, config.error_points, dtype=torch.float64)[:, None],
        torch.randn(config.error_points, 5, generator=_generator(config), dtype=torch.float64) / math.sqrt(5),
    ]
    rows = []
    for x in inputs:
        for kernel in ("rbf", "matern32", "exponential"):
            exact = spectra.resolve_spectrum(kernel).kernel(x)
            for activation in ("sin", "paired"):
                for method in ("iid", "orthogonal", "sobol"):
                    rows += _error_rows(config, x, exact, kernel, activation, method)
    return rows


def _error_rows(config: Config, x: Tensor, exact: Tensor, kernel: str, activation: str, method: str) -> list[Row]:
    """Rows of one kernel, activation and method of drawing units: one for each number of units."""
    rows = []
    for num in config.error_widths:
        width = num * activations.resolve_activation(activation).outputs
        errors = []
        for seed in range(config.seed, config.seed + config.error_draws):
            generator = torch.Generator().manual_seed(seed)
            options: Any = {"kernel": kernel, "activation": activation, "frequencies": method, "generator": generator}
            layer = StationaryLayer(x.shape[-1], width, dtype=torch.float64, **options)
            with torch.no_grad():
                h = layer(x)
            errors.append(float((h @ h.T / width - exact).abs().mean()))
        mean = sum(errors) / len(errors)
        paper = PAPER_GRAM_ERROR[kernel].get(num) if (activation, method, x.shape[-1]) == ("sin", "iid", 1) else None
        row = {"dim": x.shape[-1], "kernel": kernel, "activation": activation, "frequencies": method, "K": num}
        rows.append({**row, "draws": config.error_draws, "error": mean, "paper": paper})
    return rows


def extrapolation(config: Config) -> list[Row]:
    """Three networks of one width on 1-D data with a gap, and their predictions outside: posterior of the output layer.

    Lengthscale, noise and amplitude are set by the marginal likelihood of each network.
    """
    generator = _generator(config)
    x = torch.cat([torch.linspace(-2, -0.6, 20), torch.linspace(0.6, 2, 20)]).double()[:, None]
    y = torch.sin(2.5 * x) + 0.1 * torch.randn(x.shape, generator=generator, dtype=torch.float64)
    grid = torch.linspace(-8, 8, 321, dtype=torch.float64)[:, None]
    rows = []
    for kernel, activation in (("rbf", "relu"), ("rbf", "local_rbf"), ("matern52", "paired")):
        options: Any = {"kernel": kernel, "activation": activation, "frequencies": "sobol", "generator": generator}
        layer = StationaryLayer(1, 400, dtype=torch.float64, **options)
        model = Model(layer, 1, Gaussian(0.3), generator=generator)
        history = tune_marginal(model, x, y, steps=150)
        prediction, amplitude = ClosedForm(model, x, y).predict(grid), model.amplitude.item()
        row = {"activation": activation, "kernel": kernel, "units": len(layer.weight), "amplitude": amplitude}
        row |= {"lengthscale": layer.lengthscale.item(), "noise": float(prediction.noise), "evidence": history[-1]}
        row |= {"x": _round(x, 6), "y": _round(y, 6), "grid": _round(grid, 6)}
        row |= {"mean": _round(prediction.mean, 6), "std": _round(prediction.std, 6)}
        # At the right edge, x = 8: the prediction, and the standard deviation without data.
        prior = amplitude * model.features(grid[-1:]).square().mean().sqrt().item()
        row |= {"far_mean": prediction.mean[-1].item(), "far_std": prediction.std[-1].item()}
        rows.append({**row, "far_prior_std": math.hypot(prior, row["noise"])})
    return rows


EXPERIMENTS: dict[str, Callable[[Config], list[Row]]] = {
    "activations": activation_curves,
    "covariances": covariances,
    "gram": gram_matrices,
    "mixture": mixture_error,
    "gram-error": gram_error,
    "extrapolation": extrapolation,
}


def check(name: str, request: Request) -> None:
    """Does nothing: these experiments need no data."""


def run(name: str, request: Request, path: Path) -> None:
    """Makes the rows of an experiment, unless they are there."""
    make_once(
        path,
        {"experiment": name, "seed": request.seed, "protocol": "bochner"},
        request.report,
        lambda: EXPERIMENTS[name](Config(seed=request.seed)),
    )
