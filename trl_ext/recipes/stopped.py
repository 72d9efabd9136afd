"""What a command says that was stopped by Ctrl-C. Imports nothing heavy."""

SAME_COMMAND_GOES_ON = "What is done is kept, of training up to its last checkpoint: the same command goes on in"
"""Before the folder of the run."""
