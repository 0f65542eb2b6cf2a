"""Places that show or keep events besides the log: console, TensorBoard, Weights & Biases."""

from armillary.telemetry.sinks.sink import Sink

__all__ = ["Sink"]
