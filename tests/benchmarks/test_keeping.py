"""The search for what keeps: prompts of one length, rows that hold their answers, indices that only gaps move."""

import importlib
import json
import random
import sys
from pathlib import Path

import pytest
import torch
from support.characters import CHARACTERS, character_tokenizer
from support.tiny import tiny

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
BOOKS = [[5 + (7 * i * i + k) % 40 for i in range(18_000)] for k in range(3)]


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def tokenizer():
    found = character_tokenizer()
    found.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return found


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("test", ["passkey", "keys"])
def test_prompts_of_a_cell_are_read_alike_and_hold_their_answers(test, chat, tokenizer, monkeypatch):
    questions = importlib.import_module("keeping_questions")
    monkeypatch.setattr(questions, "TAIL", 400)  # a token a character
    if test == "passkey":
        asked = questions.passkeys(tokenizer, 2000, 8, chat, 0)
    else:
        asked = questions.keys(tokenizer, BOOKS, 2000, 4, chat, 0)
    assert len({len(a.shared) for a in asked}) == 1
    assert all(len(a.shared) + max(map(len, a.tails)) + questions.NEW_TOKENS[test] <= 2000 for a in asked)
    assert {a.wording for a in asked} == set(range(len(questions.PASSKEY if test == "passkey" else questions.KEYED)))
    for a in asked:
        text = tokenizer.decode(a.shared)
        assert all(answer in text for answer in a.answers) and len(a.tails) == len(a.answers)
        assert not any(answer in tokenizer.decode(tail) for answer, tail in zip(a.answers, a.tails, strict=True))


def test_a_reply_is_right_with_its_answer_in_it():
    questions = importlib.import_module("keeping_questions")
    asked = [questions.Asked([1], [[2], [3]], ["123", "456"], 0)]
    assert questions.right(asked, [" is 123.", " is 45"]) == [1, 0]


def test_rows_with_questions_label_the_answers_of_facts_in_them(tokenizer):
    rows = importlib.import_module("keeping_rows")
    made = rows.question_rows(tokenizer, BOOKS, 1500, random.Random(0), facts=3)
    for row in (next(made) for _ in range(20)):
        assert len(row.ids) == len(row.answer) == 1500
        answers = tokenizer.decode([i for i, labelled in zip(row.ids, row.answer, strict=True) if labelled])
        before = tokenizer.decode(row.ids[: row.answer.index(1)])
        numbers = "".join(c if c.isdigit() else " " for c in answers).split()
        assert len(numbers) == 3 and all(number in before for number in numbers)


def test_gaps_move_whole_pieces_apart_within_the_target():
    gaps = importlib.import_module("keeping_rows").gaps
    generator = torch.Generator().manual_seed(0)
    assert gaps(20, 100, 1, generator).tolist() == list(range(20))
    farthest = 0
    for pieces in (2, 3, 4):
        for _ in range(200):
            index = gaps(20, 100, pieces, generator)
            steps = index.diff()
            assert index[0] == 0 and (steps >= 1).all() and (steps > 1).sum() < pieces and index[-1] < 100
            farthest = max(farthest, int(index[-1]))
    assert farthest > 90


@pytest.mark.slow
def test_an_arm_is_trained_measured_and_tabulated(tokenizer, tmp_path, monkeypatch, capsys):
    keeping, results = (importlib.import_module(name) for name in ("keeping", "keeping_results"))
    model, tokens = tmp_path / "model", tmp_path / "tokens"
    tiny("llama", vocab_size=CHARACTERS, max_position_embeddings=8192).save_pretrained(model)
    tokenizer.save_pretrained(model)
    token_text = importlib.import_module("token_text")
    tokens.mkdir()
    for split in ("train", "val"):
        parts = [token_text.np.array([*book, 0], dtype=token_text.DTYPE) for book in BOOKS]
        token_text.write_parts(tokens, split, iter(parts), 10**6, None)
    (tokens / "tokens.json").write_text(json.dumps({"separator": 0}))
    chats, out = tmp_path / "chats.json", tmp_path / "out.jsonl"
    chats.write_text(json.dumps([[3, 4, 5] * 10] * 6))
    monkeypatch.setattr(importlib.import_module("keeping_questions"), "TAIL", 200)
    monkeypatch.setattr(keeping, "EDGES", [64, 8192])
    monkeypatch.setattr(
        sys,
        "argv",
        f"keeping.py {model} {tokens} --chats {chats} --held-out-chats 2 --arms native ntk32-a1-ce --window 8192 "
        f"--target 16384 --steps 2 --step-tokens 16384 --lengths 1400 --prompts 8 --rows 2 --out {out}".split(),
    )
    keeping.main()
    runs = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["arm"] for r in runs] == ["native", "ntk32-a1-ce"]
    assert runs[0]["kl_on_chats"] == pytest.approx(0, abs=1e-6) and runs[1]["kl_on_chats"] > 0
    assert runs[1]["steps"] == 2 and {"kl", "ce"} <= runs[1]["log"][0].keys()
    monkeypatch.setattr(results, "SPANS", [(64, 8192)])
    assert "| ntk32-a1-ce |" in results.table(runs)
