"""Shared by all operators: errors of arguments, autocast, where Triton runs, and free GPU memory."""
