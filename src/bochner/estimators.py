r"""Scikit-learn estimators: a table in, predictions out that say how sure they are and which rows look like nothing seen before.

Inputs and targets are standardised inside, and everything that comes out is in the original units. Without hidden layers the
lengthscale of every column, the noise and the amplitude maximise the marginal likelihood of up to a thousand rows under one draw
of the units; another, wider draw then predicts, so that no unit is fitted to the data. With hidden layers the whole network is
trained first, on nine rows in ten; the others choose the noise (for classes the amplitude), and the output layer is integrated
out over all rows.

The score of a row is the share of the prior variance of $f$ that the training rows leave there: near 0 among the data, towards 1
far away. It does not look at labels; for classes every row counts a quarter, the largest curvature of a softmax. For the training
rows themselves it is computed as if each were left out, $v / (1 - hv)$ for a row of weight $h$; the threshold is a quantile of
these.
"""

import math
import sys
from collections.abc import Iterator
from numbers import Integral, Real
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state, column_or_1d
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from bochner import activations, spectra
from bochner.activations import unknown
from bochner.layers import StationaryLayer
from bochner.likelihoods import Categorical, Gaussian, Likelihood
from bochner.models import Model
from bochner.networks import mlp
from bochner.posteriors.closed_form import (
    ClosedForm,
    ClosedFormClassifier,
    Statistics,
    average_classes,
    cholesky,
    features,
    prior_precision,
    tune_marginal,
)
from bochner.posteriors.laplace import Laplace
from bochner.predictive import CategoricalPredictive, GaussianPredictive
from bochner.training import Recipe, fit_map

POSTERIORS = ("closed_form", "laplace")
CHUNK = 4096  # rows that are predicted at a time
TUNING_ROWS, TUNING_WIDTH, TUNING_STEPS = 1000, 500, 60
TRAINING_STEPS, BATCH = 5000, 64
HELD_OUT = 2000  # at most so many rows choose the noise or the amplitude
NOISES = tuple(2.0 ** (k / 2) for k in range(-10, 2))  # in standard deviations of the target
DRAWS = 256
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


def _laplace(model: Model, x: Tensor, y: Tensor) -> Laplace:
    """KFAC over all layers, laid out in memory as a file lays it out: then a loaded model predicts the same bits."""
    posterior = Laplace(model, x, y)
    posterior.state = [tuple(t.contiguous() for t in part) for part in posterior.state]
    return posterior


class _Stationary(BaseEstimator):
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
        """Standardised rows on the device."""
        return torch.from_numpy((X - self.x_mean_) / self.x_scale_).to(self.model_.layer.weight.device)

    def _start(self, X: np.ndarray) -> tuple[Tensor, Tensor, int, int]:
        """Standardised rows on the device, an order of theirs, and seeds for the draw that is tuned and the one that predicts."""
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
        start = torch.full((dim,), math.sqrt(dim), dtype=torch.float64)
        outputs = activations.resolve(self.activation).outputs
        width = min(int(self.width), TUNING_WIDTH)
        model = self._network(dim, y.shape[1], Gaussian(0.3), seed, lengthscale=start, width=width - width % outputs)
        self._say(f"tuning {dim} lengthscales, noise and amplitude on {len(rows)} rows")
        amplitude, _ = tune_marginal(model, x[rows], y[rows], steps=TUNING_STEPS, lr=0.1)
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
        if len(x) == 0:
            return
        scores = self._scores(x[:: math.ceil(len(x) / 10_000)], left_out=True)
        self.ood_threshold_ = float(np.quantile(scores, 1 - self.false_alarm))

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


def _streams(estimator: Any) -> bool:
    if estimator.posterior != "closed_form":
        raise AttributeError("partial_fit needs posterior='closed_form'.")
    return True


class StationaryRegressor(RegressorMixin, _Stationary):
    """Regression that knows how sure it is: a network with a stationary prior, for scikit-learn.

    Args:
        kernel: The prior's kernel: "matern32", "matern52", "rbf", "exponential" or a Spectrum.
        activation: "paired" (a sine and a cosine for each frequency), "sin", "sincos", "triangle", "periodic_relu".
        posterior: "closed_form", exact given the features; or "laplace", KFAC over all layers of the trained network.
        width: Units of the model layer.
        hidden: Widths of trained layers before it, such as (200, 25); none for small tables.
        false_alarm: Share of rows like the training data whose ``ood_score`` may exceed ``ood_threshold_``.
        device: "auto" (a GPU where there is one), "cpu" or "cuda".
        random_state: Seed of every draw.
        verbose: Whether to say what takes time.

    Attributes:
        model_: The network, in standardised units.
        posterior_: Its posterior.
        lengthscale_: Of every column, in its units; without hidden layers.
        noise_: Standard deviation of the noise, in units of the target.
        log_marginal_likelihood_: Evidence of the training data; under the closed form.
        ood_threshold_: Score beyond which a row is unlike the training data.
    """

    def _rows(self, X: Any, y: Any, *, reset: bool) -> tuple[np.ndarray, np.ndarray]:
        """Checked rows and targets."""
        if y is None:
            raise ValueError("This StationaryRegressor requires y to be passed, but the target y is None.")
        y = column_or_1d(y, warn=True)
        try:
            y = y.astype(np.float64)
        except (TypeError, ValueError) as error:
            message = f"The y parameter must hold numbers ({error}); for classes use StationaryClassifier."
            raise ValueError(message) from error
        X, y = self._validated(X, y, reset=reset)
        if float(np.abs(y).max()) > LARGEST:
            raise ValueError(f"The y parameter holds values beyond {LARGEST:g} in size; rescale or clip them first.")
        return X, y

    def fit(self, X: Any, y: Any) -> Self:
        """Fits to rows X, (n, d), and targets y, (n,)."""
        self._check_parameters()
        X, y = self._rows(X, y, reset=True)
        if y.max() == y.min():
            raise ValueError(f"The y parameter must hold at least two different values, got {y[0]:g} only.")
        x, order, tuning, drawing = self._start(X)
        self.y_mean_, self.y_scale_ = float(y.mean()), float(y.std())
        t = torch.from_numpy((y - self.y_mean_) / self.y_scale_)[:, None].to(x)
        self.amplitude_ = 1.0
        if self.hidden or self.posterior == "laplace":
            self.model_ = self._trained_with_noise(x, t, order, drawing)
        else:
            lengthscale, noise, self.amplitude_ = self._tuned(x, t, tuning, order)
            self.model_ = self._network(x.shape[1], 1, Gaussian(noise), drawing, lengthscale=lengthscale)
        self._say(f"integrating the output layer out over {len(x)} rows")
        if self.posterior == "closed_form":
            self._keep(ClosedForm(self.model_, x, t, amplitude=self.amplitude_), x)
        else:
            self.statistics_ = Statistics.of(self.model_, x, t)
            self._describe(_laplace(self.model_, x, t))
            self._cover(x)
        return self

    def _trained_with_noise(self, x: Tensor, t: Tensor, order: Tensor, seed: int) -> Model:
        """Trained on nine rows in ten; the noise is the one under which the closed form predicts the others best."""
        learn, held = self._held_out(order)
        model = self._trained(x[learn], t[learn], 1, Gaussian(0.3), seed)
        statistics = Statistics.of(model, x[learn], t[learn])

        def score(noise: float) -> float:
            model.likelihood.log_noise.data.fill_(math.log(noise))  # pyright: ignore
            prediction = ClosedForm.from_statistics(model, statistics).predict(x[held])
            return float(prediction.log_prob(t[held]).mean())

        model.likelihood.log_noise.data.fill_(math.log(max(NOISES, key=score)))  # pyright: ignore
        return model

    def _describe(self, posterior: Any) -> None:
        """Takes a posterior and the numbers that follow from it."""
        self.posterior_ = posterior
        noise = float(self.model_.likelihood.noise.detach())  # pyright: ignore
        self.noise_, self.row_weight_ = noise * self.y_scale_, noise**-2
        if not self.hidden:
            self.lengthscale_ = self.model_.layer.lengthscale.detach().cpu().numpy() * self.x_scale_
        if isinstance(posterior, ClosedForm):
            self.statistics_ = posterior.statistics
            self.log_marginal_likelihood_ = posterior.log_marginal_likelihood - posterior.statistics.count * math.log(
                self.y_scale_
            )

    def _keep(self, posterior: ClosedForm, x: Tensor) -> None:
        """Takes a closed form; its factor is what the score needs."""
        self._describe(posterior)
        self._cover(x, posterior.factor)

    @available_if(_streams)
    def partial_fit(self, X: Any, y: Any) -> Self:
        """Takes in more rows. The first call is ``fit``; later ones keep its scales, lengthscales, noise and amplitude.

        The posterior is then exactly that of all rows so far. The threshold follows the last rows, where they are enough to tell
        it: one over ``false_alarm``.
        """
        if not hasattr(self, "posterior_"):
            return self.fit(X, y)
        X, y = self._rows(X, y, reset=False)
        x = self._inputs(X)
        self.posterior_.update(x, torch.from_numpy((y - self.y_mean_) / self.y_scale_)[:, None].to(x))
        self._keep(self.posterior_, x if len(x) * self.false_alarm >= 1 else x[:0])
        return self

    def _moments(self, X: Any) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of y at each row, noise included, in its units."""
        parts: list[GaussianPredictive] = list(self._chunks(X))
        mean = torch.cat([p.mean[:, 0] for p in parts]).cpu().numpy() * self.y_scale_ + self.y_mean_
        return mean, torch.cat([p.std[:, 0] for p in parts]).cpu().numpy() * self.y_scale_

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Mean of the prediction at each row; with ``return_std`` its standard deviation too, noise included."""
        mean, std = self._moments(X)
        return (mean, std) if return_std else mean

    def predict_interval(self, X: Any, coverage: float = 0.9) -> np.ndarray:
        """Lower and upper ends, (n, 2), of the central interval that holds y with probability ``coverage``."""
        if not isinstance(coverage, Real) or not 0 < coverage < 1:
            raise ValueError(f"The coverage parameter must lie between 0 and 1, got {coverage!r} instead.")
        mean, std = self._moments(X)
        half = float(torch.special.ndtri(torch.tensor(0.5 + float(coverage) / 2, dtype=torch.float64))) * std
        return np.stack([mean - half, mean + half], axis=1)

    @available_if(_streams)
    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """Draws of y at all rows together, (n, n_samples): a function from the posterior each, plus noise."""
        check_is_fitted(self)
        if not isinstance(n_samples, Integral) or n_samples < 1:
            raise ValueError(f"The n_samples parameter must be an integer of at least 1, got {n_samples!r} instead.")
        x = self._inputs(self._validated(X, reset=False))
        generator = torch.Generator().manual_seed(int(check_random_state(random_state).randint(2**31 - 1)))
        f = self.posterior_.sample(x, n_samples, generator=generator)[:, :, 0].cpu()
        noise = torch.randn(f.shape, generator=generator, dtype=torch.float64) * self.posterior_.noise.cpu()
        return (f + noise).mT.numpy() * self.y_scale_ + self.y_mean_


class StationaryClassifier(ClassifierMixin, _Stationary):
    """Classification that knows when it does not know: a network with a stationary prior, for scikit-learn.

    Far from the training rows the probabilities tend to those of the prior: the same for all classes, as nearly as the width lets
    them.

    Args:
        kernel: The prior's kernel: "matern32", "matern52", "rbf", "exponential" or a Spectrum.
        activation: "paired" (a sine and a cosine for each frequency), "sin", "sincos", "triangle", "periodic_relu".
        posterior: "closed_form", Laplace's of the output layer; or "laplace", KFAC over all layers of the trained network.
        width: Units of the model layer.
        hidden: Widths of trained layers before it, such as (200, 25); none for small tables.
        false_alarm: Share of rows like the training data whose ``ood_score`` may exceed ``ood_threshold_``.
        device: "auto" (a GPU where there is one), "cpu" or "cuda".
        random_state: Seed of every draw.
        verbose: Whether to say what takes time.

    Attributes:
        classes_: The labels, in the order of the columns of ``predict_proba``.
        model_: The network, in standardised units.
        posterior_: Its posterior.
        amplitude_: Prior standard deviation of each class's output.
        lengthscale_: Of every column, in its units; without hidden layers.
        ood_threshold_: Score beyond which a row is unlike the training data.
    """

    def fit(self, X: Any, y: Any) -> Self:
        """Fits to rows X, (n, d), and labels y, (n,)."""
        self._check_parameters()
        if y is None:
            raise ValueError("This StationaryClassifier requires y to be passed, but the target y is None.")
        X, y = self._validated(X, column_or_1d(y, warn=True), reset=True)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"The y parameter must hold at least two classes, got one class only: {str(self.classes_[0])!r}."
            )
        x, order, tuning, drawing = self._start(X)
        target, classes = torch.from_numpy(labels).long().to(x.device), len(self.classes_)
        # One row of every class goes to the end of the order, where rows are always learnt from.
        last = torch.stack([order[target[order] == c][0] for c in range(classes)])
        order = torch.cat([order[~torch.isin(order, last)], last])
        if self.hidden or self.posterior == "laplace":
            learn, held = self._held_out(order)
            self.model_ = trial = self._trained(x[learn], target[learn], classes, Categorical(), drawing)
        else:
            learn, held = self._held_out(order)
            learn = learn[-HELD_OUT:]
            onehot = torch.nn.functional.one_hot(target, classes).to(x)
            lengthscale, _, _ = self._tuned(x, (onehot - onehot.mean(0)) / onehot.std(), tuning, order)
            self.model_ = self._network(x.shape[1], classes, Categorical(), drawing, lengthscale=lengthscale)
            trial = self._network(
                x.shape[1], classes, Categorical(), tuning, lengthscale=lengthscale, width=min(int(self.width), 400)
            )
        self.amplitude_ = 1.0
        if self.posterior == "closed_form":
            self.amplitude_ = self._best_amplitude(trial, x, target, learn, held)
            self._say(f"Laplace posterior of the output layer over {len(x)} rows")
            generator = torch.Generator().manual_seed(drawing)
            options: Any = {"amplitude": self.amplitude_, "samples": DRAWS, "generator": generator}
            posterior: Any = ClosedFormClassifier(self.model_, x, target, **options)
        else:
            posterior = _laplace(self.model_, x, target)
        self.statistics_ = Statistics.of(self.model_, x, torch.zeros_like(x[:, :1]))
        self._describe(posterior)
        self._cover(x)
        return self

    def _best_amplitude(self, model: Model, x: Tensor, y: Tensor, learn: Tensor, held: Tensor) -> float:
        """Prior standard deviation of the outputs under which the held-out rows are most probable."""
        self._say(f"choosing the amplitude on {len(held)} rows")

        def score(amplitude: float) -> float:
            generator = torch.Generator().manual_seed(0)
            options: Any = {"amplitude": amplitude, "samples": 64, "steps": 30, "full_limit": 1000}
            posterior = ClosedFormClassifier(model, x[learn], y[learn], generator=generator, **options)
            return float(posterior.predict(x[held]).log_prob(y[held]).mean())

        return max(AMPLITUDES, key=score)

    def _describe(self, posterior: Any) -> None:
        """Takes a posterior and the numbers that follow from it."""
        self.posterior_, self.row_weight_ = posterior, 0.25
        if not self.hidden:
            self.lengthscale_ = self.model_.layer.lengthscale.detach().cpu().numpy() * self.x_scale_

    def _predictive(self, x: Tensor) -> CategoricalPredictive:
        if isinstance(self.posterior_, Laplace):
            mean, covariance = self.posterior_.output_moments(x)
            return average_classes(mean[0], covariance[0], samples=DRAWS, seed=0)
        return self.posterior_.predict(x)

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probability of each class at each row, (n, c), averaged over the posterior."""
        parts: list[CategoricalPredictive] = list(self._chunks(X))
        return torch.cat([p.probabilities for p in parts]).cpu().numpy()

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of each row."""
        chosen = self.predict_proba(X).argmax(1)
        return self.classes_[chosen]
