"""PosAug from scratch: rows, arms that differ in their views alone, runs that go on, and what is measured of them."""

import argparse
import itertools
import json
import random

import numpy as np
import pytest
import torch
from support.characters import character_tokenizer
from torch.nn import functional as F  # noqa: N812
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import posaug_from_scratch as scratch
import posaug_training as training
import result_lines
import token_text
from exams import exam_over
from posaug_arms import Arm, arms

VOCABULARY = 50
SHAPE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SHAPE |= {"num_key_value_heads": 2, "head_dim": 8}


def test_rows_hold_each_token_once_an_epoch():
    stream = torch.arange(1000, dtype=torch.int16)
    rows = training.Rows(stream, 32, seed=0)
    epochs = [rows.of(k * rows.a_epoch, rows.a_epoch) for k in range(2)]
    for epoch in epochs:
        assert epoch.shape == (30, 33) and epoch[:, :-1].unique().numel() == 30 * 32
        assert torch.equal(epoch[:, 1:], epoch[:, :-1] + 1)
    assert not torch.equal(*epochs)
    across = training.Rows(stream, 32, seed=0).of(28, 4)
    assert torch.equal(across, torch.cat([epochs[0][28:], epochs[1][:2]]))
    assert not torch.equal(training.Rows(stream, 32, seed=1).of(0, 30), epochs[0])


def test_rows_read_ids_beyond_15_bits():
    ids = np.array([1, 40000, 65535, 2] * 3, dtype=token_text.DTYPES["u16"])
    rows = training.Rows(torch.from_numpy(ids.view("<i2").copy()), 4, seed=0)
    assert set(rows.of(0, 1).flatten().tolist()) == {1, 40000, 65535, 2}


@pytest.mark.parametrize(("mix", "n_exams"), [(0.0, 0), (0.25, 2), (0.3, 2), (0.5, 4), (1.0, 8)])
def test_the_share_that_is_asked_for_of_a_step_are_exams(mix, n_exams):
    """An exam is where the weights are not those of text, and its answers weigh as much as a row of text."""
    rows = training.Rows(torch.full((3000,), ord("x"), dtype=torch.int16), 700, seed=3)
    steps = training.Steps(rows, 0, 8, mix, ["multikey"], 3, character_tokenizer())
    ids, weights = steps[1]
    assert ids.shape == (8, 701) and weights.shape == (8, 700)
    assert weights.sum(1) == pytest.approx([1 / 8] * 8)
    exams = [k for k in range(8) if not torch.equal(ids[k], torch.full((701,), ord("x")))]
    assert len(exams) == n_exams and exams == steps.exams
    for k in exams:
        said = character_tokenizer().decode(ids[k])
        answers = "".join(character_tokenizer().decode(ids[k, 1:][weights[k] > 0]).split())
        asked = said.split("It is: ")[1:]
        assert answers == "".join(part.split("\n")[0] for part in asked) and len(asked) == 3
        assert all(said.count(part.split("\n")[0]) == 2 for part in asked), "in the text, and behind its question"
    assert all(torch.equal(a, b) for a, b in zip(steps[1], (ids, weights), strict=True))
    assert n_exams == 0 or not torch.equal(steps[0][0], ids)


def settings(**changes):
    values = {"tokens": 4 * 96 * 4, "batch": 4, "micro_batch": 2, "window": 96, "eager": True, "log_steps": 1}
    values |= {"mix": 0.0, "kinds": ["multikey"], "keys": 2, "workers": 0, "override": SHAPE}
    return argparse.Namespace(**values | changes)


STREAM = torch.randint(1, VOCABULARY, (2000,), dtype=torch.int16, generator=torch.Generator().manual_seed(0))


def run_of(name, file=None, seed=42, **changes):
    args = settings(**changes)
    model = training.drawn_model(seed, VOCABULARY, args)
    return training.Training(model, arms(96)[name], seed, args, STREAM, file=file)


class After(result_lines.Deadline):
    """Time is up after some steps."""

    def __init__(self, steps):
        self.steps = steps

    def leaves(self, seconds):
        self.steps -= 1
        return self.steps >= 0


@pytest.mark.parametrize("arm", ["baseline", "step 1/16..16", "independent"])
def test_a_run_that_was_cut_off_goes_on_as_if_it_was_not(arm, tmp_path):
    whole, file = run_of(arm), tmp_path / "kept.pt"
    assert whole.train(result_lines.Deadline(None))
    assert not run_of(arm, file).train(After(3))
    second = run_of(arm, file)
    assert second.step == 3 and second.train(result_lines.Deadline(None))
    for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert second.log == whole.log
    with pytest.raises(ValueError, match="holds a run with"):
        run_of(arm, file, batch=2)


def test_exams_that_are_made_beside_the_training_are_the_same():
    logs = []
    stream = STREAM.repeat(3)
    for workers in (0, 2):
        args = settings(window=700, mix=0.5, workers=workers, tokens=4 * 700 * 3)
        model = training.drawn_model(0, 130, args)
        run = training.Training(model, Arm(), 0, args, stream, character_tokenizer())
        assert run.train(result_lines.Deadline(None))
        logs.append(run.log)
    assert logs[0] == logs[1] and all("answers" in entry for entry in logs[0])


def test_arms_of_a_seed_differ_in_their_views_alone():
    """Each arm that starts from drawn weights trains, from the same ones as the others of its seed, to others."""
    begin, end = {}, {}
    for name, arm in arms(96).items():
        if arm.after is None:
            run = run_of(name, tokens=4 * 96 * 3)
            begin[name] = torch.cat([p.detach().flatten().clone() for p in run.model.parameters()])
            assert run.train(result_lines.Deadline(None))
            end[name] = torch.cat([p.detach().flatten() for p in run.model.parameters()])
    for arm in set(begin) - {"baseline"}:
        assert torch.equal(begin[arm], begin["baseline"])
    for first, second in itertools.combinations(end, 2):
        assert not torch.equal(end[first], end[second]), (first, second)


def test_seeds_differ_in_weights_rows_and_views():
    first, second = (run_of("uniform", seed=seed) for seed in (42, 137))
    assert not torch.equal(first.model.lm_head.weight, second.model.lm_head.weight)
    assert not torch.equal(first.data[0][0], second.data[0][0])
    assert [training.view_source(run.model).clock.seed for run in (first, second)] == [42, 137]


@pytest.mark.parametrize("name", [name for name, arm in arms(96).items() if arm.after == "baseline" and not arm.yarn])
def test_a_retrofit_takes_its_share_of_steps_on_rows_behind_the_baselines(name):
    baseline, retrofit = run_of("baseline", tokens=4 * 96 * 20), run_of(name, tokens=4 * 96 * 20)
    assert (baseline.steps, retrofit.steps) == (20, 2)
    assert torch.equal(retrofit.data[0][0], baseline.data[20][0])
    before = retrofit.model.lm_head.weight.clone()
    assert retrofit.train(result_lines.Deadline(None)) and not torch.equal(retrofit.model.lm_head.weight, before)


def test_arms_that_start_from_others_are_known_behind_them():
    known = arms(2048)
    for place, (name, arm) in enumerate(known.items()):
        assert arm.after is None or arm.after in list(known)[:place], name
        assert not arm.yarn or (arm.steps, arm.view) == (0, "standard")
    assert known["step 1/16..16"] == Arm(
        "posaug", {"alpha": {"law": "uniform", "low": 1 / 16, "high": 16.0, "curriculum": "step"}}
    )


def by_hand(model, ids, index, sees):
    """-ln p of each token but the first, in float64: one pass with these RoPE indices and keys that queries see."""
    hidden = model.model.embed_tokens(ids[None])
    cos, sin = model.model.rotary_emb(hidden, index[None].double())
    mask = torch.zeros(sees.shape, dtype=torch.float64).masked_fill(~sees, -torch.inf)
    for layer in model.model.layers:
        x, attention = layer.input_layernorm(hidden), layer.self_attn
        q, k, v = (
            getattr(attention, f"{name}_proj")(x).view(1, len(ids), -1, 8).transpose(1, 2) for name in ("q", "k", "v")
        )
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        mixed = (q @ k.mT / 8**0.5 + mask).softmax(-1) @ v
        hidden = hidden + attention.o_proj(mixed.transpose(1, 2).flatten(2))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    logits = model.lm_head(model.model.norm(hidden))[0, :-1]
    return F.cross_entropy(logits, ids[1:], reduction="none")


@torch.no_grad()
@pytest.mark.parametrize("chunk", [4, 7, 16])
def test_gains_of_both_forms_are_those_by_hand(chunk):
    """In float64, of each span: contexts read anew, and a cache that is cut and keeps its old rotations."""
    model, short, length = training.drawn_model(0, VOCABULARY, settings()).double().eval(), 8, 40
    for weight in (p for p in model.parameters() if p.ndim > 1):
        torch.nn.init.normal_(weight, std=0.5)  # as drawn they hardly look at other tokens
    spans = torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(1))
    found = scratch.gains(model, spans, short, chunk)
    assert found["chunk"] == chunk
    places = torch.arange(length)
    causal = places[:, None] >= places
    for span, exact, paper in zip(spans, found["exact"], found["paper"], strict=True):
        full = by_hand(model, span, places, causal)[short - 1 :]
        anew = []
        for first in range(0, length - short, chunk):
            window = span[first : first + short + chunk]
            anew.append(
                by_hand(model, window, places[: len(window)], causal[: len(window), : len(window)])[short - 1 :]
            )
        assert exact == pytest.approx((torch.cat(anew) - full).mean().item(), abs=1e-6)
        # chunks behind the first `short` tokens restart at position `short`, and see `short` keys before their own
        starts = torch.where(places < short, 0, short + (places - short) // chunk * chunk)
        index = torch.where(places < short, places, short + (places - short) % chunk)
        cut = by_hand(model, span, index, causal & (places >= (starts - short)[:, None]))[short - 1 :]
        assert paper == pytest.approx((cut - full).mean().item(), abs=1e-6)
        assert abs(exact - paper) > 0.01


@pytest.fixture
def folder(tmp_path):
    """Token files of characters, with their tokenizer."""
    draw, tokenizer = random.Random(0), character_tokenizer()
    letters = [ord(c) for c in "abcdefgh ,."]
    documents = [np.array([*draw.choices(letters, k=2500), 2], dtype=token_text.DTYPES["u16"]) for _ in range(4)]
    for split in ("train", "val"):
        token_text.write_parts(tmp_path, split, documents, 10**6, None)
    (tmp_path / "tokens.json").write_text(json.dumps({"separator": 2, "vocabulary": len(tokenizer)}))
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture
def study(folder, monkeypatch):
    """Runs the study with more arguments; the lines of its file."""
    sizes = "--window 600 --batch 2 --micro-batch 2 --tokens 3600 --length 1300 --spans 2 --eager --seeds 1 --keys 2"
    sizes += " --chunks 100 200 --log-steps 1 --workers 0 --retrofit 0.34"

    def begin(*more):
        shape = ["--override", json.dumps(SHAPE), "--out", str(folder / "out.jsonl")]
        monkeypatch.setattr("sys.argv", ["scratch", str(folder), *sizes.split(), *shape, *more])
        scratch.main()
        return result_lines.read_lines(folder / "out.jsonl")

    return begin


def without_times(line):
    return {k: v for k, v in line.items() if k not in ("seconds", "train_seconds", "tokens_per_second")}


def test_runs_are_done_once_and_tabled(study, folder, monkeypatch, capsys):
    (folder / "tokenizer.json").unlink()  # for exams alone
    for _ in range(2):
        lines = study("--arms", "baseline", "uniform")
    assert [(line["arm"], line["seed"], line["tokens"]) for line in lines] == [
        ("baseline", 1, 3600),
        ("uniform", 1, 3600),
    ]
    assert lines[1]["view"] == ["posaug", {}] and {"seconds", "gpu", "versions", "cliff"} <= lines[1].keys()
    assert lines[1]["exams"] == [] and [entry.keys() for entry in lines[1]["log"]] == [{"step", "loss"}] * 3
    monkeypatch.setattr("sys.argv", ["scratch", "--table", str(folder / "out.jsonl")])
    capsys.readouterr()
    scratch.main()
    assert "| uniform | 1 |" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        study("--arms", "retrofit")
    assert "arms retrofit start from others, which are to be in --checkpoints" in capsys.readouterr().err


FOLLOWERS = ("baseline", "baseline, YaRN", "continued", "retrofit", "retrofit, YaRN")
EXAMS = ("--mix", "0.5", "--exams", "3", "--questions", "2", "--lengths", "500", "1200")


def test_finished_arms_are_trained_on_and_read_under_yarn(study, folder, monkeypatch):
    kept = ("--checkpoints", str(folder / "kept"))
    started = []
    begin = training.Training.__init__

    def spied(self, model, arm, *more, **options):
        started.append(torch.cat([p.detach().flatten().clone() for p in model.parameters()]))
        begin(self, model, arm, *more, **options)

    monkeypatch.setattr(training.Training, "__init__", spied)
    lines = {line["arm"]: line for line in study("--arms", *FOLLOWERS, *EXAMS, *kept)}
    assert list(lines) == list(FOLLOWERS)
    finished = scratch.load(folder / "kept" / "baseline-1")
    weights = torch.cat([p.detach().flatten() for p in finished.parameters()])
    assert not torch.equal(started[0], weights) and all(torch.equal(of_other, weights) for of_other in started[1:])
    assert len(started) == 3 and not list((folder / "kept").glob("*.pt"))
    assert [lines[name]["tokens"] for name in FOLLOWERS] == [3600, 0, 1200, 1200, 0]
    assert [lines[name]["after"] for name in FOLLOWERS] == [None, "baseline", "baseline", "baseline", "retrofit"]
    assert [len(line["log"]) for line in lines.values()] == [3, 0, 1, 1, 0]
    assert lines["baseline"]["log"][0]["answers"] > 1
    for line in lines.values():
        assert [(c["kind"], c["length"]) for c in line["exams"]] == [("multikey", 500), ("multikey", 1200)]
        assert all([len(exam) for exam in c["marks"]] == [2, 2, 2] for c in line["exams"])
        assert [(g["chunk"], len(g["exact"]), len(g["paper"])) for g in line["gains"]] == [(100, 2, 2), (200, 2, 2)]
        spans = line["of_spans"]
        assert sum(s["in_window"] for s in spans) / 2 == pytest.approx(line["in_window"])
        assert sum(s["beyond"] - s["in_window"] for s in spans) / 2 == pytest.approx(line["cliff"])
    # under YaRN at the length that is read
    scratch.patch_model(finished, "yarn", factor=1300 / 600)
    val = torch.from_numpy(token_text.first_rows(folder, "val", 1300, 2))
    assert lines["baseline, YaRN"]["in_window"] == scratch.losses(finished, val, 600, 150)["in_window"]
    assert lines["baseline, YaRN"]["in_window"] != lines["baseline"]["in_window"]


def test_a_study_that_was_cut_off_goes_on(study, folder, monkeypatch):
    kept, out = ("--checkpoints", str(folder / "kept")), folder / "out.jsonl"
    names = ("baseline", "baseline, YaRN", "uniform")
    whole = [without_times(line) for line in study("--arms", *names, *EXAMS, *kept)]
    out.unlink()
    (folder / "out.parts.jsonl").unlink()
    for k in range(0, 40, 3):  # in the middle of training, of measuring, and between arms
        monkeypatch.setattr(scratch, "study_parser", with_time(After(3 + k // 3), scratch.study_parser))
        lines = study("--arms", *names, *EXAMS, *kept)
        if len(lines) == len(names):
            break
    assert k > 3 and [without_times(line) for line in lines] == whole


def with_time(deadline, study_parser):
    def parser(*args, **options):
        made = study_parser(*args, **options)
        made.set_defaults(deadline=deadline)
        return made

    return parser


def test_an_arm_is_not_begun_without_the_weights_that_it_starts_from(study, folder, capsys):
    with pytest.raises(SystemExit, match="retrofit"):
        study("--arms", "retrofit", "--checkpoints", str(folder / "kept"))
    assert "arm 'baseline', seed 1, is to be in --checkpoints first" in capsys.readouterr().err


def test_exams_of_training_are_not_those_that_are_measured():
    """Keys and numbers are drawn anew: a mark shows retrieval, not memory."""
    tokenizer = character_tokenizer()
    text = [ord("x")] * 701
    rows = training.Rows(torch.full((3000,), ord("x"), dtype=torch.int16), 700, seed=0)
    ids, _ = training.Steps(rows, 0, 2, 1.0, ["multikey"], 3, tokenizer)[0]
    measured = exam_over("multikey", tokenizer, text, 3, random.Random(7), 3).ids
    assert measured not in ids.tolist() and ids[0].tolist() != ids[1].tolist()
