"""Feature extractors: what comes before the model layer."""

from torch import nn


def mlp(in_features: int, hidden: tuple[int, ...] = (1000, 1000, 500, 25), *, dropout: float = 0.1) -> nn.Sequential:
    """Fully connected extractor of the paper's UCI networks, d-1000-1000-500-25 by default.

    Every layer is followed by a ReLU, except that the last one, the bottleneck, ends without an activation. Dropout acts
    on the layer before the bottleneck.
    """
    if not hidden or min(hidden) < 1:
        raise ValueError(f"The hidden parameter must name at least one width of 1 or more, got {hidden} instead.")
    layers: list[nn.Module] = []
    for width in hidden[:-1]:
        layers += [nn.Linear(in_features, width), nn.ReLU()]
        in_features = width
    if dropout and layers:
        layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers, nn.Linear(in_features, hidden[-1]))
