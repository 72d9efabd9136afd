"""Extend the context window of a model in one call: choose, plan, train, measure and export.

`trl_ext.extend` is the entry point. The choices are docs/choosing.md and research/results/keeping.md as code.
"""
