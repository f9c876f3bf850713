r"""Scikit-learn estimators: a table in, predictions out that say how sure they are and which rows look like nothing seen before.

Inputs and targets are standardised inside, and everything that comes out is in the original units. The prediction is a mixture:

- A wide network without hidden layers for each kernel. The lengthscale of every column, the noise and the amplitude maximise the
  marginal likelihood of up to a thousand rows under one draw of the units; another draw then predicts, so that no unit is
  fitted to the data. Fewer than 300 rows tune under a prior.
- From 300 rows on, networks with hidden layers, trained for three lengths of time. Beside every column they see its intervals
  between quantiles. Each sees all rows but a tenth (400 at most). The rows that they have not seen choose the noise of those
  trained for the same time, for classes their amplitude.

The same rows choose the weights, those of the mixture under which they are most probable, and a factor on all noises, so that
the mixture is calibrated and not only its parts. The output layers of all networks that count are then integrated out over all
rows. Class probabilities on which the networks disagree are drawn to even ones. What was tried and measured is in docs/default.md.

The score of a row is the share of the prior variance of $f$ that the training rows leave there under the first wide network: near
0 among the data, towards 1 far away. It does not look at labels; for classes every row counts a quarter, the largest curvature of
a softmax. For the training rows themselves it is computed as if each were left out, $v / (1 - hv)$ for a row of weight $h$; the
threshold is a quantile of these.
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

from bochner.committee import NOISES, Member, agreed, mixed, noise_factor, noise_scores
from bochner.estimator_base import (
    CLASS_AMPLITUDES,
    DRAWS,
    FOLDS,
    HELD_OUT,
    JOINT,
    LARGEST,
    TRAINED_WIDTH,
    TRIAL_ROWS,
    Group,
    Judged,
    Stationary,
)
from bochner.likelihoods import Categorical, Gaussian
from bochner.models import Model
from bochner.posteriors.closed_form import ClosedForm
from bochner.posteriors.closed_form_classifier import ClosedFormClassifier, average_classes
from bochner.posteriors.laplace import Laplace
from bochner.predictive import central_interval


def _streams(estimator: Any) -> bool:
    if estimator.posterior != "closed_form":
        raise AttributeError("This needs posterior='closed_form'.")
    return True


def _noise(model: Model) -> float:
    return float(model.likelihood.noise.detach())  # pyright: ignore


def _set_noise(model: Model, noise: float) -> None:
    model.likelihood.log_noise.data.fill_(math.log(noise))  # pyright: ignore


class StationaryRegressor(RegressorMixin, Stationary):
    """Regression that knows how sure it is: a network with a stationary prior, for scikit-learn.

    Args:
        kernel: The prior's kernel, or several of them: "matern32", "matern52", "rbf", "exponential" or a Spectrum.
        activation: "paired" (a sine and a cosine for each frequency), "sin", "sincos", "triangle", "periodic_relu".
        posterior: "closed_form", exact given the features; or "laplace", KFAC over all layers of one trained network, with the
            first kernel.
        width: Units of the model layer; of those with hidden layers 500 at most.
        hidden: Widths of the hidden layers of trained networks, which join from 300 rows on; () for none of these.
        networks: How many are trained for each of three lengths of time.
        false_alarm: Share of rows like the training data whose ``ood_score`` may exceed ``ood_threshold_``.
        device: "auto" (a GPU where there is one), "cpu" or "cuda".
        random_state: Seed of every draw.
        verbose: Whether to say what takes time.

    Attributes:
        members_: The networks, in standardised units, with their posteriors and weights; the first is that of the first kernel.
        model_: The first network.
        lengthscale_: Its lengthscale of every column, in the column's units.
        log_marginal_likelihood_: Evidence of the training data under it, at its final noise; with the closed form.
        amplitude_: Its prior standard deviation of f, in standard deviations of the target.
        noise_: Standard deviation of the noise, in units of the target.
        prior_std_: Standard deviation of the target under the prior, noise included: that of predictions far from the data, but
            for "laplace", whose spread goes on growing there.
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
        if self.posterior == "closed_form":
            self._committee(x, t, order, 1, tuning, drawing)
        else:
            learn, held = self._held_out(order)
            self.model_, self.amplitude_ = self._single(x[learn], t[learn], 1, Gaussian(0.3), drawing), 1.0
            scores, _ = noise_scores(self.model_, x[learn], t[learn], x[held], t[held], amplitude=1.0)
            _set_noise(self.model_, NOISES[int(scores.argmax())])
            self.statistics_ = self._sums(x, t)
            self.members_ = [Member(self.model_, Laplace(self.model_, x, t), 1.0)]
        self._describe()
        self._cover(x)
        return self

    def _wide(self, x: Tensor, y: Tensor, order: Tensor, outputs: int, tuning: int, drawing: int) -> Group:
        rows, lengthscale, found = order.flip(0), None, []  # blocks come last
        for number, kernel in enumerate(self._kernels()):
            lengthscale, noise, amplitude = self._tuned(x, rows, y[rows], tuning, kernel, lengthscale)
            options: Any = {"kernel": kernel, "lengthscale": lengthscale, "width": self.width}
            model = self._network(x.shape[1], outputs, Gaussian(noise), drawing + number, None, **options)
            found.append((model, amplitude))
        return found

    def _deep(
        self, x: Tensor, y: Tensor, rows: Tensor, unseen: list[Tensor], outputs: int, seeds: list[int], share: float
    ) -> Group:
        options: Any = {"width": min(int(self.width), TRAINED_WIDTH), "share": share}
        models = self._trained(x, y, rows, outputs, Gaussian(0.3), seeds, **options)
        if not models:
            return []
        found = [
            noise_scores(model, x[own], y[own], x[held], y[held])
            for model, own, held in zip(models, rows[:, -TRIAL_ROWS:], unseen, strict=True)
        ]
        best = int(torch.stack([scores for scores, _ in found]).mean(0).argmax())
        for model in models:
            _set_noise(model, NOISES[best])
        return [(model, float(amplitudes[best])) for model, (_, amplitudes) in zip(models, found, strict=True)]

    def _calibrate(self, groups: list[Group], weights: Tensor, judged: list[Judged], targets: list[Tensor]) -> None:
        mixtures = [
            [(float(w) / len(p), part) for w, p in zip(weights, parts, strict=True) for part in p]
            for parts in zip(*judged, strict=True)
        ]
        factor = noise_factor(mixtures, targets)
        for model, _ in (part for group in groups for part in group):
            _set_noise(model, factor * _noise(model))

    def _head(self, model: Model, amplitude: float, x: Tensor, y: Tensor) -> ClosedForm:
        return ClosedForm(model, x, y, amplitude=amplitude)

    def _describe(self) -> None:
        """The numbers that follow from the networks and their posteriors."""
        self.row_weight_ = _noise(self.model_) ** -2
        variance = sum(member.weight * _noise(member.model) ** 2 for member in self.members_)
        self.noise_ = math.sqrt(variance) * self.y_scale_
        self._describe_columns()
        first = self.members_[0].posterior
        if not isinstance(first, ClosedForm):
            self.prior_std_ = math.sqrt(1 + variance) * self.y_scale_
            return
        signal = sum(member.weight * member.posterior.amplitude**2 for member in self.members_)
        self.prior_std_ = math.sqrt(signal + variance) * self.y_scale_
        self.statistics_ = first.statistics
        count = first.statistics.count
        self.log_marginal_likelihood_ = first.log_marginal_likelihood - count * math.log(self.y_scale_)

    @available_if(_streams)
    def partial_fit(self, X: Any, y: Any) -> Self:
        """Takes in more rows. The first call is ``fit``; later ones keep its scales, networks, noise, amplitudes and weights.

        The posterior of every output layer is then exactly that of all rows so far. The threshold rises where the new rows ask for
        it, and never falls.
        """
        if not hasattr(self, "members_"):
            return self.fit(X, y)
        X, y = self._rows(X, y, reset=False)
        x = self._inputs(X)
        t = torch.from_numpy((y - self.y_mean_) / self.y_scale_)[:, None].to(x)
        for member in self.members_:
            member.posterior.update(x, t)
        self._describe()
        self._cover(x)
        return self

    def _moments(self, X: Any) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of y at each row, noise included, in its units."""
        parts = [mixed([(m.weight, m.posterior.predict(x)) for m in self.members_]) for x in self._chunks(X)]
        mean = torch.cat([p.mean[:, 0] for p in parts]).cpu().numpy() * self.y_scale_ + self.y_mean_
        return mean, torch.cat([p.std[:, 0] for p in parts]).cpu().numpy() * self.y_scale_

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Mean of the prediction at each row; with ``return_std`` its standard deviation too, noise included."""
        mean, std = self._moments(X)
        return (mean, std) if return_std else mean

    def predict_interval(self, X: Any, coverage: float = 0.9) -> np.ndarray:
        """Lower and upper ends, (n, 2), of the interval that holds ``coverage`` of a Gaussian of the same mean and spread."""
        return np.stack(central_interval(*self._moments(X), coverage), axis=1)

    @available_if(_streams)
    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """Draws of y at all rows together, (n, n_samples): a function from the posterior of one network each, plus noise."""
        check_is_fitted(self)
        if not isinstance(n_samples, Integral) or n_samples < 1:
            raise ValueError(f"The n_samples parameter must be an integer of at least 1, got {n_samples!r} instead.")
        x = self._inputs(self._validated(X, reset=False))
        generator = torch.Generator().manual_seed(int(check_random_state(random_state).randint(2**31 - 1)))
        weights = torch.tensor([member.weight for member in self.members_], dtype=torch.float64)
        chosen = torch.multinomial(weights, int(n_samples), replacement=True, generator=generator)
        y = torch.empty(int(n_samples), len(x), dtype=torch.float64)
        for number, member in enumerate(self.members_):
            own = torch.nonzero(chosen == number)[:, 0]
            f = member.posterior.sample(x, len(own), generator=generator)[:, :, 0].cpu()
            y[own] = f + torch.randn(f.shape, generator=generator, dtype=torch.float64) * member.posterior.noise.cpu()
        return y.mT.numpy() * self.y_scale_ + self.y_mean_


class StationaryClassifier(ClassifierMixin, Stationary):
    """Classification that knows when it does not know: a network with a stationary prior, for scikit-learn.

    Far from the training rows the probabilities tend to those of the prior: the same for all classes, as nearly as the number of
    networks lets them.

    Args:
        kernel: The prior's kernel, or several of them: "matern32", "matern52", "rbf", "exponential" or a Spectrum.
        activation: "paired" (a sine and a cosine for each frequency), "sin", "sincos", "triangle", "periodic_relu".
        posterior: "closed_form", Laplace's of the output layer; or "laplace", KFAC over all layers of one trained network, with
            the first kernel.
        width: Units of the model layer; of those with hidden layers 500 at most.
        hidden: Widths of the hidden layers of trained networks, which join from 300 rows on; () for none of these.
        networks: How many are trained for each of three lengths of time.
        false_alarm: Share of rows like the training data whose ``ood_score`` may exceed ``ood_threshold_``.
        device: "auto" (a GPU where there is one), "cpu" or "cuda".
        random_state: Seed of every draw.
        verbose: Whether to say what takes time.

    Attributes:
        classes_: The labels, in the order of the columns of ``predict_proba``.
        members_: The networks, in standardised units, with their posteriors and weights; the first is that of the first kernel.
        model_: The first network.
        amplitude_: Its prior standard deviation of each class's output.
        lengthscale_: Its lengthscale of every column, in the column's units.
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
        if self.posterior == "closed_form":
            self._committee(x, target, order, classes, tuning, drawing)
        else:
            self.model_, self.amplitude_ = self._single(x, target, classes, Categorical(), drawing), 1.0
            self.members_ = [Member(self.model_, Laplace(self.model_, x, target), 1.0)]
        self.statistics_ = self._sums(x, torch.zeros_like(x[:, :1]))
        self._describe()
        self._cover(x)
        return self

    def _wide(self, x: Tensor, y: Tensor, order: Tensor, outputs: int, tuning: int, drawing: int) -> Group:
        rows, lengthscale, found = order.flip(0), None, []  # blocks come last
        onehot = torch.nn.functional.one_hot(y[rows], outputs).to(x)
        onehot = (onehot - onehot.mean(0)) / onehot.std()
        splits = self._splits(order, outputs)
        for number, kernel in enumerate(self._kernels()):
            lengthscale, _, _ = self._tuned(x, rows, onehot, tuning, kernel, lengthscale)
            options: Any = {"kernel": kernel, "lengthscale": lengthscale, "beside": None}
            narrow = min(int(self.width), 200)
            trial = self._network(x.shape[1], outputs, Categorical(), tuning, width=narrow, **options)
            seed = drawing + number
            model = self._network(x.shape[1], outputs, Categorical(), seed, width=self.width, **options)
            found.append((model, self._best_amplitude(x, y, [(trial, *split) for split in splits])))
        return found

    def _deep(
        self, x: Tensor, y: Tensor, rows: Tensor, unseen: list[Tensor], outputs: int, seeds: list[int], share: float
    ) -> Group:
        options: Any = {"width": min(int(self.width), TRAINED_WIDTH), "share": share}
        models = self._trained(x, y, rows, outputs, Categorical(), seeds, **options)
        if not models:
            return []
        trials = [(models[j], rows[j, -TRIAL_ROWS:], unseen[j]) for j in range(0, len(models), 2)]
        amplitude = self._best_amplitude(x, y, trials)
        return [(model, amplitude) for model in models]

    def _calibrate(self, groups: list[Group], weights: Tensor, judged: list[Judged], targets: list[Tensor]) -> None:
        """Nothing: there is no noise to scale."""

    def _head(self, model: Model, amplitude: float, x: Tensor, y: Tensor) -> ClosedFormClassifier:
        generator = torch.Generator().manual_seed(0)
        limit: Any = {"samples": DRAWS, "full_limit": JOINT}
        return ClosedFormClassifier(model, x, y, amplitude=amplitude, generator=generator, **limit)

    def _splits(self, order: Tensor, classes: int) -> list[tuple[Tensor, Tensor]]:
        """Rows to learn from and rows to choose with: folds of a small table, one split of up to 4,000 rows of a large one.

        The last rows of the order, one of each class, are always learnt from.
        """
        always, rest = order[-classes:], order[:-classes].flip(0)[: 2 * HELD_OUT]  # blocks come last
        folds = [fold for fold in rest.chunk(FOLDS) if len(fold)]
        pairs = [(torch.cat([always, rest[~torch.isin(rest, fold)]]), fold) for fold in folds]
        return (pairs if len(rest) < 1000 else pairs[:1]) or [(order, order)]

    def _best_amplitude(self, x: Tensor, y: Tensor, trials: list[tuple[Model, Tensor, Tensor]]) -> float:
        """Prior standard deviation of the outputs of networks under which rows that they do not learn from are most probable."""
        self._say(f"choosing the amplitude on {sum(len(held) for *_, held in trials)} rows")

        def score(amplitude: float) -> float:
            options: Any = {"amplitude": amplitude, "samples": 64, "steps": 15, "full_limit": 1000}
            total = 0.0
            for model, learn, held in trials:
                generator = torch.Generator().manual_seed(0)
                posterior = ClosedFormClassifier(model, x[learn], y[learn], generator=generator, **options)
                total += float(posterior.predict(x[held]).log_prob(y[held]).sum())
            return total

        return max(CLASS_AMPLITUDES, key=score)

    def _describe(self) -> None:
        """The numbers that follow from the networks and their posteriors."""
        self.row_weight_ = 0.25
        self._describe_columns()

    def _probabilities(self, member: Member, x: Tensor) -> Tensor:
        if isinstance(member.posterior, Laplace):
            mean, covariance = member.posterior.output_moments(x)
            return average_classes(mean[0], covariance[0], samples=DRAWS, seed=0).probabilities
        return member.posterior.predict(x).probabilities

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probability of each class at each row, (n, c), averaged over networks and their posteriors.

        Where the networks disagree about a row, the average is drawn to equal probabilities.
        """
        parts = [
            agreed(self.members_, torch.stack([self._probabilities(member, x) for member in self.members_]))
            for x in self._chunks(X)
        ]
        return torch.cat(parts).cpu().numpy()

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of each row."""
        chosen = self.predict_proba(X).argmax(1)
        return self.classes_[chosen]
