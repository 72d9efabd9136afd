"""What the demo asks of `extend`, as values. Imports nothing heavy, for `rope-patch demo --help` to answer at once."""

from typing import Any

NAME = "SmolLM2-135M-Instruct"
"""Of the model, and of the folder that it is unpacked to."""

TO = {"cuda": 65536, "cpu": 12288}
"""Target window by device; the model's own is 8192."""

ROWS_PER_STEP = {"cuda": 8, "cpu": 2}
"""Rows in an optimizer step by device."""

# of a case that was measured on a GPU (research/results/keeping.md), with a quarter of the rows and fewer prompts
_GPU: dict[str, Any] = {"rows": 64, "own_tokens": 25_000, "prompts": 20}

# Two cores read a row of 12288 tokens in about a minute, which is what most of the time goes to. Of eight chats that
# the model writes in a minute there one or two end, so rows of chats are left out.
_CPU: dict[str, Any] = {
    "rows": 12,
    "row_length": 1024,
    "short": 0.0,
    "shares": {"text": 1.0, "questions": 1.0},
    "prompts": 1,
}
_SHORT_PROMPTS = {"cuda": (4096, 16384), "cpu": (2048,)}


def settings(device: str, given: dict[str, Any]) -> dict[str, Any]:
    """Options of `trl_ext.extend` but for model, data and output; those that are given win.

    Args:
        device: "cpu" or "cuda".
        given: options by name.
    """
    to = given.get("to", TO[device])
    lengths = (*(length for length in _SHORT_PROMPTS[device] if length < to), to)
    always = {"to": to, "lengths": lengths, "device": device, "rows_per_step": ROWS_PER_STEP[device]}
    return {**always, **(_GPU if device == "cuda" else _CPU), **given}
