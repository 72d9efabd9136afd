"""Loading an exported checkpoint in a process that has never seen this package, and comparing its logits."""

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

TOKENS = 512
"""Longest row that is compared."""
_KEPT = 64  # logits of so many last tokens: those of a whole row of a large vocabulary are gigabytes
# largest difference over the standard deviation of the logits. A wrong rope type is off by 0.8 or more; merging rounds
# weights of half precision once more, and kernels of 4-bit weights compute in half precision
_TOLERANCE = 0.01
_TOLERANCE_HALF = 0.25

_CODE = """
import sys
import torch, transformers
folder, row, result, architecture, attention, device = sys.argv[1:]
model = getattr(transformers, architecture).from_pretrained(folder, dtype="auto", attn_implementation=attention)
ids = torch.load(row).to(device)
with torch.no_grad():
    logits = model.eval().to(device)(input_ids=ids, use_cache=False).logits[0, -%d:]
assert "rope_patch" not in sys.modules
torch.save(logits.float().cpu(), result)
"""


@dataclass(frozen=True)
class Reference:
    """What a model says to a row of random tokens.

    Args:
        ids: [1, n_tokens].
        logits: of the last tokens, float32, [kept, vocabulary], on the CPU.
        device: that they were computed on.
    """

    ids: torch.Tensor
    logits: torch.Tensor
    device: str


@torch.no_grad()
def reference_of(model: nn.Module, config: Any, window: int | None) -> Reference:
    """The logits of `model` in evaluation mode, which it is put back from.

    Raises:
        ValueError: they are not finite, so that there is nothing to compare with.
    """
    n_tokens = TOKENS if window is None else min(TOKENS, window)
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (1, n_tokens), generator=generator)
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        logits = model(input_ids=ids.to(device), use_cache=False).logits[0, -_KEPT:].float().cpu()
    finally:
        for module in training:
            module.training = True
    if not logits.isfinite().all():
        raise ValueError(
            f"the model's own logits for a row of {n_tokens} random tokens are not finite: its weights are not finite, "
            f"as after a training that has diverged, or its numbers overflow in {next(model.parameters()).dtype}. "
            "Export an earlier checkpoint, or without the check (--no-check, or check=False in Python)."
        )
    return Reference(ids, logits, str(device))


def require_same_logits(folder: Path, causal_lm: Any, reference: Reference) -> float:
    """The largest difference of logits between the checkpoint in `folder` and the model that it was made of.

    Raises:
        RuntimeError: the checkpoint cannot be loaded, or is another model.
    """
    with tempfile.TemporaryDirectory() as scratch:
        row, result = Path(scratch) / "ids.pt", Path(scratch) / "logits.pt"
        torch.save(reference.ids, row)
        # the other process runs in a folder of its own
        arguments = [
            folder.resolve(),
            row,
            result,
            type(causal_lm).__name__,
            causal_lm.config._attn_implementation,
            reference.device,
        ]
        done = subprocess.run(
            [sys.executable, "-c", _CODE % _KEPT, *map(str, arguments)], cwd=scratch, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"the exported checkpoint could not be loaded in another process: {done.stderr[-2000:]}")
        logits = torch.load(result)
    difference = (logits - reference.logits).abs().max().item()
    spread = reference.logits.std().item()
    is_exact = causal_lm.dtype == torch.float32 and getattr(causal_lm, "hf_quantizer", None) is None
    tolerance = _TOLERANCE if is_exact else _TOLERANCE_HALF
    if not difference <= tolerance * spread:  # also where it is NaN
        raise RuntimeError(
            f"the exported checkpoint is another model than the one that was given: logits differ by {difference:.3g}, "
            f"and their standard deviation is {spread:.3g}. Nothing was written. Please report this."
        )
    return difference
