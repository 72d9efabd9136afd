"""`rope-patch train` on two ranks: what is said is said once, and a rank that fails ends the job with its message."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from support.packages import lay_out
from support.ranks import ROOT
from support.tiny import VOCAB, tiny
from support.training import tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed"),
]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    tiny().save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    rng = random.Random(0)
    texts = [" ".join(f"w{rng.randrange(3, VOCAB)}" for _ in range(rng.randrange(12, 25))) for _ in range(24)]
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    fields = {
        "model_name_or_path": str(folder / "model"),
        "datasets": [{"path": "json", "data_files": str(folder / "train.jsonl")}],
        "output_dir": str(folder / "out"),
        "max_length": 64,
        "max_steps": 2,
        "rescale": "yarn",
        "rescale_args": {"factor": 4.0},
        "view": "skip",
        "use_cpu": True,
        "bf16": False,
        "logging_steps": 1,
        "report_to": "none",
        "per_device_train_batch_size": 2,
        "test_split_size": 0.2,
        "eval_strategy": "epoch",
        # both are warned of, by this package and by TRL
        "use_peft": True,
        "lora_target_modules": ["q_proj", "v_proj"],
        "learning_rate": 1.0,
        "dtype": "bfloat16",
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(fields))
    return folder / "recipe.yaml"


def train(recipe: Path, *flags: str, path: str = "") -> tuple[int, str, list[str], float]:
    """Exit status, standard output, lines of standard error, and seconds, of a training on two ranks that use gloo."""
    ours = [str(ROOT), str(ROOT / "kernels"), path, os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, ours)),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_DATASETS_CACHE": str(recipe.parent / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "trl_ext", "train", str(recipe), "--accelerate-config", "ddp"]
    began = time.monotonic()
    done = subprocess.run(
        [*command, "--num-processes", "2", *flags], env=environment, capture_output=True, text=True, timeout=600
    )
    lines = done.stderr.replace("\r", "\n").strip().splitlines()
    return done.returncode, done.stdout, lines, time.monotonic() - began


def test_what_is_said_is_said_once(recipe):
    status, out, lines, _ = train(recipe)
    assert status == 0, lines[-20:]
    for said in ("patched", "'loss'", "'eval_loss'", "train_runtime"):
        of_each_step = 2 if said == "'loss'" else 1
        assert out.count(said) == of_each_step, (said, out)
    err = "\n".join(lines)
    assert err.count("train_dataset: ") == 1, err
    assert sum("Loading weights: 100%" in line for line in lines) == 1, err


def test_a_mistake_that_all_ranks_find_is_told_once_and_last(recipe):
    status, _, lines, _ = train(recipe, "--view-args", '{"split": 900, "skip": 30}')
    assert status == 2
    assert lines[-1].startswith("rope-patch train: view 'skip': split must be below"), lines[-20:]
    assert sum("split must be below" in line for line in lines) == 1, lines


def test_a_rank_that_fails_alone_ends_the_job_with_its_message(tmp_path, recipe):
    """Rank 1 raises in its second step, where rank 0 waits for its gradients."""
    plugin(tmp_path, 'raise RuntimeError("the disk of this rank is gone")')
    status, _, lines, seconds = train(recipe, "--view", "of-rank-1", path=str(tmp_path))
    assert status == 1
    assert lines[-1] == "RuntimeError: the disk of this rank is gone", lines[-20:]
    assert "rank 1 has failed:" in lines and "Traceback (most recent call last):" in lines
    assert sum(line.startswith("RuntimeError") for line in lines) == 1, lines
    assert seconds < 120


def test_a_rank_that_the_system_ends_is_named(tmp_path, recipe):
    plugin(tmp_path, "os.kill(os.getpid(), 9)")
    status, _, lines, _ = train(recipe, "--view", "of-rank-1", path=str(tmp_path))
    assert status == 128 + 9
    assert lines[-1] == "rank 1 was ended by SIGKILL: the memory of the host may be too small.", lines[-20:]


def plugin(folder: Path, statement: str) -> None:
    """An installed package whose view "of-rank-1" runs `statement` in the second step of rank 1."""
    code = f"""
import os
from dataclasses import dataclass
from transformers import Trainer
from rope_patch.views import VIEWS, Skip

step = Trainer.training_step

def failing(self, *args, **kwargs):
    if self.args.process_index == 1 and self.state.global_step == 1:
        {statement}
    return step(self, *args, **kwargs)

Trainer.training_step = failing

@VIEWS.register("of-rank-1")
@dataclass(frozen=True)
class OfRank1(Skip):
    pass
"""
    lay_out(folder, "of_rank_1", code, views=["of-rank-1"])
