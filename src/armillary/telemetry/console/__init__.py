"""Views of a run on standard error: a live panel on a terminal, plain lines elsewhere."""

from armillary.telemetry.console.choose import open_console

__all__ = ["open_console"]
