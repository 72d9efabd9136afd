"""`rope-patch eval --backend vllm` with vLLM's own engine, on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from serving.programs import WHOLE_MODELS
from support.characters import CHARACTERS, character_tokenizer
from support.tiny import tiny

from rope_patch import export, patch_model

ROOT = Path(__file__).parents[2]
LENGTH = "400"  # beyond the window of the checkpoints, which is 64


@pytest.mark.slow
def test_vllm_answers_as_transformers_does_and_their_results_do_not_mix(tmp_path):
    """A native checkpoint beyond its window and a rescaled one as `export` writes it: one engine after the other."""
    program = WHOLE_MODELS["vLLM on a CPU"]
    if program.missing:
        pytest.skip(program.missing)
    native, yarn = tmp_path / "native", tmp_path / "yarn"
    subject = tiny(vocab_size=CHARACTERS, head_dim=64)
    subject.save_pretrained(native)
    export(patch_model(subject, "yarn", factor=8.0), yarn, target="vllm")
    for folder in (native, yarn):
        character_tokenizer().save_pretrained(folder)
    by_vllm, said = measured(program.python, tmp_path, "vllm")
    by_us, _ = measured(sys.executable, tmp_path, "transformers")
    for label in ("native", "yarn"):
        of_vllm, ours = by_vllm[label], by_us[label]
        assert of_vllm.pop("said") == [
            f"vLLM {program.version} wrote these answers. "
            "Of 4 prompts that our own reader answered too, 4 got the same reply."
        ]
        assert ours.pop("said") == [] and of_vllm == ours
    assert by_us["native"]["replies"] != by_us["yarn"]["replies"], "a rescaling that changes nothing shows nothing"
    assert "INFO" not in said and "WARNING" not in said, "vLLM's log hides the figures"


def measured(python, folder, backend):
    """Passkeys of both checkpoints by one command, and all that it printed; results are kept in one folder."""
    models = [word for label in ("native", "yarn") for word in ("--model", f"{label}={folder / label}")]
    done = subprocess.run(
        [python, "-m", "trl_ext", "eval", *models, "--passkey", "--length", LENGTH, "--lengths", LENGTH]
        + ["--trials", "1", "--window", "64", "--device", "cpu", "--backend", backend, "--report", folder / "report"],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "report" / "results.json").read_text())["results"]["passkey"], done.stdout + done.stderr
