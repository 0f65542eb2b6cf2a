"""The version, in a module that imports nothing, so that the command line can print it at once."""

__version__ = "0.1.0"
