"""Chats and texts that a model writes: what is kept of them, and that nothing else changes."""

import re

import pytest
import torch
from support.characters import CHARACTERS, character_tokenizer
from support.tiny import tiny

from rope_patch import patch_model, rope_view
from rope_patch.generation.kv_rows import KVRows
from rope_patch.views import Skip, Uniform
from trl_ext.rows import own_chats, own_texts

EOS = 2
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<eos>{% endfor %}" + (
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
FORM = re.compile(r"<bos>\[user\](.+)<eos>\[assistant\](.+)<eos>", re.DOTALL)


def chatty(template=TEMPLATE, attention="sdpa"):
    """A tiny model of 512 positions whose texts end, and its tokenizer."""
    tokenizer = character_tokenizer()
    tokenizer.chat_template = template
    model = tiny(vocab_size=CHARACTERS, max_position_embeddings=512, attention=attention)
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


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_chats_are_whole_and_a_seed_gives_them_again(attention):
    model, tokenizer = chatty(attention=attention)
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
        match = FORM.fullmatch(tokenizer.decode(chat))
        assert match and chat.count(EOS) == 2 and len(match[1]) < 20 and len(match[2]) < 30


def scripted(model, tokenizer, monkeypatch, turns, replies):
    """What is sampled is written down here: one text for each prompt of a batch."""
    prompts = []

    def generate(input_ids, attention_mask, **_):
        prompts.append(
            [tokenizer.decode(ids[mask.bool()]) for ids, mask in zip(input_ids, attention_mask, strict=True)]
        )
        texts = replies if "[assistant]" in prompts[-1][0] else turns
        said = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        width = max(map(len, said))
        return torch.cat([input_ids, torch.tensor([ids + [0] * (width - len(ids)) for ids in said])], 1)

    monkeypatch.setattr(model, "generate", generate)
    return prompts


TURNS = ["hi<eos>", "<eos>", " <eos>", "no end", "a<bos>b<eos>", "so?<eos>no"]
REPLIES = ["Good day", "Yes.<eos>more", "Hm", "Now", "No.<eos>", "<eos>"]


@pytest.mark.parametrize("keep_unfinished", [False, True])
def test_blank_and_unfinished_turns_are_left_out(keep_unfinished, monkeypatch):
    model, tokenizer = chatty()
    tokenizer.pad_token = "<unk>"
    prompts = scripted(model, tokenizer, monkeypatch, TURNS, REPLIES)
    options = {**HOT, "batch_size": 6, "keep_unfinished": keep_unfinished}
    chats = [tokenizer.decode(chat) for chat in own_chats(model, tokenizer, 3, **options)]
    hi, so = "<bos>[user]hi<eos>[assistant]", "<bos>[user]so?<eos>[assistant]"
    # two of each batch are questions, so three batches of them fill one of replies
    assert prompts[:4] == [*[["<bos>[user]"] * 6] * 3, [hi, so] * 3]
    if keep_unfinished:
        assert chats[0].startswith(f"{hi}Good day") and chats[1] == f"{so}Yes.<eos>"
        assert chats[2].startswith(f"{hi}Hm")
    else:
        assert chats == [f"{so}Yes.<eos>", f"{hi}No.<eos>", f"{so}Yes.<eos>"]


def test_a_base_model_writes_texts():
    model, tokenizer = chatty(None)
    options = {"max_tokens": 60, "temperature": 100.0, "batch_size": 4, "progress": False}
    texts = own_texts(model, tokenizer, 6, **options)
    assert texts == own_texts(model, tokenizer, 6, **options) and len({tuple(text) for text in texts}) == 6
    for text in texts:
        assert text[0] == 1 and 2 <= len(text) <= 61 and (len(text) == 61 or text[-1] == EOS)
        assert EOS not in text[:-1]


@pytest.mark.parametrize("in_rows", [True, False])
def test_batches_are_halved_where_memory_runs_out(in_rows, monkeypatch):
    model, tokenizer = chatty()
    options = {"max_tokens": 5, "temperature": 100.0, "progress": False}
    expected = own_texts(model, tokenizer, 3, batch_size=2, **options)
    make, whole, seen = KVRows.__init__, model.generate, []

    def full(n):
        seen.append(n)
        if n > 2:
            raise torch.OutOfMemoryError("full")

    if in_rows:
        monkeypatch.setattr(KVRows, "__init__", lambda rows, core, n, k: (full(n), make(rows, core, n, k))[1])
    else:
        generate = staticmethod(lambda input_ids, **kw: (full(len(input_ids)), whole(input_ids=input_ids, **kw))[1])
        monkeypatch.setattr(model, "generate", generate)
    texts = own_texts(model, tokenizer, 3, batch_size=8, **options)
    assert seen[:3] == [8, 4, 2] and len(texts) == 3
    assert texts == expected


def test_no_question_is_lost_where_memory_runs_out(monkeypatch):
    model, tokenizer = chatty()
    prompts = scripted(model, tokenizer, monkeypatch, ["a<eos>", "b<eos>", "c<eos>", "d<eos>"], ["yes<eos>"] * 2)
    answer = model.generate

    def generate(input_ids, **options):
        if len(input_ids) > 2 and len(prompts) == 1:
            raise torch.OutOfMemoryError("full")
        return answer(input_ids, **options)

    monkeypatch.setattr(model, "generate", generate)
    chats = own_chats(model, tokenizer, 4, **{**HOT, "batch_size": 4})
    assert [tokenizer.decode(chat)[11] for chat in chats] == list("abcd")
    assert [len(batch) for batch in prompts] == [4, 2, 2]


@pytest.mark.parametrize(
    ("options", "template", "message"),
    [
        ({}, None, "no chat template, so this is a base model: it writes no chats. Leave chats out, or take own_texts"),
        ({}, "{% for m in messages %}{{ m['content'] }} end{% endfor %}", "does not begin with a special token"),
        ({"temperature": 0}, TEMPLATE, "temperature must be a number above 0, got 0"),
        ({"max_reply_tokens": 500}, TEMPLATE, "must fit into the trained window of 512 tokens, got 539"),
    ],
)
def test_what_cannot_be_sampled_is_refused(options, template, message):
    model, tokenizer = chatty(template)
    with pytest.raises(ValueError, match=message):
        own_chats(model, tokenizer, 1, **{**HOT, **options})


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ("no end", "in 10 batches of 8 the model wrote no user's text that ends within 20 tokens: allow more"),
        ("hi<eos>", "in 10 batches of 8 the model wrote no reply that ends within 30 tokens: allow more"),
    ],
)
def test_a_model_that_writes_no_chats_is_told(turn, message, monkeypatch):
    model, tokenizer = chatty()
    scripted(model, tokenizer, monkeypatch, [turn] * 8, ["no end"] * 8)
    with pytest.raises(ValueError, match=message):
        own_chats(model, tokenizer, 1, **HOT)


def test_nothing_is_sampled_under_a_view():
    model, tokenizer = chatty()
    patch_model(model, "skip", skip=Uniform(1, 100))
    options = {"max_tokens": 9, "temperature": 100.0, "batch_size": 4, "progress": False}
    assert own_texts(model, tokenizer, 1, **options), "a view for training is not in force"
    refused = pytest.raises(ValueError, match="a view of the RoPE indices is in force on the model")
    with rope_view(model, Skip(skip=Uniform(1, 100))), refused:
        own_texts(model, tokenizer, 1, **options)


def test_bars_show_chats_and_tokens(capsys):
    model, tokenizer = chatty()
    own_chats(model, tokenizer, 2, **{**HOT, "progress": True})
    shown = capsys.readouterr().err
    assert "chats of the model: 100%" in shown and "8 user's turns, at most" in shown and "replies, at most" in shown
    own_texts(model, tokenizer, 2, max_tokens=9, temperature=100.0, progress=False)
    assert not capsys.readouterr().err
