"""Trained networks: what they make of the columns is what a member's head stands on.

All networks of a table train as one stack on the log joint density of a network with a periodic layer, each without a part of the
rows. Their output layers are then thrown away: a head of infinite width, over all rows, takes their place.
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
from bochner.members.settings import Settings, Task
from bochner.members.tuning import TrainingRows
from bochner.models import Model
from bochner.networks import Intervals, mlp
from bochner.training.map import Recipe, fit_map, half_cosine
from bochner.training.optimizers import light_adam

SCATTERED = 10.0  # lengthscales: beyond, a periodic layer cannot relate any two rows, and its features are random
SAMPLE = 1000  # rows that tell
PASSED = 4.0  # what columns that go past a network are divided by: distances of ordinary rows are then about a third
FACTORS = tuple(2.0 ** (k / 4) for k in range(-12, 3))  # on the outputs of a network that may be too sure of itself
ROUND_SEEDS = 1000  # between the seeds of two rounds of training: more than there are networks
PIECE = 4096  # rows that a network sees at a time


@dataclass
class Extractors:
    """Networks without their last two layers.

    Attributes:
        modules: The networks, in float32.
        plain: How many inputs they see. The others say 'never seen', and go past them to the head.
        groups: How many columns there are.
        outputs: How many numbers a network makes of a row.
    """

    modules: list[nn.Module]
    plain: int
    groups: int
    outputs: int

    @torch.no_grad()
    def __call__(self, number: int, x: Tensor) -> Tensor:
        """What a head on a network stands on, (n, d) to (n, h + d), float64.

        First what the network makes of the rows, in lengthscales of the layer that it was trained with. Then the columns
        themselves, so far reduced that they hardly matter among the data: a network may map rows from far away onto ordinary
        ones, and this keeps them apart. Last the inputs that say 'never seen'.
        """
        plain, unseen = x[:, : self.plain], x[:, self.plain :]
        deep = self.modules[number](plain.float()).double()
        return torch.cat([deep, plain / (PASSED * math.sqrt(self.plain)), unseen / math.sqrt(self.groups)], 1)

    def lengthscale(self, scale: float, like: Tensor) -> Tensor:
        """Lengthscales of a head on a network: ``scale`` for what the network makes of rows, 1 for what goes past it."""
        passed = like.shape[1] - self.outputs
        return torch.cat([like.new_full((self.outputs,), scale), like.new_ones(passed)])

    def all_rows(self, number: int, x: Tensor) -> Tensor:
        """What a network makes of many rows, a piece at a time."""
        return torch.cat([self(number, piece) for piece in x.split(PIECE)])


class _Scale(nn.Module):
    """Division by a lengthscale that was learnt."""

    lengthscale: Tensor

    def __init__(self, lengthscale: Tensor) -> None:
        super().__init__()
        self.register_buffer("lengthscale", lengthscale)

    def forward(self, x: Tensor) -> Tensor:
        return x / self.lengthscale


def make_extractor(
    intervals: Intervals, plain: int, hidden: Sequence[int], generator: torch.Generator
) -> nn.Sequential:
    """A network up to its periodic layer, untrained: columns and their intervals in, the last hidden width out."""
    layers = mlp(plain + len(intervals.column), tuple(hidden), dropout=0.0, generator=generator)
    own = Intervals(intervals.column.clone(), intervals.left.clone(), intervals.width.clone())
    return nn.Sequential(own, layers)


def scaled(extractor: nn.Sequential, lengthscale: Tensor) -> nn.Sequential:
    """An extractor whose outputs are in lengthscales."""
    return nn.Sequential(*extractor, _Scale(lengthscale))


def recipe_for(rows: int, settings: Settings) -> Recipe:
    """Epochs and batches for so many rows."""
    batch = min(rows, max(128, min(256, rows // 100)))
    epochs = max(1, round(settings.steps_for(rows) / math.ceil(rows / batch)))
    return Recipe(epochs, batch, light_adam, settings.network_rate, schedule=half_cosine)


def train_extractors(task: Task, rows: TrainingRows, target: Tensor, plan: Plan, outputs: int) -> Extractors | None:
    """A network for each part of the rows, trained on all rows but these; all together.

    Args:
        task: What the fit is told.
        rows: All rows.
        target: Mapped targets, (n, 1), or labels, (n,).
        plan: The parts.
        outputs: 1, or the number of classes.

    Returns:
        The networks; None where one of them goes astray at the ordinary learning rate and at a third of it.
    """
    inputs, learn = rows.x[:, : task.plain].float(), _rows_to_learn(rows, plan, task.seed)
    target = target.float() if target.is_floating_point() else target
    intervals = Intervals.of(inputs, task.settings.intervals, task.settings.all_intervals)
    recipe = recipe_for(learn.shape[1], task.settings)
    done: dict[int, nn.Module] = {}
    for rate in (task.settings.network_rate, task.settings.network_rate / 3):
        left = [number for number in range(len(learn)) if number not in done]
        task.say(f"training {len(left)} networks for {recipe.epochs} epochs of {learn.shape[1]} rows")
        seeds = [task.seed + number for number in left]
        classes = not target.is_floating_point()
        models = [_make_network(task, intervals, outputs, classes, seed).to(rows.x.device) for seed in seeds]
        options: Any = {"seed": seeds, "rows": learn[left], "progress": task.progress}
        options["after_epoch"] = lambda _: task.clock.check()
        astray = _train(
            models, (inputs, target), replace(recipe, lr=rate), [plan.folds[n] for n in left], options, task
        )
        for number, model, diverged in zip(left, models, astray, strict=True):
            extractor = scaled(model.extractor.eval(), model.layer.lengthscale.detach())  # pyright: ignore[reportArgumentType]
            if not diverged and not scattered(extractor, inputs[learn[number, :SAMPLE]]):
                done[number] = extractor.requires_grad_(False)
        if len(done) == len(learn):
            return Extractors([done[n] for n in range(len(learn))], task.plain, task.groups, task.hidden[-1])
        task.say(f"{len(learn) - len(done)} networks went astray at a learning rate of {rate:g}")
    return None


def _train(
    models: list[Model], data: tuple[Tensor, Tensor], recipe: Recipe, judging: list[Tensor], options: Any, task: Task
) -> list[bool]:
    """Trains the networks in rounds, as long as each makes rows that they have not seen more probable.

    A round begins at the full learning rate where the last one has ended. That may send a network astray: one whose own rows are
    clearly less probable than before goes back. When what all networks gain does not exceed its standard error, all go back.

    Returns:
        Which networks diverged in the first round.
    """
    x, y = data
    diverged = fit_map(models, x, y, recipe, **options).diverged.tolist()
    rounds = 1 if any(diverged) else task.settings.rounds_for(options["rows"].shape[1])
    known = _log_probability(models, x, y, judging) if rounds > 1 else x.new_empty(0)
    for number in range(1, rounds):
        before = [{name: value.clone() for name, value in model.state_dict().items()} for model in models]
        seeds = [seed + ROUND_SEEDS * number for seed in options["seed"]]
        fit_map(models, x, y, recipe, **(options | {"seed": seeds}))
        gains = (_log_probability(models, x, y, judging) - known).split([len(rows) for rows in judging])
        for model, state, gain in zip(models, before, gains, strict=True):
            if not _mean_in_errors(gain) > -2:
                model.load_state_dict(state)
        now = _log_probability(models, x, y, judging)
        if not _mean_in_errors(now - known) > 1:
            for model, state in zip(models, before, strict=True):
                model.load_state_dict(state)
            break
        known = now
        task.say(
            f"after {number + 1} rounds of training, rows not learnt from have a log probability of {known.mean():.3f}"
        )
    return diverged


def _mean_in_errors(gain: Tensor) -> float:
    """Mean of what rows gain, over its standard error; NaN where a gain is not finite."""
    return float(gain.mean() / gain.std()) * math.sqrt(len(gain))


@torch.no_grad()
def _log_probability(models: list[Model], x: Tensor, y: Tensor, judging: list[Tensor]) -> Tensor:
    """Log probability of each row that judges, by the network that has not seen it.

    A network that trains for long is too sure of itself, which its head will not be: so its noise, or a factor on its outputs
    before the softmax, is chosen by the same rows.
    """
    return torch.cat([_suited(model.eval()(x[rows]), y[rows]) for model, rows in zip(models, judging, strict=True)])


def _suited(outputs: Tensor, truth: Tensor) -> Tensor:
    """Log probability of rows under the noise, or the factor on the outputs, that suits them best; none where outputs overflow."""
    if not bool(torch.isfinite(outputs).all()):
        return outputs.new_full((len(truth),), -math.inf)
    if truth.is_floating_point():
        return Gaussian(float((outputs - truth).square().mean().sqrt().clamp(min=1e-12))).to(truth)(outputs, truth)
    tried = torch.stack([Categorical()(factor * outputs, truth) for factor in FACTORS])
    return tried[tried.mean(1).argmax()]


def _rows_to_learn(rows: TrainingRows, plan: Plan, seed: int) -> Tensor:
    """Which rows each network learns from, (networks, m): as many for all, none of its own part.

    Rows of unequal weight are drawn in proportion to it: the engine knows no weights.
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
    """A network with a periodic layer, as it is drawn from its prior."""
    generator = torch.Generator().manual_seed(seed)
    extractor = make_extractor(intervals, task.plain, task.hidden, generator)
    options: Any = {"kernel": task.spectra[0], "activation": "paired", "frequencies": "sobol", "generator": generator}
    layer = StationaryLayer(task.hidden[-1], task.settings.network_width, **options)
    likelihood = Categorical() if classes else Gaussian(0.3)
    return Model(layer, outputs, likelihood, extractor=extractor, generator=generator)


@torch.no_grad()
def scattered(extractor: nn.Module, inputs: Tensor) -> bool:
    """Whether hidden layers have driven rows so many lengthscales apart that nothing relates any two of them.

    That is how a network with a periodic layer diverges: its output stays finite, and random.
    """
    found = extractor(inputs)
    return not bool(torch.isfinite(found).all()) or float(found.std(0).mean()) > SCATTERED
