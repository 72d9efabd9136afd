"""Scales of queries by a view, alone and with those of a rescaling, and where they are refused or followed."""

import copy
import pickle
from dataclasses import dataclass

import pytest
import torch
from support import oracle
from support.tiny import tiny, tokens
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from rope_patch import patch_model, rope_view, string_positions, unpatch_model
from rope_patch.base.registry import VIEWS
from rope_patch.families.attention_calls import watched_attention
from rope_patch.forward.state import state_of
from rope_patch.layout.shards import SequenceShard
from rope_patch.testing import check_view
from rope_patch.views import Compose, NoPE, PerLayer, PosAug, View

LAW = {"beta": 0.4, "original_max_position_embeddings": 8}


@dataclass(frozen=True)
class Warm(View):
    """r(t) = 2 t, and the query at r is multiplied by 1 + c ln(1 + floor(r / 8)), c ~ U{1, 2} a document."""

    def draw(self, length, key):
        return {"c": key.integers(1, torch.full_like(length, 2), slot=0).double()}

    def rope_index(self, t, parameters):
        return 2 * t

    def query_scale(self, index, parameters):
        return 1 + parameters["c"] * torch.log1p(torch.floor(index / 8))


@pytest.fixture(autouse=True)
def registered():
    VIEWS.add("warm", Warm)
    Warm.name = "warm"
    yield
    del VIEWS["warm"]


def right(model, ids, index, scale):
    visible = oracle.causal(ids.shape[1]).expand(len(ids), -1, -1)
    return oracle.logits(oracle.weights_of(model), model.config, ids, index, visible, query_scale=scale)


def same(actual, expected):
    torch.testing.assert_close(actual.double(), expected, rtol=1e-3, atol=1e-4)


def test_a_view_of_another_package_keeps_what_views_promise():
    check_view(Warm())


@torch.no_grad()
def test_a_view_draws_a_scale_for_each_document_and_multiplies_that_of_a_rescaling():
    model, ids, index = tiny("qwen3"), tokens(4, 20), 2 * torch.arange(20).expand(4, -1)
    plain = model(ids).logits
    with rope_view(model, Warm()):
        found = model(ids).logits
        drawn = state_of(model.model).overrides.innermost().last.parameters["c"]
        assert set(drawn.flatten().tolist()) == {1.0, 2.0}
        of_view = 1 + drawn * torch.log(1 + index // 8)
        same(found, right(model, ids, index, of_view))
        first = state_of(model.model).overrides.innermost().last.affected_from(torch.arange(20)[None], 2)
        assert first.flatten().tolist() == [1] * 4
    assert torch.equal(model(ids).logits, plain)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    patch_model(model, "temperature", **LAW)
    with rope_view(model, Warm()):
        same(model(ids).logits, right(model, ids, index, of_view * (1 + 0.4 * torch.log(1 + index // 8))))


@torch.no_grad()
def test_layers_with_positions_of_their_own_have_scales_of_their_own():
    model, ids = patch_model(tiny(), "temperature", **LAW), tokens(2, 20)
    scales = []

    def look(call):
        scales.append(call.query)

    with watched_attention(model, look):
        model(ids)
        with rope_view(model, PerLayer(PosAug(3.0), layers=[1])):
            model(ids)
    unpatch_model(model)
    with watched_attention(model, look):
        model(ids)
        with rope_view(model, PerLayer(PosAug(3.0), layers=[1])):
            model(ids)
    p, n = torch.arange(20)[:, None], len(scales) // 4
    law = [1 + 0.4 * torch.log(1 + x // 8) for x in (p, 3 * p)]
    torch.testing.assert_close(scales[0], scales[2 * n] * law[0])
    torch.testing.assert_close(scales[n], scales[3 * n] * law[0])
    assert (scales[n + 1].norm(dim=-1)[..., 19] / scales[1].norm(dim=-1)[..., 19]).mean() > 1.05


def gemma3():
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, sliding_window=6, pad_token_id=0,
        layer_types=["sliding_attention", "full_attention"], bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return Gemma3ForCausalLM(config).eval()


@torch.no_grad()
def test_sliding_layers_are_left_out(tmp_path):
    model, ids, seen = gemma3(), tokens(2, 20), []
    with watched_attention(model, lambda call: seen.append(call.query)):
        model(ids)
        patch_model(model, "temperature", **LAW)
        model(ids)
    assert torch.equal(seen[2], seen[0])
    law = 1 + 0.4 * torch.log(1 + torch.arange(20)[:, None] // 8)
    torch.testing.assert_close(seen[3], seen[1] * law)
    model.save_pretrained(tmp_path)
    again = patch_model(Gemma3ForCausalLM.from_pretrained(tmp_path), "standard")
    assert torch.equal(again(ids).logits, model(ids).logits)


@torch.no_grad()
def test_copies_and_pickles_are_scaled_as_the_model_is():
    model, ids = patch_model(tiny(), "temperature", **LAW), tokens(2, 20)
    expected = model(ids).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        unpatch_model(copy.deepcopy(other))
        assert torch.equal(other(ids).logits, expected)


@torch.no_grad()
def test_a_rank_scales_its_tokens_by_their_places_in_whole_rows():
    model, ids = patch_model(tiny(), "temperature", **LAW), tokens(2, 20)
    index, seen = torch.tensor([0, 1, 2, 17, 18, 19]), []
    with watched_attention(model, lambda call: seen.append(call.query)):
        model(ids)
        state_of(model.model).shard = SequenceShard({"input_ids": ids}, index, None)
        model(ids[:, index], position_ids=index[None])
    torch.testing.assert_close(seen[len(seen) // 2], seen[0][:, :, index])


@pytest.mark.slow  # compiles
@torch.no_grad()
def test_compiled_forwards_are_scaled():
    torch._dynamo.reset()
    model, ids = tiny("qwen3"), tokens(2, 20)
    run = torch.compile(model, backend="eager")
    plain = run(ids).logits
    patch_model(model, "temperature", **LAW)
    torch.testing.assert_close(run(ids).logits, model(ids).logits)
    assert (run(ids).logits - plain).abs().max() > 1e-2
    torch._dynamo.reset()


def test_what_is_not_exact_is_refused():
    model, ids = patch_model(tiny(), "temperature", **LAW), tokens(1, 12)
    with pytest.raises(ValueError, match="queries that are scaled by their position"), string_positions(model, local=4):
        pass
    with pytest.raises(ValueError, match="a scale of queries by position needs position_ids of shape"):
        model(ids, position_ids=torch.zeros(3, 1, 12, dtype=torch.long))
    with pytest.raises(ValueError, match="stands alone|cannot be part"):
        Compose([Warm(), NoPE()])


def test_queries_that_no_module_gave_are_an_error():
    model, ids = patch_model(tiny(), "temperature", **LAW), tokens(1, 12)
    for layer in model.model.layers:
        q_proj = layer.self_attn.q_proj
        layer.self_attn.q_proj.forward = q_proj.forward
        layer.self_attn.forward = lambda hidden_states, **kwargs: (torch.zeros_like(hidden_states), None)
    with pytest.raises(RuntimeError, match="the scale of queries by position had no effect"):
        model(ids)
