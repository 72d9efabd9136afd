"""Several GPUs give the draws, losses, evaluations and weights of one: ranks talk by NCCL."""

from importlib.util import find_spec

import pytest
import torch
from support.ranks import ADAPTERS, PI, RELATION, SELF, require_alike, run_on_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

# rows whose parts are multiples of 32 tokens: kernels of float32 pad what torch's ring merges
ROWS = {
    "documents": {"longest": 128, "n": 24},
    "pad_to_multiple_of": 128,
    "max_length": 128,
    "max_steps": 10,
    "learning_rate": 1e-3,
    "model": {"num_key_value_heads": 4, "max_position_embeddings": 128, "hidden_size": 64, "head_dim": 16},
}
CASES = {
    "skip": {"view": "skip"},
    "self-distill, checkpointed": {**SELF, "gradient_checkpointing": True},
    "self-distill, native": {**SELF, **PI, "self_distill_args": {"teacher": "native"}},
    "relations, checkpointed": {
        **RELATION,
        "gradient_checkpointing": True,
        "logit_kl_args": {"weight": 0.5, "last": 5},
    },
    "relations, adapters": {**RELATION, "adapters": ADAPTERS, "relation_args": {"attention": 0.5}},
    "hidden": {"objective": "hidden-distill", **PI, "view": "skip", "hidden_args": {"short_to_long": 2.0}},
    "native": {"objective": "native-distill", **PI, "view": "skip"},
}
GROUPED = {
    "skip": {"view": "skip", "bf16": True},
    "self-distill, adapters": {**SELF, "adapters": ADAPTERS, "bf16": True},
    "relations": {**RELATION, "bf16": True},
}
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return run_on_ranks(tmp_path_factory.mktemp("alone"), CASES, 1, device="cuda", **ROWS)


def test_a_ring_trains_like_one_gpu(tmp_path, alone):
    ring = run_on_ranks(tmp_path, CASES, 2, "fsdp2", shared=2, device="cuda", **ROWS)
    require_alike(alone, ring, tolerance=1e-3, weights=1e-3)


def test_a_ring_in_bf16_takes_rows_of_any_length(tmp_path):
    """Grouped queries, through the flash kernel; weights are those of a few steps in 16 bits."""
    rows = {"documents": {"longest": 120, "n": 24}, "max_length": 128, "model": {"max_position_embeddings": 128}}
    alone = run_on_ranks(tmp_path, GROUPED, 1, device="cuda", **rows)
    ring = run_on_ranks(tmp_path, GROUPED, 2, "fsdp2", shared=2, device="cuda", **rows)
    require_alike(alone, ring, tolerance=5e-2, weights=5e-2)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_two_gpus_train_like_one(tmp_path, alone, engine):
    require_alike(alone, run_on_ranks(tmp_path, CASES, 2, engine, device="cuda", **ROWS), tolerance=1e-3, weights=1e-3)


@needs_deepspeed
@pytest.mark.parametrize("engine", ["zero2", "zero3"])
def test_deepspeed_trains_like_one(tmp_path, alone, engine):
    require_alike(alone, run_on_ranks(tmp_path, CASES, 2, engine, device="cuda", **ROWS), tolerance=1e-3, weights=1e-3)


@needs_deepspeed
def test_ulysses_trains_like_one(tmp_path, alone):
    split = run_on_ranks(tmp_path, CASES, 2, "zero3", shared=2, device="cuda", **ROWS)
    require_alike(alone, split, tolerance=1e-3, weights=1e-3)
