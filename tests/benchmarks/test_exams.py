"""Exams of the small-scale comparison: what is asked can be answered from the text, and only right answers count."""

import argparse
import json
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.characters import character_tokenizer
from support.tiny import tiny

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import result_lines
import rpsd_small_scale
from exams import KINDS, NEEDLES, accuracy, make_exam, needle_exam

from rope_patch import patch_model

SENTENCE = re.compile(r" The special magic number for (\S+) is: (\d+)\.")
QUESTION = re.compile(r"What is the ?(\S*) special magic number for (\S+) mentioned in the text above\? It is: (\d+)\.")
ORDINALS = ["first", "second", "third", "fourth", "fifth", "last"]
LENGTH = 6000


def exam(kind, seed=0):
    tokenizer = character_tokenizer()
    text = tokenizer("it was a dark night; " * 400, add_special_tokens=False)["input_ids"]
    made = make_exam(kind, tokenizer, text, LENGTH, 200, random.Random(seed))
    return tokenizer, made, tokenizer.decode(made.ids)


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_has_the_answers(kind):
    tokenizer, made, text = exam(kind)
    assert len(made.ids) == LENGTH and len(made.answers) == len(made.depths) == 8
    facts = [(m.start(), *m.groups()) for m in SENTENCE.finditer(text)]
    questions = QUESTION.findall(text)
    assert len(facts) == (30 if kind == "multikey" else 18) and len(questions) == 8
    for (which, key, value), (first, end), depth in zip(questions, made.answers, made.depths, strict=True):
        own = [(place, v) for place, k, v in facts if k == key]
        place, right = own[ORDINALS.index(which) if kind == "ordinal" else 0]
        assert len(own) == (6 if kind == "ordinal" else 1)
        assert value == right and depth == place / LENGTH
        assert tokenizer.decode(made.ids[first:end]) == f" {value}."
    assert sum(made.answered) == 8 * len(" 1234567.")


def test_exams_depend_on_the_generator_alone():
    assert exam("ordinal")[1] == exam("ordinal")[1] != exam("ordinal", seed=1)[1]


@pytest.mark.parametrize("wrong", [None, 0, 5])
def test_an_answer_is_right_when_all_of_its_tokens_are(wrong):
    _, made, _ = exam("multikey")
    right = torch.tensor(made.ids)
    if wrong is not None:
        right[made.answers[wrong][1] - 3] += 1

    class Oracle:
        device = torch.device("cpu")
        training = False

        def __call__(self, ids, use_cache, logits_to_keep):
            """The most probable token at each place is the one that `right` has behind it."""
            assert ids.tolist() == [made.ids]
            return SimpleNamespace(logits=torch.nn.functional.one_hot(right[logits_to_keep + 1], 5000)[None].float())

    graded = accuracy(Oracle(), made)
    assert [d for d, _ in graded] == made.depths
    assert [ok for _, ok in graded] == [i != wrong for i in range(8)]


@pytest.mark.parametrize("kind", NEEDLES)
@pytest.mark.parametrize("depth", [0.05, 0.95])
def test_of_a_needle_the_digits_are_graded(kind, depth):
    tokenizer = character_tokenizer()
    haystack = tokenizer("it was a dark night. " * 200, add_special_tokens=False)["input_ids"]
    made = needle_exam(kind, tokenizer, haystack, 3000, depth, random.Random(0))
    text = tokenizer.decode(made.ids)
    ((first, end),) = made.answers
    number = tokenizer.decode(made.ids[first:end])
    assert len(made.ids) == end <= 3000 and number.isdigit() and len(number) == (5 if kind == "passkey" else 7)
    needle = text[round(made.depths[0] * end) :]
    said = re.match(r" The (pass key|special magic number for \S+) is:? (\d+)\.", needle)
    assert said[2] == number and said[1].lower() in text[-200:].lower()
    assert text.count(" The special magic number for ") == (0 if kind == "passkey" else 5)
    assert (
        abs(made.depths[0] - depth) < 0.15
    )  # in characters, the question of multiquery, which shares these places, is long


def test_no_exam_is_graded_in_training_mode():
    tokenizer = character_tokenizer()
    model = tiny(vocab_size=len(tokenizer)).train()
    with pytest.raises(ValueError, match=r"call model.eval\(\) first"):
        accuracy(model, needle_exam("passkey", tokenizer, [40] * 1000, 1000, 0.5, random.Random(0)))


def test_too_many_sentences_are_refused():
    tokenizer = character_tokenizer()
    with pytest.raises(ValueError, match="use more spacing"):
        make_exam("multikey", tokenizer, [1] * 3000, 3000, 20, random.Random(0))


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
    exams = rpsd_small_scale.sittings(tokenizer, args, ids.flatten().tolist())
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
    assert "| multikey: standard < skip | 47.9 < 59.2; whole runs 57.3 < 69.3 | 1 of 2 seeds |" in table
    assert "| multikey spread: skip < standard | the paper's figure | 0 of 2 seeds |" in table
    assert all(file.stat().st_size > 10_000 for file in rpsd_small_scale.plot(runs, tmp_path / "figure.png"))
