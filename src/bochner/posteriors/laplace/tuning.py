"""Choosing the prior precision of a Laplace posterior, and its temperature: by held-out rows, or by the evidence."""
# SciPy declares no types:
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import math
from typing import TYPE_CHECKING

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from bochner.layers import StationaryLayer
from bochner.likelihoods import Gaussian
from bochner.predictive import within_error_of_best

if TYPE_CHECKING:
    from bochner.posteriors.laplace.posterior import Laplace

CHUNK_ROWS = 256  # held-out rows that are processed at a time
DRAWS_PER_TRIAL = 32  # draws of the outputs of a held-out row, for each prior and temperature that is tried
LOG_TEMPERATURE_STD = 0.5  # prior standard deviation of the log temperature: most are within a factor of 2 of 1
MAX_LOG_TEMPERATURE = 3.0  # largest log temperature that is tried
# Factors on the prior precision that are tried, 0.01 to 10⁶.
MULTIPLIERS = tuple(10.0 ** (k / 2) for k in range(-4, 13))


def tune_by_evidence(posterior: "Laplace", tried: list[float], per_layer: bool) -> None:
    """Takes the multipliers with the largest marginal likelihood: one, or one for each layer but the model layer."""
    gaussian = [i for i, tap in enumerate(posterior.layers) if not isinstance(tap.module, StationaryLayer)]
    for group in [[i] for i in gaussian] if per_layer else [gaussian]:

        def evidence(multiplier: float, group: list[int] = group) -> float:
            multipliers = [multiplier if i in group else m for i, m in enumerate(posterior.prior_multipliers)]
            posterior.set_prior(multipliers)
            return float(posterior.log_marginal_likelihood.sum())

        best = max(tried, key=evidence)
        evidence(best)


def tune_by_rows(posterior: "Laplace", rows: list[tuple[Tensor, Tensor]], tried: list[float], per_layer: bool) -> None:
    """Takes the smallest multiplier within a standard error of the best on held-out rows, and the temperature for it."""
    count = sum(len(y) for _, y in rows)
    if count < 2:
        raise ValueError(f"tune_prior needs at least two held-out rows, got {count} instead.")

    def held_out(multipliers: float | list[float]) -> tuple[Tensor, float]:
        """Log probability of every row, and the temperature for it."""
        posterior.set_prior(multipliers)
        return _best_temperature(posterior, [(posterior.output_moments(xb), yb) for xb, yb in rows])

    scores = [held_out(multiplier) for multiplier in tried]
    smallest = int(within_error_of_best(torch.stack([logs for logs, _ in scores])).nonzero().min())
    every, posterior.temperature = [tried[smallest]] * len(posterior.layers), scores[smallest][1]
    for i in range(len(posterior.layers)) if per_layer else ():
        others = {m: held_out([*every[:i], m, *every[i + 1 :]]) for m in tried}
        every[i] = max(others, key=lambda m: float(others[m][0].mean()))
        posterior.temperature = others[every[i]][1]
    posterior.set_prior(every)


def _best_temperature(
    posterior: "Laplace", moments: list[tuple[tuple[Tensor, Tensor], Tensor]]
) -> tuple[Tensor, float]:
    """Log probability of rows, and for classes the temperature under which they are most probable."""

    def logs(temperature: float) -> Tensor:
        parts = [
            posterior.predictive_of(*outputs, temperature=temperature, samples=DRAWS_PER_TRIAL).log_prob(y)
            for outputs, y in moments
        ]
        return torch.cat([part.double().reshape(-1, part.shape[-1]).mean(0) for part in parts])

    if isinstance(posterior.model.likelihood, Gaussian):
        return logs(1.0), 1.0
    count = sum(len(y) for _, y in moments)

    def loss(log_temperature: float) -> float:
        # Few rows, all of them right, would ask for any temperature.
        prior = 0.5 * (log_temperature / LOG_TEMPERATURE_STD) ** 2 / count
        return prior - float(logs(math.exp(log_temperature)).mean())

    best = minimize_scalar(loss, bounds=(0.0, MAX_LOG_TEMPERATURE), method="bounded", options={"xatol": 0.01})
    temperature = math.exp(float(best.x)) if best.fun < loss(0.0) else 1.0  # pyright: ignore[reportAttributeAccessIssue]
    return logs(temperature), temperature
