"""Losses: next token, self-distillation, relations to a teacher, its hidden states.

Each is a file with its formula; objectives of trainers import them from here.
"""

from .consistency import ConsistencyLoss, ViewConsistency, consistency_loss
from .controls import Control
from .cue import CueWeight
from .forward_loss import TAPE
from .hidden import HiddenDistiller, HiddenTargets
from .longce import DFT, LongCE
from .native import NativeDistiller, NativeTape, NativeTargets
from .next_token import NextTokenLoss, NextTokenTape, WeightedNextToken, next_token_loss
from .passes import OnePass, SequentialPasses, StandardTape, TwoPasses, ViewTape
from .relations import LogitKL, RelationDistiller
from .self_distillation import SelfDistiller
from .targets import RelationTargets
from .teacher import CopiedTeacher, SharedTeacher

__all__ = [
    "DFT",
    "CueWeight",
    "LongCE",
    "NextTokenLoss",
    "NextTokenTape",
    "WeightedNextToken",
    "next_token_loss",
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
