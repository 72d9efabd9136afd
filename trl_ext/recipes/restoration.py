"""LinearARD in one call: distil at the native length, go on at the extended one, export a plain checkpoint."""

import gc
import hashlib
import json
import math
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.utils import logging

from rope_patch import load_adapter, patch_model
from rope_patch.base.registry import unknown
from rope_patch.base.remote_code import load_pretrained
from rope_patch.checkpoints.files_beside import copy_license
from rope_patch.checkpoints.tokenizer_window import widen_tokenizer
from rope_patch.checkpoints.whole import load_checkpoint
from rope_patch.export.serving import serving_of
from rope_patch.export.writing import unfinished_folders, whole_folder
from rope_patch.forward.config_agrees import text_config
from rope_patch.layout.special_tokens import SpecialTokens, cut_document
from rope_patch.methods import resolve_rescaling
from rope_patch.model_card import facts_of, has_card_of_user, read_runs, render, write_card, write_runs
from rope_patch.rope.rotary import find_decoder

from ..config import LONG_DOCUMENTS, RopeSFTConfig
from ..runs.folder import (
    Stopwatch,
    forgotten_unless_begun,
    last_checkpoint,
    only_run,
    read_run_record,
    record_settings,
    require_same_settings,
    write_whole,
)
from ..runs.model_files import begun_with, commit_of, model_files, recorded_commit, require_same_model
from ..trainer.model_setup import with_base_revision
from ..trainer.trainer import RopeSFTTrainer

logger = logging.get_logger(__name__)

RECORD = "restore.json"
"""What a run was begun with, in its folder."""

# the paper trains the projections of q, k and v in both stages (sections 3.4 and 4.1); the optimiser is that of the
# authors' code: nearly constant after four steps, gradients clipped at 5
_OPTIMISER: dict[str, Any] = {
    "trainable": "qkv",
    "learning_rate": 2e-5,
    "weight_decay": 0.01,
    "warmup_steps": 4,
    "lr_scheduler_type": "cosine_with_min_lr",
    "lr_scheduler_kwargs": {"min_lr_rate": 0.9},
    "max_grad_norm": 5.0,
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "save_strategy": "steps",
    "save_steps": 50,
    "logging_steps": 1,
}
DISTIL: dict[str, Any] = {
    **_OPTIMISER,
    "objective": "relation-distill",
    "max_length": 4096,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 4,
    "max_steps": 144,
}
"""Stage 1: 144 steps of 4 rows of 4096 tokens, 2.36M tokens. `trainable` is left out under adapters."""
EXTEND: dict[str, Any] = {
    **_OPTIMISER,
    "objective": "clm",
    "max_length": 32768,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 4,
    "max_steps": 16,
}
"""Stage 2: 16 steps of 4 rows of 32768 tokens, 2.1M tokens. `trainable` is left out under adapters."""


@dataclass(frozen=True)
class Stage:
    """What a finished stage did.

    Args:
        steps: optimizer steps.
        tokens: tokens of the rows that were trained on: rows of all steps * tokens of a row.
        seconds: of training, over all its parts if it was interrupted and resumed.
        loss: mean of the last tenth of the steps.
    """

    steps: int
    tokens: int
    seconds: float
    loss: float


@dataclass(frozen=True)
class Restored:
    """The result of `restore`.

    Args:
        folder: a plain checkpoint with its tokenizer.
        distil: stage 1.
        extend: stage 2, None if it was left out.
    """

    folder: Path
    distil: Stage
    extend: Stage | None

    @property
    def tokens(self) -> int:
        """Tokens of both stages."""
        return self.distil.tokens + (self.extend.tokens if self.extend else 0)


def restore(
    model: str | Path,
    documents: Dataset,
    output_dir: str | Path,
    *,
    rescale: str,
    rescale_args: Mapping[str, Any],
    peft_config: Any = None,
    quantization_config: Any = None,
    dtype: torch.dtype | str | None = None,
    model_init_kwargs: Mapping[str, Any] | None = None,
    distil: Mapping[str, Any] | None = None,
    extend: Mapping[str, Any] | None = None,
    skip_extension: bool = False,
) -> Restored:
    """Rescale a model, distil its own relations back into it, train on at the extended length, and export it.

    Stage 1 distils q, k and v relations of the model as it is into the rescaled one, on rows of the native length.
    Stage 2 is next-token training on rows of the extended length. The same call goes on where an interrupted one
    stopped, within a stage or between stages; what is exported loads everywhere without this package.

    Args:
        model: hub id or folder of a checkpoint. Of a branch on the hub a run loads the commit that it was when the run
            began, and names it.
        documents: with a column `text`; each document is cut into rows on its own, which begin as the tokenizer begins
            a text. How much of the text is in no row is told before training.
        output_dir: for checkpoints of the stages, `restore.json` and the result, in `model`.
        rescale: name of a rescaling, e.g. "pi".
        rescale_args: its options, e.g. {"factor": 4.0}.
        peft_config: adapters to train in both stages, e.g. LoRA on q, k and v, in float32 whatever the base is in. None
            trains the weights of the projections of q, k and v, as the paper does, beside a frozen copy for the
            teacher; `{"trainable": "all"}` in distil or extend trains every weight, which is ours.
        quantization_config: of the base model under adapters (QLoRA); the result is merged into unquantised weights.
        dtype: that the model is trained in: of the base under adapters, None for bfloat16; without adapters float32 or
            None, as 16 bits round steps of 2e-5 away. Forward and backward run in bfloat16 either way, unless distil
            and extend have bf16=False. What is exported has the dtype of the checkpoint that came.
        model_init_kwargs: passed to `from_pretrained` beside it, e.g. {"attn_implementation": "flash_attention_2"}.
        distil: fields of `RopeSFTConfig` that differ from `DISTIL`, the paper's.
        extend: fields of `RopeSFTConfig` that differ from `EXTEND`.
        skip_extension: whether to leave stage 2 out.

    Returns:
        Where the result is, and what each stage did.

    Raises:
        ValueError: options that do not fit, 16-bit weights without adapters, rows beyond the window of a stage's
            teacher, a teacher in stage 2 without adapters, ZeRO-3, too little text for one row, a model whose
            weights are not whole or that has code of its own, or a folder with another run, or in which another
            process runs.

    Source: LinearARD, arXiv:2604.00004.
    """
    if not isinstance(model, str | Path):
        raise ValueError(
            f"model must be a hub id or the folder of a checkpoint, which is loaded anew for each stage, got "
            f"{type(model).__name__}."
        )
    if not isinstance(rescale_args, Mapping):
        raise ValueError(f"rescale_args must be a dict such as {{'factor': 4.0}}, got {rescale_args!r}.")
    resolve_rescaling(rescale, dict(rescale_args))
    init_kwargs = dict(model_init_kwargs or {})
    for name in ("dtype", "torch_dtype", "quantization_config"):
        if name in init_kwargs:
            raise ValueError(f"{name} is an argument of restore: take it out of model_init_kwargs.")
    if init_kwargs.pop("trust_remote_code", False):
        raise ValueError(
            "restore exports what it has trained, and other programs do not run a model's own Python code: take "
            "trust_remote_code out of model_init_kwargs, or use a RopeSFTTrainer for each stage "
            "(objective='relation-distill', then 'clm' on what it saved)."
        )
    dtype = _training_dtype(dtype, peft_config)
    root = Path(output_dir)
    stage_options = {"distil": _stage(DISTIL, "distil", distil, peft_config)}
    of_extension = _stage(EXTEND, "extend", extend, peft_config)
    if skip_extension:
        _require_fields("extend", of_extension)
    else:
        stage_options["extend"] = of_extension
    plan: dict[str, Any] = {
        "model": str(model),
        "rescale": rescale,
        "rescale_args": dict(rescale_args),
        "peft_config": None if peft_config is None else _plain(peft_config.to_dict()),
        "model_revision": init_kwargs.get("revision"),
        "quantized": quantization_config is not None,
        "dtype": str(dtype),
        "distil": _plain(stage_options["distil"]),
        "extend": None if skip_extension else _plain(stage_options["extend"]),
    }
    configs = {name: _config(name, {"output_dir": str(root / name), **plan[name]}) for name in stage_options}
    if is_deepspeed_zero3_enabled():
        raise ValueError(
            "restore exports a model that it loads anew, of which each rank would have a part under ZeRO-3: use "
            "ZeRO-2, or a RopeSFTTrainer for each stage (objective='relation-distill', then 'clm' on what it saved)."
        )
    record = root / RECORD
    commit = _commit(str(model), init_kwargs, record)
    if commit is not None:
        init_kwargs["revision"] = commit
    of_hub = {name: value for name, value in init_kwargs.items() if name in _OF_HUB}
    pretrained = load_pretrained(AutoConfig, model, **of_hub)
    native = getattr(pretrained.get_text_config(), "max_position_embeddings", None)
    for name, config in configs.items():
        _require_teacher(name, config, native, adapters=peft_config is not None)
    tokenizer = load_pretrained(AutoTokenizer, model, **of_hub)
    rows = {}
    for name, config in configs.items():
        rows[name], coverage = cut_into_rows(documents, tokenizer, config.max_length or 0)
        if config.process_index == 0:
            logger.warning(f"{name}: {coverage} {_reading(config, len(rows[name]))}")
    plan["documents"] = _digest(documents)
    files = model_files(str(Path(model, of_hub.get("subfolder") or "")))
    require_same_settings(record, plan, "output_dir", {"documents": "contents of the documents"})
    require_same_model(record, str(model), files, "output_dir")
    ranks = PartialState()  # each of which runs all this; the first one writes
    ranks.wait_for_everyone()
    # a lock is of the file that was there when it was taken: one that is there is not written anew
    if ranks.is_main_process and not record.is_file():
        record_settings(record, {**plan, "model_files": files, "model_commit": commit}, "output_dir")
    seconds = root / "seconds.json"
    with ExitStack() as held:
        if ranks.is_main_process:
            held.enter_context(only_run(record, "output_dir"))
            held.enter_context(forgotten_unless_begun(record, seconds))
        stopwatch = Stopwatch(seconds, writes=ranks.is_main_process)

        def load(folder: Path | None, quantized: bool, dtype: torch.dtype | str) -> Any:
            """The model as the stage before left it in `folder`, or rescaled and with new adapters."""
            settings: dict[str, Any] = {**init_kwargs, "dtype": dtype}
            if folder is not None and peft_config is None:
                return load_checkpoint(folder, **settings)
            if quantized and quantization_config is not None:
                settings["quantization_config"] = quantization_config
            base = load_checkpoint(model, **settings)
            if folder is not None:
                return load_adapter(base, folder, is_trainable=True)
            return patch_model(base, rescale, **rescale_args)

        stages: dict[str, Stage] = {}
        before: Path | None = None
        for name, config in configs.items():
            file = root / f"{name}.json"
            if file.is_file():
                stages[name] = Stage(**read_run_record(file))
            else:
                revision = init_kwargs.get("revision")
                new_adapters = with_base_revision(peft_config, revision) if before is None else None
                student = load(before, quantized=True, dtype=dtype)
                stages[name] = _train(
                    student, config, rows[name], tokenizer, new_adapters, revision, root / name, stopwatch
                )
                del student
                if ranks.is_main_process:
                    write_whole(file, asdict(stages[name]))
                ranks.wait_for_everyone()
            before = root / name / "final"
        result = Restored(root / "model", stages["distil"], stages.get("extend"))
        if ranks.is_main_process and not (result.folder / "config.json").is_file():
            weights_dtype = (
                getattr(pretrained, "dtype", None) or AutoModelForCausalLM.from_pretrained(model, **init_kwargs).dtype
            )
            # and not float32, which would double the checkpoint
            final = load(before, quantized=False, dtype=weights_dtype)
            if peft_config is not None:
                final = final.merge_and_unload()
            for left in unfinished_folders(result.folder):  # by a call that was killed here; as large as the model
                shutil.rmtree(left)
            with whole_folder(result.folder) as unfinished:
                final.save_pretrained(unfinished)
                tokenizer.save_pretrained(unfinished)
                copy_license([(str(model), of_hub.get("revision"))], unfinished)
                window = getattr(final.config.get_text_config(), "max_position_embeddings", None)
                widen_tokenizer(unfinished, native, window)
                finals = [root / name / "final" for name in configs]
                _write_card(final, tokenizer, finals, unfinished, title=root.resolve().name)
        elif ranks.is_main_process:
            logger.warning(f"All that was begun in {root} is done: nothing was left to do.")
        ranks.wait_for_everyone()
        return result


def _write_card(
    model: Any, tokenizer: PreTrainedTokenizerBase, stages: list[Path], folder: Path, *, title: str
) -> None:
    """The card of the result and the record of both stages, whose own folders have theirs."""
    runs = [runs[-1] for stage in stages if (runs := read_runs(stage))]
    facts = facts_of(model, runs, is_adapter=False, rescalings=runs[-1]["run"]["rescalings"])
    config = text_config(model, find_decoder(model))
    facts = replace(
        facts,
        serving=serving_of(config, config.max_position_embeddings, None),
        has_chat_template=tokenizer.chat_template is not None,
    )
    write_card(folder, render(facts, title), keep=has_card_of_user(folder))
    write_runs(runs, folder)


def _config(stage: str, settings: dict[str, Any]) -> RopeSFTConfig:
    _require_fields(stage, settings)
    try:
        return RopeSFTConfig(**{**LONG_DOCUMENTS, **settings})
    except ValueError as error:
        if "support bf16/gpu" not in str(error):  # of Transformers, for lack of a GPU
            raise
        raise ValueError(
            "there is no GPU that torch can see. use_cpu true and bf16 false, both in distil and in extend, train on "
            "the CPU, which is slow."
        ) from error


def _require_fields(stage: str, settings: Mapping[str, Any]) -> None:
    known = {f.name for f in fields(RopeSFTConfig) if f.init}
    for name in settings:
        if name not in known:
            raise unknown("field", name, known, of=f"{stage}, which takes those of RopeSFTConfig")


# arguments of `from_pretrained` that say where a checkpoint is: its config and tokenizer come from there too
_OF_HUB = ("revision", "subfolder", "token", "cache_dir", "local_files_only")


def _commit(model: str, init_kwargs: Mapping[str, Any], record: Path) -> str | None:
    """The commit of a model on the hub that the run was begun with, or of a new run what its revision is now."""
    of_hub = {name: value for name, value in init_kwargs.items() if name in _OF_HUB}
    revision = of_hub.get("revision")
    commit = recorded_commit(begun_with(record), model, revision)
    if commit is None and not Path(model).is_dir():
        load_pretrained(AutoConfig, model, **of_hub)  # into the cache
        commit = commit_of(model, revision, cache_dir=of_hub.get("cache_dir"), subfolder=of_hub.get("subfolder") or "")
    commits: list[str | None] = broadcast_object_list([commit])  # a branch may move while ranks start
    return commits[0]


# fields that a stage may not have of its own
_OF_BOTH = {
    "rescale": "an argument of restore",
    "rescale_args": "an argument of restore",
    "output_dir": "which restore makes below its own",
    "resume_from_checkpoint": "as the same call goes on where it stopped",
}


def _training_dtype(dtype: torch.dtype | str | None, peft_config: Any) -> torch.dtype | str:
    chosen = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
    if chosen is None:
        return torch.float32 if peft_config is None else torch.bfloat16
    if chosen != "auto" and not (isinstance(chosen, torch.dtype) and chosen.is_floating_point):
        raise ValueError(f"dtype must be None, 'auto' or a floating point dtype such as 'float32', got {dtype!r}.")
    if peft_config is None and chosen not in (torch.float32, torch.float64):
        raise ValueError(
            f"dtype={dtype!r}: without adapters the weights themselves are trained, and 16 bits round steps at the "
            "learning rate of 2e-5 away: after 40 of them 20 % of bfloat16 weights had changed. Leave dtype out, which "
            "trains float32 weights under bfloat16 autocast and exports in the checkpoint's own dtype, or give "
            "peft_config, whose adapters are float32 on a base in 16 bits."
        )
    return chosen


def _stage(
    defaults: dict[str, Any], name: str, overrides: Mapping[str, Any] | None, peft_config: Any
) -> dict[str, Any]:
    """Fields of a stage's config."""
    overrides = {} if overrides is None else overrides
    if not isinstance(overrides, Mapping):
        raise ValueError(f"{name} must be a dict of fields of RopeSFTConfig, got {overrides!r}.")
    for field in _OF_BOTH:
        if field in overrides:
            raise ValueError(f"{name}: {field} is for both stages, {_OF_BOTH[field]}: take it out of {name}.")
    if peft_config is None:
        return {**defaults, **overrides}
    if overrides.get("trainable", "all") != "all":
        raise ValueError(
            f"{name}: trainable={overrides['trainable']!r} is for training without adapters: name target_modules in "
            "peft_config instead."
        )
    return {**{field: value for field, value in defaults.items() if field != "trainable"}, **overrides}


def _require_teacher(name: str, config: RopeSFTConfig, window: int | None, *, adapters: bool) -> None:
    """Raise if a stage has a teacher and the model as it came is not there, or has not learned rows as long."""
    if not config.objective_options.needs_teacher:
        return
    if name == "extend" and not adapters:
        raise ValueError(
            f"extend: objective {config.objective!r} learns from the model as it came, and stage 2 begins from the "
            "weights of stage 1, which would teach in its place: give peft_config, whose adapters leave it as it is, "
            "or an objective without a teacher."
        )
    length = config.max_length or 0
    if window is not None and length > window:
        raise ValueError(
            f"{name}: max_length must be within the window of {window} positions that the model came with, beyond "
            f"which its teacher teaches what it never learned, got {length}. Give {name}={{'max_length': {window}}}."
        )


def _reading(config: RopeSFTConfig, n_rows: int) -> str:
    """How much of its rows a stage reads."""
    if config.max_steps <= 0:
        return f"{config.num_train_epochs:g} epochs read all of them."
    read = config.max_steps * _rows_a_step(config)
    return f"{config.max_steps} steps read {read:,} rows, {read / n_rows:.2g} times as many."


def _rows_a_step(config: RopeSFTConfig) -> int:
    return config.per_device_train_batch_size * config.gradient_accumulation_steps * config.world_size


def _rows_read(config: RopeSFTConfig, steps: int, n_rows: int) -> int:
    """Rows of so many steps; the last of an epoch may have fewer."""
    of_step = _rows_a_step(config)
    epochs, rest = divmod(steps, max(math.ceil(n_rows / of_step), 1))
    return epochs * n_rows + min(rest * of_step, n_rows)


def cut_into_rows(documents: Dataset, tokenizer: PreTrainedTokenizerBase, length: int) -> tuple[Dataset, str]:
    """Rows of exactly `length` tokens: each document on its own, in order, without its last, shorter one.

    Each row begins with what the tokenizer puts before a text, e.g. a beginning-of-sequence token.

    Returns:
        The rows, with a column `input_ids`, and a sentence that says how much of the text is in none of them.

    Raises:
        ValueError: no column `text`, or no document that is long enough.

    Source: LinearARD's data preparation of PG-19, which has such a token in the first row of a book only.
    """
    if "text" not in documents.column_names:
        raise ValueError(f"documents must have a column `text`, got {', '.join(documents.column_names)}.")
    if length < 2:
        raise ValueError(f"max_length must be the tokens of a row, at least 2, got {length}.")

    special = SpecialTokens.of(tokenizer)

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"ids": tokenizer(batch["text"], add_special_tokens=False, verbose=False)["input_ids"]}

    def cut(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        return {
            "input_ids": [row for ids in batch["ids"] for row in cut_document(ids, length, special, keep_rest=False)]
        }

    encoded = documents.map(encode, batched=True, batch_size=16, remove_columns=documents.column_names)
    made = encoded.map(cut, batched=True, batch_size=16, remove_columns=["ids"])
    if len(made) == 0:
        raise ValueError(f"no document has {length} tokens: give longer ones, or a smaller max_length.")
    tokens = short = 0
    room = length - len(special.begin)
    for batch in encoded.with_format("arrow").iter(1000):
        plain = pc.list_value_length(batch["ids"])
        lengths = pc.if_else(pc.greater(plain, 0), pc.add(plain, len(special.end)), 0)
        tokens += pc.sum(lengths).as_py()
        short += pc.sum(pc.less(lengths, room)).as_py()
    left = tokens - len(made) * room
    coverage = (
        f"{tokens:,} tokens of {len(documents):,} documents give {len(made):,} rows of {length:,}; {left:,} tokens "
        f"({left / tokens:.1%}) are in no row: ends of documents, and documents too short for one ({short:,})."
    )
    return made, coverage


def _digest(documents: Dataset) -> str:
    """SHA-256 of their texts, in order: their fingerprint is another in each process."""
    digest = hashlib.sha256()
    for batch in documents.select_columns("text").iter(100):
        for text in batch["text"]:
            content = text.encode("utf-8", "surrogatepass")
            digest.update(len(content).to_bytes(8, "big") + content)
    return digest.hexdigest()


def _train(
    model: Any,
    config: RopeSFTConfig,
    rows: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    peft_config: Any,
    base_revision: str | None,
    folder: Path,
    stopwatch: Stopwatch,
) -> Stage:
    trainer = RopeSFTTrainer(
        model=model, args=config, train_dataset=rows, processing_class=tokenizer, peft_config=peft_config
    )
    trainer.base_revision = base_revision
    for parameter in trainer.model.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            # TRL makes adapters of quantised models bfloat16, which rounds small steps away
            parameter.data = parameter.data.float()
    checkpoint = last_checkpoint(folder)
    with stopwatch(folder.name):
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    trainer.save_model(str(folder / "final"))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    tail = losses[-max(1, len(losses) // 10) :]
    steps = trainer.state.global_step
    tokens = _rows_read(config, steps, len(rows)) * int(config.max_length or 0)
    del trainer, model
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return Stage(steps, tokens, stopwatch.times[folder.name], sum(tail) / len(tail))


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON reads it back, for comparing."""
    return json.loads(json.dumps(dict(options), default=lambda x: sorted(x) if isinstance(x, set) else str(x)))
