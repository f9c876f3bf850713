"""A head on a trained network beside laplace-torch and temperature scaling: one network, each in a process of its own.

    python -m venv peer && peer/bin/pip install torch==2.13.0 numpy && peer/bin/pip install --no-deps laplace-torch
    peer/bin/pip install asdfghjkl==0.1a4 backpack-for-pytorch curvlinops-for-pytorch torchmetrics opt_einsum
    BOCHNER_DATA=folder python benchmarks/laplace_torch.py --peer peer/bin/python

laplace-torch asks for a torchvision that does not import beside a CPU build of torch, and does without it: hence ``--no-deps``. The
network is that of ``benchmarks/attach.py digits``, seed 1. Each process measures seconds to fit and to predict 10,000 images, the
peak of memory beyond what it has before fitting, the test NLL and the AUROC of five sets of strange images. One row goes to
results/attach/laplace-torch.jsonl.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

COMMON = """
import json, resource, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
data = torch.load(sys.argv[1])
net = nn.Sequential(nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.ReLU(), nn.Conv2d(16, 32, 5, stride=2, padding=2), nn.ReLU(),
                    nn.Flatten(), nn.Linear(32 * 49, 128), nn.ReLU(), nn.Identity(), nn.Linear(128, 10))
net.load_state_dict(data["network"])
net.eval()
train, held = (DataLoader(TensorDataset(*data[part]), 1000) for part in ("train", "held_out"))
test, truth = data["test"]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

def auroc(inside, outside):
    both = torch.cat([inside, outside])
    ranks = torch.searchsorted(both.sort().values, outside.contiguous(), right=True).double()
    ranks = ranks / 2 + torch.searchsorted(both.sort().values, outside.contiguous()).double() / 2 + 0.5
    n = len(outside)
    return float((ranks.sum() - n * (n + 1) / 2) / (n * len(inside)))

def tell(fit, predict, probabilities, scores):
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    nll = -probabilities.double().log()[torch.arange(len(truth)), truth].mean()
    found = {k: auroc(scores["test"], v) for k, v in scores.items() if k != "test"}
    print(json.dumps({"fit_s": fit, "predict_s": predict, "more_memory_mib": (peak - before) / 1024, "nll": float(nll),
                      "accuracy": float((probabilities.argmax(1) == truth).double().mean()), "auroc": found}))
"""

OURS = """
from bochner import StationaryHead
start = time.perf_counter()
head = StationaryHead.fit(net, train, held, progress=False)
fit = time.perf_counter() - start
start = time.perf_counter()
answer = head.predict(test)
predict = time.perf_counter() - start
tell(fit, predict, answer.probabilities, {k: head.ood_score(v) for k, v in ({"test": test} | data["strange"]).items()})
"""

LAPLACE_TORCH = """
from laplace import Laplace
start = time.perf_counter()
la = Laplace(net, "classification", subset_of_weights="last_layer", hessian_structure="kron")
la.fit(train)
la.optimize_prior_precision(method="marglik")
fit = time.perf_counter() - start
def answer(x):
    return torch.cat([la(part, link_approx="probit") for part in x.split(1000)]).detach()
start = time.perf_counter()
p = answer(test)
predict = time.perf_counter() - start
def entropy(p):
    return -torch.special.xlogy(p, p).sum(1)
tell(fit, predict, p, {k: entropy(answer(v)) for k, v in ({"test": test} | data["strange"]).items()})
"""

SCALING = """
start = time.perf_counter()
with torch.no_grad():
    logits, labels = (torch.cat(v) for v in zip(*((net(x), y) for x, y in held)))
log_t = torch.zeros((), requires_grad=True)
optimizer = torch.optim.LBFGS([log_t], max_iter=50)
def closure():
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(logits / log_t.exp(), labels)
    loss.backward()
    return loss
optimizer.step(closure)
fit = time.perf_counter() - start
def answer(x):
    with torch.no_grad():
        return torch.cat([torch.softmax(net(part) / log_t.exp(), 1) for part in x.split(1000)])
start = time.perf_counter()
p = answer(test)
predict = time.perf_counter() - start
tell(fit, predict, p, {k: -answer(v).max(1).values for k, v in ({"test": test} | data["strange"]).items()})
"""


def run_script(python: str, code: str, path: Path) -> dict:
    """What one process prints."""
    job = subprocess.run(
        [python, "-c", COMMON + code, str(path)], capture_output=True, text=True, env=os.environ.copy()
    )
    if job.returncode:
        sys.exit(f"{python} failed:\n{job.stderr[-2000:]}")
    return json.loads(job.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", required=True, help="the Python of an environment that has laplace-torch")
    parser.add_argument("--out", type=Path, default=Path("results/attach/laplace-torch.jsonl"))
    options = parser.parse_args()

    import torch
    from attach import HELD_OUT, digit_network, strange_digits

    from bochner.datasets import load_images
    from bochner.experiments.rows import add_rows, provenance

    images = load_images("mnist")
    x, test = (torch.from_numpy(part).float()[:, None] / 255 for part in (images.x_train, images.x_test))
    y, truth = (torch.from_numpy(part).long() for part in (images.y_train, images.y_test))
    net = digit_network(1, x[HELD_OUT:], y[HELD_OUT:])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "problem.pt"
        parts = {"train": (x[HELD_OUT:], y[HELD_OUT:]), "held_out": (x[:HELD_OUT], y[:HELD_OUT]), "test": (test, truth)}
        torch.save(parts | {"network": net.state_dict(), "strange": strange_digits(test)}, path)
        results = {
            "StationaryHead": run_script(sys.executable, OURS, path),
            "laplace-torch": run_script(options.peer, LAPLACE_TORCH, path),
            "temperature scaling": run_script(sys.executable, SCALING, path),
        }
    for name, row in results.items():
        print(
            name,
            {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()},
            "worst",
            min(row["auroc"].values()),
        )
    rows = [{"method": name, "seed": 1, **row, **provenance("cpu")} for name, row in results.items()]
    add_rows(options.out, rows, lambda row: (row["method"],))


if __name__ == "__main__":
    main()
