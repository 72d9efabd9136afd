"""Distillation from the model as it was pretrained into the model as it is rescaled."""

from .consistency import ViewConsistency
from .controls import Control, ControlDistiller
from .cue import CueWeight
from .distiller import TAPE
from .hidden import HiddenDistiller, HiddenTargets
from .longce import LongCE
from .native import NativeDistiller, NativeTargets
from .relations import LogitKL, RelationDistiller
from .sequential import SequentialDistiller
from .targets import RelationTargets
from .teacher import CopiedTeacher, SharedTeacher
from .two_views import ViewDistiller
from .weighted import WeightedDistiller

__all__ = [
    "TAPE",
    "Control",
    "ControlDistiller",
    "CopiedTeacher",
    "CueWeight",
    "HiddenDistiller",
    "HiddenTargets",
    "LogitKL",
    "LongCE",
    "NativeDistiller",
    "NativeTargets",
    "RelationDistiller",
    "RelationTargets",
    "SequentialDistiller",
    "SharedTeacher",
    "ViewConsistency",
    "ViewDistiller",
    "WeightedDistiller",
]
