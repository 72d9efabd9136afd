"""What a model family can do, and why not.

Other rooms ask `capabilities` before they start; `local_layers` tells which layers have a window of their own.
"""
