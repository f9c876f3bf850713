"""MAP training of one network, or of a stack of networks of one shape as a single computation.

The loss is minus the log joint, summed over all data: a minibatch of b rows out of N counts N/b times. For the optimiser it is
divided by N, so that learning rates do not depend on the size of the data set.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Event
from typing import Any, Literal

import torch
from rich.progress import track
from torch import Tensor, nn

from bochner.arguments import as_sequence, described, is_dense, positive_number, seed_number, shown, whole_number
from bochner.errors import one_of
from bochner.layers import StationaryLayer
from bochner.models import Model
from bochner.networks import seeded_dropout
from bochner.training.batches import Batches, LoadedBatches, Minibatches, TensorOrLoader, workers
from bochner.training.checks import as_list
from bochner.training.optimizers import adam, sgd
from bochner.training.stack import Stack
from bochner.training.threads import one_thread


def constant(progress: float) -> float:  # noqa: ARG001
    """Learning-rate factor 1 throughout."""
    return 1.0


def square_root_decay(progress: float) -> float:
    """The schedule of the paper's text: 0.72 + 0.28 √(1 − t) at a share t of the epochs, down to 0.72."""
    return 0.72 + 0.28 * math.sqrt(1 - progress)


def half_cosine(progress: float) -> float:
    """½ + ½ cos πt at a share t of the epochs: from 1 down to 0, slowly at both ends."""
    return 0.5 + 0.5 * math.cos(math.pi * progress)


@dataclass(frozen=True)
class Recipe:
    """Settings of training: epochs, batches, optimiser and learning rates.

    Attributes:
        epochs: Passes over the data.
        batch_size: Rows in a minibatch.
        optimizer: Makes a torch optimiser from parameter groups that carry their learning rate and weight decay. It must add the
            weight decay to the gradient, as Adam and SGD do (AdamW does not): that is the gradient of the Gaussian priors.
        lr: Learning rate, or one for each network of the stack.
        scale_lr: Learning rate of the lengthscale and of parameters with one element, such as the noise; None for the same as
            the others.
        schedule: Factor on all learning rates, as a function of the share of epochs that are over.
        precision: What matrix products may round their inputs to: "float32", on CUDA "tf32" (10 bits), or "bfloat16" (7 bits) for
            linear layers of extractors under ``sgd`` (and on CUDA the output layer), and as "tf32" for everything else. Processors
            without products in bfloat16 (AVX-512) compute in float32.
        explosion: A loss this many times above the first one (in absolute terms, at least 1) counts as divergence.
    """

    epochs: int = 100
    batch_size: int = 50
    optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] = adam
    lr: float | Sequence[float] = 1e-3
    scale_lr: float | None = None
    schedule: Callable[[float], float] = constant
    precision: Literal["float32", "tf32", "bfloat16"] = "float32"
    explosion: float = 1e6

    def __post_init__(self) -> None:
        whole_number("epochs", self.epochs)
        whole_number("batch_size", self.batch_size)
        self.rates(1)
        if self.scale_lr is not None:
            positive_number("scale_lr", self.scale_lr, bounded=False)
        positive_number("explosion", self.explosion, bounded=False)
        one_of("precision", self.precision, ("float32", "tf32", "bfloat16"))
        for name, value in (("optimizer", self.optimizer), ("schedule", self.schedule)):
            if not callable(value):
                raise ValueError(f"The {name} parameter must be a function, got {shown(value)} instead.")

    def rates(self, num: int) -> list[float]:
        """The learning rates of ``num`` networks."""
        return [positive_number("lr", rate, bounded=False) for rate in as_sequence(self.lr, num)]

    @classmethod
    def paper(cls, lr: float | Sequence[float], *, epochs: int = 100, batch_size: int = 50) -> "Recipe":
        """The paper's UCI training: SGD with momentum 0.9, rate 0.01 for lengthscale and noise, square-root decay to 0.72."""
        return cls(epochs, batch_size, sgd, lr, 0.01, square_root_decay)


@dataclass(frozen=True)
class Fit:
    """The losses of a training run, and which networks diverged.

    Attributes:
        loss: Mean minibatch loss (minus log joint over N) of every epoch, (epochs, E); its Gaussian priors are those at the
            epoch's end, and so are those of the model layers.
        diverged: Which networks met a loss that was not finite or exploded, (E,). They keep the parameters they had at the
            start of that epoch, and their later losses are NaN.
    """

    loss: Tensor
    diverged: Tensor


def stack_size(model: Model, batch_size: int) -> int:
    """How many networks like this one train best as one stack.

    On CUDA as many as fit: parameters, gradients, momenta and the copy to fall back on, and each row's activations forward and
    backward; but no tensor of more than three GiB. A step is many hundred kernels, most of them short: 640 of the paper's networks
    took 24.8 µs each as one stack, and 33.6 µs as four (H200, batch 50). On a CPU five: enough to hide the interpreter, few enough
    that arrays of a million weights are not given back to the system.
    """
    if not model.layer.weight.is_cuda:
        return 5
    free, _ = torch.cuda.mem_get_info()
    widths = [m.out_features for m in model.modules() if isinstance(m, nn.Linear | StationaryLayer)]
    sizes = [p.numel() for p in model.parameters()]
    numbers = 6 * sum(sizes) + 16 * batch_size * sum(widths)
    largest = max(*sizes, batch_size * max(widths))
    return max(1, min(int(0.8 * free / (4 * numbers)), 3 * 2**30 // (4 * largest)))


def fit_map(
    model: Model | Sequence[Model],
    x: TensorOrLoader,
    y: Tensor | None = None,
    recipe: Recipe | None = None,
    *,
    seed: int | Sequence[int] = 0,
    rows: Tensor | None = None,
    num_data: int | None = None,
    after_epoch: Callable[[dict[str, Tensor]], None] | None = None,
    progress: bool = False,
    stop: Event | None = None,
) -> Fit:
    """Maximises the log joint in place.

    Args:
        model: A network, or networks of one shape that are trained as one stack. They may differ in activation and spectrum;
            those that share their activation should follow each other.
        x: Inputs, (N, ...), on the networks' device. Or a loader of (x, y), whose batches all networks see; under
            ``torch.distributed`` each process gives its share of every batch, and all end with the same networks.
        y: Targets, (N, c) or integer (N,); None with a loader.
        recipe: How to train; ``Recipe()`` by default. Its batch size does not concern a loader.
        seed: Seed of shuffles and dropout, one for each network. A network in a stack trains as it would alone with its seed.
        rows: Which rows each network sees, (E, n) integers: folds of one data set. All of them by default.
        num_data: Number of rows that the prior is weighed against; all rows by default, for which a loader is gone through once.
        after_epoch: Called at the end of every epoch with the trained parameters, each (E, ...); they change afterwards.
        progress: Whether to show a progress bar.
        stop: Ends training at the next epoch once it is set, from another thread.
    """
    models, recipe = as_list(model), recipe or Recipe()
    device = models[0].layer.weight.device
    seeds = _seeds(seed, len(models)).to(device)
    rates = _rates(recipe, len(models))
    batches = Batches(models[0], x, y, size=recipe.batch_size)
    source = _source(batches, rows, seeds, len(models))
    num_data = _num_data(batches, source, num_data)
    on_tensor_cores = tf32(recipe.precision != "float32" and device.type == "cuda")
    with on_tensor_cores, seeded_dropout([m.extractor for m in models], next(iter(batches))[0][:1]):
        own_seeds = seeds + (torch.distributed.get_rank() << 32) if source.shared else seeds
        stack = Stack(models, recipe, rates.to(device), own_seeds, num_data)
        if after_epoch is not None and len(stack.networks.heads) > 1:
            raise ValueError("The after_epoch parameter needs networks that share their activation.")
        epochs = track(range(recipe.epochs), description="training", disable=not progress, transient=True)
        try:
            return Fit(*stack.train(source, after_epoch, _until(stop, epochs)))
        finally:  # an interrupted run keeps what it has learnt
            stack.networks.write_back(workers() if source.shared else 1)


def _until(stop: Event | None, epochs: Iterable[int]) -> Iterator[int]:
    """Epochs until the event ``stop`` is set."""
    return itertools.takewhile(lambda _: stop is None or not stop.is_set(), epochs)


def _seeds(seed: int | Sequence[int], num: int) -> Tensor:
    """One seed for each of ``num`` networks."""
    seeds = [seed_number("seed", value) for value in as_sequence(seed, num)]
    if len(seeds) != num:
        raise ValueError(f"The seed parameter must be one number or {num}, got {len(seeds)} instead.")
    return torch.tensor(seeds)


def _source(batches: Batches, rows: Tensor | None, seeds: Tensor, num: int) -> Minibatches | LoadedBatches:
    """The source of batches of a stack of ``num`` networks."""
    if batches.is_loader:
        if rows is not None:
            raise ValueError("The rows parameter needs tensors: with a loader all networks see all of its batches.")
        return LoadedBatches(batches, num)
    assert batches.y is not None
    if rows is None:
        rows = torch.arange(len(batches.x), device=batches.x.device).expand(num, -1)
    if not is_dense(rows) or rows.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"The rows parameter must be a tensor of integers, got {described(rows)} instead.")
    if rows.ndim != 2 or len(rows) != num or rows.shape[1] == 0:
        raise ValueError(f"The rows parameter must have shape ({num}, n) with n ≥ 1, got {tuple(rows.shape)} instead.")
    low, high = int(rows.min()), int(rows.max())
    if low < 0 or high >= len(batches.x):
        raise ValueError(f"The rows parameter must hold 0 to {len(batches.x) - 1}, got {low} to {high} instead.")
    return Minibatches(batches.x, batches.y, rows, batches.size, seeds)


def _num_data(batches: Batches, source: Minibatches | LoadedBatches, num_data: int | None) -> int:
    """The number of rows that the priors are weighed against: the one that is asked for, or the number that a network sees."""
    if num_data is not None:
        num_data = whole_number("num_data", num_data)
    if isinstance(source, LoadedBatches):
        return batches.count() if num_data is None or source.shared else num_data
    return source.rows.shape[1] if num_data is None else num_data


def _rates(recipe: Recipe, num: int) -> Tensor:
    """The learning rate of each of ``num`` networks."""
    if not isinstance(recipe, Recipe):
        raise ValueError(f"The recipe parameter must be a Recipe, got {shown(recipe)} instead.")
    rates = recipe.rates(num)
    if len(rates) != num:
        raise ValueError(f"The lr of the recipe must be one number or {num}, got {shown(recipe.lr)} instead.")
    return torch.tensor(rates, dtype=torch.float64)


@dataclass(frozen=True)
class StackRows:
    """The training rows of many networks: folds of one data set.

    Attributes:
        x: Inputs of the whole data set, (N, ...).
        y: Its targets.
        rows: Which rows each network sees, (E, n) integers.
        num_data: Number of rows that the priors are weighed against; n by default.
    """

    x: Tensor
    y: Tensor
    rows: Tensor
    num_data: int | None = None


def fit_stacks(
    models: Sequence[Model], data: StackRows, recipe: Recipe, *, seed: Sequence[int], progress: bool = False
) -> Fit:
    """``fit_map`` for any number of networks: as many stacks as ``stack_size`` asks for, of nearly equal size.

    On a CPU every core trains a stack of its own on one thread, so that results do not depend on the number of cores.
    """
    num = len(models := as_list(models))
    if not is_dense(data.rows) or data.rows.ndim == 0 or len(data.rows) != num:
        raise ValueError(
            f"The rows parameter must be a tensor of shape ({num}, n), got {described(data.rows)} instead."
        )
    parts = math.ceil(num / stack_size(models[0], recipe.batch_size))
    ends = [num * (i + 1) // parts for i in range(parts)]
    cuts = [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]
    rates, seeds = recipe.rates(num), _seeds(seed, num).tolist()
    stop = Event()

    def fit(cut: slice, show: bool) -> Fit:
        part_recipe = replace(recipe, lr=rates[cut])
        options: Any = {"seed": seeds[cut], "rows": data.rows[cut], "num_data": data.num_data}
        return fit_map(models[cut], data.x, data.y, part_recipe, **options, progress=show, stop=stop)

    if models[0].layer.weight.is_cuda:
        fits = [fit(cut, progress) for cut in cuts]
    else:
        pool = ThreadPoolExecutor(torch.get_num_threads())
        with one_thread():
            try:
                running = pool.map(lambda cut: fit(cut, show=False), cuts)
                fits = list(track(running, description="training", total=parts, disable=not progress, transient=True))
            finally:  # after an interrupt, stacks end at their next epoch and waiting ones never start
                stop.set()
                pool.shutdown(cancel_futures=True)
    return Fit(torch.cat([f.loss for f in fits], 1), torch.cat([f.diverged for f in fits]))


@contextlib.contextmanager
def tf32(wanted: bool) -> Iterator[None]:
    """Matrix products in tf32 for a while: a setting of the whole process, so it is touched only where it matters."""
    before = torch.get_float32_matmul_precision()
    if wanted:
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        if wanted:
            torch.set_float32_matmul_precision(before)
