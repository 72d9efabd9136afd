"""What `RopeSFTTrainer` minimises, by name: each objective is a file with its options and its loss.

Import from this package.
"""

from .alternating import AlternatingObjective
from .base import OBJECTIVES, Objective, ObjectiveOptions, objective_of
from .hidden import HiddenObjective, HiddenOptions
from .native import NativeObjective, NativeOptions
from .next_token import NextTokenObjective, NextTokenOptions
from .relation import RelationObjective, RelationOptions
from .self_distill import SelfDistillObjective, SelfDistillOptions

__all__ = [
    "OBJECTIVES",
    "AlternatingObjective",
    "HiddenObjective",
    "HiddenOptions",
    "NativeObjective",
    "NativeOptions",
    "NextTokenObjective",
    "NextTokenOptions",
    "Objective",
    "ObjectiveOptions",
    "RelationObjective",
    "RelationOptions",
    "SelfDistillObjective",
    "SelfDistillOptions",
    "objective_of",
]
