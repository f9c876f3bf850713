"""The FastAPI application: its paths, its limits, its errors, its metrics."""

import asyncio
import json
import os
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import bochner
from bochner.serving.description import describe_model, predict_operation
from bochner.serving.rows import Answered, Predictor, RequestError, parse_rows

# Nothing is sent anywhere.
NO_TELEMETRY: Any = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}
BODY_SECONDS = 30.0  # time for a body to arrive; a client that is slower is refused
# Times the largest body that is read of one that is too large, so that its sender hears the refusal.
DISCARDED_BODIES = 8
MAX_WAITING = 256  # requests that may wait at a time
MAX_WORKERS = 8  # threads that compute
LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)  # seconds
PATHS = ("/predict", "/health", "/model", "/metrics", "/openapi.json")
Coverage = Annotated[
    float,
    Query(
        gt=0,
        lt=1 - 1e-15,
        allow_inf_nan=False,
        description="Probability of the interval from low to high; not for classes.",
    ),
]


class Answer(Response):
    """JSON without NaN, in ASCII: a text of a request that no UTF-8 can hold comes back escaped, as it came."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body."""
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


class Counts:
    """What the metrics count. Only the thread of the event loop changes them."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # by path and status
        self.rows: Counter[str] = Counter(answered=0, refused=0, flagged=0)
        self.latencies: Counter[float] = Counter()  # by the smallest bucket that holds them
        self.seconds = 0.0
        self.cut_off = 0  # requests that the end of the server left without an answer

    def add_request(self, path: str, status: int, seconds: float) -> None:
        """Counts a request; the time of predictions alone goes into the histogram."""
        self.requests[path if path in PATHS else "other", status] += 1
        if path == "/predict":
            self.latencies[next((bucket for bucket in LATENCY_BUCKETS if seconds <= bucket), float("inf"))] += 1
            self.seconds += seconds

    def add_rows(self, answered: Answered) -> None:
        """Counts the rows of an answer."""
        self.rows["refused"] += len(answered.errors)
        self.rows["answered"] += len(answered.predictions) - len(answered.errors)
        self.rows["flagged"] += answered.flagged

    def as_text(self) -> str:
        """The counts in the text format of Prometheus."""
        name = "bochner_requests_total"
        lines = [f"# HELP {name} Requests, by path and status.", f"# TYPE {name} counter"]
        lines += [f'{name}{{path="{path}",status="{s}"}} {n}' for (path, s), n in sorted(self.requests.items())]
        for kind, what in (
            ("answered", "Rows that were predicted."),
            ("refused", "Bad rows."),
            ("flagged", "Rows unlike the training data."),
        ):
            name = f"bochner_rows_{kind}_total"
            lines += [f"# HELP {name} {what}", f"# TYPE {name} counter", f"{name} {self.rows[kind]}"]
        name, total = "bochner_predict_seconds", 0
        lines += [f"# HELP {name} Time from the head of a request to its answer.", f"# TYPE {name} histogram"]
        for bucket in LATENCY_BUCKETS:
            total += self.latencies[bucket]
            lines.append(f'{name}_bucket{{le="{bucket:g}"}} {total}')
        total += self.latencies[float("inf")]
        lines += [f'{name}_bucket{{le="+Inf"}} {total}', f"{name}_sum {self.seconds:.6f}", f"{name}_count {total}"]
        return "\n".join(lines) + "\n"


class _Counted:
    """Counts every request and its time; a request beyond those that may wait is refused."""

    def __init__(self, app: ASGIApp, counts: Counts) -> None:
        self.app, self.counts, self.waiting = app, counts, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), 500

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self.waiting += 1
        try:
            if (
                self.waiting > MAX_WAITING and scope["path"] == "/predict"
            ):  # the others cost nothing, and watchers need them
                busy = Answer({"error": "Too many requests at once; try again."}, 503, {"Retry-After": "1"})
                await busy(scope, receive, send_and_note)
            else:
                await self.app(scope, receive, send_and_note)
        except asyncio.CancelledError:  # the server ends before it has answered, and cancels what is left
            self.counts.cut_off += 1
            await Answer({"error": "The server has been stopped."}, 503)(scope, receive, send_and_note)
        finally:
            self.waiting -= 1
            self.counts.add_request(scope["path"], status, time.perf_counter() - began)


async def read_body(request: Request, largest: int) -> bytes:
    """The body of a request.

    Args:
        request: The request.
        largest: Largest number of bytes; a longer body is refused, and not kept.

    Raises:
        RequestError: It is too large or too slow, or is not declared as JSON.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        # So a page in a browser cannot send rows without asking first, which this server never allows.
        raise RequestError("Send the rows as JSON, with the header Content-Type: application/json.", 415)
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > DISCARDED_BODIES * largest:
                    break
                if size <= largest:
                    parts.append(part)
    except ClientDisconnect as error:
        raise RequestError("The client has hung up before its body was complete.", 499) from error
    except TimeoutError as error:
        raise RequestError(f"The body did not arrive within {BODY_SECONDS:g} seconds.", 408) from error
    if size > largest:
        raise RequestError(f"The body has more than {largest:,} bytes; send the rows in several requests.", 413)
    return b"".join(parts)


def make_app(estimator: Any, *, name: str = "model", max_bytes: int = 10_000_000, max_rows: int = 10_000) -> FastAPI:
    """The application that answers for a model.

    Args:
        estimator: A fitted TableRegressor or TableClassifier.
        name: What the model is called.
        max_bytes: Largest body of a request.
        max_rows: Largest number of rows of a request.
    """
    predictor, counts, about = Predictor(estimator), Counts(), describe_model(estimator)
    on_gpu = estimator.estimator_.mixtures_[0].members[0].head.factor.is_cuda
    workers = ThreadPoolExecutor(1 if on_gpu else min(MAX_WORKERS, os.cpu_count() or 1), "predict")
    app = FastAPI(
        title=f"bochner: {about['target']}",
        version=bochner.__version__,
        summary=f"Predictions of '{about['target']}', and how sure they are.",
        openapi_url=None,  # it would fail where a name is no UTF-8
        docs_url=None,  # the pages of FastAPI load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        default_response_class=Answer,
        telemetry=NO_TELEMETRY,
    )
    app.state.counts = counts
    app.add_middleware(_Counted, counts=counts)
    _add_error_answers(app)

    def work(body: bytes, coverage: float) -> Answered:
        return predictor.answer(parse_rows(body, max_rows), coverage)

    @app.post("/predict", openapi_extra=predict_operation(estimator), summary="Predictions for one row or several")
    async def predict(request: Request, coverage: Coverage = 0.9) -> Response:
        body = await read_body(request, max_bytes)
        answered = await asyncio.get_running_loop().run_in_executor(workers, work, body, coverage)
        counts.add_rows(answered)
        if len(answered.errors) == len(answered.predictions):
            errors = [error.to_json() for error in answered.errors]
            return Answer({"error": errors[0]["error"], "errors": errors, "notes": answered.notes}, 422)
        return Answer(answered.to_json())

    _add_documents(app, {"ready": True, "model": name, "version": bochner.__version__}, about)
    return app


def _add_documents(app: FastAPI, health: dict[str, Any], about: dict[str, Any]) -> None:
    """Adds what can be read with GET.

    Args:
        app: The application.
        health: The answer at /health.
        about: The answer at /model.
    """

    @app.get("/health", summary="Whether the model is ready")
    async def read_health() -> Response:
        return Answer(health)

    @app.get("/model", summary="The columns, the target, and how each column is read")
    async def read_model() -> Response:
        return Answer(about)

    @app.get("/metrics", summary="Counts for Prometheus")
    async def read_metrics() -> Response:
        return Response(app.state.counts.as_text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/openapi.json", include_in_schema=False)
    async def read_openapi() -> Response:
        return Answer(app.openapi())


def _add_error_answers(app: FastAPI) -> None:
    """Makes every error one JSON object with a sentence."""

    @app.exception_handler(RequestError)
    async def refuse(_: Request, error: RequestError) -> Response:
        return Answer({"error": str(error)}, error.status)

    @app.exception_handler(RequestValidationError)
    async def refuse_parameter(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        sentence = (
            f"The parameter {first['loc'][-1]} must lie between 0 and 1, got {str(first['input'])[:80]!r} instead."
        )
        return Answer({"error": sentence}, 422)

    @app.exception_handler(HTTPException)
    async def refuse_path(request: Request, error: HTTPException) -> Response:
        sentences = {
            404: f"There is nothing at this path; there are {', '.join(PATHS)}.",
            405: f"The method {request.method[:20]} is not for this path; /predict takes POST, the others take GET.",
        }
        return Answer({"error": sentences.get(error.status_code, str(error.detail))}, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def apologise(_: Request, error: Exception) -> Response:
        memory = isinstance(error, MemoryError) or "allocate" in str(error)
        sentence = (
            "There is not enough memory for so many rows at once." if memory else "The server failed; its log says why."
        )
        return Answer({"error": sentence}, 503 if memory else 500)
