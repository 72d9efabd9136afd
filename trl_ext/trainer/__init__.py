"""`RopeSFTTrainer`, TRL's trainer with a view and an objective, and what is checked before its first step.

The trainer is in `trainer`, its configuration in `trl_ext.config`.
"""
