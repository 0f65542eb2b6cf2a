"""Number formats of a run. Only configuration is exported here; importing it loads no torch."""

from armillary.precision.config import Precision

__all__ = ["Precision"]
