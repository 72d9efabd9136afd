"""What the benchmarks of distillation rest on, and that documented figures are those of the files."""

import argparse
import json
import re
import sys
from pathlib import Path
from statistics import mean, median

import pytest
import torch
from datasets import Dataset
from support.characters import CHARACTERS, character_tokenizer
from support.tiny import tiny
from transformers import LlamaForCausalLM

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import compiled
import distillation_step
import extension
import posaug_from_scratch
import restoration
import rpsd_small_scale
from result_lines import read_lines

from rope_patch import describe, patch_model
from rope_patch.draws import DrawKey
from rope_patch.eval import recovery_ratio

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def test_documented_losses_and_recoveries_are_those_of_the_file():
    """Means of every arm with a row in the text, and no row without an arm."""
    printed = restoration.table(read_lines(RESULTS / "restoration-h200.jsonl"))
    documented = section("## LinearARD on SmolLM2-135M")

    def means(table):
        """Losses in three spans and recovery, without the spread of seeds."""
        rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if "|" in line)
        found = ([cell[:5] for cell in cells if re.match(r"\d\.\d{3}", cell)] + cells[-1:] for cells in rows)
        return {(*cells[:3], cells[-1].split(" ")[0]) for cells in found if len(cells) > 3}

    assert len(means(documented)) > 20
    assert means(documented) <= means(printed)


def section(title):
    """The text under a heading, to the next one of its level or above, without bold marks."""
    behind = (RESULTS / "README.md").read_text().split(title)[1]
    return re.split(rf"\n#{{1,{title.count('#')}}} ", behind)[0].replace("**", "")


def test_documented_times_are_those_of_the_files():
    vocabulary = section("### The vocabulary loss")
    for row in json.loads((RESULTS / "linear-ce-kl-h200.json").read_text())["rows"]:
        ours, trl = row["ours"], row["trl"]
        assert f"| {ours['ms']:.1f}, {ours['peak_gib']:.1f}" in vocabulary
        assert f"| {trl['ms'] / ours['ms']:.2f} |" in vocabulary
    steps = section("### A step\n")
    for row in json.loads((RESULTS / "self-distill-step-h200.json").read_text())["runs"]:
        if row["length"] < 262144:
            assert f"| {row['tokens_per_second']:.0f} |" in steps
    kernels = section("## Relation-KL kernels")
    for row in json.loads((RESULTS / "relation-kl-h200.json").read_text())["rows"]:
        if row["n"] >= 8192:
            ours = row["relation_kl"]
            assert f"| {ours['forward_ms']:.2f} / {ours['both_ms']:.2f} |" in kernels
            assert f"| {ours['both_ms'] / row['cudnn']['both_ms']:.2f} |" in kernels
    for row in json.loads((RESULTS / "relation-kl-graphs-h200.json").read_text())["rows"]:
        if row["n"] == 8192 and "H32" not in row["shape"]:
            for kernel in ("relation_kl", "cudnn"):
                assert f"{row[kernel]['both_graph_ms']:.2f}" in kernels
    beside = section("### Beside FlashAttention-4")
    for row in json.loads((RESULTS / "relation-kl-flash4-h200.json").read_text())["rows"]:
        if row["n"] == 16384 and "H3" not in row["shape"]:
            assert f"| {row['relation_kl']['both_ms'] / row['flash4']['both_ms']:.2f} |" in beside


def by_arm(runs):
    """Runs of each arm."""
    return [[r for r in runs if r["arm"] == arm] for arm in dict.fromkeys(r["arm"] for r in runs)]


def test_documented_figures_of_small_models_are_those_of_their_files():
    """PosAug from scratch, by arm; exams of RPSD's comparison, by arm and length."""
    runs = read_lines(RESULTS / "posaug-from-scratch-h200.jsonl")
    documented = section("## PosAug from scratch")
    penalty = posaug_from_scratch.penalties(runs)
    for same in by_arm(runs):
        cells = [f"{mean(r['in_window'] for r in same):.3f}"]
        cells.append(f"{mean(penalty[r['arm'], r['seed']] for r in same):.2f}" if same[0]["arm"] != "baseline" else "-")
        cells += [f"{mean(r[metric] for r in same):.3f}" for metric in ("cliff", "gain")]
        assert f"| {len(same)} | " + " | ".join(cells) + " |" in documented
    exams = section("### What the paper claims, at small scale")
    runs = read_lines(RESULTS / "rpsd-small-scale-h200.jsonl")
    for same in by_arm(runs):
        graded = [mean(r[kind][n] for r in same) for kind in ("multikey", "ordinal") for n in same[0][kind]]
        cells = [f"{a:.2f}".removeprefix("0") if a else "0" for a in graded]
        cells += [f"{mean(r['loss_by_position'][k]['loss'] for r in same):.3f}" for k in (0, -1)]
        assert f"| {len(same)} | " + " | ".join(cells) + " |" in exams
    for line in rpsd_small_scale.table(runs).split("| the paper's ordering")[1].splitlines()[2:]:
        assert line in exams


def test_documented_figures_of_the_extension_are_those_of_the_file():
    """Means over seeds, of every method under every schedule: losses by span, found numbers, short text; costs."""
    documented = section("## SmolLM2-135M from 8192 to 32768 and 65536 tokens")
    runs = read_lines(RESULTS / "extension-h200.jsonl")
    native = next(r for r in runs if r["method"] == "native")
    main = extension.methods(8192, 65536, 8)

    def means(same, spans, needles):
        losses = [f"{mean(r['loss_by_position'][k]['loss'] for r in same):.3f}" for k in range(spans)]
        found = [f"{mean(r['teacher_forced'][kind][n] for r in same):.2f}" for kind, n in needles]
        short = f"{mean(recovery_ratio(r['short'], native['short']) for r in same):.1f}"
        return " | ".join([*losses, *(share.removeprefix("0") for share in found), short])

    groups = {}
    for run in runs:
        groups.setdefault((run["target"], run["schedule"], run["method"]), []).append(run)
    for (target, schedule, method), same in groups.items():
        assert len(same) == (1 if method in ("native", "none") else 3)
        if schedule == "yarn" and method in main:
            near, far = (("multikey", str(n)) for n in (target // 2, target))
            yarn = means(same, 3 + (target > 32768), [("passkey", str(target)), near, far])
            pi = means(groups[target, "pi", method], 3 + (target > 32768), [])
            assert f"| {yarn} | {pi} |" in documented, method
        if (target, schedule) == (32768, "yarn") and (method not in main or method in ("skip distil", "posaug")):
            numbers = [("passkey", "32768"), ("multikey", "16384"), ("multikey", "32768")]
            assert f"| {means(same, 4, numbers)} |" in documented, method
    costs = {}
    for run in read_lines(RESULTS / "extension-cost-h200.jsonl"):
        costs.setdefault((run["method"], run["rows_at_once"]), []).append(run)
    full = costs["full length", 1]
    for (_, rows), same in costs.items():
        speed, memory = (median(r[name] for r in same) for name in ("tokens_per_second", "peak_gib"))
        over = speed / median(r["tokens_per_second"] for r in full), memory / median(r["peak_gib"] for r in full)
        assert f"| {rows} | {speed:.0f} | {over[0]:.2f} | {memory:.1f} | {over[1]:.2f} |" in documented


def test_the_figure_of_the_comparison_is_drawn(tmp_path):
    files = restoration.plot(read_lines(RESULTS / "restoration-h200.jsonl"), tmp_path / "figure.png")
    assert all(file.stat().st_size > 10_000 for file in files)


def test_draws_of_a_round_come_again_and_do_the_mean_work():
    seed = distillation_step.balanced_seed(4)
    view = distillation_step.RepeatedSkip(period=4)
    length = torch.tensor([[1 << 16]])
    draws = [
        view.draw(length, DrawKey(seed, torch.tensor(step), torch.zeros(1, 1, dtype=torch.int64)))["split"].item()
        for step in range(8)
    ]
    assert draws[:4] == draws[4:] and len(set(draws)) == 4
    assert sum(draws[:4]) / 4 / (1 << 16) == pytest.approx(0.5, abs=0.01)


def test_two_rounds_are_timed_apart_and_one_step_alone():
    watch = distillation_step.Watch(3)
    watch.seconds = [9.0, 6.0]
    assert watch.rates(100) == {"tokens_per_second": 50.0, "seconds_more_at_first": 1.0}
    watch.seconds = [9.0, 0.0]
    assert watch.rates(100) == {"seconds_of_one_step": 9.0}


@pytest.mark.slow
def test_compiling_norms_and_mlps_changes_rounding_alone():
    model, ids = tiny("qwen3").train(), torch.randint(3, 90, (2, 24))

    def gradients(ids):
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    wanted = [gradients(x) for x in (ids, ids[:, :17])]
    with compiled.compiled_tokenwise(model):
        found = [gradients(x) for x in (ids, ids[:, :17])]
    for mine, theirs in zip(found, wanted, strict=True):
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

    def watched(model, *rest):
        model, log = train(model, *rest)
        trained.append({n for n, p in model.named_parameters() if p.requires_grad})
        return model, log

    monkeypatch.setattr(restoration, "train", watched)
    override = {"max_length": 60, "max_steps": 2, "learning_rate": 1e-3, "warmup_steps": 0, "bf16": False}
    args = argparse.Namespace(model=tmp_path / "model", override=override, compile=False, last_stage=False)
    data = {"rows": lambda length: rows, "val": None}
    arm = restoration.arms()[name]
    found = list(restoration.run(arm, args, character_tokenizer(), data, 0, set()))
    assert [f["after"] for f in found] == ["distil", "extend"]
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
