"""RPSD at small scale: rows with exams in them, arms that are trained and measured, and what is printed."""

import argparse
import json
import random
import re

import pytest
import torch
from support.characters import beginning_tokenizer, character_tokenizer
from support.tiny import tiny

import result_lines
import rpsd_small_scale
from exams import KINDS
from rope_patch import patch_model

SENTENCE = re.compile(r" The special magic number for (\S+) is: (\d+)\.")
QUESTION = re.compile(r"What is the ?(\S*) special magic number for (\S+) mentioned in the text above\? It is: (\d+)\.")


@pytest.fixture
def texts(tmp_path):
    """A tiny model of characters in a folder, and a file of text."""
    folder, file = tmp_path / "model", tmp_path / "text.txt"
    tokenizer = character_tokenizer()
    tiny(vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    file.write_text("".join(random.Random(0).choices("abcdefgh ,.", k=40_000)))
    return folder, file


def test_a_view_of_training_is_not_in_force_while_it_is_measured(texts):
    tokenizer = character_tokenizer()
    model = tiny(vocab_size=len(tokenizer))
    ids = torch.randint(3, len(tokenizer), (2, 4096))
    args = argparse.Namespace(lengths=[4096], exams=1, spacing=200, short=2048)
    exams = rpsd_small_scale.sittings(tokenizer, args, ids)
    assert [len(exam.answers) for exam in (exams["multikey"][4096][0], exams["ordinal"][4096][0])] == [16, 16]
    seen = []
    model.register_forward_hook(lambda module, inputs, output: seen.append(output.logits.sum().item()))
    plain = rpsd_small_scale.measure(model, exams, args, ids)
    first = seen.copy()
    seen.clear()
    assert rpsd_small_scale.measure(patch_model(model, "skip").train(), exams, args, ids) == plain and seen == first


def test_long_rows_are_the_text_with_exams_in_some_pieces():
    tokenizer = character_tokenizer()
    text = "".join(random.Random(0).choices("abcdefgh ,.", k=60_000))
    args = argparse.Namespace(short=2048, long=8192, spacing=200, mix=0.5)
    rows = rpsd_small_scale.long_rows([text, text[:5000]], tokenizer, args)["input_ids"]
    assert len(rows) > 60_000 // 8192 and {len(row) for row in rows} == {8192}
    pieces = [tokenizer.decode(row[k : k + 2048]) for row in rows for k in range(0, 8192, 2048)]
    exams = [piece for piece in pieces if QUESTION.search(piece)]
    assert 0.2 < len(exams) / len(pieces) < 0.8
    for piece in exams:
        known = {value for _, value in SENTENCE.findall(piece)}
        assert {value for _, _, value in QUESTION.findall(piece)} <= known
    # without the exams, the text from its begin
    plain = "".join(QUESTION.sub("", SENTENCE.sub("", piece)).replace("\n", "") for piece in pieces)
    assert text.startswith(plain)


def test_rows_and_exams_begin_as_the_tokenizer_begins_a_text():
    """Each of them, and nowhere else: pieces of a row and texts of an exam come from the middle of texts."""
    tokenizer = beginning_tokenizer()
    bos = tokenizer.bos_token_id
    text = "".join(random.Random(0).choices("abcdefgh ,.", k=60_000))
    args = argparse.Namespace(short=2048, long=8192, spacing=200, mix=0.5, lengths=[4096], exams=4)
    rows = rpsd_small_scale.long_rows([text, text[:9000]], tokenizer, args)["input_ids"]
    assert len(rows) > 60_000 // 8192
    for ids in rows:
        assert len(ids) == 8192 and ids[0] == bos and bos not in ids[1:]
    shown = "".join(tokenizer.decode(ids[1:]) for ids in rows[:-1])
    plain = QUESTION.sub("", SENTENCE.sub("", shown)).replace("\n", "")
    assert QUESTION.search(shown) and len(plain) > 30_000 and text.startswith(plain)  # none is lost between rows
    val = torch.tensor([[bos, *tokenizer(text[:4200], add_special_tokens=False)["input_ids"]]] * 2)
    for by_length in rpsd_small_scale.sittings(tokenizer, args, val).values():
        for exam in by_length[4096]:
            assert len(exam.ids) == 4096 and exam.ids[0] == bos and bos not in exam.ids[1:]


@pytest.mark.slow
def test_every_arm_is_trained_and_measured(texts, tmp_path, monkeypatch):
    folder, file = texts
    out = tmp_path / "out.jsonl"
    arms = list(rpsd_small_scale.arms(2048))
    sizes = "--short 2048 --long 2048 --lengths 2048 4096 --exams 1 --spacing 200 --val-rows 1 --steps 1".split()
    teach = ["--teach", '{"max_steps": 2, "per_device_train_batch_size": 1}', "--override", '{"warmup_steps": 0}']
    places = ["--train", str(file), "--val", str(file), "--taught", str(tmp_path / "taught"), "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["rpsd", str(folder), *places, *sizes, *teach, "--arms", *arms])
    rpsd_small_scale.main()
    runs = result_lines.read_lines(out)
    assert [r["arm"] for r in runs] == arms
    curves = {json.dumps(r["loss_by_position"]) for r in runs}
    assert len(curves) == len(arms)  # each is another model
    assert rpsd_small_scale.table(runs).split("\n\n")[0].count("\n") == len(arms) + 1


def test_runs_of_other_settings_are_not_added_to_a_file(tmp_path, monkeypatch, capsys):
    settings = {"short": 2048, "long": 8192, "mix": 0.5, "steps": 256, "rows": 1, "theta": 8e5}
    settings |= {"learning_rate": 1e-4, "exams": 16, "spacing": 30}
    out = tmp_path / "out.jsonl"
    result_lines.add_line(out, {"arm": "skip", "seed": 0, "settings": settings})
    monkeypatch.setattr("sys.argv", ["rpsd", str(tmp_path), "--out", str(out), "--steps", "12"])
    with pytest.raises(SystemExit):
        rpsd_small_scale.main()
    assert "has runs with steps 256" in capsys.readouterr().err


def test_results_are_tabled_and_drawn(tmp_path):
    curve = [{"first": 64, "end": 4096, "loss": 3.0}]
    by_place = {f"{kind} by position": [None, *[0.5] * 9] for kind in KINDS}
    runs = [
        {"arm": arm, "seed": 0, "multikey": {"4096": 1.0, "8192": 0.5}, "ordinal": {"4096": 0.9, "8192": 0.1}}
        | {**by_place, "loss_by_position": curve, "train_seconds": 9.0}
        for arm in rpsd_small_scale.arms(16384)
    ]
    better = {"multikey": {"4096": 1.0, "8192": 0.6}}
    other_seed = [
        {**r, "seed": 1, **(better if r["arm"] == "skip" else {})} for r in runs if r["arm"] in ("skip", "standard")
    ]
    table = rpsd_small_scale.table([*runs, *other_seed])
    assert "| skip | 2 | 1.000 ± 0.000 | 0.550 ± 0.050 |" in table
    assert "| multikey: standard < skip | 31.0 < 82.6, whole runs; 13 tasks 47.9 < 59.2 | 1 of 2 seeds |" in table
    assert "| multikey spread: skip < standard | the paper's figure | 0 of 2 seeds |" in table
    assert all(file.stat().st_size > 10_000 for file in rpsd_small_scale.plot(runs, tmp_path / "figure.png"))
