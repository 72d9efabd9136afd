"""Retrieval prompts, and grids of models that always or never find the needle."""

import random
import re

import pytest
import torch
from support.characters import CHARACTERS, character_tokenizer
from support.tiny import tiny

import rope_patch.eval.retrieval as retrieval
from rope_patch.eval import RetrievalGrid, accuracy_by_answer_position, niah, passkey
from rope_patch.eval.generation import greedy_answers
from rope_patch.eval.needles import KINDS, make_prompt
from rope_patch.eval.retrieval import ALL_WORDINGS
from rope_patch.eval.wordings import PASSKEY_WORDINGS

TOKENIZER = character_tokenizer()
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
                found = {k: re.findall(rf"{k}[^.]*?(\d{{7}})|(\d{{7}})[^.]*? {k}\b", body) for k in keys}
                values = [a or b for k in keys for a, b in found[k]]
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
    found = prompt(kind, depth)
    text = TOKENIZER.decode(found.ids)
    assert len(found.ids) == 1500
    assert all(answer in text for answer in found.answers)
    needle = text.index(found.answers[0])
    assert found.position <= needle < found.position + 80
    # other needles before it may move it, by no more than their own length
    length_of_needles = 4 * 75
    assert abs(found.position - depth * (1500 - length_of_needles)) <= length_of_needles + 32


def test_needles_stand_between_sentences():
    found = prompt("single", 0.5)
    before = TOKENIZER.decode(found.ids[: found.position])
    assert before.endswith((".", "!", "?"))


def test_ordinals_ask_for_the_place_in_the_text():
    for seed in range(12):
        found = prompt("ordinal", depth=0.6, seed=seed)
        text = TOKENIZER.decode(found.ids)
        values = re.findall(r"is: (\d{7})\.", text)
        name = re.search(r"the (\w+) special magic number", text)[1]
        place = {"first": 0, "second": 1, "third": 2, "last": 3}[name]
        assert values[place] == found.answers[0] and len(values) == 4
        assert found.score(f" {found.answers[0]} and {values[place - 1]}") == 1
        assert found.score(f" {values[place - 1]}, {found.answers[0]}") == 0


def test_the_score_is_the_share_of_values_found():
    found = prompt("multivalue")
    assert found.score(" ".join(found.answers)) == 1
    assert found.score(" ".join(found.answers[:3])) == 0.75
    assert found.score("none") == 0


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
    assert always.table()[0]["accuracy"] == 1 and always.by_length == [1, 1]


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
    found = [
        make_prompt(
            kind, TOKENIZER, ids, n_tokens=1500, depth=0.5, n_needles=n_needles, rng=random.Random(0), wording=w
        )
        for w in ALL_WORDINGS
    ]
    assert len(found) >= 4 and [p.wording for p in found] == list(ALL_WORDINGS)
    assert all(p.answers == found[0].answers and len(p.ids) == 1500 for p in found)
    assert len({re.sub(r"\W*\d+\W*", "", p.question) for p in found}) == len(found)
    needles = [TOKENIZER.decode(p.ids[p.position : p.position + 60]) for p in found]
    assert len({re.sub(r"[a-z]+-[a-z]+|\d+", "", n)[:12] for n in needles}) == len(found)
    for p in found:
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
    asked = []

    def answer(model, tokenizer, prompts, **_):
        asked.extend(map(tuple, prompts))
        return [model] * len(prompts)

    monkeypatch.setattr(retrieval, "greedy_answers", answer)
    options = {"trials": 20, "progress": False, "batch_size": 50}

    def grid(model):
        if kind == "passkey":
            return passkey(model, TOKENIZER, [500], **options)
        return niah(model, TOKENIZER, TEXT, [900], kind=kind, **options)

    one, other = grid("nothing"), grid("other")
    assert len(set(asked[:200])) == len(one.scores) == 200 and asked[:200] == asked[200:]
    assert one.prompt_hashes == other.prompt_hashes and one.wordings == other.wordings
    assert {w: one.wordings.count(w) for w in ALL_WORDINGS} == dict.fromkeys(ALL_WORDINGS, 50)
    for depth in range(10):
        assert {one.wordings[20 * depth : 20 * depth + 20].count(w) for w in ALL_WORDINGS} == {5}
    assert {reply["reply"] for reply in other.replies} == {"other"}
    assert [reply["wording"] for reply in one.replies] == list(ALL_WORDINGS)
    haystack = retrieval.passkey_haystacks if kind == "passkey" else retrieval.text_haystacks
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
    assert rows == [{"kind": "passkey", "length": 600, "depth": "all", "wording": 0, "accuracy": 1.0, "prompts": 2}]
    assert [r["score"] for r in grid.replies] == [1, 0, 0, 0]
    assert grid.replies[0]["expected"] in grid.replies[0]["reply"] and not grid.replies[1]["reply"].strip()
    held_out = passkey(lookup(), TOKENIZER, [600], depths=(0.5,), trials=4, wordings=(1, 3), progress=False)
    assert held_out.wordings == [1, 3, 1, 3] and held_out.by_length == [1]
    with pytest.raises(ValueError, match=r"wordings must be some of \[0, 1, 2, 3\], got \[7\]"):
        passkey(lookup(), TOKENIZER, [600], wordings=(7,), progress=False)


@pytest.mark.parametrize("kind", KINDS)
def test_the_shortest_prompt_fits_and_hardly_less_does(kind):
    n = retrieval.shortest_prompt(kind, TOKENIZER, "auto")
    retrieval.check_retrieval(kind, TOKENIZER, [TEXT], [n], "auto")
    with pytest.raises(ValueError, match="tokens are too few"):
        retrieval.check_retrieval(kind, TOKENIZER, [TEXT], [n - 150], "auto")
