"""The version, in one place for the package, its metadata and the files that it writes."""

__version__ = "0.1.0"
