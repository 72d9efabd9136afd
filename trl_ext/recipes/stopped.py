"""The message of a command stopped by Ctrl-C. Imports nothing heavy."""

SAME_COMMAND_RESUMES = "Finished work and the last checkpoint are kept: the same command resumes in"
"""The folder of the run follows."""
