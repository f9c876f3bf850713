"""A head for a trained network, against dense Gaussian processes, refits and the network itself."""

import copy
import pickle
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bochner.attach import StationaryHead
from bochner.attach.answers import Answer
from bochner.attach.batches import HeadRows, Reader, Tapped, sample_rows
from bochner.attach.nearness import ROW_PRECISION, Nearness, Space
from bochner.attach.novelty import Novelty, Tail
from bochner.estimators import StationaryRegressor
from bochner.storage import ModelFileError, load, save
from forging import Parts
from problems import one_of_two

CENTRES = torch.tensor([[0.0, 2.0], [2.0, -1.0], [-2.0, -1.0]], dtype=torch.float64)


def blobs(num, seed=0):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (num,), generator=generator)
    return CENTRES[y] + 0.9 * torch.randn(num, 2, generator=generator, dtype=torch.float64), y


def wave(num, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = 4 * torch.rand(num, 2, generator=generator, dtype=torch.float64) - 2
    clean = torch.stack([torch.sin(2 * x[:, 0]), 5 + x[:, 1] ** 2], 1)
    return x, clean + torch.tensor([0.1, 0.5]) * torch.randn(num, 2, generator=generator, dtype=torch.float64)


def trained(x, y, outputs, hidden=(32, 16), steps=300, middle=None):
    torch.manual_seed(0)
    layers = [nn.Linear(x.shape[1], hidden[0]), nn.ReLU(), *([middle] if middle else [])]
    return learnt(nn.Sequential(*layers, nn.Linear(*hidden), nn.ReLU(), nn.Linear(hidden[1], outputs)), x, y, steps)


def learnt(network, x, y, steps=300):
    network = network.double()
    optimizer = torch.optim.Adam(network.parameters(), 0.01)
    for _ in range(steps):
        loss = nn.functional.cross_entropy if not y.is_floating_point() else nn.functional.mse_loss
        optimizer.zero_grad()
        loss(network(x), y).backward()
        optimizer.step()
    return network.eval().requires_grad_(False)


def loader(x, y, size=64):
    return DataLoader(TensorDataset(x, y), size)


def fit(network, *loaders, **options):
    return StationaryHead.fit(network, *loaders, progress=False, **options)


@pytest.fixture(scope="module")
def classes():
    network = trained(*blobs(400), 3)
    return network, fit(network, loader(*blobs(400)), loader(*blobs(400, 1)))


@pytest.fixture(scope="module")
def numbers():
    network = trained(*wave(600), 2)
    return network, fit(network, loader(*wave(600)), loader(*wave(400, 1)))


# ------------------------------------------------------------------ the mathematics


def test_with_all_rows_as_anchors_the_variance_left_is_that_of_the_exact_process():
    x, new = blobs(40)[0], blobs(15, 1)[0]
    space = Space.of(x, directions=False)
    near = Nearness.at(space, "matern32", 0.5, x, x)
    left = near.left(new)

    def kernel(a, b):
        r = np.linalg.norm(a[:, None] - b[None], axis=-1) * np.sqrt(3) / (0.5 * space.unit)
        return (1 + r) * np.exp(-r)

    a, b = space(x).numpy(), space(new).numpy()
    cross = kernel(b, a)
    solved = np.linalg.solve(kernel(a, a) + np.eye(40) / ROW_PRECISION, cross.T)
    np.testing.assert_allclose(left, 1 - (cross * solved.T).sum(1), atol=1e-6)


def test_a_seen_row_is_left_out_in_closed_form():
    x = blobs(60)[0]
    space = Space.of(x, directions=True)
    near = Nearness.at(space, "rbf", 0.5, x[:20], x)
    left = near.left(x[20:], seen=True)
    for row in (20, 33, 59):
        others = torch.cat([x[:row], x[row + 1 :]])
        again = Nearness.at(space, "rbf", 0.5, x[:20], others).left(x[row : row + 1])
        torch.testing.assert_close(left[row - 20 : row - 19], again)


def test_directions_ignore_small_changes_of_length_and_see_large_ones():
    x = blobs(50)[0]
    space = Space.of(x, directions=True)
    unit = space(x)[:, :2]
    torch.testing.assert_close(unit.norm(dim=1), torch.ones(50, dtype=torch.float64), rtol=1e-4, atol=0)
    near = Nearness.at(space, "matern32", 0.5, x, x)
    assert float(near.left(1.1 * x).max()) < 0.5
    assert float(near.left(1e9 * x).min()) > 0.95
    assert float(near.left(0 * x).min()) > 0.95


def test_a_tail_counts_and_then_falls_exponentially():
    known = torch.linspace(0, 1, 101, dtype=torch.float64)
    tail = Tail(known)
    shares = tail.log_share(torch.tensor([-1.0, 0.5, 0.9, 1.5, 3.0], dtype=torch.float64)).exp()
    torch.testing.assert_close(shares[1], torch.tensor(52 / 102, dtype=torch.float64))
    assert shares[0] == 1
    torch.testing.assert_close(shares[3], torch.tensor(0.1 * np.exp(-0.6 / 0.05), dtype=torch.float64))
    assert shares[4] < shares[3] < shares[2]


def test_the_score_of_rows_like_the_known_ones_is_uniform():
    rng = np.random.default_rng(0)
    known, new = (list(torch.from_numpy(rng.multivariate_normal([0, 0], [[1, 0.7], [0.7, 1]], 4000).T)) for _ in "ab")
    found = Novelty.of(known)(new).numpy()
    for share in (0.1, 0.5, 0.9, 0.95, 0.99):
        assert (found > share).mean() == pytest.approx(1 - share, abs=0.02)


def test_the_power_is_the_largest_that_known_rows_do_not_speak_against():
    """Where the variance left says nothing of errors no power pays; where it says all, a large one does."""
    generator = torch.Generator().manual_seed(0)
    left = torch.rand(3000, generator=generator, dtype=torch.float64)
    outputs = 3 * torch.randn(3000, 2, generator=generator, dtype=torch.float64)

    def chosen(trust):
        p = torch.softmax(trust[:, None] * outputs, 1)[:, 1]
        y = (torch.rand(3000, generator=generator, dtype=torch.float64) < p).long()
        rows = HeadRows(outputs, outputs, y, y, y, torch.ones_like(y), 3000)
        return Answer.fitted(rows, left, y, classes=True, seen=False)

    plain, shrunk = chosen(torch.full_like(left, 0.5)), chosen((1 - left) ** 2)
    assert plain.power <= 1 / 8
    assert plain.temperature == pytest.approx(2.0, rel=0.15)
    assert shrunk.power == 2.0
    assert shrunk.temperature == pytest.approx(1.0, rel=0.15)


# ------------------------------------------------------------------ classes


def test_the_answer_is_the_networks_own(classes):
    network, head = classes
    x, y = blobs(500, 2)
    prediction = head.predict(x)
    assert torch.equal(prediction.probabilities.argmax(1), network(x).argmax(1))
    trust = head._answer.trust(head.variance_left(x))
    near = head.variance_left(x) < head._answer.edge
    torch.testing.assert_close(trust[near], (1 - head.variance_left(x)[near]) ** head.power)
    expected = torch.log_softmax(trust[:, None] * network(x).detach() / head.temperature, 1)
    torch.testing.assert_close(prediction.log_probabilities, expected, rtol=0, atol=3e-6)
    assert (prediction.mutual_information >= 0).all()
    own = nn.functional.cross_entropy(network(x), y).item()
    assert -prediction.log_prob(y).mean().item() < own + 0.02


def test_far_from_the_data_all_classes_are_alike_and_rows_are_flagged(classes):
    _, head = classes
    x = blobs(100, 2)[0]
    far = 1e9 * x
    assert (head.predict(far).probabilities - 1 / 3).abs().max() < 0.2
    assert (head.ood_score(far) > head.threshold).all()
    score = head.ood_score(blobs(2000, 3)[0])
    assert float((score > head.threshold).double().mean()) == pytest.approx(head.false_alarm, abs=0.025)
    assert 0 <= float(score.min())
    assert float(score.max()) <= 1


def test_without_held_out_rows_the_network_is_not_made_surer():
    x, y = blobs(400)
    network = trained(x, y, 3)
    head = fit(network, loader(x, y))
    new = blobs(300, 5)[0]
    before, after = torch.softmax(network(new), 1).max(1).values, head.predict(new).confidence
    assert float((after - before).mean()) < 0.005
    assert (head.kernel, head.lengthscale, head.power) == ("matern32", 0.5, 0.5)


def test_one_output_for_two_classes_is_a_sigmoid():
    x, y = blobs(300)
    y = (y > 0).long()
    network = trained(x, y, 2)
    single = nn.Sequential(*list(network)[:-1], nn.Linear(16, 1).double())
    last = network[-1]
    single[-1].weight.data, single[-1].bias.data = last.weight[1:] - last.weight[:1], last.bias[1:] - last.bias[:1]
    new = blobs(50, 1)[0]
    found = fit(single, loader(x, y)).predict(new).probabilities
    assert torch.equal(found[:, 1] > 0.5, single(new)[:, 0] > 0)


# ------------------------------------------------------------------ regression


def test_regression_is_calibrated_and_reverts_to_the_spread_of_the_targets(numbers):
    network, head = numbers
    x, y = wave(2000, 2)
    prediction = head.predict(x)
    low, high = prediction.interval(0.9)
    inside = ((y >= low) & (y <= high)).double().mean(0)
    assert ((inside - 0.9).abs() < 0.04).all()
    error = (y - network(x)).square().mean(0).sqrt()
    torch.testing.assert_close(prediction.std.mean(0), error, rtol=0.2, atol=0)
    assert ((y - prediction.mean).square().mean(0).sqrt() < 1.05 * error).all()
    away = 1000 * x / x.norm(dim=1, keepdim=True)
    far = head.predict(away)
    truth = wave(600)[1]
    torch.testing.assert_close(far.mean, truth.mean(0).expand_as(far.mean), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(far.f_variance, truth.var(0).expand_as(far.f_variance), rtol=1e-3, atol=1e-3)
    assert (head.ood_score(away) > head.threshold).all()


# ------------------------------------------------------------------ streams


def few_rows_suffice(patch):
    patch.setattr("bochner.attach.head.MAX_ANCHORS", 100)
    patch.setattr("bochner.attach.head.MAX_KNOWN_ROWS", 300)


def test_neither_order_nor_batches_matter(monkeypatch):
    few_rows_suffice(monkeypatch)
    x, y = blobs(2000)
    network = trained(x[:400], y[:400], 3, steps=50)
    order = torch.randperm(2000)
    one = fit(network, loader(x, y), loader(*blobs(400, 1)))
    two = fit(network, loader(x[order], y[order], 1000), [(x, y) for x, y in loader(*blobs(400, 1), 7)])
    new = blobs(200, 2)[0]
    torch.testing.assert_close(one.ood_score(new), two.ood_score(new), rtol=0, atol=1e-10)
    torch.testing.assert_close(
        one.predict(new).probabilities, two.predict(loader(new, y[:200], 33)).probabilities, rtol=0, atol=1e-9
    )


@pytest.mark.parametrize("distance", [10, 30, 1000])
def test_far_away_the_class_is_still_the_networks_own_and_is_not_sure(classes, distance):
    network, head = classes
    x, _ = blobs(300, 2)
    prediction = head.predict(distance * x)
    assert torch.equal(prediction.probabilities.argmax(1), network(distance * x).argmax(1))
    assert (head.ood_score(distance * x) > head.threshold).double().mean() > 0.9
    assert prediction.confidence.mean() < head.predict(x).confidence.mean() - 0.1
    assert torch.equal(prediction.ood_score, head.ood_score(distance * x))


def test_trust_falls_at_least_with_the_variance_beyond_what_known_rows_show():
    left = torch.linspace(0, 1, 101, dtype=torch.float64)
    for power in (1 / 16, 2.0):
        answer = Answer(power, 0.4, 1.0)
        expected = (1 - left.clamp(max=0.4)) ** power * ((1 - left).clamp(max=0.6) / 0.6) ** max(1, power)
        torch.testing.assert_close(answer.trust(left), expected)
        assert (answer.trust(left).diff() <= 0).all()


def test_rows_are_told_apart_whatever_dimension_they_lie_along():
    """A recurrent network that takes (time, rows, numbers), and a second input that belongs to no row."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.out = nn.GRU(2, 8), nn.Linear(8, 3)

        def forward(self, x, scale):
            return self.out(self.cell(x * scale.mean())[0][-1])

    torch.manual_seed(0)
    x, y = blobs(300)
    batches = [(x[i : i + 60].float().expand(7, -1, -1), torch.ones(11), y[i : i + 60]) for i in range(0, 300, 60)]
    head = fit(Recurrent(), batches, batches)
    assert head._facts.rows == 300
    assert len(head._novelty.statistic.known) == 300


def test_a_sigmoid_behind_a_named_layer_is_refused():
    x, y = blobs(100)
    network = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1), nn.Sigmoid()).double()
    with pytest.raises(ValueError, match="network returns probabilities in batch 0, where logits are needed"):
        fit(network, loader(x, (y > 0).long()), head="2")


def test_a_network_that_squeezes_may_meet_a_batch_of_one_row():
    class Squeezed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.out = nn.Linear(2, 8), nn.Linear(8, 1)

        def forward(self, x):
            return self.out(torch.tanh(self.body(x))).squeeze()

    x, y = wave(65)
    head = fit(Squeezed().double(), loader(x, y[:, :1], 16), task="regression")
    assert head.predict(x[:1]).mean.shape == (1, 1)


SECOND_PROCESS = """
import os
import sys
sys.path.insert(0, "tests")
from test_attach import *
few_rows_suffice(pytest.MonkeyPatch())
torch.save(answers_of_a_process(1, sys.argv[1]), sys.argv[1] + ".second")
os._exit(0)  # gloo's threads may outlive the interpreter, which then aborts
"""


def answers_of_a_process(rank, path):
    """Scores and probabilities of a head that this process fits: to its half of the rows, or to all where it works alone."""
    part = slice(rank, None, None if rank is None else 2)
    with one_of_two(rank, path):
        x, y = blobs(2000)
        network = trained(x[:400], y[:400], 3, steps=50)
        head = fit(network, loader(x[part], y[part]), loader(*(v[part] for v in blobs(400, 1))))
        new = blobs(200, 2)[0]
        return torch.cat([head.ood_score(new), head.predict(new).probabilities.flatten()])


def test_two_processes_equal_one(tmp_path, monkeypatch):
    few_rows_suffice(monkeypatch)
    path = str(tmp_path / "found")
    second = subprocess.Popen([sys.executable, "-c", SECOND_PROCESS, path])
    one, first = answers_of_a_process(None, path), answers_of_a_process(0, path)
    assert second.wait(timeout=120) == 0
    for part in (first, torch.load(f"{path}.second")):
        torch.testing.assert_close(part, one, rtol=0, atol=1e-10)


def test_threads_do_not_disturb_each_other(classes):
    _, head = classes
    batches = [blobs(50, seed)[0] for seed in range(40)]
    alone = [head.ood_score(x) for x in batches]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(head.ood_score, batches))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


# ------------------------------------------------------------------ whatever the network takes


def test_a_network_in_training_mode_is_left_so_and_asked_as_in_evaluation():
    x, y = blobs(300)
    network = trained(x, y, 3, middle=nn.Sequential(nn.BatchNorm1d(32), nn.Dropout(0.5))).train()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    head = fit(network, loader(x, y))
    assert network.training
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert not any(module._forward_hooks for module in network.modules())
    assert torch.equal(head.predict(x).probabilities.argmax(1), network.eval()(x).argmax(1))


class Tokens(nn.Module):
    """Sequences in by name, an object with logits out, and the head in a module within."""

    def __init__(self):
        super().__init__()
        self.embed, self.first = nn.Embedding(9, 8), nn.Linear(3, 3)
        self.body = nn.ModuleDict({"head": nn.Linear(16, 3), "rnn": nn.GRU(8, 16, batch_first=True)})

    def forward(self, tokens, mask=None):
        states = self.body["rnn"](self.embed(tokens))[0]
        kept = states if mask is None else states * mask[..., None]
        return SimpleNamespace(logits=self.body["head"](kept.mean(1)))


def test_sequences_and_dictionaries():
    torch.manual_seed(0)
    network, tokens, y = Tokens(), torch.randint(9, (120, 7)), torch.randint(3, (120,))
    batches = [
        {"tokens": t, "mask": torch.ones(40, 7), "labels": label}
        for t, label in zip(tokens.split(40), y.split(40), strict=True)
    ]
    head = fit(network, batches)
    found = head.predict({"tokens": tokens, "mask": torch.ones(120, 7)}).probabilities
    assert torch.equal(found.argmax(1), network(tokens).logits.argmax(1))
    torch.testing.assert_close(head.predict(batches).probabilities, found)
    torch.testing.assert_close(head.predict((tokens, torch.ones(120, 7))).probabilities, found)


def test_parameters_are_shared_and_weight_norm_is_taken():
    x, y = blobs(100)
    network = trained(x, y, 3, steps=10)
    nn.utils.parametrizations.weight_norm(network[2])
    head = fit(network, loader(x, y))
    parameters = {id(p) for p in network.parameters()}
    assert {id(p) for p in head._tapped.network.parameters()} == parameters


def test_images_of_float32_stay_so():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 8), nn.ReLU(), nn.Linear(8, 4))
    x, y = torch.rand(60, 1, 8, 8, dtype=torch.float64), torch.randint(4, (60,))
    head = fit(network, [(x, y)])
    assert head.predict(x).probabilities.shape == (60, 4)
    assert next(network.parameters()).dtype == torch.float32


# ------------------------------------------------------------------ files


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_a_file_brings_back_the_same_head(kind, request, tmp_path):
    network, head = request.getfixturevalue(kind)
    again = StationaryHead.load(head.save(tmp_path / "head.bochner"), network)
    new = blobs(50, 2)[0]
    assert torch.equal(again.ood_score(new), head.ood_score(new))
    one, two = again.predict(new), head.predict(new)
    assert torch.equal(one.entropy, two.entropy)
    assert (again.kernel, again.threshold, again.power) == (head.kernel, head.threshold, head.power)


def test_a_file_of_another_network_or_an_edited_one_is_refused(classes, tmp_path):
    network, head = classes
    path = head.save(tmp_path / "head.bochner")
    with pytest.raises(ModelFileError, match="made for another network: parameters or buffers differ"):
        StationaryHead.load(path, trained(*blobs(400, 7), 3))
    with pytest.raises(ModelFileError, match="made for another network: this one has no layer '4'"):
        StationaryHead.load(path, nn.Linear(2, 3))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ModelFileError, match="checksum"):
        StationaryHead.load(path, network)
    with pytest.raises(ModelFileError, match="does not exist"):
        StationaryHead.load(tmp_path / "nothing", network)
    path.write_bytes(whole)
    with pytest.raises(ValueError, match=r"^The network parameter must be an nn.Module, got NoneType instead"):
        StationaryHead.load(path, None)
    with pytest.raises(ValueError, match=r"^The network parameter must hold numbers, got a network on torch's meta"):
        StationaryHead.load(path, copy.deepcopy(network).to("meta"))


def test_heads_and_estimators_are_told_apart(classes, tmp_path):
    network, head = classes
    with pytest.raises(ModelFileError, match=r"holds a StationaryHead; use StationaryHead.load\(path, network\)"):
        load(head.save(tmp_path / "head.bochner"))
    model = StationaryRegressor(hidden_layer_sizes=()).fit([[0.0], [1.0], [2.0]], [0.0, 1.0, 0.0])
    with pytest.raises(ModelFileError, match="does not hold a StationaryHead"):
        StationaryHead.load(save(tmp_path / "model.bochner", model), network)


def test_a_head_is_the_same_bytes_and_may_be_signed(numbers, tmp_path):
    network, head = numbers
    path = head.save(tmp_path / "head.bochner", key=b"secret")
    again = StationaryHead.load(path, network, key=b"secret")
    assert again.save(tmp_path / "again.bochner", key=b"secret").read_bytes() == path.read_bytes()
    with pytest.raises(ModelFileError, match="is signed; give its key"):
        StationaryHead.load(path, network)
    with pytest.raises(ModelFileError, match="was signed with another key"):
        StationaryHead.load(path, network, key=b"another")
    head = copy.deepcopy(head)
    head._near.scale = float("nan")
    with pytest.raises(ValueError, match=r"could not be read back, so it is not written .scale must be a number"):
        head.save(tmp_path / "head.bochner")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c, _: c.update(kernel="exec"), "kernel must be 'matern32' or 'rbf', got 'exec'"),
        (lambda c, _: c.update(layer="5"), "has no layer '5'"),
        (lambda c, _: c.update(classes=False), "a head for classes, and no other, has a temperature"),
        (lambda c, _: c["answer"].update(noise=[1.0]), "a head for numbers, and no other, has a noise"),
        (lambda c, _: c["answer"].update(temperature=0.0), "answer.temperature must be a number from 1e-12"),
        (lambda c, _: c["answer"].update(edge=1.0), "answer.edge must be a number from 0"),
        (lambda c, _: c.update(features=3), "anchors must be torch.float64 of shape"),
        (lambda _, t: t.update(tail0=t["tail0"].flip(0)), "tail0 must be sorted"),
        (lambda _, t: t.update(tail1=t["tail1"][1:]), "tail1 must be torch.float64 of shape"),
        (lambda _, t: t.update(factor=-t["factor"]), "the factor must have a positive diagonal"),
        (lambda _, t: t.update(centre=-t["centre"].abs()), "the smallest length must be positive"),
        (lambda _, t: t.update(anchors=t["anchors"] * torch.nan), "anchors must hold numbers from"),
    ],
)
def test_edited_heads_are_refused_even_under_a_correct_checksum(change, message, classes, tmp_path):
    network, head = classes
    parts = Parts.of(head.save(tmp_path / "head.bochner").read_bytes())
    change(parts.content, parts.tensors)
    (tmp_path / "head.bochner").write_bytes(parts.data())
    with pytest.raises(ModelFileError, match=message):
        StationaryHead.load(tmp_path / "head.bochner", network)


# ------------------------------------------------------------------ what is refused


class Zero(nn.Module):
    def forward(self, x):
        return 0 * x


@pytest.mark.parametrize(
    ("network", "batches", "options", "message"),
    [
        (nn.Linear(2, 3), [], {}, "must give at least one batch"),
        (nn.Linear(2, 3), [blobs(5)], {}, "must give at least 10 rows, got 5"),
        (nn.Linear(2, 3), iter([blobs(50)]), {}, "gone through more than once"),
        (nn.Linear(2, 3), [{"x": blobs(50)[0]}], {}, "dictionary of 'x'"),
        (nn.Linear(2, 3), [blobs(50)[0]], {}, "inputs alone"),
        (nn.Linear(2, 2), [blobs(50)], {}, "label from 0 to 1 .* got values from 0 to 2"),
        (nn.Linear(2, 3), [(blobs(50)[0] / 0, blobs(50)[1])], {}, "not finite"),
        (nn.Linear(2, 3), [(blobs(50)[0], blobs(40)[1])], {}, "40 targets for 50 rows"),
        (nn.Linear(2, 3), [wave(50)], {}, r"targets of shape \(50, 2\) for outputs of shape \(50, 3\)"),
        (nn.ReLU(), [blobs(50)], {}, "must return the output of an nn.Linear; none of its 0 does"),
        (nn.Sequential(nn.Linear(2, 3), nn.Softmax(1)), [blobs(50)], {}, "Take away what comes after"),
        (nn.Sequential(Zero(), nn.Linear(2, 3)), [blobs(50)], {}, "the same for all rows"),
        (nn.Linear(2, 3), [blobs(50)], {"head": "last"}, "must name an nn.Linear of the network"),
        (nn.Linear(2, 3), [blobs(50)], {"task": "labels"}, "must be 'classes' or 'regression', got 'labels'"),
        ("network", [blobs(50)], {}, "must be an nn.Module, got str"),
        (nn.Linear(2, 3), [7], {}, "A batch must be a tensor, .* got int"),
    ],
)
def test_bad_inputs_are_named(network, batches, options, message):
    network = network.double() if isinstance(network, nn.Module) else network
    with pytest.raises(ValueError, match=message):
        fit(network, batches, **options)


def test_values_that_are_not_finite_are_refused_when_predicting(classes):
    _, head = classes
    with pytest.raises(ValueError, match="not finite"):
        head.predict(torch.full((3, 2), torch.nan))
    with pytest.raises(ValueError, match="at least one row"):
        head.ood_score([])


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(5, 3), r"cannot take these inputs, torch.float32 of shape \(5, 3\): "),
        (torch.zeros(5, 2, dtype=torch.int64), r"cannot take these inputs, torch.int64 of shape \(5, 2\): "),
        ({"a": torch.zeros(5, 2)}, r"cannot take these inputs, torch.float32 of shape \(5, 2\): .*'a'"),
    ],
)
def test_rows_that_the_network_cannot_take_are_named(x, message, classes):
    _, head = classes
    for call in (head.predict, head.ood_score, head.variance_left):
        with pytest.raises(ValueError, match=message):
            call(x)


def test_too_little_memory_is_no_fault_of_the_rows():
    class Hungry(nn.Linear):
        def forward(self, x):
            if len(x) > 100:
                raise torch.OutOfMemoryError("tried to allocate 2 TiB")
            return super().forward(x)

    head = fit(Hungry(2, 3).double(), [blobs(100)])
    with pytest.raises(torch.OutOfMemoryError):
        head.predict(blobs(101)[0])


@pytest.mark.parametrize("length", [1, 3])
def test_a_head_for_another_number_of_outputs_is_refused_when_predicting(length, numbers, tmp_path):
    network, head = numbers
    parts = Parts.of(head.save(tmp_path / "head.bochner").read_bytes())
    for name in ("noise", "centre", "spread"):
        parts.content["answer"][name] = [1.0] * length
    (tmp_path / "head.bochner").write_bytes(parts.data())
    with pytest.raises(ValueError, match=f"made for a network with {length} outputs, but the network gives 2"):
        StationaryHead.load(tmp_path / "head.bochner", network).predict(wave(5)[0])


def test_a_softmax_at_the_end_is_passed_over_where_the_layer_is_named():
    x, y = blobs(200)
    network = nn.Sequential(trained(x, y, 3), nn.LogSoftmax(1))
    head = fit(network, loader(x, y), head="0.4")
    assert torch.equal(head.predict(x).probabilities.argmax(1), network(x).argmax(1))


# ------------------------------------------------------------------ what a hostile reader found


def test_a_few_held_out_rows_do_not_make_the_network_sure():
    """All of them right: the likelihood alone asks for outputs as large as they can be."""
    x, y = blobs(400)
    network = trained(x, y, 3)
    new, truth = blobs(400, 1)
    right = network(new).argmax(1) == truth
    head = fit(network, loader(x, y), loader(new[right][:15], truth[right][:15]))
    assert 0.5 < head.temperature < 2.5


def test_the_unit_is_the_median_distance_of_directions_whatever_is_added_to_them():
    x = blobs(400)[0].abs() + 1000
    space = Space.of(x, directions=True)
    unit = x / x.norm(dim=1, keepdim=True)
    expected = torch.cdist(unit[:200], unit[200:]).median()
    torch.testing.assert_close(torch.tensor(space.unit, dtype=torch.float64), expected, rtol=1e-3, atol=0)


def test_lengths_beyond_the_usual_ones_are_far():
    x = blobs(300)[0]
    near = Nearness.at(Space.of(x, directions=True), "matern32", 0.5, x, x)
    assert float(near.left(1e4 * x).min()) > 0.9


def test_the_sample_does_not_depend_on_an_input_that_never_changes(monkeypatch):
    few_rows_suffice(monkeypatch)
    x, y = blobs(3000)
    order = y.argsort()
    network = trained(x[:300], y[:300], 3)

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = network

        def forward(self, mask, x):
            return self.network(x * mask[:, :1])

    batches = [
        {"mask": torch.ones(100, 4), "x": x[rows], "labels": y[rows]} for rows in order.split(100)
    ]  # class after class
    head = fit(Masked(), batches)
    new, truth = blobs(1500, 3)
    flagged = head.ood_score({"mask": torch.ones(1500, 4), "x": new}) > head.threshold
    assert all(flagged[truth == label].double().mean() < 0.2 for label in range(3))


@pytest.mark.parametrize("share", [0.05, 0.2])
def test_the_threshold_holds_its_promise_with_few_known_rows(share):
    """Conformal prediction: over draws of known and new rows, no more than the share is flagged."""
    rng = np.random.default_rng(0)
    flagged = []
    for _ in range(300):
        known, new = torch.from_numpy(rng.normal(size=(1, 40))), torch.from_numpy(rng.normal(size=(1, 50)))
        novelty = Novelty.of(list(known))
        flagged.append(float((novelty(list(new)) > novelty.threshold(share)).double().mean()))
    assert np.mean(flagged) < share + 0.01
    few = Novelty.of([torch.from_numpy(rng.normal(size=10))])
    assert few.threshold(0.05) == 1.0


def test_another_share_of_false_alarms_changes_the_threshold_alone(classes, tmp_path):
    network, head = classes
    stricter = head.with_false_alarm(0.01)
    rows = blobs(2000, 5)[0]
    torch.testing.assert_close(stricter.ood_score(rows), head.ood_score(rows), rtol=0, atol=0)
    assert (head.false_alarm, stricter.false_alarm) == (0.05, 0.01)
    assert float((stricter.ood_score(rows) > stricter.threshold).double().mean()) == pytest.approx(0.01, abs=0.01)
    stricter.save(tmp_path / "head.bochner")
    assert StationaryHead.load(tmp_path / "head.bochner", network).threshold == stricter.threshold > head.threshold
    for share in (2.0, 0, "few"):
        with pytest.raises(ValueError, match=f"share parameter must lie between 0 and 1, got {share!r} instead"):
            head.with_false_alarm(share)


def test_a_constant_target_and_targets_in_other_units():
    x, y = wave(200)
    network = trained(x, y, 2, steps=50)
    constant = torch.full_like(y, 3.0)
    with pytest.warns(UserWarning, match="worse than their mean") as said:
        head = fit(network, loader(x, 1e-3 * y), loader(x, 1e-3 * y))
    prediction = head.predict(x)
    error = (1e-3 * y - prediction.mean).square().mean(0).sqrt()
    torch.testing.assert_close(prediction.std.mean(0), error, rtol=0.2, atol=0)
    assert said
    head = fit(network, loader(x, constant), loader(x, constant))
    assert float(head.predict(x).log_prob(constant).mean()) > -10


def test_labels_of_floats_and_probabilities_are_asked_about():
    x, y = blobs(60)
    single = nn.Linear(2, 1).double()
    with pytest.raises(ValueError, match="say task='classes' or task='regression'"):
        fit(single, [(x, (y > 0).double()[:, None])])
    assert fit(single, [(x, (y > 0).double()[:, None])], task="classes").predict(x).probabilities.shape == (60, 2)
    with pytest.raises(ValueError, match="not whole numbers"):
        fit(single, [(x, (y > 0).double()[:, None] * 0.9 + 0.05)], task="classes")
    soft = nn.Sequential(trained(x, y, 3, steps=5), nn.Softmax(1))
    with pytest.raises(ValueError, match="returns probabilities"):
        fit(soft, [(x, y)], head="0.4")


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(zip(*blobs(60), strict=True))


def test_loaders_without_a_length_and_tuples_of_batches(classes):
    network, head = classes
    fit(network, DataLoader(Endless(), 20))
    fit(network, tuple(loader(*blobs(60))))
    with pytest.raises(ValueError, match="at least one row"):
        head.predict(blobs(5)[0][:0])
    with pytest.raises(ValueError, match="must be a tensor, a dictionary or a loader, got ndarray"):
        head.predict(np.zeros((3, 2)))


def test_a_head_can_be_copied_and_a_changed_network_is_noticed(classes, tmp_path):
    network, head = classes
    new = blobs(20, 4)[0]
    for again in (copy.deepcopy(head), pickle.loads(pickle.dumps(head))):
        assert torch.equal(again.ood_score(new), head.ood_score(new))
    path = head.save(tmp_path / "head.bochner")
    other = copy.deepcopy(network)
    other[0].weight.data += 1
    with pytest.raises(ModelFileError, match="made for another network"):
        StationaryHead.load(path, other)
    moved = copy.deepcopy(network)
    own = fit(moved, loader(*blobs(60)))
    moved.float()
    with pytest.raises(ValueError, match=r"was moved from cpu, torch\.float64 to cpu, torch\.float32"):
        own.predict(new)
    locked = copy.deepcopy(network)
    locked.lock = threading.Lock()
    with pytest.raises(ValueError, match="could not be copied"):
        fit(locked, loader(*blobs(60)))


# ------------------------------------------------------------------ rows that come often, features without direction, and ends


def tens(n, seed=0):
    """Rows of ten different kinds, each with its own share of class 1."""
    rng = np.random.default_rng(seed)
    kind = rng.integers(0, 10, n)
    x = nn.functional.one_hot(torch.from_numpy(kind), 10).double()
    return x, torch.from_numpy((rng.random(n) < np.linspace(0.05, 0.95, 10)[kind]).astype(int))


@pytest.mark.parametrize("held_out", [False, True])
def test_rows_that_come_a_thousand_times_are_known(held_out):
    x, y = tens(9000)
    network = trained(x, y, 2)
    head = fit(network, loader(x, y), *([loader(*tens(3000, 1))] if held_out else []))
    new, labels = tens(3000, 2)
    assert float(head.variance_left(new).max()) < 0.01
    assert float((head.ood_score(new) > head.threshold).double().mean()) < 0.1
    plain = torch.log_softmax(network(new), 1).gather(1, labels[:, None]).mean()
    assert float(head.predict(new).log_prob(labels).mean()) > float(plain) - 0.01
    assert float(head.variance_left(10 * torch.ones(1, 10)).min()) > 0.1  # a kind that never came


def test_equal_rows_of_a_sample_count_and_are_expanded_evenly():
    x, y = torch.tensor([[1.0], [2.0], [1.0], [1.0], [3.0]]), torch.tensor([0, 1, 0, 1, 1])
    network = nn.Sequential(nn.Linear(1, 2))
    reader = Reader(Tapped(network, "0"), classes=True)
    rows = sample_rows(reader.rows([(x, y)], "", progress=False), 100)
    found = sorted(zip(rows.features[:, 0].tolist(), rows.targets.tolist(), rows.counts.tolist(), strict=True))
    assert found == [(1.0, 0, 2), (1.0, 1, 1), (2.0, 1, 1), (3.0, 1, 1)]
    assert sorted(rows.expanded(100).features[:, 0].tolist()) == [1.0, 1.0, 1.0, 2.0, 3.0]
    assert len(rows.expanded(3)) == 3
    anchors, known = rows.parted(100)
    assert sorted(anchors.features[:, 0].tolist()) in ([1.0, 2.0], [1.0, 3.0])  # what repeats, and half of the others
    assert 1.0 in known.features
    assert len(known) == 3


def test_a_few_rows_without_features_do_not_hide_what_is_far():
    x, y = blobs(800)
    x[:16] = 0
    torch.manual_seed(0)
    network = learnt(nn.Sequential(nn.Linear(2, 8, bias=False), nn.ReLU(), nn.Linear(8, 3)), x, y)
    head = fit(network, loader(x, y), loader(*blobs(400, 1)))
    far = 1e4 * blobs(200, 2)[0]
    assert float((head.ood_score(far) > head.threshold).double().mean()) > 0.95
    assert float(head.predict(far).confidence.max()) < 0.4


@pytest.mark.parametrize("end", ["linear", "sigmoid"])
def test_single_numbers_are_features_without_direction(end, tmp_path):
    x, y = blobs(400)
    ends = {"linear": nn.Identity(), "sigmoid": nn.Sigmoid()}
    torch.manual_seed(0)
    network = learnt(nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1), ends[end], nn.Linear(1, 3)), x, y)
    head = fit(network, loader(x, y), loader(*blobs(400, 1)))
    new, labels = blobs(400, 2)
    plain = float(torch.log_softmax(network(new), 1).gather(1, labels[:, None]).mean())
    assert float(head.predict(new).log_prob(labels).mean()) > plain - 0.02
    if end == "linear":
        assert float(head.predict(1e3 * new).confidence.median()) < 0.5
    again = StationaryHead.load(head.save(tmp_path / "head"), network)
    torch.testing.assert_close(again.ood_score(new), head.ood_score(new), rtol=0, atol=0)


def test_a_network_that_ends_in_log_softmax_is_one_with_logits():
    x, y = blobs(400)
    network = trained(x, y, 3)
    ended = nn.Sequential(*network, nn.LogSoftmax(1))
    rows = loader(x, y), loader(*blobs(400, 1))
    plain, same = fit(network, *rows), fit(ended, *rows)
    new = blobs(100, 2)[0]
    torch.testing.assert_close(same.ood_score(new), plain.ood_score(new))
    torch.testing.assert_close(same.predict(new).probabilities, plain.predict(new).probabilities)


def test_a_good_regression_keeps_its_error_and_one_that_has_learnt_noise_is_shrunk():
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(900, 4))).float()
    signal, noise = x.sum(1, keepdim=True), torch.from_numpy(rng.normal(size=(900, 1))).float()
    good = nn.Sequential(nn.Linear(4, 1)).requires_grad_(False)
    good[0].weight.copy_(torch.ones(1, 4))
    good[0].bias.zero_()
    train, held, test = slice(300), slice(300, 600), slice(600, 900)
    y = signal + 0.1 * noise
    head = fit(good, loader(x[train], y[train]), loader(x[held], y[held]))
    error = (head.predict(x[test]).mean - y[test]).square().mean().sqrt()
    assert float(error) < 1.5 * float((good(x[test]) - y[test]).square().mean().sqrt())
    wild = nn.Sequential(nn.Linear(4, 1)).requires_grad_(False)
    wild[0].weight.copy_(torch.ones(1, 4))
    wild[0].bias.zero_()
    pure = 0.3 * signal + noise
    shrunk = fit(wild, loader(x[train], pure[train]), loader(x[held], pure[held]))
    network_error = (wild(x[test]) - pure[test]).square().mean().sqrt()
    assert float((shrunk.predict(x[test]).mean - pure[test]).square().mean().sqrt()) < 0.95 * float(network_error)


def test_a_head_of_a_network_that_was_trained_further_is_not_written(tmp_path):
    network = trained(*blobs(400), 3)
    head = fit(network, loader(*blobs(400)))
    with torch.no_grad():
        network[0].weight.add_(0.1)
    with pytest.raises(ValueError, match="The network has changed since the head was fitted"):
        head.save(tmp_path / "head")
    assert not (tmp_path / "head").exists()


def test_networks_of_two_types_compiled_and_scripted_ones():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(2, 16).bfloat16(), nn.Linear(16, 3)

        def forward(self, x):
            return self.last(torch.relu(self.first(x)).float())

    x, y = blobs(200)
    head = fit(Mixed(), [(x.bfloat16(), y)])
    assert head.ood_score(x.bfloat16()).shape == (200,)
    network = trained(x, y, 3)
    wrapped = torch.compile(network, backend="eager")
    torch.testing.assert_close(
        fit(wrapped, loader(x, y)).ood_score(x), fit(network, loader(x, y)).ood_score(x), rtol=0, atol=0
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates tracing
        scripted = torch.jit.trace(network, x[:2])
    with pytest.raises(ValueError, match="scripted or traced one hides its layers"):
        fit(scripted, loader(x, y))


def test_batches_of_nested_inputs_are_those_that_pytorch_gathers():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = trained(*blobs(300), 3)

        def forward(self, a, b):
            return self.inner(a + b)

    x, y = blobs(300)
    network = Sum()
    flat = fit(network, [(x, 0 * x, y)])
    for batch in (((x, 0 * x), y), ({"a": x, "b": 0 * x}, y), ([x, 0 * x], y)):
        torch.testing.assert_close(fit(network, [batch]).ood_score((x, 0 * x)), flat.ood_score((x, 0 * x)))
