r"""A stationary head on a trained network: calibrated predictions, and a score for rows unlike the training data.

The most probable class stays that of the network, whose outputs are $z(x)$. The stationary prior tells how far these outputs can
be trusted. Let $v(x)$ be the share of the prior variance that the training rows leave at a row, under a stationary Gaussian
process on the features before the last layer (a head of infinite width; see :mod:`bochner.members.features`). It is 0 at a row
seen many times, and 1 far from all rows. Then

$$ p(y \mid x) = \operatorname{softmax}\bigl(r(v)\, z(x) / t\bigr), \qquad
   y \mid x \sim \mathrm{N}\bigl(\bar y + q(v) (z(x) - \bar y),\; s_y^2 (1 - r(v)^2) + s^2\bigr), \qquad r(v) = (1 - v)^\gamma $$

for classes and for numbers. Near the training rows this is the answer of the network. Far from them all classes are equally
probable, and a number has the mean and the spread of all targets. The temperature t, or the noise s, is the one under which
held-out rows are most probable. The power $\gamma$ is the largest one whose log probability is within a standard error of the
best. The kernel and its lengthscale are chosen by the same rows. One of these rows in a hundred has a variance left above $v_1$;
above $v_1$ they tell nothing, and r falls in proportion to $1 - v$, as for the Gaussian process, or faster where $\gamma > 1$.
The factor q of a number's mean is 1 up to $v_1$ and falls like r beyond: a good network keeps its accuracy. Where held-out rows are
clearly more probable with q = r, as under a network that has learnt noise, it is r.

For classes the kernel acts on the *directions* of the features, with the logarithm of their length as one more coordinate: a
network trained with a softmax tells classes apart by direction, and images unlike all others tend to have short features. So a
row is far where its direction is new, or its length is unusual.

**The score.** Two cues are large at rows unlike the known ones: the variance left, and $-\log\sum_c e^{z_c}$, which is large where
all outputs are small, as between classes and beyond them. Each cue becomes the share $p_k$ of known rows at which it is at least as
large. At rows like the known ones $p_k$ is uniform. Fisher's statistic $-\sum_k \log p_k$ joins both cues, and the score is the
share of known rows with a smaller statistic: a row of score 0.99 looks stranger than 99 of 100 known rows. Above the ninetieth
percentile shares follow an exponential tail, so that the scores of strange rows still differ, up to rounding.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bochner.arguments import probability
from bochner.attach.answers import Answer
from bochner.attach.batches import (
    HeadRows,
    Reader,
    Tapped,
    as_outputs,
    first_targets,
    inputs_of,
    sample_rows,
    sum_over_processes,
)
from bochner.attach.nearness import KERNELS, Nearness, Space
from bochner.attach.novelty import Novelty, cues_of
from bochner.predictive import Predictive

MAX_ANCHORS = 1000  # largest number of anchors of the prior on the features
MAX_KNOWN_ROWS = 4000  # largest number of known rows: they choose the constants, and new rows are compared with them
MIN_ROWS = 10  # smallest number of rows that a head is fitted to
# Lengthscales that are tried, in median distances of features; under longer ones no row is far.
LENGTHSCALE_FACTORS = (0.25, 0.5, 1.0)
# Kernel and lengthscale (in median distances of features) without held-out rows: those that held-out rows choose most often.
DEFAULT_KERNEL, DEFAULT_FACTOR = "matern32", 0.5
DEFAULT_FALSE_ALARM = 0.05  # share of ordinary rows that may be flagged, until with_false_alarm says another


@dataclass(frozen=True)
class HeadFacts:
    """What a head keeps of its fit beside its parts.

    Attributes:
        classes: Whether the network predicts classes.
        false_alarm: Share of ordinary rows that may be flagged.
        rows: Number of training rows.
    """

    classes: bool
    false_alarm: float
    rows: int


class StationaryHead:
    """A trained network with a stationary head: calibrated, and aware of what is unlike its data.

    ``StationaryHead.fit(network, loader)`` makes one; ``StationaryHead.load(path, network)`` reads one back.

    The network is not changed, and not copied: the head has modules of its own, in evaluation mode, that share the network's
    parameters. Training the network further makes the head wrong. Predictions may be asked for from several threads.

    Attributes:
        kernel: Name of the kernel that was chosen.
        lengthscale: Its lengthscale, in median distances of features.
        power: The exponent γ.
        temperature: For classes, the number t that outputs are divided by.
        noise: Standard deviation of the noise of every output, (c,), for regression.
        threshold: Score above which a row is flagged; 1, and so none, where known rows are too few to say.
        false_alarm: Share of rows like the known ones that are flagged; ``with_false_alarm`` changes it.
    """

    def __init__(self, tapped: Tapped, near: Nearness, answer: Answer, novelty: Novelty, facts: HeadFacts) -> None:
        self._tapped, self._near, self._answer, self._novelty, self._facts = tapped, near, answer, novelty, facts
        self.kernel, self.lengthscale = near.kernel, near.scale
        self.power, self.temperature, self.noise = answer.power, answer.temperature, answer.noise
        self.false_alarm = facts.false_alarm
        self.threshold = novelty.threshold(self.false_alarm)

    @classmethod
    def fit(
        cls,
        network: nn.Module,
        loader: Iterable[Any],
        held_out: Iterable[Any] | None = None,
        *,
        head: str | None = None,
        task: str | None = None,
        progress: bool = True,
    ) -> "StationaryHead":
        """Attaches a head to a trained network.

        The loader is gone through twice. Under ``torch.distributed`` every process gives its own share of the rows, and all get
        the same head.

        Args:
            network: Any module; its last layer must be an ``nn.Linear`` whose output the network returns.
            loader: Batches (x, y), (x₁, …, y) or dictionaries with 'labels', 'label', 'targets', 'target' or 'y'; more than once.
            held_out: The same, of rows that the network was not trained on: they set the temperature or noise and the score.
                Without them nothing tells how sure the network should be: its outputs are taken as they are, the kernel and the
                power are the default ones, and rows of the loader set the score, each as if the head had not seen it. That is
                right where the network has not learnt its training rows by heart.
            head: Dotted name of the last linear layer, where it cannot be found. Its inputs are the features.
            task: 'classes' or 'regression'; by default integer targets are classes.
            progress: Whether to show the passes over the data.
        """
        _check_options(network, task)
        first = first_targets(loader)
        tapped, classes = Tapped.of(network, head, loader), _has_classes(first, task)
        reader, seen = Reader(tapped, classes), held_out is None
        sample = sample_rows(reader.rows(loader, "reading features", progress), MAX_ANCHORS + MAX_KNOWN_ROWS)
        _check_enough("loader", sample.seen)
        anchors, known = sample.parted(MAX_ANCHORS)
        if held_out is not None:
            known = sample_rows(reader.rows(held_out, "reading held-out rows", progress), MAX_KNOWN_ROWS)
            _check_enough("held_out", known.seen)
        known = known.expanded(MAX_KNOWN_ROWS)
        space = Space.of(sample.features, directions=classes)
        near = _choose_nearness(space, sample, anchors, known, classes, seen)
        if sample.seen > int(sample.counts.sum()):
            rows = reader.rows(loader, "summing over rows", progress)
            grams = (near.gram(part.features) for part in rows)
            near = near.with_rows(sum_over_processes(torch.zeros_like(near.factor), grams))
        left = near.left(known.features, seen=seen)
        answer = Answer.fitted(known, left, _targets_of(sample), classes, seen)
        novelty = Novelty.of(cues_of(left, known.outputs, classes))
        return cls(tapped, near, answer, novelty, HeadFacts(classes, DEFAULT_FALSE_ALARM, sample.seen))

    def predict(self, x: Any) -> Predictive:
        """The predictive distribution at a tensor, a tuple or dictionary of tensors, or a loader (whose labels are ignored).

        For classes ``expected_entropy`` is the entropy of the network's answer at its temperature. The entropy that is added far
        from the data is the mutual information.
        """
        outputs, left = self._outputs_and_left(x)
        return replace(self._answer(outputs, left), novelty=self._score(outputs, left))  # pyright: ignore[reportArgumentType]

    def ood_score(self, x: Any) -> Tensor:
        """Share of known rows that look less strange than each row, (n,): near 1 for rows unlike all known rows."""
        return self._score(*self._outputs_and_left(x))

    def _score(self, outputs: Tensor, left: Tensor) -> Tensor:
        return self._novelty(cues_of(left, outputs, self._facts.classes))

    def with_false_alarm(self, share: float) -> "StationaryHead":
        """The same head with the threshold that flags this share of the rows like the known ones; 0.05 after ``fit``.

        Nothing is fitted again: only ``threshold`` and ``false_alarm`` differ.
        """
        facts = replace(self._facts, false_alarm=probability("share", share))
        return StationaryHead(self._tapped, self._near, self._answer, self._novelty, facts)

    def variance_left(self, x: Any) -> Tensor:
        """Share of the prior variance that the training rows leave at each row, (n,)."""
        return self._outputs_and_left(x)[1]

    @torch.no_grad()
    def _outputs_and_left(self, x: Any) -> tuple[Tensor, Tensor]:
        outputs, left = [], []
        for inputs in inputs_of(x):
            features, raw = self._tapped(inputs)
            if not bool(torch.isfinite(features).all()) or not bool(torch.isfinite(raw).all()):
                raise ValueError("The x parameter gives features or outputs that are not finite; are its values?")
            outputs.append(self._answer.checked(as_outputs(raw, self._facts.classes).double()))
            left.append(self._near.left(features))
        if not outputs:
            raise ValueError("The x parameter must hold at least one row, got none.")
        return torch.cat(outputs), torch.cat(left)

    def save(self, path: str | Path, *, key: bytes | None = None) -> Path:
        """Writes the head, without the network, to a file that holds no code; it holds at most 1,000 rows of features.

        Args:
            path: The file.
            key: Secret of a signature; only ``load`` with the same key reads the file.
        """
        from bochner.storage.attached import write_head

        return write_head(Path(path), self, key)

    @classmethod
    def load(cls, path: str | Path, network: nn.Module, *, key: bytes | None = None) -> "StationaryHead":
        """Reads a head for the network that it was made for; a ModelFileError for any other file or network.

        Args:
            path: A file that ``save`` wrote.
            network: The network, with the parameters and buffers that it had.
            key: The key that the file was saved with.
        """
        from bochner.storage.attached import read_head

        return read_head(Path(path), network, key)


def _check_options(network: Any, task: Any) -> None:
    if not isinstance(network, nn.Module):
        raise ValueError(f"The network parameter must be an nn.Module, got {type(network).__name__} instead.")
    if task not in (None, "classes", "regression"):
        raise ValueError(f"The task parameter must be 'classes' or 'regression', got {task!r} instead.")


def _has_classes(targets: Tensor, task: str | None) -> bool:
    """Whether targets are classes; floats that all are 0 or 1 may be either."""
    if task is None and targets.is_floating_point() and bool(((targets == 0) | (targets == 1)).all()):
        raise ValueError(
            "The loader parameter gives floats that all are 0 or 1; say task='classes' or task='regression'."
        )
    return not targets.is_floating_point() if task is None else task == "classes"


def _check_enough(name: str, rows: int) -> None:
    if rows < MIN_ROWS:
        raise ValueError(f"The {name} parameter must give at least {MIN_ROWS} rows, got {rows}.")


def _targets_of(sample: HeadRows) -> Tensor:
    """Targets of the sample, each as often as it counts."""
    return sample.expanded(MAX_ANCHORS + MAX_KNOWN_ROWS).targets


def _choose_nearness(
    space: Space, sample: HeadRows, anchors: HeadRows, known: HeadRows, classes: bool, seen: bool
) -> Nearness:
    """The posterior under the kernel and lengthscale that make known rows most probable, fitted to the sample."""
    rows = (anchors.features, sample.features, sample.counts)
    if seen:
        return Nearness.at(space, DEFAULT_KERNEL, DEFAULT_FACTOR, *rows)
    tried = []
    for kernel, scale in itertools.product(KERNELS, LENGTHSCALE_FACTORS):
        near = Nearness.at(space, kernel, scale, *rows)
        answer = Answer.fitted(known, near.left(known.features), _targets_of(sample), classes, seen)
        tried.append((answer.score, near))
    return max(tried, key=lambda pair: pair[0])[1]
