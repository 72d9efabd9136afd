"""Arms of the restoration train what they say, and what is drawn and compiled for it."""

import argparse
import json
import random
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from support.characters import CHARACTERS, beginning_tokenizer, character_tokenizer
from support.tiny import tiny
from torch.nn import functional as F  # noqa: N812
from transformers import LlamaForCausalLM

import compiled
import keeping_questions
import paired_results
import rates
import restoration
import restoration_arms
import restoration_results
import ruler_prompts
from result_lines import read_lines
from rope_patch import patch_model
from rope_patch.eval import ruler
from rope_patch.eval.results.paired import paired_interval
from trl_ext import RopeSFTConfig

RESULTS = Path(__file__).parents[2] / "research" / "results"


def test_the_figure_of_the_comparison_is_drawn(tmp_path):
    files = restoration_results.plot(read_lines(RESULTS / "restoration-h200.jsonl"), tmp_path / "figure.png")
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


@pytest.mark.parametrize("name", restoration_arms.arms())
def test_stages_of_arms_are_configurations_that_the_trainer_takes(name, tmp_path):
    arm = restoration_arms.arms()[name]
    for stage in arm.stages:
        if stage is not None:
            gpu = {"bf16": False, "use_cpu": True}
            RopeSFTConfig(output_dir=str(tmp_path), **{**arm.fields(stage), "save_strategy": "no", **gpu})


def test_regimes_of_the_paper_train_the_same_weights_in_both_stages_and_have_all_targets():
    arms = restoration_arms.paper_arms(30)
    assert len(arms) == 12 and {arm.rescale[0] for arm in arms.values()} == {"pi"}
    for name, arm in arms.items():
        tokens = sum(
            f["max_steps"] * f["max_length"] * f["per_device_train_batch_size"] * f["gradient_accumulation_steps"]
            for f in map(arm.fields, arm.stages)
        )
        assert 4.4e6 < tokens < 4.5e6, name
        assert {arm.fields(stage)["trainable"] for stage in arm.stages} == {"all" if arm.lora else "qkv"}
        assert restoration_arms.control_of(name) in arms
        adapters = arm.adapters()
        assert adapters is None if "qkv" in name else (adapters.r, adapters.lora_alpha) == (1024, 2048)
    assert arms["pi4 qkv hidden all"].distil["objective_args"] == {"layers": tuple(range(1, 31)), "weight": 1.0}
    assert restoration_arms.control_of("pi4 ard+cpt") is None is restoration_arms.control_of("pi4 qkv at our rates")


def test_rows_of_stage_2_are_four_windows_of_another_model_too_with_as_many_tokens():
    for window in (8192, 32768):
        arms = restoration_arms.paper_arms(18, window)
        for name in ("pi4 qkv", "pi4 qkv cpt"):
            fields = arms[name].fields("extend")
            assert fields["max_length"] == 4 * window
            assert fields["max_length"] * fields["gradient_accumulation_steps"] == 4 * 32768
        assert arms["pi4 qkv"].fields("distil") == restoration_arms.paper_arms(18)["pi4 qkv"].fields("distil")


@pytest.mark.parametrize("name", ["pi4 qkv", "pi4 all (ours)", "pi4 lora 1024/2048", "pi4 lora 1024/2048 hidden all"])
def test_an_arm_of_the_restoration_trains_what_it_says_in_both_stages(name, tmp_path, monkeypatch):
    tiny(vocab_size=CHARACTERS).save_pretrained(tmp_path / "model")
    rows = Dataset.from_list([{"input_ids": [40 + (i * j) % 80 for j in range(60)]} for i in range(1, 9)])
    measured = []

    def measure(model, *_):
        assert isinstance(model, LlamaForCausalLM) and not any("lora" in n for n, _ in model.named_parameters())
        with torch.no_grad():
            measured.append(model.eval()(torch.arange(40, 90)[None]).logits)
        return {"loss_in_window": 0.0}

    monkeypatch.setattr(restoration, "measure", measure)
    trained = []
    train = restoration.train

    def watched(*given, **more):
        trainer = train(*given, **more)
        trained.append({n for n, p in trainer.model.named_parameters() if p.requires_grad})
        with torch.no_grad():
            ended.append(trainer.model.eval()(torch.arange(40, 90)[None]).logits)
        return trainer

    ended = []
    monkeypatch.setattr(restoration, "train", watched)
    override = {"max_length": 60, "max_steps": 2, "warmup_steps": 0, "bf16": False, "logging_steps": 1}
    given = {"override": override, "compile": False, "last_stage": False, "checkpoints": None, "window": 512}
    args = argparse.Namespace(model=tmp_path / "model", out=tmp_path / "out.jsonl", **given)
    data = restoration.Data(character_tokenizer(), lambda _: rows, None, None, None, {}, None)
    arm = restoration_arms.arms(2)[name]
    lines = list(restoration.run(arm, {"arm": name, "rate": 1e-3, "seed": 0}, args, data))
    assert [f["after"] for f in lines] == ["distil", "extend"]
    # what is measured is what training ended with, adapters in the weights, and stage 2 goes on from there
    for end, found in zip(ended, measured, strict=True):
        torch.testing.assert_close(found, end, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        before = patch_model(tiny(vocab_size=CHARACTERS), "pi", factor=4.0)(torch.arange(40, 90)[None]).logits
    assert not torch.allclose(measured[0], before) and not torch.allclose(measured[1], measured[0])
    assert (measured[1] - measured[0]).norm() < (measured[1] - before).norm()
    assert trained[0] == trained[1]
    if "lora" in name:
        assert all("lora_" in n for n in trained[0])
    elif "qkv" in name:
        assert {n.split(".")[-2] for n in trained[0]} == {"q_proj", "k_proj", "v_proj"}
    else:
        assert any("embed_tokens" in n for n in trained[0])
    assert all(line["log"][-1]["learning_rate"] <= 1e-3 for line in lines)
    logged = lines[0]["log"][-1].keys()
    assert ("relation/logit_kl" in logged) == (name in restoration_arms.REGIMES)


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Runs the study on a tiny model of characters, and gives the lines of a file."""
    tiny(vocab_size=CHARACTERS, max_position_embeddings=512).save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    draw = random.Random(0)
    for name in ("train", "val"):
        books = ["".join(draw.choices("abcdefgh ,.", k=2500)) for _ in range(3)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": book}) + "\n" for book in books))
    bench = tmp_path / "bench"
    bench.mkdir()
    for name, rows in {
        "piqa_valid": [{"goal": f"g{n}", "choices": ["yes", "no"], "label": n % 2} for n in range(5)],
        "lambada_openai_test": [{"text": f"it was a dark night number {n}"} for n in range(3)],
    }.items():
        (bench / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(keeping_questions, "TAIL", 120)  # a token a character
    monkeypatch.setattr(keeping_questions, "KEYS", 3)
    monkeypatch.setattr(restoration_results, "KEYS", 3)
    small = {"max_length": 60, "max_steps": 1, "warmup_steps": 0, "gradient_accumulation_steps": 1}
    override = json.dumps({**small, "logging_steps": 1})
    fixed = f"{tmp_path} --train {tmp_path}/train.jsonl --val {tmp_path}/val.jsonl --val-length 2100 --val-rows 2"
    fixed = [*fixed.split(), "--window", "512", "--choosing-rows", "1", "--override", override]

    def study(out, *more):
        monkeypatch.setattr("sys.argv", ["restoration", *fixed, "--out", str(tmp_path / out), *more])
        restoration.main()
        return read_lines(tmp_path / out)

    study.bench = ["--short-data", str(bench)]
    study.folder = tmp_path
    return study


def test_stages_are_lines_that_are_made_once(study, monkeypatch, capsys):
    def made(*more):
        lines = study("out.jsonl", "--arms", "native", "pi4 ard+cpt", "pi4 ard lr 0.003", *more)
        return [(line["arm"], line["after"]) for line in lines]

    both = [("pi4 ard+cpt", "distil"), ("pi4 ard+cpt", "extend")]
    all_of_them = [("native", None), *both, ("pi4 ard lr 0.003", "distil")]
    assert made() == all_of_them == made()
    out = study.folder / "out.jsonl"
    lines = read_lines(out)
    assert all({"seed", "rate", "choice", "seconds", "versions"} <= line.keys() for line in lines)
    assert not any(key in line for line in lines for key in ("short", "asked", "ruler"))
    # a run that was cut off behind its first stage trains it again, and does not add it again
    out.write_text("".join(f"{json.dumps(line)}\n" for line in lines if line["after"] != "extend"))
    assert made() == [*(m for m in all_of_them if m != both[1]), both[1]]
    monkeypatch.setattr("sys.argv", ["restoration", "--table", str(out), "--arms", "pi4 ard+cpt"])
    capsys.readouterr()
    restoration.main()
    printed = [line.split(" | ")[0] for line in capsys.readouterr().out.splitlines()[2:]]
    assert printed == ["| native", *["| pi4 ard+cpt"] * 2]


def test_what_a_file_chooses_is_the_kl_from_the_native_model_on_rows_of_their_own(study):
    lines = study("out.jsonl", "--arms", "native", "pi4")
    assert lines[0]["choice"] == pytest.approx(0, abs=1e-6)
    native = restoration.load(study.folder).eval()
    tokenizer = character_tokenizer()
    last = json.loads((study.folder / "val.jsonl").read_text().splitlines()[2])["text"]  # two are reported
    ids = torch.tensor([tokenizer(last)["input_ids"][:512]])
    with torch.no_grad():
        log_p = native(ids).logits.log_softmax(-1)
        log_q = patch_model(native, "pi", factor=4.0)(ids).logits.log_softmax(-1)
    expected = F.kl_div(log_q[0], log_p[0], log_target=True, reduction="batchmean")
    assert lines[1]["choice"] == pytest.approx(float(expected), rel=1e-4) and expected > 1e-4


def test_what_rows_begin_with_stands_at_the_beginning_of_prompts_alone(study, monkeypatch):
    runs, haystacks = [], []
    beginning_tokenizer().save_pretrained(study.folder)
    monkeypatch.setattr(restoration, "carry_out", lambda given, args, shown: runs.extend(given))
    monkeypatch.setattr(restoration, "require_lm_eval", lambda: None)
    monkeypatch.setattr(restoration, "kept_prompts", lambda tokenizer, texts, *_: haystacks.extend(texts))
    study("out.jsonl", "--arms", "native", "--prompts", "16", "--lengths", "1000", "--ruler", "2")
    (*_, data) = runs[0].results.args
    prompts = [question.shared for questions in data.asked.values() for question in questions]
    rows = [*data.val.tolist(), *data.choosing.tolist()]
    assert len(rows) == 3 and len(prompts) == 22 and len(haystacks) == 2
    assert all(ids[0] == 1 and 1 not in ids[1:] for ids in (*rows, *prompts))
    # RULER's prompts get theirs where they are tokenized
    assert all("<bos>" not in text and len(text) == 2099 for text in haystacks)


@pytest.mark.slow
def test_rates_are_swept_and_seeds_are_trained_at_the_best(study, monkeypatch, capsys):
    arms = ["--arms", "native", "pi4 qkv", "--last-stage"]
    swept = study("sweep.jsonl", *arms, "--rates", "1e-5", "1e-1")
    assert [(x["arm"], x["rate"]) for x in swept] == [("native", None), ("pi4 qkv", 1e-5), ("pi4 qkv", 0.1)]
    at = {x["rate"]: x["choice"] for x in swept[1:]}
    best = min(at, key=at.get)
    capsys.readouterr()
    answered = ["--prompts", "4", "--lengths", "1000", *study.bench, "--checkpoints", str(study.folder / "kept")]
    command = [*arms, "--best", str(study.folder / "sweep.jsonl"), "--seeds", "0", "1", *answered]
    lines = study("seeds.jsonl", *command)
    assert "is at the end of those that were tried" in capsys.readouterr().out
    runs = [(x["arm"], x["rate"], x["seed"], x["after"]) for x in lines]
    assert runs == [("native", None, 0, None), *(("pi4 qkv", best, seed, "extend") for seed in (0, 1))]
    for line in lines:
        assert {name: len(s) for name, s in line["short_scores"].items()} == {"lambada_openai": 3, "piqa": 5}
        cells = [(c["test"], c["length"], len(c["scores"])) for c in line["asked"]]
        assert cells == [("passkey", 1000, 4), ("keys", 1000, 6)]
    assert not list((study.folder / "kept").iterdir())  # runs that are through
    assert f"| pi4 qkv, {best:g} | 2 | " in restoration_results.tables(lines)

    # one that is cut off while it is measured goes on with what it had trained and measured
    out, parts = study.folder / "seeds.jsonl", study.folder / "seeds.parts.jsonl"
    out.write_text("".join(out.read_text().splitlines(keepends=True)[:-1]))
    mark = json.loads(parts.read_text().splitlines()[-1])
    assert (mark["arm"], mark["seed"], mark["after"]) == ("pi4 qkv", 1, "extend")
    answered_by = keeping_questions.answered

    def cut(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(keeping_questions, "answered", cut)
    parts.write_text("".join(parts.read_text().splitlines(keepends=True)[:-1]))  # without the last cell
    with pytest.raises(KeyboardInterrupt):
        study("seeds.jsonl", *command)
    assert [f.name for f in (study.folder / "kept").iterdir()] == [f"pi4 qkv-{best}-1"]
    monkeypatch.setattr(keeping_questions, "answered", answered_by)
    for known in ("train", "losses", "kl_from"):
        monkeypatch.setattr(restoration, known, cut)
    again = study("seeds.jsonl", *command)[-1]
    same = ("choice", "loss_by_position", "short_scores", "log")
    assert {k: again[k] for k in same} == {k: lines[-1][k] for k in same}
    assert again["before"]["distil"]["log"] == lines[-1]["before"]["distil"]["log"] != []
    assert [c["scores"] for c in again["asked"]] == [c["scores"] for c in lines[-1]["asked"]]


def made_up(arm, seed, after="extend", rate=None, **figures):
    bins = [{"first": 0, "end": 8192, "loss": 3.0}, {"first": 8192, "end": 16384, "loss": 4.0}]
    return {"arm": arm, "rate": rate, "seed": seed, "after": after, "loss_by_position": bins, "choice": 0.5, **figures}


def test_tables_of_a_file_are_means_and_differences_by_hand():
    def asked(piqa, lambada, keys):
        accuracies = {"piqa": sum(piqa) / 2, "lambada_openai": sum(lambada) / 4}
        return {
            "short": accuracies,
            "short_mean": sum(accuracies.values()) / 2,
            "short_scores": {"piqa": piqa, "lambada_openai": lambada},
            "asked": [{"test": "keys", "length": 8192, "scores": keys}],
            "ruler": {"lengths": [8192], "scores": {"ruler_vt": [[1.0, 0.5]], "niah_single_1": [keys[:2]]}},
        }

    nothing, all_of_it = [0] * 8, [1] * 8
    lines = [
        made_up("native", 0, None, **asked([1.0, 1.0], [1.0, 1.0, 0.0, 0.0], all_of_it)),
        made_up("pi4 qkv", 0, **asked([1.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0] * 7 + [1])),
        made_up("pi4 qkv", 1, **asked([1.0, 1.0], [1.0, 0.0, 0.0, 0.0], [0] * 7 + [1])),
        made_up("pi4 qkv clm", 0, **asked([0.0, 0.0], [1.0, 0.0, 0.0, 0.0], nothing)),
        made_up("pi4 qkv clm", 2, **asked([1.0, 1.0], [1.0, 1.0, 1.0, 1.0], nothing)),  # of a seed that others lack
    ]
    made = restoration_results.tables(lines).split("\n\n")
    means = made[0]
    from_native, from_control = (made[made.index(title) + 1] for title in made if title.startswith("Scores above"))
    counts, ruler_table, written = made[-3:]
    # 100 (0.375 + 0.625) / 2 of 0.75, and half of the distance
    assert "| pi4 qkv | extend | 2 | 3.000 ± 0.000 | 4.000 ± 0.000 | 0.500 ± 0.125 | 66.7 ± 16.7 |" in means
    cells = [cell.split(" ")[0] for cell in from_native.splitlines()[2].split(" | ")[2:]]
    # benchmarks alike: piqa 0.75 of 1, LAMBADA 0.25 of 0.5; keys 1 of 8; RULER as niah_single_1 has 0 of 1
    assert cells == ["-0.250", "-0.250", "-0.875", "-0.500"]
    # of seed 0 alone: piqa 0.5 above 0, LAMBADA the same; keys 1 of 8
    cells = [cell.split(" ")[0] for cell in from_control.splitlines()[-1].split(" | ")[2:]]
    assert cells == ["+0.250", "+0.500", "+0.125", "+0.000"]
    assert counts == "Prompts a cell and seed: short text 6, without LAMBADA 2, keys 8192 8, RULER 8192 4."
    assert "| pi4 qkv | 2 | 0.38 | 0.00 | 0.75 |" in ruler_table
    assert "| pi4 qkv | 2 | 0.12 | 1.00 / 0.00 / 0.00 / 0.00 / 0.00 / 0.00 / 0.00 / 0.00 |" in written


def test_intervals_are_those_of_the_bootstrap_over_prompts_of_means_over_seeds():
    first, second, native = ([float(n % k == 0) for n in range(60)] for k in (2, 3, 5))
    runs = [({"s": scores}, {"s": native}) for scores in (first, second)]
    per_prompt = [(a + b) / 2 - c for a, b, c in zip(first, second, native, strict=True)]
    low, high = paired_interval(per_prompt, bounds=(-1.0, 1.0))
    expected = f"{sum(per_prompt) / 60:+.3f} ({low:+.3f} to {high:+.3f})"
    assert paired_results.difference(runs, lambda run: run["s"]) == expected
    assert paired_results.difference(runs, lambda _: []) == "-"
    half = [runs[0], ({"s": []}, {"s": native})]  # not measured of one seed
    assert paired_results.difference(half, lambda run: run["s"]) == (
        f"{paired_results.difference(runs[:1], lambda run: run['s'])} of 1 seed"
    )


def test_rates_and_the_log_of_stage_1_have_tables_of_their_own():
    log = [{"step": 8 * k, "relation/q": 1 / k, "relation/logit_kl": 2 / k} for k in range(1, 6)]
    lines = [
        made_up("native", 0, None),
        made_up("pi4 qkv", 0, "distil", 1e-4, log=log, choice=9.0),
        made_up("pi4 qkv", 0, rate=1e-4, choice=0.3),
        made_up("pi4 qkv", 0, rate=1e-3, choice=0.2, log=[], before={"distil": {"log": log}}),
    ]
    printed = restoration_results.tables(lines)
    assert "| pi4 qkv | 0.0001: 0.3000 | **0.001: 0.2000** |" in printed
    for rate in ("0.0001", "0.001"):  # a line of its own has it, or that of the last stage
        assert f"| pi4 qkv, {rate} | logit_kl | 2.0000 | 1.0000 | 0.6667 | 0.5000 | 0.4000 |" in printed
    assert rates.best_rate(lines, {"arm": "pi4 qkv", "after": "extend"}) == 1e-3
    with pytest.raises(ValueError, match="run --rates first"):
        rates.best_rate(lines, {"arm": "pi4 qkv clm", "after": "extend"})


@pytest.mark.slow
def test_rulers_prompts_are_made_once_and_every_prompt_has_its_score(study, monkeypatch):
    rulers = "--ruler 2 --ruler-tasks niah_single_1 niah_multikey_2 --lengths 1500 1900".split()
    kept = ["--checkpoints", str(study.folder / "kept")]
    (line,) = study("one.jsonl", "--arms", "native", *rulers, *kept)
    assert line["ruler"]["lengths"] == [1500, 1900]
    assert {task: list(map(len, s)) for task, s in line["ruler"]["scores"].items()} == {
        "niah_single_1": [2, 2],
        "niah_multikey_2": [2, 2],
    }
    asked = {"tasks": ["niah_single_1", "niah_multikey_2"], "samples": 2, "progress": False}
    prompts = ruler_prompts.ruler_prompts(character_tokenizer(), [1500, 1900], **asked)
    expected = ruler(restoration.load(study.folder).eval(), character_tokenizer(), prompts, progress=False)
    assert line["ruler"]["scores"] == expected.prompt_scores
    monkeypatch.setattr(ruler_prompts, "ruler_prompts", None)  # those that are kept are taken
    again = study("two.jsonl", "--arms", "pi4", *rulers, *kept)[-1]["ruler"]["scores"]
    assert (
        restoration_results.ruler_scores(line, 1900, "niah_multikey_2") == line["ruler"]["scores"]["niah_multikey_2"][1]
    )
    assert again.keys() == line["ruler"]["scores"].keys()
    fewer = study("three.jsonl", "--arms", "native", *rulers[:-2], "1900", *kept)[-1]["ruler"]
    assert fewer["scores"] == {task: scores[1:] for task, scores in line["ruler"]["scores"].items()}
    with pytest.raises(TypeError, match="NoneType"):  # prompts that are not kept would have to be made
        study("four.jsonl", "--arms", "native", *rulers[:-2], "1700", *kept)
