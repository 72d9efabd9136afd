"""Loading a checkpoint, or an adapter on its base model, and refusing missing or damaged weights."""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM

from ..adapters.sidecar import SIDECAR_NAME
from ..base.remote_code import load_pretrained
from ..loading import LOAD_CHANGED_BASE, fit_embeddings, load_adapter, take_along
from ..patch import restore_query_scale

_SHOWN = 3  # names of weights in a message


def load_checkpoint(name: str | Path, *, dtype: Any = "auto", revision: str | None = None, **options: Any) -> Any:
    """Load a checkpoint that has every weight of the model. Transformers would draw missing ones at random.

    Args:
        name: folder or hub ID.
        dtype: of the weights, as `from_pretrained` takes it.
        revision: on the hub; None is "main".
        **options: of `load_pretrained`.

    Raises:
        OSError: there is no such checkpoint.
        ValueError: a weight is missing, or has another shape than in the config; a file is damaged; or the model comes
            with Python code of its own.
    """
    options["revision"] = revision or "main"
    return require_whole(name, partial(load_pretrained, AutoModelForCausalLM, name, dtype=dtype, **options))


def require_whole(name: str | Path, from_pretrained: Callable[..., Any]) -> Any:
    """The model that `from_pretrained` loads, if the files in `name` have every weight of it.

    Args:
        name: folder or hub ID, for messages.
        from_pretrained: of any class of Transformers; gets options that make it return what it found.

    Raises:
        ValueError: a weight is missing, or has another shape than in the config, or a file is damaged.
    """
    try:
        model, loaded = from_pretrained(output_loading_info=True, ignore_mismatched_sizes=True)
    except torch.OutOfMemoryError:
        raise
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(f"the weights in {name} cannot be read: {error}. Save or download them again.") from error
    except (UnpicklingError, EOFError, LookupError) as error:  # torch.load would advise to run the code
        raise ValueError(
            f"the weights in {name} are damaged, or hold code beside tensors, which is not run. Save or download them "
            "again, as safetensors."
        ) from error
    other_shapes = [weight for weight, *_ in loaded["mismatched_keys"]]
    for what, weights in (("lack", sorted(loaded["missing_keys"])), ("have another shape for", sorted(other_shapes))):
        if weights:
            shown = ", ".join(weights[:_SHOWN]) + (", ..." if len(weights) > _SHOWN else "")
            raise ValueError(
                f"the weights in {name} {what} {shown} of the {type(model).__name__} that its config.json describes, "
                "which would get random ones. Name a folder in which save_pretrained of that model wrote both."
            )
    return restore_query_scale(model)


def with_adapter(base: Any, folder: str | Path) -> nn.Module:
    """Load the adapter in `folder` onto `base`, with the RoPE of its training if that is recorded.

    Raises:
        FileNotFoundError: the folder has no weights of an adapter.
        ValueError: a weight is missing, which PEFT would draw at random, or does not fit `base`, or a file is damaged.
    """
    if not any(Path(folder).glob("adapter_model*")):  # PEFT would look for them on the hub
        raise FileNotFoundError(
            f"{folder} holds adapter_config.json and no weights beside it (adapter_model.safetensors): copy them there "
            "from where the adapter was saved."
        )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*Found missing adapter keys")
            if (Path(folder) / SIDECAR_NAME).is_file():
                return load_adapter(base, folder)
            from peft import PeftModel

            fit_embeddings(base, Path(folder))
            adapted = PeftModel.from_pretrained(base, str(folder))
        take_along(base, Path(folder))
        return adapted
    except torch.OutOfMemoryError:
        raise
    except (SafetensorError, RuntimeError, UserWarning, LookupError, TypeError, AttributeError) as error:
        raise ValueError(  # PEFT does not check the types in adapter_config.json
            f"the adapter in {folder} is not whole, or does not fit its base model, or its adapter_config.json has a "
            f"wrong entry: {str(error):.400}. Save it or copy it again. {LOAD_CHANGED_BASE}"
        ) from error
