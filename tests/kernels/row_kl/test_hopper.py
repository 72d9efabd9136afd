"""What only the Hopper kernels can get wrong: borders of tiles and groups, TMA's layouts, sums that overflow."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.operators import check_attention_map, check_relation, relations

from rope_kernels import relation_kl, relation_kl_ref
from rope_kernels.row_kl.visibility import Visibility

pytestmark = pytest.mark.gpu


def causal(n):
    return torch.ones(n, n, dtype=torch.bool, device="cuda").tril()


def require_hopper(*tensors):
    from rope_kernels.row_kl.hopper_inputs import runs_on_hopper

    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    assert runs_on_hopper(list(tensors), Visibility(True))


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 2),
    n_heads=st.integers(1, 3),
    n=st.one_of(st.integers(1, 600), st.sampled_from([63, 64, 65, 127, 128, 129, 191, 192, 193, 257])),
    head_dim=st.sampled_from([32, 64, 80, 128]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    transposed=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_shape_is_as_exact_as_torch(batch, n_heads, n, head_dim, dtype, transposed, seed):
    torch.manual_seed(seed)
    student, teacher = relations(batch, n_heads, n, head_dim, dtype=dtype, device="cuda")
    if transposed:  # as attention layers have it: tokens before heads
        student, teacher = (x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in (student, teacher))
        student.requires_grad_()
    require_hopper(student, teacher)
    check_relation(student, teacher, causal(n), torch.rand(batch, n_heads, n, device="cuda"))


@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
def test_attention_maps_of_shared_keys(n_kv_heads):
    q, teacher_q = relations(2, 4, 333, 64, dtype=torch.bfloat16, device="cuda")
    k, teacher_k = relations(2, n_kv_heads, 333, 64, dtype=torch.bfloat16, device="cuda")
    require_hopper(q, k, teacher_q, teacher_k)
    check_attention_map(q, k, teacher_q, teacher_k, causal(333), torch.rand(2, 4, 333, device="cuda"))


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_a_row_whose_sum_overflows_is_computed_anew(side):
    """A key far above all near the diagonal: 2^127 of the diagonal's own weight are not enough."""
    student, teacher = relations(1, 2, 500, 64, dtype=torch.bfloat16, device="cuda")
    long = student if side == "student" else teacher
    with torch.no_grad():
        long[:, :, 7] = 40 * long[:, :, 400]
    require_hopper(student, teacher)
    kl = relation_kl(student, teacher)
    scores = long[0, 0, 400].double() @ torch.stack([long[0, 0, 7], long[0, 0, 400]]).double().T * 64**-0.5
    assert scores[0] - scores[1] > 100, "not far enough to overflow"
    assert kl.isfinite().all()
    check_relation(student, teacher, causal(500), torch.rand(1, 2, 500, device="cuda"))


def test_two_runs_give_the_same_bits():
    student, teacher = relations(1, 4, 1000, 128, dtype=torch.bfloat16, device="cuda")
    require_hopper(student, teacher)
    grads = [torch.autograd.grad(relation_kl(student, teacher).sum(), student)[0] for _ in range(2)]
    assert torch.equal(*grads)


def test_rows_whose_gradients_differ_by_orders_of_magnitude():
    student, teacher = relations(1, 2, 300, 64, dtype=torch.bfloat16, device="cuda")
    require_hopper(student, teacher)
    weight = torch.logspace(-6, 4, 300, device="cuda") * torch.tensor([1.0, -1.0, 0.0], device="cuda").repeat(100)
    weight = weight.flip(0).expand(1, 2, 300)  # so that no row sees much of larger ones that come after it
    grad = torch.autograd.grad(relation_kl(student, teacher), student, weight)[0]
    exact = student.detach().double().requires_grad_()
    relation_kl_ref(exact, teacher.double(), causal(300)).mul(weight).sum().backward()
    for rows in (slice(0, 100), slice(100, 200), slice(290, 300)):
        error = (grad[:, :, rows].double() - exact.grad[:, :, rows]).norm() / exact.grad[:, :, rows].norm()
        assert error < 1e-2, (rows, error)


def test_a_gradient_of_zeros():
    student, teacher = relations(1, 2, 100, 64, dtype=torch.bfloat16, device="cuda")
    require_hopper(student, teacher)
    grad = torch.autograd.grad(relation_kl(student, teacher), student, torch.zeros(1, 2, 100, device="cuda"))[0]
    assert grad.abs().max() == 0


@pytest.mark.parametrize(("n_heads", "n", "head_dim"), [(32, 2048, 128), (9, 4096, 64)])
def test_every_block_of_a_busy_gpu(n_heads, n, head_dim):
    """More blocks than run at once: what one of them loses is nothing in a norm of all, and all of its own rows."""
    student, teacher = relations(1, n_heads, n, head_dim, dtype=torch.bfloat16, device="cuda")
    require_hopper(student, teacher)
    actual = torch.autograd.grad(relation_kl(student, teacher).sum(), student)[0].double()
    for head in range(n_heads):
        exact = student[:, head : head + 1].detach().double().requires_grad_()
        relation_kl_ref(exact, teacher[:, head : head + 1].double(), causal(n)).sum().backward()
        expected = exact.grad[0, 0].view(-1, 64, head_dim)
        error = (actual[0, head].view(-1, 64, head_dim) - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(
            dim=1
        )
        assert error.max() < 2e-2, (head, error.argmax(), error.max())


@pytest.mark.parametrize("head_dim", [64, 128])
def test_heads_of_several_launches(monkeypatch, head_dim):
    """Their integer sums are the same memory, zeroed between launches."""
    from rope_kernels.row_kl import hopper_inputs

    student, teacher = relations(2, 5, 700, head_dim, dtype=torch.bfloat16, device="cuda")
    require_hopper(student, teacher)
    grad = torch.rand(2, 5, 700, device="cuda")
    at_once = torch.autograd.grad(relation_kl(student, teacher), student, grad)[0]
    monkeypatch.setattr(hopper_inputs, "_SUMS_BYTES", 3 * 768 * head_dim * 4)
    assert torch.equal(torch.autograd.grad(relation_kl(student, teacher), student, grad)[0], at_once)
