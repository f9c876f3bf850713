"""The scikit-learn regressor."""

from collections.abc import Callable, Iterable
from numbers import Integral
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import RegressorMixin
from sklearn.metrics import r2_score
from sklearn.utils import check_array
from torch import Tensor

from bochner.estimators.base import StationaryEstimator, TrainingData, checked_training
from bochner.estimators.checks import (
    MAX_DRAWS,
    as_numpy,
    check_number,
    check_row_weights,
    check_same_rows,
    check_seed,
    named_errors,
)
from bochner.estimators.columns import MAX_VALUE
from bochner.estimators.mixture import NormalMixture
from bochner.estimators.regression import RegressionMixture, fit_targets, mapped_mean
from bochner.estimators.targets import as_tensor
from bochner.members.features import FEATURE_CHUNK_ROWS
from bochner.members.member import Inputs, Member
from bochner.predictive import is_coverage

ROOT_JITTER = 1e-9  # of the mean variance: keeps covariances of many rows positive definite


class StationaryRegressor(RegressorMixin, StationaryEstimator):
    """Regression that knows how sure it is: a mixture of heads with stationary priors, for scikit-learn.

    Takes arrays and DataFrames; numbers may be missing, columns may be categories or text. Nothing needs to be scaled. Several
    targets, y of shape (n, k), get a mixture each.

    Args:
        kernel: The prior's kernel, or several: "matern32", "matern52", "rbf", "exponential" or an isotropic Spectrum.
        hidden_layer_sizes: Widths of the hidden layers of trained networks, which join from a few hundred rows on; () for none.
        false_alarm: Share of rows like the training data whose ``ood_score`` may exceed ``ood_threshold_``.
        device: "auto" (a GPU where there is one), "cpu" or "cuda".
        random_state: Seed of every draw.
        verbose: Whether to say what takes time.
        settings: Every other constant, ``bochner.estimators.Settings``.
        budget: Seconds that ``fit`` may take; None for as many as it needs.

    Attributes:
        mixtures_: What predicts, one mixture for each target.
        columns_: What was learnt about the columns.
        noise_: Standard deviation of the noise, in units of the target, averaged over members where the target is unmapped.
        prior_std_: Standard deviation of predictions far from the data.
        log_marginal_likelihood_: Evidence of the training data under the member on the columns that counts most.
        ood_threshold_: Score beyond which a row is unlike the training data.
    """

    mixtures_: list[RegressionMixture]
    prior_std_: Any
    noise_: Any
    log_marginal_likelihood_: float
    _one_target: bool

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fits to rows X, (n, d), and targets y, (n,) or (n, k).

        Args:
            X: The rows.
            y: Their targets.
            sample_weight: How many rows each row stands for; (n,). A weight of 0 leaves the row out.
        """
        self._learn(X, y, sample_weight)
        return self

    def _learn(self, X: Any, y: Any, sample_weight: Any) -> TrainingData:
        """Fits, and returns the rows that the mixtures were fitted to."""
        self.check_parameters()
        y = _checked_targets(self, y)
        training = checked_training(self, X, y, sample_weight)
        columns = training.y.reshape(len(training.y), -1).T
        for number, target in enumerate(columns):
            if target.max() == target.min():
                which = "" if y.ndim == 1 else f" in column {number}"
                raise ValueError(
                    f"The y parameter must hold at least two different values{which}, got {target[0]:g} only."
                )

        training, mixtures = self._fit_mixtures(training, fit_targets)
        self._remember(training, mixtures, _one_target=y.ndim == 1)
        return training

    def _target_numbers(self, y: Any) -> np.ndarray:
        """Targets as the moments of batches take them, (n,) or (n, k)."""
        targets = _checked_targets(self, y)
        if targets.size != len(targets) * len(self.mixtures_):
            raise ValueError(
                f"The y parameter must hold {len(self.mixtures_)} targets, got shape {targets.shape} instead."
            )
        return targets

    def _describe(self) -> None:
        """Sets the fitted attributes that follow from the mixtures."""
        device = torch.device(self._device())
        stds = [float(mixture.prior(device).moments()[1]) for mixture in self.mixtures_]
        noises = [_noise(mixture) for mixture in self.mixtures_]
        self.prior_std_ = stds[0] if self._one_target else np.array(stds)
        self.noise_ = noises[0] if self._one_target else np.array(noises)
        evidences = [_heaviest_on_columns(mixture).head.log_evidence for mixture in self.mixtures_]
        self.log_marginal_likelihood_ = float(sum(evidences))

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None, *, forgetting_factor: float = 1.0) -> Self:
        """Takes in more rows. The first call is ``fit``; later ones keep its columns, hyperparameters, networks and weights.

        Every head's posterior is then exactly that of all rows so far, given its anchors. The threshold stays.

        Args:
            X: The rows.
            y: Their targets.
            sample_weight: How many rows each row stands for; (n,), positive.
            forgetting_factor: What every earlier row counts from now on, beside 1 for a new one. With 0.9 a row counts nine tenths
                after one more call, and 0.9² after two: for data that drift.
        """
        if not hasattr(self, "mixtures_"):
            return self.fit(X, y, sample_weight)
        return self._update(X, self._target_numbers(y), sample_weight, forgetting_factor)

    # ------------------------------------------------------------------ predictions

    def _map(self, X: Any, answer: Callable[[NormalMixture], Tensor]) -> np.ndarray:
        """Applies a function to the predictive distributions of all rows: (n, ...) for a single target, else (n, ..., k)."""
        parts = [
            torch.stack([answer(m.predict(Inputs(x, m.extractors))) for m in self.mixtures_], -1)
            for x in self._inputs(X).split(FEATURE_CHUNK_ROWS)
        ]
        values = torch.cat(parts).cpu().numpy()
        return values[..., 0] if self._one_target else values

    def predict(self, X: Any, return_std: bool = False, return_cov: bool = False) -> Any:
        """Mean of the prediction at each row; with ``return_std`` its standard deviation too, noise included."""
        if return_cov:
            raise ValueError(
                "The return_cov parameter must be False: a mixture has no covariance in closed form; "
                "np.cov(model.sample_y(X, 1000)) estimates it."
            )
        moments = self._map(X, lambda mixture: torch.stack(mixture.moments(), 1))
        return (moments[:, 0], moments[:, 1]) if return_std else moments[:, 0]

    def predict_quantiles(self, X: Any, quantiles: Iterable[float] = (0.05, 0.5, 0.95)) -> np.ndarray:
        """Quantiles of the prediction at each row, (n, quantiles); with several targets (n, quantiles, k)."""
        with named_errors("quantiles"):
            levels = np.atleast_1d(np.asarray(as_numpy(quantiles), dtype=np.float64))
        if levels.ndim > 1 or not levels.size or not all(0 < level < 1 for level in levels):
            raise ValueError(f"The quantiles parameter must hold numbers between 0 and 1, got {quantiles!r} instead.")
        return self._map(X, lambda mixture: mixture.quantiles([float(q) for q in levels]))

    def predict_interval(self, X: Any, coverage: float = 0.9) -> np.ndarray:
        """Ends, (n, 2), of the central interval that holds the target with probability ``coverage``."""
        coverage = check_number("coverage", coverage, 0, 1, "lie between 0 and 1")
        if not is_coverage(coverage):  # so near to 1 that the upper end would be a quantile of 1
            raise ValueError(f"The coverage parameter must lie between 0 and 1, got {coverage!r} instead.")
        return self.predict_quantiles(X, (0.5 - coverage / 2, 0.5 + coverage / 2))

    def log_prob(self, X: Any, y: Any) -> np.ndarray:
        """Log density of each target, (n,); summed over several targets."""
        y = _checked_targets(self, y)
        x = self._inputs(X)
        check_same_rows(len(x), len(y))
        targets = as_tensor(y.reshape(len(y), -1), x)
        if targets.shape[1] != len(self.mixtures_):
            raise ValueError(
                f"The y parameter must hold {len(self.mixtures_)} targets, got {targets.shape[1]} instead."
            )
        parts = []
        for rows, target in zip(x.split(FEATURE_CHUNK_ROWS), targets.split(FEATURE_CHUNK_ROWS), strict=True):
            densities = [
                mixture.predict(Inputs(rows, mixture.extractors)).log_prob(target[:, k])
                for k, mixture in enumerate(self.mixtures_)
            ]
            parts.append(torch.stack(densities).sum(0))
        return torch.cat(parts).cpu().numpy()

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Coefficient of determination R² of the predicted means; the mean over several targets."""
        targets, mean = _checked_targets(self, y), self.predict(X)
        check_same_rows(len(mean), len(targets))
        if targets.size != mean.size:
            raise ValueError(
                f"The y parameter must hold {len(self.mixtures_)} targets, got shape {targets.shape} instead."
            )
        weight = check_row_weights(sample_weight, len(targets))
        return float(r2_score(targets, mean, sample_weight=weight))

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """Draws of y at all rows together, (n, n_samples): each a function from the posterior of one member, plus noise."""
        if not isinstance(n_samples, Integral) or isinstance(n_samples, bool) or n_samples < 1:
            raise ValueError(f"The n_samples parameter must be an integer of at least 1, got {n_samples!r} instead.")
        x, seed = self._inputs(X), check_seed(random_state)
        if len(x) * len(self.mixtures_) * int(n_samples) > MAX_DRAWS:
            raise ValueError(f"The n_samples parameter must ask for at most {MAX_DRAWS} values, got {n_samples} draws.")
        generator = torch.Generator().manual_seed(seed)
        draws = torch.stack([_sample(mixture, x, int(n_samples), generator) for mixture in self.mixtures_], -1)
        samples = draws.cpu().numpy()
        return samples[..., 0] if self._one_target else samples


def _checked_targets(estimator: StationaryRegressor, y: Any) -> np.ndarray:
    """Checked targets, (n,) or (n, k)."""
    if y is None:
        raise ValueError("This StationaryRegressor requires y to be passed, but the target y is None.")
    options: Any = {"ensure_2d": False, "dtype": np.float64, "input_name": "y"}
    try:
        with named_errors("y"):
            y = check_array(as_numpy(y), estimator=estimator, **options)
    except ValueError as error:
        if "could not convert string" in str(error):
            message = f"The y parameter must hold numbers ({error}); for classes use StationaryClassifier."
            raise ValueError(message) from error
        raise
    if y.ndim > 2 or y.ndim == 0 or (y.ndim == 2 and y.shape[1] == 0):
        raise ValueError(f"The y parameter must have shape (n,) or (n, targets), got {y.shape} instead.")
    if float(np.abs(y).max()) > MAX_VALUE:
        raise ValueError(f"The y parameter holds values beyond {MAX_VALUE:g} in size; rescale or clip them first.")
    return np.ascontiguousarray(y)


def _noise(mixture: RegressionMixture) -> float:
    """Standard deviation of the noise in units of the target; where the target is mapped, at its mapped value 0."""
    total = 0.0
    for member in mixture.members:
        zero, std = torch.zeros(1, dtype=torch.float64), torch.tensor([member.head.noise], dtype=torch.float64)
        total += member.weight * float(member.map.moments(zero, std)[1])
    return float(np.exp(mixture.spread.constant)) * total**0.5


def _heaviest_on_columns(mixture: RegressionMixture) -> Member:
    """The member on the columns with the largest weight; of all members where none is on the columns."""
    wide = [member for member in mixture.members if member.network is None]
    return max(wide or mixture.members, key=lambda member: member.weight)


@torch.no_grad()
def _sample(mixture: RegressionMixture, x: Tensor, samples: int, generator: torch.Generator) -> Tensor:
    """Draws of one target at all rows together, (n, samples)."""
    inputs = Inputs(x, mixture.extractors)
    weights = torch.tensor([member.weight for member in mixture.members], dtype=torch.float64)
    chosen = torch.multinomial(weights, samples, replacement=True, generator=generator)
    factor = mixture.spread(x, mapped_mean(mixture.predict(inputs)))
    draws = torch.empty(len(x), samples, dtype=torch.float64, device=x.device)
    for number, member in enumerate(mixture.members):
        columns = torch.nonzero(chosen == number)[:, 0]  # the draws from this member
        if not len(columns):
            continue
        mean, covariance = member.head.covariance(inputs.of(member.network))
        covariance.diagonal().add_(ROOT_JITTER * covariance.diagonal().mean() + 1e-12)
        root = torch.linalg.cholesky(covariance)
        normal = torch.randn(2, len(x), len(columns), generator=generator, dtype=torch.float64).to(x.device)
        deviation = root @ normal[0] + member.head.noise * normal[1]
        draws[:, columns.to(x.device)] = member.map.inverse(mean[:, None] + factor[:, None] * deviation)
    return draws
