"""Losses from hidden states are those of a model's own logits, in every family that has a head of its own."""

import pytest
import torch
from support.families import families, tiny_family
from support.tiny import WINDOW, tiny, tokens
from torch.nn import functional as F  # noqa: N812

from rope_patch import patch_model
from rope_patch.eval import loss_by_position
from rope_patch.eval.measures.subject import Subject
from rope_patch.eval.results.cache import model_hash

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


def test_a_window_that_a_config_names_as_a_float_is_an_integer():
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": float(WINDOW)}
    window = Subject(tiny(max_position_embeddings=4 * WINDOW, rope_parameters=yarn)).trained_window
    assert window == WINDOW and isinstance(window, int)


def test_every_part_is_in_its_own_mode_again():
    model = tiny().train()
    model.model.layers[0].eval()
    before = {name: module.training for name, module in model.named_modules()}
    loss_by_position(model, tokens(1, 80), progress=False)
    assert {name: module.training for name, module in model.named_modules()} == before


def test_what_was_read_before_changes_nothing_under_dynamic_ntk():
    """Transformers keeps the frequencies of the longest row for later ones that are longer than the window."""
    model, short, long = patch_model(tiny(), "dynamic-ntk", factor=4.0), tokens(1, 2 * WINDOW), tokens(1, 4 * WINDOW)
    first = loss_by_position(model, short, progress=False).loss[1:]
    known, state = model_hash(model), {n: b.clone() for n, b in model.named_buffers()}
    longer = loss_by_position(model, long, progress=False).loss[1:]
    torch.testing.assert_close(loss_by_position(model, short, progress=False).loss[1:], first, atol=0, rtol=0)
    assert model_hash(model) == known
    assert all(torch.equal(buffer, state[name]) for name, buffer in model.named_buffers())
    with torch.no_grad():
        model(long)
        assert model_hash(model) == known, "frequencies of the last row count for no model"
    torch.testing.assert_close(loss_by_position(model, short, progress=False).loss[1:], first, atol=0, rtol=0)
    fresh = loss_by_position(patch_model(tiny(), "dynamic-ntk", factor=4.0), long, progress=False).loss[1:]
    torch.testing.assert_close(longer, fresh, atol=0, rtol=0)
