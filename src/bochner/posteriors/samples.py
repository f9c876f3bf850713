"""Draws from a posterior, whatever sampler made them: what they predict, and whether the chains can be trusted."""
# NumPyro declares no types:
# pyright: reportMissingTypeStubs=false, reportUnknownVariableType=false

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bochner.arguments import finite_tensor, probability, seed_number, whole_number
from bochner.likelihoods import Gaussian
from bochner.models import Model
from bochner.posteriors.mixture import EXCHANGE_LOCK, drawn_outputs, mixture
from bochner.predictive import Predictive
from bochner.training.batches import as_model_takes


@dataclass(frozen=True)
class Sampling:
    """How long a sampler runs.

    Attributes:
        warmup: Steps of adaptation for each chain.
        samples: Draws for each chain after that.
        chains: Number of chains for each network.
        target_accept: Target acceptance probability of the step size; raise it where transitions diverge.
        max_tree_depth: Largest depth of the trajectory's tree, which is then 2**depth steps long.
        seed: Seed of initial values and of the sampler.
        progress: Whether to show a progress bar.
    """

    warmup: int = 1000
    samples: int = 1000
    chains: int = 4
    target_accept: float = 0.8
    max_tree_depth: int = 10
    seed: int = 0
    progress: bool = False

    def __post_init__(self) -> None:
        for name in ("warmup", "samples", "chains", "max_tree_depth"):
            whole_number(name, getattr(self, name))
        probability("target_accept", self.target_accept)
        seed_number("seed", self.seed)


@dataclass(frozen=True)
class Diagnostics:
    """Whether the chains can be trusted.

    Attributes:
        divergences: Number of divergent transitions after warm-up, all chains together.
        r_hat: Largest split R-hat of the function values, or of the class probabilities; near 1 when the chains agree.
        ess: Smallest effective sample size of the same.
    """

    divergences: int
    r_hat: float
    ess: float


class Sampled:
    """Posterior draws of one network.

    Args:
        model: The network.
        samples: Draws of each sampled parameter, (chains, samples, ...).
        divergences: Number of divergent transitions after warm-up.
        leapfrog_steps: Number of gradients after warm-up.
    """

    def __init__(self, model: Model, samples: dict[str, Tensor], *, divergences: int, leapfrog_steps: int) -> None:
        self.model, self.samples = model, samples
        self.divergences, self.leapfrog_steps = divergences, leapfrog_steps

    def outputs(self, x: Tensor, *, group: int = 200) -> Tensor:
        """Function values of every draw, (chains, samples, n, c)."""
        sizes = next(iter(self.samples.values())).shape[:2]
        f = torch.cat(list(self._drawn(x, 1, group)))
        return f.unflatten(0, sizes)

    def _drawn(self, x: Tensor, thin: int, group: int) -> Iterator[Tensor]:
        flat = {n: v.flatten(0, 1)[::thin, None] for n, v in self.samples.items()}
        with EXCHANGE_LOCK:  # while another thread predicts, the model holds that thread's parameters
            fixed = {n: v[None].clone() for n, v in self.model.state_dict().items() if n not in flat}
        for start in range(0, len(next(iter(flat.values()))), group):
            drawn = {n: v[start : start + group] for n, v in flat.items()}
            yield drawn_outputs(self.model.eval(), drawn, fixed, x)[:, 0]

    def predict(self, x: Tensor, *, thin: int = 1, group: int = 200) -> Predictive:
        """Averages over every ``thin``-th draw, ``group`` of them at a time; each draw brings its own noise."""
        thin, group = whole_number("thin", thin), whole_number("group", group)
        x = as_model_takes(finite_tensor("x", x), self.model.layer.weight)
        noise = None
        if isinstance(self.model.likelihood, Gaussian):
            drawn = self.samples.get("likelihood.log_noise")
            with EXCHANGE_LOCK:
                held = self.model.likelihood.noise.detach()
            noise = held if drawn is None else drawn.flatten()[::thin].exp()
        return mixture(self.model, (f for part in self._drawn(x, thin, group) for f in part), noise)

    def diagnose(self, x: Tensor) -> Diagnostics:
        """Divergences, R-hat and effective sample size of what the network says at the given inputs.

        That is the function for regression and the probabilities for classes: the softmax leaves the function's level open.
        """
        from numpyro.diagnostics import effective_sample_size, split_gelman_rubin

        f = self.outputs(x)
        if f.shape[1] < 4:
            raise ValueError(f"Diagnostics need at least 4 samples for each chain, got {f.shape[1]}.")
        f = f if isinstance(self.model.likelihood, Gaussian) else torch.softmax(f, -1)
        values = f.flatten(2).double().cpu().numpy()
        return Diagnostics(
            self.divergences, float(split_gelman_rubin(values).max()), float(effective_sample_size(values).min())
        )
