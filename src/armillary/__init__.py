"""Armillary: pre-train large models, from a laptop to thousands of devices, by a recipe."""

from armillary.version import __version__

__all__ = ["__version__"]
