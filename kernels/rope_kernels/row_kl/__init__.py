"""The rows of two attention-like maps compared, student and teacher: their KL, and their squared difference."""
