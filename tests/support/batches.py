"""Batches as collators make them, and the documents in them."""

import torch

from .tiny import tokens


def batch(kind):
    """input_ids, labels and what a collator adds, for each kind of batch."""
    if kind == "plain":
        ids = tokens(2, 19)
        return {"input_ids": ids, "labels": ids.clone()}
    if kind in ("right", "left"):
        ids, mask = tokens(3, 17), torch.ones(3, 17, dtype=torch.long)
        for row, n in enumerate((17, 11, 6)):
            mask[row, n:] = 0
        if kind == "left":
            mask = mask.flip(1)
        ids = ids.masked_fill(mask == 0, 0)
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    if kind == "packed":
        ids = tokens(1, 24)
        positions = torch.cat([torch.arange(n) for n in (7, 12, 5)])[None]
        return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}
    assert kind == "completion"  # a prompt without labels
    ids = tokens(2, 19)
    labels = ids.clone()
    labels[0, :8] = -100
    labels[1, :3] = -100
    return {"input_ids": ids, "labels": labels}


def documents_of(data):
    """(row, first token, length) of each document."""
    for row in range(len(data["input_ids"])):
        positions = data.get("position_ids")
        if positions is not None:
            begins = [i for i, p in enumerate(positions[row].tolist()) if p == 0] + [positions.shape[1]]
            for a, b in zip(begins, begins[1:], strict=False):
                yield row, a, b - a
        elif "attention_mask" in data:
            real = data["attention_mask"][row].nonzero().flatten().tolist()
            yield row, real[0], len(real)
        else:
            yield row, 0, data["input_ids"].shape[1]
