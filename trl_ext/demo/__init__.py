"""`extend` on a model and texts that are installed already, in settings that end within minutes.

The command line imports it.
"""
