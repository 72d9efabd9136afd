"""Next-token losses whose tokens differ in weight: by what a long context adds, or for the cue that ends a document."""

from .cue import CueWeight
from .longce import DFT, LongCE
from .loss import NextTokenLoss, NextTokenTape, WeightedNextToken, next_token_loss

__all__ = ["DFT", "CueWeight", "LongCE", "NextTokenLoss", "NextTokenTape", "WeightedNextToken", "next_token_loss"]
