"""Prompts of retrieval: lengths, depths, what is asked, how a reply is scored."""

import random
import re

import pytest
from support.characters import spaced_tokenizer
from support.retrieval import TEXT, TOKENIZER, prompt

from rope_patch.eval.measures.prompt_grid import ALL_WORDINGS
from rope_patch.prompts.needles import KINDS, make_prompt
from rope_patch.prompts.wordings import PASSKEY_WORDINGS


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


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "several"])  # which has one wording
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


def test_the_first_wording_is_that_of_the_papers():
    passkeys = prompt("passkey")
    text = TOKENIZER.decode(passkeys.ids)
    assert f" The pass key is {passkeys.answers[0]}. Remember it. {passkeys.answers[0]} is the pass key." in text
    assert text.endswith("\nWhat is the pass key? The pass key is")
    assert "The grass is green." in PASSKEY_WORDINGS[0].filler
    text = TOKENIZER.decode(prompt("multivalue").ids)
    assert re.search(r"\nWhat are all the special magic numbers for (\S+) mentioned in the text above\? The ", text)


def test_teacher_forced_asks_for_every_digit_behind_the_right_ones():
    sample = prompt("multivalue")
    right = sample.right_reply
    assert TOKENIZER.decode(right) == " " + ", ".join(sample.answers)
    assert sample.forced_score(right) == 1
    digit = len(TOKENIZER(f" {sample.answers[0]},")["input_ids"]) + 3  # of the second answer
    assert sample.forced_score([*right[:digit], right[digit] + 1, *right[digit + 1 :]]) == 0.75
    # a space or a comma is no answer
    assert sample.forced_score([i if TOKENIZER.decode([i]).isdigit() else 0 for i in right]) == 1


def test_answers_and_needles_have_the_tokens_that_a_text_has_there():
    """Of a tokenizer of Llama 2's kind, which puts a space before all that it is given."""
    tokenizer = spaced_tokenizer()
    sample = make_prompt(
        "multiquery",
        tokenizer,
        tokenizer("It rained. " * 100, add_special_tokens=False)["input_ids"],
        n_tokens=600,
        depth=0.5,
        n_needles=2,
        rng=random.Random(0),
    )
    text = f"are {', '.join(sample.answers)}"
    begun = tokenizer("are", add_special_tokens=False)["input_ids"]
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert sample.right_reply == whole[len(begun) :]
    shown = tokenizer.convert_ids_to_tokens(sample.ids)
    assert all(pair != ("▁", "▁") for pair in zip(shown, shown[1:], strict=False)), "no text has two spaces"
    assert tokenizer.convert_ids_to_tokens(tokenizer(" 7")["input_ids"]) == ["▁", "▁", "7"]
