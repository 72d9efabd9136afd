"""Watches of attention calls: nested, overlapping, in threads, in a compiled model."""

import threading
from contextlib import ExitStack

import pytest
import torch
from support.tiny import tiny, tokens
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rope_patch import string_positions
from rope_patch.families.attention_calls import watched_attention


@torch.no_grad()
def logits(model, ids):
    return model(ids, use_cache=False).logits


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_innermost_watch_looks_first_and_runs_the_others(attention):
    model, ids, seen = tiny(attention=attention), tokens(1, 9), []
    before, plain = dict(ALL_ATTENTION_FUNCTIONS._local_mapping), logits(model, ids)

    def outer(call):
        seen.append(("outer", call.options.pop("mine", None), call.value.sum().item()))

    def inner(call):
        seen.append(("inner", call.module.layer_idx, call.value.sum().item()))
        return call.with_inputs(call.query, call.key, 2 * call.value, call.mask, mine=1)

    with watched_attention(model, outer), watched_attention(model, inner):
        doubled = logits(model, ids)
    assert [entry[:2] for entry in seen] == [entry for layer in range(3) for entry in (("inner", layer), ("outer", 1))]
    assert seen[1][2] == pytest.approx(2 * seen[0][2], rel=1e-4)
    assert (doubled - plain).abs().max() > 1e-3 and torch.equal(logits(model, ids), plain)
    assert dict(ALL_ATTENTION_FUNCTIONS._local_mapping) == before


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_blocks_may_end_in_any_order(attention):
    model, ids, seen = tiny(attention=attention), tokens(1, 9), []
    before = dict(ALL_ATTENTION_FUNCTIONS._local_mapping)
    blocks = {name: ExitStack() for name in "abc"}
    for name, block in blocks.items():
        block.enter_context(watched_attention(model, lambda call, name=name: seen.append(name)))
    for ended, left in (("a", "cb"), ("c", "b"), ("b", "")):
        blocks[ended].close()
        seen.clear()
        logits(model, ids)
        assert "".join(seen) == left * 3  # layers
    assert dict(ALL_ATTENTION_FUNCTIONS._local_mapping) == before


def test_a_thread_that_ends_first_leaves_the_other_its_positions():
    first, second, ids = tiny(), tiny("qwen3"), tokens(1, 40)
    before, plain = dict(ALL_ATTENTION_FUNCTIONS._local_mapping), logits(second, ids)
    with string_positions(second, offset=12, local=4):
        expected = logits(second, ids)
    assert not torch.allclose(expected, plain)
    opened, end, inside = threading.Event(), threading.Event(), []

    def hold():
        with string_positions(first, offset=12, local=4):
            opened.set()
            end.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert opened.wait(60)
    with string_positions(second, offset=12, local=4):
        inside.append(logits(second, ids))
        end.set()
        thread.join()
        inside.append(logits(second, ids))
    assert all(torch.equal(found, expected) for found in inside)
    assert torch.equal(logits(second, ids), plain)
    assert dict(ALL_ATTENTION_FUNCTIONS._local_mapping) == before


def test_an_entry_that_somebody_else_writes_meanwhile_stays(monkeypatch):
    model, ids, seen = tiny(), tokens(1, 9), []
    local = ALL_ATTENTION_FUNCTIONS._local_mapping
    monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "_local_mapping", dict(local))
    with watched_attention(model, lambda call: seen.append("outer")):
        ours = ALL_ATTENTION_FUNCTIONS["sdpa"]
        ALL_ATTENTION_FUNCTIONS["sdpa"] = theirs = lambda *args, **kwargs: ours(*args, **kwargs)
        with watched_attention(model, lambda call: seen.append("inner")):
            logits(model, ids)
    assert seen == ["inner", "outer"] * 3
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is theirs
    logits(model, ids)
    assert len(seen) == 6


def test_a_compiled_model_meets_watches_that_come_and_go():
    torch._dynamo.reset()
    model, ids = tiny(num_hidden_layers=1), tokens(1, 9)
    plain = logits(model, ids)
    compiled = torch.compile(model, backend="eager", fullgraph=True)

    def scaled(factor):
        return lambda call: call.with_inputs(call.query, call.key, factor * call.value, call.mask)

    results = {}
    for run in (logits, lambda _, ids: logits(compiled, ids)):
        found = [run(model, ids)]
        with watched_attention(model, scaled(2.0)):
            found.append(run(model, ids))
            with watched_attention(model, scaled(3.0)):
                found.append(run(model, ids))
            found.append(run(model, ids))
        results[run] = [*found, run(model, ids)]
    for expected, found in zip(*results.values(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(results[logits][-1], plain) and not torch.allclose(results[logits][1], plain)
