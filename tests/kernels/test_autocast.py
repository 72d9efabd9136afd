"""Under autocast the losses multiply in its dtype, as the layers do that made their inputs, and stay exact else."""

import pytest
import torch
from support.operators import relations

from rope_kernels import attention_map_kl, linear_ce_kl, relation_kl, relation_mse


def rows(device):
    torch.manual_seed(0)
    leaves = [torch.randn(10, 16, device=device) for _ in range(2)] + [torch.randn(50, 16, device=device)]
    return [x.requires_grad_() for x in leaves]


def map_inputs(device):
    return [relations(1, heads, 40, 32, dtype=torch.float32, device=device) for heads in (4, 2)]


def vocabulary(student, view, weight):
    labels = torch.arange(10, device=student.device)
    ones = torch.ones(10, device=student.device)
    return linear_ce_kl(student, view, weight, labels, ones, ones)[0]


def attention(q, k, teacher_q, teacher_k):
    return attention_map_kl(q, k, teacher_q, teacher_k).sum()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["relation_kl", "relation_mse", "attention_map_kl", "linear_ce_kl"])
def test_float32_inputs_are_multiplied_in_the_dtype_of_autocast(name, device):
    if name == "linear_ce_kl":
        inputs, loss = rows(device), vocabulary
    elif name == "attention_map_kl":
        (q, teacher_q), (k, teacher_k) = map_inputs(device)
        inputs, loss = [q, k, teacher_q, teacher_k], attention
    else:
        inputs = list(map_inputs(device)[0])
        operator = {"relation_kl": relation_kl, "relation_mse": relation_mse}[name]
        loss = lambda student, teacher: operator(student, teacher).sum()  # noqa: E731
    leaves = [x for x in inputs if x.requires_grad]
    with torch.autocast(device, torch.bfloat16):
        actual = loss(*inputs)
    assert actual.dtype == torch.float32
    grads = torch.autograd.grad(actual, leaves)
    assert all(g.dtype == torch.float32 for g in grads)
    expected = loss(*(x.to(torch.bfloat16) for x in inputs))
    assert torch.equal(actual, expected)
    assert all(torch.equal(a, b) for a, b in zip(grads, torch.autograd.grad(expected, leaves), strict=True))
    assert not torch.equal(actual, loss(*inputs)), "the dtype makes no difference here"
