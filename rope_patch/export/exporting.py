"""`rope_patch.export`: write a model or an adapter as a checkpoint that another program serves right."""

import copy
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import AutoConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging

from ..adapters.watch import base_revision, require_no_decoder_in_adapters
from ..base.hub_revision import require_revision
from ..base.registry import unknown
from ..base.remote_code import load_pretrained
from ..base.validators import require_integer, require_number
from ..checkpoints.files_beside import Source, copy_license, copy_tokenizer, require_no_links_out, tokenizer_files
from ..checkpoints.tokenizer_window import narrow_tokenizer, warn_of_short_tokenizer, widen_tokenizer_of
from ..families.queries import records_query_scale
from ..forward.config_checks import require_frequencies_of_config, require_saved_rope, text_config
from ..forward.state import state_of
from ..loading import adapter_folder_of
from ..model_card import EvalFigures, base_of_runs, read_runs
from ..rescalings.in_place import RopeParameters, softmax_reads_mscale
from ..rope.older_form import older_form, unscaled_keys, write_older_keys
from ..rope.rotary import find_causal_lm, find_decoder, is_dynamic, is_nested, with_factors
from .attention_factor import Edit, fold_attention_factor, without_attention_factor
from .card import write_export_card
from .gguf import convert, find_converter, require_known_tokenizer
from .outcomes import TESTED, as_transformers_reads, wrong_outcomes
from .programs import PROGRAMS
from .reloading import reference_of, require_same_logits, to_gpu_with_room
from .sources import base_of, load, revision_of_base
from .weights import final_weights, is_adapted, plain_name, require_exportable
from .writing import ShardWriter, by_layer, whole_folder

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class Exported:
    """A checkpoint that `export` wrote.

    Args:
        folder: of the checkpoint.
        target: the program that it was written for.
        command: serves it.
        difference: between its logits, in a process without this package, and those of the model: root mean square
            over the standard deviation of the logits; None if this was not checked.
        checked_tokens: length of the sequences that were compared, in tokens.
        checked_to: their last position; for a model that takes position IDs, the last one of its context window.
        folded: whether an attention factor was folded into the weights.
    """

    folder: Path
    target: str
    command: str
    difference: float | None
    checked_tokens: int
    checked_to: int
    folded: bool

    def __str__(self) -> str:
        checked = "The logits were not checked"
        if self.difference is not None:
            checked = (
                f"Loaded without this package, its logits differ by {self.difference:.2g} standard "
                f"deviations ({self.checked_tokens} tokens, up to position {self.checked_to})"
            )
        folded = ", with the attention factor folded into the weights" if self.folded else ""
        return f"{self.folder}: a checkpoint for {self.target}{folded}. {checked}.\nServe it with: {self.command}"


def export(
    model: nn.Module | str | Path,
    folder: str | Path,
    *,
    target: str = "transformers",
    converter: str | Path | None = None,
    max_shard_gb: float = 5.0,
    check: bool = True,
    window: int | None = None,
    report: str | Path | None = None,
    tokenizer: str | Path | None = None,
    revision: str | None = None,
) -> Exported:
    """Write a checkpoint that `target` serves with the same logits as the model has here.

    Adapters are merged. LoRA on a quantised base is merged into its dequantised weights. RoPE parameters are written in
    the current and in the older form of Transformers. If the program ignores an attention factor, it is folded into
    the weights. If the program would serve the model wrong, export raises before it writes anything. The model is not
    changed. Memory holds its weights and one shard; the check loads the checkpoint again, in another process. A folder
    is loaded on a GPU that has room for both, hidden by CUDA_VISIBLE_DEVICES="", else on the CPU. LICENSE,
    NOTICE, COPYING and USE_POLICY files of the model, and of the base that it was trained from, are copied.

    Args:
        model: a loaded model, patched or not, with or without adapters of PEFT; or a folder or hub ID of a checkpoint;
            or the folder of an adapter, whose base model is loaded with the RoPE that the adapter was trained with.
        folder: to write. It must not exist, or must be empty, and appears when it is complete. Here and in the other
            paths, a leading `~` is the user's home.
        target: a name in `PROGRAMS`. "llama.cpp" adds model.gguf.
        converter: llama.cpp's convert_hf_to_gguf.py; None looks for it on PATH.
        max_shard_gb: size of one file of weights, in 10^9 bytes, above 0.
        check: whether to load the result without this package and compare its logits.
        window: context window that config and command promise, in positions, at most that of the model's config; None
            is that of the config. For a model that was trained on fewer positions than its RoPE scaling reaches. Not
            for dynamic NTK, whose formula reads the window of the config.
        report: of `rope-patch eval`, its folder or results.json, whose figures go into the card, README.md; None takes
            the one in the folder `rope-patch-report` in the checkpoint, or beside the checkpoint if it measured that.
        tokenizer: folder or hub ID of the tokenizer to copy. None looks, in this order, in `model` if it is a name, or
            in the folder that `load_adapter` loaded; in the base model and revision that an adapter names; and where
            the weights came from.
        revision: branch, tag or commit of the model on the hub that `model` names or was loaded from; None is "main".
            Tokenizer and license files come from it, and the card names it. Give it for a model in memory that was
            loaded at a revision, because not every version of Transformers records the commit.

    Returns:
        The folder, the command that serves it and how far its logits are from the model's.

    Raises:
        ValueError: an unknown target, or one that would serve this model wrong; weights that cannot be merged, are
            missing or damaged, or give no finite logits; a file that is no report; a revision for a folder; a file to
            copy that is a link out of the model's folder; or added tokens without the tokenizer that has them.
        FileExistsError: `folder` is not empty.
        FileNotFoundError: no converter for llama.cpp, no such report, or no tokenizer where `tokenizer` names one.
        RuntimeError: the result is another model. Nothing is left in `folder`.
    """
    if target not in PROGRAMS:
        raise unknown("target", target, PROGRAMS)
    require_number("max_shard_gb", max_shard_gb)
    llama_converter = find_converter(converter) if target == "llama.cpp" else None
    source = None if isinstance(model, nn.Module) else Path(os.path.expanduser(model))
    name = find_causal_lm(model).config._name_or_path if isinstance(model, nn.Module) else os.path.expanduser(model)
    require_revision(revision, str(name), "revision")
    figures = None if source is None else EvalFigures.beside(source)
    if report is not None:
        figures = EvalFigures.read(os.path.expanduser(report), source)
    tokenizer = None if tokenizer is None else os.path.expanduser(tokenizer)
    if tokenizer is not None and not tokenizer_files(tokenizer):
        raise FileNotFoundError(f"tokenizer must name a folder or hub id with a tokenizer's files, got {tokenizer}.")
    out = Path(os.path.expanduser(folder))
    with whole_folder(out) as unfinished:
        loaded = model if source is None else load(source, revision)
        assert isinstance(loaded, nn.Module)
        if check and source is not None:
            to_gpu_with_room(loaded)
        causal_lm, decoder = find_causal_lm(loaded), find_decoder(loaded)
        text = text_config(causal_lm, decoder)
        _require_plain(causal_lm, decoder)
        require_exportable(loaded, causal_lm)
        require_served(target, loaded)
        if target != "transformers" and text.model_type not in TESTED:
            logger.warning(
                f"{target} was tested only with the model types {', '.join(TESTED)}, not with {text.model_type!r}: "
                "compare the logits of a few prompts with those of Transformers before you serve it."
            )
        declared = getattr(text, "max_position_embeddings", None)
        window = _checked_window(window, text)
        served = _with_window(copy.deepcopy(decoder.config), window)  # what programs will read
        edits = fold_attention_factor(causal_lm, decoder, served) if wrong_outcomes(target, served) else {}
        config = _config_to_save(causal_lm, decoder, folded=bool(edits), window=window)
        reference = reference_of(loaded, text, window) if check else None
        beside = adapter_folder_of(causal_lm) if source is None else source  # has the record of the training
        sources = _sources(beside, causal_lm, revision, in_memory=source is None)
        for place, _ in sources:
            require_no_links_out(place)
        tokenizer_source = copy_tokenizer(sources if tokenizer is None else [(tokenizer, None)], unfinished)
        if tokenizer is None and tokenizer_source is not None:
            _require_no_added_tokens(text, tokenizer_source)
        trained_from = (base_of_runs(read_runs(place)) for place, _ in sources)
        bases = [(base.name, base.revision or None) for base in trained_from if base is not None and base.is_on_hub]
        copy_license(dict.fromkeys([*sources, *bases]), unfinished)
        if llama_converter is not None:
            if tokenizer_source is None:
                raise ValueError("llama.cpp needs the tokenizer in its file, and none was found beside the model.")
            if (tokenizer_json := unfinished / "tokenizer.json").is_file():
                require_known_tokenizer(config.model_type, tokenizer_json.read_text(encoding="utf-8"))
        _write(causal_lm, config, edits, unfinished, round(max_shard_gb * 1e9))
        widen_tokenizer_of(unfinished, causal_lm, window)
        # the tokenizer of the source may name the full reach of the RoPE scaling, which `window` cuts
        narrow_tokenizer(unfinished, declared, window)
        warn_of_short_tokenizer(unfinished, window)
        difference = None if reference is None else require_same_logits(unfinished, causal_lm, reference)
        if llama_converter is not None:
            convert(llama_converter, unfinished)
        write_export_card(
            unfinished,
            out.resolve().name,
            loaded,
            config if causal_lm.config is decoder.config else config.get_text_config(decoder=True),
            source=beside,
            revision=revision,
            target=target,
            figures=figures,
            has_tokenizer=tokenizer_source is not None,
            folded=bool(edits),
        )
    return Exported(
        out,
        target,
        PROGRAMS[target](out, window),
        difference,
        0 if reference is None else reference.n_tokens,
        0 if reference is None else reference.last,
        bool(edits),
    )


def require_served(target: str, model: nn.Module) -> None:
    """Raise ValueError if `target` would serve `model` wrong because of its RoPE. Weights are not checked.

    The model may be on the device "meta", to check before it is trained.

    Args:
        target: a name in `PROGRAMS`.
        model: a causal LM, patched as it will be exported.

    Raises:
        ValueError: the target is unknown, or would serve the model wrong.
    """
    if target not in PROGRAMS:
        raise unknown("target", target, PROGRAMS)
    for outcome in wrong_outcomes(target, find_decoder(model).config):
        if not outcome.folds:
            raise ValueError(
                f"{target} would serve this model wrong, without an error: under rope type {outcome.rope_type!r} it "
                f"{outcome.reason}. {outcome.instead}"
            )


def _require_plain(causal_lm: PreTrainedModel, decoder: PreTrainedModel) -> None:
    """Raise ValueError if a checkpoint without this package would be another model than this one."""
    if causal_lm is decoder:
        raise ValueError(
            f"export writes a causal LM with its output head, and {type(decoder).__name__} has none: load the model "
            "with AutoModelForCausalLM."
        )
    require_no_decoder_in_adapters(causal_lm)
    state = state_of(decoder)
    if state is None:
        require_frequencies_of_config(RopeParameters.of(decoder), decoder)
    else:
        state.require_no_native_rope("export")
        require_saved_rope(causal_lm, decoder, state)
        if state.active(training=False) is not None:
            raise ValueError(
                "a view changes inference too (when='always', or an open rope_view block), which no checkpoint can "
                "say. For 'nope' use the rescaling 'drop-rope'. For other views call unpatch_model, or patch the model "
                "with when='train'."
            )
    if records_query_scale(decoder.config.rope_parameters):
        raise ValueError(
            "queries are scaled by their position, which a checkpoint can say for Ministral 3 and Mistral 4 alone: "
            "export the model without that rescaling, or keep what save_pretrained writes and load it with this "
            "package (rope_patch.restore_query_scale)."
        )
    if causal_lm.is_remote_code():
        raise ValueError(
            f"{type(causal_lm).__name__} comes with Python code in its repository, which other programs do not run: "
            "write the model and its code with save_pretrained."
        )


def _checked_window(window: int | None, config: Any) -> int | None:
    """The context window to write into the config, in positions: `window`, or that of `config` for None."""
    declared: int | None = getattr(config, "max_position_embeddings", None)
    if window is None:
        return declared
    require_integer("window", window, least=1)
    if declared is None:
        raise ValueError(
            f"window must be left out for model type {config.model_type!r}, whose config names none, got {window}."
        )
    if window > declared:
        raise ValueError(f"window must be at most the {declared} positions of the model's config, got {window}.")
    parameters = config.rope_parameters
    by_layer_type = parameters.values() if is_nested(parameters) else [parameters]
    if window != declared and any(is_dynamic(options["rope_type"]) for options in by_layer_type if options):
        raise ValueError(
            f"window must be left out under rope type 'dynamic', whose formula reads the {declared} positions of the "
            f"config, got {window}: give the length to the program that serves the model."
        )
    return window


def _with_window(config: Any, window: int | None) -> Any:
    """The text config `config`, which then names this context window, with the attention factor of before."""
    if window is not None and window != config.max_position_embeddings:
        # LongRoPE takes its attention factor from the window, unless it is written
        config.rope_parameters = with_factors(config.rope_parameters, config.max_position_embeddings)
        config.max_position_embeddings = window
    return config


def _config_to_save(causal_lm: PreTrainedModel, decoder: PreTrainedModel, *, folded: bool, window: int | None) -> Any:
    config: Any = copy.deepcopy(causal_lm.config)
    text = config if causal_lm.config is decoder.config else config.get_text_config(decoder=True)
    _with_window(text, window)
    # Qwen2.5-1M has it: Transformers ignores it, and vLLM and SGLang apply it in place of any RoPE scaling
    vars(text).pop("dual_chunk_attention_config", None)
    text.rope_parameters = as_transformers_reads(text, scales_softmax=softmax_reads_mscale(decoder, text))
    if folded:
        text.rope_parameters = with_factors(without_attention_factor(text.rope_parameters), window)
    # for a family without an older form, `older_form` keeps the keys that are there: none of an earlier scaling
    write_older_keys(text, unscaled_keys(text))
    write_older_keys(text, older_form(text))
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = _compute_dtype(causal_lm) or causal_lm.dtype
    config.architectures = [type(causal_lm).__name__]
    if _is_untied(causal_lm):
        config.tie_word_embeddings = text.tie_word_embeddings = False
    return config


def _compute_dtype(causal_lm: Any) -> torch.dtype | None:
    """The dtype that a quantised model was loaded in; None for other models."""
    if getattr(causal_lm, "hf_quantizer", None) is None:
        return None
    dtype = causal_lm.config.dtype
    return dtype if isinstance(dtype, torch.dtype) else causal_lm.dtype


def _is_untied(causal_lm: Any) -> bool:
    """Whether adapters gave input and output embeddings different weights, although the config ties them."""
    ends = (causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings())
    return any(end is not None and is_adapted(end) for end in ends)


def _write(causal_lm: Any, config: Any, edits: dict[str, Edit], folder: Path, shard_bytes: int) -> None:
    """Write config, generation config and weights, the latter one layer after the other."""
    config.save_pretrained(folder)
    if causal_lm.can_generate():
        causal_lm.generation_config.save_pretrained(folder)
    tied: set[str] = set()
    if not _is_untied(causal_lm):
        for pair in causal_lm.get_expanded_tied_weights_keys(all_submodels=True).items():
            tied |= {plain_name(name) for name in pair}
    writer = ShardWriter(folder, shard_bytes)
    with tqdm(total=config.get_text_config(decoder=True).num_hidden_layers, desc="Writing layers") as bar:
        for group in by_layer(final_weights(causal_lm, _compute_dtype(causal_lm), tied)):
            for name, tensor in group.items():
                if tensor.is_floating_point() and tensor.isnan().any():
                    raise ValueError(f"{name} has NaN values: the training has diverged, or a file is damaged.")
                if name in edits:
                    group[name] = edits[name](tensor)
            # for example, one tensor in memory for all experts becomes a tensor for each
            for name, tensor in revert_weight_conversion(causal_lm, group).items():
                writer.add(name, tensor)
            bar.update(len(group) > 1)  # embeddings, last norm and head are groups of one
    writer.finish()


def _sources(beside: Path | None, causal_lm: Any, revision: str | None, *, in_memory: bool) -> list[Source]:
    """Where tokenizer and license may be: the source of the model, its base model, where the weights came from."""
    sources: list[Source] = [] if beside is None else [(str(beside), None if in_memory else revision)]
    if not in_memory and beside is not None and (beside / "adapter_config.json").is_file():
        sources.append((base_of(beside), revision_of_base(beside)))
    # newer versions of Transformers record the commit of a model from the hub; its branch may have moved since
    loaded = revision or base_revision(causal_lm) or getattr(causal_lm.config, "_commit_hash", None)
    return [*sources, (causal_lm.config._name_or_path, loaded)]


def _require_no_added_tokens(config: Any, tokenizer: Source) -> None:
    """Raise ValueError if tokens were added to the model, and `tokenizer` is that of the checkpoint before."""
    try:
        before = load_pretrained(AutoConfig, tokenizer[0], revision=tokenizer[1] or "main")
        rows = before.get_text_config(decoder=True).vocab_size
    except (OSError, ValueError, AttributeError):  # a folder with a tokenizer alone
        return
    if rows != config.vocab_size:
        raise ValueError(
            f"the model has embeddings of {config.vocab_size} tokens, and the checkpoint in {tokenizer[0]}, whose "
            f"tokenizer would be copied, has {rows}. Name the tokenizer that the model was trained with by tokenizer "
            f"(--tokenizer), or {tokenizer[0]} if no token was added."
        )
