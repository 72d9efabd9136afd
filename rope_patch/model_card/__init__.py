"""The model card beside a checkpoint: how the model was made, how to load it and which programs serve it right.

Import from this package.
"""

from .base_model import BaseModel
from .card_file import CARD_NAME, OTHER_CARD_NAME, has_card_of_user, write_card
from .eval_report import EvalFigures
from .facts import CardFacts, Serving, base_of_runs, facts_of, native_window
from .rendering import render
from .training_record import RECORD_NAME, read_runs, write_runs

__all__ = [
    "CARD_NAME",
    "OTHER_CARD_NAME",
    "RECORD_NAME",
    "BaseModel",
    "CardFacts",
    "EvalFigures",
    "Serving",
    "base_of_runs",
    "facts_of",
    "has_card_of_user",
    "native_window",
    "read_runs",
    "render",
    "write_card",
    "write_runs",
]
