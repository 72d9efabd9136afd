"""Chats and texts that a model writes: what is kept of them, and that nothing else changes."""

import re

import pytest
import torch
from support.characters import CHARACTERS, character_tokenizer
from support.tiny import tiny

from rope_patch import patch_model, rope_view
from rope_patch.views import Skip
from trl_ext.rows import own_chats, own_texts

EOS = 2
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<eos>{% endfor %}" + (
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
FORM = re.compile(r"<bos>\[user\](.+)<eos>\[assistant\](.+)<eos>", re.DOTALL)


def chatty(template=TEMPLATE):
    """A tiny model of 512 positions whose texts end, and its tokenizer."""
    tokenizer = character_tokenizer()
    tokenizer.chat_template = template
    model = tiny(vocab_size=CHARACTERS, max_position_embeddings=512)
    more = torch.zeros(CHARACTERS)
    more[EOS], more[[0, 1, 3, 127, 128, 129]] = 300.0, -1e9
    model.lm_head.register_forward_hook(lambda _, __, logits: logits + more)
    return model, tokenizer


# so hot that each letter is about as likely as any other, and an end twenty times as likely
HOT = {
    "max_user_tokens": 20,
    "max_reply_tokens": 30,
    "temperature": 100.0,
    "batch_size": 8,
    "progress": False,
}


def test_chats_are_whole_and_a_seed_gives_them_again():
    model, tokenizer = chatty()
    model.train()
    model.generation_config.update(top_k=1, repetition_penalty=9.0)
    state = torch.get_rng_state()
    chats = own_chats(model, tokenizer, 5, seed=3, **HOT)
    assert torch.equal(torch.get_rng_state(), state) and model.training and model.generation_config.top_k == 1
    torch.rand(7)
    assert own_chats(model, tokenizer, 5, seed=3, **HOT) == chats != own_chats(model, tokenizer, 5, seed=4, **HOT)
    assert own_chats(model, tokenizer, 2, seed=3, **HOT) == chats[:2]
    assert len({tuple(chat) for chat in chats}) == 5
    for chat in chats:
        found = FORM.fullmatch(tokenizer.decode(chat))
        assert found and chat.count(EOS) == 2 and len(found[1]) < 20 and len(found[2]) < 30


def scripted(model, tokenizer, monkeypatch, turns, replies):
    """What is sampled is written down here."""
    prompts = []

    def generate(input_ids, attention_mask, **_):
        texts = turns if len(prompts) % 2 == 0 else replies
        prompts.append(
            [tokenizer.decode(ids[mask.bool()]) for ids, mask in zip(input_ids, attention_mask, strict=True)]
        )
        said = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts[: len(input_ids)]]
        width = max(map(len, said))
        return torch.cat([input_ids, torch.tensor([ids + [0] * (width - len(ids)) for ids in said])], 1)

    monkeypatch.setattr(model, "generate", generate)
    return prompts


TURNS = ["hi<eos>", "<eos>", " <eos>", "no end", "a<bos>b<eos>", "so?<eos>no"]
REPLIES = ["Good day", "Yes.<eos>more"]


@pytest.mark.parametrize("keep_unfinished", [False, True])
def test_blank_and_unfinished_turns_are_left_out(keep_unfinished, monkeypatch):
    model, tokenizer = chatty()
    tokenizer.pad_token = "<unk>"
    prompts = scripted(model, tokenizer, monkeypatch, TURNS, REPLIES)
    options = {**HOT, "batch_size": 6, "keep_unfinished": keep_unfinished}
    chats = [tokenizer.decode(chat) for chat in own_chats(model, tokenizer, 2, **options)]
    assert prompts[:2] == [["<bos>[user]"] * 6, ["<bos>[user]hi<eos>[assistant]", "<bos>[user]so?<eos>[assistant]"]]
    finished = "<bos>[user]so?<eos>[assistant]Yes.<eos>"
    if keep_unfinished:
        assert chats[0].startswith("<bos>[user]hi<eos>[assistant]Good day") and chats[1] == finished
    else:
        assert chats == [finished] * 2


def test_a_base_model_writes_texts():
    model, tokenizer = chatty(None)
    options = {"max_tokens": 60, "temperature": 100.0, "batch_size": 4, "progress": False}
    texts = own_texts(model, tokenizer, 6, **options)
    assert texts == own_texts(model, tokenizer, 6, **options) and len({tuple(text) for text in texts}) == 6
    for text in texts:
        assert text[0] == 1 and 2 <= len(text) <= 61 and (len(text) == 61 or text[-1] == EOS)
        assert EOS not in text[:-1]


def test_batches_are_halved_where_memory_runs_out(monkeypatch):
    model, tokenizer = chatty()
    whole, seen = model.generate, []

    def generate(input_ids, **options):
        seen.append(len(input_ids))
        if len(input_ids) > 2:
            raise torch.OutOfMemoryError("full")
        return whole(input_ids=input_ids, **options)

    monkeypatch.setattr(model, "generate", generate)
    assert own_texts(model, tokenizer, 3, max_tokens=5, temperature=100.0, batch_size=8, progress=False)
    assert seen[:3] == [8, 4, 2]


@pytest.mark.parametrize(
    ("options", "template", "message"),
    [
        ({}, None, "no chat template, so this is a base model: it writes no chats. Leave chats out, or take own_texts"),
        ({}, "{% for m in messages %}{{ m['content'] }} end{% endfor %}", "does not begin with a special token"),
        ({"temperature": 0}, TEMPLATE, "temperature must be a number above 0, got 0"),
        ({"max_user_tokens": 0}, TEMPLATE, "max_user_tokens must be an integer of at least 1"),
        ({"max_reply_tokens": 500}, TEMPLATE, "must fit into the trained window of 512 tokens, got 539"),
        ({"batch_size": 0}, TEMPLATE, "batch_size must be an integer of at least 1, got 0"),
    ],
)
def test_what_cannot_be_sampled_is_refused(options, template, message):
    model, tokenizer = chatty(template)
    with pytest.raises(ValueError, match=message):
        own_chats(model, tokenizer, 1, **{**HOT, **options})


def test_a_model_that_writes_no_chats_is_told(monkeypatch):
    model, tokenizer = chatty()
    scripted(model, tokenizer, monkeypatch, ["no end"] * 8, [])
    monkeypatch.setattr(model, "generate", lambda input_ids, **_: torch.cat([input_ids, input_ids], 1))
    with pytest.raises(ValueError, match=r"in 10 batches of 8 the model wrote no user's text and reply that both end"):
        own_chats(model, tokenizer, 1, **HOT)


def test_nothing_is_sampled_under_a_view():
    model, tokenizer = chatty()
    patch_model(model, "skip", max_skip=100)
    options = {"max_tokens": 9, "temperature": 100.0, "batch_size": 4, "progress": False}
    assert own_texts(model, tokenizer, 1, **options), "a view for training is not in force"
    refused = pytest.raises(ValueError, match="a view of the RoPE indices is in force on the model")
    with rope_view(model, Skip(max_skip=100)), refused:
        own_texts(model, tokenizer, 1, **options)


def test_bars_show_chats_and_tokens(capsys):
    model, tokenizer = chatty()
    own_chats(model, tokenizer, 2, **{**HOT, "progress": True})
    shown = capsys.readouterr().err
    assert "chats of the model: 100%" in shown and "8 user's turns, at most" in shown and "replies, at most" in shown
    own_texts(model, tokenizer, 2, max_tokens=9, temperature=100.0, progress=False)
    assert not capsys.readouterr().err
