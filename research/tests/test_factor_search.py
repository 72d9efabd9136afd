"""The search for divisors: points and what they stand for, answers' losses, generations that go on where they were."""

import json
import math
import random
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.books import write_books
from support.characters import CHARACTERS, chat_tokenizer
from support.tiny import WINDOW, tiny

import keeping
import keeping_arms
import keeping_questions as questions
from factor_fitness import Book, books_with_questions, fitness, token_rows
from factor_results import best_of, searched_rescaling
from factor_space import Divisors, Space, divisors_of, references
from result_lines import Deadline, add_line, read_lines
from rope_patch import patch_model
from rope_patch.prompts.asking import Frame
from trl_ext import RopeSFTConfig

pytest.importorskip("cmaes")
import factor_search  # noqa: E402

THETA, HEAD_DIM = 10_000.0, 8


def by_formula(name, factor):
    """Divisors of each rescaling in float64, from the papers."""
    j = np.arange(HEAD_DIM // 2)
    native = THETA ** (-2 * j / HEAD_DIM)
    if name == "pi":
        return np.full(len(j), factor)
    if name.startswith("ntk"):
        times = factor * {"ntk": 1, "ntk-2": 2, "ntk-4": 4}[name]
        return native / (THETA * times ** (HEAD_DIM / (HEAD_DIM - 2))) ** (-2 * j / HEAD_DIM)
    if name.startswith("yarn"):
        fast, slow = (HEAD_DIM * math.log(WINDOW / (2 * math.pi * b)) / (2 * math.log(THETA)) for b in (32, 1))
        low, high = max(math.floor(fast), 0), min(math.ceil(slow), HEAD_DIM - 1)
        kept = 1 - np.clip((j - low) / (high - low), 0, 1)
        return 1 / ((1 - kept) / factor + kept)
    return np.ones(len(j))


@pytest.mark.parametrize("name", list(references(WINDOW, 8 * WINDOW)))
def test_divisors_of_a_reference_are_those_of_its_formula(name):
    model = tiny()
    state = {key: value.clone() for key, value in model.named_buffers()}
    divisors = divisors_of(model, references(WINDOW, 8 * WINDOW)[name])
    np.testing.assert_allclose(divisors.by_frequency, by_formula(name, 8), rtol=1e-6)
    assert divisors.attention_factor == pytest.approx(0.1 * math.log(8) + 1 if name == "yarn" else 1.0)
    assert all(torch.equal(value, state[key]) for key, value in model.named_buffers()) and len(state) > 0


@pytest.mark.parametrize("start", ["native", "pi", "ntk-2"])
@pytest.mark.parametrize("name", ["native", "pi", "ntk", "ntk-4"])
@pytest.mark.parametrize("knots", [2, 3, 4])
def test_from_a_reference_others_are_points(start, name, knots):
    space = Space(Divisors(tuple(by_formula(start, 8)), 1.2), knots)
    moves = np.log(by_formula(name, 8) / by_formula(start, 8))
    at_knots = np.interp(np.arange(knots) * 3 / (knots - 1), np.arange(4), moves)
    divisors = space.divisors([*at_knots, 0.4])
    np.testing.assert_allclose(divisors.by_frequency, by_formula(name, 8), rtol=1e-12)
    assert divisors.attention_factor == pytest.approx(1.2 * math.exp(0.1), rel=1e-12)


@pytest.mark.parametrize("name", ["native", "ntk", "yarn"])
def test_the_start_is_the_point_0(name):
    start = Divisors(tuple(by_formula(name, 8)), 1.1)
    divisors = Space(start, 3).divisors([0.0] * 4)
    np.testing.assert_allclose(divisors.by_frequency, start.by_frequency, rtol=1e-12)
    assert divisors.attention_factor == 1.1


def test_a_divisor_is_moved_by_the_knots_beside_it():
    space = Space(Divisors((1.0, 2.0, 4.0, 8.0, 16.0), 1.0), 3)
    by_frequency = space.divisors([0.0, 0.0, 0.2, 0.0]).by_frequency
    expected = [1, 2, 4, 8 * math.exp(0.1), 16 * math.exp(0.2)]
    np.testing.assert_allclose(by_frequency, expected, rtol=1e-12)


def test_divisors_never_fall_and_are_at_least_1():
    draw = np.random.default_rng(0)
    for _ in range(20):
        by_frequency = Space(Divisors((1.0,) * 32, 1.0), 6).divisors(draw.normal(size=7)).by_frequency
        assert by_frequency[0] >= 1 and np.all(np.diff(by_frequency) >= 0)


@pytest.mark.parametrize("knots", [1, 5])
def test_knots_are_frequencies(knots):
    with pytest.raises(ValueError, match=f"between 2 and the model's 4 frequencies, got {knots}"):
        Space(Divisors((1.0,) * 4, 1.0), knots)


@pytest.mark.parametrize("name", ["ntk-2", "yarn"])
@pytest.mark.parametrize("length", [WINDOW // 2, 2 * WINDOW], ids=["within", "beyond"])
def test_the_rescaling_of_divisors_is_that_of_the_formula(name, length):
    rescale = references(WINDOW, 8 * WINDOW)[name]
    model, ids = tiny(), torch.randint(3, 100, (1, length))
    divisors = divisors_of(model, rescale)
    logits = []
    for method, options in (rescale, divisors.rescale(WINDOW, 8 * WINDOW)):
        patched = patch_model(tiny(), method, **options)
        logits.append(patched(ids).logits)
        assert patched.config.max_position_embeddings >= 8 * WINDOW
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-3, atol=1e-3)
    assert not torch.allclose(logits[0], tiny()(ids).logits, atol=1e-2)


@pytest.fixture
def tokenizer():
    return chat_tokenizer()


TEXTS = [[5 + (7 * i * i + k) % 40 for i in range(3000)] for k in range(4)]


SEARCHED = Divisors((1.0, 1.5, 3.0, 8.0), 1.1).rescale(1024, 8192)


@pytest.mark.parametrize("rescale", [None, ("ntk", {"factor": 16.0}), SEARCHED], ids=["native", "ntk", "searched"])
def test_fitness_is_that_of_whole_prompts_without_shared_reading(rescale, tokenizer, monkeypatch):
    monkeypatch.setattr(questions, "TAIL", 300)
    model = tiny(vocab_size=CHARACTERS, max_position_embeddings=1024)
    books = books_with_questions(tokenizer, TEXTS, [1000, 1300], 2, 2)
    figures = fitness(model, books, rescale, 0.5)
    assert model.config.rope_parameters["rope_type"] == "default", "the rescaling is off again"

    # another candidate in between leaves nothing behind
    fitness(model, books, Divisors((1.0, 2.0, 2.0, 2.0), 1.0).rescale(1024, 8192), 0.5)
    assert fitness(model, books, rescale, 0.5) == figures

    plain = tiny(vocab_size=CHARACTERS, max_position_embeddings=1024)
    if rescale:
        patch_model(plain, rescale[0], **rescale[1])
    answers, text = {1000: [], 1300: []}, {1000: [], 1300: []}
    for book in books:
        for tail, answer in zip(book.asked.tails, book.asked.answers, strict=True):
            target = tokenizer(f" {answer}", add_special_tokens=False)["input_ids"]
            assert tokenizer.decode(target) == f" {answer}"
            ids = torch.tensor([[*book.asked.shared, *tail, *target]])
            with torch.no_grad():
                log_probs = plain(ids).logits[0, :-1].double().log_softmax(-1)
            losses = -log_probs.gather(1, ids[0, 1:, None])[:, 0]
            answers[book.length] += losses[-len(target) :].tolist()
        text[book.length].append(losses[: len(book.asked.shared) - 1].mean().item())
    for name, expected in (("answers", answers), ("text", text)):
        assert figures[name] == pytest.approx([np.mean(values) for values in expected.values()], rel=1e-4)
    assert figures["fitness"] == pytest.approx(np.mean(figures["answers"]) + 0.5 * np.mean(figures["text"]), rel=1e-9)


def test_books_take_forms_wordings_and_texts_in_turn(tokenizer, monkeypatch):
    monkeypatch.setattr(questions, "TAIL", 300)
    books = books_with_questions(tokenizer, TEXTS, [1000, 1300], 2, 2)
    assert [book.length for book in books] == [1000, 1000, 1300, 1300]
    chat = [tokenizer.decode(book.asked.shared).startswith("<user>") for book in books]
    assert chat == [False, True, True, False]
    assert [book.asked.wording for book in books] == [0, 1, 0, 1]
    others = books_with_questions(tokenizer, TEXTS, [1000, 1300], 2, 0)
    for book, other in zip(books, others, strict=True):
        assert not set(book.asked.answers) & set(other.asked.answers)
    assert isinstance(books[0], Book) and len(books[0].answers) == questions.KEYS


def test_texts_are_read_until_there_are_enough(tokenizer):
    def texts():
        yield from ("short", "a" * 50, "b" * 70)
        raise AssertionError("read on")

    assert list(map(len, token_rows(tokenizer, texts(), 50, 2))) == [50, 50]
    with pytest.raises(ValueError, match="must have 2 texts of 50 tokens or more, and has 1"):
        token_rows(tokenizer, ["a" * 50], 50, 2)


AIM = np.array([0.5, -0.3, 0.2])
OF_SEARCH = {"seed": 3, "population": 6, "step": 0.3}


class Quadratic:
    """Distance from AIM, and how often it was asked."""

    def __init__(self):
        self.asked = 0

    def __call__(self, point):
        self.asked += 1
        return {"fitness": float(np.square(np.asarray(point) - AIM).sum())}


def points(lines):
    return [line["points"] for line in lines]


def test_the_search_finds_a_known_minimum_and_repeats_itself():
    lines, again, other = (
        list(factor_search.evolve(Quadratic(), [0.0] * 3, **{**OF_SEARCH, "seed": seed}, generations=30))
        for seed in (3, 3, 4)
    )
    assert points(lines) == points(again) and points(lines) != points(other)
    assert lines[0]["points"] == [[0.0] * 3] and [line["generation"] for line in lines] == list(range(31))
    best = best_of(lines)
    assert best["fitness"] < 1e-2 < lines[0]["measured"][0]["fitness"]
    assert best["point"] == pytest.approx(AIM, abs=0.1)


def test_a_search_goes_on_as_if_it_had_not_been_cut_off():
    whole = list(factor_search.evolve(Quadratic(), [0.0] * 3, **OF_SEARCH, generations=6))
    known, measure = json.loads(json.dumps(whole[:3])), Quadratic()
    rest = list(factor_search.evolve(measure, [0.0] * 3, **OF_SEARCH, generations=6, known=known))
    assert points(rest) == points(whole[3:]) and measure.asked == 4 * OF_SEARCH["population"]


def test_no_generation_begins_that_would_not_be_through():
    slow = [{"generation": 0, "points": [[0.0] * 3], "measured": [{"fitness": 1.0}], "generation_seconds": 1.0}]
    slow += factor_search.evolve(Quadratic(), [0.0] * 3, **OF_SEARCH, generations=1, known=slow)
    slow[1]["generation_seconds"] = 90.0
    search = {**OF_SEARCH, "generations": 4, "known": slow}
    assert not list(factor_search.evolve(Quadratic(), [0.0] * 3, **search, deadline=Deadline(1)))
    assert len(list(factor_search.evolve(Quadratic(), [0.0] * 3, **search, deadline=Deadline(10)))) == 3
    assert not list(factor_search.evolve(Quadratic(), [0.0] * 3, **OF_SEARCH, generations=1, deadline=Deadline(0)))


def test_arms_are_measured_searched_from_and_tabulated(tokenizer, tmp_path, monkeypatch, capsys):
    model, out = tmp_path / "model", tmp_path / "out.jsonl"
    tiny(vocab_size=CHARACTERS, max_position_embeddings=1024).save_pretrained(model)
    tokenizer.save_pretrained(model)
    draw = random.Random(0)
    books = ["".join(draw.choices("abcdefgh ", k=1600)) for _ in range(2)]
    (tmp_path / "books.jsonl").write_text("".join(json.dumps({"text": book}) + "\n" for book in books))
    monkeypatch.setattr(questions, "TAIL", 300)

    def main(*more):
        line = f"factor_search.py {model} --text {tmp_path}/books.jsonl --window 1024 --target 4096 --lengths 1000 1300"
        line += f" --books 1 --knots 3 --population 4 --out {out}"
        monkeypatch.setattr(sys, "argv", [*line.split(), *more])
        factor_search.main()
        return read_lines(out)

    first = main("--arms", "native", "ntk-2", "--generations", "1")
    assert [line["line"] for line in first] == ["arm", "arm", "generation", "generation", "best"]
    measured = [m for line in first[2:4] for m in line["measured"]]
    assert first[4]["fitness"] == min(m["fitness"] for m in measured)
    by_arm = {line["arm"]: line for line in first[:2]}
    start = min(by_arm.values(), key=lambda line: line["fitness"])
    assert first[2]["from"] == start["arm"] and measured[0]["fitness"] == pytest.approx(start["fitness"], rel=1e-4)
    method, options = searched_rescaling(out)
    patched = patch_model(tiny(vocab_size=CHARACTERS, max_position_embeddings=1024), method, **options)
    assert patched.config.max_position_embeddings == 4096 and options["long_factor"] == options["short_factor"]

    second = main("--arms", "native", "ntk-2", "--generations", "2")
    assert second[:5] == first and [line["line"] for line in second[5:]] == ["generation", "best"]
    assert second[6]["generations"] == 2 and second[6]["fitness"] <= first[4]["fitness"]
    assert main("--arms", "native", "ntk-2", "--generations", "2") == second, "what is there is not searched again"

    capsys.readouterr()
    main("--table", str(out))
    table = capsys.readouterr().out
    assert "| ntk-2 |" in table and f"| searched, seed 0, 2 generations from {start['arm']} |" in table
    assert f"| 0 | 2 | {min(m['fitness'] for m in second[5]['measured']):.4f} |" in table
    assert "loss of answers at 1000 / 1300" in table


def test_a_file_without_a_search_that_ended_is_refused(tmp_path):
    add_line(tmp_path / "out.jsonl", {"line": "arm"})
    with pytest.raises(ValueError, match="has no result of research/experiments/factor_search.py"):
        searched_rescaling(tmp_path / "out.jsonl")


def test_the_start_is_an_arm_of_that_name_or_the_best():
    arms = [{"line": "arm", "arm": "native", "fitness": 2.0}, {"line": "arm", "arm": "pi", "fitness": 1.0}]
    assert factor_search.start_of("best", arms) == "pi" and factor_search.start_of("yarn", arms) == "yarn"
    with pytest.raises(ValueError, match="--start best needs arms that are measured"):
        factor_search.start_of("best", [])


def test_what_was_found_is_a_rescaling_of_the_arms(tmp_path):
    out = tmp_path / "out.jsonl"
    for divisor in (2.0, 3.0):
        method, options = Divisors((1.0, divisor), 1.1).rescale(8192, 65536)
        add_line(out, {"line": "best", "rescale": method, "rescale_args": options})
    plain, known = (keeping_arms.arms(8192, 65536, "chats", searched=s) for s in (None, searched_rescaling(out)))
    assert known.keys() - plain.keys() == {"searched", "keep-2-searched"}
    assert known["searched"].rescale[1]["long_factor"] == [1.0, 3.0] and known["searched"].shares is None
    arm = known["keep-2-searched"]
    assert replace(arm, rescale=None) == replace(known["keep-2"], rescale=None)
    config = RopeSFTConfig(output_dir=str(tmp_path), **{**keeping.TRAINING, **arm.rescaling(), **arm.training})
    assert config.rescale == "longrope" and dict(config.rescale_args) == arm.rescale[1]


@pytest.mark.slow
def test_the_recipe_trains_and_answers_under_what_was_found(tokenizer, tmp_path, monkeypatch):
    model, found, out = (tmp_path / name for name in ("model", "found.jsonl", "out.jsonl"))
    tiny(vocab_size=CHARACTERS, max_position_embeddings=2048).save_pretrained(model)
    tokenizer.save_pretrained(model)
    method, options = Divisors((1.0, 1.5, 3.0, 8.0), 1.1).rescale(2048, 4096)
    add_line(found, {"line": "best", "rescale": method, "rescale_args": options})
    write_books(tmp_path, 1500)
    frame = Frame.of(tokenizer, True)
    turn = tokenizer(frame.turn, add_special_tokens=False)["input_ids"]
    own = tmp_path / "own.json"
    own.write_text(json.dumps([[*frame.begin, 30, 31, *turn, *([32, 33] * 10)] for _ in range(4)]))
    monkeypatch.setattr(questions, "TAIL", 200)
    monkeypatch.setattr(keeping, "REPLY", 4)
    monkeypatch.setitem(keeping.TRAINING, "gradient_accumulation_steps", 1)  # the first step has a rate of 0
    line = f"keeping.py {model} --text {tmp_path}/train.jsonl --held-out {tmp_path}/val.jsonl --own {own} --window 2048"
    line += f" --held-out-own 2 --target 4096 --rows 2 --lengths 1400 2300 --prompts 4 --held-out-rows 1 --out {out}"
    monkeypatch.setattr(sys, "argv", f"{line} --rescaling {found} --arms searched keep-2-searched".split())
    keeping.main()
    untrained, trained = read_lines(out)
    assert untrained["rescale"] == trained["rescale"] == [method, options] and trained["steps"] > 1
    assert {len(c["scores"]) > 0 for c in trained["asked"]} == {True}
    assert trained["loss_by_position"] != untrained["loss_by_position"]
