"""What the backward on Hopper GPUs finds out of its rows beforehand, in Triton's interpreter."""

import pytest
import torch

from rope_kernels.row_kl import hopper_relation_backward
from rope_kernels.row_kl.triton_tiles import kind_of
from rope_kernels.row_kl.visibility import Visibility

NAN, INF = float("nan"), float("inf")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled here")
@pytest.mark.parametrize("value", [0.0, NAN, INF, -INF])
@pytest.mark.parametrize(("shape", "parts"), [((2, 2, 300, 40), 128), ((1, 3, 130, 128), 1), ((1, 1, 50, 64), 128)])
def test_rows_are_made_ready(shape, parts, value, monkeypatch):
    monkeypatch.setattr(hopper_relation_backward, "_PARTS", parts)
    batch, n_heads, n, head_dim = shape
    heads = batch * n_heads
    student = torch.randn(batch, n, n_heads, head_dim).transpose(1, 2)
    grad = torch.randn(batch, n_heads, n)
    student[0, 0, n - 1, 3] = grad[-1, -1, 7] = value
    softmax = torch.randn(4, batch, n_heads, n)
    plan = hopper_relation_backward._plan.__wrapped__(
        kind_of(student, Visibility(True)), student.stride(), student.stride()[:3], 0.25, 0.25
    )
    padded = plan.rows[2]
    largest, rows = torch.full(plan.largest, 7.0), torch.full(plan.rows, 7.0)
    sums = torch.full(plan.sums, 7, dtype=torch.int32)
    plan.measure(grad, student, largest, sums)
    plan.prepare(grad, *softmax, largest, *rows)
    assert not sums.any()
    top = grad.abs().amax(-1).flatten()
    torch.testing.assert_close(largest[0], top, rtol=0, atol=0, equal_nan=True)
    most = student.abs().amax((-2, -1)).flatten()[:, None]
    weight = grad.view(heads, n) / top[:, None]
    quantum = 2**30 / (1.01 * most)
    expected = torch.zeros(5, heads, padded)
    expected[:2] = -INF
    expected[:2, :, :n] = -(softmax[::2] + softmax[1::2]).view(2, heads, n)
    expected[2, :, :n] = weight
    expected[3, :, :n] = torch.where(weight == 0, 0, quantum / weight)
    expected[4, :, :n] = weight * top[:, None] * 0.25 / quantum + 0 * most
    finite = most[:, 0].isfinite() & top.isfinite()
    assert finite.sum() == heads - (0 if value == 0 else len({0, heads - 1}))
    torch.testing.assert_close(rows[:, finite], expected[:, finite], rtol=1e-6, atol=0)
    assert rows[4, ~finite, :n].isnan().all(), "the unit of what is added to the gradient at the end"
