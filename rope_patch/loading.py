"""Loading an adapter onto a base model with the RoPE that it was trained with."""

import os
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.utils import logging

from .adapters.sidecar import (
    CONFIG_MARK,
    SIDECAR_NAME,
    always_view_of,
    read_adapter_config,
    read_sidecar,
    rescalings_of,
)
from .adapters.watch import watch_adapters
from .adapters.weights import digest_of_folder, shapes_in_folder
from .base.json_records import read_record
from .base.remote_code import load_pretrained
from .forward.state import state_of
from .patch import patch_model, unpatch_model
from .rope.rotary import find_causal_lm, find_decoder, with_factors

if TYPE_CHECKING:
    from peft import PeftModel

logger = logging.get_logger(__name__)

_FOLDER = "_rope_patch_adapter_folder"
LOAD_CHANGED_BASE = (
    "If its training changed the base model, as by resize_token_embeddings, load the changed one, put the adapter on "
    "it with load_adapter, and give rope_patch.export the model."
)


def load_adapter(model: PreTrainedModel, directory: str | os.PathLike[str], **kwargs: Any) -> "PeftModel":
    """Load the adapter in `directory` onto `model` and rescale its RoPE as it was when the adapter was trained.

    A view with when="always", which changes inference, is put on again; one of training forwards is not. A later
    `patch_model` with a rescaling starts from there, as it does on the merged checkpoint: ABF's base stays
    under YaRN on top. `native_rope` still means the base model's RoPE parameters, and `unpatch_model` goes back to
    them.

    Tokens that were added before the training are added here too: the embeddings get as many rows as those that the
    adapter brings. The model gets the generation config beside the adapter and the special tokens of the tokenizer
    there, and `export` takes that tokenizer along.

    Args:
        model: the base model, not patched.
        directory: where a patched PEFT model was saved: an adapter with `rope_patch.json` beside it. A `~` in front is
            the user's home.
        **kwargs: passed to `peft.PeftModel.from_pretrained`, e.g. is_trainable=True, or subfolder="b" for an adapter
            that was saved under a name of its own, "b".

    Raises:
        ImportError: PEFT is not installed.
        FileNotFoundError: there is no such directory, or no specification lies beside the adapter.
        ValueError: the model is patched already, or came with other RoPE parameters than the adapter's base model; or
            the specification is damaged, is that of other weights, or names a rescaling that makes other RoPE
            parameters today than when the adapter was trained.
    """
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ImportError("load_adapter needs PEFT: pip install 'rope-patch[peft]'.") from error
    directory = os.path.expanduser(directory)
    subfolder = kwargs.get("subfolder")
    beside = os.path.join(directory, subfolder) if subfolder else directory
    specification = read_sidecar(beside)
    if Path(beside, "adapter_config.json").is_file():  # PEFT says where it is not
        read_adapter_config(Path(beside))
    decoder = find_decoder(model)
    if state_of(decoder) is not None:
        raise ValueError("load_adapter needs a model without patches: call unpatch_model first.")
    loaded = (decoder.config.rope_parameters, getattr(decoder.config, "max_position_embeddings", None))
    recorded = (specification["native_rope_parameters"], specification["native_max_position_embeddings"])
    if loaded != recorded:
        raise ValueError(
            f"the adapter in {beside} was trained on a base model with RoPE {recorded[0]} and a window of "
            f"{recorded[1]} positions, this model has {loaded[0]} and {loaded[1]}. Load the base model that it was "
            "trained on."
        )
    _require_own_weights(beside, specification)
    view = always_view_of(specification)
    try:
        for rescaling in rescalings_of(specification):
            patch_model(model, rescaling)
            state_of(decoder).settle()  # type: ignore[union-attr]
        _require_recorded_rope(decoder, specification, beside)
        if view is not None:
            patch_model(model, view[0], seed=view[1], when="always")
        fit_embeddings(model, Path(beside))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=f".*{re.escape(CONFIG_MARK)}")  # what it asks for is being done
            adapted = PeftModel.from_pretrained(model, directory, **kwargs)
        take_along(model, Path(beside))
    except Exception:
        unpatch_model(model)
        raise
    state = state_of(decoder)
    if state is not None:
        watch_adapters(adapted, find_causal_lm(model))
    return adapted


def fit_embeddings(model: Any, folder: Path) -> None:
    """Give the embeddings of a base model as many rows as those that the adapter in `folder` brings.

    Raises:
        ValueError: it brings only those at one end of the model, and rows at the other would be random ones.
    """
    ends = {model.get_input_embeddings(), model.get_output_embeddings()}
    weights = {name: module.weight for name, module in model.named_modules() if module in ends}
    saved_as = re.compile(
        rf"(?:.*\.)?({'|'.join(map(re.escape, weights))})(?:\.token_adapter)?(?:\.base_layer)?\.weight"
    )
    brought = {match[1]: shape[0] for n, shape in shapes_in_folder(folder).items() if (match := saved_as.fullmatch(n))}
    rows, now = set(brought.values()), _rows_of(model)
    if rows <= {now} or len(rows) > 1:  # PEFT tells of two lengths
        return
    tied = {id(weights[name]) for name in brought}
    random = [name for name, weight in weights.items() if name not in brought and id(weight) not in tied]
    if random:
        raise ValueError(
            f"the adapter in {folder} was trained with {max(rows)} rows of embeddings, its base model has {now}, "
            f"and it holds those of {', '.join(brought)} without those of {', '.join(random)}, which would be random. "
            f"{LOAD_CHANGED_BASE}"
        )
    model.resize_token_embeddings(max(rows), mean_resizing=False)


def _rows_of(model: Any) -> int:
    """Rows of its embeddings; those themselves may be shards (DeepSpeed ZeRO-3)."""
    rows: int = model.config.get_text_config(decoder=True).vocab_size
    return rows


def take_along(model: Any, folder: Path) -> None:
    """Let `model` know what was saved beside the adapter in `folder`, as the model had it that was trained.

    Raises:
        ValueError: the tokenizer there has tokens that `model` has no embeddings of.
    """
    causal_lm: Any = find_causal_lm(model)
    setattr(causal_lm, _FOLDER, str(folder.absolute()))
    if (folder / "generation_config.json").is_file():
        read_record(folder / "generation_config.json", "Save it again, or delete it.")
        causal_lm.generation_config = GenerationConfig.from_pretrained(folder)
    if not (folder / "tokenizer_config.json").is_file():
        return
    try:
        tokenizer = load_pretrained(AutoTokenizer, folder)
        last = max(tokenizer.get_vocab().values())
    except Exception as error:  # of many kinds: tokenizers raises Exception itself
        logger.warning(f"The tokenizer in {folder} cannot be read, so that special tokens stay the base's: {error}")
        return
    if last >= _rows_of(causal_lm):
        raise ValueError(
            f"the tokenizer in {folder} has tokens up to ID {last}, the base model has {_rows_of(causal_lm)} rows of "
            f"embeddings, and the adapter brings no others. {LOAD_CHANGED_BASE}"
        )
    from transformers.trainer_utils import align_special_tokens  # with which come many packages

    align_special_tokens(causal_lm, tokenizer)  # as Trainer did before the training


def adapter_folder_of(model: Any) -> Path | None:
    """The folder that the adapter on `model` was loaded from, merged by now or not; None where that is not known."""
    folder = getattr(find_causal_lm(model), _FOLDER, None)
    if folder is not None and not Path(folder).is_dir():
        logger.warning(
            f"{folder}, which an adapter was loaded from, is gone: what lay beside it is the base model's now."
        )
        return None
    return None if folder is None else Path(folder)


def _require_own_weights(directory: str | os.PathLike[str], specification: dict[str, Any]) -> None:
    """Raise ValueError if the adapter was saved anew, by a model without patches, which leaves the specification."""
    recorded, digest = specification.get("adapter_weights"), digest_of_folder(directory)
    if None not in (recorded, digest) and recorded != digest:  # PEFT says which weights are missing
        raise ValueError(
            f"{SIDECAR_NAME} in {directory} does not belong to the weights beside it, which were saved later, or "
            "changed. If they were trained without rope_patch, delete the file and use PeftModel.from_pretrained; if "
            'they were trained with the RoPE that it names, set its "adapter_weights" to null.'
        )


def _require_recorded_rope(decoder: Any, specification: dict[str, Any], directory: str) -> None:
    """Raise ValueError if the rescalings make another model now than that which the adapter was trained on.

    They did in versions before 'abf' with a window kept the attention factor of a LongRoPE that names no factor.
    """
    recorded: tuple[Any, Any] = (specification["rope_parameters"], specification["max_position_embeddings"])
    made: tuple[Any, Any] = (decoder.config.rope_parameters, getattr(decoder.config, "max_position_embeddings", None))
    if with_factors(*recorded) != with_factors(*made):
        raise ValueError(
            f"the adapter in {directory} was trained with RoPE {recorded[0]} and a window of {recorded[1]} positions, "
            f"by rope-patch {specification['rope_patch_version']}. Its rescaling now makes {made[0]} and {made[1]}, "
            "which is another model. Load it with the version that trained it, and save what merge_and_unload() "
            "returns."
        )
