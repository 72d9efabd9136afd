"""Options with which the demo calls `extend`. Imports nothing heavy: `rope-patch demo --help` needs them."""

from pathlib import Path
from typing import Any

FOLDER = Path("rope-patch-demo")
"""Default folder of the demo's results, model and texts."""

NAME = "SmolLM2-135M-Instruct"
"""Name of the model and of its folder."""

TO = {"cuda": 65536, "cpu": 12288}
"""Target context window by device; that of the model is 8192."""

ROWS_PER_STEP = {"cuda": 8, "cpu": 1}
"""Rows in an optimizer step by device."""

# a case that was measured on a GPU (research/results/keeping.md), with a quarter of the rows and fewer prompts
_GPU: dict[str, Any] = {"rows": 64, "own_tokens": 25_000, "prompts": 20}

MINUTES = 8
"""How long the demo takes on two free cores with its own settings (research/results/demo.md)."""

# Two cores read 12288 tokens in three quarters of a minute, once for each of three models. They write eight chats in a
# minute, of which one or two end, so there are no rows of chats. After 16 rows of 512 tokens it finds few far answers.
_CPU: dict[str, Any] = {
    "rows": 12,
    "row_length": 1024,
    "short": 0.0,
    "shares": {"text": 1.0, "questions": 5.0},
    "prompts": 10,  # about one text: six that differ, all one way, are beyond chance
}
_SHORT_PROMPTS = {"cuda": (4096, 16384), "cpu": (1024,)}


def settings(device: str, given: dict[str, Any]) -> dict[str, Any]:
    """Options of `trl_ext.extend` without model, data and output.

    Args:
        device: "cpu" or "cuda".
        given: options that the user has set, which win.
    """
    to = given.get("to", TO[device])
    lengths = (*(length for length in _SHORT_PROMPTS[device] if length < to), to)
    always = {
        "to": to,
        "lengths": lengths,
        "device": device,
        "rows_per_step": ROWS_PER_STEP[device],
        "untrained": True,
    }
    return {**always, **(_GPU if device == "cuda" else _CPU), **given}
