"""The command line `rope-patch`, one file for each group of commands. Imports nothing heavy before a command runs.

Nothing imports it but the entry point.
"""

from .console import main

__all__ = ["main"]
