"""Retrieval prompts, and grids of models that always or never find the needle."""

import random
import re
import sys
from dataclasses import replace

import pytest
import torch
from support.characters import CHARACTERS, character_tokenizer
from support.tiny import tiny

import rope_patch.eval.reading as reading
import rope_patch.eval.retrieval  # the package has a function of this name too
from rope_patch.eval import RetrievalGrid, accuracy_by_answer_position, niah, passkey, prompt_grid
from rope_patch.eval.generation import greedy_answers
from rope_patch.eval.needles import KINDS, make_prompt
from rope_patch.eval.prompt_grid import ALL_WORDINGS, PromptGrid
from rope_patch.eval.reading import Reply
from rope_patch.eval.wordings import PASSKEY_WORDINGS

TOKENIZER = character_tokenizer()
retrieval = sys.modules["rope_patch.eval.retrieval"]
TEXT = "It was a dark night. The wind blew! Who was there? " * 80


def prompt(kind, depth=0.5, n_tokens=1500, n_needles=4, seed=0, haystack=TEXT):
    ids = TOKENIZER(haystack)["input_ids"]
    rng = random.Random(seed)
    return make_prompt(kind, TOKENIZER, ids, n_tokens=n_tokens, depth=depth, n_needles=n_needles, rng=rng)


def lookup(knows=lambda text, values: values):
    """A tiny model whose replies are looked up in the prompt: all values of the keys that the question names."""
    model = tiny(vocab_size=CHARACTERS)

    def generate(input_ids, attention_mask, generation_config):
        replies = []
        for row in input_ids:
            text = TOKENIZER.decode(row)
            body, _, question = text.rpartition("\n")
            keys = dict.fromkeys(re.findall(r"[a-z]+-[a-z]+", question))
            if not keys:
                values = list(dict.fromkeys(re.findall(r"\d{5}", body)))
            else:
                # a needle is a sentence with a key and a number, in either order
                matches = {k: re.findall(rf"{k}[^.]*?(\d{{7}})|(\d{{7}})[^.]*? {k}\b", body) for k in keys}
                values = [a or b for k in keys for a, b in matches[k]]
            ordinal = re.search(r"the (first|second|third|fourth|last) [a-z]", question)
            if ordinal:
                values = [values[["first", "second", "third", "fourth", "last"].index(ordinal[1]) if ordinal[1] != "last" else -1]]  # fmt: skip  # noqa: E501
            reply = ", ".join(knows(text, values))[: generation_config.max_new_tokens]
            replies.append(TOKENIZER(reply.ljust(generation_config.max_new_tokens))["input_ids"])
        return torch.cat([input_ids, torch.tensor(replies)], dim=1)

    model.generate = generate
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_a_prompt_has_exactly_its_length_and_the_needle_at_its_depth(kind, depth):
    sample = prompt(kind, depth)
    text = TOKENIZER.decode(sample.ids)
    assert len(sample.ids) == 1500
    assert all(answer in text for answer in sample.answers)
    at_depth = [a for a in sample.answers if sample.position <= text.index(a) < sample.position + 80]
    assert len(at_depth) == 1 and (kind == "multivalue" or at_depth == sample.answers[:1])
    # other needles before it may move it, by no more than their own length
    length_of_needles = 4 * 75
    assert abs(sample.position - depth * (1500 - length_of_needles)) <= length_of_needles + 32


def test_needles_stand_between_sentences():
    sample = prompt("single", 0.5)
    before = TOKENIZER.decode(sample.ids[: sample.position])
    assert before.endswith((".", "!", "?"))


def test_ordinals_ask_for_the_place_in_the_text():
    for seed in range(12):
        sample = prompt("ordinal", depth=0.6, seed=seed)
        text = TOKENIZER.decode(sample.ids)
        values = re.findall(r"is: (\d{7})\.", text)
        name = re.search(r"the (\w+) special magic number", text)[1]
        place = {"first": 0, "second": 1, "third": 2, "last": 3}[name]
        assert values[place] == sample.answers[0] and len(values) == 4
        assert sample.score(f" {sample.answers[0]} and {values[place - 1]}") == 1
        assert sample.score(f" {values[place - 1]}, {sample.answers[0]}") == 0


def test_the_score_is_the_share_of_values_found():
    sample = prompt("multivalue")
    assert sample.score(" ".join(sample.answers)) == 1
    assert sample.score(" ".join(sample.answers[:3])) == 0.75
    assert sample.score("none") == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_always_finds_scores_one_and_one_that_never_does_scores_zero(kind):
    def grid(model):
        options = {"depths": (0.0, 0.5, 1.0), "trials": 2, "batch_size": 4, "progress": False}
        if kind == "passkey":
            return passkey(model, TOKENIZER, [600, 900], **options)
        return niah(model, TOKENIZER, TEXT, [800, 1600], kind=kind, **options)

    always, never = grid(lookup()), grid(lookup(lambda text, values: []))
    assert always.accuracy == [[1.0] * 3] * 2 and never.accuracy == [[0.0] * 3] * 2
    assert len(always.scores) == len(always.places) == 12
    assert RetrievalGrid.from_dict(always.to_dict()) == always
    assert always.table()[0]["as_written"] == 1 and always.by_length == [1, 1]


def test_a_model_that_reads_the_first_half_only_shows_where_it_stops():
    first_half = lookup(lambda text, values: [v for v in values if text.index(v) < len(text) / 2])
    depths = [0.05, 0.25, 0.4, 0.65, 0.8, 0.95]
    grid = niah(first_half, TOKENIZER, TEXT, [2000], depths=depths, trials=3, progress=False)
    assert grid.accuracy == [[1, 1, 1, 0, 0, 0]]
    by_place = accuracy_by_answer_position(grid, n_bins=2)
    assert by_place.accuracy == [1, 0] and by_place.spread == 1 and by_place.count == [9, 9]
    assert by_place.mid_third_gap == pytest.approx(0)


def test_replies_do_not_depend_on_how_the_prompt_is_read_in():
    model = tiny(vocab_size=CHARACTERS, max_position_embeddings=512)
    prompts = [TOKENIZER(TEXT[k : k + 100])["input_ids"] for k in (0, 7)]
    whole = greedy_answers(model, TOKENIZER, prompts, max_new_tokens=12)
    assert greedy_answers(model, TOKENIZER, prompts, max_new_tokens=12, prefill_chunk=13) == whole
    model.generation_config.do_sample, model.generation_config.temperature = True, 5.0
    assert greedy_answers(model, TOKENIZER, prompts, max_new_tokens=12) == whole


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "dual"}, "kind must be one of passkey, single, .*, got 'dual'"),
        ({"depths": [1.5]}, r"depths must be in \[0, 1\], got \[1.5\]"),
        ({"trials": 0}, "trials at least 1"),
        ({"lengths": [100]}, "too few for 1 needle"),
        ({"lengths": [9000]}, "the haystack has 4080 tokens"),
        ({"kind": "multikey", "n_needles": 1}, "'multikey' needs n_needles >= 2, got 1"),
        ({"kind": "ordinal", "n_needles": 9}, "'ordinal' needs n_needles <= 8, got 9"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        niah(lookup(), TOKENIZER, TEXT, arguments.pop("lengths", [1000]), progress=False, **arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_wordings_tell_the_same_draws_in_other_words(kind):
    n_needles = 1 if kind in ("passkey", "single") else 4
    ids = TOKENIZER(TEXT)["input_ids"]
    prompts = [
        make_prompt(
            kind, TOKENIZER, ids, n_tokens=1500, depth=0.5, n_needles=n_needles, rng=random.Random(0), wording=w
        )
        for w in ALL_WORDINGS
    ]
    assert len(prompts) >= 4 and [p.wording for p in prompts] == list(ALL_WORDINGS)
    assert all(p.answers == prompts[0].answers and len(p.ids) == 1500 for p in prompts)
    assert len({re.sub(r"\W*\d+\W*", "", p.question) for p in prompts}) == len(prompts)
    needles = [TOKENIZER.decode(p.ids[p.position : p.position + 60]) for p in prompts]
    assert len({re.sub(r"[a-z]+-[a-z]+|\d+", "", n)[:12] for n in needles}) == len(prompts)
    for p in prompts:
        text = TOKENIZER.decode(p.ids)
        assert text.endswith(p.question) and all(answer in text for answer in p.answers)
        # no answer stands in the question
        assert not any(answer in p.question for answer in p.answers)
    with pytest.raises(ValueError, match="wording must be from 0 to 3, got 4"):
        make_prompt(kind, TOKENIZER, ids, n_tokens=1500, depth=0.5, n_needles=4, rng=random.Random(0), wording=4)


def test_the_first_wording_is_that_of_the_papers():
    passkeys = prompt("passkey")
    text = TOKENIZER.decode(passkeys.ids)
    assert f" The pass key is {passkeys.answers[0]}. Remember it. {passkeys.answers[0]} is the pass key." in text
    assert text.endswith("\nWhat is the pass key? The pass key is")
    assert "The grass is green." in PASSKEY_WORDINGS[0].filler
    text = TOKENIZER.decode(prompt("multivalue").ids)
    assert re.search(r"\nWhat are all the special magic numbers for (\S+) mentioned in the text above\? The ", text)


@pytest.mark.parametrize("kind", ["passkey", "multikey"])
def test_a_cell_holds_as_many_prompts_as_asked_all_different_all_wordings_equally(kind, monkeypatch):
    """Two hundred of them, and the same for every model."""
    prompts = []

    def answer(model, questions, **_):
        prompts.extend(tuple(q.prompt) for q in questions)
        reply = Reply(TOKENIZER(model)["input_ids"], [0] * 50)
        return [reply] * len(questions)

    monkeypatch.setattr(retrieval, "ask_greedily", answer)
    options = {"trials": 20, "progress": False, "batch_size": 50}

    def grid(model):
        if kind == "passkey":
            return passkey(model, TOKENIZER, [500], **options)
        return niah(model, TOKENIZER, TEXT, [900], kind=kind, **options)

    first, second = grid("nothing"), grid("other")
    assert len(set(prompts[:200])) == len(first.scores) == 200 and prompts[:200] == prompts[200:]
    assert first.prompt_hashes == second.prompt_hashes and first.wordings == second.wordings
    assert {w: first.wordings.count(w) for w in ALL_WORDINGS} == dict.fromkeys(ALL_WORDINGS, 50)
    for depth in range(10):
        assert {first.wordings[20 * depth : 20 * depth + 20].count(w) for w in ALL_WORDINGS} == {5}
    assert {reply["reply"] for reply in second.replies} == {"other"}
    assert [reply["wording"] for reply in first.replies] == list(ALL_WORDINGS)
    haystack = prompt_grid.passkey_haystacks if kind == "passkey" else prompt_grid.text_haystacks
    assert len(haystack(TOKENIZER, *(() if kind == "passkey" else (TEXT,)), [900])) == (4 if kind == "passkey" else 1)


def test_a_model_that_understands_one_wording_only_shows_so():
    grid = passkey(
        lookup(lambda text, values: values if "pass key" in text else []),
        TOKENIZER,
        [600],
        depths=(0.2, 0.5),
        trials=4,
        progress=False,
    )
    assert grid.by_wording(600) == {0: 1.0, 1: 0.0, 2: 0.0, 3: 0.0} and grid.by_length == [0.25]
    assert "25 % at 600 tokens (0 to 100 by wording)" in grid.reading()[0]
    rows = [row for row in grid.table() if row["wording"] == 0]
    assert [(row["depth"], row["as_written"], row["prompts"]) for row in rows] == [("all", 1.0, 2)]
    assert [r["score"] for r in grid.replies] == [1, 0, 0, 0]
    assert grid.replies[0]["expected"] in grid.replies[0]["reply"] and not grid.replies[1]["reply"].strip()
    held_out = passkey(lookup(), TOKENIZER, [600], depths=(0.5,), trials=4, wordings=(1, 3), progress=False)
    assert held_out.wordings == [1, 3, 1, 3] and held_out.by_length == [1]
    with pytest.raises(ValueError, match=r"wordings must be some of \[0, 1, 2, 3\], got \[7\]"):
        passkey(lookup(), TOKENIZER, [600], wordings=(7,), progress=False)


@pytest.mark.parametrize("kind", KINDS)
def test_the_shortest_prompt_fits_and_hardly_less_does(kind):
    n = prompt_grid.shortest_prompt(kind, TOKENIZER, "auto")
    prompt_grid.check_retrieval(kind, TOKENIZER, [TEXT], [n], "auto")
    with pytest.raises(ValueError, match="tokens are too few"):
        prompt_grid.check_retrieval(kind, TOKENIZER, [TEXT], [n - 150], "auto")


PARTNERS = [("multikey", "multiquery"), ("multivalue", "ordinal")]


@pytest.mark.parametrize("kinds", PARTNERS, ids=" and ".join)
@pytest.mark.parametrize("chat", [False, True])
def test_kinds_that_ask_about_the_same_needles_share_their_text_prompt_by_prompt(kinds, chat):
    options = ([2000], (0.05, 0.5, 0.95), 4, 4, 0, "auto", ALL_WORDINGS)
    grids = {kind: PromptGrid(kind, TOKENIZER, *options) for kind in (*kinds, "single")}
    haystacks = prompt_grid.text_haystacks(TOKENIZER, TEXT, [2000])
    one, other = (grids[kind].of_length(2000, haystacks) for kind in kinds)
    for a, b in zip(one, other, strict=True):
        assert a.position == b.position and a.wording == b.wording and set(b.answers) & set(a.answers)
        assert len(a.ids) + grids[kinds[0]].new_tokens == len(b.ids) + grids[kinds[1]].new_tokens == 2000
        shared = next(k for k, (x, y) in enumerate(zip(a.ids, b.ids, strict=False)) if x != y)
        # all but the questions, and the text for which the other's longer question and reply leave no room
        assert shared >= 2000 - 64 - 300
        needles = re.findall(r"\d{7}", TOKENIZER.decode(a.ids[:shared]))
        assert len(needles) == 4
    # within a kind every prompt hides other needles: their scores are independent
    values = [frozenset(re.findall(r"\d{7}", TOKENIZER.decode(p.ids))) for p in one]
    assert len(set(values)) == len(values) and not frozenset.intersection(*values)


def test_grids_asked_together_are_those_of_each_kind_alone_and_read_less(monkeypatch):
    monkeypatch.setattr(reading, "_TOGETHER", {"cpu": 0})
    model, read = tiny(vocab_size=CHARACTERS), []
    model.model.layers[0].register_forward_hook(lambda *x: read.append(x[2].shape[:2].numel()))
    options = {"depths": (0.3, 0.8), "trials": 2, "progress": False}
    kinds = ("passkey", "multikey", "multivalue", "multiquery", "ordinal")
    together = rope_patch.eval.retrieval(model, TOKENIZER, TEXT, [900], kinds=kinds, **options)
    n_together = sum(read)
    read.clear()
    alone = {kind: niah(model, TOKENIZER, TEXT, [900], kind=kind, **options) for kind in kinds[1:]}
    alone["passkey"] = passkey(model, TOKENIZER, [900], **options)
    assert together == alone
    assert n_together < 0.8 * sum(read)


def test_teacher_forced_asks_for_every_digit_behind_the_right_ones():
    sample = prompt("multivalue")
    right = sample.right_reply
    assert TOKENIZER.decode(right) == " " + ", ".join(sample.answers)
    assert sample.forced_score(right) == 1
    digit = len(TOKENIZER(f" {sample.answers[0]},")["input_ids"]) + 3  # of the second answer
    assert sample.forced_score([*right[:digit], right[digit] + 1, *right[digit + 1 :]]) == 0.75
    # a space or a comma is no answer
    assert sample.forced_score([i if TOKENIZER.decode([i]).isdigit() else 0 for i in right]) == 1


@pytest.mark.parametrize("by_its_own", [False, True], ids=["in rows", "by generate"])
def test_both_measures_come_from_one_grid_and_are_named_apart(by_its_own):
    """A model that would write something else, and says each digit where the right ones stand before it."""
    model = tiny(vocab_size=CHARACTERS, attention="eager" if by_its_own else "sdpa")
    grid = passkey(model, TOKENIZER, [600], depths=(0.2, 0.7), trials=2, progress=False)
    prompts = PromptGrid("passkey", TOKENIZER, [600], (0.2, 0.7), 2, 1, 0, "auto", ALL_WORDINGS)
    expected = []
    with torch.no_grad():
        for p in prompts.of_length(600, prompt_grid.passkey_haystacks(TOKENIZER, [600])):
            logits = model(torch.tensor([[*p.ids, *p.right_reply]])).logits[0]
            expected.append(p.forced_score(logits[len(p.ids) - 1 : -1].argmax(-1).tolist()))
    assert grid.forced_scores == expected and grid.forced_by_length == [sum(expected) / 4]
    knows = replace(grid, scores=[0.0] * 4, accuracy=[[0.0, 0.0]], forced_scores=[1.0, 1.0, 1.0, 0.0])
    assert knows.headline() == {"passkey at 600, as written": 0, "passkey at 600, teacher-forced": 0.75}
    assert [(r["as_written"], r["teacher_forced"]) for r in knows.table()][:2] == [(0, 1), (0, 0.5)]
    said = knows.reading()
    assert (
        said[0].startswith("model, as written: 0 % at 600") and said[1] == "model, teacher-forced: 75 % at 600 tokens."
    )
    # as written is what models are compared by, and older results have it alone
    assert RetrievalGrid.column == "as_written"
    older = RetrievalGrid.from_dict({k: v for k, v in grid.to_dict().items() if k not in ("forced_scores", "said")})
    assert older.forced_by_length == [None] and older.table()[-1]["teacher_forced"] is None
