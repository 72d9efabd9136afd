"""What `RopeSFTTrainer` minimises instead of next-token cross-entropy, by name."""

from .base import Objective
from .hidden import HiddenObjective
from .relation import RelationObjective

OBJECTIVES: dict[str, type[Objective]] = {"relation-distill": RelationObjective, "hidden-distill": HiddenObjective}

__all__ = ["OBJECTIVES", "HiddenObjective", "Objective", "RelationObjective"]
