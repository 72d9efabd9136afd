"""Which programs serve a checkpoint right, with which command, and which serve it wrong."""

from pathlib import Path
from typing import Any

from ..model_card import Serving
from .outcomes import TESTED, wrong_outcomes
from .programs import PROGRAMS

HERE = Path(".")
_EXPORTED = Path("served")
_TITLES = {"vllm": "vLLM", "sglang": "SGLang", "llama.cpp": "llama.cpp", "mlx": "mlx-lm"}


def serving_of(config: Any, window: int | None, target: str | None) -> Serving:
    """Which of `PROGRAMS` serve a checkpoint right.

    Args:
        config: text config of the checkpoint.
        window: context window, in positions.
        target: the program that the checkpoint was exported for; None if it was not exported.
    """
    commands: list[tuple[str, tuple[str, ...]]] = []
    wrong: list[tuple[str, str]] = []
    for program, title in _TITLES.items():
        outcomes = wrong_outcomes(program, config)
        reasons = [outcome.reason for outcome in outcomes if not outcome.folds]
        if reasons:
            wrong += [(title, reason) for reason in reasons]
        # other checkpoints need `export`, which folds attention factors and writes GGUF files
        elif program == target or (target is not None and not outcomes and program != "llama.cpp"):
            commands.append((title, (PROGRAMS[program](HERE, window),)))
        else:
            export = f"rope-patch export . --output {_EXPORTED} --target {program}"
            commands.append((title, (export, PROGRAMS[program](_EXPORTED, window))))
    return Serving(tuple(commands), tuple(wrong), config.model_type in TESTED)
