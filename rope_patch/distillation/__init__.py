"""Distillation from the model as it was pretrained into the model as it is rescaled."""

from .distiller import TAPE
from .hidden import HiddenDistiller, HiddenTargets
from .relations import LogitKL, RelationDistiller
from .targets import RelationTargets
from .teacher import CopiedTeacher, SharedTeacher
from .two_views import ViewConsistency, ViewDistiller

__all__ = [
    "TAPE",
    "CopiedTeacher",
    "HiddenDistiller",
    "HiddenTargets",
    "LogitKL",
    "RelationDistiller",
    "RelationTargets",
    "SharedTeacher",
    "ViewConsistency",
    "ViewDistiller",
]
