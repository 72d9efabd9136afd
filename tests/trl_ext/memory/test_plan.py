"""The plan of a step's memory: by the formulas, near what H200s measured, and when it switches long_rows on."""

import functools
import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import extension_memory
import long_rows as measured
import pytest
import several_gpus
import torch
from peft import LoraConfig, get_peft_model
from support.tiny import gemma3, tiny
from transformers import AutoConfig, AutoModelForCausalLM
from trl import get_quantization_config

from trl_ext import RopeSFTConfig
from trl_ext.engines.sharding import Sharding
from trl_ext.extension.facts import ModelFacts
from trl_ext.extension.options import ExtendOptions
from trl_ext.extension.training import recipe
from trl_ext.memory import long_rows
from trl_ext.memory import plan as memory_plan
from trl_ext.memory.plan import GIB, plan_memory
from trl_ext.memory.step import peak_memory
from trl_ext.recipes.adapter_config import adapter_config
from trl_ext.recipes.stages import read_stages
from trl_ext.trainer.model_setup import train_qkv_only

RESULTS = Path(__file__).parents[3] / "research" / "results"
OTHERS = json.loads((RESULTS / "extension-memory-h200.json").read_text())["runs"]


def measured_steps():
    """Lines of the file with the header of their run."""
    for line in map(json.loads, (RESULTS / "long-rows-h200.jsonl").read_text().splitlines()):
        if "case" not in line:
            header = line
        elif "planned_gib" in line:  # TRL's trainer plans nothing
            yield header | line


LINES = list(measured_steps())


@pytest.fixture
def big_host(monkeypatch):
    monkeypatch.setattr(memory_plan, "host_memory", lambda: 100 * GIB)
    monkeypatch.setattr(memory_plan, "device_memory", lambda device: 60 * GIB)


@functools.cache
def llama():
    """An 8B model that is on no device, in 16 bits."""
    with torch.device("meta"):
        return tiny(
            dtype=torch.bfloat16, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, head_dim=128,
            num_attention_heads=32, num_key_value_heads=8, vocab_size=128256,
        )  # fmt: skip


@functools.cache
def on_no_device(config_json, dtype, rank=0, targets=("q_proj", "k_proj", "v_proj")):
    """A model of this configuration, with adapters of a rank above 0."""
    with torch.device("meta"):
        config = AutoConfig.for_model(**json.loads(config_json))
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
        return get_peft_model(model, LoraConfig(r=rank, target_modules=list(targets))) if rank else model


def llama_plan(mode="auto", device="cuda", rows=65536, **options):
    """The plan of `llama`."""
    model = llama()
    for parameter in model.parameters():
        parameter.requires_grad_(options.get("trains", False))
    options.pop("trains", None)
    settings = {"use_cpu": True, "bf16": True, "gradient_checkpointing": True, "per_device_train_batch_size": 1}
    args = RopeSFTConfig(output_dir="out", **{**settings, "long_rows": mode, **options})
    return plan_memory(model, args, rows, torch.device(device), mode), args


@pytest.mark.parametrize("options", [{"mode": "off"}, {"rows": 16383}])
def test_masks_of_windows_count_where_they_are_made(options, big_host):
    def at_once(mode="auto", rows=16384):
        with torch.device("meta"):
            model = gemma3()
        args = RopeSFTConfig(output_dir="out", use_cpu=True, per_device_train_batch_size=1)
        memory = plan_memory(model, args, rows, torch.device("cuda"), mode).memory
        return memory.masks + memory.layer

    n, config = options.get("rows", 16384), gemma3().config
    queries = config.num_attention_heads * config.head_dim
    of_blocks = 4 * 2 * queries * (2 + config.sliding_window / 1024)  # which look through the window in place of masks
    assert at_once(**options) == pytest.approx(n * (at_once() / 16384 - of_blocks) + 3 * n * n, rel=1e-6)


@pytest.mark.parametrize(("strategy", "length"), [("bfd", 2 * 8192), ("wrapped", 8192)])
def test_packed_rows_of_a_batch_are_one_row_of_all_their_documents(strategy, length, big_host):
    packed = {"packing": True, "packing_strategy": strategy, "per_device_train_batch_size": 2}
    plans = {mode: llama_plan(mode, rows=8192, **packed)[0] for mode in ("auto", "off")}
    assert plans["auto"].mask_free is (length == 16384)
    assert plans["off"].memory.masks == 3 * 2 * 8192 * length and plans["off"].tokens == 16384


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


def test_the_plan_of_8b_with_adapters(big_host):
    plan, _ = llama_plan()
    memory = plan.memory
    assert memory.fixed / GIB == pytest.approx(14.96, abs=0.01)  # 8.03e9 weights of 2 bytes
    assert memory.checkpoints == 33 * 65536 * 4096 * 2
    # norms in float32, q, k and v's input, q, k, v and the output, the MLP's parts; gradients, and one more norm
    kept = 2 * 4 * 4096 + 2 * 4096 + 2 * 2 * (4096 + 1024) + 3 * 2 * 14336
    assert memory.layer == 65536 * (kept + 2 * 2 * 14336 + (4 + 2) * 4096)
    assert not plan.on and "60.0 GiB for a step, which is enough" in str(plan)
    assert memory.total / GIB == pytest.approx(45.5, abs=0.1)


def test_auto_switches_on_where_a_step_does_not_fit(big_host):
    plan, _ = llama_plan(rows=131072)
    assert plan.on and plan.memory.total > plan.capacity > plan.memory_when_on.total
    assert plan.offloaded_layers == 32 and plan.offloaded == 32 << 30
    assert "too little" in str(plan) and "the checkpoints of 32 layers on the host (32.0 GiB there)" in str(plan)


def test_the_host_bounds_what_is_offloaded(big_host):
    plan, _ = llama_plan(rows=350000)
    assert plan.offloaded_layers == 32 and 32 * 2.75 <= 100  # 2.67 GiB each, in pieces of 64 MiB
    plan, _ = llama_plan(rows=1 << 20)
    assert plan.offloaded_layers == 12 and plan.offloaded == 12 * 8 * GIB


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
    plain, both = llama_plan()[0].memory, llama_plan(**two)[0].memory
    one_by_one = llama_plan(**two, objective_args={"passes": "sequential"})[0].memory
    assert both.checkpoints == pytest.approx(2 * plain.checkpoints, rel=1e-4)  # the first token never moves
    assert both.layer == pytest.approx(2 * plain.layer, rel=1e-4)
    half = llama_plan(**two, view_args={"split": 32768})[0].memory
    assert half.checkpoints == 1.5 * plain.checkpoints and half.layer == 1.5 * plain.layer
    packed = llama_plan(**two, view_args={"split": 32768}, packing=True, max_length=65536)[0].memory
    assert packed.layer == 2 * plain.layer
    few = llama_plan(**two, view_args={"split": 32768}, objective_args={"max_copies": 0.25})[0].memory
    assert few.layer == 1.25 * plain.layer
    assert one_by_one.checkpoints == plain.checkpoints and one_by_one.layer == plain.layer


def test_what_an_objective_keeps_while_layers_run_counts_beside_them(big_host):
    plain = llama_plan()[0]
    relations = llama_plan(objective="relation-distill", rescale="pi", rescale_args={"factor": 4.0}, trains=True)[0]
    memory = relations.memory
    # the teacher's tensors; five float32 values of each row of the maps of 32 + 8 + 8 heads, of checkpointed layers
    assert memory.beside == 1.5 * 32 * 65536 * 4096 * 2 + 20 * 48 * 32 * 65536 and plain.memory.beside == 0
    assert "kept by the objective 25.9" in str(relations) and "kept by the objective" not in str(plain)
    kept = memory.checkpoints - memory.freed + memory.beside
    assert memory.total == memory.fixed + kept + memory.layer == sum(memory.parts.values())


def test_a_copy_that_teaches_and_copies_in_16_bits_count(big_host):
    def fixed(**options):
        return llama_plan(trains=True, **options)[0].memory.fixed

    weights = fixed() / 4
    teacher = {"objective": "native-distill"}
    assert fixed(**teacher) == pytest.approx(5 * weights, rel=1e-6)
    assert fixed(**teacher, teacher_offload=True) == fixed()


@pytest.mark.parametrize(("stage", "gradients"), [(1, 1), (2, 4), (3, 4)])
def test_zero_splits_states_then_gradients_then_weights(stage, gradients, big_host):
    """Of 4 ranks, weights of 16 bits: DeepSpeed trains a float32 copy. Its buckets are 2 x 5e8 numbers of 2 bytes."""
    model, n = llama().requires_grad_(True), sum(p.numel() for p in llama().parameters())
    args = RopeSFTConfig(output_dir="out", use_cpu=True, bf16=True)
    memory = plan_memory(model, args, 4096, torch.device("cuda"), "off", Sharding.of_config(f"zero{stage}", 4)).memory
    weights = 4 * n if stage < 3 else n + 2 * 10**9  # ZeRO-3 leaves 1e9 whole
    assert memory.optimizer == pytest.approx(2 * 4 * n / 4, rel=1e-6)
    assert memory.fixed == pytest.approx(2 * 10**9 + weights + 4 * n / gradients + memory.optimizer, rel=1e-6)
    assert memory.freed == 0


@pytest.mark.parametrize("line", LINES, ids=[line["case"] for line in LINES])
def test_the_plan_of_steps_that_an_h200_measured(line, monkeypatch):
    """Those of benchmarks/long_rows.py: at most 5 % above what it took, and nothing below."""
    monkeypatch.setattr(memory_plan, "host_memory", lambda: 100 * GIB)
    monkeypatch.setattr(memory_plan, "device_memory", lambda device: 128 * GIB)
    config = measured.config_of(Namespace(shape=line["shape"], layers=line["layers"]))
    model = on_no_device(config.to_json_string(use_diff=False), torch.bfloat16, line["lora_rank"])
    of_method = {}
    if line["method"] == "self-distill":
        of_method = {"objective": "self-distill", "view": "skip", "view_args": {"split": line["length"] // 2}}
    mode = "on" if line["long_rows"] else "off"
    args = RopeSFTConfig(output_dir="out", use_cpu=True, bf16=True, per_device_train_batch_size=1, **of_method)
    plan = plan_memory(model, args, line["length"], torch.device("cuda"), mode)
    needed = plan.memory_when_on.total if line["long_rows"] else plan.memory.total
    assert 1 <= needed / GIB / line["peak_gib"] < 1.05


@pytest.mark.parametrize("line", OTHERS, ids=[line["case"] for line in OTHERS])
def test_steps_of_extend_that_an_h200_measured(line, big_host):
    """Those of benchmarks/extension_memory.py, of all weights, q k v or adapters, and of models with sliding windows.

    `extend` estimates them from its choices, and the trainer from the model, which is not in 4 bits here.
    """
    shape, length, train, checkpointing, objective = extension_memory.CASES[line["case"]]
    config = AutoConfig.for_model(**{"model_type": "llama", **extension_memory.SHAPES[shape]})
    window = max(config.max_position_embeddings, length)
    choices = extension_memory.choices_of(length, train, checkpointing, objective, window, "bf16")
    options = ExtendOptions(model=shape, to=1, data=("none",), output="", rows_per_step=2, device="cuda")
    facts = ModelFacts(shape, config, None, window, torch.bfloat16)
    memory = peak_memory(facts.size, choices.step("cuda"))
    assert memory.total / GIB == pytest.approx(line["peak_gib"], rel=0.05)
    if train == "qlora":
        return
    (stage,) = read_stages(recipe(facts, options, choices, 8), use_cpu=True)
    with torch.device("meta"):
        dtype = getattr(torch, stage.loading["dtype"])
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
        adapted = adapter_config(stage.model)
        model = model if adapted is None else get_peft_model(model, adapted)
    if train == "qkv":
        train_qkv_only(model)
    assert plan_memory(model, stage.training, length, torch.device("cuda"), "auto").memory == memory


def test_a_model_in_4_bits_needs_what_extend_counts_before_it_is_quantised(tmp_path, big_host):
    pytest.importorskip("bitsandbytes")
    model = tiny(
        hidden_size=256, intermediate_size=1024, head_dim=64, num_key_value_heads=2, max_position_embeddings=512
    )
    model.bfloat16().save_pretrained(tmp_path)
    choices = extension_memory.choices_of(512, "qlora", True, "native-distill", 512, "bf16")
    options = ExtendOptions(model="tiny", to=1, data=("none",), output="", rows_per_step=2, device="cuda")
    facts = ModelFacts("tiny", model.config, None, 512, torch.bfloat16)
    (stage,) = read_stages(recipe(facts, options, choices, 8), use_cpu=True)
    how = get_quantization_config(stage.model)
    quantised = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=how, dtype=torch.bfloat16)
    adapted = get_peft_model(quantised, adapter_config(stage.model))
    plan = plan_memory(adapted, stage.training, 512, torch.device("cuda"), "auto")
    assert plan.memory == peak_memory(facts.size, choices.step("cuda"))


SEVERAL = [json.loads(line) for line in (RESULTS / "several-gpus-h200.jsonl").read_text().splitlines()]
SEVERAL = [line for line in SEVERAL if "seconds" in line]


def name_of(line):
    return f"{line['case']} of {line['length']} tokens, {line['layers']} layers, {line['gpus']} GPUs"


@pytest.mark.parametrize("line", SEVERAL, ids=name_of)
def test_the_plan_of_steps_on_several_gpus(line, monkeypatch):
    """Those of benchmarks/several_gpus.py, to one of which, a ring's on the host, the plan is fitted."""
    monkeypatch.setattr(memory_plan, "host_memory", lambda: 500 * GIB // line["gpus"])
    monkeypatch.setattr(memory_plan, "device_memory", lambda device: 128 * GIB)
    case = several_gpus.CASES[line["case"]]
    shape = {"model_type": "llama", **several_gpus.SHAPES[line["shape"]]}
    shape |= {} if line["layers"] is None else {"num_hidden_layers": line["layers"]}
    dtype, rank = (torch.bfloat16, 64) if case.adapters else (torch.float32, 0)
    model = on_no_device(json.dumps(shape), dtype, rank)
    fields = several_gpus.fields_of(case, line["length"], model.config.max_position_embeddings, 2, "out")
    args = RopeSFTConfig(**{**fields, "use_cpu": True, "bf16": True})
    engine = Sharding.of_config(line["engine"], line["gpus"]) if line["gpus"] > 1 else Sharding()
    plan = plan_memory(model, args, line["length"], torch.device("cuda"), "on", engine)
    needed = plan.memory_when_on.total if line["long_rows"] else plan.memory.total
    assert -0.03 < needed / GIB / line["peak_gib"] - 1 < 0.26


def test_states_of_the_optimizer_are_paged_where_they_do_not_fit(big_host, caplog):
    plan, args = llama_plan(trains=True)
    memory = plan.memory
    assert memory.optimizer == pytest.approx(memory.fixed / 2, rel=1e-6) and plan.memory_when_on.total > plan.capacity
    chosen = args.optim
    assert not long_rows.offload_optimizer(args, plan, torch.device("cpu")) and args.optim == chosen
    assert long_rows.offload_optimizer(args, plan, torch.device("cuda")) and args.optim == "paged_adamw_32bit"
    paged, args = llama_plan(trains=True, optim="paged_adamw_32bit")
    assert paged.memory.optimizer == 0 and paged.memory.fixed == memory.fixed - memory.optimizer
    split = replace(plan, sharding=Sharding.of_config("fsdp2", 2))
    args.optim = chosen
    assert not long_rows.offload_optimizer(args, split, torch.device("cuda")) and args.optim == chosen
    assert "fsdp_offload_params: true" in caplog.text
    args.optim = "adafactor"
    assert not long_rows.offload_optimizer(args, plan, torch.device("cuda")) and args.optim == "adafactor"


def next_token_steps():
    """Weights in bfloat16 and adapters in float32, one row a step; then SmolLM2 in float32, also rows of 64K tokens."""
    for name in ("self-distill-step-h200.json", "distillation-step-h200.json"):
        for run in json.loads((RESULTS / name).read_text())["runs"]:
            if run["run"] == "clm":
                yield run["shape"], run["length"], run["lora_rank"], torch.bfloat16, False, run["peak_gib"]
    found = set()
    for run in map(json.loads, (RESULTS / "extension-cost-h200.jsonl").read_text().splitlines()):
        length = (65536 if run["method"] == "full length" else 8192) * run["rows_at_once"]
        if run["method"] in ("pose", "full length") and length not in found:
            found.add(length)
            accumulates = run["rows_a_step"] > run["rows_at_once"]
            yield "smollm2-135m", length, 0, torch.float32, accumulates, run["peak_gib"]


@pytest.mark.parametrize(("shape", "length", "rank", "dtype", "accumulates", "measured"), [*next_token_steps()])
def test_next_token_steps_that_an_h200_measured(shape, length, rank, dtype, accumulates, measured, big_host):
    config = json.dumps({"model_type": "llama", **extension_memory.SHAPES[shape]})
    model = on_no_device(config, dtype, rank, ("q_proj", "k_proj", "v_proj", "o_proj"))
    steps = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1 + accumulates}
    args = RopeSFTConfig(output_dir="out", use_cpu=True, bf16=True, **steps)
    needed = plan_memory(model, args, length, torch.device("cuda"), "auto").memory.total
    assert -0.03 < needed / GIB / measured - 1 < 0.05
