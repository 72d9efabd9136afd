"""The class that a card names loads the model."""

import pytest
import transformers
from support.images import model as model_of_images
from support.tiny import tiny
from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

from rope_patch import patch_model
from rope_patch.model_card import facts_of, render

_TEXT = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_SOUND = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "num_mel_bins": 8}


def model_of_sounds():
    """Random weights."""
    text = {"model_type": "qwen2", **_TEXT, "num_key_value_heads": 2, "max_position_embeddings": 64}
    sound = {**_SOUND, "max_source_positions": 16}
    return Qwen2AudioForConditionalGeneration(Qwen2AudioConfig(text_config=text, audio_config=sound))


@pytest.mark.parametrize(
    ("made", "task"),
    [
        (tiny, "text-generation"),
        (lambda: model_of_images("Qwen2VL"), "image-text-to-text"),
        (model_of_sounds, "any-to-any"),
    ],
    ids=["text", "images", "sounds"],
)
def test_the_class_that_a_card_names_loads_the_model(made, task, tmp_path):
    model = made()
    patch_model(model, "yarn", factor=2.0)
    model.save_pretrained(tmp_path)
    facts = facts_of(model, (), is_adapter=False, rescalings=())
    page = render(facts, "A model")
    assert f"pipeline_tag: {task}\n" in page and f"model = {facts.loader}.from_pretrained(" in page
    assert type(getattr(transformers, facts.loader).from_pretrained(tmp_path)) is type(model)
