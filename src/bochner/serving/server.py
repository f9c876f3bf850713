"""The server process: its socket, and an orderly end after a signal."""

import errno
import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

FINISH_SECONDS = 60  # time for requests that have come before a signal to be answered
BACKLOG = 2048  # connections that may wait to be accepted


def bind(host: str, port: int) -> socket.socket:
    """A socket at an address of this machine, which does not listen yet.

    Raises:
        ValueError: The address is not of this machine, or the port is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise ValueError(f"The option --host must be an address of this machine, got {host!r} instead.") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ValueError(_bind_message(error, host, port)) from error
    return listener


def _bind_message(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"The port {port} of {host} is taken; choose another with --port, or 0 for any free one."
    if error.errno == errno.EACCES:
        return f"The port {port} is for the administrator of this machine; choose one from 1024 on with --port."
    return f"The option --host must be an address of this machine, got {host!r} instead ({error.strerror})."


def address_of(listener: socket.socket) -> str:
    """The URL of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def listen(listener: socket.socket) -> None:
    """Lets a bound socket take connections; a ValueError where another process was first."""
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise ValueError(_bind_message(error, host, port)) from error


class _Server(uvicorn.Server):
    """A server that says when it is ready; signals are its own by then."""

    def __init__(self, config: uvicorn.Config, say_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self.say_ready = say_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to take connections."""
        await super().startup(sockets)
        self.say_ready()


def run(app: FastAPI, listener: socket.socket, say_ready: Callable[[], None]) -> None:
    """Answers requests until a signal comes, finishes those that are there, and raises the signal again.

    Args:
        app: What ``make_app`` made.
        listener: A socket that listens.
        say_ready: Called when requests are answered, and signals are heeded.
    """
    config = uvicorn.Config(
        app,
        http="h11",
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=FINISH_SECONDS,
    )
    _Server(config, say_ready).run(sockets=[listener])
