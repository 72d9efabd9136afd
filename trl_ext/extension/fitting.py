"""Whether a training fits GPUs that are not here, or this machine, and what would make it fit."""

import math
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import takewhile
from typing import Any

import torch

from ..memory.step import peak_memory
from ..recipes.adapter_config import adapter_config
from ..recipes.engine_advice import EngineNeed, choose_engine, engine_needs, model_on_meta
from .choices import Choices, choose
from .facts import ModelFacts
from .machine import GIB, Machine
from .options import ADAPTERS, ExtendOptions
from .training import RECIPE, recipe, stage_of

_SHORTEST_ROW = 2048  # tokens; an eighth of it still holds a question
_MORE_GPUS = (2, 4, 8, 16, 32)


def engine_of(facts: ModelFacts, options: ExtendOptions, choices: Choices, machine: Machine) -> EngineNeed | None:
    """What each of several GPUs holds under the engine that the user names, or that fits, or that takes least.

    None for one GPU. Memory of the host over there is not known, so nothing is offloaded to it. Raises ValueError if
    the engine does not take the training.
    """
    if machine.n_gpus == 1:
        return None
    rows = max(options.rows_per_step // machine.n_gpus, 1)
    stage = stage_of(recipe(facts, options, choices, 1), gradient_accumulation_steps=rows)
    model = model_on_meta(facts.config, adapter_config(stage.model), stage.loading["dtype"])
    in_4_bits = stage.model.load_in_4bit
    needs = engine_needs(model, stage.training, machine.n_gpus, torch.device("cpu"), in_4_bits=in_4_bits)
    missing = "" if options.accelerate_config or find_spec("deepspeed") else "zero2"
    named = [need for need in needs if options.accelerate_config in (None, need.config) and need.config != missing]
    allowed = [need for need in named if need.refused is None]
    if not allowed:
        raise ValueError(f"--accelerate-config {named[0].config}: {named[0].refused}.")
    return choose_engine(allowed, machine.room) or min(allowed, key=lambda need: need.bytes_long)


def command_of(options: ExtendOptions, engine: EngineNeed) -> list[str]:
    """The arguments of `rope-patch` that train by the recipe on several GPUs.

    An optimizer step is of as many rows as on one GPU. ValueError if they cannot be divided by the GPUs.
    """
    rows, n_gpus = options.rows_per_step, engine.n_gpus
    if not engine.config.endswith("-cp"):
        if rows % n_gpus:
            raise ValueError(
                f"--rows-per-step must be a multiple of the {n_gpus} GPUs under {engine.config}, got {rows}."
            )
        rows //= n_gpus
    launch = ["--accelerate-config", engine.config, "--num-processes", str(n_gpus)]
    return ["train", str(options.folder / RECIPE), *launch, "--gradient-accumulation-steps", str(rows)]


def fits(facts: ModelFacts, choices: Choices, machine: Machine, engine: EngineNeed | None) -> bool:
    """Whether a step fits each GPU, or the machine."""
    return needed_bytes(facts, choices, machine, engine) <= machine.room


def needed_bytes(facts: ModelFacts, choices: Choices, machine: Machine, engine: EngineNeed | None) -> int:
    """Bytes that the machine, or each GPU, must hold. One GPU measures, with all weights on it as they came."""
    step = peak_memory(facts.size, choices.step(machine.device)).total if engine is None else engine.bytes_long
    return max(step, measured_bytes(facts, machine))


def measured_bytes(facts: ModelFacts, machine: Machine) -> int:
    """Bytes of the weights when the model is measured, also where it is trained in fewer bits or in parts."""
    return facts.size.parameters * (4 if machine.device == "cpu" else facts.dtype.itemsize)


def remedies(facts: ModelFacts, options: ExtendOptions, choices: Choices, machine: Machine) -> list[str]:
    """Each change of the options or of the machine that would make a training fit, as flags or in words."""

    def would(on: Machine = machine, **changed: Any) -> bool:
        changed_options = replace(options, **changed)
        made = choose(facts, changed_options, on)
        return fits(facts, made, on, engine_of(facts, changed_options, made, on))

    ways: dict[str, dict[str, Any]] = {}
    if options.train not in (None, *ADAPTERS):
        ways["--train lora"] = {"train": "lora"}
    if options.gradient_checkpointing is False and "gradient checkpointing" not in facts.missing:
        ways["--gradient-checkpointing"] = {"gradient_checkpointing": True}
    every = {name: value for changed in ways.values() for name, value in changed.items()}
    found = [flags for flags, changed in ways.items() if would(**changed)]
    if len(ways) == 2 and not found and would(**every):  # neither alone, but both
        found = [" ".join(ways)]
    if options.train != "qlora" and would(**{**every, "train": "qlora"}):
        found.append(" ".join(["--train qlora", *(way for way in ways if "--train" not in way)]))
    lengths = list(_shorter(choices.rows.value["length"]))
    shorter = next((n for n in lengths if would(row_length=n)), None)
    if shorter is not None:
        found.append(f"--row-length {shorter}")
    elif ways and not found:
        shorter = next((n for n in lengths if would(**every, row_length=n)), None)
        found += [] if shorter is None else [f"{' '.join(ways)} --row-length {shorter}"]
    if machine.device == "cuda":
        more = (n for n in _MORE_GPUS if n > machine.n_gpus)
        n_gpus = next((n for n in more if would(replace(machine, n_gpus=n))), None)
        if n_gpus is not None:
            rows = f" --rows-per-step {n_gpus}" if options.rows_per_step % n_gpus else ""
            found.append(f"{n_gpus} such GPUs: --devices {n_gpus}{rows}")
    if machine.device == "cuda" and measured_bytes(facts, machine) > machine.room:
        found.append(
            "a recipe of your own, rope-patch train RECIPE.yaml --accelerate-config fsdp2: extend measures on one GPU, "
            "and spreads no weights by device_map"
        )
    least = needed_bytes(facts, choices, machine, None)
    room = math.ceil(least / machine.room * machine.memory / GIB)
    return [*found, f"one GPU of {room} GiB" if machine.device == "cuda" else f"{room} GiB of free memory"]


def _shorter(length: int) -> Iterator[int]:
    """Lengths of rows, halved again and again."""
    return takewhile(lambda n: n >= _SHORTEST_ROW, (length >> k for k in range(1, 20)))
