"""Checks of this package on a user's model, for `rope-patch check`.

No other room imports them.
"""
