"""Training of the networks whose outputs are the inputs of heads.

All networks of a table are trained together as one stack, each without one part of the rows, on the log joint density of a
network with a periodic layer. Then their periodic and output layers are dropped. A head of infinite width, which learns from all
rows, takes their place.

Beside its columns a network sees intervals of them: the piecewise linear encoding of Gorishniy et al. (2022), by ``Intervals`` and
not by scikit-learn's ``SplineTransformer(degree=1, knots="quantile")``. The knots of ``Intervals`` are quantiles of the distinct
values, so that columns with few values are divided too. And it is a torch layer, which is stored with the network.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from bochner.layers import StationaryLayer
from bochner.likelihoods import Categorical, Gaussian
from bochner.members.plan import Plan
from bochner.members.rows import TrainingRows
from bochner.members.settings import Settings, Task
from bochner.models import Model
from bochner.networks import Intervals, mlp
from bochner.training.map import Recipe, fit_map, half_cosine
from bochner.training.optimizers import light_adam

# Standard deviation of network outputs, in lengthscales; beyond it a periodic layer relates no two rows.
MAX_OUTPUT_SPREAD = 10.0
SPREAD_ROWS = 1000  # number of rows that the spread of the outputs is computed on
BYPASS_DIVISOR = 4.0  # divisor of columns that bypass a network: distances of typical rows are then about a third
OUTPUT_FACTORS = tuple(2.0 ** (k / 4) for k in range(-12, 3))  # choices of a factor on the outputs of a network
SEEDS_PER_ROUND = 1000  # difference of the seeds of two rounds of training: more than there are networks
NETWORK_CHUNK_ROWS = 4096  # rows that a network computes at a time


@dataclass
class Extractors:
    """Trained networks without their periodic layer and output layer.

    Attributes:
        modules: The networks, in float32.
        plain: Number of inputs of a network. The other inputs say 'never seen' and bypass the networks.
        groups: Number of columns of the table.
        outputs: Number of outputs of a network.
    """

    modules: list[nn.Module]
    plain: int
    groups: int
    outputs: int

    @torch.no_grad()
    def __call__(self, number: int, x: Tensor) -> Tensor:
        """Inputs of a head on a network, (n, d) to (n, h + d), float64.

        First come the outputs of the network, in lengthscales of the layer that it was trained with. Then come the columns, divided
        so that they hardly matter among the training rows: a network may map far rows onto outputs of training rows, and the
        columns keep them apart. Last come the inputs that say 'never seen'.
        """
        plain, unseen = x[:, : self.plain], x[:, self.plain :]
        deep = self.modules[number](plain.float()).double()
        return torch.cat([deep, plain / (BYPASS_DIVISOR * math.sqrt(self.plain)), unseen / math.sqrt(self.groups)], 1)

    def lengthscale(self, scale: float, like: Tensor) -> Tensor:
        """Lengthscales of a head on a network: ``scale`` for the outputs of the network, 1 for the inputs that bypass it."""
        bypassing = like.shape[1] - self.outputs
        return torch.cat([like.new_full((self.outputs,), scale), like.new_ones(bypassing)])

    def all_rows(self, number: int, x: Tensor) -> Tensor:
        """Inputs of a head on a network for many rows, computed piece by piece."""
        return torch.cat([self(number, piece) for piece in x.split(NETWORK_CHUNK_ROWS)])


class _Scale(nn.Module):
    """A layer that divides by a learnt lengthscale."""

    lengthscale: Tensor

    def __init__(self, lengthscale: Tensor) -> None:
        super().__init__()
        self.register_buffer("lengthscale", lengthscale)

    def forward(self, x: Tensor) -> Tensor:
        return x / self.lengthscale


def make_extractor(
    intervals: Intervals, plain: int, hidden: Sequence[int], generator: torch.Generator
) -> nn.Sequential:
    """An untrained network without its periodic layer: columns and their intervals in, the last hidden layer out."""
    layers = mlp(plain + len(intervals.column), tuple(hidden), dropout=0.0, generator=generator)
    copy = Intervals(intervals.column.clone(), intervals.left.clone(), intervals.width.clone())
    return nn.Sequential(copy, layers)


def scaled(extractor: nn.Sequential, lengthscale: Tensor) -> nn.Sequential:
    """An extractor whose outputs are divided by the lengthscale."""
    return nn.Sequential(*extractor, _Scale(lengthscale))


def recipe_for(rows: int, settings: Settings) -> Recipe:
    """Epochs, batch size, optimiser and learning rate for a number of rows."""
    batch = min(rows, max(128, min(256, rows // 100)))
    epochs = max(1, round(settings.steps_for(rows) / math.ceil(rows / batch)))
    return Recipe(epochs, batch, light_adam, settings.network_rate, schedule=half_cosine)


def train_extractors(task: Task, rows: TrainingRows, target: Tensor, plan: Plan, outputs: int) -> Extractors | None:
    """Trains one network for each part of the rows, without that part; all networks together.

    Args:
        task: The kernels, the widths, the settings and the seed.
        rows: All rows.
        target: Mapped targets, (n, 1), or labels, (n,).
        plan: Indices of the rows in each part.
        outputs: 1, or the number of classes.

    Returns:
        The networks; None where one of them diverges both at the usual learning rate and at a third of it.
    """
    inputs, learn = rows.x[:, : task.plain].float(), _rows_to_learn(rows, plan, task.seed)
    target = target.float() if target.is_floating_point() else target
    intervals = Intervals.of(inputs, task.settings.intervals, task.settings.all_intervals)
    recipe = recipe_for(learn.shape[1], task.settings)
    trained: dict[int, nn.Module] = {}
    for rate in (task.settings.network_rate, task.settings.network_rate / 3):
        left = [number for number in range(len(learn)) if number not in trained]
        task.say(f"training {len(left)} networks for {recipe.epochs} epochs of {learn.shape[1]} rows")
        seeds = [task.seed + number for number in left]
        classes = not target.is_floating_point()
        models = [_make_network(task, intervals, outputs, classes, seed).to(rows.x.device) for seed in seeds]
        options: Any = {"seed": seeds, "rows": learn[left], "progress": task.progress}
        options["after_epoch"] = lambda _: task.clock.check()
        failed = _train(
            models, (inputs, target), replace(recipe, lr=rate), [plan.folds[n] for n in left], options, task
        )
        for number, model, diverged in zip(left, models, failed, strict=True):
            extractor = scaled(model.extractor.eval(), model.layer.lengthscale.detach())  # pyright: ignore[reportArgumentType]
            if not diverged and not scattered(extractor, inputs[learn[number, :SPREAD_ROWS]]):
                trained[number] = extractor.requires_grad_(False)
        if len(trained) == len(learn):
            return Extractors([trained[n] for n in range(len(learn))], task.plain, task.groups, task.hidden[-1])
        task.say(f"{len(learn) - len(trained)} networks diverged at a learning rate of {rate:g}")
    return None


def _train(
    models: list[Model], data: tuple[Tensor, Tensor], recipe: Recipe, judging: list[Tensor], options: Any, task: Task
) -> list[bool]:
    """Trains the networks in rounds, as long as each round increases the log probability of held-out rows.

    Every round begins with the full learning rate. A network may get worse in a round: one whose held-out rows are clearly less
    probable than before returns to its earlier weights. All networks return to them, and training ends, when their mean gain does
    not exceed its standard error.

    Returns:
        Which networks diverged in the first round.
    """
    x, y = data
    diverged = fit_map(models, x, y, recipe, **options).diverged.tolist()
    rounds = 1 if any(diverged) else task.settings.rounds_for(options["rows"].shape[1])
    log_probability = _log_probability(models, x, y, judging) if rounds > 1 else x.new_empty(0)
    for number in range(1, rounds):
        before = [{name: value.clone() for name, value in model.state_dict().items()} for model in models]
        seeds = [seed + SEEDS_PER_ROUND * number for seed in options["seed"]]
        fit_map(models, x, y, recipe, **(options | {"seed": seeds}))
        gains = (_log_probability(models, x, y, judging) - log_probability).split([len(rows) for rows in judging])
        for model, state, gain in zip(models, before, gains, strict=True):
            if not _mean_in_errors(gain) > -2:
                model.load_state_dict(state)
        now = _log_probability(models, x, y, judging)
        if not _mean_in_errors(now - log_probability) > 1:
            for model, state in zip(models, before, strict=True):
                model.load_state_dict(state)
            break
        log_probability = now
        task.say(
            f"after {number + 1} rounds of training, held-out rows have a mean log probability of {log_probability.mean():.3f}"
        )
    return diverged


def _mean_in_errors(gain: Tensor) -> float:
    """Mean gain of rows over its standard error; NaN where a gain is not finite."""
    return float(gain.mean() / gain.std()) * math.sqrt(len(gain))


@torch.no_grad()
def _log_probability(models: list[Model], x: Tensor, y: Tensor, judging: list[Tensor]) -> Tensor:
    """Log probability of each row that judges, under the network that has not learnt from it.

    A network becomes overconfident in long training, but its head does not. So the noise of the network, or a factor on its outputs
    before the softmax, is chosen by the same rows.
    """
    return torch.cat(
        [
            _log_probability_recalibrated(model.eval()(x[rows]), y[rows])
            for model, rows in zip(models, judging, strict=True)
        ]
    )


def _log_probability_recalibrated(outputs: Tensor, truth: Tensor) -> Tensor:
    """Log probability of rows with their best noise, or factor on the outputs; minus infinity where outputs overflow."""
    if not bool(torch.isfinite(outputs).all()):
        return outputs.new_full((len(truth),), -math.inf)
    if truth.is_floating_point():
        return Gaussian(float((outputs - truth).square().mean().sqrt().clamp(min=1e-12))).to(truth)(outputs, truth)
    by_factor = torch.stack([Categorical()(factor * outputs, truth) for factor in OUTPUT_FACTORS])
    return by_factor[by_factor.mean(1).argmax()]


def _rows_to_learn(rows: TrainingRows, plan: Plan, seed: int) -> Tensor:
    """Indices of the rows that each network learns from, (networks, m): equally many, and none from the part it leaves out.

    Rows of unequal weight are drawn in proportion to their weight, because ``fit_map`` has no weights of rows.
    """
    size = min(len(plan.order) - len(fold) for fold in plan.folds)
    generator = torch.Generator().manual_seed(seed + 7)
    chosen = []
    for number in range(len(plan.folds)):
        others = plan.others(number)
        weight = rows.weight[others].cpu()
        if bool((weight == weight[0]).all()):
            chosen.append(others[:size])
        else:
            drawn = torch.multinomial(weight, size, replacement=True, generator=generator)
            chosen.append(others[drawn.to(others.device)])
    return torch.stack(chosen)


def _make_network(task: Task, intervals: Intervals, outputs: int, classes: bool, seed: int) -> Model:
    """A network with a periodic layer, drawn from its prior."""
    generator = torch.Generator().manual_seed(seed)
    extractor = make_extractor(intervals, task.plain, task.hidden, generator)
    options: Any = {"kernel": task.spectra[0], "activation": "paired", "frequencies": "sobol", "generator": generator}
    layer = StationaryLayer(task.hidden[-1], task.settings.network_width, **options)
    likelihood = Categorical() if classes else Gaussian(0.3)
    return Model(layer, outputs, likelihood, extractor=extractor, generator=generator)


@torch.no_grad()
def scattered(extractor: nn.Module, inputs: Tensor) -> bool:
    """Whether the outputs of an extractor lie so many lengthscales apart that a periodic layer relates no two rows.

    A network with a periodic layer diverges in this way: its predictions stay finite, but are random.
    """
    outputs = extractor(inputs)
    return not bool(torch.isfinite(outputs).all()) or float(outputs.std(0).mean()) > MAX_OUTPUT_SPREAD
