"""From a trained network and a loader to a calibrated posterior that knows what is unlike its data."""

from bochner.attach.head import StationaryHead

__all__ = ["StationaryHead"]
