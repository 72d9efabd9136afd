"""Retrieval prompts, and grids of models that always or never find the needle."""

import random
import re

import pytest
import torch
from support.characters import CHARACTERS, character_tokenizer
from support.tiny import tiny

from rope_patch.eval import RetrievalGrid, accuracy_by_answer_position, niah, passkey
from rope_patch.eval.generation import greedy_answers
from rope_patch.eval.needles import KINDS, make_prompt

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
