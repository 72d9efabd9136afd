"""The attention matrix: every kind of batch for the same documents, every view by hand, and the oracle's answer.

Shared by the tests on a CPU and on a GPU.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache, StaticCache

from rope_patch import rope_view
from rope_patch.forward.state import state_of
from rope_patch.rope.rotary import find_decoder
from rope_patch.views import VIEWS

from . import oracle
from .gathered import gathered
from .tiny import tokens
from .views import Case

LENGTHS = (11, 16)
PREFILL = 9  # tokens of a row in the first forward of the kinds that decode
DECODING = ("cached", "cached-static", "cached-left-padded")
WHOLE = ("plain", "right-padded", "left-padded", "left-padded-positions", "packed", "padding-free")
KINDS = (*WHOLE, *DECODING)


WRONG_UPSTREAM = (
    # its block mask reads the length of a static cache after the layer has added to it
    ("flex_attention", "cached-static"),
    # without borders Transformers hands it the longest length as a tensor, and it takes an integer
    ("flash_attention_4", "packed"),
)


def kinds(attention: str, of: tuple[str, ...] = KINDS) -> tuple[str, ...]:
    """The kinds that Transformers itself gets right."""
    return tuple(kind for kind in of if (attention, kind) not in WRONG_UPSTREAM)


@dataclass
class Cell:
    """One batch.

    Args:
        kind: of `KINDS`.
        documents: token ids of each.
        spans: (row, tokens) where each lies.
        inputs: keyword arguments of the model, for all tokens.
    """

    kind: str
    documents: list[torch.Tensor]
    spans: list[tuple[int, slice]]
    inputs: dict[str, Any] = field(default_factory=dict)

    def to(self, device: str) -> "Cell":
        """The same with its inputs elsewhere."""
        inputs = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in self.inputs.items()}
        return Cell(self.kind, self.documents, self.spans, inputs)

    def first_forward(self, document: int) -> int:
        """Tokens of a document that the first forward runs, which its draws go by."""
        span = self.spans[document][1]
        return (PREFILL if self.kind in DECODING else span.stop) - span.start


def cell(kind: str) -> Cell:
    """Documents of `LENGTHS` tokens, or of the longer length where rows have no padding, as collators lay them out."""
    whole = kind in ("plain", "cached", "cached-static")
    lengths = [max(LENGTHS)] * 2 if whole else list(LENGTHS)
    documents = [tokens(n) for n in lengths]
    if kind in ("packed", "padding-free"):
        ends = torch.tensor([0, *lengths]).cumsum(0)
        spans = [(0, slice(int(a), int(b))) for a, b in zip(ends, ends[1:], strict=False)]
        inputs: dict[str, Any] = {
            "input_ids": torch.cat(documents)[None],
            "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        }
        if kind == "padding-free":  # what TRL's collator adds for FlashAttention
            borders = ends.to(torch.int32)
            inputs |= {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders}
            inputs |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
        return Cell(kind, documents, spans, inputs)
    if whole:
        spans = [(row, slice(0, n)) for row, n in enumerate(lengths)]
        inputs = {"input_ids": torch.stack(documents)}
        if kind == "cached-static":  # FlashAttention finds how much of the cache is filled from a mask
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        return Cell(kind, documents, spans, inputs)
    width = max(lengths)
    left = "left" in kind
    spans = [(row, slice(width - n, width) if left else slice(0, n)) for row, n in enumerate(lengths)]
    ids, mask = (torch.zeros(len(lengths), width, dtype=torch.long) for _ in range(2))
    for document, (row, span) in zip(documents, spans, strict=True):
        ids[row, span], mask[row, span] = document, 1
    inputs = {"input_ids": ids, "attention_mask": mask}
    if kind in ("left-padded-positions", "cached-left-padded"):  # what generate makes
        inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    return Cell(kind, documents, spans, inputs)


def run(model: Any, cell: Cell) -> torch.Tensor:
    """Logits [rows, tokens, vocab] of all tokens; kinds that decode do so token by token after the first forward."""
    if cell.kind not in DECODING:
        return model(**cell.inputs, use_cache=False).logits
    config = model.config
    n = cell.inputs["input_ids"].shape[1]
    cache = StaticCache(config, max_cache_len=n) if cell.kind == "cached-static" else DynamicCache(config=config)
    parts = []
    for a, b in [(0, PREFILL), *((t, t + 1) for t in range(PREFILL, n))]:
        inputs = {
            name: x[:, :b] if name == "attention_mask" else x[:, a:b]  # a mask covers what is cached too
            for name, x in cell.inputs.items()
        }
        parts.append(model(**inputs, past_key_values=cache, use_cache=True).logits)
    return torch.cat(parts, 1)


CASES: dict[str, Case] = gathered(VIEWS, "CASES")
"""Every view of the registry, from their test files."""


def drawn_for(parameters: dict[str, torch.Tensor], cell: Cell, document: int, n_layers: int) -> dict[str, Any]:
    """What the forward drew for a document: numbers, lists over layers or tokens, or a table."""
    row, span = cell.spans[document]
    results: dict[str, Any] = {}
    for name, value in parameters.items():
        value = value.cpu()
        if name == "_table":  # one after the other, where each document has its own
            begin = int(drawn_for({"_begin": parameters["_begin"]}, cell, document, n_layers)["_begin"])
            results[name] = value[begin : begin + 64]
        elif name == "offset":  # of each token
            results[name] = value[row, span]
        elif value.ndim < 2:
            results[name] = value
        else:
            token = span.start if value.shape[-1] > 1 else 0
            chosen = value[..., row if value.shape[-2] > 1 else 0, token]
            results[name] = chosen if chosen.ndim == 0 else chosen[:n_layers]
    return results


def run_under(model: Any, cell: Cell, case: Case, seed: int = 5) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    """Logits under a view, and the draws for each document in the forward that made them."""
    draws: list[dict[str, torch.Tensor]] = []
    with rope_view(model, case.view, seed=seed):
        source = state_of(find_decoder(model)).overrides.innermost()
        bind = source.bind

        def watched(batch):
            bound = bind(batch)
            draws.append(bound.parameters)
            return bound

        source.bind = watched
        logits = run(model, cell)
    n_layers = model.config.num_hidden_layers
    return logits, [drawn_for(draws[0], cell, i, n_layers) for i in range(len(cell.documents))]


def expected(
    weights: oracle.Weights, config: Any, cell: Cell, case: Case, draws: list[dict[str, Any]]
) -> list[torch.Tensor]:
    """Logits [tokens, vocab] of each document alone, in float64: no neighbour, no padding.

    In a model with sliding and full layers the view is in the full ones alone.
    """
    frequencies = oracle.default_frequencies(config)
    share = torch.arange(len(frequencies), dtype=torch.float64) / len(frequencies)
    logits = []
    for i, (ids, drawn) in enumerate(zip(cell.documents, draws, strict=True)):
        t = torch.arange(len(ids), dtype=torch.float64)
        index = case.index(t, cell.first_forward(i), drawn)
        index = index.expand(config.num_hidden_layers, 1, len(ids)) if index.ndim == 1 else index[:, None]
        scaled = (frequencies * case.frequency(share, drawn)).expand(config.num_hidden_layers, -1)
        far = torch.tensor([kind == "full_attention" for kind in layer_types(config)])
        if far.any():
            index, scaled = torch.where(far[:, None, None], index, t), torch.where(far[:, None], scaled, frequencies)
        logits.append(oracle.logits(weights, config, ids[None], index, visible(config, len(ids)), scaled)[0])
    return logits


def visible(config: Any, seq_len: int) -> torch.Tensor:
    """What each layer of the model sees of a document, [n_layers, 1, seq_len, seq_len]."""
    window = getattr(config, "sliding_window", None)
    masks = [oracle.causal(seq_len, window if kind == "sliding_attention" else None) for kind in layer_types(config)]
    return torch.stack(masks)[:, None]


def layer_types(config: Any) -> list[str]:
    """Of each layer, also where the config has one window for all."""
    kind = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    return getattr(config, "layer_types", None) or [kind] * config.num_hidden_layers


def compare(cell: Cell, logits: torch.Tensor, expected: list[torch.Tensor], tolerance: float) -> None:
    """Every real token's logits, by the largest error relative to the largest logit of its document."""
    for (row, span), right in zip(cell.spans, expected, strict=True):
        error = (logits[row, span].double().cpu() - right).abs().max() / right.abs().max()
        assert error < tolerance, f"logits of row {row} are off by {error:.1e}"


def backward(cell: Cell, logits: torch.Tensor, expected: list[torch.Tensor]) -> None:
    """Gradients of the same random sum over the logits of real tokens, in the model and in the oracle's weights."""
    directions = [torch.randn_like(right) for right in expected]
    actual = [logits[row, span].double().cpu() for row, span in cell.spans]
    for answers in (actual, expected):
        sum((logit * direction).sum() for logit, direction in zip(answers, directions, strict=True)).backward()


def compare_gradients(model: Any, expected: dict[str, torch.Tensor], tolerance: float) -> None:
    """Every parameter's gradient, by the norm of the error relative to its own norm.

    A floor under that is one part in 10^4 of the largest norm, or a tenth in 16 bits: small gradients are sums that
    nearly cancel. Without positions, those of q_norm and k_norm do altogether.
    """
    actual = {name: p.grad.double().cpu() for name, p in model.named_parameters() if p.grad is not None}
    assert actual.keys() == expected.keys()
    floor = 1e-1 if next(model.parameters()).dtype in (torch.bfloat16, torch.float16) else 1e-4
    largest = max(right.norm() for right in expected.values())
    assert largest > 0
    for name, right in expected.items():
        error = (actual[name] - right).norm() / max(right.norm(), floor * largest)
        assert error < tolerance, f"gradient of {name} is off by {error:.1e}"


def gradients(weights: oracle.Weights) -> dict[str, torch.Tensor]:
    """Of the oracle's weights."""
    return {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
