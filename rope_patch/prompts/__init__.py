"""Texts and questions that models are asked: books, hidden facts, their wordings, chat templates.

Measures and training rows both import from here.
"""
