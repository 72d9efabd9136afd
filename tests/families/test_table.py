"""The table of families says what the modeling code of the installed Transformers says, for every type with RoPE.

Where this fails with another version of Transformers, the named type needs an entry in rope_patch/base/family_table.py.
"""

import copy
import sys
from pathlib import Path

import pytest
import torch
import transformers
from support import modeling_code
from support.families import families, tiny_family
from support.marks import BEFORE_5_17
from transformers.models.auto import modeling_auto

from rope_patch.base.family_table import family_of
from rope_patch.families.capabilities import (
    keeps_from_attention,
    why_fixed_frequencies,
    why_no_head,
    why_no_native_rope,
    why_unreachable,
)
from rope_patch.families.local_layers import has_rope
from rope_patch.rope.rotary import find_decoder

LAYERS = 6
# a model of speech whose head of time stamps is beside the output head, which losses of hidden states are refused for
IDLE_CHILDREN = {"word_timestamp_head"}


def mapped():
    """Names of classes -> model type, of those with RoPE that are no tiny family."""
    mappings = ("MODEL_FOR_CAUSAL_LM", "MODEL_FOR_IMAGE_TEXT_TO_TEXT", "MODEL")
    found = {}
    for mapping in mappings:
        for model_type, names in getattr(modeling_auto, f"{mapping}_MAPPING_NAMES").items():
            for name in [names] if isinstance(names, str) else names:
                if model_type not in families():
                    found.setdefault(name, model_type)
    return sorted(found)


def on_meta(model_class, config):
    """A model without memory for its weights, of as few layers as show each kind."""
    text = config.get_text_config(decoder=True)
    n_layers = getattr(text, "num_hidden_layers", None)
    if isinstance(n_layers, int) and n_layers > LAYERS and "num_hidden_layers" in vars(text):
        for name, value in list(vars(text).items()):
            if isinstance(value, list | tuple) and len(value) == n_layers:
                setattr(text, name, value[:LAYERS])
        text.num_hidden_layers = LAYERS
    with torch.device("meta"):
        return model_class._from_config(config)


def require_same(causal_lm, decoder):
    config, layers = decoder.config, range(len(getattr(decoder, "layers", ())))
    assert [i for i in layers if has_rope(config, i)] == modeling_code.layers_with_rope(decoder)
    fixed = modeling_code.rotary_reads_config(decoder)
    assert (why_fixed_frequencies(decoder) is not None) == fixed
    assert (why_no_native_rope(decoder) is not None) == (fixed or modeling_code.reads_rope_parameters(decoder))
    assert (keeps_from_attention(decoder) is None) == modeling_code.attention_gets_keywords(decoder)
    assert (why_unreachable(causal_lm, decoder) is None) == modeling_code.decoder_gets_keywords(causal_lm, decoder)
    if causal_lm is not decoder and causal_lm.get_output_embeddings() is not None:
        between = set(modeling_code.between_decoder_and_head(causal_lm, decoder))
        assert (why_no_head(causal_lm, decoder) is not None) == bool(between - IDLE_CHILDREN)


@pytest.mark.parametrize("family", families())
def test_of_causal_language_models(family):
    try:
        model = tiny_family(family)
        decoder = find_decoder(model)
    except ValueError:  # RoPE that cannot be patched
        return
    require_same(model, decoder)


# by the options that switch RoPE off in some layers, or in all
SWITCHES = {
    "layer_types": lambda n: [["full_attention"] * n, (["sliding_attention", "full_attention"] * n)[:n]],
    "no_rope_layers": lambda n: [[0] * n, [1] * n, ([0, 1] * n)[:n]],
    "layer_rope_theta": lambda n: [[0] * n, [1e4] * n, ([0, 1e4] * n)[:n]],
    "sliding_window": lambda n: [None, 8],
}


@pytest.mark.parametrize("family", families())
def test_of_configs_that_switch_rope_off(family):
    plain = tiny_family(family).config
    if not (family_of(plain).has_rope or {"no_rope_layers", "layer_rope_theta"} & vars(plain).keys()):
        return
    for name, values in SWITCHES.items():
        if name not in vars(plain):
            continue
        for value in values(plain.num_hidden_layers):
            config = copy.deepcopy(plain)
            vars(config)[name] = value  # some configs take no None, which their code asks for
            decoder = find_decoder(on_meta(type(tiny_family(family)), config))
            with_rope = [i for i in range(len(decoder.layers)) if has_rope(config, i)]
            assert with_rope == modeling_code.layers_with_rope(decoder), (name, value)


@pytest.mark.skipif(BEFORE_5_17, reason="the test reads modeling code as Transformers writes it since 5.17")
@pytest.mark.slow  # a model each, some of them large
@pytest.mark.parametrize("name", mapped())
def test_of_other_models(name):
    try:
        model_class = getattr(transformers, name)
        code = Path(sys.modules[model_class.__module__].__file__).read_text(encoding="utf-8")
        if "otary" not in code and "AutoModel" not in code:
            return
        model = on_meta(model_class, model_class.config_class())
        decoder = find_decoder(model)
    except Exception:  # packages that are not installed, configs without defaults, models without RoPE
        return
    if hasattr(decoder.config, "vocab_size"):  # reads text
        require_same(model, decoder)
