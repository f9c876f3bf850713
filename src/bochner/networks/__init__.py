"""Feature extractors: what comes before the model layer."""

from bochner.networks.columns import Intervals, linear, mlp
from bochner.networks.dropout import SeededDropout, seeded_dropout
from bochner.networks.images import Bounded, Inception, Residual, conv, digit_net, googlenet, residual_net

__all__ = [
    "Bounded",
    "Inception",
    "Intervals",
    "Residual",
    "SeededDropout",
    "conv",
    "digit_net",
    "googlenet",
    "linear",
    "mlp",
    "residual_net",
    "seeded_dropout",
]
