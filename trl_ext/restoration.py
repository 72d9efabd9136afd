"""LinearARD in one call: distil at the native length, go on at the extended one, export a plain checkpoint."""

import gc
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.trainer_utils import get_last_checkpoint

from rope_patch import load_adapter, patch_model
from rope_patch.methods import resolve_rescaling
from rope_patch.registry import unknown

from .config import RopeSFTConfig
from .run_folder import Stopwatch, record_settings, require_same_settings
from .trainer import RopeSFTTrainer

# the authors' optimiser: nearly constant after four steps, gradients clipped at 5
_OPTIMISER: dict[str, Any] = {
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
"""Stage 1: 144 steps of 4 rows of 4096 tokens, 2.36M tokens."""
EXTEND: dict[str, Any] = {
    **_OPTIMISER,
    "objective": "clm",
    "max_length": 32768,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 4,
    "max_steps": 16,
}
"""Stage 2: 16 steps of 4 rows of 32768 tokens, 2.1M tokens."""


@dataclass(frozen=True)
class Stage:
    """What a finished stage did.

    Args:
        steps: optimizer steps.
        tokens: tokens of the rows that were trained on, as the paper counts: steps * rows * tokens of a row.
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
    dtype: torch.dtype | str = torch.bfloat16,
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
        model: hub id or folder of a checkpoint.
        documents: with a column `text`; each document is cut into rows on its own, and what is left over is dropped.
        output_dir: for checkpoints of the stages, `restore.json` and the result, in `model`.
        rescale: name of a rescaling, e.g. "pi".
        rescale_args: its options, e.g. {"factor": 4.0}.
        peft_config: adapters to train, e.g. LoRA on q, k and v; None trains every weight, or those of q, k and v with
            distil={"trainable": "qkv"}, beside a frozen copy for the teacher.
        quantization_config: of the base model under adapters (QLoRA); the result is merged into unquantised weights.
        dtype: the model is loaded in.
        model_init_kwargs: passed to `from_pretrained` beside it, e.g. {"attn_implementation": "flash_attention_2"}.
        distil: fields of `RopeSFTConfig` that differ from `DISTIL`, the authors'.
        extend: fields of `RopeSFTConfig` that differ from `EXTEND`.
        skip_extension: whether to leave stage 2 out.

    Returns:
        Where the result is, and what each stage did.

    Raises:
        ValueError: options that do not fit, ZeRO-3, too little text for one row, or a folder with another run.

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
    root = Path(output_dir)
    plan: dict[str, Any] = {
        "model": str(model),
        "rescale": rescale,
        "rescale_args": dict(rescale_args),
        "peft_config": None if peft_config is None else _plain(peft_config.to_dict()),
        "quantized": quantization_config is not None,
        "dtype": str(dtype),
        "distil": _plain({**DISTIL, **(distil or {})}),
        "extend": None if skip_extension else _plain({**EXTEND, **(extend or {})}),
    }
    configs = {
        name: _config(name, {"output_dir": str(root / name), **plan[name]})
        for name in ("distil", "extend")
        if plan[name] is not None
    }
    if is_deepspeed_zero3_enabled():
        raise ValueError(
            "restore exports a model that it loads anew, of which each rank would have a part under ZeRO-3: use "
            "ZeRO-2, or a RopeSFTTrainer for each stage."
        )
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = {name: cut_into_rows(documents, tokenizer, config.max_length or 0) for name, config in configs.items()}
    require_same_settings(root / "restore.json", plan, "output_dir")
    record_settings(root / "restore.json", plan)
    stopwatch = Stopwatch(root / "seconds.json")

    def load(folder: Path | None, quantized: bool) -> Any:
        """The model as the stage before left it in `folder`, or rescaled and with new adapters."""
        settings: dict[str, Any] = {**(model_init_kwargs or {}), "dtype": dtype}
        if folder is not None and peft_config is None:
            return AutoModelForCausalLM.from_pretrained(folder, **settings)
        if quantized and quantization_config is not None:
            settings["quantization_config"] = quantization_config
        base = AutoModelForCausalLM.from_pretrained(model, **settings)
        if folder is not None:
            return load_adapter(base, folder, is_trainable=True)
        return patch_model(base, rescale, **rescale_args)

    stages: dict[str, Stage] = {}
    before: Path | None = None
    for name, config in configs.items():
        found = root / f"{name}.json"
        if found.is_file():
            stages[name] = Stage(**json.loads(found.read_text(encoding="utf-8")))
        else:
            new_adapters = peft_config if before is None else None
            stages[name] = _train(
                load(before, quantized=True), config, rows[name], tokenizer, new_adapters, root / name, stopwatch
            )
            found.write_text(json.dumps(asdict(stages[name]), indent=1) + "\n", encoding="utf-8")
        before = root / name / "final"
    result = Restored(root / "model", stages["distil"], stages.get("extend"))
    if not (result.folder / "config.json").is_file():
        final = load(before, quantized=False)
        if peft_config is not None:
            final = final.merge_and_unload()
        final.save_pretrained(result.folder)
        tokenizer.save_pretrained(result.folder)
    return result


def _config(stage: str, settings: dict[str, Any]) -> RopeSFTConfig:
    known = {f.name for f in fields(RopeSFTConfig) if f.init}
    for name in settings:
        if name not in known:
            raise unknown("field", name, known, of=f"{stage}, which takes those of RopeSFTConfig")
    return RopeSFTConfig(**settings)


def cut_into_rows(documents: Dataset, tokenizer: PreTrainedTokenizerBase, length: int) -> Dataset:
    """Rows of exactly `length` tokens: each document on its own, in order, without its last, shorter one.

    Raises:
        ValueError: no column `text`, or no document that is long enough.

    Source: LinearARD's data preparation of PG-19.
    """
    if "text" not in documents.column_names:
        raise ValueError(f"documents must have a column `text`, got {', '.join(documents.column_names)}.")
    if length < 2:
        raise ValueError(f"max_length must be the tokens of a row, at least 2, got {length}.")

    def rows(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encoded = tokenizer(batch["text"], verbose=False)["input_ids"]
        return {
            "input_ids": [
                ids[first : first + length] for ids in encoded for first in range(0, len(ids) - length + 1, length)
            ]
        }

    made = documents.map(rows, batched=True, batch_size=16, remove_columns=documents.column_names)
    if len(made) == 0:
        raise ValueError(f"no document has {length} tokens: give longer ones, or a smaller max_length.")
    return made


def _train(
    model: Any,
    config: RopeSFTConfig,
    rows: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    peft_config: Any,
    folder: Path,
    stopwatch: Stopwatch,
) -> Stage:
    trainer = RopeSFTTrainer(
        model=model, args=config, train_dataset=rows, processing_class=tokenizer, peft_config=peft_config
    )
    checkpoint = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    with stopwatch(folder.name):
        trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model(str(folder / "final"))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    tail = losses[-max(1, len(losses) // 10) :]
    steps = trainer.state.global_step
    rows_a_step = (
        config.per_device_train_batch_size * config.gradient_accumulation_steps * trainer.accelerator.num_processes
    )
    tokens = steps * rows_a_step * int(config.max_length or 0)
    del trainer, model
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return Stage(steps, tokens, stopwatch.times[folder.name], sum(tail) / len(tail))


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON reads it back, for comparing."""
    return json.loads(json.dumps(dict(options), default=lambda x: sorted(x) if isinstance(x, set) else str(x)))
