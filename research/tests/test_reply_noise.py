"""Noise that a share and a seed stand for, and the table of what it moves."""

import json
import sys

import pytest
import torch
from support.characters import CHARACTERS, chat_tokenizer
from support.tiny import tiny

import keeping
import reply_noise
from rope_patch.prompts.asking import Frame


def test_noise_goes_by_each_matrix_and_the_seed_and_leaves_the_rest():
    models = [tiny("llama", hidden_size=128, intermediate_size=256) for _ in range(4)]
    for model, (share, seed) in zip(models[1:], ((0.1, 0), (0.1, 0), (0.1, 1)), strict=True):
        reply_noise.add_noise(model, share, seed)
    states = [model.state_dict() for model in models]
    for name, weight in states[0].items():
        first, again, other = (state[name] for state in states[1:])
        assert torch.equal(first, again)
        if "layers" in name and weight.dim() == 2:
            added = first - weight
            assert added.std().item() == pytest.approx(0.1 * weight.std().item(), rel=0.1)
            assert abs(added.mean()) < 0.02 * weight.std()
            assert not torch.equal(first, other)
        else:
            assert torch.equal(first, weight)


@pytest.fixture
def chats(tmp_path, monkeypatch):
    """A model's folder, and a file of chats."""
    tokenizer = chat_tokenizer()
    tiny("llama", vocab_size=CHARACTERS, max_position_embeddings=2048).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    frame = Frame.of(tokenizer, True)
    turn = tokenizer(frame.turn, add_special_tokens=False)["input_ids"]
    own = tmp_path / "own.json"
    own.write_text(json.dumps([[*frame.begin, 30 + k, 31, *turn, *([32, 33] * 10)] for k in range(6)]))
    monkeypatch.setattr(keeping, "REPLY", 4)
    return own


def call(monkeypatch, arguments):
    monkeypatch.setattr(sys, "argv", f"reply_noise.py {arguments}".split())
    reply_noise.main()


def test_more_noise_is_further_from_the_native_model(chats, monkeypatch, capsys):
    out = chats.with_name("out.jsonl")
    call(monkeypatch, f"{chats.parent} --own {chats} --chats 5 --shares 0.1 0.4 --seeds 0 1 --out {out}")
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["share"], line["seed"]) for line in lines] == [(0, 0), (0.1, 0), (0.4, 0), (0.1, 1), (0.4, 1)]
    kls = [line["own"]["kl"] for line in lines]
    assert kls[0] == 0 < kls[1] < kls[2] and kls[1] != kls[3]
    capsys.readouterr()
    call(monkeypatch, f"--table {out}")
    table = capsys.readouterr().out
    assert "| 0 | 0 | 0.000 |" in table and table.count("| 0.1 |") == 2
    assert "5 replies; float32, cpu." in table


def test_what_cannot_be_measured_is_said(chats, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        call(monkeypatch, f"{chats.parent} --own {chats} --shares 0")
    assert "shares must be above 0" in capsys.readouterr().err
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(chats.parent)
    (chats.parent / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(SystemExit):
        call(monkeypatch, f"{chats.parent} --own {chats}")
    assert "no chat template" in capsys.readouterr().err
