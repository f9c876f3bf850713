"""The data sets that need no file: one generated toy, and those that scikit-learn carries."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bochner.datasets.tables import Arrays


@dataclass(frozen=True)
class BuiltIn:
    """A data set that needs no file: its size, and the function that makes it."""

    rows: int
    inputs: int
    classes: int | None
    make: Callable[[], Arrays]


def toy_1d() -> Arrays:
    r"""A step from +1 to -1 in one dimension, in the manner of the paper's toy regression.

    Twenty points, ten on each side, $|x|$ at random from 0.25 to 1.25 and at both ends, $y = -\mathrm{sign}(x) + \varepsilon$
    with $\varepsilon \sim N(0, 0.05^2)$, all from a fixed seed. The paper does not list its points. These are placed
    where its posterior means bend: the exponential kernel's is straight between -0.25 and 0.25, and all
    stationary ones return to zero from about $|x| = 1.25$ on. Of evenly spaced points a single sine of their own
    frequency makes the step, and swings in between: networks with heavy-tailed weights find it.
    """
    generator = np.random.default_rng(1)
    noise = 0.05 * generator.standard_normal(20)
    side = np.sort(
        np.concatenate([np.full((2, 1), 0.25), generator.uniform(0.25, 1.25, (2, 8)), np.full((2, 1), 1.25)], 1)
    )
    x = np.concatenate([-side[0, ::-1], side[1]])
    return x[:, None], -np.sign(x) + noise, ("x",)


def _from_sklearn(loader: str, *, regression: bool = False) -> Callable[[], Arrays]:
    """A function that gives one of scikit-learn's own sets; scikit-learn is imported when it is called."""

    def make() -> Arrays:
        from sklearn import datasets

        options = {"scaled": False} if loader == "load_diabetes" else {}
        bunch = getattr(datasets, loader)(**options)
        x = np.asarray(bunch.data, dtype=np.float64)
        y = np.asarray(bunch.target, dtype=np.float64 if regression else np.int64)
        return x, y, tuple(str(name) for name in bunch.feature_names)

    return make


BUILT_IN = {
    "toy-1d": BuiltIn(20, 1, None, toy_1d),
    "sklearn-diabetes": BuiltIn(442, 10, None, _from_sklearn("load_diabetes", regression=True)),
    "iris": BuiltIn(150, 4, 3, _from_sklearn("load_iris")),
    "wine": BuiltIn(178, 13, 3, _from_sklearn("load_wine")),
    "breast-cancer": BuiltIn(569, 30, 2, _from_sklearn("load_breast_cancer")),
    "digits": BuiltIn(1797, 64, 10, _from_sklearn("load_digits")),
}
