"""`relation_kl` on every implementation, against dense float64 maps written from the formula."""

import pytest
import torch
from support.operators import check_relation, relations, visible

from rope_kernels import relation_kl, relation_kl_ref

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 1, 1, 32), F32),
        *(((2, 2, 37, 64), dtype) for dtype in (F32, BF16)),
        *(((1, 1, 130, 80), dtype) for dtype in (F32, BF16, F16)),
        ((1, 1, 65, 192), F16),
    ],
    ids=str,
)
def test_relation_kl_is_as_exact_as_torch(shape, dtype, device):
    student, teacher = relations(*shape, dtype=dtype, device=device)
    seen = visible(shape[2], device=device)
    weight = torch.rand(shape[:3], device=device)
    check_relation(student, teacher, seen, weight)


def test_the_gradient_has_both_roles_of_x(device):
    """Against finite differences of the float64 formula, which know nothing of roles."""
    student, teacher = relations(1, 1, 9, 32, device=device)
    relation_kl(student, teacher).sum().backward()
    seen, step = visible(9, device=device), 1e-5
    for i, d in ((0, 3), (4, 0), (8, 31)):
        moved = [student.detach().double() for _ in range(2)]
        moved[0][0, 0, i, d] += step
        moved[1][0, 0, i, d] -= step
        up, down = (relation_kl_ref(x, teacher.double(), seen).sum() for x in moved)
        assert student.grad[0, 0, i, d].item() == pytest.approx(((up - down) / (2 * step)).item(), rel=1e-4, abs=1e-6)


def test_scales_of_student_and_teacher_are_apart(device):
    student, teacher = relations(1, 2, 40, 32, device=device)
    seen = visible(40, device=device)
    scales = {"student_scale": 0.3, "teacher_scale": 0.1}
    check_relation(student, teacher, seen, torch.ones(1, 2, 40, device=device), scales)


def test_any_layout_gives_the_same(device):
    student, teacher = relations(2, 2, 20, 32, device=device)
    expected = relation_kl(student, teacher)
    expected.sum().backward()
    tokens_first = student.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    features_apart = teacher.transpose(2, 3).contiguous().transpose(2, 3)
    actual = relation_kl(tokens_first, features_apart)
    actual.sum().backward()
    assert torch.equal(actual, expected) and torch.equal(tokens_first.grad, student.grad)
    sliced = torch.cat([student.detach(), teacher], -1)
    assert torch.equal(relation_kl(sliced[..., :32], sliced[..., 32:]), expected)


def test_equal_student_and_teacher_give_zero_and_no_gradient(device):
    student, teacher = relations(1, 2, 70, 64, device=device, dtype=torch.float16)
    kl = relation_kl(student, student.detach())
    kl.sum().backward()
    assert (kl == 0).all() and (student.grad == 0).all()


def test_large_scores_stay_finite(device):
    """Keys of real models give scores of hundreds: relations that are nearly one-hot."""
    student, teacher = relations(1, 1, 60, 128, device=device, spread=6.0)
    seen = visible(60, device=device)
    assert (student @ student.transpose(-1, -2)).max() * 128**-0.5 > 300
    check_relation(student, teacher, seen, torch.ones(1, 1, 60, device=device))


def test_two_runs_give_the_same_bits(device):
    student, teacher = relations(1, 1, 70, 64, device=device, dtype=torch.float16)
    grads = [torch.autograd.grad(relation_kl(student, teacher).sum(), student)[0] for _ in range(2)]
    assert torch.equal(*grads)


def test_float64_is_the_formula():
    student, teacher = relations(1, 2, 33, 32)
    student = student.detach().double().requires_grad_()
    seen = visible(33)
    kl = relation_kl(student, teacher.double())
    assert kl.dtype == torch.float64
    torch.testing.assert_close(kl, relation_kl_ref(student, teacher.double(), seen), rtol=1e-12, atol=1e-13)
    torch.autograd.gradcheck(
        lambda s: relation_kl(s, teacher.double()[..., :5, :]), student[..., :5, :].detach().requires_grad_()
    )


def test_it_compiles_and_recomputes(device):
    from torch.utils.checkpoint import checkpoint

    student, teacher = relations(1, 2, 40, 32, device=device)
    loss = relation_kl(2 * student, teacher).sum()
    (expected,) = torch.autograd.grad(loss, student)
    again = checkpoint(lambda x: relation_kl(2 * x, teacher).sum(), student, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(again, student)[0], expected)
    traced = torch.compile(lambda x: relation_kl(2 * x, teacher).sum(), fullgraph=True, backend="aot_eager")(student)
    assert torch.equal(torch.autograd.grad(traced, student)[0], expected)
