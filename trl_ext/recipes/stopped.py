"""The message of a command stopped by Ctrl-C. Imports nothing heavy."""

SAME_COMMAND_GOES_ON = "Finished work is kept, of training up to its last checkpoint: the same command resumes in"
"""The folder of the run follows."""
