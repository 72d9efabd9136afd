"""Arms of the restoration train what they say, and what is drawn and compiled for it."""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import compiled
import pytest
import restoration
import torch
from datasets import Dataset
from result_lines import read_lines
from support.characters import CHARACTERS, character_tokenizer
from support.tiny import tiny
from transformers import LlamaForCausalLM

from rope_patch import describe, patch_model

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def test_the_figure_of_the_comparison_is_drawn(tmp_path):
    files = restoration.plot(read_lines(RESULTS / "restoration-h200.jsonl"), tmp_path / "figure.png")
    assert all(file.stat().st_size > 10_000 for file in files)


@pytest.mark.slow
def test_compiling_norms_and_mlps_changes_rounding_alone():
    model, ids = tiny("qwen3").train(), torch.randint(3, 90, (2, 24))

    def gradients(ids):
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = [gradients(x) for x in (ids, ids[:, :17])]
    with compiled.compiled_tokenwise(model):
        actual = [gradients(x) for x in (ids, ids[:, :17])]
    for mine, theirs in zip(actual, expected, strict=True):
        for x, y in zip(mine, theirs, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)
    assert "forward" not in vars(model.model.layers[0].mlp)


@pytest.mark.parametrize("name", ["pi4 qkv", "pi4 all (ours)", "pi4 lora 1024/2048"])
def test_an_arm_of_the_restoration_trains_what_it_says_in_both_stages(name, tmp_path, monkeypatch):
    tiny(vocab_size=CHARACTERS).save_pretrained(tmp_path / "model")
    rows = Dataset.from_list([{"input_ids": [40 + (i * j) % 80 for j in range(60)]} for i in range(1, 9)])
    measured = []

    def measure(model, *_):
        assert isinstance(model, LlamaForCausalLM) and describe(model).rescaling == "pi (factor 4.0)"
        with torch.no_grad():
            measured.append(model.eval()(torch.arange(40, 90)[None]).logits)
        return {"loss_in_window": 0.0}

    monkeypatch.setattr(restoration, "measure", measure)
    trained = []
    train = restoration.train

    def watched(*given, **more):
        trainer = train(*given, **more)
        trained.append({n for n, p in trainer.model.named_parameters() if p.requires_grad})
        return trainer

    monkeypatch.setattr(restoration, "train", watched)
    override = {"max_length": 60, "max_steps": 2, "learning_rate": 1e-3, "warmup_steps": 0, "bf16": False}
    args = argparse.Namespace(model=tmp_path / "model", override=override, compile=False, last_stage=False)
    data = {"rows": lambda length: rows, "val": None}
    arm = restoration.arms()[name]
    lines = list(restoration.run(arm, args, character_tokenizer(), data, 0, set()))
    assert [f["after"] for f in lines] == ["distil", "extend"]
    with torch.no_grad():
        before = patch_model(tiny(vocab_size=CHARACTERS), "pi", factor=4.0)(torch.arange(40, 90)[None]).logits
    assert not torch.allclose(measured[0], before) and not torch.allclose(measured[1], measured[0])
    assert trained[0] == trained[1]
    if "lora" in name:
        assert all("lora_" in n for n in trained[0])
    elif "qkv" in name:
        assert {n.split(".")[-2] for n in trained[0]} == {"q_proj", "k_proj", "v_proj"}
    else:
        assert any("embed_tokens" in n for n in trained[0])


def test_stages_are_lines_that_are_made_once(tmp_path, monkeypatch, capsys):
    tiny(vocab_size=CHARACTERS).save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("it was a dark and stormy night; " * 100)
    out = tmp_path / "out.jsonl"
    short = SimpleNamespace(accuracy={"piqa": 0.5}, mean=0.5)
    monkeypatch.setattr(restoration, "short_text", lambda *_, **__: short)
    places = (
        f"{tmp_path} --train {text} --val {text} --short-data {tmp_path} --val-length 2100 --val-rows 1 --out {out}"
    )
    override = json.dumps({"max_length": 60, "max_steps": 1, "warmup_steps": 0})
    options = [*places.split(), "--override", override, "--arms", "native", "pi4 ard+cpt", "pi4 ard lr 0.003"]

    def study(*more):
        monkeypatch.setattr("sys.argv", ["restoration", *options, *more])
        restoration.main()
        return [(line["arm"], line["after"]) for line in read_lines(out)]

    both = [("pi4 ard+cpt", "distil"), ("pi4 ard+cpt", "extend")]
    made = [("native", None), *both, ("pi4 ard lr 0.003", "distil")]
    assert study() == made == study()
    assert all({"seed", "seconds", "versions"} <= line.keys() for line in read_lines(out))
    # a run that was cut off behind its first stage trains it again, and does not add it again
    out.write_text("".join(f"{json.dumps(line)}\n" for line in read_lines(out) if line["after"] != "extend"))
    assert study() == [*(m for m in made if m != both[1]), both[1]]
    monkeypatch.setattr("sys.argv", ["restoration", "--table", str(out), "--arms", "pi4 ard+cpt"])
    monkeypatch.setattr(restoration, "mean_of", lambda *_: 3.0)  # of spans that these short rows do not have
    capsys.readouterr()
    restoration.main()
    assert [row.split(" | ")[0] for row in capsys.readouterr().out.splitlines()[2:]] == [
        "| native",
        *["| pi4 ard+cpt"] * 2,
    ]
