"""Maps of the target, against SciPy."""

import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm, yeojohnson

from bochner.estimators.targets import TargetMap, as_tensor, possible_maps

Y = np.exp(np.random.default_rng(0).normal(size=80)) + 0.3
ONES = np.ones(80)


def learnt(kind, y=Y):
    return TargetMap.learn(kind, y, np.ones(len(y)))


MAPS = [
    learnt("identity"),
    learnt("log"),
    learnt("power"),
    learnt("power", -Y),
    *(TargetMap("power", 0.7, 1.3, power, 0.2, 0.9) for power in (0.0, 0.4, 1.0, 1.7, 2.0)),
]
GRID = torch.linspace(0.05, 9, 60, dtype=torch.float64)


def grid_of(own):
    """Targets to look at: positive ones for the logarithm, both signs for the others."""
    return GRID if own.kind == "log" else torch.cat([-GRID.flip(0), GRID])


@pytest.mark.parametrize("own", MAPS, ids=lambda own: f"{own.kind}-{own.power:.2g}")
def test_a_map_is_monotone_and_comes_back(own):
    y = grid_of(own)
    z = own.forward(y)
    assert bool((z.diff() > 0).all())
    torch.testing.assert_close(own.inverse(z), y, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("own", MAPS, ids=lambda own: f"{own.kind}-{own.power:.2g}")
def test_the_slope_is_the_derivative(own):
    y, step = grid_of(own), 1e-5
    slope = (own.forward(y + step) - own.forward(y - step)) / (2 * step)
    np.testing.assert_allclose(own.log_slope(y).exp(), slope, rtol=1e-5)


@pytest.mark.parametrize("power", [0.0, 0.4, 1.0, 1.7, 2.0])
def test_the_power_is_yeo_and_johnsons(power):
    u = np.linspace(-5, 5, 41)
    own = TargetMap("power", 3.0, 2.0, power, 0.5, 0.8)
    expected = (yeojohnson(u, power) - 0.5) / 0.8
    np.testing.assert_allclose(own.forward(torch.from_numpy(3.0 + 2.0 * u)), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["identity", "log", "power"])
def test_learnt_maps_have_mean_zero_and_standard_deviation_one(kind):
    weight = np.linspace(0.5, 2, 80)
    own = TargetMap.learn(kind, Y, weight)
    z = own.forward(torch.from_numpy(Y)).numpy()
    assert np.average(z, weights=weight) == pytest.approx(0, abs=1e-10)
    assert np.average(z**2, weights=weight) == pytest.approx(1)
    span = Y.max() - Y.min()
    assert (own.low, own.high) == (pytest.approx(Y.min() - span), pytest.approx(Y.max() + span))


@pytest.mark.parametrize("own", MAPS, ids=lambda own: f"{own.kind}-{own.power:.2g}")
@pytest.mark.parametrize(("mean", "std"), [(0.3, 0.2), (-0.8, 0.7)])
def test_moments_are_those_of_quadrature(own, mean, std):
    def value(z):
        y = float(own.inverse(torch.tensor(z, dtype=torch.float64)))
        return y if own.kind == "identity" else min(max(y, own.low), own.high)

    def moment(power):
        ends = (mean - 9 * std, mean + 9 * std)
        kink = float(own.forward(torch.tensor(own.mean, dtype=torch.float64))) if own.kind == "power" else mean
        points = sorted({mean, min(max(kink, ends[0]), ends[1])})
        return quad(lambda z: value(z) ** power * norm.pdf(z, mean, std), *ends, points=points, limit=200)[0]

    centre, variance = (float(m) for m in own.moments(*torch.tensor([[mean], [std]], dtype=torch.float64)))
    # 32 nodes: the kink of a power at its middle costs a thousandth at most.
    assert centre == pytest.approx(moment(1), rel=2e-3, abs=2e-3)
    assert variance == pytest.approx(moment(2) - moment(1) ** 2, rel=1e-2)


def test_moments_of_a_wide_logarithm_stay_within_reason():
    own = learnt("log")
    mean, variance = own.moments(torch.zeros(1, dtype=torch.float64), torch.full((1,), 50.0, dtype=torch.float64))
    assert own.low <= float(mean) <= own.high
    assert math.sqrt(float(variance)) <= own.high - own.low
    assert math.isfinite(float(own.inverse(torch.tensor(1e4, dtype=torch.float64))))


def test_a_logarithm_has_no_value_at_targets_that_are_not_positive():
    own = learnt("log")
    y = torch.tensor([0.0, -2.0], dtype=torch.float64)
    assert own.forward(y).tolist() == [-math.inf, -math.inf]
    assert bool(torch.isfinite(own.log_slope(y)).all())


def test_the_logarithm_is_a_candidate_for_positive_targets_only():
    assert [own.kind for own in possible_maps(Y, ONES)] == ["identity", "power", "log"]
    for y in (Y - Y.min(), Y - 5):
        assert [own.kind for own in possible_maps(y, ONES)] == ["identity", "power"]


def test_targets_become_doubles():
    found = as_tensor([1, 2], torch.zeros(1))
    assert found.dtype == torch.float64
    assert found.tolist() == [1, 2]


@pytest.mark.parametrize("y", [np.r_[np.zeros(57), 1, 2, 1e6], np.r_[Y, 1e90], np.r_[Y, -1e90]])
def test_strange_targets_have_finite_maps(y):
    for own in possible_maps(y, np.ones(len(y))):
        assert bool(torch.isfinite(own.forward(torch.from_numpy(y))).all())
        assert bool(torch.isfinite(own.log_slope(torch.from_numpy(y))).all())
