"""Distillation from the model as it was pretrained, or from true positions, into the model under training."""

from ..forward_loss import TAPE
from .consistency import ConsistencyLoss, ViewConsistency, consistency_loss
from .controls import Control
from .hidden import HiddenDistiller, HiddenTargets
from .native import NativeDistiller, NativeTape, NativeTargets
from .passes import OnePass, SequentialPasses, StandardTape, TwoPasses, ViewTape
from .relations import LogitKL, RelationDistiller
from .self_distillation import SelfDistiller
from .targets import RelationTargets
from .teacher import CopiedTeacher, SharedTeacher

__all__ = [
    "TAPE",
    "ConsistencyLoss",
    "Control",
    "CopiedTeacher",
    "HiddenDistiller",
    "HiddenTargets",
    "LogitKL",
    "NativeDistiller",
    "NativeTape",
    "NativeTargets",
    "OnePass",
    "RelationDistiller",
    "RelationTargets",
    "SelfDistiller",
    "SequentialPasses",
    "SharedTeacher",
    "StandardTape",
    "TwoPasses",
    "ViewConsistency",
    "ViewTape",
    "consistency_loss",
]
