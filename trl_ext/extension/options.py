"""The options of an extension."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from rope_patch.base.registry import unknown
from rope_patch.base.validators import require_integer, require_number

FACTS, ROWS_PER_STEP = 8, 8
"""The values that SmolLM2-135M was measured with."""

Train = Literal["all", "qkv", "lora", "qlora"]
ADAPTERS: tuple[Train, ...] = ("lora", "qlora")
"""The ways to train that leave the weights of the model as they are."""
ENGINES = ("ddp", "zero2", "fsdp2", "fsdp2-cp")
"""Configs of `rope-patch train --accelerate-config` that export whole models."""


@dataclass(frozen=True, kw_only=True)
class ExtendOptions:
    """The options of one extension; None lets model and machine decide.

    Args:
        model: hub id, or folder of a checkpoint.
        model_revision: branch, tag or commit of a model on the hub; None is "main".
        to: target window, in positions.
        data: documents: .jsonl(.xz, .gz) with `text` or `messages`, text files of one document each, folders of these,
            or ids of data sets on the hub, whose split "train" is read.
        output: folder for all results.
        targets: programs to export for beside Transformers: names in `rope_patch.export.PROGRAMS`.
        held_out: documents to measure on, as `data`, which must not be in `data`.
        rescale: RoPE scaling, by name.
        rescale_args: its options.
        view: view of the position IDs in training, by name.
        view_args: its options.
        objective: "native-distill" or "clm".
        objective_args: its options.
        rows: training rows of `row_length` tokens, of which some are replaced by shorter ones.
        row_length: tokens of a training row, at most the trained window where a teacher reads it.
        shares: kind of row -> weight, as in `trl_ext.rows.make_rows`.
        short: share of the rows that are replaced by eight short ones each.
        facts: facts hidden in a row of questions, at most three in a short one.
        own_tokens: tokens that the model writes itself for rows of chats or own texts; they are repeated if the rows
            hold more.
        rows_per_step: rows in an optimizer step.
        train: "all" weights, the projections "qkv", or adapters: "lora", or "qlora" on weights in 4 bits.
        lora_rank: of the adapters.
        learning_rate: peak, from which a cosine falls to a tenth.
        gradient_checkpointing: whether activations are computed again in the backward pass to save memory.
        prompts: retrieval prompts of each length.
        lengths: of the prompts, in tokens.
        untrained: whether to measure the RoPE scaling without training too.
        report_to: where the training and the verdict are logged, such as "wandb": names of Transformers' `report_to`.
        converter: llama.cpp's convert_hf_to_gguf.py.
        seed: of all random draws.
        device: "cpu" or "cuda".
        accelerate_config: how several GPUs train, a name in `ENGINES`; None takes the one that fits and sends least.
        devices: GPUs that train; None is one, or all with `accelerate_config` or if one is too small.
        device_memory: GiB of a GPU that is not here, to plan for; None plans for this machine.
    """

    model: str
    model_revision: str | None = None
    to: int
    data: tuple[str, ...]
    output: str
    targets: tuple[str, ...] = ()
    held_out: tuple[str, ...] = ()
    rescale: str | None = None
    rescale_args: dict[str, Any] | None = None
    view: str | None = None
    view_args: dict[str, Any] | None = None
    objective: str | None = None
    objective_args: dict[str, Any] | None = None
    rows: int | None = None
    row_length: int | None = None
    shares: Mapping[str, float] | None = None
    short: float | None = None
    facts: int = FACTS
    own_tokens: int | None = None
    rows_per_step: int = ROWS_PER_STEP
    train: Train | None = None
    lora_rank: int = 64
    learning_rate: float | None = None
    gradient_checkpointing: bool | None = None
    prompts: int | None = None
    lengths: tuple[int, ...] = ()
    untrained: bool = False
    report_to: tuple[str, ...] = ()
    converter: str | None = None
    seed: int = 0
    device: str | None = None
    accelerate_config: str | None = None
    devices: int | None = None
    device_memory: float | None = None

    def __post_init__(self) -> None:
        for name in ("facts", "rows_per_step", "rows", "row_length", "prompts", "own_tokens", "lora_rank", "devices"):
            if getattr(self, name) is not None:
                require_integer(flag(name), getattr(self, name), least=1)
        for name in ("learning_rate", "device_memory"):
            if getattr(self, name) is not None:
                require_number(flag(name), getattr(self, name))
        if self.accelerate_config is not None and self.accelerate_config not in ENGINES:
            raise unknown("--accelerate-config", self.accelerate_config, ENGINES, of="extend")
        if self.short is not None and not 0 <= self.short <= 1:  # NaN is refused too
            raise ValueError(f"--short must be a share from 0 to 1, got {self.short}.")
        if self.train not in (None, *get_args(Train)):
            raise ValueError(f"--train must be one of {', '.join(get_args(Train))}, got {self.train!r}.")
        if self.objective not in (None, "native-distill", "clm"):
            raise ValueError(f"--objective must be native-distill or clm, got {self.objective!r}.")
        for name in ("rescale", "view", "objective"):
            if getattr(self, f"{name}_args") is not None and getattr(self, name) is None:
                raise ValueError(f"--{name}-args needs --{name}.")

    def recorded(self) -> dict[str, Any]:
        """As JSON values, without the output folder, which may be moved, and without targets, which may be added."""
        left_out = ("output", "targets", "converter", "device_memory", "devices", "accelerate_config")
        recorded = {name: value for name, value in asdict(self).items() if name not in left_out}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in recorded.items()}

    @property
    def folder(self) -> Path:
        """The folder of all results."""
        return Path(self.output)


def flag(name: str) -> str:
    """The flag of the command line that sets a field."""
    return f"--{name.replace('_', '-')}"
