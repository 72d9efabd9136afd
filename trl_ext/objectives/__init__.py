"""What `RopeSFTTrainer` minimises instead of next-token cross-entropy, by name."""

from .alternating import AlternatingObjective
from .base import Objective
from .hidden import HiddenObjective
from .next_token import NextTokenObjective
from .relation import RelationObjective
from .self_distill import SelfDistillObjective

OBJECTIVES: dict[str, type[Objective]] = {
    "self-distill": SelfDistillObjective,
    "relation-distill": RelationObjective,
    "hidden-distill": HiddenObjective,
}

__all__ = [
    "OBJECTIVES",
    "AlternatingObjective",
    "HiddenObjective",
    "NextTokenObjective",
    "Objective",
    "RelationObjective",
    "SelfDistillObjective",
]
