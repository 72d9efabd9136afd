"""Tests of TRL's that `RopeSFTTrainer` refuses on purpose, each with its error and the reason."""

from peers.outcomes import Refusal

OF_EVERY_VIEW: list[Refusal] = []
OF_SELF_DISTILLATION: list[Refusal] = []
