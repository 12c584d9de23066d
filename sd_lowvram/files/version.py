"""The version, which files and machines are compared by."""

__version__ = "0.1.0"
