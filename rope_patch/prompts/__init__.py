"""Prompts: text files, retrieval questions and their wordings, chat templates.

Measures and training rows both import from here.
"""
