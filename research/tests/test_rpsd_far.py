"""RPSD in its paper's regime: exams over whole rows, arms that are trained and measured far, tables with intervals."""

import json
import random
import re
from types import SimpleNamespace

import pytest
import torch
from support.characters import beginning_tokenizer, character_tokenizer
from support.tiny import tiny

import rpsd_far
import rpsd_far_results as results
from exams import exam_over
from harness import load
from rpsd_far_arms import arms
from rpsd_far_match import at, matched, mean_kl
from trl_ext import RopeSFTConfig

SENTENCE = re.compile(r" The special magic number for (\S+) is: (\d+)\.")
QUESTION = re.compile(r"magic number for (\S+) mentioned in the text above\? It is: (\d+)\.")


@pytest.fixture
def files(tmp_path):
    """A tiny model of characters in a folder, and documents to train on and to measure with."""
    tokenizer, folder = character_tokenizer(), tmp_path / "model"
    tiny(vocab_size=len(tokenizer), max_position_embeddings=2048).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    draw = random.Random(0)
    for name in ("train", "val"):
        books = ["".join(draw.choices("abcdefgh ,.", k=14_000)) for _ in range(4)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": book}) + "\n" for book in books))
    return folder, tmp_path / "train.jsonl", tmp_path / "val.jsonl"


@pytest.mark.parametrize("name", arms(32768))
def test_arms_are_configurations_that_the_trainer_takes(name, tmp_path):
    fields = arms(32768)[name].fields
    if fields is not None:
        RopeSFTConfig(output_dir=str(tmp_path), use_cpu=True, **{**rpsd_far.FIELDS, **fields})


def test_an_exam_lies_over_the_whole_row():
    tokenizer = character_tokenizer()
    text = [5 + k % 20 for k in range(12_000)]
    exam = exam_over("multikey", tokenizer, text, 30, random.Random(0), 24)
    assert len(exam.ids) == 12_000 and len(exam.answers) == 24
    decoded = tokenizer.decode(exam.ids)
    said, asked = dict(SENTENCE.findall(decoded)), QUESTION.findall(decoded)
    assert len(said) == 30 and all(said[key] == value for key, value in asked)
    assert min(exam.depths) < 0.2 and max(exam.depths) > 0.6


@pytest.mark.parametrize("marked", [False, True])
def test_rows_and_exams_begin_as_the_tokenizer_begins_a_text(marked):
    """Each of them, not only a document's first row: a model that was trained with such a token is lost without."""
    tokenizer = beginning_tokenizer() if marked else character_tokenizer()
    begin = [tokenizer.bos_token_id] * marked
    row, room = 6000, 6000 - len(begin)
    args = SimpleNamespace(row=row, window=5000, mix=0.5, keys=8, exams=2, factors=[1, 2, 4])
    documents = ["".join(random.Random(k).choices("abcdefgh ,.", k=4 * room + 7)) for k in range(8)]
    data = rpsd_far.Data(tokenizer, documents, torch.empty(0), {})
    rows = rpsd_far.rows_of(data, args, seed=3)["input_ids"]
    assert len(rows) == 32 and all(len(ids) == row and ids[: len(begin)] == begin for ids in rows)
    assert all(tokenizer.bos_token_id not in ids[len(begin) :] for ids in rows)
    texts = [tokenizer.decode(ids[len(begin) :]) for ids in rows]
    plain = {d[k * room : (k + 1) * room] for d in documents for k in range(4)}
    n_exams = sum(bool(QUESTION.search(text)) for text in texts)
    assert 4 < n_exams < 28 and sum(text in plain for text in texts) == 32 - n_exams
    val = torch.tensor([[*begin, *tokenizer(documents[0], add_special_tokens=False)["input_ids"]]] * 2)
    for (_, length, _), sat in rpsd_far.sittings(tokenizer, val, args).items():
        for exam in sat:
            assert len(exam.ids) == length and exam.ids[: len(begin)] == begin
            assert tokenizer.bos_token_id not in exam.ids[len(begin) :]


def test_controls_are_as_strong_as_the_skip():
    """Of a KL that grows as noise squared and as dropout: the strength that has the skip's, between those tried."""
    asked = []

    def kl(arm, rows):
        asked.append((arm.strength, rows))
        if arm.strength is None:
            return 0.27
        return 0.3 * arm.strength**2 if arm.attention else 4 * arm.strength

    found = matched(kl, 32768, 64)
    assert found["strengths"] == pytest.approx({"noise": (0.27 / 0.3) ** 0.5, "dropout": 0.0675})
    assert found["kl"] == 0.27 and asked == [(None, 64), (0.5, 8), (1, 8), (2, 8), (0.005, 8), (0.01, 8), (0.02, 8)]
    assert {name: arms(32768, **found["strengths"])[name].strength for name in found["strengths"]} == found["strengths"]
    line = [(1.0, 1.0), (2.0, 2.0), (4.0, 8.0)]  # in logarithms of slope 1, then 2
    assert [at(kl, line) for kl in (0.5, 1.5, 4.0, 32.0)] == pytest.approx([0.5, 1.5, 2 * 2**0.5, 8.0])


def test_the_kl_of_a_training_is_the_mean_over_its_steps():
    assert mean_kl([{"step": 1, "kl": 1.0}, {"step": 4, "kl": 2.0}, {"step": 8, "kl": 3.0}]) == 19 / 8


@pytest.mark.slow
def test_arms_are_taught_trained_and_measured_far(files, tmp_path, monkeypatch):
    model, train, val = files
    out, kept = tmp_path / "out.jsonl", tmp_path / "kept"
    monkeypatch.setattr(rpsd_far, "QUESTIONS", 4)
    teach = '{"max_steps": 2, "per_device_train_batch_size": 1}'
    monkeypatch.setattr(
        "sys.argv",
        ["rpsd_far", str(model), "--text", str(train), "--held-out", str(val), "--taught", str(tmp_path / "taught")]
        + "--window 2048 --row 2200 --keys 8 --steps 2 --exams 2 --val-rows 1 --seeds 0 1 --arms abf skip".split()
        + ["next-token", "--teach", teach, "--out", str(out), "--checkpoints", str(kept)],
    )
    rpsd_far.main()
    runs = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["arm"], r["seed"]) for r in runs][:3] == [(n, 0) for n in ("abf", "skip", "next-token")]
    assert [len(r["log"]) > 0 for r in runs[:3]] == [False, True, True]
    config = json.loads((kept / "skip-0" / "config.json").read_text())
    assert config["rope_parameters"]["rope_theta"] == 8e5 and config["max_position_embeddings"] == 2200
    for run in runs:
        assert results.cells_of(run) == [
            (kind, length, yarn)
            for kind in ("multikey", "ordinal")
            for length, yarn in ((2048, 1), (2200, 1), (4400, 2), (8800, 4))
        ]
        assert [b["end"] for b in run["loss x4"]] == [2048, 2200, 4400, 8800]
        assert 0.99 < sum(run["attention"]["mass"]) < 1.01
    # seeds differ in what was taught, and arms of one seed begin alike
    assert len({json.dumps(r["loss x1"]) for r in runs}) == len(runs)
    assert results.kl(runs[1]) > 0 and results.kl(runs[2]) is None
    exams, note, above, by_seed, places, others = results.tables(runs).split("\n\n")
    assert exams.splitlines()[0].endswith("ordinal 4400, YaRN 2x | ordinal 8800, YaRN 4x |") and "2 texts" in note
    assert (
        exams.count("(") == above.count("(") == 2 * 8
        and above.count("\n") == 3
        and by_seed.count("\n") == places.count("\n") == others.count("\n") == 4
    )
    # a run that was cut off goes on with what it had trained and measured
    parts = tmp_path / "out.parts.jsonl"
    *before, last = parts.read_text().splitlines(keepends=True)
    assert json.loads(last)["seed"] == 1
    parts.write_text("".join(before))
    out.write_text("".join(out.read_text().splitlines(keepends=True)[:-1]))
    monkeypatch.setattr(rpsd_far, "extend", None)
    rpsd_far.main()
    again = json.loads(out.read_text().splitlines()[-1])
    assert {k: again[k] for k in ("exams", "log", "loss x1")} == {k: runs[-1][k] for k in ("exams", "log", "loss x1")}
    assert [b["loss"] for b in again["loss x4"]] == pytest.approx([b["loss"] for b in runs[-1]["loss x4"]])


@pytest.mark.slow
def test_noise_and_dropout_are_trained_as_strong_as_matched(files, tmp_path, monkeypatch):
    model, train, val = files
    out, strengths = tmp_path / "out.jsonl", tmp_path / "strengths.json"
    monkeypatch.setattr(rpsd_far, "QUESTIONS", 4)
    # flex attention has no backward on a CPU, and rows are short
    monkeypatch.setattr(rpsd_far, "load", lambda folder, attention=None: load(folder))
    teach = '{"max_steps": 2, "per_device_train_batch_size": 1}'
    monkeypatch.setattr(
        "sys.argv",
        ["rpsd_far", str(model), "--text", str(train), "--held-out", str(val), "--taught", str(tmp_path / "taught")]
        + "--window 2048 --row 2200 --keys 8 --steps 2 --exams 2 --val-rows 1 --seeds 0 --arms noise dropout".split()
        + ["--factors", "1"]
        + ["--teach", teach, "--out", str(out), "--matched", str(strengths)],
    )
    rpsd_far.main()
    found = json.loads(strengths.read_text())
    for pairs in found["tried"].values():
        kl = [nats for _, nats in pairs]
        assert kl == sorted(kl) and kl[0] > 0
    runs = [json.loads(line) for line in out.read_text().splitlines()]
    assert {run["arm"]: run["strength"] for run in runs} == found["strengths"]
    assert "YaRN" not in results.tables(runs) and {max(results.cells_of(run))[1] for run in runs} == {2200}


@pytest.mark.parametrize("factors", [["2", "4"], ["4"]])
def test_abf_alone_is_always_measured(factors, monkeypatch, capsys):
    arguments = ["rpsd_far", "model", "--text", "a", "--held-out", "b", "--factors", *factors]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit):
        rpsd_far.main()
    assert "--factors needs 1" in capsys.readouterr().err


def test_intervals_are_paired_over_exams_and_seeds():
    def run(arm, seed, shares):
        cell = {"kind": "multikey", "length": 100, "yarn": 1}
        marks = [[(0.1, k < share) for k in range(4)] for share in shares]
        bins = [{"first": 0, "end": 100, "loss": 3.0}]
        of_all = {
            "log": [],
            "train_seconds": 1,
            "loss x1": bins,
            "loss x4": [*bins, {"first": 100, "end": 400, "loss": 4.0}],
        }
        return {
            "arm": arm,
            "seed": seed,
            "exams": [{**cell, "marks": marks}, {**cell, "length": 200, "marks": marks}],
            "attention": {"edges": [0, 25, 100], "mass": [0.75, 0.25]},
            **of_all,
        }

    runs = [run("next-token", s, [1, 2, 1, 2]) for s in (0, 1)]
    runs += [run("skip", 0, [2, 3, 2, 3]), run("skip", 1, [2, 3, 2, 3]), run("abf", 0, [1, 2, 1, 2])]
    rows = {line.split(" | ")[0]: line for line in results.tables(runs).split("\n\n")[0].splitlines()}
    # four exams that differ alike leave a share of 1 - .025^(1/4) unseen, which may differ by -1 to 1
    above = results.tables(runs).split("\n\n")[2].splitlines()
    assert above[2].startswith("| next-token | 2 | +0.250 (") and above[3].startswith("| abf | 1 | +0.250 (")
    assert "0.625 (-0.503 to +0.702)" in rows["| skip"] and "0.375 (-0.602 to +0.602)" in rows["| abf"]
    assert results.far_attention(runs[0], 25) == 0.25
    assert results.by_place(runs[0], "multikey", 100) == [0.375, None, None, None, None]
