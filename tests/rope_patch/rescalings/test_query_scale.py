"""Queries scaled by their position: against attention written out in float64, wherever positions come from."""

import copy
import logging
import math

import pytest
import torch
from support import oracle
from support.rescalings import NATIVE, Case
from support.tiny import tiny, tokens
from transformers import AutoModelForCausalLM, Ministral3Config, Ministral3ForCausalLM

from rope_patch import export, patch_model, patch_on_load, restore_query_scale, rope_view, unpatch_model
from rope_patch.checkpoints.checked_loading import load_checkpoint
from rope_patch.families.queries import RECORD
from rope_patch.losses import SelfDistiller, ViewConsistency
from rope_patch.views import Skip

BETA, L0 = 0.4, 8


def llama4(p):
    """As in get_llama_4_attn_scale of Transformers."""
    return 1 + BETA * torch.log(1 + torch.floor(p / L0))


CASES = {
    "temperature": Case({"beta": BETA, "original_max_position_embeddings": L0}, lambda seq_len: (NATIVE, 1.0), llama4),
    "log-n": Case(
        {"original_max_position_embeddings": L0},
        lambda seq_len: (NATIVE, 1.0),
        lambda p: (torch.log(p + 1) / math.log(L0)).clamp(min=1),
    ),
}
OPTIONS = CASES["temperature"].options
SKIP = Skip(split=9, skip=50)


def expected(model, ids, index=None, visible=None):
    """Logits of a decoder in float64, given the RoPE index of each token from the first of its document."""
    n = ids.shape[1]
    index = torch.arange(n).expand(ids.shape) if index is None else index
    visible = oracle.causal(n).expand(len(ids), -1, -1) if visible is None else visible
    weights = oracle.weights_of(model)
    return oracle.logits(weights, model.config, ids, index, visible, query_scale=llama4(index.double())), weights


def same(actual, right):
    torch.testing.assert_close(actual.double(), right, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_ssmax_is_a_slope_times_the_logarithm_of_the_tokens_seen():
    model, ids = patch_model(tiny("qwen3"), "log-n", scale=0.43), tokens(2, 20)
    n = torch.arange(1, 21).expand(2, -1)
    visible = oracle.causal(20).expand(2, -1, -1)
    scale = 0.43 * torch.log(n.double())
    same(model(ids).logits, oracle.logits(oracle.weights_of(model), model.config, ids, n, visible, query_scale=scale))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@torch.no_grad()
def test_a_view_moves_the_scale_with_its_positions(family, attention):
    model, ids = patch_model(tiny(family, attn_implementation=attention), "temperature", **OPTIONS), tokens(2, 20)
    moved = torch.arange(20) + 50 * (torch.arange(20) >= 9)
    same(model(ids).logits, expected(model, ids)[0])
    with rope_view(model, SKIP):
        same(model(ids).logits, expected(model, ids, moved.expand(2, -1))[0])
    with rope_view(model, index=3 * torch.arange(20)[None]):
        same(model(ids).logits, expected(model, ids, 3 * torch.arange(20).expand(2, -1))[0])


@pytest.mark.parametrize("with_positions", [True, False])
@torch.no_grad()
def test_decoding_behind_left_padding_counts_from_the_first_token(with_positions):
    model, ids = patch_model(tiny("qwen3"), "temperature", **OPTIONS), tokens(2, 20)
    pads = torch.tensor([[0], [5]])
    mask = (torch.arange(20) >= pads).long()
    index = (torch.arange(20) - pads).clamp(min=0)
    visible = oracle.causal(20) & (torch.arange(20) >= pads)[:, None]
    right = expected(model, ids, index, visible)[0]
    parts, cache = [], None
    for begin, end in ((0, 14), (14, 15), (15, 18), (18, 20)):
        given = {"position_ids": index[:, begin:end]} if with_positions else {}
        output = model(ids[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True, **given)
        cache = output.past_key_values
        parts.append(output.logits)
    real = mask.bool()
    same(torch.cat(parts, 1)[real], right[real])


@torch.no_grad()
def test_generation_is_that_of_whole_rows():
    model, ids = patch_model(tiny("qwen3"), "temperature", **OPTIONS), tokens(2, 12)
    mask = (torch.arange(12) >= torch.tensor([[0], [3]])).long()
    written = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=None)
    alone = written[1:, 3:]
    same_as = expected(model, alone)[0].argmax(-1)
    assert written[1, 12:].tolist() == same_as[0, 8:-1].tolist()


@torch.no_grad()
def test_packed_documents_are_counted_each_from_0():
    model, ids = patch_model(tiny(), "temperature", **OPTIONS), tokens(1, 30)
    positions = torch.cat([torch.arange(18), torch.arange(12)])[None]
    document = (torch.arange(30) >= 18)[None]
    visible = oracle.causal(30)[None] & (document[:, :, None] == document[:, None])
    same(model(ids, position_ids=positions, use_cache=False).logits, expected(model, ids, positions, visible)[0])


@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["plain", "reentrant", "non-reentrant"])
def test_gradients_under_a_view(checkpointing):
    model, ids = patch_model(tiny("qwen3"), "temperature", **OPTIONS).train(), tokens(2, 20)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        model.enable_input_require_grads()
    moved = torch.arange(20) + 50 * (torch.arange(20) >= 9)
    right, weights = expected(model, ids, moved.expand(2, -1))
    right.log_softmax(-1)[..., 7].sum().backward()
    with rope_view(model, SKIP):
        output = model(ids, use_cache=False).logits
    output.log_softmax(-1)[..., 7].sum().backward()
    for name, parameter in model.named_parameters():
        scale = weights[name].grad.abs().max()
        torch.testing.assert_close(parameter.grad.double() / scale, weights[name].grad / scale, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_an_adapter_that_is_added_later_is_scaled_too_and_comes_back_when_loaded(tmp_path):
    peft = pytest.importorskip("peft")
    from rope_patch import load_adapter

    model, ids = patch_model(tiny("llama"), "temperature", **OPTIONS), tokens(2, 20)
    model(ids)
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    merged = copy.deepcopy(adapted).merge_and_unload()
    right = expected(merged, ids)[0]
    same(adapted(ids).logits, right)
    same(merged(ids).logits, right)  # the adapter was taken off again
    adapted.save_pretrained(tmp_path)
    same(load_adapter(tiny("llama"), tmp_path)(ids).logits, right)


@torch.no_grad()
def test_a_saved_model_names_its_scale_and_gets_it_back(tmp_path, caplog):
    model, ids = patch_model(tiny(), "temperature", **OPTIONS), tokens(2, 20)
    right = model(ids).logits
    model.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        logging.getLogger("transformers").propagate = True
        stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert RECORD in caplog.text  # Transformers says that it does not know the key
    assert not torch.equal(stock(ids).logits, right)
    assert torch.equal(restore_query_scale(stock)(ids).logits, right)
    assert torch.equal(load_checkpoint(tmp_path)(ids).logits, right)
    again = patch_model(AutoModelForCausalLM.from_pretrained(tmp_path), "abf", theta=1e4)
    same(again(ids).logits, right.double())  # as the key is kept by another rescaling
    assert unpatch_model(restore_query_scale(AutoModelForCausalLM.from_pretrained(tmp_path)))


@torch.no_grad()
def test_a_checkpoint_that_is_loaded_again_by_patch_on_load_keeps_its_scale(tmp_path):
    tiny().save_pretrained(tmp_path / "base")
    ids = tokens(2, 20)
    with patch_on_load("temperature", **OPTIONS):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        model.save_pretrained(tmp_path / "saved")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    same(model(ids).logits, expected(model, ids)[0])
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_it_is_not_exported(tmp_path):
    model = patch_model(tiny(), "temperature", **OPTIONS)
    with pytest.raises(ValueError, match="queries are scaled by their position, which a checkpoint can say for Minis"):
        export(model, tmp_path / "out")


def ministral3(beta, **options):
    rope = {"rope_type": "default", "rope_theta": 1e4, "original_max_position_embeddings": L0}
    torch.manual_seed(0)
    config = Ministral3Config(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        rope_parameters={**rope, "llama_4_scaling_beta": beta}, initializer_range=0.2, **options,
    )  # fmt: skip
    return Ministral3ForCausalLM(config).eval()


@torch.no_grad()
def test_a_family_that_reads_it_gets_it_in_its_own_words_without_hooks(tmp_path):
    ids, right = tokens(2, 20), ministral3(BETA)
    model = patch_model(ministral3(0.0), "temperature", **OPTIONS)
    assert model.config.rope_parameters == right.config.rope_parameters
    assert torch.equal(model(ids).logits, right(ids).logits)
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, right(ids).logits)
    other = patch_model(ministral3(BETA), "log-n", original_max_position_embeddings=L0)
    index, visible = torch.arange(20).expand(2, -1), oracle.causal(20).expand(2, -1, -1)
    scale = CASES["log-n"].query_scale(index.double())
    weights = oracle.weights_of(other)
    same(other(ids).logits, oracle.logits(weights, other.config, ids, index, visible, query_scale=scale))


def test_families_that_compute_queries_elsewhere_are_refused():
    from support.families import tiny_family

    for family, why in (("falcon", "does not hand to them"), ("jetmoe", "a module that gives the queries of a layer")):
        model = tiny_family(family)
        with pytest.raises(ValueError, match=f"rescaling 'temperature': a scale of queries .*{why}"):
            patch_model(model, "temperature", **OPTIONS)
        assert RECORD not in model.config.rope_parameters


def test_self_distillation_runs_two_passes():
    model = patch_model(patch_model(tiny(), "temperature", **OPTIONS), SKIP)
    assert not SelfDistiller(model.train(), ViewConsistency()).one_pass


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("temperature", {"beta": 0.0, "original_max_position_embeddings": 8}, "beta must be .*above 0"),
        ("temperature", {"beta": 0.1, "original_max_position_embeddings": 0}, "original_max_position_embeddings"),
        ("log-n", {}, "needs either original_max_position_embeddings"),
        ("log-n", {"original_max_position_embeddings": 8, "scale": 0.4}, "needs either"),
        ("log-n", {"original_max_position_embeddings": 1}, "at least 2"),
    ],
)
def test_options_out_of_range_are_refused(method, options, message):
    with pytest.raises(ValueError, match=message):
        patch_model(tiny(), method, **options)
