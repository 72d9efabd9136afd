"""Loading an exported checkpoint in a process without this package, and comparing its logits.

The model reads a sequence of random tokens twice: at positions from 0 on, and with its second half at the end of the
context window. The second compares far distances, and RoPE scaling that only changes long sequences. It has an
attention mask, because without one Transformers takes a gap in position IDs for the beginning of another sequence.
On CPUs these readings take most of the time of an export: 28 of 37 s of a checkpoint of 1.1 GB, on two cores.
"""

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

logger = logging.get_logger(__name__)

TOKENS = 512
"""Most tokens that are compared."""
_BESIDE = 2 << 30  # bytes on a GPU for logits and for CUDA in a second process
_KEPT = 64  # last tokens whose logits are kept: with a large vocabulary those of all tokens are gigabytes
# root mean square of the differences over the standard deviation of the logits. On SmolLM2-135M a wrong rope type
# differs by 0.44 or more, and YaRN by 3.5 in place of 4 by 0.29. Merging an adapter rounds weights of half precision
# once more, which differs by 0.1 there, and in single logits by as much as a wrong rope type. Kernels of 4-bit
# weights compute in half precision
_TOLERANCE = 0.001
_TOLERANCE_HALF = 0.2

_CODE = """
import sys
import torch, transformers
folder, rows, result, architecture, attention, device = sys.argv[1:]
model = getattr(transformers, architecture).from_pretrained(folder, dtype="auto", attn_implementation=attention)
model.eval().to(device)
with torch.no_grad():
    logits = [
        model(**{name: x.to(device) for name, x in row.items()}, use_cache=False).logits[0, -%d:].float().cpu()
        for row in torch.load(rows)
    ]
assert "rope_patch" not in sys.modules
torch.save(logits, result)
"""


@dataclass(frozen=True)
class Reference:
    """Logits of a model for a sequence of random tokens.

    Args:
        rows: inputs of the model, each with `input_ids` [1, n_tokens]; the one at the end of the window, if any, first.
        logits: of the last tokens of each, float32, [kept, vocabulary], on the CPU.
        device: on which they were computed.
        last: largest position.
    """

    rows: list[dict[str, torch.Tensor]]
    logits: list[torch.Tensor]
    device: str
    last: int

    @property
    def n_tokens(self) -> int:
        """Tokens of a sequence."""
        return self.rows[0]["input_ids"].shape[1]


def to_gpu_with_room(model: nn.Module) -> nn.Module:
    """Move `model` to the GPU if that has room for it twice, as the check loads it again; else leave it."""
    from rope_kernels.common.gpu_memory import free_gpu_bytes  # `import rope_patch` adds torch and transformers alone

    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    if torch.cuda.is_available() and has_room(weights, free_gpu_bytes()):
        model.to("cuda")
    return model


def has_room(weights: int, free: int) -> bool:
    """Whether a GPU with `free` bytes holds a model with `weights` bytes twice."""
    return 2 * weights + _BESIDE <= free


@torch.no_grad()
def reference_of(model: nn.Module, config: Any, window: int | None) -> Reference:
    """The logits of `model` in evaluation mode; its training mode is then restored.

    Raises:
        ValueError: the logits are not finite, so that there is nothing to compare with.
    """
    n_tokens = TOKENS if window is None else min(TOKENS, window)
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    near = {"input_ids": torch.randint(config.vocab_size, (1, n_tokens), generator=generator)}

    def logits_of(row: dict[str, torch.Tensor]) -> torch.Tensor:
        inputs = {name: tensor.to(device) for name, tensor in row.items()}
        logits: torch.Tensor = model(**inputs, use_cache=False).logits
        return logits[0, -_KEPT:].float().cpu()

    rows, logits, last = [near], [], n_tokens - 1
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        if window is not None and window > n_tokens:
            positions = torch.arange(n_tokens)
            positions[n_tokens // 2 :] += window - n_tokens
            far = {
                **near,
                "position_ids": positions[None],
                "attention_mask": torch.ones(1, n_tokens, dtype=torch.int64),
            }
            try:
                # dynamic RoPE grows its frequencies here and resets them in the near sequence: the order matters
                logits, rows, last = [logits_of(far)], [far, near], window - 1
            except torch.OutOfMemoryError:
                raise
            except (TypeError, ValueError, RuntimeError, IndexError):
                logger.info("%s takes no position IDs: positions from 0 on are compared.", type(model).__name__)
        logits.append(logits_of(near))
    finally:
        for module in training:
            module.training = True
    if not all(row.isfinite().all() for row in logits):
        raise ValueError(
            f"the model's own logits for {n_tokens} random tokens are not finite: its training has diverged, or its "
            f"numbers overflow in {next(model.parameters()).dtype}. Export an earlier checkpoint, or export without "
            "the check (--no-check, or check=False in Python)."
        )
    return Reference(rows, logits, str(device), last)


def require_same_logits(folder: Path, causal_lm: Any, reference: Reference) -> float:
    """How far the logits of the checkpoint in `folder` are from those of the exported model.

    Returns:
        The root mean square of the differences over the standard deviation of the logits, in the worst sequence.

    Raises:
        RuntimeError: the checkpoint cannot be loaded, or is another model.
    """
    with tempfile.TemporaryDirectory() as scratch:
        rows, result = Path(scratch) / "rows.pt", Path(scratch) / "logits.pt"
        torch.save(reference.rows, rows)
        arguments = [
            folder.resolve(),  # the process runs in `scratch`
            rows,
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
    is_exact = causal_lm.dtype == torch.float32 and getattr(causal_lm, "hf_quantizer", None) is None
    tolerance = _TOLERANCE if is_exact else _TOLERANCE_HALF
    difference = 0.0
    for found, expected in zip(logits, reference.logits, strict=True):
        of_row = ((found - expected).square().mean().sqrt() / expected.std()).item()
        if not of_row <= tolerance:  # also where it is NaN
            raise RuntimeError(
                f"the exported checkpoint is another model: its logits differ by {of_row:.3g} standard deviations of "
                f"logits, and may differ by {tolerance}. Nothing was written. Please report this."
            )
        difference = max(difference, of_row)
    return difference
