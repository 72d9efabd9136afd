"""Which programs serve a checkpoint right, and with which command; which of them serve it wrong."""

from pathlib import Path
from typing import Any

from ..model_card import Serving
from .outcomes import TESTED, wrong_outcomes
from .programs import PROGRAMS

HERE = Path(".")
_EXPORTED = Path("served")
_TITLES = {"vllm": "vLLM", "sglang": "SGLang", "llama.cpp": "llama.cpp", "mlx": "mlx-lm"}


def serving_of(config: Any, window: int | None, target: str | None) -> Serving:
    """What `PROGRAMS` make of a checkpoint with this text config.

    Args:
        config: as it is saved.
        window: of the model, in positions.
        target: the program that the checkpoint was exported for; None for one that was not exported.
    """
    commands: list[tuple[str, tuple[str, ...]]] = []
    wrong: list[tuple[str, str]] = []
    for program, title in _TITLES.items():
        outcomes = wrong_outcomes(program, config)
        hopeless = [outcome for outcome in outcomes if not outcome.folds]
        if hopeless:
            wrong += [(title, outcome.reason) for outcome in hopeless]
        # what is folded is folded by `export`, and a GGUF is written by it
        elif program == target or (target is not None and not outcomes and program != "llama.cpp"):
            commands.append((title, (PROGRAMS[program](HERE, window),)))
        else:
            export = f"rope-patch export . --output {_EXPORTED} --target {program}"
            commands.append((title, (export, PROGRAMS[program](_EXPORTED, window))))
    return Serving(tuple(commands), tuple(wrong), config.model_type in TESTED)
