"""MAP training of one network, or of a stack of networks of one shape as a single computation.

The loss is minus the log joint, summed over all data: a minibatch of b rows out of N counts N/b times. For the optimiser it is
divided by N, so that learning rates do not depend on the size of the data set.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap

from bochner.models import Model
from bochner.networks import SeededDropout
from bochner.randomness import counter_permutation, counter_uniform
from bochner.validation import as_stack, check_data


def constant(progress: float) -> float:  # noqa: ARG001
    """Learning-rate factor 1 throughout."""
    return 1.0


def square_root_decay(progress: float) -> float:
    """The paper's schedule: 0.72 + 0.28 √(1 − t) at a share t of the epochs, down to 0.72."""
    return 0.72 + 0.28 * math.sqrt(1 - progress)


@dataclass(frozen=True)
class Recipe:
    """How to train.

    Attributes:
        epochs: Passes over the data.
        batch_size: Rows in a minibatch.
        optimizer: Makes a torch optimiser from parameter groups; the learning rates are set by the recipe. Its update must be
            proportional to the learning rate, as those of SGD and Adam are.
        lr: Learning rate, or one for each network of the stack.
        scale_lr: Learning rate of the lengthscale and the noise; None for the same as the others.
        schedule: Factor on all learning rates, as a function of the share of epochs that are over.
    """

    epochs: int = 100
    batch_size: int = 50
    optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] = field(
        default=lambda groups: torch.optim.Adam(groups)
    )
    lr: float | Sequence[float] = 1e-3
    scale_lr: float | None = None
    schedule: Callable[[float], float] = constant

    @classmethod
    def paper(cls, lr: float | Sequence[float], *, epochs: int = 100, batch_size: int = 50) -> "Recipe":
        """The paper's UCI training: SGD with momentum 0.9, rate 0.01 for lengthscale and noise, square-root decay to 0.72."""
        return cls(
            epochs, batch_size, lambda groups: torch.optim.SGD(groups, momentum=0.9), lr, 0.01, square_root_decay
        )


@dataclass(frozen=True)
class Fit:
    """What training did.

    Attributes:
        loss: Mean minibatch loss (minus log joint over N) of every epoch, (epochs, E).
        diverged: Which networks met a loss that was not finite or exploded, (E,). They keep the parameters they had at the
            start of that epoch, and their later losses are NaN.
    """

    loss: Tensor
    diverged: Tensor


class _Objective(nn.Module):
    """Minus the log joint over N, as the forward of a module: what functional_call can differentiate."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor, num_data: int) -> Tensor:
        return -self.model.log_joint(x, y, num_data=num_data) / num_data


def fit_map(
    model: Model | Sequence[Model],
    x: Tensor,
    y: Tensor,
    recipe: Recipe,
    *,
    seed: int | Sequence[int] = 0,
    rows: Tensor | None = None,
    explosion: float = 1e6,
    after_epoch: Callable[[dict[str, Tensor]], None] | None = None,
    progress: bool = False,
) -> Fit:
    """Maximises the log joint in place.

    Args:
        model: A network, or networks of one shape that are trained as one stack.
        x: Inputs, (N, ...), on the networks' device. Minibatches are cut there.
        y: Targets, (N, c) or integer (N,).
        recipe: How to train.
        seed: Seed of shuffles and dropout, one for each network. A network in a stack trains as it would alone with its seed.
        rows: Which rows each network sees, (E, n) integers: folds of one data set. All of them by default.
        explosion: A loss this many times above the first one (in absolute terms, at least 1) counts as divergence.
        after_epoch: Called at the end of every epoch with the trained parameters, each (E, ...); they change afterwards.
        progress: Whether to show a progress bar.
    """
    models = as_stack(model)
    num = len(models)
    if any(isinstance(m, nn.modules.dropout._DropoutNd) for m in models[0].modules()):
        raise ValueError(
            "The networks must use bochner.networks.SeededDropout in place of nn.Dropout, so that each has its own seed."
        )
    device = models[0].layer.weight.device
    seeds = torch.as_tensor([seed] * num if isinstance(seed, int) else list(seed), device=device)
    if len(seeds) != num:
        raise ValueError(f"The seed parameter must be one number or {num}, got {len(seeds)} instead.")
    rates = torch.as_tensor(
        [recipe.lr] * num if isinstance(recipe.lr, int | float) else list(recipe.lr), dtype=torch.float64
    )
    if len(rates) != num or not bool((torch.isfinite(rates) & (rates > 0)).all()):
        raise ValueError(f"The lr of the recipe must be positive, one number or {num}, got {recipe.lr} instead.")
    for name, value in (("epochs", recipe.epochs), ("batch_size", recipe.batch_size)):
        if value < 1:
            raise ValueError(f"The {name} of the recipe must be at least 1, got {value} instead.")
    check_data(models[0], x, y)
    if rows is None:
        rows = torch.arange(len(x), device=device).expand(num, -1)
    if rows.ndim != 2 or len(rows) != num or rows.shape[1] == 0:
        raise ValueError(f"The rows parameter must have shape ({num}, n) with n ≥ 1, got {tuple(rows.shape)} instead.")
    stack = _Stack(models, recipe, rates.to(device), explosion)
    try:
        return stack.train(x, y, rows, seeds, after_epoch, progress)
    finally:  # an interrupted run keeps what it has learnt
        stack.write_back()


class _Stack:
    """Networks of one shape with their parameters stacked along a first dimension."""

    def __init__(self, models: list[Model], recipe: Recipe, rates: Tensor, explosion: float) -> None:
        self.models, self.recipe, self.explosion = models, recipe, explosion
        self.objective = _Objective(models[0].train())
        parameters, self.buffers = stack_module_state([_Objective(m.train()) for m in models])  # pyright: ignore[reportArgumentType]
        self.frozen = {
            n: p.detach() for n, p in parameters.items() if not self.objective.get_parameter(n).requires_grad
        }
        self.parameters = {n: p.detach() for n, p in parameters.items() if n not in self.frozen}
        self.rates = rates
        special = [p for n, p in self.parameters.items() if self._is_scale(n)]
        plain = [p for n, p in self.parameters.items() if not self._is_scale(n)]
        # Rate 1 in the optimiser; what it did is then shrunk by each network's own rate.
        self.optimizer = recipe.optimizer([{"params": group, "lr": 1.0} for group in (plain, special) if group])
        self.dropouts = [(n, m) for n, m in self.objective.named_modules() if isinstance(m, SeededDropout)]
        self.value = vmap(grad_and_value(self._loss), in_dims=(0, 0, 0, 0, 0, None), randomness="error")

    def _is_scale(self, name: str) -> bool:
        return self.recipe.scale_lr is not None and name.endswith(("log_lengthscale", "log_noise"))

    def _loss(self, parameters: Any, frozen: Any, buffers: Any, x: Tensor, y: Tensor, num_data: int) -> Tensor:
        return functional_call(self.objective, parameters | frozen | buffers, (x, y, num_data))

    def _masks(self, seeds: Tensor, stream: int, batch: int) -> dict[str, Tensor]:
        """Fresh dropout masks as buffers of the stack, (E, batch, width)."""
        masks = {}
        for i, (name, module) in enumerate(self.dropouts):
            u = counter_uniform(seeds, stream * 1000 + i + 1, batch * module.width)
            kept = (u >= module.p).to(self.objective.model.layer.weight.dtype) / (1 - module.p)
            masks[f"{name}.mask"] = kept.reshape(len(seeds), batch, module.width)
        return masks

    def train(
        self,
        x: Tensor,
        y: Tensor,
        rows: Tensor,
        seeds: Tensor,
        after_epoch: Callable[[dict[str, Tensor]], None] | None,
        progress: bool,
    ) -> Fit:
        epochs, size, count = self.recipe.epochs, self.recipe.batch_size, rows.shape[1]
        steps = math.ceil(count / size)
        if (
            count % size == 1
            and steps > 1
            and any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self.objective.modules())
        ):
            steps -= 1  # BatchNorm has no statistics of a single row: the last one sits this epoch out
        history, first = [], None
        diverged = torch.zeros(len(self.models), dtype=torch.bool, device=x.device)
        for epoch in track(range(epochs), description="training", disable=not progress, transient=True):
            good = {n: p.clone() for n, p in (self.parameters | self.buffers).items()}
            order = rows.gather(1, counter_permutation(seeds, epoch, count))
            factor = self.recipe.schedule(epoch / epochs)
            total = torch.zeros(len(self.models), dtype=torch.float64, device=x.device)
            bad = torch.zeros_like(diverged)
            for step in range(steps):
                index = order[:, step * size : (step + 1) * size]
                masks = self._masks(seeds, epochs + epoch * steps + step, index.shape[1])
                grads, loss = self.value(self.parameters, self.frozen, self.buffers | masks, x[index], y[index], count)
                first = loss.detach() if first is None else first
                bad |= ~torch.isfinite(loss) | (loss > self.explosion * first.abs().clamp(min=1.0))
                self._update(grads, factor)
                total += loss.double()
            diverged |= bad
            for name, value in (self.parameters | self.buffers).items():
                value.copy_(torch.where(diverged.reshape(-1, *[1] * (value.ndim - 1)), good[name], value))
            history.append(torch.where(diverged, math.nan, total / steps))
            if after_epoch is not None:
                after_epoch({n.removeprefix("model."): p for n, p in self.parameters.items()})
            if bool(diverged.all()):
                break
        history += [torch.full_like(history[0], math.nan)] * (epochs - len(history))
        return Fit(torch.stack(history).cpu(), diverged.cpu())

    def _update(self, grads: dict[str, Tensor], factor: float) -> None:
        """One optimiser step at rate 1, then each network's change is multiplied by its own rate."""
        before = {}
        for name, value in self.parameters.items():
            before[name] = value.clone()
            value.grad = grads[name]
        self.optimizer.step()
        for name, value in self.parameters.items():
            rate = torch.full_like(self.rates, self.recipe.scale_lr or 0.0) if self._is_scale(name) else self.rates
            rate = (factor * rate).to(value).reshape(-1, *[1] * (value.ndim - 1))
            torch.lerp(before[name], value, rate, out=value)

    @torch.no_grad()
    def write_back(self) -> None:
        """Puts the stacked parameters and buffers into the networks, which leave in evaluation mode."""
        for i, model in enumerate(self.models):
            state = {n: p[i] for n, p in (self.parameters | self.buffers).items()}
            objective = _Objective(model)
            for name, value in (*objective.named_parameters(), *objective.named_buffers()):
                if name in state:
                    value.copy_(state[name])
            model.eval()
