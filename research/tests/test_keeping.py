"""The search for what keeps: prompts of one length, rows that hold their answers, indices that only gaps move."""

import json
import math
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.books import write_books
from support.characters import CHARACTERS, chat_tokenizer
from support.tiny import tiny

import keeping
import keeping_arms
import keeping_plot
import keeping_questions as questions
import keeping_results
from rope_patch.prompts.asking import Frame
from trl_ext import RopeSFTConfig
from trl_ext.rows.mix import rows_by_kind
from trl_ext.rows.row import SKILLS

ARMS = (
    "native yarn ntk ntk-2 ntk-4 pose no-kl no-kl-2 no-kl-cold no-kl-cold-2 keep keep-2 keep-2-long keep-2-kl-3 "
    "keep-2-quarter keep-2-half keep-2-three-quarters keep-2-lora keep-2-lora-slow keep-2-qkv keep-2-slow "
    "keep-2-slow-long no-kl-2-slow-long keep-2-gain drop keep-2-answers keep-2-answers-half keep-2-answers-short "
    "keep-2-answers-chats skills skills-but-chain skills-but-values skills-but-count skills-but-order "
    "skills-but-comparison skills-but-passage skills-no-kl-slow skills-lora-slow evidence keep-2-evidence keep-cold keep-cold-2"
).split()
BOOKS = [[5 + (7 * i * i + k) % 40 for i in range(18_000)] for k in range(3)]


@pytest.fixture
def tokenizer():
    return chat_tokenizer()


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("test", ["passkey", "keys", "words"])
def test_prompts_of_a_cell_are_read_alike_and_hold_their_answers(test, chat, tokenizer, monkeypatch):
    monkeypatch.setattr(questions, "TAIL", 400)  # a token a character
    if test == "passkey":
        cell = questions.passkeys(tokenizer, 2000, 8, chat, 0)
    else:
        cell = questions.keyed(test, tokenizer, BOOKS, 2000, 4, chat, 0)
    assert len({len(a.shared) for a in cell}) == 1
    assert all(len(a.shared) + max(map(len, a.tails)) + questions.NEW_TOKENS[test] <= 2000 for a in cell)
    assert {a.wording for a in cell} == set(
        range(len(questions.PASSKEY if test == "passkey" else questions.KEYED[test]))
    )
    for a in cell:
        text = tokenizer.decode(a.shared)
        assert all(answer in text for answer in a.answers) and len(a.tails) == len(a.answers)
        assert not any(answer in tokenizer.decode(tail) for answer, tail in zip(a.answers, a.tails, strict=True))


def test_a_reply_is_right_with_its_answer_in_it():
    cell = [questions.Asked([1], [[2], [3]], ["123", "456"], 0)]
    assert questions.right(cell, [" is 123.", " is 45"]) == [1, 0]


def test_a_chat_is_cut_where_its_reply_begins():
    assert keeping._up_to_reply([1, 5, 6, 2, 3, 9, 2, 3, 8], [2, 3]) == [1, 5, 6, 2, 3]
    assert keeping._up_to_reply([1, 5, 6, 2], [2, 3]) is None


@pytest.mark.parametrize("name", ARMS)
def test_arms_are_configurations_that_the_trainer_takes(name, tmp_path):
    known = keeping_arms.arms(8192, 65536, "chats")
    assert set(known) == set(ARMS)
    arm = known[name]
    config = RopeSFTConfig(output_dir=str(tmp_path), **{**keeping.TRAINING, **arm.rescaling(), **arm.training})
    assert config.rescale == (arm.rescale[0] if arm.rescale else None)


def test_an_arm_without_a_skill_has_plain_questions_in_its_place():
    known = keeping_arms.arms(8192, 65536, "chats")
    rows = {name: rows_by_kind(288, known[name].shares) for name in known if name.startswith("skills")}
    for skill in SKILLS:
        without = dict(rows[f"skills-but-{skill}"])
        without["questions"] -= rows["skills"][skill]
        assert all(0.25 * n == round(0.25 * n) for n in without.values()), "short ones, in exact shares"
        assert {**without, skill: rows["skills"][skill]} == rows["skills"]


@pytest.mark.slow
@pytest.mark.parametrize("chat", [True, False], ids=["instruct", "base"])
def test_arms_are_trained_measured_and_tabulated(chat, tokenizer, tmp_path, monkeypatch):
    if not chat:
        tokenizer.chat_template = None
    model = tmp_path / "model"
    tiny("llama", vocab_size=CHARACTERS, max_position_embeddings=2048).save_pretrained(model)
    tokenizer.save_pretrained(model)
    write_books(tmp_path, 3000)
    frame = Frame.of(tokenizer, chat)
    turn = tokenizer(frame.turn, add_special_tokens=False)["input_ids"]
    own_texts, out = tmp_path / "own.json", tmp_path / "out.jsonl"
    own_texts.write_text(json.dumps([[*frame.begin, 30, 31, *turn, *([32, 33] * 10)] for _ in range(6)]))
    squad = tmp_path / "squad.jsonl"
    asked = {"title": "Foxes", "qas": [{"question": "who?", "answers": ["fox"]}]}
    squad.write_text("".join(json.dumps({"context": text, **asked}) + "\n" for text in ("A fox.", "No fox.")))
    monkeypatch.setattr(questions, "TAIL", 200)
    monkeypatch.setattr(keeping, "REPLY", 4)
    monkeypatch.setattr(
        sys,
        "argv",
        f"keeping.py {model} --text {tmp_path}/train.jsonl --held-out {tmp_path}/val.jsonl --own {own_texts} "
        f"--squad {squad} --held-out-own 2 --arms native keep keep-2-half keep-2-lora keep-2-gain drop pose "
        f"--ruler 2 --ruler-tasks niah_single_1 --ruler-lengths 4096 {'--ruler-chat-lengths 4224 ' * chat}--window 2048 --target 4096 --rows 6 --lengths 1400 --prompts 16 "
        f"--held-out-rows 2 --checkpoints {tmp_path}/kept --out {out}".split(),
    )
    keeping.main()
    runs = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["arm"] for r in runs] == ["native", "keep", "keep-2-half", "keep-2-lora", "keep-2-gain", "drop", "pose"]
    assert runs[0]["own"]["kl"] == pytest.approx(0, abs=1e-6) and runs[1]["own"]["kl"] > 0
    assert {"kl", "ce", "text_ce"} <= runs[1]["log"][0].keys() and runs[-1]["steps"] == 1
    assert [len(r["squad"]["scores"]) for r in runs] == [2] * len(runs)
    assert {c["chat"] for c in runs[0]["asked"]} == ({False, True} if chat else {False})
    assert ("replies" in runs[1]["own"]) == chat
    kept = {folder.name: json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "kept").glob("*-0")}
    assert {name: c["rope_parameters"]["rope_type"] for name, c in kept.items()} == {
        "keep-0": "default",
        "keep-2-0": "default",
        "keep-2-half-0": "default",
        "keep-2-lora-0": "default",
        "keep-2-gain-0": "default",
        "drop-0": "llama3",
        "pose-0": "yarn",
    }
    assert [np.shape(r["ruler"]["scores"]["niah_single_1"]) for r in runs] == [(1, 2)] * len(runs)
    assert [r["ruler_chat"]["lengths"] for r in runs if chat] == [[4224]] * len(runs) * chat
    table = keeping_results.table(runs)
    assert "| keep |" in table and "| short text | SQuAD | passkey" in table and "SQuAD 2 paragraphs." in table
    assert "| SQuAD |" in keeping_results.differences(runs, "native")
    base, merged, whole, half = (
        load_file(folder / "model.safetensors")
        for folder in (model, *(tmp_path / "kept" / f"{name}-0" for name in ("keep-2-lora", "keep-2", "keep-2-half")))
    )
    assert base.keys() == merged.keys()  # a plain checkpoint, no adapter
    for name, weight in half.items():
        torch.testing.assert_close(weight, (whole[name] + base[name]) / 2)
    keeping.main()
    assert len(out.read_text().splitlines()) == len(runs), "what is measured is not measured again"
    # a run that was cut off before its last part
    parts = tmp_path / "out.parts.jsonl"
    *others, last = parts.read_text().splitlines(keepends=True)
    assert json.loads(last)["arm"] == "pose"
    parts.write_text("".join(others))
    out.write_text("".join(out.read_text().splitlines(keepends=True)[:-1]))
    monkeypatch.setattr(keeping, "train_arm", None)
    keeping.main()
    again = json.loads(out.read_text().splitlines()[-1])
    assert parts.read_text().count("\n") == len(others) + 1
    assert (
        again["asked"][:-1] == runs[-1]["asked"][:-1]
        and again["asked"][-1]["scores"] == runs[-1]["asked"][-1]["scores"]
    )
    assert {k: again[k] for k in ("log", "own", "train_seconds")} == {
        k: runs[-1][k] for k in ("log", "own", "train_seconds")
    }


def test_the_figure_has_a_line_an_arm_of_means_over_seeds(tmp_path, monkeypatch):
    def run(arm, seed, scores):
        cells = [{"test": "passkey", "chat": False, "length": n, "scores": scores} for n in (1024, 2048)]
        return {"arm": arm, "seed": seed, "question_seed": 0, "asked": cells}

    drawn = []
    monkeypatch.setattr(keeping_plot, "save_figure", lambda figure, path: drawn.append(figure) or [path])
    runs = [run("native", 0, [0, 0, 1, 1]), run("keep-2", 0, [1, 1, 1, 0]), run("keep-2", 1, [1, 1, 1, 1])]
    assert keeping_plot.plot(runs, tmp_path / "figure.png", "a model") == [tmp_path / "figure.png"]
    (axes,) = drawn[0].axes
    lines = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
    assert lines["as it came"] == [0.5, 0.5] and lines["the recipe"] == [0.875, 0.875]


def test_a_run_that_was_cut_off_stands_beside_those_that_answered_the_same_prompts():
    def run(arm, *lengths, prompts=4):
        cells = [{"test": "passkey", "chat": False, "length": n, "scores": [1] * prompts} for n in lengths]
        return {"arm": arm, "question_seed": 0, "asked": cells}

    cut, whole, others = run("pose", 1024), run("native", 1024, 2048), run("native", 1024, prompts=8)
    assert keeping_results.by_prompts([cut, others, whole]) == [[cut, whole], [others]]


def test_weights_are_mixed_with_those_before_training():
    trained, native = tiny("llama"), tiny("llama")
    for weight in trained.parameters():
        weight.data += torch.randn_like(weight)
    ends = [{n: p.detach().clone() for n, p in m.named_parameters()} for m in (native, trained)]
    keeping.mix_with(trained, native, 0.25)
    for name, weight in trained.named_parameters():
        torch.testing.assert_close(weight, 0.75 * ends[0][name] + 0.25 * ends[1][name])


def test_own_texts_are_written_without_books_and_nothing_is_measured_without(tokenizer, tmp_path, monkeypatch, capsys):
    tokenizer.chat_template = None
    tiny("llama", vocab_size=CHARACTERS).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr(keeping, "own_texts", lambda model, tokenizer, n, **_: [[1, 2]] * n)
    own = tmp_path / "own.json"
    monkeypatch.setattr(sys, "argv", f"keeping.py {tmp_path} --own {own} --make-own 3".split())
    keeping.main()
    assert json.loads(own.read_text()) == [[1, 2]] * 3
    monkeypatch.setattr(sys, "argv", f"keeping.py {tmp_path} --own {own}".split())
    with pytest.raises(SystemExit):
        keeping.main()
    assert "text, held_out" in capsys.readouterr().err


def test_texts_are_chosen_by_what_far_context_gains_in_them():
    data = keeping.Data(None, ["a", "b", "c"], [0.1, -math.inf, 0.2], torch.zeros(0), [], [], {})
    for gain, expected in ((None, ["a", "b", "c"]), (1 / 3, ["c"]), (2 / 3, ["a", "c"])):
        assert keeping.texts_of(keeping_arms.Arm(gain=gain), data) == expected


def test_a_text_shorter_than_the_window_gains_nothing(tokenizer):
    model = tiny("llama", vocab_size=CHARACTERS, max_position_embeddings=256)
    long, short = keeping.gains_of(model, tokenizer, ["abc " * 200, "abc"], 128)
    assert math.isfinite(long) and short == -math.inf


def test_arms_differ_by_the_means_of_prompts_over_seeds():
    def run(arm, seed, right):
        cells = [{"test": "passkey", "chat": False, "length": 1024, "scores": right}]
        return {"arm": arm, "seed": seed, "question_seed": 0, "asked": cells, "own": {}, "short_text": {}}

    runs = [run("keep-2", 0, [1, 1, 1, 1]), run("keep-2", 1, [1, 1, 1, 1]), run("pose", 0, [0, 0, 0, 0])]
    text = keeping_results.tables(runs, beside="keep-2")
    assert "| arm | passkey at 1024 |" in text and "keep-2, 2" not in text
    # four prompts alike leave room for .6 of others: 1 - .025 ** (1 / 4)
    assert "| pose, 1 and 2 seeds | -1.000 (-1.000 to +0.205) |" in text
    assert keeping_results.tables(runs[:1], beside="pose") == ""


def test_replies_differ_by_nats_and_a_seed_that_was_cut_off_before_them_is_left_out():
    def run(arm, seed, losses):
        own = {"replies": [{"nll": loss, "tokens": 4, "ended": True} for loss in losses]} if losses else {}
        cells = [{"test": "passkey", "chat": False, "length": 1024, "scores": [1, 1]}]
        bins = [{"first": a, "end": b, "loss": 3.0} for a, b in ((64, 512), (512, 1024))]
        more = {"window": 512, "loss_by_position": bins, "own": {"kl": 0.1, **own}, "short_text": {}}
        return {"arm": arm, "seed": seed, "question_seed": 0, "asked": cells, **more}

    runs = [run("keep-2", 0, [3.0, 2.5]), run("keep-2", 1, None), run("pose", 0, [1.0, 0.5])]
    text = keeping_results.tables(runs, beside="keep-2")
    assert "| arm | replies | ended | passkey at 1024 |" in text
    assert "| pose, 1 and 2 seeds | +2.000 (+2.000 to +2.000) |" in text
    assert "| keep-2 | 2 | 3.000 ± 0.000 | 3.000 ± 0.000 | 0.100 ± 0.000 | 2.75 |" in keeping_results.tables(runs)
