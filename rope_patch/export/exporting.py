"""`rope_patch.export`: from a model or an adapter to a folder that one program serves right."""

import copy
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
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
from ..forward.config_checks import require_frequencies_of_config, require_saved_rope, text_config
from ..forward.state import state_of
from ..loading import adapter_folder_of
from ..model_card import base_of_runs, read_runs
from ..rescalings.in_place import RopeParameters, softmax_reads_mscale
from ..rope.older_form import older_form, unscaled_keys, write_older_keys
from ..rope.rotary import find_causal_lm, find_decoder, is_dynamic, is_nested, with_factors
from .attention_factor import Edit, fold_attention_factor, without_attention_factor
from .card import figures_of, write_export_card
from .gguf import convert, find_converter, require_known_tokenizer
from .outcomes import TESTED, Wrong, as_transformers_reads, wrong_outcomes
from .programs import PROGRAMS
from .reloading import reference_of, require_same_logits
from .sources import base_of, load, revision_of_base
from .weights import final_weights, is_adapted, plain_name, require_exportable
from .writing import ShardWriter, by_layer, whole_folder

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class Exported:
    """What was written.

    Args:
        folder: the checkpoint.
        target: the program that it is for.
        command: that serves it.
        largest_difference: of the logits to those of the model, in a process without this package; None if not checked.
        checked_tokens: in the rows of that comparison.
        checked_to: position that they reach, where the model takes positions the last one of the window.
        folded: whether an attention factor was folded into the weights.
    """

    folder: Path
    target: str
    command: str
    largest_difference: float | None
    checked_tokens: int
    checked_to: int
    folded: bool

    def __str__(self) -> str:
        checked = (
            "not checked"
            if self.largest_difference is None
            else f"loaded without this package, logits differ by {self.largest_difference:.2g} at most "
            f"(rows of {self.checked_tokens} tokens, to position {self.checked_to})"
        )
        folded = ", the attention factor folded into the weights" if self.folded else ""
        return f"{self.folder}: for {self.target}{folded}; {checked}.\nServe it with: {self.command}"


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
    """Write a checkpoint that `target` serves with the logits that the model has here.

    Adapters are merged (LoRA into a quantised base: into its dequantised weights), both forms of the RoPE parameters
    are written, and an attention factor that the program ignores is folded into the weights. What the program would
    serve wrong is refused before anything is written. The model stays as it is. In memory are its weights and one
    shard; the check loads the checkpoint once more, in a process of its own. LICENSE, NOTICE, COPYING and USE_POLICY
    files of the model, and of the base that it was trained from, are copied.

    Args:
        model: a loaded model, patched or not, bare or with adapters of PEFT; or a folder or hub id of a checkpoint; or
            the folder of an adapter, whose base model is loaded with the RoPE that the adapter was trained with.
        folder: to write, which must not exist, or be empty. It appears when it is whole. In it and in the other paths
            a `~` in front is the user's home.
        target: a name in `PROGRAMS`. "llama.cpp" adds model.gguf.
        converter: llama.cpp's convert_hf_to_gguf.py; None looks for it on PATH.
        max_shard_gb: size of one file of weights, in 10^9 bytes, above 0.
        check: whether to load the result without this package and compare its logits.
        window: positions that config and command promise, at most those of the model's config; None promises those.
            For a model that was trained for fewer than its rescaling reaches; not under dynamic NTK, whose formula
            reads the config's.
        report: of `rope-patch eval`, its folder or results.json, whose figures go into the card, README.md; None takes
            that in the folder `rope-patch-report` in the checkpoint, or beside it if it measured this checkpoint.
        tokenizer: folder or hub id that has the tokenizer's files, which are copied; None looks in `model` where it is
            a name, or in the folder that `load_adapter` was given, then in the base model that an adapter names and of
            the revision that it names, then where the weights came from.
        revision: branch, tag or commit of the model on the hub that `model` names or was loaded from, whose tokenizer
            and license files go along and which the card names; None is "main". Of a model that was loaded at another
            one give it: not every version of Transformers records the commit.

    Returns:
        Where it is, the command that serves it and the largest difference of logits.

    Raises:
        ValueError: a target that is not known or would serve this model wrong, weights that cannot be merged, are
            missing or damaged or give no finite logits, a report that is none, a revision of a folder, a file to copy
            that is a link out of the model's folder, or a model with added tokens whose tokenizer is not known.
        FileExistsError: there is something in `folder`.
        FileNotFoundError: no converter for llama.cpp, no such report, or no tokenizer where `tokenizer` names one.
        RuntimeError: the result is another model. Nothing is left in `folder`.
    """
    if target not in PROGRAMS:
        raise unknown("target", target, PROGRAMS)
    require_number("max_shard_gb", max_shard_gb)
    chosen_converter = find_converter(converter) if target == "llama.cpp" else None
    model = model if isinstance(model, nn.Module) else os.path.expanduser(model)
    source = None if isinstance(model, nn.Module) else Path(model)
    name = model if isinstance(model, str) else str(find_causal_lm(model).config._name_or_path)
    require_revision(revision, name, "revision")
    report, tokenizer = (path if path is None else os.path.expanduser(path) for path in (report, tokenizer))
    figures = figures_of(report, source)
    if tokenizer is not None and not tokenizer_files(tokenizer):
        raise FileNotFoundError(f"tokenizer must name a folder or hub id with a tokenizer's files, got {tokenizer}.")
    out = Path(os.path.expanduser(folder))
    with whole_folder(out) as unfinished:
        loaded = model if isinstance(model, nn.Module) else load(model, revision)
        causal_lm, decoder = find_causal_lm(loaded), find_decoder(loaded)
        edits = _require_right(target, loaded, causal_lm, decoder)
        declared = getattr(text_config(causal_lm, decoder), "max_position_embeddings", None)
        window = _promised(window, text_config(causal_lm, decoder))
        config = _config_to_save(causal_lm, decoder, folded=bool(edits), window=window)
        reference = reference_of(loaded, text_config(causal_lm, decoder), window) if check else None
        beside = adapter_folder_of(causal_lm) if source is None else source  # with the record of its training
        sources = _sources(model, beside, causal_lm, revision)
        for named, _ in sources:
            require_no_links_out(named)
        vocabulary = copy_tokenizer(sources if tokenizer is None else [(str(tokenizer), None)], unfinished)
        has_tokenizer = vocabulary is not None
        if tokenizer is None and vocabulary is not None:
            _require_no_added_tokens(text_config(causal_lm, decoder), vocabulary)
        copy_license(dict.fromkeys([*sources, *_trained_from(sources)]), unfinished)  # each is asked once
        if chosen_converter is not None:
            _require_convertible_tokenizer(unfinished, config.model_type, has_tokenizer)
        _write(causal_lm, config, edits, unfinished, round(max_shard_gb * 1e9))
        widen_tokenizer_of(unfinished, causal_lm, window)
        # the tokenizer of a checkpoint names the reach of its rescaling, of which less may be promised
        narrow_tokenizer(unfinished, declared, window)
        warn_of_short_tokenizer(unfinished, window)
        difference = None
        if reference is not None:
            difference = require_same_logits(unfinished, causal_lm, reference)
        if chosen_converter is not None:
            convert(chosen_converter, unfinished)
        write_export_card(
            unfinished,
            out.resolve().name,
            loaded,
            config if causal_lm.config is decoder.config else config.get_text_config(decoder=True),
            source=beside,
            revision=revision,
            target=target,
            figures=figures,
            has_tokenizer=has_tokenizer,
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
    """Raise ValueError if `target` would serve `model` wrong, by its RoPE; weights are not looked at.

    A model on the device "meta" will do, so that this can be asked before a model is trained.

    Args:
        target: a name in `PROGRAMS`.
        model: a causal LM, patched as it is to be exported.

    Raises:
        ValueError: a target that is not known, or would serve the model wrong.
    """
    if target not in PROGRAMS:
        raise unknown("target", target, PROGRAMS)
    _wrong(target, find_decoder(model))


def _require_right(
    target: str, model: nn.Module, causal_lm: PreTrainedModel, decoder: PreTrainedModel
) -> dict[str, Edit]:
    """What to fold so that `target` serves the model right.

    Raises:
        ValueError: it cannot.
    """
    _require_plain(causal_lm, decoder)
    require_exportable(model, causal_lm)
    wrong = _wrong(target, decoder)
    model_type = decoder.config.model_type
    if target == "transformers":
        return {}
    if model_type not in TESTED:
        logger.warning(
            f"{target} was not tried with model type {model_type!r}, only with {', '.join(TESTED)}: compare the logits "
            "of a few prompts with Transformers' before you serve it."
        )
    return fold_attention_factor(causal_lm, decoder) if wrong else {}


def _wrong(target: str, decoder: Any) -> list[Wrong]:
    """What `target` makes wrong of the RoPE parameters, which folding an attention factor into the weights mends.

    Raises:
        ValueError: it does not.
    """
    wrong = wrong_outcomes(target, decoder.config)
    for outcome in wrong:
        if not outcome.folds:
            raise ValueError(
                f"{target} would serve this model wrong, without an error: under rope type {outcome.rope_type!r} it "
                f"{outcome.reason}. {outcome.instead}"
            )
    return wrong


def _require_plain(causal_lm: PreTrainedModel, decoder: PreTrainedModel) -> None:
    """Raise ValueError if a plain checkpoint would be another model than this one as it runs."""
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
        source = state.active(training=False)
        if source is not None:
            raise ValueError(
                "a view is in force in inference too (when='always', or an open rope_view block), and no checkpoint "
                "can say so. For 'nope' use the rescaling 'drop-rope'; else take the view off with unpatch_model, or "
                "patch it with when='train'."
            )
    if causal_lm.is_remote_code():
        raise ValueError(
            f"{type(causal_lm).__name__} is code of a repository, which other programs do not run: save_pretrained "
            "writes the model with it."
        )


def _promised(window: int | None, config: Any) -> int | None:
    """The positions to write into the config: `window`, which may be less than `config` has, or those."""
    reached: int | None = getattr(config, "max_position_embeddings", None)
    if window is None:
        return reached
    require_integer("window", window, least=1)
    if reached is None:
        raise ValueError(
            f"window must be left out for model type {config.model_type!r}, whose config names none, got {window}."
        )
    if window > reached:
        raise ValueError(f"window must be at most the {reached} positions of the model's config, got {window}.")
    parameters = config.rope_parameters
    of_layer_types = parameters.values() if is_nested(parameters) else [parameters]
    if window != reached and any(is_dynamic(o["rope_type"]) for o in of_layer_types if o):
        raise ValueError(
            f"window must be left out under rope type 'dynamic', whose formula reads the {reached} positions of the "
            f"config, got {window}: name the length to the program that serves the model."
        )
    return window


def _config_to_save(causal_lm: PreTrainedModel, decoder: PreTrainedModel, *, folded: bool, window: int | None) -> Any:
    config: Any = copy.deepcopy(causal_lm.config)
    text = config if causal_lm.config is decoder.config else config.get_text_config(decoder=True)
    if window is not None and window != text.max_position_embeddings:
        text.rope_parameters = with_factors(text.rope_parameters, text.max_position_embeddings)
        text.max_position_embeddings = window
    # of Qwen2.5-1M: Transformers ignores it, and vLLM and SGLang take it instead of any scaling
    vars(text).pop("dual_chunk_attention_config", None)
    text.rope_parameters = as_transformers_reads(text, scales_softmax=softmax_reads_mscale(decoder, text))
    if folded:
        text.rope_parameters = without_attention_factor(text.rope_parameters)
    write_older_keys(text, unscaled_keys(text))
    write_older_keys(text, older_form(text))
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = causal_lm.dtype if _compute_dtype(causal_lm) is None else _compute_dtype(causal_lm)
    config.architectures = [type(causal_lm).__name__]
    if _is_untied(causal_lm):
        config.tie_word_embeddings = text.tie_word_embeddings = False
    return config


def _compute_dtype(causal_lm: Any) -> torch.dtype | None:
    """The dtype that a quantised model was loaded in; None for others, whose weights say it."""
    if getattr(causal_lm, "hf_quantizer", None) is None:
        return None
    dtype = causal_lm.config.dtype
    return dtype if isinstance(dtype, torch.dtype) else causal_lm.dtype


def _is_untied(causal_lm: Any) -> bool:
    """Whether adapters have made two of the embeddings at both ends, which the config says are one."""
    ends = (causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings())
    return any(end is not None and is_adapted(end) for end in ends)


def _tied_names(causal_lm: Any) -> set[str]:
    """Names of the weights that are tied when the saved config is loaded, as `final_weights` says them."""
    if _is_untied(causal_lm):
        return set()
    pairs = causal_lm.get_expanded_tied_weights_keys(all_submodels=True).items()
    return {plain_name(name) for pair in pairs for name in pair}


def _write(causal_lm: Any, config: Any, edits: dict[str, Edit], folder: Path, shard_bytes: int) -> None:
    config.save_pretrained(folder)
    if causal_lm.can_generate():
        causal_lm.generation_config.save_pretrained(folder)
    writer = ShardWriter(folder, shard_bytes)
    with logging.tqdm(total=config.get_text_config(decoder=True).num_hidden_layers, desc="Writing layers") as bar:
        for group in by_layer(final_weights(causal_lm, _compute_dtype(causal_lm), _tied_names(causal_lm))):
            edited = {name: _no_nan(edits.get(name, _as_is)(tensor), name) for name, tensor in group.items()}
            for name, tensor in revert_weight_conversion(causal_lm, edited).items():
                writer.add(name, tensor)
            bar.update(len(group) > 1)
    writer.finish()


def _require_convertible_tokenizer(folder: Path, model_type: str, has_tokenizer: bool) -> None:
    """Raise ValueError if llama.cpp's converter finds no tokenizer in `folder`, or takes it for another."""
    if not has_tokenizer:
        raise ValueError("llama.cpp needs the tokenizer in its file, and none was found beside the model.")
    if (tokenizer_json := folder / "tokenizer.json").is_file():
        require_known_tokenizer(model_type, tokenizer_json.read_text(encoding="utf-8"))


def _sources(model: nn.Module | str | Path, beside: Path | None, causal_lm: Any, revision: str | None) -> list[Source]:
    """Where the files beside the weights may lie: what the user names, its base, then where the weights came from."""
    in_memory = isinstance(model, nn.Module)
    named: list[Source] = [] if beside is None else [(str(beside), None if in_memory else revision)]
    if not in_memory and beside is not None and (beside / "adapter_config.json").is_file():
        named.append((base_of(beside), revision_of_base(beside)))
    # versions of Transformers that keep the commit of a model from the hub, which a branch may have left since
    loaded = revision or base_revision(causal_lm) or getattr(causal_lm.config, "_commit_hash", None)
    return [*named, (causal_lm.config._name_or_path, loaded)]


def _require_no_added_tokens(config: Any, vocabulary: Source) -> None:
    """Raise ValueError if tokens were added to a model, and the tokenizer is that of the checkpoint from before."""
    try:
        before = load_pretrained(AutoConfig, vocabulary[0], revision=vocabulary[1] or "main")
        rows = before.get_text_config(decoder=True).vocab_size
    except (OSError, ValueError, AttributeError):  # a tokenizer alone
        return
    if rows != config.vocab_size:
        raise ValueError(
            f"the model has embeddings of {config.vocab_size} tokens and the checkpoint in {vocabulary[0]}, whose "
            f"tokenizer would be copied, of {rows}. Name the tokenizer of the model's training by tokenizer "
            "(--tokenizer), or that one if no token was added."
        )


def _trained_from(sources: list[Source]) -> list[Source]:
    """The model on the hub that training began with, where the record beside a source names one."""
    bases = [base for source, _ in sources if (base := base_of_runs(read_runs(source))) is not None]
    return [(base.name, base.revision or None) for base in bases if base.is_on_hub]


def _no_nan(tensor: torch.Tensor, name: str) -> torch.Tensor:
    if tensor.is_floating_point() and tensor.isnan().any():
        raise ValueError(f"{name} has values that are no numbers (NaN): training has diverged, or a file is damaged.")
    return tensor


def _as_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
