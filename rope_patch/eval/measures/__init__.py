"""The measures, one file each, and the prompts that several of them share.

`suite.py` imports them. They import `results`, and no other part of `eval`.
"""
