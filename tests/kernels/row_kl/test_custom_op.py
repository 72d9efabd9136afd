"""Registered operators as torch.compile needs them: what they say of their outputs holds for every layout of inputs."""

import functools
import itertools

import pytest
import torch
from support.operators import implementation, relations

from rope_kernels import attention_map_kl, make_visibility, relation_kl
from rope_kernels.row_kl import custom_op
from rope_kernels.row_kl.hopper_inputs import heads_of_a_launch
from rope_kernels.row_kl.visibility import Visibility

HEADS, KV_HEADS, N, D = 2, 1, 12, 16


def tensor(layout, heads, batch=2, n=N):
    shape = {"one token": (batch, heads, 1, D), "no tokens": (batch, heads, 0, D), "no rows": (0, heads, n, D)}
    if layout == "transposed":  # as attention layers have it: tokens before heads
        return torch.randn(batch, n, heads, D).transpose(1, 2)
    if layout == "strided":
        return torch.randn(batch, heads, 2 * n, 2 * D)[:, :, ::2, :D]
    return torch.randn(shape.get(layout, (batch, heads, n, D)))


def visibility(kind, batch, n):
    if kind == "plain" or not batch * n:
        return Visibility(kind == "plain")
    key_mask = torch.ones(batch, n, dtype=torch.bool)
    key_mask[0, : n // 3] = False
    borders = sorted({0, n // 2, *range(0, batch * n + 1, n)})
    return make_visibility(batch, n, torch.device("cpu"), causal=True, key_mask=key_mask, cu_seqlens=borders)


@pytest.mark.parametrize(
    ("path", "layout", "kind"),
    [
        ("chunked", "contiguous", "plain"),
        ("chunked", "transposed", "padded and packed"),
        ("chunked", "strided", "plain"),
        ("chunked", "one token", "padded and packed"),
        ("chunked", "no tokens", "plain"),
        ("chunked", "no rows", "padded and packed"),
        ("interpreter", "transposed", "padded and packed"),
        ("interpreter", "no tokens", "plain"),
    ],
)
@pytest.mark.parametrize("operator", ["relation", "attention map"])
def test_opcheck(operator, path, layout, kind, monkeypatch):
    implementation(path, monkeypatch)
    q, teacher_q = (tensor(layout, HEADS) for _ in range(2))
    k, teacher_k = (None, None) if operator == "relation" else (tensor(layout, KV_HEADS) for _ in range(2))
    visible = visibility(kind, q.shape[0], q.shape[2])
    settings = (0.3, 0.2, visible.causal, *visible.tensors)
    torch.library.opcheck(custom_op._forward_op, (q, k, teacher_q, teacher_k, *settings))
    _, parts = custom_op._forward(q, k, teacher_q, teacher_k, *settings)
    grad = torch.rand(q.shape[2::-1]).permute(2, 1, 0)
    torch.library.opcheck(custom_op._backward_op, (grad, q, k, teacher_q, teacher_k, parts, *settings))


@pytest.mark.parametrize("path", ["chunked", "interpreter"])
def test_what_an_earlier_call_found_is_not_computed_again(path, monkeypatch):
    implementation(path, monkeypatch)
    q, k, teacher_q, teacher_k = (tensor("transposed", heads) for heads in (HEADS, KV_HEADS, HEADS, KV_HEADS))
    visible = visibility("padded and packed", *q.shape[::2])
    weights = torch.rand(q.shape[:3])
    found, results = [], []
    for _ in range(2):
        leaves = [x.clone(memory_format=torch.preserve_format).requires_grad_() for x in (q, k)]
        kl = attention_map_kl(*leaves, teacher_q, teacher_k, visibility=visible, found=found)
        results.append((kl.detach().clone(), *torch.autograd.grad((kl * weights).sum(), leaves)))
        monkeypatch.setattr(custom_op, "_forward", None)  # a second forward would raise
    assert all(torch.equal(first, again) for first, again in zip(*results, strict=True))


@pytest.mark.slow
def test_inductor_gives_the_numbers_of_eager():
    """Forward and backward on the layout of attention layers: the backward's memory is laid out beforehand."""
    first, teacher = (torch.randn(2, 40, 4, 32).transpose(1, 2) for _ in range(2))
    key, teacher_key = (torch.randn(2, 40, 2, 32).transpose(1, 2) for _ in range(2))
    visible = visibility("padded and packed", 2, 40)

    def loss(student, key):
        relation = relation_kl(2 * student, teacher)
        return (relation + attention_map_kl(student, key, teacher, teacher_key, visibility=visible)).square().sum()

    results = []
    for run in (loss, torch.compile(loss, fullgraph=True)):
        leaves = [x.clone(memory_format=torch.preserve_format).requires_grad_() for x in (first, key)]
        value = run(*leaves)
        results.append((value.detach(), *torch.autograd.grad(value, leaves)))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)


def test_compiled_gradients_have_the_layout_that_was_announced():
    """What inductor lays out memory by, without its compiler."""
    student = torch.randn(2, 40, 3, 32).transpose(1, 2).requires_grad_()
    teacher = torch.randn(2, 40, 3, 32).transpose(1, 2)
    expected = torch.autograd.grad(relation_kl(student, teacher).sum(), student)[0]
    traced = torch.compile(relation_kl, fullgraph=True, backend="aot_eager")(student, teacher)
    actual = torch.autograd.grad(traced.sum(), student)[0]
    assert torch.equal(actual, expected) and actual.stride() == expected.stride() == student.stride()


@pytest.mark.gpu
def test_packed_rows_on_a_gpu_wait_for_nothing():
    student, teacher = relations(2, 2, 64, 64, dtype=torch.bfloat16, device="cuda")
    borders = torch.tensor([0, 1, 30, 64, 128], device="cuda", dtype=torch.int32)
    key_mask = torch.ones(2, 64, dtype=torch.bool, device="cuda")
    call = functools.partial(relation_kl, student, teacher, True, key_mask, borders)
    expected = call().detach()  # compiled and tuned here
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(actual, expected)
    alone = relation_kl(student[:1, :, 1:30], teacher[:1, :, 1:30])
    torch.testing.assert_close(actual[:1, :, 1:30], alone, rtol=1e-3, atol=1e-5)


def test_integer_sums_of_several_heads_stay_within_the_bound():
    """And no launch is without heads; one head alone takes what it takes."""
    bound = 32 * 2**20
    for heads, mebibytes in itertools.product([1, 3, 5, 7, 32, 33], [0.5, 3, 8, 12.8, 31, 32, 33, 64]):
        sums = int(mebibytes * 2**20)
        at_once = heads_of_a_launch(heads, sums)
        assert 1 <= at_once <= heads and (at_once == 1 or at_once * sums <= bound), (heads, mebibytes)
        launches = -(-heads // at_once)
        assert launches == 1 or (launches - 1) * max(1, bound // sums) < heads, "more launches than it takes"
