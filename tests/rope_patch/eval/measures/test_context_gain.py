"""Context gain against brute force, one target at a time."""

import pytest
import torch
from support.tiny import tiny, tokens

from rope_patch import rope_view
from rope_patch.eval import context_gain


def ce(model, context, target):
    """Cross-entropy of one token after `context`, from the logits."""
    with torch.no_grad():
        return -model(context[None]).logits[0, -1].log_softmax(-1)[target].item()


@pytest.mark.parametrize(
    ("family", "stride"), [("llama", 1), ("qwen3", 3), ("mistral", 8), ("mistral-sliding", 3), ("mistral-sliding", 40)]
)
def test_exact_is_brute_force(family, stride):
    model = tiny(family, dtype=torch.float64)
    rows, short = tokens(2, 30), 5
    result = context_gain(model, rows, short=short, stride=stride, batch_size=3, n_bins=4, progress=False)
    gain = torch.zeros(30 - short, dtype=torch.float64)
    for row in rows:
        for i in range(short, 30):
            first = (i - short) // stride * stride  # targets of a window share their start
            assert short <= i - first < short + stride
            gain[i - short] += (ce(model, row[first:i], row[i]) - ce(model, row[:i], row[i])) / 2
    assert result.total == pytest.approx(gain.mean().item(), abs=1e-5)
    for a, b, value in zip(result.edges, result.edges[1:], result.gain, strict=False):
        assert value == pytest.approx(gain[a - short : b - short].mean().item(), abs=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_paper_kind_cuts_the_cache_and_restarts_positions(family):
    """Against a float64 pass by hand: keys keep the rotation of the block that they were computed in."""
    model = tiny(family, "eager", dtype=torch.float64)
    row, short, stride = tokens(1, 20)[0], 6, 4
    actual = context_gain(model, row[None], kind="paper", short=short, stride=stride, progress=False)
    # block b sees itself and at most `short` cached keys; a cached key was rotated by its own block's position
    position = {i: i for i in range(short)} | {i: short + (i - short) % stride for i in range(short, 20)}
    with torch.no_grad():
        index = torch.tensor([[position[i] for i in range(20)]])
        block = [0 if i < short else 1 + (i - short) // stride for i in range(20)]
        start = {b: block.index(b) for b in set(block)}
        # which keys a query sees: those of its own block before it, and the `short` tokens before the block
        sees = torch.tensor([[j <= i and j >= start[block[i]] - short for j in range(20)] for i in range(20)])
        mask = torch.zeros(20, 20, dtype=torch.float64).masked_fill(~sees, -torch.inf)[None, None]
        with rope_view(model, index=index):
            cut = model(row[None], attention_mask=mask, position_ids=torch.arange(20)[None]).logits[0].log_softmax(-1)
        full = model(row[None]).logits[0].log_softmax(-1)
    gain = [(full[i - 1, row[i]] - cut[i - 1, row[i]]).item() for i in range(short, 20)]
    assert actual.total == pytest.approx(sum(gain) / len(gain), abs=1e-5)
    exact = context_gain(model, row[None], short=short, stride=stride, progress=False)
    assert actual.exact == pytest.approx(exact.total) == pytest.approx(exact.exact), "never without the exact figure"
    first, second = actual.headline().items()
    assert first == next(iter(exact.headline().items())) and "gives too much" in second[0]
    assert "too large" in " ".join(actual.reading()) and "too large" not in " ".join(exact.reading())


def test_short_contexts_begin_as_a_text_does():
    """Against forwards by hand: every short window begins with the token that begins a text."""
    model, row, short, stride = tiny(dtype=torch.float64), tokens(1, 30)[0], 6, 4
    row[0] = 1
    result = context_gain(model, row[None], begin=[1], short=short, stride=stride, progress=False)
    gain = []
    with torch.no_grad():
        full = model(row[None]).logits[0].log_softmax(-1)
        for i in range(short, 30):
            first = (i - short) // stride * stride
            window = torch.cat([torch.tensor([1]), row[first + 1 : i]])
            gain.append((full[i - 1, row[i]] - model(window[None]).logits[0, -1].log_softmax(-1)[row[i]]).item())
    assert result.total == pytest.approx(sum(gain) / len(gain), abs=1e-6)
    for begin in ([3], list(range(6))):
        with pytest.raises(ValueError, match="begin must be fewer than short=6 tokens that every row begins with"):
            context_gain(model, row[None], begin=begin, short=short, stride=stride, progress=False)


def test_a_model_without_positions_or_memory_gains_nothing():
    model = tiny()
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    gain = context_gain(model, tokens(1, 40), short=8, stride=8, progress=False)
    assert gain.total == pytest.approx(0, abs=1e-6)


def test_a_short_row_is_not_compared_with_itself():
    """The first `stride` targets have the same tokens in both contexts: of a short row they would be most."""
    model, row = tiny(), tokens(1, 40)
    gain = context_gain(model, row, short=8, progress=False)
    assert gain.gain == context_gain(model, row, short=8, stride=4, progress=False).gain
    assert gain.total != 0


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("llama", {"kind": "fair"}, "kind must be 'exact' or 'paper', got 'fair'"),
        ("llama", {"short": 30}, "seq_len >= 31"),
        ("mistral-sliding", {"kind": "paper", "short": 5}, "use kind='exact'"),
    ],
)
def test_bad_arguments_are_refused(family, options, message):
    with pytest.raises(ValueError, match=message):
        context_gain(tiny(family), tokens(1, 30), progress=False, **options)
