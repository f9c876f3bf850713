r"""SWAG: a Gaussian fitted to the path of SGD around a trained network.

After every epoch the parameters $\theta$ enter a running mean and variance, and the last $M$ deviations from the mean form the
columns of $D$. The posterior is $\mathrm{N}(\bar\theta, \tfrac12\Sigma_\mathrm{diag} + \tfrac12 \tfrac{DD^\top}{M-1})$, drawn as

$$ \theta = \bar\theta + \tfrac{1}{\sqrt2}\,\sigma \odot z_1 + \tfrac{1}{\sqrt{2(M-1)}}\, D z_2 . $$

The lengthscale, the amplitude and the noise stay at their MAP estimates.
"""
# torch.linalg and other parts of torch declare no types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import contextlib
import copy
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from bochner.arguments import generator_device, shown, whole_number
from bochner.likelihoods import Gaussian
from bochner.models import Model
from bochner.posteriors.closed_form_classifier import seed_of
from bochner.posteriors.learning_rate import DivergedError
from bochner.posteriors.mixture import BATCH_NORMS, EXCHANGE_LOCK, Parameters, drawn_outputs, mixture
from bochner.predictive import Predictive
from bochner.training.batches import Batches, TensorOrLoader, over_batches, workers
from bochner.training.checks import as_list
from bochner.training.map import Recipe, fit_map, sgd


@dataclass(frozen=True)
class Snapshots:
    """How SGD runs while its parameters are collected.

    Attributes:
        lr: Constant learning rate of SGD, one number or one for each network.
        epochs: Epochs; after each the parameters enter the mean.
        rank: Number M of deviations from the mean that are kept.
        batch_size: Rows in a minibatch.
        seed: Seed of the shuffles, one number or one for each network.
        precision: Precision of matrix products of training, as in ``Recipe``.
        progress: Whether to show a progress bar.
    """

    lr: float | Sequence[float]
    epochs: int = 40
    rank: int = 20
    batch_size: int = 128
    seed: int | Sequence[int] = 0
    precision: Literal["float32", "tf32", "bfloat16"] = "float32"
    progress: bool = False

    def __post_init__(self) -> None:
        whole_number("batch_size", self.batch_size)
        if not 2 <= whole_number("rank", self.rank) <= whole_number("epochs", self.epochs):
            raise ValueError(
                f"The rank parameter must lie between 2 and epochs ({self.epochs}), got {self.rank} instead."
            )


@contextlib.contextmanager
def _scales_held(models: list[Model]) -> Generator[None]:
    """Holds lengthscales, noises and amplitudes fixed for a while."""
    held = [
        p
        for m in models
        for n, p in m.named_parameters()
        if n.endswith(("log_lengthscale", "log_noise", "log_amplitude")) and p.requires_grad
    ]
    for p in held:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in held:
            p.requires_grad_(True)


class Swag:
    """Posterior from the path of SGD, for a network or a stack of networks of one shape and activation.

    Collecting moves the networks; at the end their parameters are the mean of the path. A member of a stack that diverges has
    NaN for a mean and for its predictions; if all diverge that is an error.

    Args:
        model: Network at its MAP estimate, or a list of them.
        x: Training inputs, (N, ...); or a loader of (x, y).
        y: Training targets; None with a loader.
        snapshots: How SGD runs, and how many of its parameters are collected.
        rows: Which rows each network sees, as in ``fit_map``.
        after_epoch: Called at the end of every epoch, such as to change x in place.
    """

    def __init__(
        self,
        model: Model | Sequence[Model],
        x: TensorOrLoader,
        y: Tensor | None = None,
        snapshots: Snapshots | None = None,
        *,
        rows: Tensor | None = None,
        after_epoch: Callable[[], None] = lambda: None,
    ) -> None:
        if not isinstance(snapshots, Snapshots):
            raise ValueError(f"The snapshots parameter must be Snapshots(lr), got {shown(snapshots)} instead.")
        rank, batch_size = snapshots.rank, snapshots.batch_size
        models = as_list(model)
        self.single, self.model, self.rank = isinstance(model, Model), models[0], rank
        self.members, self.batches, self.rows = len(models), Batches(self.model, x, y, size=batch_size), rows
        self.count = 0  # snapshots so far
        self.mean: Parameters = {}
        self.scatter: Parameters = {}  # sums of squared deviations from the mean
        self.deviations: dict[str, list[Tensor]] = {}  # of the last snapshots
        recipe = Recipe(snapshots.epochs, batch_size, sgd, snapshots.lr, precision=snapshots.precision)

        def collect(parameters: Parameters) -> None:
            self._collect(parameters)
            after_epoch()

        with _scales_held(models):
            self.fit = fit_map(
                models,
                x,
                y,
                recipe,
                seed=snapshots.seed,
                rows=rows,
                after_epoch=collect,
                progress=snapshots.progress,
            )
        if bool(self.fit.diverged.all()):
            raise DivergedError(f"SGD diverged at the learning rate {snapshots.lr} while collecting; lower it.")
        for value in self.mean.values():
            value[self.fit.diverged.to(value.device)] = math.nan  # those members have no posterior
        parameters, buffers = stack_module_state(list[nn.Module](models))
        self.buffers: Parameters = dict(buffers)
        self.fixed = {n: p.detach() for n, p in parameters.items() if n not in self.mean}
        self._put_mean(models)
        self.model = copy.deepcopy(self.model).eval()  # whose parameters nobody else exchanges

    def _collect(self, parameters: Parameters) -> None:
        """Updates mean, scatter and deviations with one snapshot, each (E, ...)."""
        self.count += 1
        for name, p in parameters.items():
            p = p.detach()
            before = self.mean.get(name, p)
            self.mean[name] = before + (p - before) / self.count
            # Welford's sum of squared deviations: E[θ²] − E[θ]² would cancel in float32.
            self.scatter[name] = self.scatter.get(name, torch.zeros_like(p)) + (p - before) * (p - self.mean[name])
            self.deviations.setdefault(name, []).append(p - self.mean[name])
            del self.deviations[name][: -self.rank]

    @torch.no_grad()
    def _put_mean(self, models: list[Model]) -> None:
        for i, member in enumerate(models):
            for name, p in member.named_parameters():
                if name in self.mean:
                    p.copy_(self.mean[name][i])

    @torch.no_grad()
    def sample_weights(
        self, num: int, *, diagonal: float = 0.5, low_rank: float = 0.5, generator: torch.Generator | None = None
    ) -> Parameters:
        """Draws of the parameters, each (num, E, ...), from N(mean, diagonal · Σ_diag + low_rank · DD'/(M − 1))."""
        first = next(iter(self.mean.values()))
        device = first.device if generator is None else generator_device(generator)

        def noise(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=first.dtype, device=device).to(first.device)

        along = noise(num, len(first), self.rank) * math.sqrt(low_rank / (self.rank - 1))
        drawn: Parameters = {}
        for name, mean in self.mean.items():
            std = (self.scatter[name] / self.count).sqrt()
            columns = torch.stack(self.deviations[name])  # (M, E, ...)
            drawn[name] = mean + math.sqrt(diagonal) * std * noise(num, *mean.shape)
            drawn[name] += torch.einsum("sem,me...->se...", along, columns)
        return drawn

    def predict(
        self,
        x: TensorOrLoader,
        num: int = 30,
        *,
        group: int = 10,
        own: bool = False,
        generator: torch.Generator | None = None,
    ) -> Predictive:
        """Averages the network over draws. BatchNorm statistics of each draw come from the training data, never from x.

        Args:
            x: Inputs, (n, ...), or with ``own`` one set for each network, (E, n, ...); or a loader.
            num: Number of draws.
            group: Draws that are computed at a time, fewer where rows and networks are many.
            own: Whether each network of the stack has its own inputs.
            generator: Source of randomness; the same draws every time by default.
        """
        num, group = whole_number("num", num), whole_number("group", group)
        rows = x.shape[1 if own else 0] if isinstance(x, Tensor) and x.ndim > own else 1
        # Two million rows of a thousand units are 8 GiB.
        group = max(1, min(group, 2_000_000 // max(1, self.members * rows)))
        return self._predict(x, Draws(self, num, group, seed_of(generator)), own)

    @over_batches
    def _predict(self, x: Tensor, draws: "Draws", own: bool) -> Predictive:
        """The prediction with draws that are the same for every batch of a loader."""

        def outputs() -> Iterator[Tensor]:
            for drawn in draws:
                f = drawn_outputs(self.model, drawn, self.fixed | self.buffers, x, own=own)
                yield from (f[:, 0] if self.single else f)

        noise = self.fixed["likelihood.log_noise"].exp() if isinstance(self.model.likelihood, Gaussian) else None
        return mixture(self.model, outputs(), noise[0] if noise is not None and self.single else noise)

    @torch.no_grad()
    def norm_statistics(self, drawn: Parameters) -> Parameters:
        """Running statistics (S, E, ...) of every BatchNorm under the drawn parameters: plain averages over the training data."""
        norms = [(n, m) for n, m in self.model.named_modules() if isinstance(m, BATCH_NORMS)]
        if not norms:
            return {}
        num = len(next(iter(drawn.values())))
        names = [f"{n}.{kind}" for n, _ in norms for kind in ("running_mean", "running_var")]
        counters = {n: b for n, b in self.buffers.items() if n.endswith("num_batches_tracked")}
        statistics = {n: self.buffers[n].expand(num, *self.buffers[n].shape).clone() for n in names}

        def single(
            drawn: Parameters, statistics: Parameters, fixed: Parameters, x: Tensor
        ) -> tuple[Tensor, Parameters]:
            # BatchNorm writes its running statistics in place, into the copies that it is given.
            f = functional_call(self.model, drawn | statistics | fixed, (x,))
            return f, statistics

        with EXCHANGE_LOCK:
            self.model.train()
            momenta = [m.momentum for _, m in norms]
            seen = 0
            try:
                for x in self._inputs():
                    if x.shape[1] == 1:
                        continue  # BatchNorm has no statistics of a single row
                    seen += x.shape[1]
                    for _, module in norms:
                        module.momentum = x.shape[1] / seen  # makes the running value an average over all rows
                    fixed = self.fixed | {n: b.clone() for n, b in counters.items()}
                    inner = vmap(single, randomness="different")
                    _, statistics = vmap(inner, in_dims=(0, 0, None, None), randomness="different")(
                        drawn, statistics, fixed, x
                    )
            finally:
                for (_, module), momentum in zip(norms, momenta, strict=True):
                    module.momentum = momentum
                self.model.eval()
        if self.batches.shared:  # every process has seen rows of its own
            for value in statistics.values():
                self.batches.over_processes(value).div_(workers())
        return statistics

    def _inputs(self) -> Iterator[Tensor]:
        """The training inputs of every network, (E, b, ...), batch by batch."""
        if self.rows is not None:
            yield from (self.batches.x[index] for index in self.rows.split(self.batches.size, dim=1))
            return
        yield from (x.expand(self.members, *x.shape) for x, _ in self.batches)


class Draws:
    """Groups of weights drawn from a posterior, with BatchNorm statistics of their own: the same ones every time.

    Weights are drawn again, for many of them would not fit into memory; the statistics, which take a pass over the training data,
    are kept.
    """

    def __init__(self, swag: Swag, num: int, group: int, seed: int) -> None:
        self.swag, self.seed = swag, seed
        self.sizes = [min(group, num - start) for start in range(0, num, group)]
        self.statistics: list[Parameters] = []

    def __iter__(self) -> Iterator[Parameters]:
        """Parameters and statistics of a group, each (group, E, ...)."""
        device = next(iter(self.swag.mean.values())).device
        generator = torch.Generator(device).manual_seed(self.seed)
        for number, size in enumerate(self.sizes):
            drawn = self.swag.sample_weights(size, generator=generator)
            if number == len(self.statistics):
                self.statistics.append(self.swag.norm_statistics(drawn))
            yield drawn | self.statistics[number]
