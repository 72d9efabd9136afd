"""Which engine a plan advises: bytes against counts by hand, and the choice."""

import pytest
import torch
import yaml
from support.tiny import tiny
from support.training import tokenizer

from trl_ext import RopeSFTConfig, cli
from trl_ext.engine_advice import EngineNeed, choose_engine, engine_advice, engine_needs
from trl_ext.memory_plan import plan_memory


def settings(folder, **options):
    return RopeSFTConfig(
        output_dir=str(folder), use_cpu=True, bf16=False, report_to=[], **{"max_length": 64, **options}
    )


def bytes_of(needs):
    return {need.config: need.bytes for need in needs}


def test_each_engine_counts_its_parts(tmp_path):
    """From ddp to zero2 gradients and states are split, to fsdp2 weights besides, and two layers and what is outside
    of them are whole at a time."""
    model, args = tiny(), settings(tmp_path)
    needs = bytes_of(engine_needs(model, args, 4, torch.device("cpu")))
    total = 4 * sum(p.numel() for p in model.parameters())
    layer = 4 * sum(p.numel() for p in model.model.layers[0].parameters())
    buffers = sum(4 * b.numel() for b in model.buffers())
    assert needs["ddp"] - needs["zero2"] == 3 * total - (total // 4 + 2 * total // 4) - 2 * 2 * 500_000_000
    whole = total - 3 * layer + 2 * layer
    split = total + buffers - (total + buffers) // 4
    assert needs["ddp"] - needs["fsdp2"] == 3 * total - (total // 4 + 2 * total // 4) + split - whole


def test_a_shared_row_counts_its_part_of_tokens(tmp_path):
    model, args = tiny(), settings(tmp_path)
    whole, part = (plan_memory(model, args, n, torch.device("cpu"), "on") for n in (64, 16))
    needs = bytes_of(engine_needs(model, args, 4, torch.device("cpu")))
    assert needs["fsdp2"] - needs["fsdp2-cp"] == whole.needed - part.needed
    assert needs["ddp"] == whole.needed
    assert bytes_of(engine_needs(model, args, 1, torch.device("cpu"))) == {"ddp": whole.needed}


def test_what_fits_with_the_fewest_gpus_is_advised():
    needs = [EngineNeed("ddp", 1, 100, 90), EngineNeed("ddp", 2, 100, 90), EngineNeed("fsdp2", 2, 60, 50)]
    assert choose_engine(needs, 110).n_gpus == 1
    assert choose_engine(needs, 70).config == "fsdp2"
    assert choose_engine(needs, 55).config == "fsdp2" and needs[2].fits(55) == "fits with long_rows"
    assert choose_engine(needs, 40) is None


def test_a_dry_run_prints_the_plan_and_trains_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tiny().save_pretrained("model")
    tokenizer().save_pretrained("model")
    recipe = {"model_name_or_path": "model", "output_dir": "out", "max_length": 64, "view": "skip", "report_to": "none"}
    (tmp_path / "tune.yaml").write_text(yaml.safe_dump({**recipe, "datasets": [{"path": "json"}]}))
    assert cli.main(["train", "tune.yaml", "--dry_run"]) == 0
    printed = capsys.readouterr().out
    assert "A step of 512 tokens" in printed and "8 GPUs fsdp2-cp" in printed
    assert not (tmp_path / "out").exists()


def test_rows_of_unknown_length_have_no_plan(tmp_path):
    with pytest.raises(ValueError, match="give max_length"):
        engine_advice(tiny().config, settings(tmp_path, max_length=None, padding_free=True), None, None, [1])
