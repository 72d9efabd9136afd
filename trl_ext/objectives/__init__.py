"""What `RopeSFTTrainer` minimises instead of next-token cross-entropy, by name."""

from .alternating import AlternatingObjective
from .base import Objective
from .hidden import HiddenObjective
from .native import NativeObjective
from .next_token import NextTokenObjective
from .relation import RelationObjective
from .self_distill import SelfDistillObjective

OBJECTIVES: dict[str, type[Objective]] = {
    "self-distill": SelfDistillObjective,
    "relation-distill": RelationObjective,
    "hidden-distill": HiddenObjective,
    "native-distill": NativeObjective,
}

__all__ = [
    "OBJECTIVES",
    "AlternatingObjective",
    "HiddenObjective",
    "NativeObjective",
    "NextTokenObjective",
    "Objective",
    "RelationObjective",
    "SelfDistillObjective",
]
