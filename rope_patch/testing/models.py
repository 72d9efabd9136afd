"""A small random model, batches of documents, and the comparison of what two forwards give."""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

N_LAYERS = 3
VOCABULARY = 101
WINDOW = 64
PAD = 3  # a token of texts too, so that padding is known by the mask alone

WHOLE = ("right", "right, positions", "left", "left, positions", "left, positions 1", "packed", "packed, padded")
"""How documents are laid out: padded on one side, with or without position IDs, or in one row."""


def small_model() -> PreTrainedModel:
    """A Llama in eval mode, with weights so large that attention is not uniform and positions matter."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=N_LAYERS,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=8,
                max_position_embeddings=WINDOW,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
            )
        )
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def random_ids(*shape: int) -> torch.Tensor:
    """Token IDs without special ones, the same each time."""
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(0))


def laid_out(documents: list[list[int]], layout: str) -> tuple[dict[str, Any], list[tuple[int, int]]]:
    """Keyword arguments of a model for a batch of documents in a layout of `WHOLE`; (row, first token) of each."""
    if layout.startswith("packed"):
        ids = [token for of in documents for token in of]
        positions = [t for of in documents for t in range(len(of))]
        begins = [sum(map(len, documents[:i])) for i in range(len(documents))]
        mask = None
        if layout == "packed, padded":
            mask = torch.tensor([[1] * len(ids) + [0] * 3])
            ids, positions = ids + [PAD] * 3, positions + [positions[-1]] * 3
        inputs = {"input_ids": torch.tensor([ids]), "position_ids": torch.tensor([positions]), "attention_mask": mask}
        return inputs, [(0, begin) for begin in begins]
    width = max(map(len, documents)) + 2
    rows, mask = torch.full((len(documents), width), PAD), torch.zeros(len(documents), width, dtype=torch.long)
    places = []
    for row, document in enumerate(documents):
        begin = width - len(document) if "left" in layout else 0
        rows[row, begin : begin + len(document)] = torch.tensor(document)
        mask[row, begin : begin + len(document)] = 1
        places.append((row, begin))
    row_positions = (mask.cumsum(1) - 1).clamp(min=0) if "positions" in layout else None
    if layout == "left, positions 1":
        assert row_positions is not None
        row_positions = row_positions.masked_fill(mask == 0, 1)
    return {"input_ids": rows, "position_ids": row_positions, "attention_mask": mask}, places


def require_alike(actual: torch.Tensor, expected: torch.Tensor, what: str, tolerance: float = 1e-4) -> None:
    """Raise AssertionError if the largest error, relative to the largest value, reaches `tolerance`."""
    error = ((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()
    if not error < tolerance:
        raise AssertionError(f"{what}: the largest difference is {error:.1e} of the largest value.")
