"""Loaders in place of tensors: the same numbers, from one process or from two; and what is said of a bad loader."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bochner import (
    Categorical,
    ClosedForm,
    ClosedFormClassifier,
    Laplace,
    Model,
    Recipe,
    StationaryLayer,
    Swag,
    fit_map,
    swap_head,
)
from bochner.networks import SeededDropout
from bochner.posteriors.swag import Snapshots
from bochner.training.map import sgd
from problems import classification, data, one_of_two, regression


def loader(x, y, size=7):
    return DataLoader(TensorDataset(x, y), size)


def as_dictionaries(x, y):
    return [{"pixels": x[:9], "labels": y[:9]}, {"pixels": x[9:], "labels": y[9:]}]


@pytest.mark.parametrize("make", [loader, as_dictionaries])
def test_posteriors_of_a_loader_are_those_of_tensors(make):
    x, y = data(25)
    new = data(11, seed=3)[0]
    model = regression(hidden=(5, 4), output_bias=True, amplitude=1.3)
    for kind in (ClosedForm, Laplace):
        expected, found = kind(model, x, y).predict(new), kind(model, make(x, y)).predict(loader(new, new, 4))
        for name in ("mean", "f_variance", "std"):
            torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-9, atol=1e-11)
    more = ClosedForm(model, make(x[:10], y[:10]))
    more.update(make(x[10:], y[10:]))
    torch.testing.assert_close(more.mean, ClosedForm(model, x, y).mean, rtol=1e-9, atol=1e-11)


def test_classes_of_a_loader_are_those_of_tensors():
    (x, y), new = data(40, classes=3), data(11, seed=3)[0]
    model = classification(hidden=(5, 4), amplitude=1.5)
    for kind in (ClosedFormClassifier, Laplace):
        options = {} if kind is Laplace else {"generator": torch.Generator().manual_seed(0)}
        expected = kind(model, x, y, **options)
        if options:
            options["generator"].manual_seed(0)
        found = kind(model, loader(x, y), **options)
        torch.testing.assert_close(
            found.predict(new).probabilities, expected.predict(new).probabilities, rtol=1e-6, atol=1e-8
        )
        found.predict(loader(new, new, 4))


def test_labels_and_float32_inputs_are_moved_to_what_the_model_takes():
    x, y = data(25)
    model = regression()
    torch.testing.assert_close(
        ClosedForm(model, loader(x.float(), y.float())).mean, ClosedForm(model, x, y).mean, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("size", [30, 10])
def test_training_from_a_loader_is_the_plain_loop(size):
    """Against gradient steps on the log joint, written out; a stack sees the same batches as each network alone."""
    x, y = data(30)
    stack = [regression(seed, hidden=(5, 4)) for seed in (0, 1)]
    fit = fit_map(stack, loader(x, y, size), recipe=Recipe(3, optimizer=sgd, lr=1e-3))
    assert fit.loss.shape == (3, 2)
    for seed, trained in enumerate(stack):
        alone = regression(seed, hidden=(5, 4))
        optimizer = torch.optim.SGD(alone.parameters(), 1e-3, momentum=0.9)
        for _ in range(3):
            for xb, yb in loader(x, y, size):
                optimizer.zero_grad()
                (-alone.log_joint(xb, yb, num_data=30) / 30).backward()
                optimizer.step()
        for (name, p), q in zip(trained.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11, msg=name)


def test_swag_of_a_loader_is_that_of_tensors_in_their_order():
    """Whole batches, so that no shuffle matters; BatchNorm statistics of a draw come from the loader too."""
    x, _ = data(30)

    def make():
        layer = StationaryLayer(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        torch.manual_seed(0)
        extractor = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
        return Model(layer, 2, Categorical(), extractor=extractor, generator=torch.Generator().manual_seed(2))

    labels = (x[:, 0] > 0).long()
    options = Snapshots(lr=1e-2, epochs=4, rank=2, batch_size=30)
    expected, found = Swag(make(), x, labels, options), Swag(make(), loader(x, labels, 30), snapshots=options)
    for name, mean in expected.mean.items():
        torch.testing.assert_close(found.mean[name], mean, rtol=1e-9, atol=1e-11)
    predictions = [s.predict(x, 5, generator=torch.Generator().manual_seed(0)).probabilities for s in (expected, found)]
    torch.testing.assert_close(*predictions, rtol=1e-8, atol=1e-10)


SECOND_PROCESS = """
import os
import sys
sys.path.insert(0, "tests")
from test_loaders import *
torch.save(answers_of_a_process(1, sys.argv[1]), sys.argv[1] + ".second")
os._exit(0)  # gloo's threads may outlive the interpreter, which then aborts
"""


def answers_of_a_process(rank, path):
    """What posteriors of all kinds say of networks that this process trains: alone, or as number ``rank`` of two."""

    def share(x, y, batch=10):
        # Every process gives its share of the batches that one process would see: unequal shares, of the last batch too.
        part = slice(rank, None, None if rank is None else 2)
        return [(xb[part], yb[part]) for xb, yb in zip(x.split(batch), y.split(batch), strict=True)]

    with one_of_two(rank, path):
        x, y = data(35)
        model = regression(seed=rank or 0, hidden=(5, 4))  # starts from what process 0 has
        fit = fit_map(model, share(x, y), recipe=Recipe(4, optimizer=sgd, lr=1e-2))
        found = [fit.loss.flatten(), *(p.detach().flatten() for p in model.parameters())]
        found += [ClosedForm(model, share(x, y)).mean.flatten(), Laplace(model, share(x, y)).predict(x).std.flatten()]
        x, y = data(45, classes=3)
        model = classification()
        generator = torch.Generator().manual_seed(0)
        closed = ClosedFormClassifier(model, share(x, y), generator=generator)
        found.append(closed.predict(x).probabilities.flatten())
        laplace = Laplace(model, share(x, y))
        laplace.tune_prior(share(*data(40, classes=3, seed=5)), multipliers=(0.1, 10.0, 1000.0))
        found.append(torch.tensor([laplace.temperature, *laplace.prior_multipliers]))
        laplace.tune_prior()
        found += [torch.tensor(laplace.prior_multipliers), laplace.predict(x).probabilities.flatten()]
        if rank is not None:
            with pytest.raises(ValueError, match=r"as many batches in every process.*got 3, 2"):
                fit_map(model, share(x, y)[: 3 - rank], recipe=Recipe(1))
    return torch.cat([f.double() for f in found])


def test_two_processes_equal_one(tmp_path):
    path = str(tmp_path / "found")
    second = subprocess.Popen([sys.executable, "-c", SECOND_PROCESS, path])
    one, first = answers_of_a_process(None, path), answers_of_a_process(0, path)
    assert second.wait(timeout=300) == 0
    for part in (first, torch.load(f"{path}.second")):
        torch.testing.assert_close(part, one, rtol=0, atol=1e-10)


# ------------------------------------------------------------------ networks of one's own


class Net(nn.Module):
    """A head that is nested and registered before what comes before it; dropout of both kinds, BatchNorm."""

    def __init__(self):
        super().__init__()
        self.top = nn.ModuleDict({"head": nn.Linear(12, 3)})
        self.body = nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout2d(0.3), nn.Flatten(), nn.Dropout(0.2)
        )

    def forward(self, x):
        return self.top["head"](self.body(x))


def test_a_network_with_dropout_and_batch_norm_trains_with_seeds_of_its_own():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 1, 4, 4, generator=generator), torch.randint(3, (60,), generator=generator)
    torch.manual_seed(0)
    models = [swap_head(Net(), width=20, head="top.head", generator=generator) for _ in range(2)]
    state = torch.get_rng_state()
    models[1].load_state_dict(models[0].state_dict())
    fit_map(models, [*zip(x.split(20), y.split(20), strict=True)], recipe=Recipe(3, lr=1e-2), seed=[1, 2])
    torch.testing.assert_close(torch.get_rng_state(), state, rtol=0, atol=0)
    assert not torch.equal(models[0].output.weight, models[1].output.weight)  # other masks
    for model in models:
        kinds = {type(module) for module in model.modules()}
        assert {nn.Dropout, nn.Dropout2d} <= kinds
        assert SeededDropout not in kinds
        assert not any(module.training for module in model.modules())


def test_masks_of_channels_drop_whole_channels():
    layer = SeededDropout(0.5, 3, 1, 1)
    layer.mask = torch.tensor([[0.0, 2.0, 2.0], [2.0, 0.0, 2.0]])
    x = torch.ones(2, 3, 4, 4)
    expected = torch.tensor([[0.0, 2.0, 2.0], [2.0, 0.0, 2.0]])[:, :, None, None].expand(2, 3, 4, 4)
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's own, of weight norm under vmap
def test_a_network_with_weight_norm_trains():
    torch.manual_seed(0)
    norm = nn.utils.parametrizations.weight_norm
    network = nn.Sequential(norm(nn.Linear(3, 8)), nn.ReLU(), norm(nn.Linear(8, 3))).double()
    x, y = data(40, classes=3)
    model = swap_head(network, width=12)
    before = model.log_joint(x, y).item()
    fit_map(model, x, y, Recipe(5, 20, lr=1e-2))
    assert model.log_joint(x, y).item() > before
    assert torch.equal(network[0].weight, network[0].weight)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
def test_the_older_weight_norm_can_be_copied():
    network = nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 8)), nn.Linear(8, 3)).double()
    x = data(5)[0]
    torch.testing.assert_close(swap_head(network, width=4).extractor(x), network[0](x))


@pytest.mark.parametrize("kind", ["lstm", "transformer"])
def test_a_network_that_cannot_be_stacked_trains_alone(kind):
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            lstm = kind == "lstm"
            self.inner = (
                nn.LSTM(3, 4, batch_first=True) if lstm else nn.TransformerEncoderLayer(3, 1, 4, batch_first=True)
            )

        def forward(self, x):
            found = self.inner(x)
            return (found[0] if kind == "lstm" else found)[:, -1]

    torch.manual_seed(0)
    x, y = torch.randn(40, 5, 3), torch.arange(40) % 2
    model = Model(StationaryLayer(4 if kind == "lstm" else 3, 8), 2, Categorical(), extractor=Last())
    fit = fit_map(model, x, y, Recipe(3, 20, lr=1e-2))
    assert not fit.diverged.any()
    assert fit.loss[-1] < fit.loss[0]


def test_batch_norm_and_a_last_batch_of_one_row():
    x, _ = data(33)
    labels = (x[:, 0] > 0).long()
    extractor = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    model = Model(StationaryLayer(4, 6, dtype=torch.float64), 2, Categorical(), extractor=extractor)
    swag = Swag(model, x, labels, Snapshots(lr=1e-3, epochs=3, rank=2, batch_size=16))
    prediction = swag.predict(loader(x, labels, 10), 4)
    torch.testing.assert_close(prediction.probabilities, swag.predict(x, 4).probabilities, rtol=1e-9, atol=1e-11)


# ------------------------------------------------------------------ bad loaders


def nan(x):
    return torch.where(torch.arange(len(x))[:, None] == 3, torch.nan, x)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda x, y: iter([(x, y)]),
            "can be gone through more than once, such as a DataLoader or a list; got a list_iterator",
        ),
        (lambda x, y: [], "must give at least one batch, got none"),  # noqa: ARG005
        (lambda x, y: [x], r"must hold targets: \(x, y\), or a dictionary .*got inputs alone"),  # noqa: ARG005
        (lambda x, y: [{"a": x}], "got a dictionary of 'a'"),  # noqa: ARG005
        (lambda x, y: [(x, x, y)], "Batch 0 must hold one tensor of inputs, for a Model takes one; got 2 values"),
        (lambda x, y: [("text", y)], "a dictionary, or a pair of inputs and targets, got tuple"),  # noqa: ARG005
        (lambda x, y: [(x, y), (nan(x), y)], "Batch 1 of the loader: The x parameter must be finite, got 3 NaN"),
        (lambda x, y: [(x, y + 3)], "Batch 0 of the loader: The y parameter must hold labels from 0 to 2, got 3 to 5"),
        (lambda x, y: [(x, y[:5])], "Batch 0 of the loader: .* same number of rows, at least 1, got 25 and 5"),
        (lambda x, y: [(x, 0 * y)], "loader must give at least two classes, got only class 0"),
        (lambda x, y: 5, "can be gone through more than once, .* got a int"),  # noqa: ARG005
    ],
)
@pytest.mark.parametrize("kind", [ClosedFormClassifier, Laplace, fit_map])
def test_a_bad_loader_is_named(make, message, kind):
    x, y = data(25, classes=3)
    with pytest.raises(ValueError, match=message):
        kind(classification(), make(x, y))


def test_other_bad_arguments():
    x, y = data(25)
    model = regression()
    with pytest.raises(ValueError, match="y parameter must be given beside a tensor x; or give a loader"):
        ClosedForm(model, x)
    with pytest.raises(ValueError, match="rows parameter needs tensors"):
        fit_map(model, loader(x, y), rows=torch.zeros(1, 5, dtype=torch.long))
    posterior = ClosedForm(model, x, y)
    with pytest.raises(ValueError, match="x parameter must be a tensor or a loader, got int instead"):
        posterior.predict(5)
    with pytest.raises(ValueError, match="x parameter must be a tensor or a loader, got tuple instead"):
        posterior.predict((x, y))
    with pytest.raises(ValueError, match="x parameter must give at least one batch, got none"):
        posterior.predict([])
    with pytest.raises(ValueError, match="amplitude parameter must be positive and finite, got 0 instead"):
        regression(amplitude=0)
