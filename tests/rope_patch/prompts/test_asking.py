"""Rows and prompts begin as the tokenizer begins a text; instruct models are asked through their chat template."""

import random
import re
import sys

import pytest
import torch
from support.characters import CHARACTERS, character_tokenizer
from support.tiny import tiny
from tokenizers import processors

from rope_patch.eval import niah, passkey, text_rows
from rope_patch.generation.reading import Reply
from rope_patch.prompts.needles import KINDS, make_prompt

BOS = 1
TEXT = "It was a dark night. The wind blew! Who was there? " * 80
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if enable_thinking is false %}(no thoughts){% endif %}{% endif %}"
)


def bos_tokenizer(chat_template=None):
    tokenizer = character_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def test_rows_begin_as_a_text_and_lose_nothing():
    tokenizer = bos_tokenizer()
    rows = text_rows(tokenizer, ["abcdefghijklmnopqrstuvwxyz", "0123", "456789"], seq_len=10, n_rows=3, max_per_text=2)
    assert [tokenizer.decode(row) for row in rows] == ["<bos>abcdefghi", "<bos>jklmnopqr", "<bos>012345678"]
    assert text_rows(character_tokenizer(), ["abcdef"], seq_len=3, n_rows=1)[0, 0] != BOS


def prompt(kind, tokenizer, chat, n_tokens=1500, depth=0.4):
    haystack = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    n_needles = 1 if kind in ("passkey", "single") else 4
    rng = random.Random(0)
    return make_prompt(
        kind, tokenizer, haystack, n_tokens=n_tokens, depth=depth, n_needles=n_needles, rng=rng, chat=chat
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_in_chat_is_what_the_template_makes_of_it(kind):
    tokenizer = bos_tokenizer(TEMPLATE)
    sample = prompt(kind, tokenizer, chat=True)
    assert len(sample.ids) == 1500
    text = tokenizer.decode(sample.ids)
    content, beginning = re.fullmatch(
        r"<bos>\[user\](.*)\[end\]\[assistant\]\(no thoughts\)(The [^\]]*)", text, re.DOTALL
    ).groups()
    message = [{"role": "user", "content": content}]
    chat = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    assert tokenizer(chat + beginning, add_special_tokens=False)["input_ids"] == sample.ids
    assert content.endswith("?") and re.fullmatch(r"The .* (is|are):?", beginning)
    assert all(answer in content for answer in sample.answers) and sample.ids.count(BOS) == 1
    assert any(text[: 5 + 1 + sample.position].count(answer) == 0 for answer in sample.answers)


@pytest.mark.parametrize("kind", KINDS)
def test_a_raw_prompt_begins_as_a_text_and_ends_where_the_answer_begins(kind):
    tokenizer = bos_tokenizer(TEMPLATE)
    sample = prompt(kind, tokenizer, chat=False)
    assert len(sample.ids) == 1500 and sample.ids[0] == BOS and sample.ids.count(BOS) == 1
    text = tokenizer.decode(sample.ids)
    assert "[user]" not in text and re.search(r"\nWhat [^?]*\? The [^?]* (is|are):?$", text)


@pytest.mark.parametrize(
    ("choice", "has_template", "chat"), [("auto", True, True), ("auto", False, False), ("off", True, False)]
)
def test_grids_ask_through_the_template_that_there_is(choice, has_template, chat, monkeypatch):
    retrieval = sys.modules["rope_patch.eval.measures.retrieval"]
    tokenizer, prompts = bos_tokenizer(TEMPLATE if has_template else None), []

    def answer(model, questions, **_):
        prompts.extend(tokenizer.decode(q.prompt) for q in questions)
        return [Reply([], [0] * 50)] * len(questions)

    monkeypatch.setattr(retrieval, "ask_greedily", answer)
    options = {"depths": (0.5,), "trials": 1, "progress": False, "chat_template": choice}
    passkey(None, tokenizer, [500], **options)
    niah(None, tokenizer, TEXT, [600], kind="multikey", **options)
    assert ["[user]" in text for text in prompts] == [chat, chat]


def test_a_template_that_is_not_there_or_shows_no_message_is_refused():
    options = {"depths": (0.5,), "trials": 1, "progress": False}
    with pytest.raises(ValueError, match="chat_template='on' needs a tokenizer with a chat template"):
        passkey(None, bos_tokenizer(), [500], chat_template="on", **options)
    with pytest.raises(ValueError, match="must be one of auto, on, off, got 'yes'"):
        passkey(None, bos_tokenizer(), [500], chat_template="yes", **options)
    with pytest.raises(ValueError, match="shows a user's message 0 times"):
        prompt("single", bos_tokenizer("{{ bos_token }}"), chat=True)


@pytest.mark.slow
def test_lm_eval_asks_through_the_template_within_the_length():
    from rope_patch.eval import ruler, ruler_prompts

    tokenizer, seen = bos_tokenizer(TEMPLATE), []
    model = tiny(vocab_size=CHARACTERS, max_position_embeddings=4096)

    def generate(input_ids, **_):
        seen.extend(tokenizer.decode(row[row != tokenizer.pad_token_id]) for row in input_ids)
        return torch.cat([input_ids, torch.full((len(input_ids), 1), 2)], dim=1)

    model.generate = generate
    for choice in ("auto", "off"):
        how = {"progress": False, "chat_template": choice}
        ruler(model, tokenizer, ruler_prompts(tokenizer, [1500], tasks=["niah_single_1"], samples=2, **how), **how)
    lengths = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in seen]
    assert len(seen) == 4 and all(text.count("<bos>") == 1 and text.startswith("<bos>") for text in seen)
    assert ["[user]" in text and "[assistant]" in text for text in seen] == [True, True, False, False]
    assert all(1000 < n <= 1500 for n in lengths), lengths
