"""The output layer's posterior for classes, given the features: Laplace's, around the mode of a convex log joint."""
# torch.linalg and other parts of torch declare no types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from bochner.arguments import generator_device, whole_number
from bochner.likelihoods import Categorical
from bochner.models import Model
from bochner.posteriors.closed_form import CHUNK_ROWS, cholesky, features, prior_precision
from bochner.posteriors.feature_rows import FeatureRows
from bochner.predictive import CategoricalPredictive, Predictive
from bochner.training.batches import Batches, TensorOrLoader, over_batches
from bochner.training.checks import check_model

LabelledRows = Iterable[tuple[Tensor, Tensor]]  # features and labels, in pieces


@dataclass(frozen=True)
class Solver:
    """How the mode of the output weights and the precision there are computed.

    Attributes:
        steps: Largest number of iterations of L-BFGS.
        full_limit: Largest K·c with a joint precision matrix, for K features and c classes.
        chunk: Rows of a tensor that are processed at a time.
    """

    steps: int = 100
    full_limit: int = 4000
    chunk: int = CHUNK_ROWS

    def __post_init__(self) -> None:
        whole_number("steps", self.steps)
        whole_number("full_limit", self.full_limit, least=0)
        whole_number("chunk", self.chunk)


class ClosedFormClassifier:
    """Laplace posterior of the output layer of a classification network, given the features.

    The mode is found by L-BFGS on the convex log joint, preconditioned with the Böhning bound ½Φ'Φ + Λ. The precision there
    is exact for all weights together while K·c stays within ``solver.full_limit``; beyond, blocks of K×K for each class, which
    leaves out the correlations between classes.

    Args:
        model: A network with a Categorical likelihood.
        x: Training inputs, (N, ...); or a loader of (x, y). A loader is gone through many times where the features of its rows
            take more than half a GiB, and must give the same rows each time: no augmentation here.
        y: Class labels, (N,); None with a loader.
        samples: Draws of the outputs that predictions average over.
        solver: How mode and precision are computed; ``Solver()`` by default.
        generator: Source of the draws; the same ones every time by default.
    """

    def __init__(
        self,
        model: Model,
        x: TensorOrLoader,
        y: Tensor | None = None,
        *,
        samples: int = 100,
        solver: "Solver | None" = None,
        generator: torch.Generator | None = None,
    ) -> None:
        check_model(model)
        if not isinstance(model.likelihood, Categorical):
            raise ValueError("ClosedFormClassifier needs a Categorical likelihood; for regression use ClosedForm.")
        solver = solver or Solver()
        self.batches = Batches(model, x, y, size=solver.chunk)
        self.model, self.samples = model, whole_number("samples", samples)
        self.seed = seed_of(generator)
        self.classes = model.output.out_features
        with torch.no_grad():
            prior = prior_precision(model)
            rows = FeatureRows(lambda pair: (features(model, pair[0]).double(), pair[1].long()), self.batches)
            self.mean = self._mode(rows, prior, solver.steps)
            self.full = self.mean.numel() <= solver.full_limit
            precision = self._precision(rows, prior)
            # One class at a time: libraries treat batches of matrices as small ones.
            self.factor = cholesky(precision) if self.full else torch.stack([cholesky(block) for block in precision])
            # With the joint precision at hand Newton's method finishes what L-BFGS left.
            for _ in range(3 if self.full else 0):
                gradient = self._loss_and_gradient(self.mean, rows, prior)[1].mT.reshape(-1, 1)
                step = torch.cholesky_solve(gradient, self.factor)
                self.mean = self.mean - step.reshape(self.mean.mT.shape).mT
                if float(step.abs().max()) < 1e-6:  # its square is the error of the next
                    break
                self.factor = cholesky(self._precision(rows, prior))
            # Laid out as a file lays it out: then a posterior that is read back predicts the same bits.
            self.mean, self.factor = self.mean.contiguous(), self.factor.contiguous()

    @classmethod
    def from_moments(
        cls, model: Model, mean: Tensor, factor: Tensor, *, classes: int, samples: int, seed: int
    ) -> "ClosedFormClassifier":
        """The posterior from its mode (K, c) and the factor of its precision, without the data."""
        if mean.shape != (model.layer.out_features + model.output.has_bias, classes):
            raise ValueError(
                f"The mean parameter must have a column for each of {classes} classes, got {tuple(mean.shape)}."
            )
        posterior = cls.__new__(cls)
        posterior.model, posterior.mean, posterior.factor = model, mean, factor
        posterior.classes, posterior.samples, posterior.seed, posterior.full = classes, samples, seed, factor.ndim == 2
        return posterior

    def _mode(self, rows: LabelledRows, prior: Tensor, steps: int) -> Tensor:
        """Maximum a posteriori output weights, (K, c), float64."""
        bound = torch.zeros(len(prior), len(prior), dtype=torch.float64, device=prior.device)
        for phi, _ in rows:
            bound = bound + 0.5 * phi.mT @ phi
        bound = cholesky(self.batches.over_processes(bound) + torch.diag(prior))
        weights = torch.zeros(len(prior), self.classes, dtype=torch.float64, device=prior.device)
        v = weights.clone().requires_grad_()
        optimizer = torch.optim.LBFGS(
            [v], max_iter=steps, line_search_fn="strong_wolfe", tolerance_grad=1e-8, tolerance_change=1e-12
        )

        def closure() -> Tensor:
            w = torch.linalg.solve_triangular(bound.mT, v.detach(), upper=True)
            loss, grad = self._loss_and_gradient(w, rows, prior)
            v.grad = torch.linalg.solve_triangular(bound, grad, upper=False).contiguous()
            return loss

        with torch.enable_grad():
            optimizer.step(closure)
        return torch.linalg.solve_triangular(bound.mT, v.detach(), upper=True)

    def _loss_and_gradient(self, w: Tensor, rows: LabelledRows, prior: Tensor) -> tuple[Tensor, Tensor]:
        """Minus the log joint of the output weights (K, c), up to a constant, and its gradient."""
        loss, grad = w.new_zeros(()), torch.zeros_like(w)
        for phi, y in rows:
            log_p = torch.log_softmax(phi @ w, -1)
            loss = loss - log_p.gather(-1, y[:, None]).sum()
            grad = grad + phi.mT @ (log_p.exp() - torch.nn.functional.one_hot(y, w.shape[-1]))
        loss, grad = self.batches.over_processes(loss), self.batches.over_processes(grad)
        return loss + 0.5 * (prior[:, None] * w.square()).sum(), grad + prior[:, None] * w

    def _precision(self, rows: LabelledRows, prior: Tensor) -> Tensor:
        """Σ φφ' ⊗ (diag p − pp') + Λ: (cK, cK), or its class blocks (c, K, K)."""
        k, c = self.mean.shape
        blocks = torch.zeros((c * k, c * k) if self.full else (c, k, k), dtype=torch.float64, device=prior.device)
        for phi, _ in rows:
            p = torch.softmax(phi @ self.mean, -1)
            if not self.full:
                for j in range(c):
                    blocks[j] += phi.mT @ (phi * (p[:, j] * (1 - p[:, j]))[:, None])
                continue
            for i in range(c):
                for j in range(i, c):
                    weight = p[:, i] * (float(i == j) - p[:, j])
                    blocks[i * k : (i + 1) * k, j * k : (j + 1) * k] += phi.mT @ (phi * weight[:, None])
        blocks = self.batches.over_processes(blocks)
        if not self.full:
            return blocks + torch.diag(prior)
        upper = blocks.triu()
        return upper + upper.triu(1).mT + torch.diag(prior.repeat(c))

    @torch.no_grad()
    def logit_moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (n, c) and covariance (n, c, c) of the outputs."""
        phi = features(self.model, x).double()
        c = self.classes
        if not self.full:
            halves = (torch.linalg.solve_triangular(factor, phi.mT, upper=False) for factor in self.factor)
            return phi @ self.mean, torch.diag_embed(torch.stack([half.square().sum(0) for half in halves], -1))
        # Columns of the identity over classes: L⁻¹(e_i ⊗ φ) for each i.
        wide = torch.stack([torch.cat([phi.mT * float(i == j) for j in range(c)]) for i in range(c)])
        half = torch.linalg.solve_triangular(self.factor, wide, upper=False)
        return phi @ self.mean, torch.einsum("ikn,jkn->nij", half, half)

    @over_batches
    @torch.no_grad()
    def predict(self, x: Tensor, *, chunk: int = 1024) -> Predictive:
        """Class probabilities, averaged over Gaussian draws of the outputs."""
        pieces = x.split(whole_number("chunk", chunk))
        mean, covariance = (torch.cat(parts) for parts in zip(*(self.logit_moments(xb) for xb in pieces), strict=True))
        return average_classes(mean, covariance, samples=self.samples, seed=self.seed)


def seed_of(generator: torch.Generator | None) -> int:
    """A seed drawn from the generator; without one it is always the same, and so in every process."""
    device = generator_device(generator)
    return 0 if generator is None else int(torch.randint(2**31, (), generator=generator, device=device))


def covariance_factor(covariance: Tensor) -> Tensor:
    """Lower Cholesky factors in float64 of covariances (..., c, c), which may be singular: rounding is added to the diagonal."""
    classes, numbers = covariance.shape[-1], torch.finfo(covariance.dtype)
    rounding = 4 * classes * numbers.eps * covariance.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None].double()
    eye = torch.eye(classes, dtype=torch.float64, device=covariance.device)
    return torch.linalg.cholesky(covariance.double() + (rounding + numbers.tiny) * eye)


def average_classes(mean: Tensor, covariance: Tensor, *, samples: int, seed: int) -> CategoricalPredictive:
    """Class probabilities averaged over Gaussian outputs with means (n, c) and covariances (n, c, c).

    The draws are a scrambled Sobol sequence, the same for every row: the answer for a row does not depend on the rows beside it.
    Each draw is used once in every rotation of its entries, so that no class is favoured by chance.
    """
    mean, classes = mean.double(), mean.shape[-1]
    factor = covariance_factor(covariance)
    points = SobolEngine(classes, scramble=True, seed=seed).draw(math.ceil(samples / classes), dtype=torch.float64)
    normals = torch.special.ndtri(points + 2.0**-31).to(mean)  # half a cell up: the grid of 2^-30 contains 0
    return CategoricalPredictive.from_logits(
        mean + factor @ z.roll(turn, 0) for z in normals for turn in range(classes)
    )
