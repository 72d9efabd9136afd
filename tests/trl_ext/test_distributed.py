"""Adding ranks changes neither draws nor losses, nor evaluations: two gloo processes on the CPU against one."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from support.launched import run_ranks

SCRIPT = """
import json, os, sys
from pathlib import Path
import torch
from rope_patch import patch_model
from support.tiny import tiny
from support.training import documents, logged, trainer
world = int(os.environ.get("WORLD_SIZE", 1))
results = {}
for name, options in {
    "skip": {"view": "skip"},
    "always": {},
    "posaug": {"view": "posaug"},
    "packed": {"view": "skip", "padding_free": True, "max_length": None},
    "self-distill": {"objective": "self-distill", "view": "skip"},
    "self-distill-packed": {
        "objective": "self-distill", "view": "cyclic", "padding_free": True, "max_length": None,
        "objective_args": {"reduction": "token"}, "gradient_checkpointing": True,
    },
    "self-distill-sequential": {
        "objective": "self-distill", "view": "skip", "objective_args": {"passes": "sequential", "view_clm": 0.5},
        "gradient_checkpointing": True,
    },
    "self-distill-bounded": {
        "objective": "self-distill", "view": "skip", "objective_args": {"max_copies": 0.6},
    },
    "relation": {"objective": "relation-distill", "rescale": "pi", "rescale_args": {"factor": 4.0}},
    "native": {
        "objective": "native-distill", "rescale": "pi", "rescale_args": {"factor": 4.0}, "view": "mix",
        "view_args": {"views": ["standard", "skip"]}, "objective_args": {"clm_weight": 0.5},
    },
    "relation-checkpointed": {
        "objective": "relation-distill", "rescale": "pi", "rescale_args": {"factor": 4.0}, "trainable": "qkv",
        "gradient_checkpointing": True, "objective_args": {"logit_kl": {"weight": 0.5, "last": 5}},
    },
}.items():
    out = Path(sys.argv[1]) / f"{name}-{world}"
    if name == "always":
        options = {"model": patch_model(tiny(), "skip", when="always")}
    # two ranks have two batches each, so that no document is repeated to fill one
    run = trainer(out, per_device_train_batch_size=2, gradient_accumulation_steps=4 // world, max_steps=3,
                  eval_dataset=documents(8, longest=12, seed=5), ddp_find_unused_parameters=False, **options)
    run.train()
    steps = logged(run, "loss", "ce", "kl", "relation/", "view/")
    results[name] = [value for entry in steps for _, value in sorted(entry.items())]
    evaluated = run.evaluate()
    losses = ("eval_loss", "eval_ce", "eval_kl")
    results[name + " evaluated"] = [value for key, value in sorted(evaluated.items()) if key.startswith(losses)]
if int(os.environ.get("RANK", 0)) == 0:
    Path(sys.argv[1], f"losses-{world}.json").write_text(json.dumps(results))
if world > 1:
    torch.distributed.destroy_process_group()
    os._exit(0)  # threads of process groups can abort the process at its exit
"""


def run(world: int, folder: Path) -> dict[str, list[float]]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    root = Path(__file__).parents[2]
    ours = [str(root), str(root / "kernels"), str(root / "tests")]
    paths = os.pathsep.join([*ours, os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
    launch = (
        [] if world == 1 else ["-m", "torch.distributed.run", "--nproc_per_node", str(world), "--master_port", "29517"]
    )
    command = [sys.executable, *launch, str(script), str(folder)]
    done = run_ranks(command, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / f"losses-{world}.json").read_text())


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_two_ranks_train_like_one(tmp_path):
    alone, together = run(1, tmp_path), run(2, tmp_path)
    for name, losses in alone.items():
        # weights have gone apart by rounding when they are evaluated
        assert together[name] == pytest.approx(losses, rel=1e-3 if name.endswith("evaluated") else 2e-5), name
