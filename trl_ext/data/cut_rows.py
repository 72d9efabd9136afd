"""Cut the long documents of a batch to the tokens that a view reads."""

from typing import Any

import torch

from rope_patch.base.draws import DrawKey
from rope_patch.views import View


def cut_rows(view: View, batch: dict[str, Any], key: DrawKey) -> bool:
    """Cut the rows of a batch, one document each, in place; returns whether any was cut."""
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    length = mask.sum(1, keepdim=True)  # [batch, 1]
    content = view.cut(length, key)  # [batch, m] indices within each document, m = the most tokens kept
    if content is None:
        return False
    begin = mask.long().argmax(1, keepdim=True)  # [batch, 1]; rows may be padded on the left
    kept = torch.arange(content.shape[1], device=content.device) < length.clamp(max=content.shape[1])
    # `kept` masks what a clamped index reads
    place = (begin + content).clamp(max=mask.shape[1] - 1)
    for name, value in list(batch.items()):
        # the attention mask too, which gets 0 where a document has fewer than m tokens
        if isinstance(value, torch.Tensor) and value.shape == mask.shape:
            none = -100 if name == "labels" else 0
            batch[name] = value.gather(1, place).masked_fill(~kept, none)
    return True
