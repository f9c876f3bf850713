"""Runs the command line as ``python -m bochner.cli``."""

from bochner.cli.process import start

start()
