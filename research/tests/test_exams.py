"""What an exam asks can be answered from the text, and only right answers count."""

import random
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from support.characters import character_tokenizer
from support.tiny import MIXED, SLIDING_WINDOW, VOCAB, gemma3, tiny

import exams
from exams import KINDS, NEEDLES, accuracy, make_exam, needle_exam
from rope_patch.rope.rotary import find_decoder

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
        of_key = [(place, v) for place, k, v in facts if k == key]
        place, right = of_key[ORDINALS.index(which) if kind == "ordinal" else 0]
        assert len(of_key) == (6 if kind == "ordinal" else 1)
        assert value == right and depth == place / LENGTH
        assert tokenizer.decode(made.ids[first:end]) == f" {value}."
    assert sum(made.answered) == 8 * len(" 1234567.")


def test_exams_depend_on_the_generator_alone():
    assert exam("ordinal")[1] == exam("ordinal")[1] != exam("ordinal", seed=1)[1]


@pytest.mark.parametrize("wrong", [None, 0, 5])
def test_an_answer_is_right_when_all_of_its_tokens_are(wrong, monkeypatch):
    _, made, _ = exam("multikey")
    right = torch.tensor(made.ids)
    if wrong is not None:
        right[made.answers[wrong][1] - 3] += 1

    def oracle(model, ids, places):
        """The most probable token at each place is the one that `right` has there."""
        assert ids.tolist() == made.ids
        return right[places]

    monkeypatch.setattr(exams, "predicted", oracle)
    graded = accuracy(SimpleNamespace(device="cpu", training=False), made)
    assert [d for d, _ in graded] == made.depths
    assert [ok for _, ok in graded] == [i != wrong for i in range(8)]


@pytest.mark.parametrize("make", [tiny, gemma3, partial(tiny, "qwen3", **MIXED)], ids=["llama", "gemma3", "qwen3"])
@torch.no_grad()
def test_what_is_predicted_is_the_most_probable_token_of_the_model(make):
    model = make().double()
    ids = torch.randint(VOCAB, (6 * SLIDING_WINDOW,))
    places = torch.tensor([1, 5, SLIDING_WINDOW, 3 * SLIDING_WINDOW + 1, len(ids) - 1])
    expected = model(ids[None]).logits[0, places - 1].argmax(-1)
    masks = []
    for layer in find_decoder(model).layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
        )
    assert exams.predicted(model, ids, places).tolist() == expected.tolist()
    begin = len(masks) - len(find_decoder(model).layers)
    assert all(mask is None or mask.numel() < len(ids) for mask in masks[begin:])


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
