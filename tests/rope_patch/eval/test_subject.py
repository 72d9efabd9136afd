"""Losses from hidden states are those of a model's own logits, in every family that has a head of its own."""

import pytest
import torch
from support.families import families, tiny_family
from torch.nn import functional as F  # noqa: N812

from rope_patch.eval import loss_by_position

REFUSED = {
    "blt": "several transformers",
    "codegen": "no RoPE that can be patched",
    "gptj": "no RoPE that can be patched",
    "modernbert-decoder": "between the decoder and the output head",
    "roformer": "between the decoder and the output head",
}


@pytest.mark.parametrize("family", families())
def test_losses_are_those_of_the_logits(family):
    model = tiny_family(family).eval()
    n_ids = model.get_output_embeddings().weight.shape[0] if model.get_output_embeddings() is not None else 50
    ids = torch.randint(3, n_ids, (2, 48), generator=torch.Generator().manual_seed(0))
    if family in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[family]):
            loss_by_position(model, ids, progress=False)
        return
    found = loss_by_position(model, ids, progress=False).loss
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits.double()
    known = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none").mean(0)
    torch.testing.assert_close(found[1:], known, atol=1e-4, rtol=0)
