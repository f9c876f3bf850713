"""The command line as a process: signals, workers, forks, and streams that are closed or full."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bochner.files import replacing, write_text

posix = pytest.mark.skipif(sys.platform == "win32", reason="signals and forks are of POSIX")


@pytest.fixture(autouse=True)
def _heed_interrupts():
    """Commands heed Ctrl-C as in a terminal: a process started in the background of a shell ignores it, and so do its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def python(*words, **options):
    return subprocess.Popen(
        [sys.executable, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def until(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.02)


def is_alive(number):
    """Whether a process runs; one that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# ------------------------------------------------------------------ signals

# In the place of torch and of the networks, which each of a sweep's three processes would import for seconds. Python imports
# a module of the name sitecustomize when it starts, in the workers too.
STAND_INS = """
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

def stand_in(name, **contents):
    sys.modules[name] = ModuleType(name)
    vars(sys.modules[name]).update(contents)

@dataclass
class Config:
    experiment: str
    protocol: str
    seed: int
    folds: tuple
    device: str
    posterior: str = "kfac"

models = dict.fromkeys(["relu", "rbf-sin", "rbf-tri"])
cuda = SimpleNamespace(is_available=lambda: False)
stand_in("torch", get_num_threads=lambda: 1, set_num_threads=lambda number: None, cuda=cuda)
stand_in("bochner.experiments.uci.kfac", SETS={"uci-regression": ["boston"]}, run_set=None)
stand_in("bochner.experiments.uci.protocols", Config=Config, FOLDS=range(10))
stand_in("bochner.experiments.zoo", MODELS=models, by_activation=list)
stand_in("bochner.reports.drawing", draw=None)
"""
SWEEP = """
import os, sys, time
from pathlib import Path
from bochner.cli import start
from bochner.datasets import Check
from bochner.experiments.uci import sweep

def work(process, config, name, models):
    process.prepare()
    if models == ["relu"]:
        unit = {"experiment": "uci-regression", "protocol": "bochner", "posterior": "kfac", "set": name, "model": "relu"}
        return [{**unit, "seed": 0, "fold": 0, "folds": [0], "status": "ok", "nlpd": 1.0, "rmse": 1.0, "seconds": 0.0}]
    Path(sys.argv[-1], str(os.getpid())).touch()
    time.sleep(600)

sweep.datasets.check = lambda name: Check(name, "ok", "")
sweep._work = work
start()
"""


@posix
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes through /proc")
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGKILL", -9)])
def test_workers_of_a_sweep_end_with_their_parent(name, code, tmp_path, monkeypatch):
    """Also Ctrl-C, which a terminal sends to all processes of the command. Rows that are made are kept.

    With SIGTERM torch and the settings of the sweep are the real ones.
    """
    (tmp_path / "sweep.py").write_text(SWEEP)
    if name != "SIGTERM":
        (tmp_path / "sitecustomize.py").write_text(STAND_INS)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    workers = tmp_path / "workers"
    workers.mkdir()
    options = ["--sets", "boston", "--models", "relu,rbf-sin,rbf-tri", "--folds", "0", "--workers", "2"]
    command = ["run", "uci-regression", *options, "--out", workers]
    process = python(tmp_path / "sweep.py", *command, start_new_session=True)
    until(lambda: process.poll() is not None or len(list(workers.glob("[0-9]*"))) == 2)
    until(lambda: process.poll() is not None or (workers / "uci-regression.jsonl").exists())
    numbers = [int(path.name) for path in workers.glob("[0-9]*")]
    assert len(numbers) == 2, process.communicate()
    assert all(map(is_alive, numbers))
    if name == "SIGINT":
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(getattr(signal, name))
    until(lambda: not any(map(is_alive, numbers)), 30)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stderr
    assert "relu" in stdout
    assert "Traceback" not in stderr
    if code > 0:
        way = {130: "Ctrl-C", 143: "SIGTERM"}[code]
        # joblib's tracker of semaphores gets Ctrl-C too, and in a rare race warns of one that is gone already.
        said = [line for line in stderr.splitlines() if not re.search(r"resource_tracker|^  warnings\.warn\(", line)]
        assert said == [f"Stopped by {way}. Kept: {workers}. The same command makes the rows that are missing."]


INTERRUPTED_IMPORT = """
import os, signal, sys
from bochner.cli import start

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.{signal})

sys.meta_path.insert(0, Interrupt())
start()
"""


@posix
@pytest.mark.parametrize(
    ("module", "name"), [("typer", "SIGINT"), ("numpy", "SIGINT"), ("torch._C", "SIGTERM"), ("sklearn.base", "SIGINT")]
)
def test_a_signal_during_an_import_is_one_line(module, name, tmp_path):
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    code = INTERRUPTED_IMPORT.format(module=module, signal=name)
    process = python("-c", code, "fit", "t.csv", "--target", "b", cwd=tmp_path)
    stdout, stderr = process.communicate(timeout=120)
    way, number = {"SIGINT": ("Ctrl-C", 130), "SIGTERM": ("SIGTERM", 143)}[name]
    assert (process.returncode, stdout) == (number, "")
    assert stderr == f"Stopped by {way}. Nothing was written. To do it, run the command again.\n"
    assert [path.name for path in tmp_path.iterdir()] == ["t.csv"]


WRITER = """
import sys, time
from pathlib import Path
from bochner.files import replacing
with replacing(Path(sys.argv[1])) as part:
    part.write_text("half")
    print("ready", flush=True)
    time.sleep(600)
"""


@posix
def test_leftovers_of_killed_writers_are_removed_and_those_of_living_ones_are_not(tmp_path):
    path = tmp_path / "[a]*.txt"
    foreign = tmp_path / ".[a]*.txt.notes.tmp"
    foreign.write_text("of someone else")
    process = python("-c", WRITER, path)
    assert process.stdout.readline() == "ready\n"
    write_text(path, "first")
    assert len(list(tmp_path.iterdir())) == 3
    process.kill()
    process.communicate()
    write_text(path, "second")
    assert sorted(tmp_path.iterdir()) == sorted([foreign, path])
    with replacing(path) as outer:  # two writers of one process
        outer.write_text("outer")
        write_text(path, "inner")
        assert outer.exists()
    assert path.read_text() == "outer"


# ------------------------------------------------------------------ forks

FORK = """
import os, sys, time
import numpy as np
import torch
import bochner
from bochner.training.threads import one_thread

torch.set_num_threads(1)  # the fits are not what is tested
x = np.random.default_rng(0).normal(size=(40, 2))
models = [
    bochner.StationaryRegressor(kernel="rbf", hidden_layer_sizes=(), random_state=0).fit(x, x[:, 0]),
    bochner.StationaryClassifier(kernel="rbf", hidden_layer_sizes=(), random_state=0).fit(x, x[:, 0] > 0),
]
layer = bochner.StationaryLayer(2, 64, generator=torch.Generator().manual_seed(0))
torch.set_num_threads(2)
many = np.random.default_rng(1).normal(size=(3000, 2))

def answers():
    output = layer(torch.from_numpy(many).float())
    output.square().sum().backward()
    return [*(model.predict(many) for model in models), models[1].predict_proba(many), output.detach().numpy()]

expected = answers()
with one_thread():  # as if another thread were at work while this one forks
    child = os.fork()
if child == 0:
    same = all(np.allclose(a, b, atol=1e-5) for a, b in zip(answers(), expected))
    os._exit(0 if same and torch.get_num_threads() == 1 else 3)
end = time.monotonic() + 120
while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
    if time.monotonic() > end:
        os.kill(child, 9)
        sys.exit("the forked process hangs")
    time.sleep(0.02)
sys.exit(os.waitstatus_to_exitcode(ended[1]))
"""


@posix
def test_estimators_and_layers_work_in_a_process_forked_after_torch_has_worked():
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    # Threads that have nothing to do sleep: where others are at work, waiting for them would take most of the time.
    environment |= {"PYTHONWARNINGS": "ignore::DeprecationWarning", "OMP_WAIT_POLICY": "passive"}
    process = python("-c", FORK, env=environment)
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stdout + stderr


# ------------------------------------------------------------------ streams


@posix
@pytest.mark.parametrize(
    ("redirection", "code", "message"),
    [
        (">&-", 1, "Standard output cannot be written: Bad file descriptor.\n"),
        (">/dev/full", 1, "Standard output cannot be written: No space left on device.\n"),
        ("2>&-", 0, ""),
        ("2>/dev/full", 0, ""),
        (">&- 2>&-", 1, ""),
        ("| true", 0, ""),
        ("| head -1", 0, ""),
        ("| grep -q boston", 0, ""),
    ],
)
def test_closed_and_full_streams_are_one_line(redirection, code, message):
    end = subprocess.run(
        ["bash", "-c", f"COLUMNS=0 {sys.executable} -m bochner.cli data list {redirection}"],
        capture_output=True,
        text=True,
    )
    assert (end.returncode, end.stderr) == (code, message)
