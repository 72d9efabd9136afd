"""Long-context adaptation for any Hugging Face RoPE model: perturb its RoPE indices or rescale its frequencies."""

from .adapters import load_adapter
from .describe import describe
from .methods import list_methods
from .patch import native_rope, patch_model, rope_view, unpatch_model
from .rescalings import RESCALINGS
from .string_rope import string_positions
from .version import __version__
from .view_callback import RopeViewCallback
from .views import VIEWS

__all__ = [
    "RESCALINGS",
    "VIEWS",
    "RopeViewCallback",
    "__version__",
    "describe",
    "list_methods",
    "load_adapter",
    "native_rope",
    "patch_model",
    "rope_view",
    "string_positions",
    "unpatch_model",
]
