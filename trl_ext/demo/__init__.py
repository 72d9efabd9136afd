"""`extend` on a model and texts that are already installed, with options that end within minutes.

The command line imports it.
"""
