"""Steps under FSDP2 on several ranks are those of one, for every objective; a run goes on on other ranks."""

import shutil
from importlib.util import find_spec

import pytest
import torch
from support.ranks import ADAPTERS, PI, RELATION, SELF, require_alike, run_on_ranks

SHORT = {"short_context": 6, "stride": 4}
CASES = {
    "view": {"view": "posaug"},
    "view, evaluated and saved on the way": {
        "view": "skip",
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
    },
    # ranks read short windows in unequal numbers
    "longce": {"objective_args": {"longce": SHORT}},
    "self-distill": {**SELF, "gradient_checkpointing": True},
    "self-distill, adapters": {**SELF, "adapters": ADAPTERS},
    "self-distill, rows by LongCE": {**SELF, "objective_args": {"kl_longce": SHORT}},
    "self-distill, sequential": {**SELF, "objective_args": {"passes": "sequential"}},
    "self-distill, some copies": {**SELF, "objective_args": {"max_copies": 0.6}},
    "relations": {
        **RELATION,
        "gradient_checkpointing": True,
        "objective_args": {"logit_kl": {"weight": 0.5, "last": 5}},
    },
    "relations, adapters": {**RELATION, "adapters": ADAPTERS},
    "hidden": {"objective": "hidden-distill", **PI, "view": "skip", "objective_args": {"short_to_long": 2.0}},
    "native": {"objective": "native-distill", **PI, "view": "skip", "objective_args": {"clm_weight": 0.5}},
    "alternating": {**SELF, **PI, "objective_args": {"restore": {"every": 2}}},
}


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_two_ranks_train_like_one(tmp_path):
    steps = {"max_steps": 10, "learning_rate": 1e-3}
    alone, together = run_on_ranks(tmp_path, CASES, 1, **steps), run_on_ranks(tmp_path, CASES, 2, "fsdp2", **steps)
    require_alike(alone, together, tolerance=1e-4)


needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None or shutil.which("c++") is None, reason="needs DeepSpeed and a C++ compiler"
)
needs_bitsandbytes = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
# weights are coded in blocks of 64
IN_4_BITS = {"model": {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128}, "adapters": ADAPTERS}


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
@pytest.mark.parametrize("engine", ["fsdp2", pytest.param("zero3", marks=needs_deepspeed)])
def test_a_copy_that_teaches_is_computed_in_the_dtype_of_the_student(tmp_path, engine):
    """FSDP2 and DeepSpeed cast the student's weights; tolerances are of bfloat16."""
    cases = {"relations": {**RELATION, "bf16": True}, "hidden": {"objective": "hidden-distill", **PI, "bf16": True}}
    alone, together = run_on_ranks(tmp_path, cases, 1), run_on_ranks(tmp_path, cases, 2, engine)
    require_alike(alone, together, tolerance=2e-2, parts=3.0, moved=0.4)


@pytest.mark.slow
@needs_bitsandbytes
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
def test_weights_in_4_bits_train_like_on_one_rank(tmp_path):
    """Split where they lie in numbers of the dtype that is computed in, whole where they lie in integers.

    Adapters are in bfloat16, as TRL has it.
    """
    settings = {**IN_4_BITS, "learning_rate": 1e-2, "max_steps": 4}
    split = {"bnb_4bit_compute_dtype": "float32", "bnb_4bit_quant_storage": "float32"}
    cases = {
        "view": {"view": "skip", "quantized": split, "saves": True},
        "self-distill": {**SELF, "gradient_checkpointing": True, "quantized": split},
        "relations": {**RELATION, "quantized": split},
        "integers": {**RELATION, "quantized": {"bnb_4bit_compute_dtype": "float32"}},
    }
    alone = run_on_ranks(tmp_path, cases, 1, **settings)
    together = run_on_ranks(tmp_path, cases, 2, "fsdp2", **settings)
    require_alike(alone, together, tolerance=2e-3, parts=10.0, weights=1e-2, moved=0.1)


@pytest.mark.slow
@needs_bitsandbytes
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bnb_4bit_quant_storage": "float32"}, "set bnb_4bit_quant_storage to 'bfloat16'"),
        ({"load_in_4bit": False, "load_in_8bit": True}, "does not train on weights in 8 bits"),
    ],
    ids=["cast", "8-bits"],
)
def test_quantised_weights_that_fsdp_would_destroy_are_refused(tmp_path, options, message):
    cases = {"view": {**IN_4_BITS, "view": "skip", "bf16": True, "quantized": options}}
    with pytest.raises(AssertionError, match=f"ValueError: FSDP .*{message}"):
        run_on_ranks(tmp_path, cases, 2, "fsdp2")


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")
@pytest.mark.parametrize("adapters", [None, ADAPTERS], ids=["all-weights", "adapters"])
def test_a_run_goes_on_on_other_ranks(tmp_path, adapters):
    case = {
        **SELF,
        "optim": "adamw_torch",
        "max_steps": 4,
        "learning_rate": 1e-3,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    if adapters is not None:
        engine, begins, goes_on = "ddp", (1, 1), [(2, 1)]
        case["adapters"] = adapters
    else:
        engine, begins, goes_on = "fsdp2", (2, 1), [(4, 1), (2, 2)]  # the last is a ring
    whole = run_on_ranks(tmp_path, {"case": case}, begins[0], engine, begins[1])
    resumed = {**case, "resume": str(tmp_path / f"{engine}-{begins[0]}-run" / "checkpoint-2")}
    for world, shared in goes_on:
        folder = tmp_path / f"{world}-{shared}"
        folder.mkdir()
        after = run_on_ranks(folder, {"case": resumed}, world, engine, shared)
        require_alike(whole, after, tolerance=1e-3, weights=1e-3)
