"""Views: rules from token index to RoPE index. Each is a frozen dataclass, found by name in `VIEWS`.

One file a view; what several views share is in `base`, `laws`, `borders`, `several` and `targeted`.
"""

from ..base.draws import DrawKey
from ..layout.documents import Documents
from .base import VIEWS, TrainingText, View
from .borders import border_tokens
from .chunk_permute import ChunkPermute
from .compose import Compose
from .cream import Cream
from .cyclic import Cyclic
from .dilation import Dilation
from .endprompt import EndPrompt
from .laws import LAWS, Cycling, Discrete, Law, Linear, LogUniform, Step, Uniform
from .longrecipe import LongRecipe
from .mix import Mix
from .nope import NoPE
from .per_layer import PerLayer
from .posaug import PosAug
from .pose import PoSE
from .random_base import RandomBase
from .rpe import RPE
from .skip import Skip
from .standard import Standard

__all__ = [
    "LAWS",
    "RPE",
    "VIEWS",
    "ChunkPermute",
    "Compose",
    "Cream",
    "Cyclic",
    "Cycling",
    "Dilation",
    "Documents",
    "Discrete",
    "DrawKey",
    "EndPrompt",
    "Law",
    "Linear",
    "LogUniform",
    "LongRecipe",
    "Mix",
    "NoPE",
    "PerLayer",
    "PoSE",
    "PosAug",
    "RandomBase",
    "Skip",
    "Standard",
    "Step",
    "TrainingText",
    "Uniform",
    "View",
    "border_tokens",
]
