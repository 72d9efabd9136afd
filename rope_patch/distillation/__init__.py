"""Distillation from the model as it was pretrained into the model as it is rescaled."""

from .distiller import TAPE
from .hidden import HiddenDistiller, HiddenTargets
from .longce import LongCE
from .relations import LogitKL, RelationDistiller
from .targets import RelationTargets
from .teacher import CopiedTeacher, SharedTeacher
from .two_views import ViewConsistency, ViewDistiller, WeightedDistiller

__all__ = [
    "TAPE",
    "CopiedTeacher",
    "HiddenDistiller",
    "HiddenTargets",
    "LogitKL",
    "LongCE",
    "RelationDistiller",
    "RelationTargets",
    "SharedTeacher",
    "ViewConsistency",
    "ViewDistiller",
    "WeightedDistiller",
]
