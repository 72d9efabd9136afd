"""Distillation under FSDP2: two gloo processes on the CPU, weights sharded, against plain models on the same rows."""

import os
import sys
from pathlib import Path

import pytest
import torch
from support.launched import run_ranks

SCRIPT = """
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from peft import LoraConfig, get_peft_model
from support.tiny import tiny
from rope_patch.views import Uniform
from rope_patch import patch_model
from rope_patch.patch import view_source
from rope_patch.losses import (
    REQUEST, CopiedTeacher, HiddenDistiller, HiddenTargets, LogitKL, RelationDistiller, RelationTargets, SelfDistiller,
    SharedTeacher, ViewConsistency, ViewRequest,
)
from rope_patch.rope.rotary import find_decoder
from rope_patch.layout.labelled import Labelled

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
ids = torch.randint(3, 101, (2, 24))


def prepared(patches, checkpointing, adapters, tied=False):
    model = tiny("qwen3", tie_word_embeddings=tied).train()
    for method, options in patches:
        patch_model(model, method, **options)
    if view_source(model) is not None:
        view_source(model).clock.set(3, 0)  # without it ranks that draw alike are refused
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if adapters:
        torch.manual_seed(0)
        config = LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)
        model = get_peft_model(model, config).train()
    return model


def relation(model):
    targets = RelationTargets(attention=0.5)
    teacher = SharedTeacher(model) if hasattr(model, "peft_config") else CopiedTeacher(model)
    distiller = RelationDistiller(model, targets, teacher, logit_kl=LogitKL(weight=1.0, last=5))
    def loss(request):
        return sum(w * request.loss(name) for name, w in targets.weights.items()) + request.logit_kl
    return distiller, lambda: distiller.request(ids), loss


def hidden(far):
    def make(model):
        distiller = HiddenDistiller(model, HiddenTargets(short_to_long=far), CopiedTeacher(model))
        def loss(request):
            return request.distance + (far * request.far if far else 0.0)
        return distiller, lambda: distiller.request(ids), loss
    return make


def views(one_pass, native=False, **rows):
    def make(model):
        teacher = None
        if native:
            teacher = SharedTeacher(model) if hasattr(model, "peft_config") else CopiedTeacher(model)
        consistency = ViewConsistency(view_clm=0.5, **rows)
        distiller = SelfDistiller(model, consistency, teacher=teacher, one_pass=one_pass)
        labelled = Labelled.of({"input_ids": ids})
        return distiller, lambda: ViewRequest(labelled, labelled.n_labels, 2), lambda request: request.result.loss
    return make


def run(model, make, wrap):
    distiller, new_request, loss = make(model)
    if wrap is shard and isinstance(distiller.teacher, CopiedTeacher):
        distiller.teacher.shard()
        assert all(isinstance(p, DTensor) for p in distiller.teacher.copy.parameters())
    wrap(model)
    with distiller.active():
        request = new_request()
        options = {"output_hidden_states": True} if isinstance(distiller, HiddenDistiller) else {}
        out = model(input_ids=ids, use_cache=False, logits_to_keep=1, **options, **{REQUEST: request})
        total = loss(request) + 0.0 * out.logits.sum()
        total.backward()
    return total.detach()


def shard(model):
    for layer in find_decoder(model).layers:
        fully_shard(layer)
    fully_shard(model)


PI, SKIP = ("pi", {"factor": 4.0}), ("skip", {"skip": Uniform(1, 40)})
for name, patches, make, adapters in [
    ("relation", [PI], relation, False),
    ("relation, tied", [PI], relation, False),
    ("relation, adapters", [PI], relation, True),
    ("hidden", [PI], hidden(0.0), False),
    ("hidden, short to long", [PI, SKIP], hidden(10.0), False),
    ("one pass", [SKIP], views(True), False),
    ("one pass, adapters", [SKIP], views(True), True),
    ("two passes", [SKIP], views(False), False),
    ("native teacher", [PI, SKIP], views(True, native=True), False),
    ("native teacher, adapters", [PI, SKIP], views(True, native=True), True),
    ("rows", [SKIP], views(True, kl_top=0.5, reduction="uniform"), False),
]:
    for checkpointing in (False, True):
        plain, sharded = (prepared(patches, checkpointing, adapters, "tied" in name) for _ in range(2))
        expected = run(plain, make, lambda model: None)
        actual = run(sharded, make, shard)
        assert torch.allclose(actual, expected, rtol=1e-5), (name, actual, expected)
        for (key, p), q in zip(plain.named_parameters(), sharded.parameters(), strict=True):
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(grad)
            other = torch.zeros_like(p) if q.grad is None else q.grad.full_tensor()
            gap = (other - grad / 2).abs().max() / (grad.abs().max() / 2 + 1e-9)
            assert gap < 1e-4, (name, checkpointing, key, gap.item())
dist.destroy_process_group()
print("equal")
"""


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_losses_and_gradients_are_those_of_plain_models(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root), str(root / "kernels"), str(root / "tests"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29519", str(script)]
    done = run_ranks([sys.executable, *launch], env=environment)
    assert done.returncode == 0 and "equal" in done.stdout, done.stderr[-3000:]
