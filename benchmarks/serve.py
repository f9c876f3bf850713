"""Speed of `bochner serve` with 32 clients, beside the estimator called directly; bad requests; and its end after SIGTERM.

    OMP_NUM_THREADS=1 python benchmarks/serve.py [--model model.bochner --table rows.csv] [--out results/benchmarks/serve.jsonl]

Without a model one is fitted to 1,500 generated rows. 1,000 requests of a row each and 64 of a thousand rows each, from 32 clients
that keep their connections; 50 malformed requests; eight large requests in flight when SIGTERM comes. Adds one row to the file. A
request that is lost, a malformed one that is not refused, or another exit code than 143 is an error. Takes about a minute.
"""

import argparse
import http.client
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bochner.experiments.rows import Row, add_rows, provenance
from bochner.storage import load, save
from bochner.tables.estimators import TableRegressor
from bochner.tables.fitting import predict_rows
from bochner.training.threads import one_thread

CLIENTS = 32
ONE_ROW_REQUESTS = 1000
LARGE_REQUESTS = 64
LARGE_ROWS = 1000
MALFORMED = 50
IN_FLIGHT = 8  # large requests that are unanswered when SIGTERM comes
HEADERS = {"Content-Type": "application/json"}


def generated(rows: int, seed: int) -> pd.DataFrame:
    """A table of ten numbers, a category and a date, with a target y."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({f"x{i}": rng.normal(size=rows).round(4) for i in range(10)})
    frame["kind"] = rng.choice(["flat", "house", "loft"], rows)
    days = pd.to_timedelta(rng.integers(0, 700, rows), unit="D")
    frame["sold"] = pd.DatetimeIndex(pd.Timestamp("2024-01-01") + days).strftime("%Y-%m-%d")
    mean = frame["x0"] + np.sin(2 * frame["x1"]) + (frame["kind"] == "loft")
    return frame.assign(y=np.exp(0.5 * mean + 0.2 * rng.normal(size=rows)))


def as_body(frame: pd.DataFrame) -> bytes:
    return json.dumps(frame.astype(object).where(frame.notna(), None).to_dict("records")).encode()


class Server:
    """A server process of a model."""

    def __init__(self, model: Path) -> None:
        command = [sys.executable, "-m", "bochner.cli", "serve", str(model), "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline().rsplit(":", 1)[1].split(";")[0])

    def connect(self) -> http.client.HTTPConnection:
        """A connection of a client."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)


def post(
    connection: http.client.HTTPConnection, body: bytes, path: str = "/predict", **headers: str
) -> tuple[int, bytes]:
    connection.request("POST", path, body, HEADERS | headers)
    answer = connection.getresponse()
    return answer.status, answer.read()


def load_test(server: Server, bodies: Sequence[bytes], rows: int, clients: int) -> Row:
    """Latencies and rows a second where each client sends one request after another until all bodies are answered."""
    todo, lock, seconds, lost = iter(bodies), threading.Lock(), [], Counter()

    def client() -> None:
        connection = server.connect()
        while True:
            with lock:
                body = next(todo, None)
            if body is None:
                break
            began = time.perf_counter()
            try:
                status, answer = post(connection, body)
                good = status == 200 and answer.count(b'"mean":') + answer.count(b'"predicted":') == rows
            except OSError:
                good = False
            seconds.append(time.perf_counter() - began)
            lost[not good] += 1
        connection.close()

    threads = [threading.Thread(target=client) for _ in range(clients)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total = time.perf_counter() - began
    p50, p99 = np.quantile(seconds, (0.5, 0.99)).tolist()
    if lost[True] or len(seconds) != len(bodies):
        raise SystemExit(f"{lost[True]} of {len(bodies)} requests were lost.")
    return {
        "requests": len(bodies),
        "clients": clients,
        "p50_ms": 1e3 * p50,
        "p99_ms": 1e3 * p99,
        "rows_per_s": rows * len(bodies) / total,
    }


def timed(work: Callable[[], Any], seconds: float) -> float:
    """Median time of a call, repeated for some seconds."""
    times, end = [], time.perf_counter() + seconds
    work()
    while len(times) < 3 or time.perf_counter() < end:
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return float(np.median(times))


def direct(estimator: Any, frame: pd.DataFrame) -> Row:
    """Times of the estimator called directly on one thread: by its methods, and in one pass as the server does."""

    def methods() -> None:
        if hasattr(estimator, "predict_proba"):
            estimator.predict_proba(frame)
        else:
            estimator.predict(frame, return_std=True)
            estimator.predict_interval(frame)
        estimator.ood_score(frame)

    with one_thread():
        one_pass = timed(lambda: predict_rows(estimator, estimator.table_.transform(frame), 0.9), 2)
        return {"direct_ms": 1e3 * timed(methods, 2), "direct_one_pass_ms": 1e3 * one_pass}


def malformed(row: dict[str, Any], count: int) -> list[tuple[bytes, dict[str, str]]]:
    """Requests that must be refused: bodies with headers."""
    rng, good = random.Random(0), json.dumps(row)
    first = next(iter(row))
    cases: list[tuple[bytes, dict[str, str]]] = [
        (good.encode(), {"Content-Type": "text/plain"}),
        (b" " * 10_000_001, {}),
        (json.dumps([row] * 10_001).encode(), {}),
        *((text.encode(), {}) for text in ("", "[]", "5", "null", "[NaN]", "[1e999]", "[" * 10**5, '{"a":1,"a":2}')),
        *((json.dumps({**row, first: value}).encode(), {}) for value in ([], {}, "much", True, 10**400)),
        (json.dumps({name: row[name] for name in row if name != first}).encode(), {}),
        (b"\xff\xfe" + good.encode(), {}),
    ]
    while len(cases) < count:
        cases.append((good[: rng.randrange(1, len(good))].encode(), {}))
    return cases


def check_malformed(server: Server, row: dict[str, Any]) -> Row:
    """Sends malformed requests; each must be refused in a sentence, and the server must answer afterwards."""
    statuses: Counter[int] = Counter()
    for body, headers in malformed(row, MALFORMED):
        connection = server.connect()
        status, answer = post(connection, body, **headers)
        connection.close()
        if not (400 <= status < 500 and json.loads(answer)["error"]):
            raise SystemExit(f"The malformed body {body[:60]!r} got {status}: {answer[:200]!r}")
        statuses[status] += 1
    if post(server.connect(), json.dumps(row).encode())[0] != 200:
        raise SystemExit("The server does not answer after malformed requests.")
    return {"malformed": sum(statuses.values()), "malformed_statuses": {str(s): n for s, n in sorted(statuses.items())}}


def check_end(server: Server, body: bytes) -> Row:
    """Sends SIGTERM while large requests are in flight; all must be answered."""
    statuses: list[int] = []
    threads = [
        threading.Thread(target=lambda: statuses.append(post(server.connect(), body)[0])) for _ in range(IN_FLIGHT)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.5)  # until the bodies have been sent; the answers take longer
    unanswered = IN_FLIGHT - len(statuses)
    server.process.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join()
    code = server.process.wait(60)
    if statuses != [200] * IN_FLIGHT or code != 128 + signal.SIGTERM:
        raise SystemExit(f"After SIGTERM: statuses {statuses}, exit code {code}.")
    return {"in_flight_at_sigterm": unanswered, "in_flight_lost": 0, "exit_code": code}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--table", type=Path, default=None, help="rows for the model, where one is given")
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/serve.jsonl"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model
        if model is None:
            rows = generated(1500, 0)
            estimator = TableRegressor(hidden_layer_sizes=(), random_state=0).fit(rows.drop(columns="y"), rows["y"])
            model, frame = save(Path(folder) / "generated.bochner", estimator), generated(LARGE_ROWS, 1)
        else:
            frame = pd.read_csv(options.table)
        estimator = load(model, device="cpu").estimator
        names = [column.name for column in estimator.table_.used]
        frame = frame[names].iloc[np.arange(LARGE_ROWS) % len(frame)].reset_index(drop=True)
        one_row = [as_body(frame.iloc[[number]]) for number in range(LARGE_ROWS)]
        large, mixture = as_body(frame), estimator.estimator_.mixtures_[0]
        heads = sorted(Counter(len(member.head.features.anchors) for member in mixture.members).items())
        server = Server(model)
        results: Row = {
            "one_row": load_test(
                server, list(itertools.islice(itertools.cycle(one_row), ONE_ROW_REQUESTS)), 1, CLIENTS
            ),
            "one_row_one_client": load_test(server, one_row[:200], 1, 1),
            "large": load_test(server, [large] * LARGE_REQUESTS, LARGE_ROWS, CLIENTS),
        }
        results["one_row"] |= direct(estimator, frame.iloc[:1])
        results["large"] |= direct(estimator, frame)
        results |= check_malformed(server, json.loads(one_row[0])[0]) | check_end(server, large)
    libraries = {name: version(name) for name in ("fastapi", "uvicorn")}
    head: Row = {"benchmark": "serve", "model": model.name, "columns": len(names), "anchors_and_members": heads}
    row = head | provenance("cpu") | libraries | {"threads": os.environ.get("OMP_NUM_THREADS")} | results
    add_rows(options.out, [row], lambda r: (r["model"], r["commit"] or ""))
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
