"""From a recipe, or the flags of a command, to a run that is parsed, checked and started.

`train_recipe` is public; the command line imports `fine_tuning` and `launching`.
"""
