"""A NaN or an infinity in any input of any operator reaches the loss; rows that see nothing stay 0."""

import pytest
import torch
from support.operators import relations

from rope_kernels import (
    attention_map_kl,
    attention_map_kl_ref,
    linear_ce_kl,
    linear_ce_rows,
    relation_kl,
    relation_mse,
)

NAN, INF = float("nan"), float("inf")
VALUES = [NAN, INF, -INF]
N, PADDED, BROKEN = 12, 3, 6


def spoiled(x, where, value):
    """A copy, as a leaf, with one element changed."""
    x = x.detach().clone()
    x[where] = value
    return x.requires_grad_()


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("side", ["student", "teacher"])
@pytest.mark.parametrize("operator", [relation_kl, relation_mse], ids=lambda f: f.__name__)
def test_a_relation_of_a_broken_token(operator, side, value, device):
    """Rows before it, and rows of padding, know nothing of it; all rows after it see it."""
    tensors = dict(zip(("student", "teacher"), relations(1, 2, N, 32, device=device), strict=True))
    clean = operator(*tensors.values(), key_mask=mask(device)).detach()
    tensors[side] = spoiled(tensors[side], (0, 0, BROKEN, 2), value)
    rows = operator(*tensors.values(), key_mask=mask(device))
    assert torch.equal(rows[:, :, :PADDED], torch.zeros(1, 2, PADDED, device=device))
    assert torch.equal(rows[:, 1], clean[:, 1]) and torch.equal(rows[:, 0, :BROKEN], clean[:, 0, :BROKEN])
    assert rows[0, 0, BROKEN].isnan() and not rows.sum().isfinite()
    if value != value or operator is relation_kl:
        assert not rows[0, 0, BROKEN:].isfinite().any()
    rows.sum().backward()
    grad = tensors["student"].grad[0, 0]
    assert grad[BROKEN].isnan().any(), "the broken row's own gradient"
    if value != value:
        assert grad[PADDED:].isnan().all(), "all are keys of a row that is nan, or see the token"


def mask(device):
    key_mask = torch.ones(1, N, dtype=torch.bool, device=device)
    key_mask[:, :PADDED] = False
    return key_mask


@pytest.mark.parametrize(
    ("name", "value"),
    [*(("student_q", value) for value in VALUES), ("student_k", INF), ("teacher_q", -INF), ("teacher_k", NAN)],
)
def test_an_attention_map_of_a_broken_token(name, value, device):
    q, teacher_q = relations(1, 4, N, 32, device=device)
    k, teacher_k = relations(1, 2, N, 32, device=device)
    tensors = {"student_q": q, "student_k": k, "teacher_q": teacher_q, "teacher_k": teacher_k}
    tensors[name] = spoiled(tensors[name], (0, 0, BROKEN, 2), value)
    rows = attention_map_kl(**tensors, key_mask=mask(device))
    assert torch.equal(rows[:, :, :PADDED], torch.zeros(1, 4, PADDED, device=device))
    reached = rows[0, 0, BROKEN] if name.endswith("q") else rows[0, :2, BROKEN:]
    assert not reached.isfinite().any()
    assert rows[0, :, :BROKEN].isfinite().all() and rows[0, 2:].isfinite().all()
    visible = torch.ones(N, N, dtype=torch.bool, device=device).tril() & mask(device)
    expected = attention_map_kl_ref(**tensors, visible=visible)[..., PADDED:]
    assert torch.equal(rows[..., PADDED:].isfinite(), expected.isfinite())


@pytest.mark.parametrize("side", [0, 1])
def test_a_row_whose_scores_are_all_minus_infinity_or_almost(side, device):
    """Its sums are exactly 0, as those of a row that sees nothing."""
    q, k = torch.ones(1, 1, 4, 32, device=device), torch.full((1, 1, 4, 32), -1.0, device=device)
    q[0, 0, 2] = INF
    clean = torch.randn(1, 1, 4, 32, device=device)
    inputs = [q, k, clean, clean] if side == 0 else [clean, clean, q, k]
    rows = attention_map_kl(*inputs)[0, 0]
    assert not rows[2].isfinite() and rows[[0, 1, 3]].isfinite().all()
    q[0, 0, 2] = 1e32  # scores of -6e32, all alike: a uniform map, whose KL is that of the others
    scales = {"student_scale": 1.0, "teacher_scale": 1.0}
    rows = attention_map_kl(*inputs, **scales)[0, 0]
    flat = torch.zeros_like(q)
    flat_inputs = [flat, flat, clean, clean] if side == 0 else [clean, clean, flat, flat]
    expected = attention_map_kl(*flat_inputs, **scales)[0, 0]
    # a fused multiply-add tells such scores from their own maximum: then the row is no number, and never 0
    if device == "cpu" or rows[2].isfinite():
        torch.testing.assert_close(rows[2], expected[2])


def vocabulary_loss(device, **changes):
    """`linear_ce_kl` of three rows, the last one without a label, and the inputs that `changes` did not replace."""
    torch.manual_seed(0)
    hidden_std, hidden_view, weight = (torch.randn(n, 8, device=device) for n in (3, 3, 20))
    labels = torch.tensor([0, 1, -100], device=device)
    inputs = {"hidden_std": hidden_std, "hidden_view": hidden_view, "weight": weight, "labels": labels}
    inputs |= {name: torch.ones(3, device=device) for name in ("ce_weight", "kl_weight")}
    return linear_ce_kl(**(inputs | changes))[0], inputs


@pytest.mark.parametrize(
    ("direction", "softcap", "value"),
    [
        *(("reverse", cap, value) for cap, value in ((None, NAN), (3.0, INF), (None, -INF))),
        *(("forward", cap, value) for cap, value in ((3.0, NAN), (None, INF), (3.0, -INF))),
        *(("jsd", cap, value) for cap, value in ((None, NAN), (3.0, INF), (3.0, -INF))),
    ],
)
def test_linear_ce_kl_of_a_broken_row(direction, softcap, value, device):
    options = {"direction": direction, "softcap": softcap}
    loss, inputs = vocabulary_loss(device, **options)
    assert loss.isfinite()
    for name in ("hidden_std", "hidden_view", "weight"):
        broken = spoiled(inputs[name], (1, 2), value)
        loss, _ = vocabulary_loss(device, **options, **{name: broken})
        assert not loss.isfinite(), name
        (grad,) = torch.autograd.grad(loss, broken)
        assert not grad.isfinite().all(), name
    # without a label a row has its KL alone, and both sides of it may be broken
    both = {name: spoiled(inputs[name], (2, 2), value) for name in ("hidden_std", "hidden_view")}
    assert not vocabulary_loss(device, **options, **both)[0].isfinite()


@pytest.mark.parametrize("value", VALUES)
def test_linear_ce_kl_of_broken_constants(value, device):
    _, inputs = vocabulary_loss(device)
    for name in ("ce_weight", "kl_weight"):
        assert not vocabulary_loss(device, **{name: spoiled(inputs[name], 1, value).detach()})[0].isfinite(), name
    teacher = {"teacher_hidden": spoiled(inputs["hidden_std"], (2, 2), value), "teacher_weight": inputs["weight"]}
    assert not vocabulary_loss(device, **teacher)[0].isfinite()
    if value == value:  # NaN is how a row says that it has no reference
        reference = torch.zeros(3, device=device)
        assert vocabulary_loss(device, ce_reference=reference)[0].isfinite()
        reference[1] = value
        assert not vocabulary_loss(device, ce_reference=reference)[0].isfinite()


@pytest.mark.parametrize("value", VALUES)
def test_linear_ce_rows_of_a_broken_row(value):
    hidden, weight = torch.randn(3, 8), torch.randn(20, 8)
    rows = linear_ce_rows(spoiled(hidden, (1, 2), value), weight, torch.arange(3))
    assert not rows[1].isfinite() and rows[[0, 2]].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("what", ["student", "teacher", "gradient"])
def test_hopper_kernels_hide_nothing_in_their_integer_sums(what, head_dim, value):
    """Converted to an integer nan is 0 and infinity the largest one; several blocks and tiles of both kernels."""
    from rope_kernels.row_kl.hopper_inputs import runs_on_hopper
    from rope_kernels.row_kl.visibility import Visibility

    n, broken = 700, 300
    student, teacher = relations(1, 3, n, head_dim, dtype=torch.bfloat16, device="cuda")
    weight = torch.rand(1, 3, n, device="cuda")
    if what == "student":
        student = spoiled(student, (0, 1, broken, 5), value)
    elif what == "teacher":
        teacher = spoiled(teacher, (0, 1, broken, 5), value).detach()
    else:
        weight[0, 1, broken] = value
    if not runs_on_hopper([student, teacher], Visibility(True)):
        pytest.skip("needs a Hopper GPU")
    rows = relation_kl(student, teacher)
    if what != "gradient":
        assert rows[0, 1, :broken].isfinite().all() and not rows[0, 1, broken:].isfinite().any()
    rows.backward(weight)
    assert rows[0, [0, 2]].isfinite().all() and student.grad[0, [0, 2]].isfinite().all()
    assert not student.grad[0, 1, : broken + 1].isfinite().any(), "keys of the broken row, itself among them"
    if what == "student":
        assert not student.grad[0, 1].isfinite().any()
