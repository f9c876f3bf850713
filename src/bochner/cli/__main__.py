"""``python -m bochner.cli``."""

from bochner.cli import start

start()
