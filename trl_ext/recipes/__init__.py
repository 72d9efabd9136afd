"""From a YAML recipe to a trained model: what `rope-patch train` runs.

The command line imports `fine_tuning` and `restoring`.
"""
