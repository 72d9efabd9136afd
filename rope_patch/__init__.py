"""Long-context adaptation for any Hugging Face RoPE model: perturb its RoPE indices or rescale its frequencies."""

from typing import TYPE_CHECKING, Any

from .attention.string_positions import string_positions
from .describe import describe
from .export import export
from .forward.recording import DrawnPositions, record_positions
from .loading import load_adapter
from .methods import list_methods
from .on_load import patch_on_load
from .patch import native_rope, patch_model, restore_query_scale, rope_view, unpatch_model
from .rescalings import RESCALINGS
from .version import __version__
from .views import VIEWS

if TYPE_CHECKING:
    from .forward.view_callback import RopeViewCallback

__all__ = [
    "RESCALINGS",
    "VIEWS",
    "DrawnPositions",
    "RopeViewCallback",
    "__version__",
    "describe",
    "export",
    "list_methods",
    "load_adapter",
    "native_rope",
    "patch_model",
    "patch_on_load",
    "record_positions",
    "restore_query_scale",
    "rope_view",
    "string_positions",
    "unpatch_model",
]


def __getattr__(name: str) -> Any:
    """Import the callback on first use, because Transformers' callbacks import its integrations."""
    if name != "RopeViewCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .forward.view_callback import RopeViewCallback

    return RopeViewCallback
