"""Pictures of relations: against projections, norms and RoPE of a layer done by hand, and drawn."""

import pytest
import torch
from support.tiny import tiny, tokens
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from relation_maps import distance, draw, relation_maps
from rope_patch import patch_model


@pytest.mark.parametrize("head", [0, 3])
def test_maps_are_those_of_the_layer_by_hand(head):
    model, ids = tiny(dtype=torch.float64).eval(), tokens(1, 14)[0]
    maps = relation_maps(model, ids, 1, head)
    with torch.no_grad():
        into = model(ids[None], output_hidden_states=True).hidden_states[1]
        layer = model.model.layers[1]
        attention, normed = layer.self_attn, layer.input_layernorm(into)
        split = (1, len(ids), -1, attention.head_dim)
        q, k, v = (getattr(attention, f"{x}_proj")(normed).view(split).transpose(1, 2) for x in "qkv")
        q, k = apply_rotary_pos_emb(q, k, *model.model.rotary_emb(into, torch.arange(len(ids))[None]))
    own = head // (q.shape[1] // k.shape[1])
    for name, x in {"q": q[0, head], "k": k[0, own], "v": v[0, own]}.items():
        for i in range(len(ids)):
            weights = [(x[i] @ x[j] / x.shape[-1] ** 0.5).exp() for j in range(i + 1)]
            expected = torch.stack([w / sum(weights) for w in weights])
            torch.testing.assert_close(maps[name][i, : i + 1], expected, rtol=1e-5, atol=1e-7)
            assert not maps[name][i, i + 1 :].any()


def test_the_distance_is_the_mean_kl_of_rows_and_models_are_drawn(tmp_path):
    ids, models = tokens(1, 14)[0], {"native": tiny(), "pi": tiny()}
    patch_model(models["pi"], "pi", factor=4.0)
    maps = {label: relation_maps(model, ids, -1, 0) for label, model in models.items()}
    for name in "qk":
        rows = [
            sum(p * (p / r).log() for p, r in zip(native[: i + 1], other[: i + 1], strict=True))
            for i, (native, other) in enumerate(zip(maps["native"][name], maps["pi"][name], strict=True))
        ]
        assert distance(maps["native"][name], maps["pi"][name]) == pytest.approx(sum(rows).item() / 14, rel=1e-9)
    assert all(file.stat().st_size > 5000 for file in draw(maps, tmp_path / "maps"))
