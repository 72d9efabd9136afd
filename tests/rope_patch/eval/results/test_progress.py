"""Bars move within a row, end at their total, and change nothing."""

import pytest
import torch
from support.characters import CHARACTERS, character_tokenizer
from support.tiny import gemma3, tiny, tokens

import rope_patch.eval.results.progress as progress
import rope_patch.generation.generation as generation
from rope_patch.eval import attention_distance, context_gain, loss_by_position, passkey, view_kl
from rope_patch.generation.decoding import Decoder


class Bar:
    """Stands for tqdm; keeps every place where it stood."""

    made = []

    def __init__(self, total, **options):
        self.total, self.n, self.places = total, 0, []
        Bar.made.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False

    @staticmethod
    def write(line):
        print(line)

    def update(self, n):
        self.n += n
        self.places.append(self.n)


@pytest.fixture
def bars(monkeypatch):
    Bar.made = []
    monkeypatch.setattr(progress, "tqdm", Bar)
    return Bar.made


MEASURES = {
    "loss by position": lambda m: loss_by_position(m, tokens(2, 40)),
    "context gain": lambda m: context_gain(m, tokens(2, 40), short=8, stride=8),
    "paper's gain": lambda m: context_gain(m, tokens(1, 40), kind="paper", short=8, stride=8),
    "attention": lambda m: attention_distance(m, tokens(2, 40), last=8),
    "view KL": lambda m: view_kl(m, tokens(2, 40), [0, 3]),
    "passkey": lambda m: passkey(m, character_tokenizer(), [300, 400], depths=(0.5,), trials=1),
}


@pytest.mark.parametrize("name", MEASURES)
def test_a_bar_moves_with_every_layer_and_ends_at_its_total(name, bars):
    model = tiny(vocab_size=CHARACTERS)
    MEASURES[name](model)
    (bar,) = bars
    assert bar.places == sorted(bar.places) and bar.n == pytest.approx(bar.total)
    assert len({round(p, 6) for p in bar.places}) >= 3 * 2, "three layers, two rows or lengths at the least"
    assert bar.places[0] < bar.total / 2
    assert not any(module._forward_hooks for module in model.modules())


def test_a_bar_changes_no_figure(bars):
    for model in (tiny(), gemma3()):
        rows = tokens(2, 30)
        shown, silent = loss_by_position(model, rows), loss_by_position(model, rows, progress=False)
        assert torch.equal(shown.loss[1:], silent.loss[1:])
    assert len(bars) == 2


def test_a_bar_of_retrieval_moves_while_the_last_replies_are_written(bars, monkeypatch):
    begun, real = [], Decoder.decode

    def decode(decoder, logits, lengths, limits, *rest):
        begun.append((bars[0].n, sum(limits)))
        return real(decoder, logits, lengths, limits, *rest)

    monkeypatch.setattr(Decoder, "decode", decode)
    passkey(tiny(vocab_size=CHARACTERS), character_tokenizer(), [400], depths=(0.5,), trials=3)
    (bar,) = bars
    ((place, to_be_written),) = begun
    assert place <= bar.total - to_be_written
    assert len([p for p in bar.places if place < p < bar.total]) > 3, "with the layers of every step"


def test_a_bar_counts_both_readings_of_a_model_that_is_asked_by_its_own_generate(bars, monkeypatch):
    begun, forced = [], generation._forced

    def second_reading(*args):
        begun.append(bars[0].n)
        return forced(*args)

    monkeypatch.setattr(generation, "_forced", second_reading)
    model = tiny(vocab_size=CHARACTERS, attention="eager")
    passkey(model, character_tokenizer(), [400], depths=(0.5,), trials=4)
    (bar,) = bars
    assert len(begun) == 4
    assert begun[0] <= 0.5 * bar.total and begun[-1] <= 0.9 * bar.total and bar.n == pytest.approx(bar.total)
