"""Training documents: reading, cutting, joining and describing them before TRL tokenizes them.

The trainer and recipes import from here.
"""
