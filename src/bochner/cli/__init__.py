"""The command line: ``bochner fit``, ``predict``, ``evaluate``, ``info``, ``serve``, ``run``, ``report``, ``demo``, ``data``.

``commands`` puts the commands together as ``app``; ``models``, ``serve``, ``experiments`` and ``data`` hold them: options in, text
out. ``jobs`` does the work of the commands for tables. ``output`` prints. ``process`` handles signals and output streams. What
takes long to import is imported within the commands, after the checks that need no library: a misspelt file name need not wait for
torch, and Ctrl-C is understood from the first moment.
"""

from typing import TYPE_CHECKING, Any

from bochner.cli.process import start

if TYPE_CHECKING:
    from bochner.cli.commands import app


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module 'bochner.cli' has no attribute {name!r}")
    from bochner.cli.commands import app

    return app


__all__ = ["app", "start"]
