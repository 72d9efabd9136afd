"""Ten steps under FSDP2 on two ranks are those of one, for every objective, with adapters and with all weights."""

import pytest
import torch
from support.ranks import ADAPTERS, PI, RELATION, SELF, require_alike, run_on_ranks

SHORT = {"short_context": 6, "stride": 4}
CASES = {
    "view": {"view": "posaug"},
    # ranks read short windows in unequal numbers
    "longce": {"token_weighting": "longce", "longce_args": SHORT},
    "self-distill": {**SELF, "gradient_checkpointing": True},
    "self-distill, adapters": {**SELF, "adapters": ADAPTERS},
    "self-distill, rows by LongCE": {**SELF, "self_distill_args": {"kl_longce": SHORT}},
    "self-distill, sequential": {**SELF, "self_distill_args": {"passes": "sequential"}},
    "self-distill, some copies": {**SELF, "self_distill_args": {"max_copies": 0.6}},
    "relations": {**RELATION, "gradient_checkpointing": True, "logit_kl_args": {"weight": 0.5, "last": 5}},
    "relations, adapters": {**RELATION, "adapters": ADAPTERS},
    "hidden": {"objective": "hidden-distill", **PI, "view": "skip", "hidden_args": {"short_to_long": 2.0}},
    "native": {"objective": "native-distill", **PI, "view": "skip", "native_args": {"clm_weight": 0.5}},
    "alternating": {**SELF, **PI, "restore_every": 2},
}


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_two_ranks_train_like_one(tmp_path):
    steps = {"max_steps": 10, "learning_rate": 1e-3}
    alone, together = run_on_ranks(tmp_path, CASES, 1, **steps), run_on_ranks(tmp_path, CASES, 2, "fsdp2", **steps)
    require_alike(alone, together, tolerance=1e-4)
