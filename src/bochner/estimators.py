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
from numbers import Integral
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state, column_or_1d
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from bochner.estimator_base import AMPLITUDES, DRAWS, FOLDS, HELD_OUT, LARGEST, NOISES, Stationary, laplace_posterior
from bochner.likelihoods import Categorical, Gaussian
from bochner.models import Model
from bochner.posteriors.closed_form import ClosedForm, Statistics
from bochner.posteriors.closed_form_classifier import ClosedFormClassifier, average_classes
from bochner.posteriors.laplace import Laplace
from bochner.predictive import CategoricalPredictive, GaussianPredictive, central_interval


def _streams(estimator: Any) -> bool:
    if estimator.posterior != "closed_form":
        raise AttributeError("This needs posterior='closed_form'.")
    return True


class StationaryRegressor(RegressorMixin, Stationary):
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
            self.statistics_ = self._sums(x, t)
            self._describe(laplace_posterior(self.model_, x, t))
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

        The posterior is then exactly that of all rows so far. The threshold rises where the new rows ask for it, and never falls.
        """
        if not hasattr(self, "posterior_"):
            return self.fit(X, y)
        X, y = self._rows(X, y, reset=False)
        x = self._inputs(X)
        self.posterior_.update(x, torch.from_numpy((y - self.y_mean_) / self.y_scale_)[:, None].to(x))
        self._keep(self.posterior_, x)
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
        return np.stack(central_interval(*self._moments(X), coverage), axis=1)

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


class StationaryClassifier(ClassifierMixin, Stationary):
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
            splits = [(learn, held)]
        else:
            splits = self._splits(order, classes)
            onehot = torch.nn.functional.one_hot(target, classes).to(x)
            lengthscale, _, _ = self._tuned(x, (onehot - onehot.mean(0)) / onehot.std(), tuning, order)
            options: Any = {"lengthscale": lengthscale}
            self.model_ = self._network(x.shape[1], classes, Categorical(), drawing, **options)
            options["width"] = min(int(self.width), 200)
            trial = self._network(x.shape[1], classes, Categorical(), tuning, **options)
        self.amplitude_ = 1.0
        if self.posterior == "closed_form":
            self.amplitude_ = self._best_amplitude(trial, x, target, splits)
            self._say(f"Laplace posterior of the output layer over {len(x)} rows")
            generator = torch.Generator().manual_seed(drawing)
            posterior: Any = ClosedFormClassifier(
                self.model_, x, target, amplitude=self.amplitude_, samples=DRAWS, generator=generator
            )
        else:
            posterior = laplace_posterior(self.model_, x, target)
        self.statistics_ = self._sums(x, torch.zeros_like(x[:, :1]))
        self._describe(posterior)
        self._cover(x)
        return self

    def _splits(self, order: Tensor, classes: int) -> list[tuple[Tensor, Tensor]]:
        """Rows to learn from and rows to choose with: folds of a small table, one split of up to 4,000 rows of a large one.

        The last rows of the order, one of each class, are always learnt from.
        """
        always, rest = order[-classes:], order[:-classes][: 2 * HELD_OUT]
        folds = [fold for fold in rest.chunk(FOLDS) if len(fold)]
        pairs = [(torch.cat([always, rest[~torch.isin(rest, fold)]]), fold) for fold in folds]
        return (pairs if len(rest) < 1000 else pairs[:1]) or [(order, order)]

    def _best_amplitude(self, model: Model, x: Tensor, y: Tensor, splits: list[tuple[Tensor, Tensor]]) -> float:
        """Prior standard deviation of the outputs under which held-out rows are most probable."""
        self._say(f"choosing the amplitude on {sum(len(held) for _, held in splits)} rows")

        def score(amplitude: float) -> float:
            options: Any = {"amplitude": amplitude, "samples": 64, "steps": 15, "full_limit": 1000}
            total = 0.0
            for learn, held in splits:
                generator = torch.Generator().manual_seed(0)
                posterior = ClosedFormClassifier(model, x[learn], y[learn], generator=generator, **options)
                total += float(posterior.predict(x[held]).log_prob(y[held]).sum())
            return total

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
