"""What both estimators share: parameters, standardisation, the network, and the score for rows unlike the training data."""

import math
import sys
from collections.abc import Iterator
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from bochner import activations, spectra
from bochner.activations import unknown
from bochner.layers import StationaryLayer
from bochner.likelihoods import Gaussian, Likelihood
from bochner.models import Model
from bochner.networks import mlp
from bochner.posteriors.closed_form import (
    Statistics,
    cholesky,
    features,
    prior_precision,
    tune_marginal,
)
from bochner.posteriors.laplace import Laplace
from bochner.training import Recipe, fit_map

POSTERIORS = ("closed_form", "laplace")
CHUNK = 4096  # rows that are predicted at a time
TUNING_ROWS, TUNING_WIDTH, TRIAL_STEPS, TUNING_STEPS = 1000, 500, 15, 50
TRAINING_STEPS, BATCH = 5000, 64
HELD_OUT = 2000  # at most so many rows choose the noise or the amplitude
NOISES = tuple(2.0 ** (k / 2) for k in range(-10, 2))  # in standard deviations of the target
DRAWS = 256
FOLDS = 3
AMPLITUDES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
LARGEST = 1e100  # beyond, sums of squares overflow

MISSING = (
    "Put SimpleImputer before it: make_pipeline(SimpleImputer(), {name}()). "
    "The command 'bochner fit' takes missing values as they are."
)
TEXT = (
    "Encode text columns first: make_pipeline(make_column_transformer((OneHotEncoder(handle_unknown='ignore'), "
    "make_column_selector(dtype_exclude='number')), remainder='passthrough'), {name}()). "
    "The command 'bochner fit' takes text as it is."
)


def _cosine(progress: float) -> float:
    return 0.5 + 0.5 * math.cos(math.pi * progress)


def laplace_posterior(model: Model, x: Tensor, y: Tensor) -> Laplace:
    """KFAC over all layers, laid out in memory as a file lays it out: then a loaded model predicts the same bits."""
    posterior = Laplace(model, x, y)
    posterior.state = [tuple(t.contiguous() for t in part) for part in posterior.state]
    return posterior


class Stationary(BaseEstimator):
    """What both estimators share: parameters, standardisation, the network, and the score for rows unlike the training data."""

    model_: Model
    posterior_: Any
    statistics_: Statistics
    amplitude_: float
    row_weight_: float

    def __init__(
        self,
        *,
        kernel: Any = "matern32",
        activation: Any = "paired",
        posterior: str = "closed_form",
        width: int = 1000,
        hidden: tuple[int, ...] = (),
        false_alarm: float = 0.05,
        device: str = "auto",
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        self.kernel = kernel
        self.activation = activation
        self.posterior = posterior
        self.width = width
        self.hidden = hidden
        self.false_alarm = false_alarm
        self.device = device
        self.random_state = random_state
        self.verbose = verbose

    # ------------------------------------------------------------------ checks

    def _check_parameters(self) -> None:
        spectra.resolve(self.kernel)
        outputs = activations.resolve(self.activation).outputs
        if self.posterior not in POSTERIORS:
            raise ValueError(unknown("posterior", self.posterior, POSTERIORS))
        if not isinstance(self.width, Integral) or self.width < 2 or int(self.width) % outputs:
            even = " and even under this activation" if outputs > 1 else ""
            raise ValueError(f"The width parameter must be an integer of at least 2{even}, got {self.width!r} instead.")
        good = isinstance(self.hidden, tuple | list) and all(isinstance(h, Integral) and h > 0 for h in self.hidden)
        if not good:
            raise ValueError(
                f"The hidden parameter must be a tuple of positive widths, such as (100, 25), got {self.hidden!r} instead."
            )
        if not isinstance(self.false_alarm, Real) or not 0 < self.false_alarm < 1:
            raise ValueError(f"The false_alarm parameter must lie between 0 and 1, got {self.false_alarm!r} instead.")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(unknown("device", self.device, ("auto", "cpu", "cuda")))
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("The device parameter asks for a GPU ('cuda'), but torch sees none; use device='cpu'.")

    def _validated(self, X: Any, y: Any = "no_validation", *, reset: bool) -> Any:
        """Scikit-learn's checks, whose errors get the step that helps."""
        try:
            return validate_data(self, X, y, dtype=np.float64, reset=reset, ensure_min_samples=2 if reset else 1)
        except ValueError as error:
            text = str(error)
            if "NaN" in text and "y contains" not in text and "Input y" not in text:
                raise ValueError(f"{text.splitlines()[0]} {MISSING.format(name=type(self).__name__)}") from error
            if "could not convert string to float" in text:
                raise ValueError(f"{text}. {TEXT.format(name=type(self).__name__)}") from error
            raise

    def _inputs(self, X: np.ndarray) -> Tensor:
        """Standardised rows on the device; a value a million standard deviations away is as far as any."""
        with np.errstate(over="ignore"):
            x = np.clip((X - self.x_mean_) / self.x_scale_, -1e6, 1e6)
        return torch.from_numpy(x).to(self.model_.layer.weight.device)

    def _start(self, X: np.ndarray) -> tuple[Tensor, Tensor, int, int]:
        """Standardised rows on the device, an order of theirs, and seeds for the draw that is tuned and the one that predicts."""
        for name in ("lengthscale_", "log_marginal_likelihood_", "ood_threshold_"):
            self.__dict__.pop(name, None)  # of an earlier fit
        if float(np.abs(X).max()) > LARGEST:
            column = int(np.abs(X).max(0).argmax())
            raise ValueError(f"Column {column} of X holds values beyond {LARGEST:g} in size; rescale or clip it first.")
        self.x_mean_, self.x_scale_ = X.mean(0), X.std(0)
        # A constant column has a spread of rounding errors, if any: it says nothing, and keeps its scale.
        self.x_scale_[self.x_scale_ <= 1e-12 * np.abs(self.x_mean_)] = 1.0
        tuning, drawing, ordering = (int(s) for s in check_random_state(self.random_state).randint(2**31 - 1, size=3))
        order = torch.randperm(len(X), generator=torch.Generator().manual_seed(ordering))
        x = torch.from_numpy((X - self.x_mean_) / self.x_scale_)
        return x.to(self._device()), order.to(self._device()), tuning, drawing

    def _device(self) -> str:
        return ("cuda" if torch.cuda.is_available() else "cpu") if self.device == "auto" else self.device

    # ------------------------------------------------------------------ the network

    def _network(self, inputs: int, outputs: int, likelihood: Likelihood, seed: int, **options: Any) -> Model:
        generator = torch.Generator().manual_seed(seed)
        extractor = mlp(inputs, tuple(self.hidden), dropout=0.0, generator=generator) if self.hidden else None
        layer = StationaryLayer(
            self.hidden[-1] if self.hidden else inputs,
            int(options.get("width", self.width)),
            kernel=self.kernel,
            activation=self.activation,
            lengthscale=options["lengthscale"],
            frequencies="sobol",
            generator=generator,
            dtype=torch.float64,
        )
        model = Model(layer, outputs, likelihood, extractor=extractor, generator=generator)
        return model.double().to(self._device())

    def _tuned(self, x: Tensor, y: Tensor, seed: int, order: Tensor) -> tuple[Tensor, float, float]:
        """Lengthscales, noise and amplitude of the largest marginal likelihood, under a draw of units of its own."""
        rows, dim = order[:TUNING_ROWS], x.shape[1]
        outputs = activations.resolve(self.activation).outputs
        width = min(int(self.width), TUNING_WIDTH)
        width -= width % outputs
        self._say(f"tuning {dim} lengthscales, noise and amplitude on {len(rows)} rows")

        def tune(scale: float) -> tuple[float, float, Model]:
            start = torch.full((dim,), scale * math.sqrt(dim), dtype=torch.float64)
            model = self._network(dim, y.shape[1], Gaussian(0.3), seed, lengthscale=start, width=width)
            amplitude, history = tune_marginal(model, x[rows], y[rows], steps=TRIAL_STEPS, lr=0.1)
            return history[-1], amplitude, model

        # Fast waves hide from a start at long lengthscales: the best of three goes on.
        _, amplitude, model = max((tune(scale) for scale in (1.0, 0.25, 1 / 16)), key=lambda found: found[0])
        amplitude, _ = tune_marginal(model, x[rows], y[rows], steps=TUNING_STEPS, lr=0.1, amplitude=amplitude)
        return model.layer.lengthscale.detach(), float(model.likelihood.noise.detach()), amplitude  # pyright: ignore

    def _trained(self, x: Tensor, y: Tensor, outputs: int, likelihood: Likelihood, seed: int) -> Model:
        """The whole network at its MAP estimate."""
        size = self.hidden[-1] if self.hidden else x.shape[1]
        start: Any = 1.0 if self.hidden else torch.full((size,), math.sqrt(size), dtype=torch.float64)
        model = self._network(x.shape[1], outputs, likelihood, seed, lengthscale=start)
        epochs = max(3, min(200, TRAINING_STEPS * BATCH // len(x)))
        recipe = Recipe(epochs, min(BATCH, len(x)), lr=2e-3, schedule=_cosine)
        fit = fit_map(model, x, y, recipe, seed=seed % 2**31, progress=bool(self.verbose))
        if bool(fit.diverged.any()):
            raise ValueError("Training diverged; use fewer or narrower hidden layers, or another random_state.")
        return model.eval()

    def _held_out(self, order: Tensor) -> tuple[Tensor, Tensor]:
        """Rows to learn from, and the first tenth to choose with."""
        cut = min(HELD_OUT, max(1, len(order) // 10))
        return order[cut:], order[:cut]

    def _say(self, text: str) -> None:
        if self.verbose:
            print(f"bochner: {text}", file=sys.stderr, flush=True)

    # ------------------------------------------------------------------ rows unlike the training data

    def _cover(self, x: Tensor, factor: Tensor | None = None) -> None:
        """The factor that the score needs, and the threshold that training rows give when each is left out."""
        self._factorise(factor)
        scores = self._scores(x[:: math.ceil(len(x) / 10_000)], left_out=True)
        # Rows that came later may be all alike: they never make the alarm more sensitive than it was.
        self.ood_threshold_ = max(
            self.__dict__.get("ood_threshold_", 0.0), float(np.quantile(scores, 1 - self.false_alarm))
        )

    @torch.no_grad()
    def _sums(self, x: Tensor, y: Tensor) -> Statistics:
        return Statistics.of(self.model_, x, y)

    def _factorise(self, factor: Tensor | None = None) -> None:
        gram = self.statistics_.gram
        prior = prior_precision(self.model_, torch.tensor(self.amplitude_, dtype=torch.float64).to(gram))
        self.cover_ = cholesky(self.row_weight_ * gram + torch.diag(prior)) if factor is None else factor

    def _scores(self, x: Tensor, *, left_out: bool = False) -> np.ndarray:
        parts = []
        with torch.no_grad():
            for part in x.split(CHUNK):
                phi = features(self.model_, part).double()
                variance = torch.linalg.solve_triangular(self.cover_, phi.mT, upper=False).square().sum(0)
                prior = phi.square().sum(1) * self.amplitude_**2 / phi.shape[1]
                if left_out:
                    variance = variance / (1 - self.row_weight_ * variance).clamp(min=1e-12)
                parts.append((variance / prior).clamp(max=1.0).cpu().numpy())
        return np.concatenate(parts)

    def ood_score(self, X: Any) -> np.ndarray:
        """Share of the prior variance that the training rows leave at each row: near 0 among them, 1 far from all of them.

        A row whose score is above ``ood_threshold_`` is unlike the training data; of rows like them a share of ``false_alarm`` is.
        """
        check_is_fitted(self)
        return self._scores(self._inputs(self._validated(X, reset=False)))

    def _chunks(self, X: Any) -> Iterator[Any]:
        """Predictions of consecutive rows, in standardised units."""
        check_is_fitted(self)
        for part in self._inputs(self._validated(X, reset=False)).split(CHUNK):
            yield self._predictive(part)

    def _predictive(self, x: Tensor) -> Any:
        """The prediction at standardised rows."""
        return self.posterior_.predict(x)
