"""MAP training of one network, or of a stack of networks of one shape as a single computation.

The loss is minus the log joint, summed over all data: a minibatch of b rows out of N counts N/b times. For the optimiser it is
divided by N, so that learning rates do not depend on the size of the data set.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Event
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn

from bochner.engine import LoadedBatches, Minibatches, Stack
from bochner.layers import StationaryLayer
from bochner.loaders import Batches
from bochner.models import Model
from bochner.networks import seeded_dropout
from bochner.validation import as_list


def constant(progress: float) -> float:  # noqa: ARG001
    """Learning-rate factor 1 throughout."""
    return 1.0


def square_root_decay(progress: float) -> float:
    """The schedule of the paper's text: 0.72 + 0.28 √(1 − t) at a share t of the epochs, down to 0.72."""
    return 0.72 + 0.28 * math.sqrt(1 - progress)


def half_cosine(progress: float) -> float:
    """½ + ½ cos πt at a share t of the epochs: from 1 down to 0, slowly at both ends."""
    return 0.5 + 0.5 * math.cos(math.pi * progress)


def adam(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Adam, in one pass over the parameters. The Gaussian priors arrive as weight decay, which Adam adds to the gradient."""
    return torch.optim.Adam(groups, fused=True, capturable=groups[0]["params"][0].is_cuda)


class FusedAdam:
    """Adam on the CPU in one pass over the parameters, with the few parts of torch's optimiser that the engine uses.

    Torch's own class loads its compiler when the first one is made, which takes longer than training a few small networks.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self.param_groups, self.defaults = groups, {"fused": True}
        self.state = [
            [(torch.zeros_like(p), torch.zeros_like(p), torch.zeros(())) for p in group["params"]] for group in groups
        ]

    @torch.no_grad()
    def step(self) -> None:
        """Moves every parameter against its gradient, to which weight decay is added."""
        for group, state in zip(self.param_groups, self.state, strict=True):
            parameters, steps = group["params"], [own[2] for own in state]
            torch._foreach_add_(steps, 1)
            torch._fused_adam_(
                parameters,
                [p.grad for p in parameters],
                [own[0] for own in state],
                [own[1] for own in state],
                [],
                steps,
                lr=group["lr"],
                beta1=0.9,
                beta2=0.999,
                weight_decay=group["weight_decay"],
                eps=1e-8,
                amsgrad=False,
                maximize=False,
            )


def light_adam(groups: list[dict[str, Any]]) -> Any:
    """``adam`` without torch's compiler where that is not needed: on the CPU."""
    return adam(groups) if groups[0]["params"][0].is_cuda else FusedAdam(groups)


def sgd(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """SGD with momentum 0.9, in one pass over the parameters."""
    return torch.optim.SGD(groups, momentum=0.9, fused=True)


@dataclass(frozen=True)
class Recipe:
    """How to train.

    Attributes:
        epochs: Passes over the data.
        batch_size: Rows in a minibatch.
        optimizer: Makes a torch optimiser from parameter groups that carry their learning rate and weight decay. It must add the
            weight decay to the gradient, as Adam and SGD do (AdamW does not): that is the gradient of the Gaussian priors.
        lr: Learning rate, or one for each network of the stack.
        scale_lr: Learning rate of the lengthscale and of parameters with one element, such as the noise; None for the same as
            the others.
        schedule: Factor on all learning rates, as a function of the share of epochs that are over.
        tf32: Whether matrix products on CUDA may round their inputs to tf32 (10 bits).
    """

    epochs: int = 100
    batch_size: int = 50
    optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] = adam
    lr: float | Sequence[float] = 1e-3
    scale_lr: float | None = None
    schedule: Callable[[float], float] = constant
    tf32: bool = False

    @classmethod
    def paper(cls, lr: float | Sequence[float], *, epochs: int = 100, batch_size: int = 50) -> "Recipe":
        """The paper's UCI training: SGD with momentum 0.9, rate 0.01 for lengthscale and noise, square-root decay to 0.72."""
        return cls(epochs, batch_size, sgd, lr, 0.01, square_root_decay)


@dataclass(frozen=True)
class Fit:
    """What training did.

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
    x: Any,
    y: Tensor | None = None,
    recipe: Recipe | None = None,
    *,
    seed: int | Sequence[int] = 0,
    rows: Tensor | None = None,
    num_data: int | None = None,
    explosion: float = 1e6,
    after_epoch: Callable[[dict[str, Tensor]], None] | None = None,
    progress: bool = False,
    stop: Event | None = None,
) -> Fit:
    """Maximises the log joint in place.

    Args:
        model: A network, or networks of one shape that are trained as one stack. They may differ in activation and spectrum;
            those that share their activation should follow each other.
        x: Inputs, (N, ...), on the networks' device. Minibatches are cut there. Or a loader of (x, y), whose batches all networks
            see; under ``torch.distributed`` each process gives its share of every batch, and all end with the same networks.
        y: Targets, (N, c) or integer (N,); None with a loader.
        recipe: How to train; ``Recipe()`` by default. Its batch size does not concern a loader.
        seed: Seed of shuffles and dropout, one for each network. A network in a stack trains as it would alone with its seed.
        rows: Which rows each network sees, (E, n) integers: folds of one data set. All of them by default.
        num_data: What the prior is weighed against; the number n of rows by default. A loader's rows are counted in a pass of
            their own where it is not given.
        explosion: A loss this many times above the first one (in absolute terms, at least 1) counts as divergence.
        after_epoch: Called at the end of every epoch with the trained parameters, each (E, ...); they change afterwards.
        progress: Whether to show a progress bar.
        stop: Ends training at the next epoch once it is set, from another thread.
    """
    models, recipe = as_list(model), recipe or Recipe()
    num = len(models)
    device = models[0].layer.weight.device
    seeds = torch.as_tensor([seed] * num if isinstance(seed, int) else list(seed), device=device)
    if len(seeds) != num:
        raise ValueError(f"The seed parameter must be one number or {num}, got {len(seeds)} instead.")
    rates = _rates(recipe, num)
    batches = Batches(models[0], x, y, size=recipe.batch_size)
    source = _source(batches, rows, seeds, num)
    if isinstance(source, LoadedBatches):
        num_data = batches.count() if num_data is None or source.shared else num_data
    elif num_data is None:
        num_data = source.rows.shape[1]
    example = next(iter(batches))[0][:1]
    with tf32(recipe.tf32 and device.type == "cuda"), seeded_dropout([m.extractor for m in models], example):
        stack = Stack(models, recipe, rates.to(device), _own_seeds(seeds, source.shared), num_data)
        if after_epoch is not None and len(stack.heads) > 1:
            raise ValueError("The after_epoch parameter needs networks that share their activation.")
        shown = track(range(recipe.epochs), description="training", disable=not progress, transient=True)
        epochs = itertools.takewhile(lambda _: stop is None or not stop.is_set(), shown)
        try:
            return Fit(*stack.train(source, explosion, after_epoch, epochs))
        finally:  # an interrupted run keeps what it has learnt
            stack.write_back()


def _source(batches: Batches, rows: Tensor | None, seeds: Tensor, num: int) -> Minibatches | LoadedBatches:
    """Where the batches of a stack of ``num`` networks come from."""
    if batches.is_loader:
        if rows is not None:
            raise ValueError("The rows parameter needs tensors: with a loader all networks see all of its batches.")
        return LoadedBatches(batches, num)
    assert batches.y is not None
    if rows is None:
        rows = torch.arange(len(batches.x), device=batches.x.device).expand(num, -1)
    if rows.ndim != 2 or len(rows) != num or rows.shape[1] == 0:
        raise ValueError(f"The rows parameter must have shape ({num}, n) with n ≥ 1, got {tuple(rows.shape)} instead.")
    return Minibatches(batches.x, batches.y, rows, batches.size, seeds)


def _own_seeds(seeds: Tensor, shared: bool) -> Tensor:
    """Seeds of dropout: other ones in every process that sees other rows."""
    return seeds + (torch.distributed.get_rank() << 32) if shared else seeds


def _rates(recipe: Recipe, num: int) -> Tensor:
    """The learning rate of each of ``num`` networks, after a look at the recipe's numbers."""
    rates = torch.as_tensor(
        [recipe.lr] * num if isinstance(recipe.lr, int | float) else list(recipe.lr), dtype=torch.float64
    )
    if len(rates) != num or not bool((torch.isfinite(rates) & (rates > 0)).all()):
        raise ValueError(f"The lr of the recipe must be positive, one number or {num}, got {recipe.lr} instead.")
    for name, value in (("epochs", recipe.epochs), ("batch_size", recipe.batch_size)):
        if value < 1:
            raise ValueError(f"The {name} of the recipe must be at least 1, got {value} instead.")
    return rates


def fit_stacks(
    models: Sequence[Model],
    x: Tensor,
    y: Tensor,
    recipe: Recipe,
    *,
    seed: Sequence[int],
    rows: Tensor,
    num_data: int | None = None,
    progress: bool = False,
) -> Fit:
    """``fit_map`` for any number of networks: as many stacks as ``stack_size`` asks for, of nearly equal size.

    On a CPU every core trains a stack of its own on one thread, so that results do not depend on the number of cores.
    """
    num = len(models)
    parts = math.ceil(num / stack_size(models[0], recipe.batch_size))
    ends = [num * (i + 1) // parts for i in range(parts)]
    cuts = [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]
    rates = [recipe.lr] * num if isinstance(recipe.lr, int | float) else list(recipe.lr)

    stop = Event()

    def fit(cut: slice, show: bool) -> Fit:
        own = replace(recipe, lr=rates[cut])
        chosen: Any = {"seed": seed[cut], "rows": rows[cut], "num_data": num_data, "progress": show, "stop": stop}
        return fit_map(models[cut], x, y, own, **chosen)

    threads = torch.get_num_threads()
    if models[0].layer.weight.is_cuda:
        fits = [fit(cut, progress) for cut in cuts]
    else:
        torch.set_num_threads(1)
        pool = ThreadPoolExecutor(threads)
        try:
            running = pool.map(lambda cut: fit(cut, show=False), cuts)
            fits = list(track(running, description="training", total=parts, disable=not progress, transient=True))
        finally:  # after an interrupt, stacks end at their next epoch and waiting ones never start
            stop.set()
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(threads)
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
