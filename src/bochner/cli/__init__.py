"""The command line: ``bochner fit``, ``predict``, ``evaluate``, ``info``, ``run``, ``report``, ``demo``, ``data``.

``app`` puts the commands together; ``models``, ``experiments`` and ``data`` hold them: options in, text out. ``jobs`` is what the
commands for tables do with files. ``output`` is how anything is printed. What is heavy is imported within the commands, after what
can be said without it: a misspelt file name need not wait for torch.
"""

from bochner.cli.app import app, start

__all__ = ["app", "start"]
