"""From a model to a longer one in one call: what to do is chosen, planned, done, measured and exported.

`trl_ext.extend` is the entry point. The choices are docs/choosing.md and research/results/keeping.md as code.
"""
