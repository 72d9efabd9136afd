"""RoPE scaling: how frequencies are stretched to a longer context window. Each is a frozen dataclass, found by name.

One file a group of methods; `in_place` applies them to a loaded model.
"""

from .base import RESCALINGS, NativeRope, Rescaling
from .base_change import ABF, NTK
from .cope import CoPE
from .drop_rope import DropRope
from .interpolation import PI, DynamicNTK
from .llama3 import Llama3
from .longrope import LongRope
from .yarn import Yarn, advised_rescaling

__all__ = [
    "ABF",
    "NTK",
    "PI",
    "RESCALINGS",
    "CoPE",
    "DropRope",
    "DynamicNTK",
    "Llama3",
    "LongRope",
    "NativeRope",
    "Rescaling",
    "Yarn",
    "advised_rescaling",
]
