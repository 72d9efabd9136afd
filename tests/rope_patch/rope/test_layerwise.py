"""Positions that differ by layer, against a loop over the layers written by hand."""

import copy
from dataclasses import replace

import pytest
import torch
from support.tiny import tiny, tokens
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, GPTNeoXConfig, GPTNeoXForCausalLM

from rope_patch import patch_model, rope_view, unpatch_model
from rope_patch.base.draws import DrawKey
from rope_patch.losses import SelfDistiller, ViewConsistency
from rope_patch.patch import view_source
from rope_patch.rope.rotary import find_decoder
from rope_patch.views import RPE, Compose, Cyclic, PerLayer, PosAug, RandomBase, Skip, Standard, Uniform

L = 21


def by_hand(model, ids, alphas):
    """Logits of a model whose layer i sees positions alphas[i] t."""
    decoder = model.model
    hidden = decoder.embed_tokens(ids)
    t = torch.arange(ids.shape[1], dtype=torch.float64)[None]
    for layer, alpha in zip(decoder.layers, alphas, strict=True):
        embeddings = decoder.rotary_emb(hidden, alpha * t)
        hidden = layer(hidden, attention_mask=None, position_embeddings=embeddings)
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
    return model.lm_head(decoder.norm(hidden))


def alphas_of(model):
    bound = find_decoder(model)._rope_patch.source.last
    groups = bound.view.layer_groups(model.config.num_hidden_layers, bound.parameters)
    alphas = {i: parameters["alpha"].item() if parameters else 1.0 for layers, _, parameters in groups for i in layers}
    return [alphas[i] for i in range(len(alphas))]


@pytest.mark.parametrize(
    ("family", "layers", "checkpointing"),
    [
        ("llama", "bottom", True),
        ("llama", "independent", False),
        ("qwen3", "top", False),
        ("qwen3", (0, 3), True),
        ("mistral", "independent", True),
        ("mistral", (0, 3), False),
    ],
)
def test_logits_and_gradients_are_those_of_a_loop_by_hand(family, layers, checkpointing):
    ids = tokens(2, L)
    plain = tiny(family, dtype=torch.float64, num_hidden_layers=5).train()
    model = patch_model(copy.deepcopy(plain), PerLayer(PosAug(), layers))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    direction = torch.randn(2, L, 101, dtype=torch.float64)
    total = 0.0
    for _ in range(2):  # the second forward draws anew before the first one's backward
        logits = model(ids, use_cache=False).logits
        total = total + (logits * direction).sum()
        alphas = alphas_of(model)
        reference = by_hand(plain, ids, alphas)
        torch.testing.assert_close(logits, reference, rtol=0, atol=1e-5)
        (reference * direction).sum().backward()
    total.backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        gap = (p.grad - q.grad).abs().max() / q.grad.abs().max()
        assert gap < 1e-4, (name, gap)  # float32 norms and RoPE inside a float64 model
    scaled = [a != 1 for a in alphas]
    expected = {"bottom": "++---", "top": "--+++", "independent": "+++++", (0, 3): "+--+-"}[layers]
    assert scaled == [c == "+" for c in expected]
    assert len(set(alphas)) == (5 if layers == "independent" else 2)


def test_evaluation_and_other_views_are_as_before_and_an_unpatch_leaves_nothing():
    ids, model = tokens(1, L), tiny()
    with torch.no_grad():
        expected = model(ids).logits
        with rope_view(model, PosAug(3)):
            scaled = model(ids).logits
        patch_model(model, "per-layer", view={"view": "posaug"}).train()
        model(ids)
        assert torch.equal(model.eval()(ids).logits, expected)
        with rope_view(model, PosAug(3)):
            assert torch.equal(model(ids).logits, scaled)
        with rope_view(model, PerLayer(PosAug(3), "top")):
            assert not torch.equal(model(ids).logits, scaled)
        assert torch.equal(unpatch_model(model)(ids).logits, expected)
    assert not any(layer._forward_pre_hooks or layer._forward_pre_hooks_with_kwargs for layer in model.model.layers)


def test_self_distillation_takes_two_passes():
    model = patch_model(tiny(), PerLayer(PosAug(), "top")).train()
    assert not SelfDistiller(model, ViewConsistency()).one_pass


def test_families_whose_layers_do_not_get_one_pair_are_refused():
    shape = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}  # fmt: skip
    layer_types = ["sliding_attention", "full_attention"]
    gemma3 = Gemma3ForCausalLM(Gemma3TextConfig(**shape, layer_types=layer_types))
    with pytest.raises(ValueError, match="does not hand one pair of cosines and sines to each of its layers"):
        patch_model(gemma3.train(), PerLayer(PosAug(), "top"))
    assert view_source(gemma3) is None
    # of older families too, where layers do get it
    config = GPTNeoXConfig(vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                           num_attention_heads=4)  # fmt: skip
    model = patch_model(GPTNeoXForCausalLM(config).train(), PerLayer(PosAug(Uniform(3, 8))))
    first, second = (model(tokens(1, 8)[:, :8] * 0 + 5 + torch.arange(8)).logits for _ in range(2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("view", [Skip(skip=Uniform(1, 50)), Cyclic(), Compose([Skip(), PosAug(granularity="sample")])])
def test_other_views_are_drawn_for_each_layer_too(view):
    """Draws of several layers at once are those of each alone, and none is another's."""
    length, sample = torch.full((3, 1), 40), torch.arange(3)[:, None]
    layered = PerLayer(view)
    key = DrawKey(5, torch.tensor(2), sample)
    groups = layered.layer_groups(6, layered.draw(length, key))
    assert [layers for layers, _, _ in groups] == [[i] for i in range(6)]
    rows = []
    for (i,), inner, parameters in groups:
        alone = inner.draw(length, replace(key, stream=key.substream(0).stream + i))
        assert all(torch.equal(parameters[name], alone[name].expand_as(parameters[name])) for name in alone)
        rows.append(inner.rope_index(torch.arange(40), parameters))
    assert len({tuple(row.flatten().tolist()) for row in rows}) == 6


def test_what_cannot_be_by_layer_is_refused():
    with pytest.raises(ValueError, match="layers must be one of .* or indices, got 'middle'"):
        PerLayer(PosAug(), "middle")
    with pytest.raises(ValueError, match="draws nothing, or a table"):
        PerLayer(RPE())
    with pytest.raises(ValueError, match="draws nothing, or a table"):
        PerLayer(Standard())
    with pytest.raises(ValueError, match="layers must be one of .* or indices, got 3"):
        PerLayer(PosAug(), 3)
    with pytest.raises(ValueError, match="layers='bottom' would change nothing"):
        patch_model(tiny(num_hidden_layers=1), PerLayer(PosAug(), "bottom"))
    with pytest.raises(ValueError, match="cannot be part of another view"):
        PerLayer(PerLayer(PosAug(), "top"), "bottom")
    with pytest.raises(ValueError, match="cannot be part of another view"):
        Compose([PerLayer(PosAug(), "top")])
    with pytest.raises(ValueError, match="cannot be part of another view"):
        Compose([RandomBase()])
    with pytest.raises(ValueError, match="layers must be below 3, those of this model, got 7"):
        patch_model(tiny(), PerLayer(PosAug(), [7]))
    with pytest.raises(ValueError, match="layers must be below 3"), rope_view(tiny(), PerLayer(PosAug(), [0, 3])):
        pass
