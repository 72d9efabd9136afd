"""Losses: next token, self-distillation, and distillation of a teacher's relations, hidden states and logits.

Each file has one loss with its formula; the trainer's objectives import them from here. `in_loops` has the calls for a
training loop of your own, and `reference` the same losses written out.
"""

from .consistency import ConsistencyLoss, ViewConsistency, consistency_loss
from .controls import Control
from .cue import CueWeight
from .forward_loss import REQUEST
from .heads import head_kl
from .hidden import HiddenDistiller, HiddenTargets
from .in_loops import relation_loss, self_distillation_counts, self_distillation_loss, view_states
from .longce import DFT, LongCE
from .native import NativeDistiller, NativeRequest, NativeTargets
from .next_token import NextTokenLoss, NextTokenRequest, WeightedNextToken, next_token_loss
from .passes import OnePass, StandardRequest, TwoPasses, ViewRequest
from .reference import relation_loss_ref, self_distillation_loss_ref
from .relations import LogitKL, RelationDistiller
from .self_distillation import SelfDistiller
from .targets import RelationTargets
from .teacher import CopiedTeacher, OtherTeacher, SharedTeacher

__all__ = [
    "DFT",
    "CueWeight",
    "LongCE",
    "NextTokenLoss",
    "NextTokenRequest",
    "WeightedNextToken",
    "next_token_loss",
    "REQUEST",
    "ConsistencyLoss",
    "Control",
    "CopiedTeacher",
    "HiddenDistiller",
    "HiddenTargets",
    "LogitKL",
    "NativeDistiller",
    "NativeRequest",
    "NativeTargets",
    "OnePass",
    "OtherTeacher",
    "RelationDistiller",
    "RelationTargets",
    "SelfDistiller",
    "SharedTeacher",
    "StandardRequest",
    "TwoPasses",
    "ViewConsistency",
    "ViewRequest",
    "consistency_loss",
    "head_kl",
    "relation_loss",
    "relation_loss_ref",
    "self_distillation_counts",
    "self_distillation_loss",
    "self_distillation_loss_ref",
    "view_states",
]
