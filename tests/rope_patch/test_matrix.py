"""Family x attention implementation x batch kind: every cell against the float64 oracle. docs/composition.md shows it.

Each cell runs one batch under a fixed skip and compares the logits of all real tokens with an oracle that gets the RoPE
indices and the visibility of that batch written out by hand.
"""

import pytest
import torch
from support import oracle
from support.tiny import FAMILIES, SLIDING_WINDOW, tiny, tokens

from rope_patch import rope_view
from rope_patch.views import Skip

SPLIT, SKIP = 4, 23
ATTENTION = ["eager", "sdpa", "flex_attention"]
BATCHES = ["plain", "right-padded", "left-padded", "left-padded-positions", "packed", "cached"]


@pytest.fixture(autouse=True)
def flex_runs_eagerly():
    with torch.compiler.set_stance("force_eager"):
        yield


def skipped(n):
    t = torch.arange(n)
    return torch.where(t >= SPLIT, t + SKIP, t)


def reference(model, rows, family):
    """Logits of each document alone, as it should be: no neighbour, no padding."""
    window = SLIDING_WINDOW if family == "mistral-sliding" else None
    weights = oracle.weights_of(model)
    return [
        oracle.logits(weights, model.config, ids[None], skipped(len(ids))[None], oracle.causal(len(ids), window)[None])[
            0
        ]
        for ids in rows
    ]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_cell(family, attention, batch):
    model = tiny(family, attention)
    lengths = [16, 16] if batch in ("plain", "cached") else [11, 16]
    rows = [tokens(n) for n in lengths]
    kwargs, spans = {"use_cache": False}, [(row, slice(0, n)) for row, n in enumerate(lengths)]
    if batch == "packed":
        input_ids = torch.cat(rows)[None]
        kwargs["position_ids"] = torch.cat([torch.arange(n) for n in lengths])[None]
        spans = [(0, slice(0, 11)), (0, slice(11, 27))]
    elif batch in ("plain", "cached"):
        input_ids = torch.stack(rows)
    else:
        left = batch.startswith("left")
        input_ids = torch.zeros(2, 16, dtype=torch.long)
        mask = torch.zeros(2, 16, dtype=torch.long)
        for row, (ids, n) in enumerate(zip(rows, lengths, strict=True)):
            spans[row] = (row, slice(16 - n, 16) if left else slice(0, n))
            input_ids[spans[row]], mask[spans[row]] = ids, 1
        kwargs["attention_mask"] = mask
        if batch == "left-padded-positions":  # what generate makes
            kwargs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    with rope_view(model, Skip(split=SPLIT, skip=SKIP)):
        if batch == "cached":
            # prefill in one forward, the rest token by token
            out = model(input_ids[:, :9], use_cache=True)
            logits = [out.logits]
            for t in range(9, 16):
                out = model(input_ids[:, t : t + 1], past_key_values=out.past_key_values, use_cache=True)
                logits.append(out.logits)
            logits = torch.cat(logits, 1)
        else:
            logits = model(input_ids, **kwargs).logits
    for (row, span), expected in zip(spans, reference(model, rows, family), strict=True):
        torch.testing.assert_close(logits[row, span].double(), expected, rtol=1e-3, atol=1e-3)
