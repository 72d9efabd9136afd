"""Packed and padded rows on the Hopper kernels: on a GPU, and their code over torch tensors on a CPU."""

from collections import Counter

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import gluon_on_cpu
from support.operators import check_attention_map, check_relation, relations

from rope_kernels import Visibility, relation_kl
from rope_kernels.row_kl import custom_op

NAN, INF = float("nan"), float("inf")
# documents that end before, at and behind the borders of tiles
LENGTHS = [1, 17, 63, 64, 65, 127, 128, 129, 200]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def use_hopper(device, monkeypatch):
    if device == "cpu":
        if torch.cuda.is_available():
            pytest.skip("the kernels are compiled here")
        gluon_on_cpu.emulate_hopper(monkeypatch)
    elif torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    """Where Hopper's kernels run, or their code does."""
    use_hopper(request.param, monkeypatch)
    return request.param


def dtype_on(device):
    return torch.bfloat16 if device == "cuda" else torch.float16  # the interpreter's numpy has no bfloat16


def packed(batch, lengths, padding, device):
    """[batch, n] documents of `lengths`, in another order in each row, -1 on padding."""
    rows = []
    for b in range(batch):
        order = lengths[b % len(lengths) :] + lengths[: b % len(lengths)]
        row = torch.repeat_interleave(torch.arange(len(order)), torch.tensor(order))
        cut = int(torch.randint(0, len(row) + 1, ()))
        if padding == "left":
            row[:cut] = -1
        elif padding == "right":
            row[cut:] = -1
        elif padding == "holes":
            row[torch.rand(len(row)) < 0.02] = -1
            row[cut : cut + 70] = -1
        rows.append(row)
    return torch.stack(rows).to(device)


def seen_of(document):
    """[batch, 1, n, n] by the meaning of documents."""
    n = document.shape[1]
    same = document[:, None, :, None] == document[:, None, None, :]
    return same & (document >= 0)[:, None, :, None] & torch.ones(n, n, dtype=torch.bool, device=document.device).tril()


def compare(device, batch, n_heads, lengths, padding, head_dim, dtype, seed):
    """Both operators against float64, rows and all gradients; GQA."""
    torch.manual_seed(seed)
    document = packed(batch, lengths, padding, device)
    n = document.shape[1]
    visibility, seen = Visibility.of_documents(document), seen_of(document)
    student, teacher = relations(batch, n_heads, n, head_dim, dtype=dtype, device=device)
    if device == "cuda":
        assert custom_op.runs_on_hopper((student, teacher), visibility)
    weight = torch.rand(batch, n_heads, n, device=device)
    rows = check_relation(student, teacher, seen, weight, visibility=visibility)
    assert not rows[(document < 0)[:, None].expand_as(rows)].any()
    k, teacher_k = relations(batch, 1, n, head_dim, dtype=dtype, device=device)
    q = student.detach().requires_grad_()
    check_attention_map(q, k, teacher, teacher_k, seen, weight, visibility=visibility)


PACKINGS = {
    "batch": st.integers(1, 2),
    "n_heads": st.integers(1, 2),
    "lengths": st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=4),
    "padding": st.sampled_from(["none", "left", "right", "holes"]),
    "seed": st.integers(0, 2**31),
}


@settings(max_examples=8, deadline=None, derandomize=True)
@given(head_dim=st.sampled_from([64, 96, 128]), **PACKINGS)
@example(batch=2, n_heads=1, lengths=[200, 1, 129, 64], padding="none", head_dim=64, seed=0)
@example(batch=1, n_heads=1, lengths=[65, 200, 127], padding="holes", head_dim=128, seed=1)
def test_the_code_of_the_kernels_on_any_packing(batch, n_heads, lengths, padding, head_dim, seed):
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_hopper("cpu", monkeypatch)
        compare("cpu", batch, n_heads, lengths, padding, head_dim, torch.float16, seed)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_code_of_the_kernels_without_documents(monkeypatch, head_dim):
    use_hopper("cpu", monkeypatch)
    student, teacher = relations(1, 2, 330, head_dim, dtype=torch.float16)
    check_relation(student, teacher, torch.ones(330, 330, dtype=torch.bool).tril(), torch.rand(1, 2, 330))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@settings(max_examples=30, deadline=None)
@given(dtype=st.sampled_from([torch.bfloat16, torch.float16]), **PACKINGS)
@example(batch=2, n_heads=2, lengths=[1, 17, 63, 64, 65, 128, 129, 1000], padding="none", seed=0, dtype=torch.bfloat16)
@example(batch=2, n_heads=2, lengths=[1000, 129, 128, 65, 64, 63, 17, 1], padding="right", seed=1, dtype=torch.float16)
@example(batch=1, n_heads=2, lengths=[1000, 800], padding="holes", seed=2, dtype=torch.bfloat16)
def test_any_packing_is_as_exact_as_torch(batch, n_heads, lengths, padding, head_dim, dtype, seed):
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_hopper("cuda", monkeypatch)
        compare("cuda", batch, n_heads, lengths, padding, head_dim, dtype, seed)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_tiles_outside_of_documents_are_skipped(monkeypatch, head_dim):
    """Documents of three tiles of 128 tokens or two of 192: no block reads a tile that none of its rows can meet."""
    loads = []
    load = gluon_on_cpu.NAMES["async_load"]
    monkeypatch.setitem(gluon_on_cpu.NAMES, "async_load", lambda *x: (loads.append(x[0].block_shape[2]), load(*x)))
    use_hopper("cpu", monkeypatch)
    document = torch.arange(1536)[None] // 384
    document[:, 1152:] = -1  # a document, and padding, whose blocks read one tile
    student, teacher = relations(1, 1, 1536, head_dim, dtype=torch.float16)
    relation_kl(student, teacher, visibility=Visibility.of_documents(document)).sum().backward()
    groups = 192 if head_dim == 64 else 128
    # a document's 3 blocks of the forward read 1, 2 and 3 tiles, and each its own rows in two loads; two sides
    forward = [128] * 2 * (3 * (1 + 2 + 3) + 3) + [64] * 2 * 2 * 12
    # a block of the backward reads its own keys and the tiles from there to the end of the document
    blocks = range(0, 384, groups)
    backward = [64] * 2 * (3 * sum((384 - first) // 64 for first in blocks) + len(blocks) + 1536 // 64)
    assert Counter(loads) == Counter(forward + backward)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("what", ["student", "teacher", "gradient"])
def test_a_broken_document_leaves_the_others_alone(device, what, value):
    """Integer sums know no nan, and their unit is that of a head with all its documents."""
    n, broken, head_dim = 768, 300, 64
    document = (torch.arange(n, device=device)[None] + 128) // 256  # borders at 128 and 384
    document[:, 640:] = -1
    visibility = Visibility.of_documents(document)
    student, teacher = relations(1, 2, n, head_dim, dtype=dtype_on(device), device=device)
    weight = torch.rand(1, 2, n, device=device)
    clean = relation_kl(student, teacher, visibility=visibility)
    (expected,) = torch.autograd.grad(clean, student, weight)
    student, weight = student.detach().clone(), weight.clone()
    {"student": student[0, 1, :, 5], "teacher": teacher[0, 1, :, 5], "gradient": weight[0, 1]}[what][broken] = value
    rows = relation_kl(student.requires_grad_(), teacher, visibility=visibility)
    rows.backward(weight)
    grad = student.grad[0, 1]
    own = document[0] == document[0, broken]
    near = (torch.arange(n, device=device) >= broken - 64) & (torch.arange(n, device=device) < broken + 64) & ~own
    assert not near.any(), "0 * nan reaches who shares a tile with a broken token, on any GPU"
    assert torch.equal(rows[0, 1, ~own], clean[0, 1, ~own]) and torch.equal(rows[0, 0], clean[0, 0])
    if what != "gradient":
        assert not rows[0, 1, broken : int(own.nonzero().max()) + 1].isfinite().any()
    keys = own & (torch.arange(n, device=device) <= broken)
    assert not grad[keys].isfinite().all(-1).any(), "keys of the broken row, itself among them"
    torch.testing.assert_close(grad[~own], expected[0, 1, ~own], rtol=2e-2, atol=2e-2 * expected.abs().max().item())
    assert torch.equal(student.grad[0, 0], expected[0, 0])


def test_bounds_may_be_loose(device):
    """`first` and `end` save time alone; documents may be interleaved."""
    n = 300
    document = torch.arange(n, device=device, dtype=torch.int32)[None] // 7 % 2
    bounds = torch.zeros_like(document), torch.full_like(document, n)
    student, teacher = relations(1, 1, n, 128, dtype=dtype_on(device), device=device)
    weight = torch.rand(1, 1, n, device=device)
    check_relation(student, teacher, seen_of(document), weight, visibility=Visibility(True, document, *bounds))


def test_backwards_read_the_same_parts_from_every_forward(device):
    """That of `attention_map_kl` is not Hopper's; padding has a log-sum of infinity, so that it has no probability."""
    from rope_kernels.row_kl import hopper_forward, triton_forward

    document = packed(1, [70, 200, 129], "holes", device)
    student, teacher = (
        x.detach() for x in relations(1, 2, document.shape[1], 64, dtype=dtype_on(device), device=device)
    )
    inputs = (student, student, teacher, teacher, 0.2, 0.2, Visibility.of_documents(document))
    rows, (*actual,) = hopper_forward.row_kl_forward(*inputs)
    expected_rows, (*expected,) = triton_forward.row_kl_forward(*inputs)
    torch.testing.assert_close(rows, expected_rows, rtol=1e-3, atol=2e-5)
    for side in (0, 2):  # top and log_sum of the student, and of the teacher
        totals = [parts[side] + parts[side + 1] for parts in (actual, expected)]
        torch.testing.assert_close(*totals, rtol=1e-5, atol=1e-5)
    padding = (document < 0)[:, None].expand_as(rows)
    assert padding.any() and all((x[padding] == y).all() for x, y in zip(actual, (0, INF, 0, INF), strict=True))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_broken_padding_is_seen_by_none(device, head_dim):
    """Behind it rows are tiles of their own, as 0 * nan reaches who shares one on any GPU."""
    document = torch.tensor([[-1] * 256 + [0] * 256], device=device)
    student, teacher = relations(1, 1, 512, head_dim, dtype=dtype_on(device), device=device)
    visibility = Visibility.of_documents(document)
    clean = relation_kl(student, teacher, visibility=visibility)
    (expected,) = torch.autograd.grad(clean.sum(), student)
    with torch.no_grad():
        student[:, :, 7], teacher[:, :, 9] = NAN, INF
    rows = relation_kl(student, teacher, visibility=visibility)
    (grad,) = torch.autograd.grad(rows.sum(), student)
    assert torch.equal(rows, clean)
    torch.testing.assert_close(
        grad[:, :, 256:], expected[:, :, 256:], rtol=2e-2, atol=2e-2 * expected.abs().max().item()
    )


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_two_runs_of_packed_rows_give_the_same_bits(monkeypatch, head_dim):
    use_hopper("cuda", monkeypatch)
    document = packed(2, [700, 129, 65, 1000, 1], "right", "cuda")
    student, teacher = relations(2, 8, document.shape[1], head_dim, dtype=torch.bfloat16, device="cuda")
    visibility = Visibility.of_documents(document)
    grads = [
        torch.autograd.grad(relation_kl(student, teacher, visibility=visibility).sum(), student)[0] for _ in range(2)
    ]
    assert torch.equal(*grads)


@pytest.mark.gpu
@pytest.mark.parametrize(("n_heads", "head_dim"), [(32, 128), (9, 64)])
def test_every_document_of_a_busy_gpu_is_that_of_its_own_row(monkeypatch, n_heads, head_dim):
    """More blocks than run at once: a document within a row of 8 gives what it gives alone."""
    use_hopper("cuda", monkeypatch)
    lengths = [512, 1000, 24, 1536, 129, 383, 1, 511]
    student, teacher = relations(1, n_heads, sum(lengths), head_dim, dtype=torch.bfloat16, device="cuda")
    rows = relation_kl(student, teacher, cu_seqlens=[0, *torch.tensor(lengths).cumsum(0).tolist()])
    (grad,) = torch.autograd.grad(rows.sum(), student)
    typical = grad.float().norm(dim=-1).mean()
    parts = zip(*(x.split(lengths, 2) for x in (student.detach(), teacher, rows.detach(), grad)), strict=True)
    for own, of_teacher, kl, expected in parts:
        own = own.contiguous().requires_grad_()
        alone = relation_kl(own, of_teacher.contiguous())
        torch.testing.assert_close(alone, kl, rtol=1e-3, atol=2e-5)
        (of_own,) = torch.autograd.grad(alone.sum(), own)
        error = (of_own.float() - expected.float()).norm(dim=-1)
        assert (error <= 3e-2 * of_own.float().norm(dim=-1) + 1e-2 * typical).all(), (own.shape[2], error.max())
