"""The command line as a process: signals that stop it, output streams that fail, and what is kept then."""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

MIN_COLUMNS = 20  # characters of a line, below which nothing can be read
SIGNAL_EXIT_CODE = 128  # added to the number of the signal that ended a process
STOP_SIGNALS = {"SIGINT": "Ctrl-C", "SIGTERM": "SIGTERM", "SIGHUP": "SIGHUP"}

_kept: dict[Path, str] = {}  # finished files of the running command, and how to go on from each
_received: list[int] = []  # numbers of the stop signals that came
_started: list[float] = []  # when the process began, on the clock of time.perf_counter


class Stopped(KeyboardInterrupt):
    """A signal asked this process to end."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(number)
        self.number = number


def start_time() -> float:
    """When the process of the command line began, on the clock of ``time.perf_counter``; now, if it runs within another one."""
    return _started[0] if _started else time.perf_counter()


def begin() -> None:
    """Forgets the files of an earlier command."""
    _kept.clear()


def note_finished(path: Path, next_step: str = "") -> None:
    """Remembers an output file, which never exists half-written, for the message of a stopped command."""
    _kept[path] = next_step


def kept_files() -> list[str]:
    """The finished files of the running command."""
    return [str(path) for path in _kept if path.exists()]


def exit_code(stop: KeyboardInterrupt) -> int:
    """The exit code of a stopped command: 130 after Ctrl-C, 143 after SIGTERM."""
    return SIGNAL_EXIT_CODE + int(getattr(stop, "number", signal.SIGINT))


def stop_message(stop: KeyboardInterrupt) -> str:
    """One line for a command that was stopped: by which signal, what is kept, and how to go on."""
    name = STOP_SIGNALS[signal.Signals(getattr(stop, "number", signal.SIGINT)).name]
    files = kept_files()
    kept = f"Kept: {', '.join(files)}." if files else "Nothing was written."
    steps = [step for path, step in _kept.items() if step and str(path) in files]
    return f"Stopped by {name}. {kept} {steps[-1] if steps else 'To do it, run the command again'}."


def _stop(number: int, _: object) -> NoReturn:
    """Raises Stopped for the first signal; a second one ends the process at once."""
    signal.signal(number, signal.SIG_DFL)
    _received.append(number)
    raise Stopped(number)


def _listen() -> None:
    """Lets each stop signal raise Stopped, unless the caller's shell ignores that signal (nohup does)."""
    for name in STOP_SIGNALS:
        number = getattr(signal, name, None)  # Windows lacks SIGHUP
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)


def _prepare_streams() -> None:
    """Opens closed standard streams, and lets letters that a stream does not know become question marks.

    Without this, the first file that is opened would get the number of a closed stream. What is printed to a closed standard output
    fails like a write to a full disk; a closed standard error is silent.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            mode = os.O_RDONLY if name == "stdout" else os.O_WRONLY
            null = os.open(os.devnull, mode)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))
        stream = getattr(sys, name)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _check_width() -> None:
    """Forgets a width of the screen that nothing fits into: at COLUMNS=0 no table would be printed at all."""
    with contextlib.suppress(ValueError):
        if int(os.environ.get("COLUMNS", MIN_COLUMNS)) < MIN_COLUMNS:
            del os.environ["COLUMNS"]


def start() -> None:
    """Runs the command line in a process of its own: exit code 130 after Ctrl-C, 1 where standard output fails."""
    _started.append(time.perf_counter())
    _listen()
    _prepare_streams()
    _check_width()
    try:
        from bochner.cli.commands import app

        try:
            app()
        finally:
            sys.stdout.flush()
    except OSError as error:  # typer ends quietly where the reader of its output is gone
        kept = f" Kept: {', '.join(kept_files())}." if kept_files() else ""
        print(f"Standard output cannot be written: {error.strerror}.{kept}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left has nowhere to go
        sys.exit(1)
    except (Exception, KeyboardInterrupt) as error:
        if not _received:
            raise
        # Some libraries turn an interrupt during their import into an error of their own.
        stop = error if isinstance(error, Stopped) else Stopped(_received[0])
        print(stop_message(stop), file=sys.stderr)
        sys.exit(exit_code(stop))
