"""What both estimators share: parameters, standardisation, the network, and the score for rows unlike the training data."""

import copy
import math
import sys
from abc import ABC, abstractmethod
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
from bochner.committee import Member, stacking_weights, train_together
from bochner.layers import StationaryLayer
from bochner.likelihoods import Gaussian, Likelihood
from bochner.models import Model
from bochner.networks import Intervals, mlp
from bochner.posteriors.closed_form import (
    Statistics,
    cholesky,
    features,
    prior_precision,
    tune_marginal,
)
from bochner.training import Recipe, half_cosine

POSTERIORS = ("closed_form", "laplace")
CHUNK = 4096  # rows that are predicted at a time
TUNING_ROWS, TUNING_WIDTH, TRIAL_STEPS, TUNING_STEPS = 1000, 1000, 15, 50
EPOCHS, STEPS, RATE = 400, 4000, 3e-3  # of the longest training: the smaller of the two, but three epochs
LENGTHS = (1, 1 / 6, 1 / 36)  # of the trainings, as shares of that
TRAINED_FROM, PRIOR_STD = 300, 1.0  # fewer rows cannot judge, and what they tune needs a prior, on logarithms
TRAINED_WIDTH = 500
INTERVALS, BESIDE = 16, 1024  # of a column and of all columns, at most
TRIAL_ROWS = 10_000  # the output layers that held-out rows judge learn from so many
BLOCK = 200  # rows of a block that judges, at most
HELD_OUT = 2000  # rows that choose a single network's noise, at most; twice as many choose an amplitude
LEAST = 0.05  # a group of networks that counts for less is left out
MOST = 30  # networks: more leave too few rows for each to be judged by
DRAWS = 256
JOINT = 3000  # weights of an output layer for classes with one precision matrix; of more, a matrix for each class
FOLDS = 3
CLASS_AMPLITUDES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
LARGEST = 1e100  # beyond, sums of squares overflow


Group = list[tuple[Model, float]]  # networks and their amplitudes
Judged = list[list[Any]]  # for each block, predictions of its rows

MISSING = (
    "Put SimpleImputer before it: make_pipeline(SimpleImputer(), {name}()). "
    "The command 'bochner fit' takes missing values as they are."
)
TEXT = (
    "Encode text columns first: make_pipeline(make_column_transformer((OneHotEncoder(handle_unknown='ignore'), "
    "make_column_selector(dtype_exclude='number')), remainder='passthrough'), {name}()). "
    "The command 'bochner fit' takes text as it is."
)


class Stationary(BaseEstimator, ABC):
    """What both estimators share: parameters, standardisation, the network, and the score for rows unlike the training data."""

    model_: Model
    members_: list[Member]
    statistics_: Statistics
    amplitude_: float
    row_weight_: float

    def __init__(
        self,
        *,
        kernel: Any = ("matern32", "matern52", "rbf"),
        activation: Any = "paired",
        posterior: str = "closed_form",
        width: int = 1000,
        hidden: tuple[int, ...] = (200, 200, 25),
        networks: int = 6,
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
        self.networks = networks
        self.false_alarm = false_alarm
        self.device = device
        self.random_state = random_state
        self.verbose = verbose

    # ------------------------------------------------------------------ checks

    def _check_parameters(self) -> None:
        if isinstance(self.kernel, tuple | list) and not self.kernel:
            raise ValueError("The kernel parameter must name at least one kernel, got an empty sequence instead.")
        for kernel in self._kernels():
            spectra.resolve(kernel)
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
        if not isinstance(self.networks, Integral) or not 1 <= self.networks <= MOST:
            raise ValueError(
                f"The networks parameter must be an integer from 1 to {MOST}, got {self.networks!r} instead."
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
            vars(self).pop(name, None)  # of an earlier fit
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

    # ------------------------------------------------------------------ the networks

    def _kernels(self) -> list[Any]:
        return list(self.kernel) if isinstance(self.kernel, tuple | list) else [self.kernel]

    def _network(
        self, inputs: int, outputs: int, likelihood: Likelihood, seed: int, beside: Intervals | None, **options: Any
    ) -> Model:
        """A network, with hidden layers where it gets intervals; ``options`` are width, kernel and lengthscale of its layer."""
        generator = torch.Generator().manual_seed(seed % 2**63)
        hidden, extractor = (), None
        if beside is not None:
            hidden = tuple(self.hidden)
            layers = mlp(inputs + len(beside.column), hidden, dropout=0.0, generator=generator)
            extractor = torch.nn.Sequential(copy.deepcopy(beside), layers)
        width = int(options.pop("width"))
        layer = StationaryLayer(
            hidden[-1] if hidden else inputs,
            width - width % activations.resolve(self.activation).outputs,
            activation=self.activation,
            frequencies="sobol",
            generator=generator,
            dtype=torch.float64,
            **options,
        )
        model = Model(layer, outputs, likelihood, extractor=extractor, generator=generator)
        return model.double().to(self._device())

    def _tuned(
        self, x: Tensor, rows: Tensor, y: Tensor, seed: int, kernel: Any, start: Tensor | None
    ) -> tuple[Tensor, float, float]:
        """Lengthscales, noise and amplitude of the largest marginal likelihood of rows, under a draw of units of its own."""
        prior_std = math.inf if len(x) >= TRAINED_FROM else PRIOR_STD
        x, y, dim = x[rows[:TUNING_ROWS]].float(), y[:TUNING_ROWS].float(), x.shape[1]
        self._say(f"tuning {dim} lengthscales, noise and amplitude on {len(x)} rows")

        def trial(start: Tensor) -> tuple[float, float, Model]:
            options: Any = {"kernel": kernel, "lengthscale": start, "width": min(int(self.width), TUNING_WIDTH)}
            model = self._network(dim, y.shape[1], Gaussian(0.3), seed, None, **options).float()
            amplitude, history = tune_marginal(model, x, y, steps=TRIAL_STEPS, lr=0.1, prior_std=prior_std)
            return history[-1], amplitude, model

        # Fast waves hide from a start at long lengthscales: the best of three goes on.
        scales = [torch.full((dim,), scale * math.sqrt(dim), dtype=torch.float64) for scale in (1.0, 0.25, 1 / 16)]
        trials = (trial(own) for own in (scales if start is None else [start.cpu()]))
        _, amplitude, model = max(trials, key=lambda found: found[0])
        options: Any = {"steps": TUNING_STEPS, "lr": 0.1, "prior_std": prior_std}
        amplitude, _ = tune_marginal(model, x, y, amplitude=amplitude, **options)
        return model.layer.lengthscale.detach().double(), float(model.likelihood.noise.detach()), amplitude  # pyright: ignore

    def _trained(
        self, x: Tensor, y: Tensor, rows: Tensor, outputs: int, likelihood: Likelihood, seeds: list[int], **options: Any
    ) -> list[Model]:
        """Networks at their MAP estimates, each from its own rows, trained together; none where one diverges at both rates.

        The ``options`` are the width and the share of the longest training.
        """
        size, kernels, share = self.hidden[-1] if self.hidden else x.shape[1], self._kernels(), options.pop("share")
        options["lengthscale"] = 1.0
        if not self.hidden:
            options["lengthscale"] = torch.full((size,), math.sqrt(size), dtype=torch.float64)
        beside = Intervals.of(x, INTERVALS, BESIDE) if self.hidden else None
        num, columns = rows.shape[1], x.shape[1]
        batch = min(num, max(128, min(512, num // 100)))
        epochs = max(1, round(share * max(3, min(EPOCHS, STEPS // math.ceil(num / batch)))))
        recipe = Recipe(epochs, batch, lr=RATE, schedule=half_cosine)

        def make(number: int) -> Model:
            kernel = kernels[number * len(kernels) // len(seeds)]
            return self._network(columns, outputs, likelihood, seeds[number], beside, kernel=kernel, **options).float()

        return train_together(make, x, y, rows, recipe, seeds=seeds, say=self._say, progress=bool(self.verbose))

    def _single(self, x: Tensor, y: Tensor, outputs: int, likelihood: Likelihood, seed: int) -> Model:
        """One trained network."""
        rows = torch.arange(len(x), device=x.device)[None]
        models = self._trained(x, y, rows, outputs, likelihood, [seed], width=self.width, share=1.0)
        if not models:
            raise ValueError("Training diverged; use fewer or narrower hidden layers, or another random_state.")
        return models[0]

    # ------------------------------------------------------------------ the committee

    def _committee(self, x: Tensor, y: Tensor, order: Tensor, outputs: int, tuning: int, drawing: int) -> None:
        """Makes the networks, weighs them by rows they have not seen, and integrates their output layers out over all rows."""
        groups, weights = [self._wide(x, y, order, outputs, tuning, drawing)], torch.ones(1)
        number = int(self.networks)
        size = min((len(x) - outputs) // max(20, 2 * number), BLOCK)  # 0 where nearly every row is its own class
        if self.hidden and len(x) >= TRAINED_FROM and size:
            # Network j has not seen blocks j - 1 and j, so two networks judge each block.
            blocks = list(order[: number * size].split(size))
            unseen = [torch.cat([blocks[i] for i in {j, (j - 1) % number}]) for j in range(number)]
            rows = torch.stack([order[~torch.isin(order, own)] for own in unseen])
            for length, share in enumerate(LENGTHS, 1):
                seeds = [drawing + 100_000 * length + k for k in range(number)]
                groups.append(self._deep(x, y, rows, unseen, outputs, seeds, share))
            groups = [group for group in groups if group]
            self._say(f"weighing {sum(map(len, groups))} networks by {sum(map(len, blocks))} rows")
            rest = order[sum(map(len, blocks)) :]
            fair = groups[0] if len(rest) >= TUNING_ROWS else self._wide(x, y, rest, outputs, tuning, drawing)
            judged = [self._judged_wide(fair, x, y, order, blocks)]
            judged += [self._judged_deep(group, x, y, rows, blocks) for group in groups[1:]]
            targets = [y[block] for block in blocks]
            weights = self._weights(judged, targets)
            self._calibrate(groups, weights, judged, targets)
        found = list(zip(groups, weights, strict=True))
        self._say("weights: " + ", ".join(f"{float(w):.2f}" for w in weights))
        # The first network gives the score for rows unlike the data, so it stays.
        kept = [
            (group if w >= LEAST else group[: int(group is groups[0])], float(w) / len(group)) for group, w in found
        ]
        shares = [(part, share, number) for number, (group, share) in enumerate(kept) for part in group]
        total = sum(share for _, share, _ in shares)
        self._say(f"integrating the output layers of {len(shares)} networks out over {len(x)} rows")
        self.members_ = [
            Member(part[0], self._head(*part, x, y), share / total, group) for part, share, group in shares
        ]
        self.model_, self.amplitude_ = shares[0][0]

    def _judged_wide(self, group: Group, x: Tensor, y: Tensor, order: Tensor, blocks: list[Tensor]) -> Judged:
        """Predictions of each block by wide networks that have not seen it, nor any other block where rows are many."""
        many = sum(map(len, blocks)) * 10 <= len(order)
        judged: Judged = [[] for _ in blocks]
        for hidden in [torch.cat(blocks)] if many else blocks:
            rows = order[~torch.isin(order, hidden)][-TRIAL_ROWS:]
            heads = [self._head(*part, x[rows], y[rows]) for part in group]
            for block, found in zip(blocks, judged, strict=True):
                if many or block is hidden:
                    found += [head.predict(x[block]) for head in heads]
        return judged

    def _judged_deep(self, group: Group, x: Tensor, y: Tensor, rows: Tensor, blocks: list[Tensor]) -> Judged:
        """Predictions of each block by the trained networks that have not seen it."""
        judged: Judged = [[] for _ in blocks]
        for j, part in enumerate(group):
            own = rows[j, -TRIAL_ROWS:]  # for classes the last rows hold one of each
            head = self._head(*part, x[own], y[own])
            for i in {j, (j - 1) % len(blocks)}:
                judged[i].append(head.predict(x[blocks[i]]))
        return judged

    def _weights(self, judged: list[Judged], targets: list[Tensor]) -> Tensor:
        """Weights of the groups under which the blocks are most probable.

        Beforehand each length of training is given a row, and the wide networks as many as all of these together.
        """

        def density(parts: list[Any], y: Tensor) -> Tensor:
            return torch.stack([part.log_prob(y) for part in parts]).logsumexp(0) - math.log(len(parts))

        densities = torch.stack(
            [torch.cat([density(*pair) for pair in zip(found, targets, strict=True)]) for found in judged]
        )
        prior = torch.ones_like(densities[:, 0])
        prior[0] = max(1, len(judged) - 1)
        return stacking_weights(densities, prior)

    @abstractmethod
    def _wide(self, x: Tensor, y: Tensor, order: Tensor, outputs: int, tuning: int, drawing: int) -> Group:
        """A network without hidden layers for each kernel, and its amplitude."""

    @abstractmethod
    def _deep(
        self, x: Tensor, y: Tensor, rows: Tensor, unseen: list[Tensor], outputs: int, seeds: list[int], share: float
    ) -> Group:
        """Trained networks and their amplitudes."""

    @abstractmethod
    def _calibrate(self, groups: list[Group], weights: Tensor, judged: list[Judged], targets: list[Tensor]) -> None:
        """What the blocks have to say about the mixture as a whole."""

    @abstractmethod
    def _head(self, model: Model, amplitude: float, x: Tensor, y: Tensor) -> Any:
        """The posterior of a network's output layer."""

    def _describe_columns(self) -> None:
        """Lengthscales in the columns' units, where the first network has no hidden layers."""
        if isinstance(self.model_.extractor, torch.nn.Identity):
            self.lengthscale_ = self.model_.layer.lengthscale.detach().cpu().numpy() * self.x_scale_

    def _held_out(self, order: Tensor) -> tuple[Tensor, Tensor]:
        """Rows to learn from, and the first tenth to choose with."""
        cut = min(HELD_OUT, max(1, len(order) // 10))
        return order[cut:], order[:cut]

    def _say(self, text: str) -> None:
        if self.verbose:
            print(f"bochner: {text}", file=sys.stderr, flush=True)

    # ------------------------------------------------------------------ rows unlike the training data

    def _cover(self, x: Tensor) -> None:
        """The factor that the score needs, and the threshold that training rows give when each is left out."""
        self._factorise()
        scores = self._scores(x[:: math.ceil(len(x) / 10_000)], left_out=True)
        # Rows that came later may be all alike: they never make the alarm more sensitive than it was.
        self.ood_threshold_ = max(
            getattr(self, "ood_threshold_", 0.0), float(np.quantile(scores, 1 - self.false_alarm))
        )

    @torch.no_grad()
    def _sums(self, x: Tensor, y: Tensor) -> Statistics:
        return Statistics.of(self.model_, x, y)

    def _factorise(self) -> None:
        gram = self.statistics_.gram
        prior = prior_precision(self.model_, torch.tensor(self.amplitude_, dtype=torch.float64).to(gram))
        self.cover_ = cholesky(self.row_weight_ * gram + torch.diag(prior))

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

    def _chunks(self, X: Any) -> Iterator[Tensor]:
        """Consecutive rows, standardised."""
        check_is_fitted(self)
        return iter(self._inputs(self._validated(X, reset=False)).split(CHUNK))
