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
    "If training changed the base model, e.g. by resize_token_embeddings, load that changed model, add the adapter "
    "with load_adapter, and pass the model to rope_patch.export."
)


def load_adapter(model: PreTrainedModel, directory: str | os.PathLike[str], **kwargs: Any) -> "PeftModel":
    """Load the adapter in `directory` onto `model`, with the RoPE that it was trained with.

    A view with when="always", which changes inference, is restored; a view of training forwards is not. A later
    rescaling by `patch_model` starts from the adapter's RoPE: YaRN on top of ABF keeps the base of ABF. `native_rope`
    and `unpatch_model` still use the base model's own RoPE parameters.

    If tokens were added before training, the embeddings grow to the size that the adapter has. The model also gets the
    generation config and the special tokens that were saved with the adapter, and `export` copies that tokenizer.

    Args:
        model: the base model, not patched.
        directory: folder of the adapter, with `rope_patch.json` in it. A leading `~` is the user's home.
        **kwargs: passed to `peft.PeftModel.from_pretrained`, e.g. is_trainable=True, or subfolder="b" for an adapter
            that was saved under the name "b".

    Raises:
        ImportError: PEFT is not installed.
        FileNotFoundError: there is no such directory, or no `rope_patch.json` in it.
        ValueError: the model is patched, or has other RoPE parameters than the adapter's base model; or
            `rope_patch.json` is damaged, belongs to other weights, or its rescaling gives other RoPE parameters in
            this version.
    """
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ImportError("load_adapter needs PEFT: pip install 'rope-patch[peft]'.") from error
    directory = os.path.expanduser(directory)
    subfolder = kwargs.get("subfolder")
    beside = os.path.join(directory, subfolder) if subfolder else directory
    specification = read_sidecar(beside)
    if Path(beside, "adapter_config.json").is_file():  # if it is missing, PEFT raises
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
    """Resize the embeddings of a base model to the size that the adapter in `folder` has.

    Raises:
        ValueError: the adapter has new rows for input or output embeddings only, and the others would be random.
    """
    ends = {model.get_input_embeddings(), model.get_output_embeddings()}  # one module or two
    weights = {name: module.weight for name, module in model.named_modules() if module in ends}
    # with the parts that PEFT adds: trainable_token_indices have a `token_adapter`, adapted modules a `base_layer`
    saved_as = re.compile(
        rf"(?:.*\.)?({'|'.join(map(re.escape, weights))})(?:\.token_adapter)?(?:\.base_layer)?\.weight"
    )
    brought = {match[1]: shape[0] for n, shape in shapes_in_folder(folder).items() if (match := saved_as.fullmatch(n))}
    rows, now = set(brought.values()), _rows_of(model)
    if rows <= {now} or len(rows) > 1:  # PEFT raises for two sizes
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
    """Rows of the embeddings, from the config: under DeepSpeed ZeRO-3 the weights themselves are shards."""
    rows: int = model.config.get_text_config(decoder=True).vocab_size
    return rows


def take_along(model: Any, folder: Path) -> None:
    """Give `model` the generation config and special tokens that were saved with the adapter in `folder`.

    Raises:
        ValueError: the tokenizer there has tokens without an embedding in `model`.
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
    except Exception as error:  # the tokenizers package raises plain Exception
        logger.warning(
            f"The tokenizer in {folder} cannot be read. The model keeps the special tokens of its base: {error}"
        )
        return
    if last >= _rows_of(causal_lm):
        raise ValueError(
            f"the tokenizer in {folder} has tokens up to ID {last}, the base model has {_rows_of(causal_lm)} rows of "
            f"embeddings, and the adapter brings no others. {LOAD_CHANGED_BASE}"
        )
    from transformers.trainer_utils import align_special_tokens  # slow to import

    align_special_tokens(causal_lm, tokenizer)  # as Trainer did before the training


def adapter_folder_of(model: Any) -> Path | None:
    """The folder that the adapter on `model` was loaded from, also after merging; None if it is not known."""
    folder = getattr(find_causal_lm(model), _FOLDER, None)
    if folder is not None and not Path(folder).is_dir():
        logger.warning(
            f"{folder}, from which an adapter was loaded, is gone: files of the base model are used instead."
        )
        return None
    return None if folder is None else Path(folder)


def _require_own_weights(directory: str | os.PathLike[str], specification: dict[str, Any]) -> None:
    """Raise ValueError if `rope_patch.json` is older than the weights: a model without patches saved over them."""
    recorded, digest = specification.get("adapter_weights"), digest_of_folder(directory)
    if None not in (recorded, digest) and recorded != digest:  # PEFT says which weights are missing
        raise ValueError(
            f"{SIDECAR_NAME} in {directory} does not belong to the weights beside it, which were saved later "
            "or changed. If they were trained without rope_patch, delete the file and use PeftModel.from_pretrained; "
            'if they were trained with the RoPE that it names, set its "adapter_weights" to null.'
        )


def _require_recorded_rope(decoder: Any, specification: dict[str, Any], directory: str) -> None:
    """Raise ValueError if the rescalings now give other RoPE parameters than in the adapter's training.

    An older version did so: 'abf' with a window dropped the attention factor of a LongRoPE that names no factor.
    """
    recorded: tuple[Any, Any] = (specification["rope_parameters"], specification["max_position_embeddings"])
    made: tuple[Any, Any] = (decoder.config.rope_parameters, getattr(decoder.config, "max_position_embeddings", None))
    if with_factors(*recorded) != with_factors(*made):
        raise ValueError(
            f"the adapter in {directory} was trained with RoPE {recorded[0]} and a window of {recorded[1]} positions, "
            f"by rope-patch {specification['rope_patch_version']}. Its rescaling now gives {made[0]} and {made[1]}, "
            "which is another model. Load it with the version that trained it, and save what merge_and_unload() "
            "returns."
        )
