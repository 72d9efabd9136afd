"""Which engine a plan advises: bytes against counts by hand, and the choice."""

import pytest
import torch
import yaml
from support.tiny import tiny
from support.training import tokenizer

from trl_ext import RopeSFTConfig, cli
from trl_ext.engine_advice import EngineNeed, TrainingBytes, choose_engine, engine_advice, engine_needs
from trl_ext.memory_plan import plan_memory


def settings(folder, **options):
    return RopeSFTConfig(
        output_dir=str(folder), use_cpu=True, bf16=False, report_to=[], **{"max_length": 64, **options}
    )


def test_bytes_are_those_of_the_parts(tmp_path):
    model = tiny()
    total = 4 * sum(p.numel() for p in model.parameters())
    layer = 4 * sum(p.numel() for p in model.model.layers[0].parameters())
    fixed = TrainingBytes.of(model, 2 * total, copies_teacher=True)
    outside = total - 3 * layer
    assert fixed.on_each("ddp", 4) == total + total + 2 * total + total
    assert fixed.on_each("zero2", 4) == total + 3 * total // 4 + total
    assert fixed.on_each("fsdp2", 4) == 4 * total // 4 + outside + 2 * layer + total


def test_a_shared_row_counts_its_part_of_tokens(tmp_path):
    model, args = tiny(), settings(tmp_path)
    whole, part = (plan_memory(model, args, n, torch.device("cpu"), "on") for n in (64, 16))
    fixed = TrainingBytes.of(model, whole.optimizer, copies_teacher=False)
    needs = {need.config: need for need in engine_needs(fixed, whole, part, 4)}
    assert needs["fsdp2"].bytes - needs["fsdp2-cp"].bytes == (whole.needed - whole.fixed) - (part.needed - part.fixed)
    assert needs["ddp"].bytes == whole.needed - whole.fixed + fixed.on_each("ddp", 4)


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
