"""Rescaling 'drop-rope': what the view 'nope' does, in a checkpoint."""

import json

import pytest
import torch
from support.tiny import WINDOW, gemma3, tiny, tokens
from transformers import AutoModelForCausalLM

from rope_patch import describe, list_methods, patch_model, rope_view
from rope_patch.eval.measures.subject import Subject
from rope_patch.methods import resolve_rescaling, resolve_view


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma3"])
@torch.no_grad()
def test_logits_are_those_of_the_nope_view(family, tmp_path):
    native, dropped = ((gemma3() if family == "gemma3" else tiny(family)) for _ in range(2))
    patch_model(dropped, "drop-rope", max_position_embeddings=1024)
    dropped.save_pretrained(tmp_path)
    ids = tokens(1, 500)
    with rope_view(native, "nope"):
        expected = native(ids).logits
    assert (native(ids).logits - expected).abs().max() > 0.1
    for model in (dropped, AutoModelForCausalLM.from_pretrained(tmp_path).eval()):
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_rotations_stay_below_the_bound_at_131072():
    model = patch_model(tiny(), "drop-rope", max_position_embeddings=131072)
    cos, sin = model.model.rotary_emb(torch.zeros(1, 1), torch.tensor([[131071]]))
    assert (cos == 1).all() and 0 < sin.abs().max() < 1.4e-4


def test_any_native_schedule_can_be_dropped(tmp_path):
    patch_model(tiny(), "yarn", factor=4.0).save_pretrained(tmp_path)
    model = patch_model(AutoModelForCausalLM.from_pretrained(tmp_path), "drop-rope")
    assert model.config.rope_parameters["rope_type"] == "llama3"
    assert model.config.max_position_embeddings == 4 * WINDOW
    model.save_pretrained(tmp_path / "dropped")
    written = json.loads((tmp_path / "dropped" / "config.json").read_text())
    assert written["rope_parameters"]["original_max_position_embeddings"] == 1


def test_the_trained_window_of_such_a_checkpoint_is_not_one(tmp_path):
    patch_model(tiny(), "drop-rope", max_position_embeddings=1024).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert Subject(loaded).trained_window == 1024
    assert describe(loaded).trained_window == 1024


@pytest.mark.parametrize(("name", "options"), [("ntk", {"factor": 2.0}), ("abf", {"theta": 1e6})])
def test_another_base_of_such_a_checkpoint_is_refused(name, options, tmp_path):
    patch_model(tiny(), "drop-rope", max_position_embeddings=1024).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"rescaling '{name}' would change nothing: this checkpoint was saved under"):
        patch_model(model, name, **options)
    assert model.config.max_position_embeddings == 1024


def test_the_view_and_the_rescaling_have_names_of_their_own():
    names = list_methods()
    assert len(names) == len(set(names)) and {"nope", "drop-rope"} <= set(names)
    with pytest.raises(ValueError, match="'nope' is a view; a rescaling is one of .*drop-rope"):
        resolve_rescaling("nope")
    with pytest.raises(ValueError, match="'drop-rope' is a rescaling"):
        resolve_view("drop-rope")
    with pytest.raises(ValueError, match="drop-rope"):
        resolve_rescaling("drope")
