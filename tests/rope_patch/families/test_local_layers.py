"""Layers with a window of their own stay at true positions under a view, in every family that has both kinds."""

from contextlib import contextmanager

import pytest
import torch
from support.families import families, tiny_family
from support.tiny import MIXED, VOCAB, gemma3, tiny, tokens
from torch._dynamo.testing import CompileCounter
from transformers import AutoConfig, AutoModelForCausalLM

from rope_patch import describe, patch_model, rope_view, unpatch_model
from rope_patch.rope.rotary import find_decoder, rotary_by_name
from rope_patch.views import PerLayer, PosAug, RandomBase, Skip, Standard, Uniform

N, SPLIT, SKIP = 20, 9, 30
VIEW = Skip(split=SPLIT, skip=SKIP)
MOVED = torch.arange(N)[None] + SKIP * (torch.arange(N) >= SPLIT)

# the rotary module of the first is called once for each layer type, that of the second once for all layers
ONCE_A_TYPE = [
    "dots3_note_text", "gemma3_text", "gemma3n_text", "gemma4_text", "lfm3", "mimo_v2_flash", "modernbert-decoder",
    "olmo3", "zaya",
]  # fmt: skip
ONCE_FOR_ALL = ["cwm", "gemma2", "gpt_oss", "granite_swa", "granitemoe_swa", "llama4_text", "vaultgemma"]
NO_ROPE_IN_FULL_LAYERS = ["afmoe", "cohere2", "exaone4", "flint", "kolibri1", "lara_mini"]


def here(names):
    """Those of them that this Transformers has."""
    return [name for name in names if name in families()]


def is_local(layer_type):
    return "sliding" in layer_type or "chunked" in layer_type


@contextmanager
def moved_by_hand(model, layers, index=MOVED):
    """The family's own model, some of whose layers are given cosines and sines of `index`."""
    decoder, calls, handles = find_decoder(model), [], []

    def keep_call(module, args, kwargs, output):
        calls.append((module, args, kwargs, output))

    def moved(value):
        """What the rotary module gives for `index`, if `value` is what it gave for true positions."""
        for module, args, kwargs, output in calls:
            if value is output and "position_ids" in kwargs:
                return module.forward(*args, **{**kwargs, "position_ids": index})
            if value is output:
                return module.forward(args[0], index, *args[2:], **kwargs)
        return value

    def enter(layer, args, kwargs):
        return tuple(map(moved, args)), {name: moved(value) for name, value in kwargs.items()}

    for module in rotary_by_name(decoder).values():
        handles.append(module.register_forward_hook(keep_call, with_kwargs=True))
    for i in layers:
        handles.append(decoder.layers[i].register_forward_pre_hook(enter, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def logits(model, ids, **inputs):
    return model(ids, use_cache=False, **inputs).logits


def kinds(model):
    """Indices of local layers and of the others."""
    types = find_decoder(model).config.layer_types
    local = [i for i, layer_type in enumerate(types) if is_local(layer_type)]
    return local, [i for i in range(len(types)) if i not in local]


@pytest.mark.parametrize("family", here(ONCE_A_TYPE + ONCE_FOR_ALL))
@torch.no_grad()
def test_a_view_is_in_full_layers_alone(family):
    model, ids = tiny_family(family), tokens(2, N)
    local, full = kinds(model)
    assert local and full
    rotated = [i for i in full if find_decoder(model).config.layer_types[i] != "conv"]
    plain = logits(model, ids)
    with moved_by_hand(model, rotated):
        expected = logits(model, ids)
    with moved_by_hand(model, local + rotated):
        everywhere = logits(model, ids)
    for options in ({"view": VIEW}, {"index": MOVED}):
        with rope_view(model, **options):
            seen = logits(model, ids)
        torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-5)
        assert (seen - plain).abs().max() > 1e-4 * plain.std() < (seen - everywhere).abs().max()
    assert torch.equal(logits(model, ids), plain)


@pytest.mark.parametrize("family", here(NO_ROPE_IN_FULL_LAYERS))
@torch.no_grad()
def test_where_local_layers_alone_have_rope_from_one_table_a_view_moves_them(family):
    """As a rescaling rescales them: the table has no other layers."""
    model, ids = tiny_family(family), tokens(2, N)
    local, full = kinds(model)
    plain = logits(model, ids)
    with moved_by_hand(model, full):
        assert torch.equal(logits(model, ids), plain), "these layers have RoPE"
    with moved_by_hand(model, local):
        expected = logits(model, ids)
    with rope_view(model, VIEW):
        torch.testing.assert_close(logits(model, ids), expected, rtol=1e-4, atol=1e-5)
    assert (expected - plain).abs().max() > 1e-4 * plain.std()
    assert describe(model).local_layers == ()


@pytest.mark.skipif("beam" not in families(), reason="a family of a later Transformers")
def test_where_no_layer_type_with_rope_looks_far_views_are_refused_as_rescalings_are():
    model = tiny_family("beam")
    for change in (lambda: patch_model(model, VIEW), lambda: patch_model(model, "pi", factor=2.0)):
        with pytest.raises(ValueError, match="that have RoPE look back no further than a window of their own"):
            change()
    with pytest.raises(ValueError, match="look back no further"), rope_view(model, index=MOVED):
        pass
    assert "look back no further" in describe(model).missing_capabilities["views"]
    patch_model(model, Standard())


OF_TWO_LAYERS = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def with_switches(family, **switches):
    config = AutoConfig.for_model(family, **OF_TWO_LAYERS, **switches)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@pytest.mark.parametrize(
    ("family", "switches"),
    [
        ("smollm3", {"no_rope_layers": [0, 0]}),
        ("cohere2", {"layer_types": ["full_attention"] * 2}),
        ("exaone4", {"layer_types": ["full_attention"] * 2, "sliding_window": 8}),
        ("granite_swa", {"layer_rope_theta": [0, 0]}),
        ("falcon", {"alibi": True}),
    ],
)
@torch.no_grad()
def test_where_no_layer_has_rope_views_and_rescalings_are_refused(family, switches):
    if family not in families():
        pytest.skip("a family of a later Transformers")
    model, ids = with_switches(family, **switches), tokens(1, N)
    mask = torch.ones(1, N)  # with one, a jump in position_ids is no border
    plain, moved = (logits(model, ids, attention_mask=mask, position_ids=i) for i in (torch.arange(N)[None], MOVED))
    assert torch.equal(plain, moved), "positions count"
    for change in (lambda: patch_model(model, VIEW), lambda: patch_model(model, "yarn", factor=2.0)):
        with pytest.raises(ValueError, match=f"{type(find_decoder(model)).__name__} switches RoPE off in every layer"):
            change()
    with pytest.raises(ValueError, match="switches RoPE off"), rope_view(model, index=MOVED):
        pass
    assert "switches RoPE off" in describe(model).missing_capabilities["views"]
    patch_model(model, Standard())


@torch.no_grad()
def test_where_some_layers_have_rope_both_are_taken():
    model, ids = with_switches("smollm3", no_rope_layers=[0, 1]), tokens(1, N)
    plain = logits(model, ids)
    with moved_by_hand(model, [1]):
        expected = logits(model, ids)
    with rope_view(model, VIEW):
        torch.testing.assert_close(logits(model, ids), expected, rtol=1e-4, atol=1e-5)
    assert not torch.equal(logits(patch_model(model, "yarn", factor=2.0), ids), plain)


def both_kinds():
    return [pytest.param(gemma3, id="gemma3"), pytest.param(lambda: tiny("qwen3", **MIXED), id="qwen3-mixed")]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("make", both_kinds())
def test_gradients_are_those_of_full_layers_that_are_moved_by_hand(make, checkpointing):
    model, ids, gradients = make().train(), tokens(2, N), []
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    _, full = kinds(model)

    def loss():
        return torch.nn.functional.cross_entropy(logits(model, ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    with moved_by_hand(model, full):
        loss().backward()
    gradients.append([p.grad.clone() for p in model.parameters()])
    model.zero_grad()
    with rope_view(model, VIEW):
        under_view = loss()
    under_view.backward()  # after the block, as a trainer may
    gradients.append([p.grad.clone() for p in model.parameters()])
    for expected, seen in zip(*gradients, strict=True):
        torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("make", both_kinds())
@torch.no_grad()
def test_packed_padded_and_cached_tokens_are_those_of_documents_alone(make):
    model, ids = make(), tokens(2, N)
    with rope_view(model, VIEW):
        alone = logits(model, ids)
        packed = torch.arange(N).repeat(2)[None]
        seen = logits(model, ids.reshape(1, -1), position_ids=packed)
        torch.testing.assert_close(seen.view(2, N, -1), alone, rtol=1e-4, atol=1e-5)
        padded = torch.cat([torch.zeros(2, 5, dtype=torch.int64), ids], 1)
        mask = (torch.arange(N + 5) >= 5).long().expand(2, -1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        seen = logits(model, padded, attention_mask=mask, position_ids=positions)[:, 5:]
        torch.testing.assert_close(seen, alone, rtol=1e-4, atol=1e-5)
        out = model(ids[:, :12], use_cache=True)
        parts = [out.logits]
        for t in range(12, N):
            parts.append(model(ids[:, t : t + 1], past_key_values=out.past_key_values, use_cache=True).logits)
        torch.testing.assert_close(torch.cat(parts, 1), alone, rtol=1e-4, atol=1e-5)
        grown = ids
        for _ in range(4):
            grown = torch.cat([grown, logits(model, grown)[:, -1].argmax(-1, keepdim=True)], 1)
        assert torch.equal(model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False), grown)


@pytest.mark.slow  # compiles
@pytest.mark.parametrize("make", both_kinds())
@torch.no_grad()
def test_one_whole_graph_of_torch_compile(make):
    model, ids = make(), tokens(2, N)
    plain = logits(model, ids)
    torch._dynamo.reset()
    counter = CompileCounter()
    with rope_view(model, Skip(skip=Uniform(1, 50)), seed=3):
        expected = [logits(model, ids) for _ in range(2)]
    with rope_view(model, Skip(skip=Uniform(1, 50)), seed=3):
        run = torch.compile(model, backend=counter, fullgraph=True)
        for right in expected:  # each forward has draws of its own
            torch.testing.assert_close(run(ids, use_cache=False).logits, right, rtol=1e-4, atol=1e-5)
            assert (right - plain).abs().max() > 1e-3
    assert counter.frame_count == 1
    torch._dynamo.reset()


@torch.no_grad()
def test_frequencies_of_local_layers_are_those_of_the_schedule():
    model, ids = gemma3(), tokens(1, N)
    view = RandomBase(4.0)
    seen = {}
    model.model.rotary_emb.register_forward_hook(
        lambda m, args, kwargs, out: seen.setdefault(kwargs.get("layer_type", args[-1]), []).append(out[0]),
        with_kwargs=True,
    )
    logits(model, ids)
    with rope_view(model, view):
        logits(model, ids)
    assert torch.equal(*seen["sliding_attention"])
    assert not torch.equal(*seen["full_attention"])


@torch.no_grad()
def test_layers_that_are_named_are_moved_even_where_they_are_local():
    model, ids = tiny("qwen3", **MIXED), tokens(2, N)
    for layers, moved in (((0,), [0]), ((0, 1), [0, 1]), ("bottom", None), ("top", [1])):
        view = PerLayer(VIEW, layers)
        if moved is None:
            with pytest.raises(ValueError, match="layers='bottom' would change nothing: it leaves no layers but local"):
                patch_model(model, view)
            continue
        with moved_by_hand(model, moved):
            expected = logits(model, ids)
        with rope_view(model, view):
            torch.testing.assert_close(logits(model, ids), expected, rtol=1e-4, atol=1e-5)
    alphas = PosAug(2.0)
    with moved_by_hand(model, [1], 2 * torch.arange(N)[None]):
        expected = logits(model, ids)
    with rope_view(model, alphas):
        torch.testing.assert_close(logits(model, ids), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", both_kinds())
@torch.no_grad()
def test_layers_that_are_wrapped_after_the_patch_or_before_it(make):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model, ids = make(), tokens(2, N)
    with rope_view(model, VIEW):
        expected = logits(model, ids)
    for first in (True, False):
        wrapped = make()
        if first:
            patch_model(wrapped, VIEW, when="always")
        for i, layer in enumerate(wrapped.model.layers):
            wrapped.model.layers[i] = checkpoint_wrapper(layer)
        if not first:
            patch_model(wrapped, VIEW, when="always")
        torch.testing.assert_close(logits(wrapped, ids), expected)


def test_describe_names_the_layers_that_stay():
    for make in (gemma3, lambda: tiny("qwen3", **MIXED)):
        model = patch_model(make(), "skip")
        assert describe(model).local_layers == ("sliding_attention",)
        assert "local layers    sliding_attention, which a view leaves at true positions" in str(describe(model))
        unpatch_model(model)
        assert not any(layer._forward_pre_hooks for layer in model.model.layers)
    assert describe(tiny("mistral-sliding")).local_layers == ()
    assert "local layers" not in str(describe(tiny()))
