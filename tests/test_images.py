"""Sets of images, the networks and experiments on them, and their reports, all at small sizes."""

import copy
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import ndimage
from torch import nn
from torch.func import functional_call
from typer.testing import CliRunner

from bochner import metrics
from bochner.cli import app
from bochner.datasets import IMAGES, check, fetch, load_images, summaries
from bochner.datasets.images import Images
from bochner.experiments.catalogue import Request
from bochner.experiments.images import cifar, heads, ood, pretraining, rotation_protocols, scoring
from bochner.experiments.images.crops import shift
from bochner.experiments.images.pretraining import Pictures, Schedule, features, network, pretrained
from bochner.experiments.images.rotation import EXPERIMENTS, run_network
from bochner.experiments.images.rotation_protocols import rotate
from bochner.experiments.published_laplace import PublishedLaplace
from bochner.experiments.rows import read_rows, write_rows
from bochner.experiments.zoo import Shape, assemble
from bochner.networks import digit_net, googlenet
from bochner.posteriors.learning_rate import DivergedError
from bochner.posteriors.swag import Snapshots, Swag
from bochner.predictive import CategoricalPredictive
from bochner.reports import images as reports
from bochner.reports.blocks import markdown_table

MNIST = Path(__file__).parents[2] / "shared" / "data" / "images" / "mnist.npz"
TINY = Schedule(epochs=2, batch_size=64, lr=0.05, shrink=16)
SIDE = 12  # pixels: GoogLeNet averages over positions, so that it takes images of any size


# ------------------------------------------------------------------ sets of images


def test_digits_need_no_file():
    data = load_images("digits")
    assert data.x_train.shape == (1437, 8, 8)
    assert data.x_test.shape == (360, 8, 8)
    assert data.x_train.dtype == np.uint8
    assert (data.x_train.max(), data.x_test.min()) == (255, 0)
    assert set(data.y_test) == set(range(10))


def test_mnist_is_known_by_its_content(tmp_path):
    if not MNIST.is_file():
        pytest.skip(f"needs {MNIST}")
    (tmp_path / "mnist.npz").symlink_to(MNIST)
    assert check("mnist", tmp_path).status == "ok"
    data = load_images("mnist", tmp_path)
    assert data.x_train.shape == (60000, 28, 28)
    assert np.bincount(data.y_train).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    arrays = dict(np.load(MNIST))
    arrays["x_test"] = arrays["x_test"].copy()
    arrays["x_test"][5, 14, 14] ^= 1
    (tmp_path / "mnist.npz").unlink()
    np.savez(tmp_path / "mnist.npz", **arrays)
    damaged = check("mnist", tmp_path)
    assert damaged.status == "bad"
    assert "does not hold the known images" in damaged.message


def test_missing_damaged_and_wrong_files_are_named(tmp_path):
    with pytest.raises(ValueError, match="Did you mean 'cifar10'"):
        load_images("cifar")
    with pytest.raises(
        FileNotFoundError, match=r"cifar100.npz .* is not in .*x_test \(10000, 32, 32, 3\).*BOCHNER_DATA"
    ):
        load_images("cifar100", tmp_path)
    assert check("svhn-1083", tmp_path).status == "missing"
    with pytest.raises(ValueError, match=rf"'svhn-1083' is not fetched from OpenML; put svhn.npz into {tmp_path}"):
        fetch("svhn-1083", tmp_path)
    path = tmp_path / "svhn.npz"
    for content, words in {
        "text": "cannot be read as the data set 'svhn-1083'",
        "empty": "it has no array 'x_test'",
        "shape": r"its array 'x_test' is uint8 of shape \(3, 32, 32, 3\), not uint8 of \(1083, 32, 32, 3\)",
        "type": r"its array 'x_test' is float64 of shape \(1083, 32, 32, 3\)",
    }.items():
        if content == "text":
            path.write_text("no archive")
        else:
            array = {"empty": {}, "shape": {"x_test": np.zeros((3, 32, 32, 3), np.uint8)}}
            np.savez(path, **array.get(content, {"x_test": np.zeros((1083, 32, 32, 3))}))
        with pytest.raises(ValueError, match=words):
            load_images("svhn-1083", tmp_path)
        assert check("svhn-1083", tmp_path).status == "bad"
    labels = {"x_test": np.zeros((10000, 32, 32, 3), np.uint8), "y_test": np.full(10000, 100, np.uint8)}
    np.savez(tmp_path / "cifar100.npz", **labels)
    with pytest.raises(ValueError, match="its labels go up to 100, not 99"):
        load_images("cifar100", tmp_path)


def test_the_list_of_data_sets_has_the_images(tmp_path):
    lines = {line.name: line for line in summaries(tmp_path)}
    assert (lines["mnist"].rows, lines["mnist"].inputs, lines["mnist"].where) == (70000, 784, "missing")
    assert set(IMAGES) <= set(lines)


# ------------------------------------------------------------------ networks


def test_digit_net_has_the_stated_layers():
    net = digit_net(28)
    assert net(torch.zeros(2, 1, 28, 28)).shape == (2, 25)
    assert sum(p.numel() for p in net.parameters()) == 32 * 10 + 64 * 289 + 25 * 9217
    with pytest.raises(ValueError, match="side parameter must be an integer of at least 6, got 5"):
        digit_net(5)


def test_googlenet_has_the_papers_block_table():
    """Weights counted by hand from the table of Szegedy et al., two numbers of BatchNorm for each channel."""
    table = [
        (192, 64, 96, 128, 16, 32, 32),
        (256, 128, 128, 192, 32, 96, 64),
        (480, 192, 96, 208, 16, 48, 64),
        (512, 160, 112, 224, 24, 64, 64),
        (512, 128, 128, 256, 24, 64, 64),
        (512, 112, 144, 288, 32, 64, 64),
        (528, 256, 160, 320, 32, 128, 128),
        (832, 256, 160, 320, 32, 128, 128),
        (832, 384, 192, 384, 48, 128, 128),
    ]
    total = 27 * 192 + 2 * 192
    for n, one, r3, three, r5, five, pool in table:
        total += n * (one + r3 + r5 + pool) + 9 * (r3 * three + r5 * five + five * five)
        total += 2 * (one + r3 + three + r5 + five + five + pool)
    net = googlenet(generator=torch.Generator().manual_seed(0)).eval()
    assert sum(p.numel() for p in net.parameters()) == total
    assert net(torch.zeros(1, 3, 32, 32)).shape == (1, 1024)


def test_published_draws_of_a_convolution_are_those_of_moved_weights(generator):
    shape = {"protocol": "paper", "width": 7, "lengthscale": 0.2}
    model = assemble("rbf-sin", digit_net(8, 3, generator=generator), 3, Shape(classes=4, **shape), 0).double()
    x = torch.randn(6, 1, 8, 8, generator=generator, dtype=torch.float64)
    y = torch.randint(4, (6,), generator=generator)
    posterior = PublishedLaplace([model], x[None], y[None], num_data=6, seeds=torch.tensor([0]))
    noise = torch.Generator()
    for scale in (0.3, 0.6):
        noise.manual_seed(1)
        *_, drawn = posterior.networks(scale=scale, num=2)
        moved = {}
        for tap, (a, b) in zip(posterior.layers, posterior.inverses, strict=True):
            z = torch.randn(b.shape[-1], a.shape[-1], generator=noise, dtype=torch.float64)
            change = scale / 6 * b[0].T @ z @ a[0].T
            own = dict(tap.module.named_parameters())
            moved[f"{tap.name}.weight"] = own["weight"] + change[:, :-1].reshape(own["weight"].shape)
            moved[f"{tap.name}.bias"] = own["bias"] + change[:, -1]  # a phase moves before its link
        expected = functional_call(model.eval(), moved, (x,))
        torch.testing.assert_close(functional_call(model, {n: p[0] for n, p in drawn.items()}, (x,)), expected)


def test_published_networks_are_those_of_the_published_outputs(generator):
    shape = {"protocol": "paper", "width": 7, "lengthscale": 1.0}
    model = assemble("matern32-sin", nn.Sequential(nn.Linear(3, 4)), 4, Shape(classes=3, **shape), 0).double()
    x = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (8,), generator=generator)
    posterior = PublishedLaplace([model], x[None], y[None], num_data=8, seeds=torch.tensor([0]))
    outputs = posterior.outputs(x[None], scales=[0.7], num=2)
    for drawn, f in zip(posterior.networks(scale=0.7, num=2), outputs, strict=True):
        expected = functional_call(model.eval(), {n: p[0] for n, p in drawn.items()}, (x,))
        torch.testing.assert_close(f[0, 0], expected)


# ------------------------------------------------------------------ rotated digits


def test_rotation_is_counter_clockwise_and_bilinear(generator):
    images = torch.rand(3, 1, 9, 9, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(rotate(images, 90), torch.rot90(images, 1, (2, 3)))
    torch.testing.assert_close(rotate(images, 360), images)
    for angle in (10, 37, 200):
        expected = ndimage.rotate(images.numpy(), angle, axes=(3, 2), reshape=False, order=1)
        inside = slice(2, 7)  # at the rim the two differ in how they fade to zero
        got = rotate(images, angle)[:, :, inside, inside]
        np.testing.assert_allclose(got, expected[:, :, inside, inside], atol=1e-12)


def test_rotation_by_nearest_neighbour_has_the_pixels_of_scipys(generator):
    """Departure 35: no pixel has a value that the image lacks; angles may differ from image to image."""
    images = torch.rand(3, 1, 9, 9, generator=generator, dtype=torch.float64)
    angles = (10, 37, 200)
    got = rotate(images, torch.tensor(angles), mode="nearest")
    for image, result, angle in zip(images, got, angles, strict=True):
        expected = ndimage.rotate(image.numpy(), angle, axes=(2, 1), reshape=False, order=0)
        np.testing.assert_array_equal(result[:, 2:7, 2:7], expected[:, 2:7, 2:7])
        assert set(result.flatten().tolist()) <= {0.0, *image.flatten().tolist()}


def test_shifts_move_whole_images_by_up_to_the_given_pixels():
    images = torch.rand(200, 1, 6, 5, generator=torch.Generator().manual_seed(0))
    moved = shift(images, 2, seed=3, stream=0)
    padded = torch.nn.functional.pad(images, (2,) * 4)
    found = set()
    for image, result in zip(padded, moved, strict=True):
        fits = [(i, j) for i in range(5) for j in range(5) if torch.equal(image[:, i : i + 6, j : j + 5], result)]
        assert len(fits) == 1
        found.add(fits[0])
    assert len(found) == 25
    assert torch.equal(moved, shift(images, 2, seed=3, stream=0))
    assert not torch.equal(moved, shift(images, 2, seed=3, stream=1))


def test_the_rate_falls_twice():
    assert [rotation_protocols.steps(epoch / 50) for epoch in (0, 24, 25, 36, 37, 49)] == [
        1,
        1,
        0.15,
        0.15,
        0.0225,
        0.0225,
    ]


def test_the_published_rate_falls_every_epoch():
    """Departure 35, written out as a loop over epochs; 0.9³⁶ = 0.0225 in the last one."""
    rate = 1.0
    for epoch in range(50):
        rate *= 0.81 if epoch >= 38 else 0.9 if epoch >= 26 else 1.0
        assert rotation_protocols.published_steps(epoch / 50) == pytest.approx(rate)
    assert rate == pytest.approx(0.0225, abs=1e-4)


def test_published_digit_networks_start_at_a_fifth_of_the_features_on_raw_pixels(monkeypatch):
    """Departure 35: ℓ = 5 for every model, ReLU too; pixels in [0, 1]; lengthscale at a tenth of the rate."""
    heard = {}

    def stop(model, x, _y, recipe, **_):
        heard[name, protocol] = (model.layer.lengthscale.item(), x.clone(), recipe)
        raise InterruptedError("heard")

    monkeypatch.setattr(rotation_protocols, "fit_map", stop)
    for name in ("relu", "local-rbf", "rbf-sin"):
        for protocol in ("paper", "bochner"):
            with pytest.raises(InterruptedError, match="heard"):
                run_network(replace(SMALL, protocol=protocol, crop=0), name)
    raw = torch.from_numpy(load_images("digits").x_train)[:, None].float() / 255
    for name in ("relu", "local-rbf", "rbf-sin"):
        lengthscale, x, recipe = heard[name, "paper"]
        assert lengthscale == pytest.approx(5.0)
        torch.testing.assert_close(x, raw, rtol=0, atol=0)
        assert recipe.scale_lr == pytest.approx(recipe.lr / 10)
        assert recipe.schedule is rotation_protocols.published_steps
        assert heard[name, "bochner"][1].mean().item() == pytest.approx(0.0, abs=1e-5)
    assert EXPERIMENTS["rotated-mnist"].scale_lr == pytest.approx(EXPERIMENTS["rotated-mnist"].lr / 10)


def test_published_test_images_are_turned_by_up_to_one_degree_more():
    """Departures 16 and 35: pixels are those of the image, the angle is drawn from [a, a + 1]°."""
    data = rotation_protocols.Paper(EXPERIMENTS["rotated-digits"])
    turned = data.turned(90)
    low, high = rotate(data.test, 90, mode="nearest"), rotate(data.test, 91, mode="nearest")
    assert set(turned.flatten().tolist()) <= set(data.test.flatten().tolist())
    assert ((turned == low) | (turned == high)).double().mean() > 0.99
    ours = rotation_protocols.Bochner(EXPERIMENTS["rotated-digits"])
    torch.testing.assert_close(ours.turned(30), ours.shown(rotate(ours.test, 30)))


def test_the_damping_of_a_convolution_is_divided_by_its_positions(generator):
    """Departure 35: √(5e-4 / T) with T = 36 positions of a 3×3 kernel on 8×8, then 16 of the next; √5e-4 elsewhere."""
    shape = {"protocol": "paper", "width": 7, "lengthscale": 5.0}
    model = assemble("rbf-sin", digit_net(8, 3, generator=generator), 3, Shape(classes=4, **shape), 0).double()
    x = torch.randn(6, 1, 8, 8, generator=generator, dtype=torch.float64)
    y = torch.randint(4, (6,), generator=generator)
    posterior = PublishedLaplace([model], x[None], y[None], num_data=6, seeds=torch.tensor([0]))
    # The input factor of the first layer is of the images alone: dropout comes later.
    rows = torch.nn.functional.unfold(x, 3).mT.reshape(-1, 9)
    rows = torch.cat([rows, torch.ones(len(rows), 1, dtype=torch.float64)], -1)
    damped = rows.T @ rows / len(rows) + (5e-4 / 36) ** 0.5 * torch.eye(10, dtype=torch.float64)
    root = torch.linalg.inv(torch.linalg.cholesky(damped))
    torch.testing.assert_close(posterior.inverses[0][0][0], root)
    # The output factors have few rows of gradients: their smallest eigenvalue is the damping.
    for (_, b), positions in zip(posterior.inverses, (36, 16, 1, 1, 1), strict=True):
        smallest = 1 / torch.linalg.svdvals(b[0]).max() ** 2
        assert smallest >= (5e-4 / positions) ** 0.5 * (1 - 1e-9)
    assert 1 / torch.linalg.svdvals(posterior.inverses[3][1][0]).max() ** 2 == pytest.approx(5e-4**0.5)


SMALL = replace(EXPERIMENTS["rotated-digits"], epochs=8, width=30, draws=4, angles=(0, 90))


def few_digits(_name):
    """Stands in for ``load_images``: 360 of scikit-learn's digits to train on and 60 to test on."""
    data = load_images("digits")
    return Images("digits", data.x_train[:360], data.y_train[:360], data.x_test[:60], data.y_test[:60])


@pytest.fixture(scope="module")
def digit_rows():
    """Rows of two networks under both protocols."""
    ours, published = replace(SMALL, posteriors=("map", "closed_form")), replace(SMALL, protocol="paper")
    with_kfac = replace(SMALL, posteriors=("map", "kfac", "closed_form"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rotation_protocols, "load_images", few_digits)
        patch.setattr(rotation_protocols, "HELD_OUT_SHARE", 0.1)  # linearised convolutions are slow
        runs = [(ours, "relu"), (with_kfac, "rbf-sin"), (published, "relu"), (published, "rbf-sin")]
        return [row for config, name in runs for row in run_network(config, name)]


def test_rotation_rows_have_every_posterior_and_angle(digit_rows):
    keys = {(row["protocol"], row["model"], row["posterior"], row["angle"]) for row in digit_rows}
    assert len(keys) == len(digit_rows) == 2 * (2 + 3 + 2 + 2)
    for row in digit_rows:
        assert row["status"] == "ok"
        assert 0 <= row["accuracy"] <= 1
        assert 0.1 <= row["confidence"] <= 1
        assert math.isfinite(row["nlpd"])
    upright = [row for row in digit_rows if row["angle"] == 0]
    assert len({(row["model"], row["protocol"], row["posterior"]) for row in upright}) == 9
    # A few epochs from ℓ = 5 on raw pixels have taught the published networks little.
    assert all(row["accuracy"] > 0.3 for row in upright if row["protocol"] == "bochner")


def test_the_committed_digits_show_who_is_overconfident():
    """The must-show of the default: at equal accuracy upright, the stationary network is less sure at 90° than ReLU."""
    rows = read_rows(Path(__file__).parents[1] / "results" / "images" / "rotated-digits.jsonl")
    at = {(r["model"], r["angle"]): r for r in rows if (r["protocol"], r["posterior"]) == ("bochner", "map")}
    assert at["rbf-sin", 0]["accuracy"] >= at["relu", 0]["accuracy"]
    assert at["rbf-sin", 90]["confidence"] < at["relu", 90]["confidence"]


def test_a_diverged_network_is_a_row_that_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(rotation_protocols, "load_images", few_digits)
    rows = run_network(replace(SMALL, lr=1e9, epochs=2), "relu")
    assert {row["status"] for row in rows} == {"diverged"}
    assert [row["angle"] for row in rows] == [0, 90]
    write_rows(tmp_path / "rotated-digits.jsonl", rows)
    (path,) = reports.write(tmp_path, tmp_path)
    assert "ReLU" not in path.read_text()


def test_crops_are_seen_under_paper_only(monkeypatch):
    monkeypatch.setattr(rotation_protocols, "load_images", few_digits)
    config = replace(SMALL, angles=(0,), posteriors=("map",), epochs=1)
    same = [run_network(replace(config, crop=crop), "relu")[0]["nlpd"] for crop in (0, 2)]
    assert same[0] == same[1]
    apart = [run_network(replace(config, crop=crop, protocol="paper"), "relu")[0]["nlpd"] for crop in (0, 2)]
    assert apart[0] != apart[1]


def test_rotation_reports_come_from_rows_alone(digit_rows, tmp_path):
    write_rows(tmp_path / "rotated-digits.jsonl", digit_rows)
    written = reports.write(tmp_path, tmp_path)
    assert [path.name for path in written] == ["images.md", "rotated-digits-bochner.svg", "rotated-digits-paper.svg"]
    row = next(r for r in digit_rows if (r["protocol"], r["posterior"], r["model"]) == ("bochner", "map", "rbf-sin"))
    line = next(x for x in written[0].read_text().splitlines() if x.startswith("| bochner | MAP | RBF (sin) |"))
    assert f" {row['accuracy']:.3f} | {row['confidence']:.3f} |" in line
    assert "—" in line  # the paper has no curves for these digits


def test_a_value_whose_row_is_missing_is_a_dash(digit_rows):
    """An angle that was not run, and a set outside whose row is not there."""
    upright = [r for r in digit_rows if r["angle"] == 0 and (r["protocol"], r["posterior"]) == ("bochner", "map")]
    line = reports.rotation_table(upright)[1]
    assert line[5:8] == ["—", "—", "—"]
    assert line[3] == f"{upright[0]['accuracy']:.3f}"
    row = {"seed": 0, "status": "ok", "head": "text", "posterior": "map", "protocol": "bochner", "score": "energy"}
    row |= {
        "model": "relu",
        "outside": "cifar100",
        "accuracy": 0.5,
        "nlpd": 1.0,
        "auc": 0.1,
        "aupr_full": 0.2,
        "fpr95": 0.3,
    }
    assert reports.ood_blocks([row])[1].table[1][4:] == ["0.5000", "1.000", "0.100", "0.200", "0.300", "—", "—", "—"]


def test_the_distance_from_the_papers_curves_is_the_mean_and_the_worst():
    paper = reports._json("paper_mnist.json")
    rows = [
        {
            **{"experiment": "rotated-mnist", "protocol": "paper", "posterior": "kfac", "model": "relu", "seed": 0},
            **{"status": "ok", "seconds": 1.0, "angle": angle, "nlpd": 1.0, "confidence": 0.5},
            "accuracy": paper["kfac"]["accuracy"]["relu"][i] + (0.37 if angle == 90 else 0.0),
        }
        for i, angle in enumerate(paper["angles"])
    ]
    assert "| 0.010 / 0.370 |" in markdown_table(reports.rotation_table(rows))
    assert f"1.00 ({paper['kfac']['nlpd']['relu'][9]:.2f})" in markdown_table(reports.rotation_table(rows))
    # A model whose first seed diverged is shown by the next one, which is named.
    failed = [{**row, "model": "rbf-sin", "status": "diverged"} for row in rows]
    again = [{**row, "model": "rbf-sin", "seed": s, "nlpd": s} for s in (3, 2) for row in rows]
    lines = markdown_table(reports.rotation_table(rows + failed + again)).splitlines()
    assert ["RBF (sin), seed 2" in line and "| 2.00 (" in line for line in lines] == [False] * 3 + [True]


# ------------------------------------------------------------------ GoogLeNet and its features


def pictures(name, _folder=None):
    """Stands in for ``load_images``: ten patterns under noise inside, noise alone outside."""
    rng, num = np.random.default_rng(len(name)), 240
    y = rng.integers(0, 10, num).astype(np.uint8)
    patterns = np.random.default_rng(0).integers(0, 255, (10, SIDE, SIDE, 3))
    x = np.clip(0.5 * patterns[y] + rng.normal(60, 40, (num, SIDE, SIDE, 3)), 0, 255).astype(np.uint8)
    if name != "cifar10":
        x = rng.integers(0, 255, (60, SIDE, SIDE, 3)).astype(np.uint8)
    return Images(name, x, y, x[:60], y[:60])


@pytest.fixture(scope="module")
def inside():
    data = pictures("cifar10")
    x = torch.from_numpy(data.x_train)
    return Pictures(x, "cpu")(x), torch.from_numpy(data.y_train).long()


def test_pictures_are_standardised_by_channel(inside):
    assert inside[0].mean((0, 2, 3)).abs().max() < 1e-5
    torch.testing.assert_close(inside[0].std((0, 2, 3)), torch.ones(3), rtol=1e-4, atol=0)


def test_augmented_images_are_shifted_and_half_are_mirrored(inside):
    images = inside[0][:100, :, :6, :6]
    moved, mirrored = shift(images, 4, 0, 5, mirror=True), 0
    padded = torch.nn.functional.pad(images, (4,) * 4)
    for image, result in zip(padded, moved, strict=True):
        windows = [image[:, i : i + 6, j : j + 6] for i in range(9) for j in range(9)]
        straight = any(torch.equal(w, result) for w in windows)
        turned = any(torch.equal(w.flip(-1), result) for w in windows)
        assert straight or turned
        mirrored += turned
    assert 30 < mirrored < 70


def test_an_interrupted_pretraining_ends_where_a_whole_one_does(inside, tmp_path, monkeypatch):
    x, y = inside
    options = {"schedule": TINY, "seed": 0, "train": (x, y), "test": (x[:60], y[:60])}
    whole, notes = pretrained(tmp_path / "whole.safetensors", **options)
    assert notes["epochs"] == 2
    write, calls = pretraining._write, []

    def interrupt(*args):
        write(*args)
        calls.append(args[0].name)
        if len(calls) == 1:
            raise KeyboardInterrupt("cut")

    monkeypatch.setattr(pretraining, "_write", interrupt)
    with pytest.raises(KeyboardInterrupt, match="cut"):
        pretrained(tmp_path / "cut.safetensors", **options)
    assert [p.name for p in tmp_path.glob("cut*")] == ["cut-partial.safetensors"]
    cut, _ = pretrained(tmp_path / "cut.safetensors", **options)
    assert calls == ["cut-partial.safetensors"] * 2 + ["cut.safetensors"]
    assert not list(tmp_path.glob("*partial*"))
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(cut.state_dict()[name], value, rtol=0, atol=0)


def test_damaged_and_foreign_weights_are_refused(inside, tmp_path):
    x, y = inside
    path = tmp_path / "w.safetensors"
    path.write_bytes(b"\x08\x00\x00\x00nonsense")
    with pytest.raises(ValueError, match=r"w.safetensors cannot be read as weights .*; delete it and run again"):
        pretrained(path, TINY, 0, train=(x, y), test=(x, y))
    pretraining._write(path, network(TINY, 0).state_dict(), {})
    with pytest.raises(ValueError, match=r"was not made by this training .* but by None; delete it"):
        pretrained(path, TINY, 0, train=(x, y), test=(x, y))
    path.unlink()
    pretrained(path, replace(TINY, epochs=1), 0, train=(x, y), test=(x, y))
    with pytest.raises(ValueError, match=r"\(Schedule\(epochs=2, .*240 images\) but by Schedule\(epochs=1"):
        pretrained(path, TINY, 0, train=(x, y), test=(x, y))
    path.rename(tmp_path / "w-partial.safetensors")
    with pytest.raises(ValueError, match=r"w-partial.safetensors was not made by this training"):
        pretrained(path, TINY, 0, train=(x, y), test=(x, y))


def test_a_pretraining_that_diverges_says_so(inside, tmp_path):
    x, y = inside
    with pytest.raises(ValueError, match="Pretraining diverged in epoch 1; lower its learning rate"):
        pretrained(tmp_path / "w.safetensors", replace(TINY, lr=1e30), 0, train=(x, y), test=(x, y))


def test_features_with_the_statistics_of_another_set(inside):
    """One batch: BatchNorm in evaluation with its averages is BatchNorm in training, but for the variance's n − 1."""
    x, _ = inside
    net = network(TINY, 0).eval()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    plain = features(net, x[:50])
    own = features(net, x[:50], statistics_of=x)
    assert not torch.allclose(plain, own)
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])
    torch.testing.assert_close(plain, features(net, x[:50]))
    first = net[0][0]
    conv = first[0](x)
    expected = (conv - conv.mean((0, 2, 3), keepdim=True)) / (conv.var((0, 2, 3), keepdim=True) + 1e-5).sqrt()
    heard = []
    handle = first[1].register_forward_hook(lambda _module, _inputs, out: heard.append(out.clone()))
    features(net, x[:50], statistics_of=x)
    handle.remove()
    torch.testing.assert_close(heard[-1], expected[:50], rtol=1e-4, atol=1e-4)


def test_statistics_of_uneven_batches_are_averages_over_images(inside, monkeypatch):
    """The last batch of 20 counts by its size."""
    x, _ = inside
    shifted = torch.cat([x[:200], x[200:220] + 5])
    net = network(TINY, 0).eval()
    monkeypatch.setattr(pretraining, "CHUNK", 100)
    heard = {}
    norm = net[0][0][1]
    handle = norm.register_forward_hook(lambda module, _i, _o: heard.update(mean=module.running_mean.clone()))
    features(net, x[:10], statistics_of=shifted)
    handle.remove()
    torch.testing.assert_close(heard["mean"], net[0][0][0](shifted).mean((0, 2, 3)).detach(), rtol=1e-3, atol=1e-4)


def test_speeds_are_those_of_the_operations():
    net = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1, bias=False))
    assert pretraining.flop(net, torch.zeros(1, 3, 8, 8)) == 2 * 27 * 5 * 64
    assert 1e8 < pretraining.matmul_rate("cpu") < 1e14


# ------------------------------------------------------------------ CIFAR-10 against other sets


def test_published_swag_draws_have_twice_the_covariance_inside_and_its_diagonal_outside(generator):
    x, y = torch.randn(80, 3, generator=generator), torch.randint(2, (80,), generator=generator)
    shape = {"protocol": "paper", "width": 4, "lengthscale": 1.0}
    model = assemble("relu", nn.Sequential(), 3, Shape(classes=2, **shape), 0)
    swag = Swag(model, x, y, Snapshots(lr=0.05, epochs=6, rank=4, batch_size=16))
    name = "output.weight"
    diagonal = swag.scatter[name][0] / swag.count
    low = torch.stack(swag.deviations[name])[:, 0].square().sum(0) / 3
    for low_rank, expected in ((True, diagonal + low), (False, diagonal)):
        shares = {"diagonal": 1.0, "low_rank": float(low_rank)}
        drawn = swag.sample_weights(40_000, **shares, generator=generator)[name][:, 0]
        torch.testing.assert_close(
            drawn.mean(0), swag.mean[name][0], rtol=0, atol=5 * expected.max().sqrt().item() / 200
        )
        torch.testing.assert_close(drawn.var(0), expected, rtol=0.05, atol=1e-9)  # its standard error is 0.7 %


OOD = cifar.Config(
    **{
        "schedule": TINY,
        "held_out": 60,
        "epochs": 1,
        "swag_epochs": 3,
        "rank": 2,
        "trials": 4,
        "draws": 4,
        "published_epochs": 1,
        "views": 2,
    },
    **{
        "closed_width": 40,
        "closed_draws": 5,
        "search_width": 20,
        "lengthscales": (1.0, 2.0),
        "amplitudes": (1.0,),
        "members": 2,
    },
)


@pytest.fixture(scope="module")
def trained_folder(tmp_path_factory):
    """A data folder, for the weights of one GoogLeNet."""
    return tmp_path_factory.mktemp("googlenet")


@pytest.fixture(scope="module")
def code_features(trained_folder):
    """Features for the head "code", computed once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cifar, "load_images", pictures)
        patch.setenv("BOCHNER_DATA", str(trained_folder))
        return cifar.Features(replace(OOD, head="code"), progress=False)


@pytest.fixture(scope="module")
def picture_features(code_features):
    """The same features for the head "text", which has no projection."""
    data = copy.copy(code_features)
    data.projection, data.heads, data.bochner = None, data.whole, data.whole["bochner"]
    return data


@pytest.fixture(scope="module")
def shared_features(code_features, picture_features):
    """Stands in for ``Features`` in the module of the experiment."""
    return lambda config, _progress: code_features if config.head == "code" else picture_features


@pytest.fixture(scope="module")
def ood_rows(shared_features, tmp_path_factory):
    path = tmp_path_factory.mktemp("ood") / "cifar-ood.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ood, "Features", shared_features)
        for head, models in (("text", ood.NETWORKS), ("code", ("relu",))):
            lines, count = [], len(models)
            request = Request(models=models, report=lines.append)
            rows = ood.make_rows(replace(OOD, head=head), path, request)
            assert len(lines) == 1 + 2 + 1 + 3 * count
        patch.setattr(ood, "Features", None)  # a second run must not get that far
        assert ood.make_rows(OOD, path, Request()) == rows
    return rows


def test_ood_rows_cover_the_table(ood_rows):
    keys = {ood._key(row) for row in ood_rows}
    # Two baselines of two scores under two protocols; ensemble and closed form of two scores with histograms; SWAG four times.
    # All models with the head of the text, and one with that of the code.
    assert len(keys) == len(ood_rows) == 2 * (2 * 2 * 2 * 2 + 2 * 3) + (5 + 1) * (2 * 3 + 4 * 2 * 3)
    for row in ood_rows:
        if row["outside"] == "histogram":
            assert [sum(counts) for counts in row["counts"].values()] == [60, 60, 60]
            assert len(set(row["lowest"]["cifar10"])) == len(row["highest"]["svhn-1083"]) == 10
        else:
            assert 0 <= row["fpr95"] <= 1
            assert 0 <= row["auc"] <= 1


def test_only_sets_outside_get_their_own_batch_norm(picture_features):
    data = picture_features
    for name in ("train", "held_out", "cifar10"):
        assert data.whole["paper"][name] is data.whole["bochner"][name]
    for name in ood.OUTSIDE:
        assert not torch.allclose(data.whole["paper"][name], data.whole["bochner"][name])


def test_the_head_of_the_code_sees_projected_features(code_features):
    """A fixed random projection to 25 features, N(0, 1/d), and a ReLU."""
    wide = code_features.whole["paper"]["train"].shape[1]
    matrix = torch.randn(wide, 25, generator=torch.Generator().manual_seed(OOD.seed)) / wide**0.5
    torch.testing.assert_close(code_features.projection, matrix)
    for protocol, sets in code_features.heads.items():
        for name, x in sets.items():
            torch.testing.assert_close(x, (code_features.whole[protocol][name] @ matrix).relu())
    assert code_features.bochner is code_features.heads["bochner"]


def test_the_classes_are_cut_as_the_images_are(picture_features):
    data = picture_features
    assert [len(data.labels[name]) for name in ("train", "held_out", "cifar10")] == [180, 60, 60]


def test_published_images_are_in_the_unit_interval_and_not_standardised(picture_features, trained_folder, monkeypatch):
    """Departure 37, each set written out: which pixels, and whose BatchNorm."""
    monkeypatch.setenv("BOCHNER_DATA", str(trained_folder))
    raw = {name: torch.from_numpy(pictures(name).x_test) for name in ("cifar10", *ood.OUTSIDE)}
    train = torch.from_numpy(pictures("cifar10").x_train)
    show = Pictures(train, "cpu")
    plain = show.plain(train)
    torch.testing.assert_close(plain, train.permute(0, 3, 1, 2).float() / 255)
    seen = [show(x) for x in (train[:180], raw["cifar10"])]
    labels = torch.from_numpy(pictures("cifar10").y_train).long()
    truth = torch.from_numpy(pictures("cifar10").y_test).long()
    net, _ = pretrained(OOD.weights, TINY, 0, train=(seen[0], labels[:180]), test=(seen[1], truth))
    published = picture_features.published
    close = {"rtol": 1e-3, "atol": 1e-4}
    inside = features(net, show.plain(raw["cifar10"]), statistics_of=plain[:180])
    for sets in published.values():
        torch.testing.assert_close(sets["cifar10"], inside, **close)
    for name in ood.OUTSIDE:
        x = show.plain(raw[name])
        torch.testing.assert_close(published["paper"][name], features(net, x, statistics_of=x), **close)
        torch.testing.assert_close(
            published["paper-train-bn"][name], features(net, x, statistics_of=plain[:180]), **close
        )
        torch.testing.assert_close(published["paper-guess"][name], features(net, x), **close)
    # Training: crops and mirror images, every batch by its own statistics; the running ones stay as they were.
    before = {name: value.clone() for name, value in net.state_dict().items()}
    view = pretraining.training_features(net, plain[:180], seed=0, stream=1)
    torch.testing.assert_close(picture_features.views[1], view, **close)
    assert not torch.allclose(picture_features.views[0], view, **close)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    net[0].train()
    torch.testing.assert_close(view, net[0](shift(plain[:180], 4, 0, 1, mirror=True)).detach(), **close)


@pytest.mark.parametrize("head", ood.HEADS)
def test_published_heads_train_by_sgd_with_dropout_on_changing_views(picture_features, head, monkeypatch):
    """Departures 24 and 37."""
    data, calls = picture_features, []
    wide = data.views[0].shape[1]
    matrix = torch.randn(wide, 25, generator=torch.Generator().manual_seed(0)) if head == "code" else None
    monkeypatch.setattr(data, "projection", matrix, raising=False)
    fit = heads.fit_map

    def heard(model, x, y, recipe, **options):
        calls.append((model, recipe, x.clone()))
        return fit(model, x, y, recipe, **options)

    monkeypatch.setattr(heads, "fit_map", heard)
    collected = heads.PublishedHead(replace(OOD, head=head, published_epochs=3), data, "rbf-sin")
    (model, recipe, first), (_, _, second) = calls
    assert (recipe.epochs, recipe.optimizer.__name__, recipe.lr, recipe.scale_lr) == (3, "sgd", 1e-4, 1e-5)
    assert cifar.Config().published_epochs == 50
    dropout = model.extractor[0]
    assert (dropout.p, dropout.width) == (0.1, wide)
    assert model.layer.in_features == (25 if head == "code" else wide)
    torch.testing.assert_close(first, data.views[0])
    assert any(torch.equal(second, view) for view in data.views)
    assert [rate for rate, _ in collected.tried] == pytest.approx(np.linspace(0.001, 3, 4).tolist())
    if matrix is not None:
        torch.testing.assert_close(model.extractor[1].weight, matrix.T)
        assert not model.extractor[1].weight.requires_grad
        x = data.published["paper"]["cifar10"]
        torch.testing.assert_close(model.extractor(x), (x @ matrix).relu())


def test_published_marginal_variance_is_the_mean_over_classes(generator):
    f = torch.randn(8, 60, 10, generator=generator)
    predictions = {
        name: CategoricalPredictive.from_logits(f * (1 + i)) for i, name in enumerate(("cifar10", *ood.OUTSIDE))
    }
    ours, theirs = (
        [
            r["top"]
            for r in scoring.prediction_rows(predictions, torch.arange(60) % 10, mean_variance=mean)
            if (r["score"], r["outside"]) == ("marginal_variance", "histogram")
        ]
        for mean in (False, True)
    )
    assert theirs[0] == pytest.approx(ours[0] / 10)


def test_trapezoidal_aupr_is_the_area_under_straight_lines():
    """Departure 37: points of the curve by hand, recall 0, 1/2, 1/2, 1 with precision 1, 1, 1/2, 2/3."""
    inside, outside = [0.5, 0.1], [0.9, 0.3]
    assert metrics.ood_aupr(inside, outside, trapezoid=True) == pytest.approx(0.5 * 1 + 0.5 * (1 / 2 + 2 / 3) / 2)
    assert metrics.ood_aupr(inside, outside) == pytest.approx(0.5 * 1 + 0.5 * 2 / 3)


def test_scores_are_higher_outside():
    """Flat outputs outside, confident ones inside: every score must see that, even where float32 would see none."""
    generator = torch.Generator().manual_seed(0)
    inside = 30 * torch.nn.functional.one_hot(torch.arange(200) % 10).float()
    flat = torch.randn(200, 10, generator=generator)
    logits = {"cifar10": inside, "cifar100": flat, "svhn-1083": 0.9 * inside}
    rows = list(scoring.plain_rows(logits, torch.arange(200) % 10, "bochner"))
    assert {row["score"] for row in rows} == {"max_probability", "energy"}
    assert all(row["auc"] == 1.0 for row in rows)  # 27 below 30: probabilities of 1 to eleven digits
    noisy = {
        n: CategoricalPredictive.from_logits(f + torch.randn(8, 200, 10, generator=generator))
        for n, f in logits.items()
    }
    found = {(r["score"], r["outside"]): r for r in scoring.prediction_rows(noisy, torch.arange(200) % 10)}
    assert found["entropy", "cifar100"]["auc"] == found["marginal_variance", "cifar100"]["auc"] == 1.0
    assert found["entropy", "svhn-1083"]["auc"] > 0.8
    assert found["marginal_variance", "svhn-1083"]["auc"] > 0.8


def test_aupr_at_the_full_base_rate_is_that_of_repeated_images():
    rng = np.random.default_rng(0)
    inside, outside = rng.normal(size=300), rng.normal(1, 1, size=50)
    repeated = metrics.ood_aupr(inside, np.repeat(outside, 24))
    assert metrics.ood_aupr(inside, outside, weight=24.0) == pytest.approx(repeated, abs=1e-12)
    assert metrics.ood_aupr(inside, outside) < repeated


def test_a_method_that_fails_is_a_row_and_the_others_go_on(shared_features, tmp_path, monkeypatch):
    monkeypatch.setattr(ood, "Features", shared_features)
    monkeypatch.setenv("BOCHNER_DATA", str(tmp_path))

    def fails(_config, _data, _name):
        raise DivergedError("too fast")

    monkeypatch.setattr(
        ood, "METHODS", [m._replace(make=fails) if m.posterior == "ensemble" else m for m in ood.METHODS]
    )
    lines = []
    rows = ood.make_rows(OOD, tmp_path / "cifar-ood.jsonl", Request(models=("relu",), report=lines.append))
    assert [row["reason"] for row in rows if row["status"] == "diverged"] == ["too fast"]
    assert any(line.endswith("diverged: too fast") for line in lines)
    assert {row["posterior"] for row in rows if row["status"] == "ok"} == {"map", "closed_form", "swag"}
    histograms = reports.histograms(rows)  # of one model only
    assert len(reports.ood_figure(histograms["text", "swag", "bochner"]).axes) == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_everything_runs_on_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar, "load_images", pictures)
    monkeypatch.setenv("BOCHNER_DATA", str(tmp_path))
    rows = ood.make_rows(replace(OOD, device="cuda"), tmp_path / "cifar-ood.jsonl", Request())
    assert {row["status"] for row in rows} == {"ok"}
    for config in (replace(SMALL, posteriors=("map", "kfac", "closed_form")), replace(SMALL, protocol="paper")):
        assert all(row["status"] == "ok" for row in run_network(replace(config, device="cuda"), "rbf-sin"))


LAST_HISTOGRAM = ("rbf-sin", "entropy", "paper", "histogram")


def test_ood_reports_come_from_rows_alone(ood_rows, tmp_path, monkeypatch):
    shown = (("swag", "paper"), ("closed_form", "bochner"))
    ood_rows = [row for row in ood_rows if row["head"] == "text" and row["model"] in ("relu", "rbf-sin")]
    ood_rows = [row for row in ood_rows if (row["posterior"], row["protocol"]) in shown]
    write_rows(tmp_path / "cifar-ood.jsonl", ood_rows)
    monkeypatch.setenv("BOCHNER_DATA", str(tmp_path))
    with pytest.warns(UserWarning, match=r"single images are left out. The file cifar10.npz .* is not in"):
        names = [path.name for path in reports.write(tmp_path, tmp_path)]
    assert "cifar-ood-text-closed_form-bochner.svg" in names
    assert not any("images-" in name for name in names)  # the sets themselves are not there
    text = (tmp_path / "images.md").read_text()
    row = next(
        r
        for r in ood_rows
        if (r["head"], r["posterior"], r["protocol"], r["model"]) == ("text", "swag", "paper", "rbf-sin")
        and (r["score"], r["outside"]) == ("marginal_variance", "svhn-1083")
    )
    assert f"{row['auc']:.3f} (0.988)" in text
    assert "SVHN (1,083 images) AUC" in text
    monkeypatch.setattr(reports, "load_images", pictures)
    (row,) = [r for r in ood_rows if (r["model"], r["score"], r["protocol"], r["outside"]) == LAST_HISTOGRAM]
    monkeypatch.setattr(reports, "histograms", lambda _: {("text", "swag", "paper"): [row]})
    assert "cifar-images-text-swag-paper.svg" in [path.name for path in reports.write(tmp_path, tmp_path)]


# ------------------------------------------------------------------ command line


def test_the_command_makes_rows_once_and_a_report(tmp_path, monkeypatch):
    monkeypatch.setattr(rotation_protocols, "load_images", few_digits)
    monkeypatch.setitem(EXPERIMENTS, "rotated-digits", replace(SMALL, posteriors=("map",)))
    runner = CliRunner(env={"COLUMNS": "300", "NO_COLOR": "1"})
    words = ["run", "rotated-digits", "--models", "relu", "--out", str(tmp_path), "--device", "cpu"]
    first = runner.invoke(app, words)
    assert first.exit_code == 0, first.output
    assert "relu" in first.output
    rows = read_rows(tmp_path / "rotated-digits.jsonl")
    assert len(rows) == 2
    second = runner.invoke(app, words)
    assert "relu  " not in second.output
    assert read_rows(tmp_path / "rotated-digits.jsonl") == rows
    assert runner.invoke(app, ["report", str(tmp_path)]).exit_code == 0


def test_the_command_says_what_is_missing_or_misspelt(tmp_path):
    runner = CliRunner(env={"COLUMNS": "300", "NO_COLOR": "1", "BOCHNER_DATA": str(tmp_path)})
    out = ["--out", str(tmp_path / "out")]
    for words, expected in {
        ("rotated-mnist",): "The file mnist.npz of the data set 'mnist' is not in",
        ("cifar-ood",): "The file cifar10.npz of the data set 'cifar10' is not in",
        ("cifar-ood", "--head", "txt"): "Did you mean 'text'",
        ("rotated-digits", "--models", "rbf-sine"): "Did you mean 'rbf-sin'",
        ("rotated-digits", "--protocol", "papers"): "Did you mean 'paper'",
        ("rotated-digit",): "Did you mean 'rotated-digits'",
    }.items():
        result = runner.invoke(app, ["run", *words, *out])
        assert result.exit_code != 0
        assert expected in result.output
    assert "There are no rows in" in runner.invoke(app, ["report", str(tmp_path)]).output
