"""Checks that this package is right on a model, which `rope-patch check` runs.

No other room imports them.
"""
