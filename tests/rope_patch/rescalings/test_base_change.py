"""NTK and ABF: another base."""

import pytest
import torch
from support.rescalings import FACTOR, PAIR, THETA, Case, D
from support.tiny import WINDOW, tiny, tokens
from transformers import AutoModelForCausalLM

from rope_patch import patch_model
from rope_patch.rescalings import NTK

CASES = {
    "ntk": Case({"factor": FACTOR}, lambda seq_len: ((THETA * FACTOR ** (D / (D - 2))) ** (-2 * PAIR / D), 1.0)),
    "abf": Case({"theta": 5e5}, lambda seq_len: (5e5 ** (-2 * PAIR / D), 1.0)),
}


@pytest.mark.parametrize(("factor", "windows"), [(1.0, 1), (1.5, 1), (2.0, 1), (3.0, 1.5), (8.0, 4), (16, 8)])
def test_ntk_declares_half_of_its_factor_in_windows_and_tells_the_factor_of_a_longer_one(factor, windows):
    """As was measured: half of the passkeys of SmolLM2-135M and more are found to there, and fewer beyond."""
    declared = patch_model(tiny(), "ntk", factor=factor).config.max_position_embeddings
    assert declared == windows * WINDOW
    remedy = NTK(factor=factor).remedy(declared, 16 * WINDOW)
    assert remedy == "Set factor in rescale_args to at least 32"
    assert patch_model(tiny(), "ntk", factor=32.0).config.max_position_embeddings == 16 * WINDOW


def test_ntk_has_no_exponent_for_a_single_frequency():
    model = tiny("llama", hidden_size=8, head_dim=2)
    with pytest.raises(
        ValueError, match="rescaling 'ntk' needs 2 frequencies or more, and this model rotates 2 features"
    ):
        patch_model(model, "ntk", factor=2.0)


@torch.no_grad()
def test_a_window_beside_the_base_changes_no_attention_factor(tmp_path):
    """Transformers takes the factor of LongRoPE from the config's window where none is named, as in Phi-3-128k."""
    divisors = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0]}
    rope = {**divisors, "rope_type": "longrope", "rope_theta": THETA, "original_max_position_embeddings": WINDOW // 2}
    native = tiny(rope_parameters=rope)
    plain = patch_model(tiny(rope_parameters=rope), "abf", theta=1e6)
    model = patch_model(tiny(rope_parameters=rope), "abf", theta=1e6, max_position_embeddings=4 * WINDOW)
    assert plain.config.rope_parameters == {**native.config.rope_parameters, "rope_theta": 1e6}
    assert model.config.rope_parameters == {**plain.config.rope_parameters, "factor": 2.0}
    assert model.config.max_position_embeddings == 4 * WINDOW
    assert model.model.rotary_emb.attention_scaling == native.model.rotary_emb.attention_scaling
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    for n in (WINDOW // 4, WINDOW, 2 * WINDOW):
        logits = [m(tokens(1, n).fill_(7), use_cache=False).logits for m in (plain, model, again)]
        assert torch.equal(logits[0], logits[1]) and torch.equal(logits[1], logits[2])


def test_a_window_beside_the_base_is_refused_where_scaling_begins_at_it():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": THETA}
    model = tiny(rope_parameters=rope)
    with pytest.raises(ValueError, match=f"must be left out .* rope type 'dynamic'.* {2 * WINDOW} .* of {WINDOW}"):
        patch_model(model, "abf", theta=1e6, max_position_embeddings=2 * WINDOW)
    assert model.config.rope_parameters == rope and model.config.max_position_embeddings == WINDOW
    patch_model(model, "abf", theta=1e6, max_position_embeddings=WINDOW)
    assert model.config.rope_parameters == {**rope, "rope_theta": 1e6}
