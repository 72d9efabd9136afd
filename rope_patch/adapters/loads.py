"""Checks that an adapter which PEFT or Transformers loads onto a patched model was trained with the model's RoPE.

Neither looks at RoPE when it loads. Both ask the decoder for its modules before they change the model, and the check
runs there: it finds the loading call on the Python stack.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn
from transformers.utils import logging

from ..base.call_stack import frames
from ..forward.state import RopeState
from .sidecar import SIDECAR_NAME, require_rope_of_adapter

logger = logging.get_logger(__name__)

_CONFIG = "adapter_config.json"
# (package, function) -> the argument that names the adapter's folder or repository
_LOADS = {
    ("peft", "from_pretrained"): "model_id",
    ("peft", "load_adapter"): "model_id",
    ("peft", "hotswap_adapter"): "model_name_or_path",
    ("transformers", "load_adapter"): "peft_model_id",
}
_OF_HUB = ("revision", "cache_dir", "token")


def require_rope_of_loads(state: RopeState) -> None:
    """Raise ValueError if an adapter is being loaded that was trained with other RoPE parameters than `state` has."""
    for model_id, hub_options in _loads_in_progress():
        require_rope_of_load(model_id, hub_options, state)


def require_rope_of_load(model_id: str | os.PathLike[str], hub_options: dict[str, Any], state: RopeState) -> None:
    """The same for the adapter of one folder or repository; `hub_options` are the arguments that it is loaded with."""
    subfolder = hub_options.get("subfolder") or ""
    folder: Path | None = Path(model_id, subfolder)
    if not Path(model_id, subfolder, _CONFIG).is_file():
        folder = _from_hub(str(model_id), subfolder, {name: hub_options.get(name) for name in _OF_HUB})
    if folder is not None:
        require_rope_of_adapter(folder, state)


def _loads_in_progress() -> Iterator[tuple[str | os.PathLike[str], dict[str, Any]]]:
    """The folder or repository of each adapter that is being loaded, and its arguments for the hub."""
    for frame in frames():
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        argument = _LOADS.get((package, frame.f_code.co_name))
        if argument is None:
            continue
        given = frame.f_locals
        # PEFT's configs and Transformers' state dicts are loaded by methods of these names too
        if not any(isinstance(given.get(name), nn.Module) for name in ("model", "self")) or given.get(argument) is None:
            continue
        load_options = getattr(given.get("load_config"), "download_kwargs", None)
        options = [given.get(name) for name in ("kwargs", "hf_hub_download_kwargs", "adapter_kwargs")]
        yield given[argument], {k: v for entries in (*options, load_options) for k, v in (entries or {}).items()}


def _from_hub(repository: str, subfolder: str, hub_options: dict[str, Any]) -> Path | None:
    """The folder of an adapter in the hub's cache, after downloading its sidecar if it has one; None if not cached.

    The loading call has already cached the config. A missing sidecar is cached as missing, so the hub is asked once.
    """
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

    at = {"revision": hub_options["revision"], "cache_dir": hub_options["cache_dir"]}
    inside = f"{subfolder}/" if subfolder else ""
    try:
        config = try_to_load_from_cache(repository, inside + _CONFIG, **at)
    except HFValidationError:  # a path, not a repository
        return None
    if not isinstance(config, str):
        return None
    if try_to_load_from_cache(repository, inside + SIDECAR_NAME, **at) is None:
        try:
            hf_hub_download(repository, inside + SIDECAR_NAME, **hub_options)
        except EntryNotFoundError:  # also raised without a network: the caller warns that the RoPE is unknown
            pass
        except (HfHubHTTPError, OSError) as error:
            logger.warning_once(f"The hub did not tell whether {repository} has a {inside}{SIDECAR_NAME}: {error}")
    return Path(config).parent
