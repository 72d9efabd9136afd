"""Proof that what was saved needs nothing of ours: load it in a new process that cannot import this package."""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_CHILD = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("rope_patch", "rope_kernels", "trl_ext"):
            raise ModuleNotFoundError(f"{name} must not be needed here")

sys.meta_path.insert(0, Absent())
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

checkpoint, folder, device, dtype = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).to(device)
ids = load_file(folder + "/ids.safetensors")["ids"].to(device)
with torch.no_grad():
    logits = model(ids).logits.cpu()
save_file({"logits": logits}, folder + "/logits.safetensors")
"""


def logits_after_reload(checkpoint: Path, ids: torch.Tensor, device: str, dtype: torch.dtype) -> torch.Tensor:
    """Logits [batch, seq_len, vocab] of the model in `checkpoint`, computed by Transformers alone in a new process.

    Raises:
        RuntimeError: the new process failed; its last lines are in the message.
    """
    with tempfile.TemporaryDirectory() as folder:
        save_file({"ids": ids}, f"{folder}/ids.safetensors")
        command = [sys.executable, "-c", _CHILD, str(checkpoint.resolve()), folder, device, str(dtype).split(".")[-1]]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        if done.returncode:
            raise RuntimeError(f"reloading {checkpoint} in a new process failed:\n{done.stderr[-2000:]}")
        return load_file(f"{folder}/logits.safetensors")["logits"]
