"""One sequence over several ranks gives the draws, losses, evaluations and weights of one rank."""

import pytest
import torch
from support.ranks import ADAPTERS, PI, RELATION, SELF, require_alike, run_on_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed"),
]

# rows of 12 to 24 tokens, of any length: TRL's collator pads them to what ranks can share
CASES = {
    "plain": {},
    "skip": {"view": "skip"},
    "posaug": {"view": "posaug"},
    "chunks, checkpointed": {"view": "chunk-permute", "gradient_checkpointing": True},
    "rpe": {"view": "rpe", "view_args": {"max_index": 200}},
    "each rank's own mean": {"view": "skip", "average_tokens_across_devices": False, "gradient_accumulation_steps": 1},
    "cue": {"view": "endprompt", "view_args": {"cue_tokens": 3, "target": 64}, "cue_weight": 2.5},
    # a window of 16 tokens, which rows reach on one rank and not on the other
    "longrope": {
        "view": "skip",
        "model": {"max_position_embeddings": 16},
        "rescale": "longrope",
        "rescale_args": {"factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4},
    },
    "self-distill": SELF,
    "self-distill, checkpointed": {
        **SELF,
        "gradient_checkpointing": True,
        "self_distill_args": {"view_clm": 0.5, "reduction": "token"},
    },
    "self-distill, uniform, adapters": {
        **SELF,
        "adapters": ADAPTERS,
        "self_distill_args": {"reduction": "uniform", "rows": "query_in_suffix"},
    },
    "self-distill, sequential": {**SELF, "self_distill_args": {"passes": "sequential"}},
    "self-distill, native": {**SELF, **PI, "self_distill_args": {"teacher": "native"}},
    "self-distill, few labels": {**SELF, "documents": {"n_labels": 2}},
    "relations, checkpointed": {
        **RELATION,
        "gradient_checkpointing": True,
        "logit_kl_args": {"weight": 0.5, "last": 5},
    },
    "relations, attention": {**RELATION, "relation_args": {"attention": 0.5, "denominator": "own_heads"}},
    "relations, adapters, before RoPE": {**RELATION, "adapters": ADAPTERS, "relation_args": {"rope": "pre"}},
    "hidden": {"objective": "hidden-distill", **PI, "view": "skip", "hidden_args": {"short_to_long": 2.0}},
    "native": {"objective": "native-distill", **PI, "view": "skip", "native_args": {"clm_weight": 0.5}},
}
OF_FOUR = ("skip", "self-distill, checkpointed", "self-distill, few labels", "relations, checkpointed", "native")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return run_on_ranks(tmp_path_factory.mktemp("alone"), CASES, 1)


def test_a_ring_of_two_trains_like_one_rank(tmp_path, alone):
    require_alike(alone, run_on_ranks(tmp_path, CASES, 2, "fsdp2", shared=2))


@pytest.mark.parametrize("shared", [2, 4], ids=["two-rings", "one-ring"])
def test_four_ranks_train_like_one(tmp_path, alone, shared):
    cases = {name: CASES[name] for name in OF_FOUR}
    expected = {name: alone[name] for name in OF_FOUR}
    require_alike(expected, run_on_ranks(tmp_path, cases, 4, "fsdp2", shared=shared))
