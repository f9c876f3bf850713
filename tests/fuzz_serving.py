"""Fuzzes the service: hostile requests to a real server on a socket, in this process.

    python tests/fuzz_serving.py --seconds 60 --seed 0

Most are HTTP with a body made of good rows and odd values, cut or edited; some are no HTTP at all. Every request that is HTTP
must get one answer: 200 with a finite prediction or an error for each row, or a status from 400 to 499 with one JSON sentence.
After every hundred requests the server must answer a good row. Prints counts by class; exit code 1 on a violation.
"""

import argparse
import contextlib
import json
import math
import random
import socket
import sys
import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import pandas as pd
import uvicorn

from bochner.serving.app import make_app
from bochner.serving.server import address_of, bind, listen
from bochner.tables.estimators import TableClassifier, TableRegressor

SLOW_SECONDS = 30.0  # a request that takes longer counts as a hang
VALUES = [
    None,
    True,
    False,
    0,
    -1,
    1.5,
    -0.0,
    1e308,
    1e-320,
    10**400,
    2**63,
    "",
    " ",
    "12",
    "1,5",
    "1.234",
    "$1,200",
    "nan",
]
VALUES += [
    "inf",
    "1e400",
    "٣",
    "\ud800",
    "\x00",
    "\u202e",
    "loft",
    "a" * 10_000,
    "31.12.2024",
    "2024-13-45",
    "yes",
    "+",
    "-",
]
VALUES += [[], {}, [[1]], {"a": None}, [None] * 50]
RAW = [
    b"NaN",
    b"-Infinity",
    b"1e999",
    b"\xff",
    b"'",
    b"[" * 5000,
    b'{"a":' * 5000,
    b"9" * 5000,
    b",",
    b"//",
    b"\x00",
    b'"\\ud83d"',
]
KEYS = ["", "colour", "y", "__proto__", "é", "n" * 500, "half\udcff", "a\nb"]
PATHS = [
    "/predict",
    "/predict?coverage=0.5",
    "/predict?coverage=nan",
    "/predict?coverage=1e400",
    "/predict?coverage=0.9&coverage=2",
]
PATHS += [
    "/predict?coverage=%ff",
    "/predict/",
    "//predict",
    "/health",
    "/model",
    "/metrics",
    "/openapi.json",
    "/docs",
    "/%00",
    "/" + "a" * 3000,
]
KINDS = ["application/json"] * 8 + [
    "application/json; charset=utf-16",
    "APPLICATION/JSON",
    "text/plain",
    "",
    "multipart/form-data",
]
POST = b"POST /predict HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"


def models() -> list[Any]:
    """A model of numbers and one of classes."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.normal(size=60).round(3), "kind": rng.choice(["flat", "loft"], 60)})
    frame["when"] = (pd.Timestamp("2024-01-01") + pd.to_timedelta(rng.integers(0, 400, 60), unit="D")).strftime(
        "%Y-%m-%d"
    )
    frame["cost"], frame["ok"] = [f"{value:.2f} €" for value in rng.uniform(1, 99, 60)], rng.choice(["yes", "no"], 60)
    y = frame["a"] + (frame["kind"] == "loft") + 0.1 * rng.normal(size=60)
    options: dict[str, Any] = {"kernel": "rbf", "hidden_layer_sizes": (), "random_state": 0}
    classes = pd.Series(np.where(y > 0.5, "high", "low"), name="y")
    return [TableRegressor(**options).fit(frame, y.rename("y")), TableClassifier(**options).fit(frame, classes)]


@contextlib.contextmanager
def served(estimator: Any):
    """The address of a server in a thread of this process."""
    listener = bind("127.0.0.1", 0)
    listen(listener)
    app = make_app(estimator, max_bytes=200_000, max_rows=50)
    options: dict[str, Any] = {
        "http": "h11",
        "loop": "asyncio",
        "ws": "none",
        "lifespan": "off",
        "log_level": "critical",
    }
    server = uvicorn.Server(uvicorn.Config(app, access_log=False, **options))
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]))
    thread.start()
    try:
        yield ("127.0.0.1", int(address_of(listener).rsplit(":", 1)[1]))
    finally:
        server.should_exit = True
        thread.join()


def odd_body(rng: random.Random, row: dict[str, Any]) -> bytes:
    """Good rows with odd values and keys, cut and edited."""

    def odd_row() -> Any:
        if rng.random() < 0.05:
            return rng.choice(VALUES)
        new = dict(row)
        for _ in range(rng.choice([0, 0, 1, 1, 2, 5])):
            new[rng.choice([*row, *KEYS])] = rng.choice(VALUES)
        if rng.random() < 0.1:
            del new[rng.choice(list(new))]
        return new

    rows: Any = [odd_row() for _ in range(rng.choice([1, 1, 2, 5, 49, 50, 51]))]
    body = json.dumps(rows[0] if rng.random() < 0.3 else rows).encode()
    for _ in range(rng.choice([0, 0, 0, 1, 3])):
        at = rng.randrange(len(body) + 1)
        body = rng.choice([body[:at], body[:at] + rng.choice(RAW) + body[at:], body[:at] + body[at + 1 :], body * 2])
    return body if rng.random() < 0.98 else b" " * rng.choice([200_001, 3_000_000])


def as_http(rng: random.Random, body: bytes) -> bytes:
    """A request; rarely one whose head is wrong."""
    method, path = (
        rng.choice(["POST"] * 12 + ["GET", "PUT", "HEAD", "OPTIONS", "x"]),
        rng.choice(PATHS[:1] * 20 + PATHS),
    )
    head = [f"{method} {path} HTTP/1.1", "Host: a", "Connection: close", f"Content-Type: {rng.choice(KINDS)}"]
    if rng.random() < 0.05:
        pieces = [body[at : at + 1000] for at in range(0, len(body), 1000)]
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
        return "\r\n".join([*head, "Transfer-Encoding: chunked", "", ""]).encode() + chunks + b"0\r\n\r\n"
    if rng.random() < 0.03:
        head.append(
            rng.choice(["X: " + "a" * 70_000, "Content-Length: -5", "Content-Length: x", "Bad Header", "\x00: 1"])
        )
    return "\r\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode() + body


def ask(address: tuple[str, int], request: bytes, end: bool = False) -> bytes:
    """The answer to the bytes of a request, until the server closes; ``end`` says that no more bytes come."""
    with socket.create_connection(address, timeout=SLOW_SECONDS) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(request)
        if end:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
        parts = []
        try:
            while part := connection.recv(1 << 20):
                parts.append(part)
        except ConnectionResetError:
            pass
    return b"".join(parts)


def judge(answer: bytes) -> str:
    """What an answer is: a word for its class, or a violation that begins with '!'."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if not answer.startswith(b"HTTP/1.1 "):
        return "! no answer"
    status = int(answer[9:12])
    if b"Traceback" in answer or b'File "' in answer or status >= 500:
        return f"! status {status}: {body[:200]!r}"
    if body == b"Invalid HTTP request received." or not body:
        return "no HTTP" if body else f"{status} without a body"
    if b"text/plain; version" in head:
        return "metrics"
    content = json.loads(body)
    if status >= 400:
        sentence = content["error"]
        return f"{status}" if sentence and "\n" not in sentence else f"! {sentence!r}"
    if "predictions" not in content:
        return "document"
    bad = {error["row"] for error in content["errors"]}
    for number, prediction in enumerate(content["predictions"]):
        if (prediction is None) != (number in bad):
            return f"! row {number} is neither answered nor refused"
        flat = [] if prediction is None else [*prediction.values(), *prediction.get("probabilities", {}).values()]
        flat = [value for value in flat if isinstance(value, float)]
        if not all(map(math.isfinite, flat)):
            return f"! row {number} is {prediction}"
    return "answered" if not bad else "partly answered"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, counts, good = (
        random.Random(options.seed),
        Counter(),
        {"a": 1.0, "kind": "loft", "when": "2024-03-01", "cost": "5 €", "ok": True},
    )
    end, row = time.monotonic() + options.seconds, json.dumps(good).encode()
    with contextlib.ExitStack() as stack:
        addresses = [stack.enter_context(served(estimator)) for estimator in models()]
        while time.monotonic() < end:
            address, request = rng.choice(addresses), as_http(rng, odd_body(rng, good))
            if noise := rng.random() < 0.02:
                request = rng.randbytes(200) + b"\r\n\r\n"
            began = time.monotonic()
            try:
                found = judge(ask(address, request, end=noise))
            except (OSError, ValueError, KeyError) as error:
                found = f"! {error!r}"
            if time.monotonic() - began > SLOW_SECONDS:
                found = "! slow"
            if sum(counts.values()) % 100 == 0:
                if judge(ask(address, POST % (len(row), row))) != "answered":
                    found = "! a good row is not answered any more"
            counts[found if not found.startswith("!") else "violation"] += 1
            if found.startswith("!"):
                print(f"{found}\n  {request[:500]!r}", flush=True)
    print(", ".join(f"{count} {name}" for name, count in sorted(counts.items())))
    return int("violation" in counts)


if __name__ == "__main__":
    sys.exit(main())
