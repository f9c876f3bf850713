"""The learning rate of SGD for SWAG, by Bayesian optimisation (the only file that imports BoTorch)."""
# BoTorch declares no types:
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false

import math
from collections.abc import Callable

import torch


class DivergedError(ValueError):
    """SGD diverged at every network, or at every learning rate tried."""


def tune_learning_rate(
    score: Callable[[float], float],
    *,
    bounds: tuple[float, float] = (1e-4, 3.0),
    trials: int = 12,
    initial: int = 4,
    seed: int = 0,
) -> tuple[float, list[tuple[float, float]]]:
    """Learning rate with the lowest score (a validation NLPD), by Bayesian optimisation on a logarithmic scale.

    The first trials are evenly spaced; then a Gaussian process with expected improvement (BoTorch) chooses. A score that is not
    finite, a diverged run, counts as slightly worse than the worst finite one, so that it does not flatten all others.

    Returns:
        The best rate, and all pairs of rate and score in the order of the trials.
    """
    if not 0 < bounds[0] < bounds[1] or not 2 <= initial <= trials:
        raise ValueError(
            f"The bounds must be positive and increasing, and 2 ≤ initial ≤ trials, got {bounds}, {initial} and {trials}."
        )
    low, high = math.log(bounds[0]), math.log(bounds[1])
    history: list[tuple[float, float]] = []
    for trial in range(trials):
        share = trial / (initial - 1) if trial < initial else _next_share(history, low, high, seed + trial)
        rate = math.exp(low + share * (high - low))
        history.append((rate, float(score(rate))))
    finite = [pair for pair in history if math.isfinite(pair[1])]
    if not finite:
        raise DivergedError(
            f"No learning rate between {bounds[0]} and {bounds[1]} gave a finite score; lower the bounds."
        )
    return min(finite, key=lambda pair: pair[1])[0], history


def _next_share(history: list[tuple[float, float]], low: float, high: float, seed: int) -> float:
    """Where in [0, 1] the expected improvement is largest, on a fine grid: in one dimension that is exact enough."""
    from botorch.acquisition import LogExpectedImprovement
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import SingleTaskGP
    from gpytorch.mlls import ExactMarginalLogLikelihood

    finite = [s for _, s in history if math.isfinite(s)]
    worst = max(finite) + 0.1 * (max(finite) - min(finite)) if finite else 1.0
    x = torch.tensor([[(math.log(r) - low) / (high - low)] for r, _ in history], dtype=torch.float64)
    y = torch.tensor([[-s if math.isfinite(s) else -worst] for _, s in history], dtype=torch.float64)
    with torch.random.fork_rng(devices=[]):
        torch.random.manual_seed(seed)
        gp = SingleTaskGP(x, y)
        fit_gpytorch_mll(ExactMarginalLogLikelihood(gp.likelihood, gp))
        grid = torch.linspace(0, 1, 501, dtype=torch.float64)
        with torch.no_grad():
            improvement = LogExpectedImprovement(gp, best_f=y.max())(grid[:, None, None])
    return float(grid[improvement.argmax()])
