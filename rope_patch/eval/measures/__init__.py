"""The measures, one file each, and the prompts that several of them share.

The suite imports them; each imports `results` alone.
"""
