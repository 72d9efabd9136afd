"""Objectives under DeepSpeed: two processes on the CPU, under ZeRO-3 with every weight in parts, against a plain one.

Needs the extra `deepspeed`, and a C++ compiler: DeepSpeed builds its communication between CPUs on first use.
"""

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from support.launched import run_ranks
from support.tiny import tiny

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed: pip install -e '.[deepspeed]'"),
    pytest.mark.skipif(shutil.which("c++") is None, reason="DeepSpeed needs a C++ compiler on CPUs"),
]

SCRIPT = """
import os, sys
from contextlib import nullcontext
from pathlib import Path
import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from peft import LoraConfig
from support.tiny import tiny
from support.training import documents, logged, trainer
from transformers import TrainerCallback

from rope_patch.rope.rotary import find_causal_lm, find_decoder

folder, stage = Path(sys.argv[1]), int(sys.argv[2])  # of ZeRO, 0 for a plain process
world = int(os.environ.get("WORLD_SIZE", 1))
if stage:
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    # accelerate takes DeepSpeed for one of GPUs, unless it finds a state that says otherwise
    PartialState(cpu=True).distributed_type = DistributedType.DEEPSPEED
ZERO = {
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {
        "stage": stage, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 1000,
        "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 100, "reduce_bucket_size": 1000,
    },
}
PI = {"rescale": "pi", "rescale_args": {"factor": 4.0}}
SELF = {"objective": "self-distill", "view": "skip"}
RELATION = {"objective": "relation-distill", "objective_args": {"logit_kl": {"weight": 0.5, "last": 5}}, **PI}


def lora(**options):
    return {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], **options)}


CASES = {
    "view": {"view": "skip"},
    "cue": {"view": "endprompt", "view_args": {"cue_tokens": 3, "target": 64}, "objective_args": {"cue_weight": 2.5}},
    "longce": {**SELF, "objective_args": {"longce": {"short_context": 6, "stride": 4}}},
    "self-distill": SELF,
    "self-distill, tied": {**SELF, "tied": True},
    "self-distill, tied, checkpointed": {**SELF, "tied": True, "gradient_checkpointing": True},
    "self-distill, adapters": {**SELF, **lora()},
    "self-distill, adapters, checkpointed": {**SELF, **lora(), "gradient_checkpointing": True},
    "self-distill, adapters and a head": {**SELF, **lora(modules_to_save=["lm_head"])},
    "two passes": {**SELF, "objective_args": {"passes": "two", "view_clm": 0.5}},
    "rows": {**SELF, "objective_args": {"kl_top": 0.5}},
    "native teacher": {**SELF, **PI, "objective_args": {"teacher": "native"}},
    "native teacher, adapters and a head": {
        **SELF, **PI, **lora(modules_to_save=["lm_head"]), "objective_args": {"teacher": "native"}
    },
    # so little that nothing is dropped: noise differs between ranks
    "control": {"objective": "self-distill", "objective_args": {"control": {"kind": "dropout", "strength": 1e-9}}},
    "relation": {**RELATION, "tied": True, "gradient_checkpointing": True},
    "relation, adapters": {**RELATION, **lora()},
    "relation, adapters, tied": {**RELATION, **lora(), "tied": True},
    "relation, adapters, checkpointed": {**RELATION, **lora(), "gradient_checkpointing": True},
    # TRL makes True of it
    "relation, adapters, checkpointed by name": {
        **RELATION, **lora(), "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}
    },
    "hidden": {"objective": "hidden-distill", **PI},
    "hidden, short to long, adapters": {
        "objective": "hidden-distill", **PI, **lora(), "view": "skip", "objective_args": {"short_to_long": 2.0}
    },
    "hidden, short to long, adapters, checkpointed": {
        "objective": "hidden-distill", **PI, **lora(), "view": "skip", "objective_args": {"short_to_long": 2.0},
        "gradient_checkpointing": True,
    },
    "native": {"objective": "native-distill", **PI, "view": "skip"},
    "native, adapters and a head": {
        "objective": "native-distill", **PI, **lora(modules_to_save=["lm_head"]), "view": "skip",
        "objective_args": {"temperature": 1.5},
    },
    "alternating": {**SELF, **PI, "objective_args": {"restore": {"every": 2}}},
}


class KeepGradients(TrainerCallback):
    def __init__(self):
        self.found = {}

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def ran(name, tied=False, gradient_checkpointing=False, **options):
    if stage:
        AcceleratorState._reset_state()  # one trainer after the other
        options.update(use_cpu=False, deepspeed=ZERO, accelerator_config={"use_configured_state": True})
    torch.manual_seed(0)
    data = documents(24)
    run = trainer(
        folder / name, model=str(folder / ("tied" if tied else "untied")), optim="sgd", max_steps=3,
        per_device_train_batch_size=2, gradient_accumulation_steps=4 // world, train_dataset=data,
        eval_dataset=data.select(range(4)), gradient_checkpointing=gradient_checkpointing, **options,
    )
    keep = KeepGradients()
    if not stage:
        run.add_callback(keep)
    else:
        # loaded in parts; adapters become so when training starts
        assert (find_decoder(run.model).norm.weight.numel() == 0) == (stage == 3)
        step = deepspeed.DeepSpeedEngine.step

        def keeping(engine, *args, **kwargs):
            if engine.is_gradient_accumulation_boundary():
                trained = [(n, p) for n, p in run.model.named_parameters() if p.requires_grad]
                keep.found = {n: safe_get_full_grad(p).clone() for n, p in trained}
            return step(engine, *args, **kwargs)

        deepspeed.DeepSpeedEngine.step = keeping
    try:
        run.train()
    finally:
        if stage:
            deepspeed.DeepSpeedEngine.step = step
    losses = [entry["loss"] for entry in logged(run, "loss")] + [run.evaluate()["eval_loss"]]
    if stage == 3 and run._objective is not None:  # TRL's own loss does
        assert not find_causal_lm(run.model)._external_params, f"{name}: a weight was read outside of its module"
    parameters = dict(run.model.named_parameters())
    with nullcontext() if not stage else deepspeed.zero.GatheredParameters(list(parameters.values())):
        weights = {n: p.detach().clone() for n, p in parameters.items()}
    return {"losses": losses, "gradients": keep.found, "weights": weights}


if stage == 2:  # weights are whole there: one of each kind
    CASES = {name: CASES[name] for name in ("longce", "self-distill, tied", "relation, adapters")}
results = {name: ran(name, **options) for name, options in CASES.items()}
if int(os.environ.get("RANK", 0)) == 0:
    torch.save(results, folder / f"results-{stage}.pt")
if stage:
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # threads of process groups that DeepSpeed has made can abort the process at its exit
"""


def run(stage: int, folder: Path) -> dict[str, Any]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root), str(root / "kernels"), str(root / "tests"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    # ninja is beside this Python, whether or not its environment is active
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    launch = (
        ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(29520 + stage)] if stage else []
    )
    command = [sys.executable, *launch, str(script), str(folder), str(stage)]
    done = run_ranks(command, env=environment, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / f"results-{stage}.pt")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zero")
    tiny().save_pretrained(folder / "untied")
    tiny(tie_word_embeddings=True).save_pretrained(folder / "tied")
    return folder, run(0, folder)


@pytest.mark.parametrize("stage", [2, 3])
def test_losses_gradients_and_weights_are_those_of_a_plain_process(stage, plain):
    folder, expected = plain
    actual = run(stage, folder)
    for name, mine in actual.items():
        theirs = expected[name]
        assert mine["losses"] == pytest.approx(theirs["losses"], rel=2e-6), name
        assert mine["gradients"].keys() == theirs["gradients"].keys(), name
        assert mine["weights"].keys() == theirs["weights"].keys(), name
        for key, gradient in theirs["gradients"].items():
            gap = (mine["gradients"][key] - gradient).abs().max() / gradient.abs().max().clamp(min=1e-9)
            assert gap < 1e-5, (name, key, gap.item())
        for key, weight in theirs["weights"].items():
            torch.testing.assert_close(mine["weights"][key], weight, rtol=0, atol=1e-6, msg=f"{name}, {key}")
