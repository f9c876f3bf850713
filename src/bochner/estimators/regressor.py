"""The scikit-learn regressor."""

from collections.abc import Callable, Iterable
from numbers import Integral
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import RegressorMixin
from sklearn.utils import check_array, check_random_state
from torch import Tensor

from bochner.estimators.base import Stationary, Training, merge_equal_rows
from bochner.estimators.columns import LARGEST
from bochner.estimators.mixture import NormalMixture
from bochner.estimators.regression import RegressionMixture, fit_regression, mapped_mean
from bochner.estimators.targets import as_tensor
from bochner.members.features import FEATURE_CHUNK_ROWS
from bochner.members.member import Inputs, Member
from bochner.members.settings import Task

ROOT_JITTER = 1e-9  # of the mean variance: keeps covariances of many rows positive definite


class StationaryRegressor(RegressorMixin, Stationary):
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

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _targets(self, y: Any) -> np.ndarray:
        """Checked targets, (n,) or (n, k)."""
        if y is None:
            raise ValueError("This StationaryRegressor requires y to be passed, but the target y is None.")
        try:
            options: Any = {"ensure_2d": False, "dtype": np.float64, "input_name": "y"}
            y = check_array(y, estimator=self, **options)
        except ValueError as error:
            if "could not convert string" in str(error):
                message = f"The y parameter must hold numbers ({error}); for classes use StationaryClassifier."
                raise ValueError(message) from error
            raise
        if y.ndim > 2 or y.ndim == 0 or (y.ndim == 2 and y.shape[1] == 0):
            raise ValueError(f"The y parameter must have shape (n,) or (n, targets), got {y.shape} instead.")
        if float(np.abs(y).max()) > LARGEST:
            raise ValueError(f"The y parameter holds values beyond {LARGEST:g} in size; rescale or clip them first.")
        return y

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fits to rows X, (n, d), and targets y, (n,) or (n, k).

        Args:
            X: The rows.
            y: Their targets.
            sample_weight: How many rows each row stands for; (n,). A weight of 0 leaves the row out.
        """
        self.check_parameters()
        y = self._targets(y)
        training = self._training(X, y, sample_weight)
        columns = training.y.reshape(len(training.y), -1).T
        for number, target in enumerate(columns):
            if target.max() == target.min():
                which = "" if y.ndim == 1 else f" in column {number}"
                raise ValueError(
                    f"The y parameter must hold at least two different values{which}, got {target[0]:g} only."
                )

        def fit(part: Training, task: Task) -> list[RegressionMixture]:
            targets = part.y.reshape(len(part.y), -1).T
            return [fit_regression(part.x, as_tensor(own, part.x), part.weight, task) for own in targets]

        self._remember(*self._fit_mixtures(training, fit))
        self._one_target = y.ndim == 1
        self._describe()
        return self

    def _describe(self) -> None:
        """The numbers that follow from the mixtures."""
        device = torch.device(self._device())
        stds = [float(mixture.prior(device).moments()[1]) for mixture in self.mixtures_]
        noises = [_noise(mixture) for mixture in self.mixtures_]
        evidences = [_heaviest_on_columns(mixture).head.log_evidence for mixture in self.mixtures_]
        self.prior_std_ = self._shaped(np.array(stds))
        self.noise_ = self._shaped(np.array(noises))
        self.log_marginal_likelihood_ = float(sum(evidences))

    def _shaped(self, values: np.ndarray) -> Any:
        """A number for a single target, else one for each."""
        return float(values[0]) if self._one_target else values

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Takes in more rows. The first call is ``fit``; later ones keep its columns, hyperparameters, networks and weights.

        Every head's posterior is then exactly that of all rows so far, given its anchors. The threshold stays.
        """
        if not hasattr(self, "mixtures_"):
            return self.fit(X, y, sample_weight)
        y = self._targets(y)
        x = self._inputs(X).cpu().numpy()
        if len(x) != len(y):
            raise ValueError(f"X and y must have the same number of rows, got {len(x)} and {len(y)} instead.")
        weight = np.ones(len(y)) if sample_weight is None else np.asarray(sample_weight, dtype=np.float64)
        if weight.shape != (len(y),) or not np.isfinite(weight).all() or (weight <= 0).any():
            raise ValueError("The sample_weight parameter must hold a positive number for each row.")
        first, weight = merge_equal_rows(x, y, weight)
        like = torch.from_numpy(x[first]).to(self._device())
        targets = y[first].reshape(len(first), -1).T
        if len(targets) != len(self.mixtures_):
            raise ValueError(f"The y parameter must hold {len(self.mixtures_)} targets, got {len(targets)} instead.")
        for mixture, target in zip(self.mixtures_, targets, strict=True):
            mixture.update(like, as_tensor(target, like), torch.from_numpy(weight).to(like))
        self._describe()
        return self

    # ------------------------------------------------------------------ predictions

    def _map(self, X: Any, answer: Callable[[NormalMixture], Tensor]) -> np.ndarray:
        """What an answer says of every row: (n, ...) for a single target, else (n, ..., k)."""
        parts = [
            torch.stack([answer(m.predict(Inputs(x, m.extractors))) for m in self.mixtures_], -1)
            for x in self._inputs(X).split(FEATURE_CHUNK_ROWS)
        ]
        found = torch.cat(parts).cpu().numpy()
        return found[..., 0] if self._one_target else found

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
        levels = list(np.atleast_1d(np.asarray(quantiles, dtype=np.float64)))
        if not levels or not all(0 < level < 1 for level in levels):
            raise ValueError(f"The quantiles parameter must hold numbers between 0 and 1, got {quantiles!r} instead.")
        return self._map(X, lambda mixture: torch.stack([mixture.quantile(float(q)) for q in levels], 1))

    def predict_interval(self, X: Any, coverage: float = 0.9) -> np.ndarray:
        """Ends, (n, 2), of the central interval that holds the target with probability ``coverage``."""
        if not 0 < coverage < 1:
            raise ValueError(f"The coverage parameter must lie between 0 and 1, got {coverage!r} instead.")
        return self.predict_quantiles(X, (0.5 - coverage / 2, 0.5 + coverage / 2))

    def log_prob(self, X: Any, y: Any) -> np.ndarray:
        """Log density of each target, (n,); summed over several targets."""
        y = self._targets(y)
        x = self._inputs(X)
        if len(x) != len(y):
            raise ValueError(f"X and y must have the same number of rows, got {len(x)} and {len(y)} instead.")
        targets = as_tensor(y.reshape(len(y), -1), x)
        if targets.shape[1] != len(self.mixtures_):
            raise ValueError(
                f"The y parameter must hold {len(self.mixtures_)} targets, got {targets.shape[1]} instead."
            )
        parts = []
        for rows, own in zip(x.split(FEATURE_CHUNK_ROWS), targets.split(FEATURE_CHUNK_ROWS), strict=True):
            found = [m.predict(Inputs(rows, m.extractors)).log_prob(own[:, k]) for k, m in enumerate(self.mixtures_)]
            parts.append(torch.stack(found).sum(0))
        return torch.cat(parts).cpu().numpy()

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """Draws of y at all rows together, (n, n_samples): each a function from the posterior of one member, plus noise."""
        if not isinstance(n_samples, Integral) or n_samples < 1:
            raise ValueError(f"The n_samples parameter must be an integer of at least 1, got {n_samples!r} instead.")
        x = self._inputs(X)
        generator = torch.Generator().manual_seed(int(check_random_state(random_state).randint(2**31 - 1)))
        draws = [_sample(mixture, x, int(n_samples), generator) for mixture in self.mixtures_]
        found = torch.stack(draws, -1).cpu().numpy()
        return found[..., 0] if self._one_target else found


def _noise(mixture: RegressionMixture) -> float:
    """Noise in units of the target: at the middle of the data where the target is mapped."""
    total = 0.0
    for member in mixture.members:
        zero, std = torch.zeros(1, dtype=torch.float64), torch.tensor([member.head.noise], dtype=torch.float64)
        total += member.weight * float(member.map.moments(zero, std)[1])
    return float(np.exp(mixture.spread.constant)) * total**0.5


def _heaviest_on_columns(mixture: RegressionMixture) -> Member:
    """The member on the columns that counts most; the first of all where none stands on them."""
    wide = [member for member in mixture.members if member.network is None]
    return max(wide or mixture.members, key=lambda member: member.weight)


@torch.no_grad()
def _sample(mixture: RegressionMixture, x: Tensor, samples: int, generator: torch.Generator) -> Tensor:
    """Draws of one target at all rows together, (n, samples)."""
    inputs = Inputs(x, mixture.extractors)
    weights = torch.tensor([member.weight for member in mixture.members], dtype=torch.float64)
    chosen = torch.multinomial(weights, samples, replacement=True, generator=generator)
    plain = mixture.predict(inputs)  # its means are the members'; its spread depends on them
    factor = mixture.spread(x, mapped_mean(plain))
    draws = torch.empty(len(x), samples, dtype=torch.float64, device=x.device)
    for number, member in enumerate(mixture.members):
        own = torch.nonzero(chosen == number)[:, 0]
        if not len(own):
            continue
        mean, covariance = member.head.covariance(inputs.of(member.network))
        covariance.diagonal().add_(ROOT_JITTER * covariance.diagonal().mean() + 1e-12)
        root = torch.linalg.cholesky(covariance)
        normal = torch.randn(2, len(x), len(own), generator=generator, dtype=torch.float64).to(x.device)
        deviation = root @ normal[0] + member.head.noise * normal[1]
        draws[:, own.to(x.device)] = member.map.inverse(mean[:, None] + factor[:, None] * deviation)
    return draws
