"""Which engine a plan advises: bytes against counts by hand, and the choice."""

import pytest
import torch
import yaml
from support.tiny import tiny
from support.training import tokenizer

import trl_ext.recipes.engine_advice as engine_advice_module
from trl_ext import RopeSFTConfig, cli
from trl_ext.memory.plan import plan_memory
from trl_ext.recipes.engine_advice import EngineNeed, choose_engine, engine_advice, engine_needs


def settings(folder, **options):
    """Of steps that add up gradients, so that none take the place of what layers keep."""
    defaults = {"max_length": 64, "gradient_accumulation_steps": 2}
    return RopeSFTConfig(output_dir=str(folder), use_cpu=True, bf16=False, report_to=[], **{**defaults, **options})


def bytes_of(needs):
    return {need.config: need.bytes for need in needs}


def test_each_engine_counts_its_parts(tmp_path):
    """From ddp to zero2 gradients and states are split, to fsdp2 weights besides, and two layers and what is outside
    of them are whole at a time."""
    model, args = tiny(), settings(tmp_path)
    needs = bytes_of(engine_needs(model, args, 4, torch.device("cpu")))
    total = 4 * sum(p.numel() for p in model.parameters())
    layers = sum(p.numel() for p in (*model.model.layers.parameters(), *model.model.norm.parameters()))
    assert needs["ddp"] - needs["zero2"] == 3 * total - (total // 4 + 2 * total // 4) - 2 * 2 * 500_000_000
    whole = total - 4 * (layers - 2 * layers // 3)
    split = total - total // 4
    assert needs["ddp"] - needs["fsdp2"] == 3 * total - (total // 4 + 2 * total // 4) + split - whole


def test_a_shared_row_counts_its_part_of_tokens(tmp_path):
    model, args = tiny(), settings(tmp_path)
    whole, part = (plan_memory(model, args, n, torch.device("cpu"), "on") for n in (64, 16))
    needs = bytes_of(engine_needs(model, args, 4, torch.device("cpu")))
    assert needs["fsdp2"] - needs["fsdp2-cp"] == whole.memory.total - part.memory.total
    assert needs["ddp"] == whole.memory.total
    assert bytes_of(engine_needs(model, args, 1, torch.device("cpu"))) == {"ddp": whole.memory.total}


def test_layers_in_4_bits_stay_whole_on_each_gpu(tmp_path):
    model, args = tiny(), settings(tmp_path)
    model.requires_grad_(False)
    before, after = (bytes_of(engine_needs(model, args, 4, torch.device("cpu"), in_4_bits=b)) for b in (False, True))
    linears = [m for m in model.model.modules() if isinstance(m, torch.nn.Linear)]
    weights = sum(m.weight.numel() for m in linears)
    codes, decoded = weights // 2 + weights // 64 + weights // 4096, 4 * max(m.weight.numel() for m in linears)
    assert before["ddp"] - after["ddp"] == 4 * weights - codes - decoded
    quarter, of_two_layers = weights, 4 * weights * 2 // 3  # numbers are in parts, but for layers that are gathered
    saved = quarter + of_two_layers - codes - decoded
    assert before["fsdp2"] - after["fsdp2"] == pytest.approx(saved, abs=16)


def test_what_fits_with_the_fewest_gpus_is_advised():
    needs = [EngineNeed("ddp", 1, 100, 90), EngineNeed("ddp", 2, 100, 90), EngineNeed("fsdp2", 2, 60, 50)]
    assert choose_engine(needs, 110).n_gpus == 1
    assert choose_engine(needs, 70).config == "fsdp2"
    assert choose_engine(needs, 55).config == "fsdp2" and needs[2].fits(55) == "fits with long_rows"
    assert choose_engine(needs, 40) is None
    # long rows on fewer GPUs before more of them, and before GPUs share rows
    needs = [EngineNeed("ddp", 1, 100, 50), EngineNeed("fsdp2", 2, 60, 40), EngineNeed("fsdp2-cp", 2, 30, 20)]
    assert [choose_engine(needs, n).config for n in (55, 45, 35)] == ["ddp", "fsdp2", "fsdp2-cp"]


def test_a_plan_follows_the_recipe_and_the_host(tmp_path, monkeypatch):
    def needs(n=1, **options):
        args = settings(tmp_path, **{"max_length": 512, "per_device_train_batch_size": 2, **options})
        return engine_needs(tiny("mistral-sliding"), args, n, torch.device("cpu"))[0]

    assert needs(gradient_checkpointing=False).bytes_long == needs(gradient_checkpointing=False).bytes
    assert needs(long_rows="off").bytes_long == needs(long_rows="off").bytes
    assert needs().bytes_long < needs().bytes
    hosts = []
    real = engine_advice_module.plan_memory
    monkeypatch.setattr(engine_advice_module, "host_memory", lambda: 800)
    monkeypatch.setattr(
        engine_advice_module, "plan_memory", lambda *given: hosts.append((given[6], given[5].row)) or real(*given)
    )
    engine_needs(tiny(), settings(tmp_path), 8, torch.device("cpu"), gpus_per_row=4)
    assert hosts == [(100, 1)] * 3 + [(100, 4)]


def test_no_more_gpus_are_advised_than_there_are(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_advice_module.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(engine_advice_module, "device_memory", lambda device: 100)
    fake = [EngineNeed("ddp", 1, 200, 90), EngineNeed("ddp", 2, 200, 150), EngineNeed("fsdp2", 2, 90, 80)]
    monkeypatch.setattr(
        engine_advice_module, "engine_needs", lambda model, training, n, *rest: [f for f in fake if f.n_gpus == n]
    )
    config = tiny().config
    one = engine_advice(config, settings(tmp_path), None, None, [1, 2], available=1)
    assert (
        "  2 GPUs fsdp2" in one and "is enough, with long_rows, which is switched on automatically: rope-patch" in one
    )
    fake[0] = EngineNeed("ddp", 1, 200, 190)
    one = engine_advice(config, settings(tmp_path), None, None, [1, 2], available=1)
    assert "None fits here, on 1 GPUs with 0.0 GiB for a step: train adapters" in one
    assert "--accelerate-config fsdp2 --num-processes 2" in engine_advice(
        config, settings(tmp_path), None, None, [1, 2]
    )


@pytest.fixture
def dry_run(tmp_path, monkeypatch, capsys):
    """What `rope-patch train --dry-run` prints for a recipe, given a model and more fields."""

    def run(model, *flags, **fields):
        monkeypatch.chdir(tmp_path)
        model.save_pretrained("model")
        tokenizer().save_pretrained("model")
        recipe = {"model_name_or_path": "model", "output_dir": "out", "max_length": 64, "report_to": "none", **fields}
        (tmp_path / "tune.yaml").write_text(yaml.safe_dump({**recipe, "datasets": [{"path": "json"}]}))
        assert cli.main(["train", "tune.yaml", "--dry-run", *flags]) == 0
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().out

    return run


def test_a_dry_run_prints_the_plan_and_trains_nothing(dry_run):
    printed = dry_run(tiny(), view="skip")
    assert "A step of 512 tokens" in printed and "8 GPUs fsdp2-cp" in printed and "refused" not in printed


@pytest.mark.parametrize(
    ("family", "fields", "ring", "ulysses"),
    [
        ("mistral-sliding", {}, "layers with sliding windows would attend", None),
        ("llama", {"packing": True}, "packed rows hold several documents", None),
        ("llama", {"packing": True, "packing_strategy": "wrapped"}, None, None),
        ("llama", {"padding_free": True}, "padding_free rows hold several documents", None),
        (
            "llama",
            {"attn_implementation": "flash_attention_2"},
            "attention is flash_attention_2, where a ring is",
            None,
        ),
        ("llama", {"shifted_attention": 0.25}, "shifted_attention groups tokens", "shifted_attention groups tokens"),
        ("llama", {"view": "pose", "view_args": {"target": 64, "window": 16}}, None, "view 'pose' with window=16 cuts"),
    ],
)
def test_a_dry_run_tells_where_gpus_cannot_share_the_rows_of_a_recipe(family, fields, ring, ulysses, dry_run):
    lines = dry_run(tiny(family), **fields).splitlines()
    rings = [line for line in lines if "fsdp2-cp" in line and "GPUs fsdp2-cp" in line]
    assert len(rings) == 3 and all((f"refused: {ring}" in line) if ring else "refused" not in line for line in rings)
    assert [f"zero3-sp is refused: {ulysses}" in line for line in lines if line.startswith("zero3-sp is")] == (
        [True] if ulysses else []
    )


def test_a_ring_is_refused_for_those_numbers_of_gpus_that_it_does_not_go_with(dry_run):
    fields = {"objective": "relation-distill", "rescale": "pi", "rescale_args": {"factor": 4.0}}
    printed = dry_run(tiny(), **fields, objective_args={"attention": 1.0})  # 4 heads of queries, 2 of keys
    assert printed.count("refused: attention=... of objective_args needs 4 and 2 heads") == 2
    assert "zero3-sp is refused" not in printed
    assert "refused" in dry_run(tiny("mistral-sliding"), "--accelerate-config", "fsdp2-cp", "--num-processes", "2")


def test_an_engine_that_is_refused_is_not_advised():
    needs = [EngineNeed("fsdp2", 2, 100, 90), EngineNeed("fsdp2-cp", 2, 50, 40, "rows are packed")]
    assert choose_engine(needs, 60) is None and choose_engine(needs, 100).config == "fsdp2"


@pytest.mark.parametrize("given", ["field", "model_init_kwargs"])
def test_a_dry_run_counts_no_masks_under_flash_attention(given, dry_run):
    """Which need not be installed where the plan is made."""
    fields = {"max_length": 8192, "gradient_checkpointing": True, "per_device_train_batch_size": 2}
    way = {"attn_implementation": "flash_attention_2"}
    flash = way if given == "field" else {"model_init_kwargs": way}
    masks, none = (float(dry_run(tiny(), **fields, **more).splitlines()[1].split()[3]) for more in ({}, flash))
    assert masks - none == pytest.approx(3 * 2 * 8192**2 / 2**30, abs=0.1)


def test_rows_of_unknown_length_have_no_plan(tmp_path):
    with pytest.raises(ValueError, match="give max_length"):
        engine_advice(tiny().config, settings(tmp_path, max_length=None, padding_free=True), None, None, [1])
