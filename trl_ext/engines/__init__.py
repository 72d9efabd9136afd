"""What a trainer does differently under FSDP, DeepSpeed and ranks that share a sequence: one file per subject.

Import its modules by name.
"""
