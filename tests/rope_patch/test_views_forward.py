"""Forward and gradients under every view against the float64 oracle, and the rules of state."""

import pytest
import torch
from support import oracle
from support.tiny import FAMILIES, SLIDING_WINDOW, VOCAB, tiny, tokens

from rope_patch import patch_model, rope_view
from rope_patch.views import Compose, Cyclic, Dilation, NoPE, PosAug, Skip, Standard

pytestmark = pytest.mark.usefixtures("flex_runs_eagerly")

L = 20
FIXED_VIEWS = {
    "standard": Standard(),
    "skip": Skip(split=8, skip=37),
    "skip-back": Skip(split=8, skip=-L),
    "cyclic": Cyclic(shift=6),
    "dilation": Dilation(1.7),
    "posaug": PosAug(0.31),
    "nope": NoPE(),
    "compose": Compose([Skip(split=8, skip=37), PosAug(0.5)]),
}
ATTENTION = ["eager", "sdpa", "flex_attention"]


def expected_index(view, length=L):
    """r(t) written out once more, without the package's tensors."""
    t = torch.arange(length, dtype=torch.float64)
    late = t >= 8
    return {
        "standard": t,
        "skip": t + 37 * late,
        "skip-back": t - L * late,
        "cyclic": (t + 6) % length,
        "dilation": 1.7 * t,
        "posaug": 0.31 * t,
        "nope": 0 * t,
        "compose": 0.5 * (t + 37 * late),
    }[view]


def window_of(family):
    return SLIDING_WINDOW if family == "mistral-sliding" else None


@pytest.mark.parametrize(
    ("view", "family"), list(zip(FIXED_VIEWS, ["llama", "qwen3", "mistral", "mistral-sliding"] * 2, strict=True))
)
def test_logits_and_every_gradient_are_those_of_the_oracle(family, view):
    model = tiny(family, dtype=torch.float64).train()
    ids = tokens(2, L)
    with rope_view(model, FIXED_VIEWS[view]):
        logits = model(ids, use_cache=False).logits
    direction = torch.randn(logits.shape, dtype=torch.float64)
    (logits * direction).sum().backward()  # after the block: nothing of the view is read in backward

    weights = oracle.weights_of(model)
    visible = oracle.causal(L, window_of(family)).expand(2, L, L)
    expected = oracle.logits(weights, model.config, ids, expected_index(view).expand(2, L), visible)
    (expected * direction).sum().backward()
    # Transformers computes norms and angles in float32, also in a float64 model
    torch.testing.assert_close(logits, expected, rtol=2e-4, atol=2e-5)
    for name, parameter in model.named_parameters():
        error = (parameter.grad - weights[name].grad).norm() / weights[name].grad.norm().clamp(min=1e-30)
        if view == "nope" and ("q_norm" in name or "k_norm" in name) and weights[name].grad.norm() < 1e-9:
            continue
        assert error < 1e-4, f"gradient of {name} is off by {error:.1e}"


@pytest.mark.parametrize(("view", "attention"), list(zip(list(FIXED_VIEWS)[1:], [*ATTENTION * 2, "sdpa"], strict=True)))
def test_token_0_moves_the_last_row_without_mask_and_cache(attention, view):
    """The trap of packed masks: perturbed position_ids would cut the row into documents here."""
    model = tiny(attention=attention).train()
    ids = tokens(2, L)
    changed = ids.clone()
    changed[:, 0] = (changed[:, 0] + 1) % VOCAB
    with torch.no_grad(), rope_view(model, FIXED_VIEWS[view]):
        moved = model(changed, use_cache=False).logits[:, -1] - model(ids, use_cache=False).logits[:, -1]
    assert moved.abs().amax() > 1e-3


def test_the_trap_is_real():
    """What the rule guards against: if this starts to fail, Transformers has changed how it reads position_ids."""
    model = tiny()
    ids, positions = tokens(1, L), torch.arange(L)[None]
    changed = ids.clone()
    changed[:, 0] = (changed[:, 0] + 1) % VOCAB
    jump = torch.where(positions >= 8, positions + 37, positions)
    with torch.no_grad():
        rows = [model(i, position_ids=jump, use_cache=False).logits[:, -1] for i in (ids, changed)]
    assert torch.equal(*rows)


@pytest.mark.parametrize(("family", "attention"), [(f, ATTENTION[i % 3]) for i, f in enumerate(FAMILIES)])
@torch.no_grad()
def test_standard_view_and_arange_index_give_the_unpatched_bits(family, attention):
    model = tiny(family, attention)
    ids = tokens(2, L)
    plain = model(ids, use_cache=False).logits
    for view in ({"view": "standard"}, {"index": torch.arange(L)[None]}, {"index": torch.arange(L).double()[None]}):
        with rope_view(model, **view):
            assert torch.equal(model(ids, use_cache=False).logits, plain)
    patch_model(model, "posaug")
    assert torch.equal(model(ids, use_cache=False).logits, plain)  # not in training mode


def test_explicit_index_per_row_and_with_fractions():
    model = tiny(dtype=torch.float64)
    ids = tokens(2, L)
    index = torch.rand(2, L, dtype=torch.float64).cumsum(1) * 3
    with rope_view(model, index=index):
        logits = model(ids, use_cache=False).logits
    expected = oracle.logits(oracle.weights_of(model), model.config, ids, index, oracle.causal(L).expand(2, L, L))
    torch.testing.assert_close(logits, expected, rtol=2e-4, atol=2e-5)


def test_two_views_of_one_batch_in_one_backward():
    model = tiny(dtype=torch.float64).train()
    ids = tokens(1, L)
    total = model(ids, use_cache=False).logits.logsumexp(-1).sum()
    with rope_view(model, FIXED_VIEWS["skip"]):
        total = total + model(ids, use_cache=False).logits.logsumexp(-1).sum()
    total.backward()
    weights = oracle.weights_of(model)
    visible = oracle.causal(L)[None]
    sum(
        oracle.logits(weights, model.config, ids, expected_index(v)[None], visible).logsumexp(-1).sum()
        for v in ("standard", "skip")
    ).backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad - weights[name].grad).norm() < 1e-5 * weights[name].grad.norm(), name


def test_training_forwards_draw_anew_and_equal_seeds_draw_alike():
    runs = []
    for seed in (0, 0, 1):
        model = patch_model(tiny(), "skip", seed=seed).train()
        torch.manual_seed(5)
        ids = tokens(2, L)
        before = torch.get_rng_state()
        runs.append([model(ids, use_cache=False).logits for _ in range(3)])
        assert torch.equal(torch.get_rng_state(), before)  # torch's own generator is left alone
    assert all(torch.equal(a, b) for a, b in zip(runs[0], runs[1], strict=True))
    assert not torch.equal(runs[0][0], runs[0][1])
    assert not torch.equal(runs[0][0], runs[2][0])


def test_rows_of_a_batch_get_their_own_draws():
    model = patch_model(tiny(), "skip").train()
    ids = tokens(1, L).expand(4, L)
    logits = model(ids, use_cache=False).logits
    assert all(not torch.equal(logits[0], logits[i]) for i in range(1, 4))


def test_when_always_also_perturbs_evaluation():
    model = tiny()
    ids = tokens(1, L)
    plain = model(ids).logits
    patch_model(model, "skip", when="always")
    assert not torch.equal(model(ids).logits, plain)


def test_nested_views_end_one_by_one():
    model = tiny()
    ids = tokens(1, L)
    plain = model(ids).logits
    with rope_view(model, NoPE()):
        outer = model(ids).logits
        with rope_view(model, Skip(split=8, skip=9)):
            assert not torch.equal(model(ids).logits, outer)
        assert torch.equal(model(ids).logits, outer)
    assert torch.equal(model(ids).logits, plain)
    assert not model.model._forward_pre_hooks and not model.model.rotary_emb._forward_pre_hooks


def test_a_block_that_raises_leaves_the_model_as_it_was():
    model = tiny()
    ids = tokens(1, L)
    plain = model(ids).logits
    with pytest.raises(RuntimeError, match="stop"), rope_view(model, NoPE()):
        raise RuntimeError("stop")
    with pytest.raises(ValueError, match="split must be below"), rope_view(model, Skip(split=L)):
        model(ids)
    assert torch.equal(model(ids).logits, plain)


def test_a_view_that_no_rotary_module_saw_is_an_error():
    model = tiny()
    model.model.forward = lambda input_ids: input_ids  # a decoder that takes its angles from elsewhere
    with rope_view(model, NoPE()), pytest.raises(RuntimeError, match="called none of its rotary modules"):
        model.model(tokens(1, L))


def test_positions_with_several_axes_are_refused():
    model = tiny()
    with rope_view(model, NoPE()), pytest.raises(ValueError, match="several axes"):
        model.model(tokens(1, L), position_ids=torch.zeros(3, 1, L, dtype=torch.long))
