"""long_rows: the same losses and gradients, of every objective, and a plan that says when it is on."""

import pytest
import torch
from peft import LoraConfig
from support.tiny import MIXED, gemma3, tiny
from support.training import WAYS, documents, logged, trainer
from torch.nn import functional as F  # noqa: N812
from transformers import TrainerCallback

from rope_patch.attention import windowed
from rope_patch.losses import CopiedTeacher
from rope_patch.views import Uniform
from trl_ext import RopeSFTConfig
from trl_ext.memory import long_rows
from trl_ext.memory import plan as memory_plan

TILE = 5
YARN = {"rescale": "yarn", "rescale_args": {"factor": 4.0}}
SKIP = {"view": "skip", "view_args": {"skip": Uniform(1, 40)}}
OBJECTIVES = {
    "clm": SKIP,
    "clm by longce": {**SKIP, "objective_args": {"longce": {"short_context": 6, "stride": 4}}},
    "self-distill": {**SKIP, "objective": "self-distill"},
    "self-distill two": {**SKIP, "objective": "self-distill", "objective_args": {"passes": "two"}},
    "self-distill sequential": {**SKIP, "objective": "self-distill", "objective_args": {"passes": "sequential"}},
    "relation-distill": {**YARN, "objective": "relation-distill"},
    "hidden-distill": {**YARN, "objective": "hidden-distill"},
    "native-distill": {**YARN, **SKIP, "objective": "native-distill"},
}
MODELS = {"llama": tiny, "gemma3": gemma3, "qwen3 mixed": lambda: tiny("qwen3", **MIXED)}


class Gradients(TrainerCallback):
    """Gradients of the first step."""

    def __init__(self):
        self.found = {}

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and not self.found.get(name, torch.zeros(())).any():
                self.found[name] = parameter.grad.clone()


def lora(dropout=0.0):
    targets = ["q_proj", "v_proj", "gate_proj", "down_proj"]
    return LoraConfig(r=4, lora_dropout=dropout, target_modules=targets, init_lora_weights="gaussian")


def step(folder, make_model, mode, adapters=None, dtype=torch.float64, **options):
    """Loss and gradients of one step."""
    torch.manual_seed(0)  # of adapters
    options = {"per_device_train_batch_size": 2, "train_dataset": documents(4), **options}
    run = trainer(
        folder,
        model=make_model().to(dtype),
        max_steps=1,
        shuffle_dataset=False,
        long_rows=mode,
        peft_config=adapters,
        **{"gradient_checkpointing": True, **options},
    )
    gradients = Gradients()
    run.add_callback(gradients)
    run.train()
    return logged(run, "loss")[0]["loss"], gradients.found, run


def require_equal(one, other, tolerance=1e-9):
    assert one[0] == pytest.approx(other[0], rel=1e-9)
    assert one[1].keys() == other[1].keys() and one[1]
    for name, gradient in other[1].items():
        assert (one[1][name] - gradient).norm() <= tolerance * (1 + gradient.norm()), name


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(long_rows, "TILE", TILE)


CASES = [
    # the model and the weights that ask most of an objective, and another pair in the slow tests
    pytest.param(objective, family, adapters, marks=() if quick else pytest.mark.slow)
    for i, objective in enumerate(OBJECTIVES)
    for quick, family, adapters in (
        (objective not in ("clm", "self-distill"), "gemma3", objective != "hidden-distill"),
        (False, ("llama", "qwen3 mixed")[i % 2], objective == "hidden-distill"),
    )
]


@pytest.mark.parametrize(("objective", "family", "adapters"), CASES)
def test_gradients_are_the_same(objective, family, adapters, tmp_path):
    options = {"adapters": lora() if adapters else None, **OBJECTIVES[objective]}
    off = step(tmp_path, MODELS[family], "off", **options)
    on = step(tmp_path, MODELS[family], "on", **options)
    assert on[2]._long_rows is not None and off[2]._long_rows is None
    # norms of these families and relations are computed in float32, whatever the dtype of the model
    require_equal(on, off, tolerance=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_gradients_are_the_same_on_a_gpu(objective, family, tmp_path):
    """Checkpoints wait in pinned memory there, and kernels are CUDA's: float32, so sums round."""
    options = {"use_cpu": False, "dtype": torch.float32, **OBJECTIVES[objective]}
    off, on = (step(tmp_path, MODELS[family], mode, **options) for mode in ("off", "on"))
    assert on[2]._long_rows is not None and off[2]._long_rows is None
    # hidden-distill's loss is 1 - cos, of which rounding is all where hidden states are nearly alike
    assert on[0] == pytest.approx(off[0], rel=1e-5, abs=1e-6)
    for name, gradient in off[1].items():
        assert (on[1][name] - gradient).norm() <= 1e-4 * (1 + gradient.norm()), name


def test_packed_rows_attend_within_documents_and_evaluate_alike(tmp_path):
    options = {"train_dataset": documents(8), "eval_dataset": documents(3), **WAYS["packed"], **SKIP}
    off, on = (step(tmp_path, gemma3, mode, **options) for mode in ("off", "on"))
    require_equal(on, off, tolerance=1e-5)
    assert on[2].evaluate()["eval_loss"] == pytest.approx(off[2].evaluate()["eval_loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("objective", "way"),
    [
        ("clm", "checkpointed"), ("clm", "packed"), ("self-distill", "mixed"), ("native-distill", "padding-free"),
        ("relation-distill", "packed"),
    ],
)  # fmt: skip
def test_auto_makes_no_masks_where_all_fits_and_gradients_are_the_same(objective, way, tmp_path, monkeypatch):
    for module in (memory_plan, long_rows):  # which plans, and which trains
        monkeypatch.setattr(module, "MASKS_TO", 8)
    masks, attend = [], F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *a, **o: (masks.append(o.get("attn_mask")), attend(*a, **o))[1]
    )
    monkeypatch.setattr(windowed, "BLOCK", 4)
    options = {"eval_dataset": documents(3), **WAYS[way], **OBJECTIVES[objective]}
    off = step(tmp_path, gemma3, "off", **options)
    most = max(mask.numel() for mask in masks if mask is not None)
    masks.clear()
    auto = step(tmp_path, gemma3, "auto", **options)
    assert auto[2].memory_plan.mask_free and not auto[2].memory_plan.on
    window = auto[2].model.config.sliding_window
    block = max(window, 4) * (2 * window - 1)
    assert max((mask.numel() for mask in masks if mask is not None), default=0) <= block
    assert most > block or objective == "self-distill"  # whose two views never have masks
    require_equal(auto, off, tolerance=1e-5)
    assert auto[2].evaluate()["eval_loss"] == pytest.approx(off[2].evaluate()["eval_loss"], rel=1e-6)


def test_a_copy_that_teaches_is_tiled_and_reads_without_masks(tmp_path):
    run = step(tmp_path, gemma3, "on", **OBJECTIVES["native-distill"])[2]
    assert isinstance(run._objective.teacher, CopiedTeacher)
    copied = run._objective.teacher.copy
    assert run._long_rows.models == (run.model, copied)
    assert run._long_rows.rows.decoders == [run.model.model, copied.model]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"long_rows": "yes"}, "must be 'auto', 'on' or 'off', got 'yes'"),
        ({"long_rows": "on", "gradient_checkpointing": False}, "needs checkpointing that is not reentrant"),
        (
            {"long_rows": "on", "gradient_checkpointing_kwargs": {"use_reentrant": True}},
            "needs checkpointing that is not reentrant",
        ),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        RopeSFTConfig(output_dir="out", use_cpu=True, **{"gradient_checkpointing": True, **options})
