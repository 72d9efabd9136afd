"""Attention of the last rows against eager attention's own maps."""

import math

import pytest
import torch
from support.families import families, tiny_family
from support.tiny import SLIDING_WINDOW, WINDOW, tiny, tokens
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rope_patch import patch_model
from rope_patch.eval import attention_distance, entropy_ratio
from rope_patch.eval.measures.attention import _visit_groups, require_recomputable_attention


def maps(family, rows):
    """[n_layers][n_rows] attention of an eager twin, [n_heads, n, n]."""
    model = tiny(family, "eager")
    with torch.no_grad():
        return [layer.double() for layer in model(rows, output_attentions=True).attentions]


@pytest.mark.parametrize(("family", "attention"), [("llama", "sdpa"), ("qwen3", "eager"), ("mistral-sliding", "sdpa")])
def test_distances_are_those_of_the_attention_maps(family, attention):
    rows, last, threshold = tokens(2, 40), 10, 0.05
    result = attention_distance(tiny(family, attention), rows, last=last, threshold=threshold, progress=False)
    assert result.edges == [0, 1, 2, 4, 8, 16, 32, 40]
    distance = torch.arange(30, 40)[:, None] - torch.arange(40)
    for layer, layer_map in enumerate(maps(family, rows)):
        tail = layer_map[:, :, -last:]
        for k, (a, b) in enumerate(zip(result.edges, result.edges[1:], strict=False)):
            inside = tail[:, :, (distance >= a) & (distance < b)]
            queries = 2 * 4 * last
            assert result.mass[layer][k] == pytest.approx(inside.sum().item() / queries, abs=1e-5)
            assert result.count[layer][k] == pytest.approx((inside > threshold).sum().item() / queries, abs=1e-9)
        assert sum(result.mass[layer]) == pytest.approx(1, abs=1e-5)
    if family == "mistral-sliding":
        assert result.mean_mass(8) == 0 and SLIDING_WINDOW < 8


def test_layers_with_a_window_make_no_mask_of_the_whole_row(monkeypatch):
    """At 131072 tokens one is 16 GiB. What is then measured is compared with the maps above."""
    masks = []

    def visit(call, queries, of_group):
        masks.append(call.mask)
        _visit_groups(call, queries, of_group)

    monkeypatch.setattr("rope_patch.eval.measures.attention._visit_groups", visit)
    rows = tokens(1, 5 * SLIDING_WINDOW)
    attention_distance(tiny("mistral-sliding", "sdpa"), rows, last=4, progress=False)
    assert masks and all(mask is None for mask in masks)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_sliding_window_that_only_masks_know_of_counts(attention):
    """Phi-MoE tells its attention function of no window."""
    model, rows, last = tiny_family("phimoe"), tokens(1, 2 * WINDOW), 10
    model.set_attn_implementation(attention)
    result = attention_distance(model, rows, last=last, progress=False)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        layers = model(rows, output_attentions=True).attentions
    distance = torch.arange(rows.shape[1] - last, rows.shape[1])[:, None] - torch.arange(rows.shape[1])
    window = model.config.sliding_window
    assert window < max(result.edges[:-1])
    for layer, layer_map in enumerate(layers):
        tail = layer_map[:, :, -last:].double()
        for k, (a, b) in enumerate(zip(result.edges, result.edges[1:], strict=False)):
            mass = tail[:, :, (distance >= a) & (distance < b)].sum().item() / (4 * last)
            assert result.mass[layer][k] == pytest.approx(mass, abs=1e-5)
            assert a < window or mass == 0


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_entropy_is_that_of_the_attention_maps(family):
    rows = tokens(2, 2 * WINDOW)
    result = entropy_ratio(tiny(family), rows, n_queries=4, progress=False)
    inside = torch.linspace(WINDOW // 2, WINDOW, 4).long()
    beyond = torch.linspace(WINDOW + 1, 2 * WINDOW - 1, 4).long()
    stacked = torch.stack(maps(family, rows))
    entropy = -torch.special.xlogy(stacked, stacked).sum(-1).mean((0, 1, 2))
    visible = torch.arange(1, 2 * WINDOW + 1).double().log()
    assert result.window == WINDOW
    assert result.inside == pytest.approx(entropy[inside].mean().item(), rel=1e-4)
    assert result.beyond == pytest.approx(entropy[beyond].mean().item(), rel=1e-4)
    assert result.inside_share == pytest.approx((entropy / visible)[inside].mean().item(), rel=1e-4)
    assert result.ratio == result.beyond / result.inside


@pytest.mark.parametrize("family", [f for f in ("gpt_oss", "mimo_v2_flash") if f in families()])
def test_attention_sinks_take_their_part(family):
    """Against the family's own maps, from which the sink is left out after the softmax."""
    model, rows, last = tiny_family(family), tokens(2, 2 * WINDOW), 10
    with torch.no_grad():
        layers = [layer.double() for layer in model(rows, output_attentions=True).attentions]
    result = attention_distance(model, rows, last=last, progress=False)
    for layer, layer_map in enumerate(layers):
        to_keys = layer_map[:, :, -last:].sum(-1).mean().item()
        assert sum(result.mass[layer]) == pytest.approx(to_keys, abs=1e-5)
    assert min(map(sum, result.mass)) < 0.99, "a sink takes some"
    of_keys = [layer_map / layer_map.sum(-1, keepdim=True) for layer_map in layers]
    entropy = -torch.special.xlogy(torch.stack(of_keys), torch.stack(of_keys)).sum(-1).mean((0, 1, 2))
    beyond = torch.linspace(WINDOW + 1, 2 * WINDOW - 1, 4).long()
    found = entropy_ratio(model, rows, window=WINDOW, n_queries=4, progress=False)
    assert found.beyond == pytest.approx(entropy[beyond].mean().item(), rel=1e-4)


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("deepseek_v32", r"chooses or compresses the keys that its queries see \(model.layers.0.self_attn.indexer\)"),
        ("deepseek_v4", r"chooses or compresses the keys that its queries see \(model.layers.0.self_attn.compressor\)"),
        ("falcon", "computes attention without Transformers' attention functions"),
        ("blt", r"has several transformers \(BltGlobalTransformer, .*\) over different sequences"),
    ],
)
def test_attention_that_q_and_k_do_not_give_is_refused(family, why):
    if family not in families():
        pytest.skip(f"this Transformers has no {family}")
    model = tiny_family(family)
    with torch.device("meta"):
        twin = type(model)(model.config)
    for subject in (model, twin):
        with pytest.raises(ValueError, match=f"{why}.*: its attention cannot be measured. Leave the measures"):
            require_recomputable_attention(subject)
    with pytest.raises(ValueError, match="its attention cannot be measured"):
        attention_distance(model, tokens(1, 20), last=5, progress=False)


def test_uniform_attention_has_the_most_entropy_there_is():
    model = tiny()
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.q_proj.weight)
    entropy = entropy_ratio(model, tokens(1, 100), n_queries=3, progress=False)
    assert entropy.inside_share == pytest.approx(1, abs=1e-5) and entropy.beyond_share == pytest.approx(1, abs=1e-5)
    distances = attention_distance(model, tokens(1, 64), last=1, progress=False)
    assert distances.mass[0] == pytest.approx([(b - a) / 64 for a, b in zip([0, 1, 2, 4, 8, 16, 32], [1, 2, 4, 8, 16, 32, 64])])  # fmt: skip  # noqa: B905, E501
    assert math.isclose(distances.mean_mass(16), 0.75, rel_tol=1e-5)


def test_the_table_of_attention_functions_is_put_back(monkeypatch):
    before = dict(ALL_ATTENTION_FUNCTIONS._local_mapping)
    model = tiny()
    attention_distance(model, tokens(1, 20), last=5, progress=False)
    assert dict(ALL_ATTENTION_FUNCTIONS._local_mapping) == before
    monkeypatch.setattr(model.model, "forward", lambda **_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        attention_distance(model, tokens(1, 20), last=5, progress=False)
    assert dict(ALL_ATTENTION_FUNCTIONS._local_mapping) == before


def test_what_cannot_be_recomputed_is_refused():
    model = tiny()
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match="for sdpa and eager only, and the model uses 'flex_attention'"):
        attention_distance(model, tokens(1, 20), last=5, progress=False)
    with pytest.raises(ValueError, match="last must be in 1..20, got 21"):
        attention_distance(tiny(), tokens(1, 20), last=21, progress=False)
    with pytest.raises(ValueError, match="seq_len >= 66"):
        entropy_ratio(tiny(), tokens(1, 60), progress=False)


def test_the_view_in_force_is_what_is_measured():
    rows = tokens(1, 40)
    plain = attention_distance(tiny(), rows, last=5, progress=False)
    moved = attention_distance(patch_model(tiny(), "nope", when="always"), rows, last=5, progress=False)
    assert plain.mass != moved.mass
