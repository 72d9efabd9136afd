"""long_rows: the same losses and gradients, of every objective, and a plan that says when it is on."""

import pytest
import torch
from peft import LoraConfig
from support.tiny import MIXED, gemma3, tiny
from support.training import WAYS, documents, logged, trainer
from torch.nn import functional as F  # noqa: N812
from transformers import TrainerCallback

from rope_patch.attention import windowed
from rope_patch.distillation import CopiedTeacher
from trl_ext import RopeSFTConfig, long_rows
from trl_ext.long_rows import GIB, plan_memory

TILE = 5
YARN = {"rescale": "yarn", "rescale_args": {"factor": 4.0}}
SKIP = {"view": "skip", "view_args": {"max_skip": 40}}
OBJECTIVES = {
    "clm": SKIP,
    "clm by longce": {**SKIP, "token_weighting": "longce", "longce_args": {"short_context": 6, "stride": 4}},
    "self-distill": {**SKIP, "objective": "self-distill"},
    "self-distill two": {**SKIP, "objective": "self-distill", "self_distill_args": {"passes": "two"}},
    "self-distill sequential": {**SKIP, "objective": "self-distill", "self_distill_args": {"passes": "sequential"}},
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
    pytest.param(objective, family, adapters, marks=() if quick else pytest.mark.slow)
    for objective in OBJECTIVES
    for family in MODELS
    for adapters in (False, True)
    # each objective once, with the model and the weights that ask most of it
    for quick in [(family, adapters) == ("gemma3", objective != "hidden-distill")]
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


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("objective", ["clm", "self-distill", "native-distill", "relation-distill"])
def test_auto_makes_no_masks_where_all_fits_and_gradients_are_the_same(objective, way, tmp_path, monkeypatch):
    monkeypatch.setattr(long_rows, "MASKS_TO", 8)
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


@pytest.mark.parametrize("options", [{"mode": "off"}, {"torch_compile": True}, {"rows": 16383}])
def test_masks_of_windows_count_where_they_are_made(options, big_host):
    def layer(**options):
        with torch.device("meta"):
            model = gemma3()
        mode = options.pop("mode", "auto")
        settings = {"use_cpu": True, "per_device_train_batch_size": 1}
        args = RopeSFTConfig(output_dir="out", **settings, **{k: v for k, v in options.items() if k != "rows"})
        return plan_memory(model, args, options.get("rows", 16384), torch.device("cuda"), mode).layer

    n = options.get("rows", 16384)
    assert layer(**options) == pytest.approx(layer() * n / 16384 + 3 * n * n, rel=1e-6)


@pytest.mark.parametrize("compiled", ["whole", "a layer"])
def test_a_compiled_model_and_short_rows_keep_their_masks(compiled, big_host):
    args = RopeSFTConfig(output_dir="out", use_cpu=True)

    def is_mask_free(model, rows=16384):
        return plan_memory(model, args, rows, torch.device("cpu"), "auto").mask_free

    model = gemma3()
    assert is_mask_free(model) and is_mask_free(model, None) and not is_mask_free(model, 16383)
    if compiled == "whole":
        model = torch.compile(model, backend="eager")
    else:
        model.model.layers[1].compile(backend="eager")
    assert not is_mask_free(model)


def test_a_copy_that_teaches_is_tiled_and_reads_without_masks(tmp_path):
    run = step(tmp_path, gemma3, "on", **OBJECTIVES["native-distill"])[2]
    assert isinstance(run._objective.teacher, CopiedTeacher)
    copied = run._objective.teacher.copy
    assert run._long_rows.models == (run.model, copied)
    assert run._long_rows.rows.decoders == [run.model.model, copied.model]


def llama_plan(mode="auto", device="cuda", rows=65536, **options):
    """The plan of an 8B model that is on no device, in 16 bits."""
    with torch.device("meta"):
        model = tiny(
            dtype=torch.bfloat16, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, head_dim=128,
            num_attention_heads=32, num_key_value_heads=8, vocab_size=128256,
        )  # fmt: skip
    for parameter in model.parameters():
        parameter.requires_grad_(options.get("trains", False))
    options.pop("trains", None)
    settings = {"use_cpu": True, "bf16": True, "gradient_checkpointing": True, "per_device_train_batch_size": 1}
    args = RopeSFTConfig(output_dir="out", **{**settings, "long_rows": mode, **options})
    return plan_memory(model, args, rows, torch.device(device), mode), args


@pytest.fixture
def big_host(monkeypatch):
    monkeypatch.setattr(long_rows, "host_memory", lambda: 100 * GIB)
    monkeypatch.setattr(long_rows, "device_memory", lambda device: 60 * GIB)


def test_the_plan_of_8b_with_adapters(big_host):
    plan, _ = llama_plan()
    assert plan.fixed / GIB == pytest.approx(14.96, abs=0.01)  # 8.03e9 weights of 2 bytes
    assert plan.checkpoints == 33 * 65536 * 4096 * 2
    assert plan.layer == 65536 * (2 * (7 * 14336 + 4 * 4096) + 12 * 4096)
    assert not plan.on and "60.0 GiB for a step, which is enough" in str(plan)
    assert plan.needed / GIB == pytest.approx(51, abs=1)


def test_auto_switches_on_where_a_step_does_not_fit(big_host):
    plan, _ = llama_plan(rows=131072)
    assert plan.on and plan.needed > plan.capacity > plan.needed_when_on
    assert plan.offloaded_layers == 32 and plan.offloaded == 32 << 30
    assert "too little" in str(plan) and "the checkpoints of 32 layers on the host (32.0 GiB there)" in str(plan)


def test_the_host_bounds_what_is_offloaded(big_host):
    plan, _ = llama_plan(rows=350000)
    assert plan.offloaded_layers == 25 and 25 * 4 * GIB <= plan.host  # 2.7 GiB each, which pin 4


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"device": "cpu"}, "on the CPU"),
        ({"rows": None}, "length of rows is not known"),
        ({"gradient_checkpointing": False}, "gradient_checkpointing is off"),
        ({"mode": "off"}, "asks for it"),
    ],
)
def test_auto_stays_off_with_a_reason(options, reason, big_host):
    plan, _ = llama_plan(**{"rows": 1 << 20, **options})
    assert not plan.on and reason in plan.reason


def test_two_views_count_more_than_one_and_sequential_ones_do_not(big_host):
    two = {"objective": "self-distill", "view": "skip"}
    plain, both = llama_plan()[0], llama_plan(**two)[0]
    one_by_one = llama_plan(**two, self_distill_args={"passes": "sequential"})[0]
    assert both.checkpoints == 2 * plain.checkpoints and both.layer == 2 * plain.layer
    assert one_by_one.checkpoints == plain.checkpoints and one_by_one.layer == plain.layer


def test_states_of_the_optimizer_are_paged_where_they_do_not_fit(big_host):
    plan, args = llama_plan(trains=True)
    assert plan.optimizer == pytest.approx(plan.fixed / 2, rel=1e-6) and plan.needed_when_on > plan.capacity
    chosen = args.optim
    assert not long_rows.offload_optimizer(args, plan, torch.device("cpu")) and args.optim == chosen
    assert long_rows.offload_optimizer(args, plan, torch.device("cuda")) and args.optim == "paged_adamw_32bit"
    paged, args = llama_plan(trains=True, optim="paged_adamw_32bit")
    assert paged.optimizer == 0 and paged.fixed == plan.fixed - plan.optimizer
    args.optim = "adafactor"
    assert not long_rows.offload_optimizer(args, plan, torch.device("cuda")) and args.optim == "adafactor"


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
