"""The command that answers requests with a model: serve."""

import signal
from typing import Annotated, Any

import typer

from bochner.cli import process
from bochner.cli.files import check_model_file
from bochner.cli.models import Device, ModelFile
from bochner.cli.output import note, say

LOCALHOST = "127.0.0.1"
MAX_PORT = 65535
MAX_MEGABYTES = 1000.0  # largest body that may be allowed, in megabytes
MAX_ROWS = 1_000_000  # largest number of rows that a request may be allowed

Host = Annotated[str, typer.Option(help="Address to listen at; by default only programs of this machine can connect.")]
Port = Annotated[int, typer.Option(help="Port to listen at; 0 takes any free one.")]
Megabytes = Annotated[float, typer.Option(help="Largest request, in megabytes.")]
Rows = Annotated[int, typer.Option(help="Largest number of rows of a request.")]


def serve(
    model: ModelFile,
    host: Host = LOCALHOST,
    port: Port = 8000,
    max_megabytes: Megabytes = 10.0,
    max_rows: Rows = 10_000,
    device: Device = "auto",
) -> None:
    """Answers requests with predictions: rows as JSON in; mean, interval or probabilities, OOD score and flag out.

    There is no password: whoever reaches the port can ask. POST /predict; GET /health, /model, /metrics and /openapi.json.

    Example:
        bochner serve model.bochner --port 8000
    """
    _check_limits(port, max_megabytes, max_rows)
    check_model_file(model)
    try:
        from bochner.serving import server
        from bochner.serving.app import make_app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("fastapi", "starlette", "uvicorn"):
            raise
        raise ValueError(
            f"bochner serve needs the extra serve ({error.name} is not installed): pip install 'bochner[serve]'."
        ) from error
    listener = server.bind(host, port)  # a port that is taken is said at once, before the model is read
    with listener:
        from bochner.cli.jobs import load_model

        limits = {"max_bytes": int(max_megabytes * 1e6), "max_rows": max_rows}
        app = make_app(load_model(model, device), name=model.name, **limits)
        server.listen(listener)
        _answer_until_stopped(app, listener, f"serving {model} at {server.address_of(listener)}; Ctrl-C ends it")


def _check_limits(port: int, max_megabytes: float, max_rows: int) -> None:
    """Raises a ValueError for a number that cannot be used."""
    if not 0 <= port <= MAX_PORT:
        raise ValueError(f"The option --port must lie between 0 and {MAX_PORT}, got {port} instead.")
    if not 0 < max_megabytes <= MAX_MEGABYTES:
        raise ValueError(
            f"The option --max-megabytes must be above 0 and up to {MAX_MEGABYTES:g}, got {max_megabytes} instead."
        )
    if not 0 < max_rows <= MAX_ROWS:
        raise ValueError(f"The option --max-rows must lie between 1 and {MAX_ROWS}, got {max_rows} instead.")


def _answer_until_stopped(app: Any, listener: Any, ready: str) -> None:
    """Runs the server, says when it is ready, and why it ended."""
    from bochner.serving import server

    try:
        server.run(app, listener, lambda: say(ready))
    except KeyboardInterrupt as stop:
        name = process.STOP_SIGNALS[signal.Signals(getattr(stop, "number", signal.SIGINT)).name]
        cut_off = app.state.counts.cut_off
        rest = f"{cut_off} requests were not answered" if cut_off else "every request that had come was answered"
        note(f"stopped by {name}; {rest}")
        raise typer.Exit(process.exit_code(stop)) from stop
