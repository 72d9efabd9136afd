"""`relation_kl` and `attention_map_kl` on every implementation, against dense float64 maps written from the formula."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.row_kl import check, relations

from rope_kernels import (
    Visibility,
    attention_map_kl,
    attention_map_kl_ref,
    make_visibility,
    relation_kl,
    relation_kl_ref,
    relation_mse,
)

# chunked torch on a CPU; Triton's interpreter on a CPU, which reads the same code as a GPU compiles; a GPU, with the
# kernels that it chooses and with those for any GPU
IMPLEMENTATIONS = ["chunked", "interpreter", *(pytest.param(x, marks=pytest.mark.gpu) for x in ("gpu", "any gpu"))]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=IMPLEMENTATIONS)
def device(request, monkeypatch):
    return implementation(request.param, monkeypatch, request.node.callspec.params.get("dtype"))


def implementation(name, monkeypatch, dtype=torch.float32):
    if name == "interpreter":
        if dtype == torch.bfloat16:
            pytest.skip("the interpreter computes in numpy, which has no bfloat16")
        if torch.cuda.is_available():
            pytest.skip("the kernels are compiled here")
        monkeypatch.setattr("rope_kernels.row_kl.custom_op.runs_on_triton", lambda x: True)
    if name == "any gpu":
        monkeypatch.setattr("rope_kernels.row_kl.custom_op.runs_on_hopper", lambda *_: False)
    return "cuda" if name.endswith("gpu") else "cpu"


def visible(n, *, causal=True, key_mask=None, documents=None, device="cpu"):
    """[batch or 1, 1, n, n], one pair at a time: no thought is shared with the code under test."""
    batch = 1 if key_mask is None and documents is None else len(key_mask if key_mask is not None else documents)
    seen = torch.zeros(batch, 1, n, n, dtype=torch.bool)
    for b in range(batch):
        for i in range(n):
            for j in range(n):
                seen[b, 0, i, j] = (
                    (j <= i or not causal)
                    and (key_mask is None or bool(key_mask[b, i] and key_mask[b, j]))
                    and (documents is None or documents[b][i] == documents[b][j])
                )
    return seen.to(device)


def packed(batch, n):
    return Visibility.of_documents(torch.zeros(batch, n, dtype=torch.int32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1, 32), (2, 3, 37, 64), (1, 2, 130, 80), (1, 1, 65, 192)], ids=str)
def test_relation_kl_is_as_exact_as_torch(shape, dtype, device):
    student, teacher = relations(*shape, dtype=dtype, device=device)
    seen = visible(shape[2], device=device)
    weight = torch.rand(shape[:3], device=device)
    check(
        relation_kl(student, teacher),
        [student],
        lambda s: relation_kl_ref(s, teacher, seen),
        lambda s: relation_kl_ref(s, teacher.double(), seen),
        weight,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)], ids=str)
def test_attention_map_kl_is_as_exact_as_torch(heads, dtype, device):
    n_heads, n_kv_heads = heads
    q, teacher_q = relations(2, n_heads, 50, 32, dtype=dtype, device=device)
    k, teacher_k = relations(2, n_kv_heads, 50, 32, dtype=dtype, device=device)
    seen = visible(50, device=device)
    check(
        attention_map_kl(q, k, teacher_q, teacher_k),
        [q, k],
        lambda a, b: attention_map_kl_ref(a, b, teacher_q, teacher_k, seen),
        lambda a, b: attention_map_kl_ref(a, b, teacher_q.double(), teacher_k.double(), seen),
        torch.rand(2, n_heads, 50, device=device),
    )


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 3),
    n_heads=st.integers(1, 3),
    n=st.integers(1, 90),
    head_dim=st.sampled_from([32, 80, 96, 128, 256]),
    causal=st.booleans(),
    padding=st.sampled_from(["none", "left", "right", "holes"]),
    packed=st.booleans(),
    seed=st.integers(0, 2**31),
)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_any_shape_padding_and_packing(name, batch, n_heads, n, head_dim, causal, padding, packed, seed):
    with pytest.MonkeyPatch.context() as monkeypatch:
        device = implementation(name, monkeypatch)
        torch.manual_seed(seed)
        student, teacher = relations(batch, n_heads, n, head_dim, device=device)
        key_mask = None if padding == "none" else torch.ones(batch, n, dtype=torch.bool)
        for b in range(batch) if key_mask is not None else ():
            cut = int(torch.randint(0, n + 1, ()))  # a row may be padding as a whole
            if padding == "left":
                key_mask[b, :cut] = False
            elif padding == "right":
                key_mask[b, cut:] = False
            else:
                key_mask[b] = torch.rand(n) < 0.7
        documents, cu_seqlens = None, None
        if packed:
            new = (torch.rand(batch, n) < 0.1).int()
            new[:, 0] = 1
            documents = new.cumsum(1).tolist()
            cu_seqlens = torch.tensor([*new.flatten().nonzero().flatten().tolist(), batch * n], dtype=torch.int32)
        seen = visible(n, causal=causal, key_mask=key_mask, documents=documents, device=device)
        key_mask, cu_seqlens = (None if x is None else x.to(device) for x in (key_mask, cu_seqlens))
        kl = relation_kl(student, teacher, causal, key_mask, cu_seqlens)
        weight = torch.rand(batch, n_heads, n, device=device)
        check(
            kl,
            [student],
            lambda s: relation_kl_ref(s, teacher, seen),
            lambda s: relation_kl_ref(s, teacher.double(), seen),
            weight,
        )
        if key_mask is not None:
            assert (kl[(~key_mask)[:, None].expand_as(kl)] == 0).all()
        q, k = student.detach().requires_grad_(), teacher.detach()[:, :1].requires_grad_()
        teacher_q = teacher + 0.1
        visibility = make_visibility(
            batch, n, torch.device(kl.device), causal=causal, key_mask=key_mask, cu_seqlens=cu_seqlens
        )
        check(
            attention_map_kl(q, k, teacher_q, k.detach(), visibility=visibility),
            [q, k],
            lambda a, b: attention_map_kl_ref(a, b, teacher_q, k.detach(), seen),
            lambda a, b: attention_map_kl_ref(a, b, teacher_q.double(), k.detach().double(), seen),
            weight,
        )


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
    check(
        relation_kl(student, teacher, **scales),
        [student],
        lambda s: relation_kl_ref(s, teacher, seen, **scales),
        lambda s: relation_kl_ref(s, teacher.double(), seen, **scales),
        torch.ones(1, 2, 40, device=device),
    )


def test_any_layout_gives_the_same(device):
    student, teacher = relations(2, 3, 45, 32, device=device)
    wanted = relation_kl(student, teacher)
    wanted.sum().backward()
    tokens_first = student.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    features_apart = teacher.transpose(2, 3).contiguous().transpose(2, 3)
    found = relation_kl(tokens_first, features_apart)
    found.sum().backward()
    assert torch.equal(found, wanted) and torch.equal(tokens_first.grad, student.grad)
    sliced = torch.cat([student.detach(), teacher], -1)
    assert torch.equal(relation_kl(sliced[..., :32], sliced[..., 32:]), wanted)


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
    check(
        relation_kl(student, teacher),
        [student],
        lambda s: relation_kl_ref(s, teacher, seen),
        lambda s: relation_kl_ref(s, teacher.double(), seen),
        torch.ones(1, 1, 60, device=device),
    )


def test_two_runs_give_the_same_bits(device):
    student, teacher = relations(1, 2, 100, 64, device=device, dtype=torch.float16)
    grads = []
    for _ in range(2):
        student.grad = None
        relation_kl(student, teacher).sum().backward()
        grads.append(student.grad)
    assert torch.equal(*grads)


def test_float64_is_the_formula():
    student, teacher = relations(1, 2, 33, 32)
    student = student.detach().double().requires_grad_()
    seen = visible(33)
    kl = relation_kl(student, teacher.double())
    assert kl.dtype == torch.float64
    torch.testing.assert_close(kl, relation_kl_ref(student, teacher.double(), seen), rtol=1e-12, atol=1e-13)
    torch.autograd.gradcheck(
        lambda s: relation_kl(s, teacher.double()[..., :12, :]), student[..., :12, :].detach().requires_grad_()
    )


def test_the_chunks_do_not_change_the_result(monkeypatch):
    from rope_kernels.row_kl import chunked

    student, teacher = (x.detach().double() for x in relations(2, 2, 50, 32))
    student.requires_grad_()
    wanted = relation_kl(student, teacher)
    (grad,) = torch.autograd.grad(wanted.sum(), student)
    for rows in (1, 7, 50):
        monkeypatch.setattr(chunked, "_CHUNK_BYTES", 8 * 2 * 2 * 50 * rows)
        found = relation_kl(student, teacher)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(torch.autograd.grad(found.sum(), student)[0], grad, rtol=1e-12, atol=1e-14)


def test_it_compiles_and_recomputes(device):
    from torch.utils.checkpoint import checkpoint

    student, teacher = relations(1, 2, 40, 32, device=device)
    loss = relation_kl(2 * student, teacher).sum()
    (wanted,) = torch.autograd.grad(loss, student)
    again = checkpoint(lambda x: relation_kl(2 * x, teacher).sum(), student, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(again, student)[0], wanted)
    traced = torch.compile(lambda x: relation_kl(2 * x, teacher).sum(), fullgraph=True, backend="aot_eager")(student)
    assert torch.equal(torch.autograd.grad(traced, student)[0], wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"student": torch.zeros(2, 3, 4)}, r"student must be \[batch, n_heads, n, head_dim\].*got \[2, 3, 4\]"),
        ({"teacher": torch.zeros(1, 2, 8, 16)}, r"teacher must be \[1, 2, 8, 32\] torch.float32.*got \[1, 2, 8, 16\]"),
        ({"teacher": torch.zeros(1, 2, 8, 32).half()}, "teacher must be .* as student is, got .*torch.float16"),
        ({"key_mask": torch.ones(1, 7, dtype=torch.bool)}, r"key_mask must be \[1, 8\] bool on cpu, got \[1, 7\]"),
        ({"key_mask": torch.ones(1, 8)}, "key_mask must be .* bool .* got .*float32"),
        ({"key_mask": [True] * 8}, r"key_mask must be \[1, 8\] bool on cpu, a tensor, got \[True, "),
        ({"causal": "no"}, "causal must be True or False, got 'no'"),
        ({"causal": torch.ones(1, 8, dtype=torch.bool)}, r"causal must be True or False, got \[1, 8\] torch.bool"),
        ({"teacher": None}, r"teacher must be \[1, 2, 8, 32\] torch.float32 on cpu, a tensor, got None"),
        ({"student": torch.zeros(1, 2, 8, 32, dtype=torch.int64)}, "student must be .* float64, got .* torch.int64"),
        ({"cu_seqlens": torch.tensor([0, 4])}, r"rising from 0 to 8, got \[0, 4\]"),
        ({"cu_seqlens": torch.tensor([0, 4, 4, 8])}, "rising from 0 to 8"),
        ({"cu_seqlens": torch.tensor([0.0, 8.0])}, r"integers.*got \[2\] torch.float32"),
        ({"cu_seqlens": torch.tensor([[0, 8]])}, r"integers.*got \[1, 2\] torch.int64"),
        ({"cu_seqlens": torch.tensor([1, 8])}, r"rising from 0 to 8, got \[1, 8\]"),
        ({"cu_seqlens": [0, 4]}, r"rising from 0 to 8, got \[0, 4\]"),
        ({"cu_seqlens": [0, 4.0, 8]}, r"cu_seqlens must be .*, a tensor or a list, got \[0, 4.0, 8\]"),
        ({"cu_seqlens": 8}, "cu_seqlens must be .*, a tensor or a list, got 8"),
        ({"visibility": True}, "visibility must be a Visibility or None, got True"),
        ({"visibility": packed(1, 7)}, r"visibility must be of \[1, 8\] tokens on cpu .* got one of \[1, 7\]"),
        ({"visibility": packed(1, 9)}, r"visibility must be of \[1, 8\] tokens on cpu .* got one of \[1, 9\]"),
        ({"visibility": packed(2, 8)}, r"visibility must be of \[1, 8\] tokens on cpu .* got one of \[2, 8\]"),
        (
            {"visibility": Visibility.of_documents(torch.zeros(1, 8, dtype=torch.int32, device="meta"))},
            r"visibility must be of \[1, 8\] tokens on cpu .* on meta",
        ),
        *(
            ({"visibility": packed(1, 8), name: value}, f"{name} must be None beside visibility")
            for name, value in (
                ("causal", False),
                ("causal", True),
                ("key_mask", torch.ones(1, 8, dtype=torch.bool)),
                ("cu_seqlens", [0, 8]),
            )
        ),
        *(
            ({side: scale}, f"{side} must be above 0 and finite, or None for .*, got {scale!r}")
            for side in ("student_scale", "teacher_scale")
            for scale in (0, -1.0, float("nan"), float("inf"), True, "1")
        ),
    ],
)
@pytest.mark.parametrize("operator", [relation_kl, relation_mse, attention_map_kl], ids=lambda f: f.__name__)
def test_what_does_not_fit_is_refused(operator, change, message):
    arguments = {"student": torch.zeros(1, 2, 8, 32), "teacher": torch.zeros(1, 2, 8, 32), **change}
    if operator is attention_map_kl:
        q, teacher_q = arguments.pop("student"), arguments.pop("teacher")
        keys = torch.zeros(1, 2, 8, 32)
        arguments.update(student_q=q, student_k=keys, teacher_q=teacher_q, teacher_k=keys)
        message = re.sub(r"\b(student|teacher)\b", r"\1_q", message)
    with pytest.raises(ValueError, match=message):
        operator(**arguments)
    if "cu_seqlens" in change:
        two = torch.zeros(2, 1, 4, 32)
        with pytest.raises(ValueError, match="every start of a row, multiples of 4"):
            relation_kl(two, two, cu_seqlens=torch.tensor([0, 3, 8]))


def test_keys_that_do_not_divide_the_queries_are_refused():
    q, k = torch.zeros(1, 4, 8, 32), torch.zeros(1, 3, 8, 32)
    with pytest.raises(
        ValueError, match=r"student_k must be \[1, n_kv_heads, 8, 32\].*a divisor of 4, got \[1, 3, 8, 32\]"
    ):
        attention_map_kl(q, k, q, k)


def test_repair_computes_blocks_with_nan_and_leaves_the_others(device):
    """What the Hopper kernels leave to these: a row that holds a nan, and no other block."""
    from rope_kernels.row_kl import triton_forward

    if not row_kl_triton_runs(device):
        pytest.skip("chunked torch has no repair")
    student, teacher = (x.detach() for x in relations(1, 2, 300, 32, device=device))
    inputs = (student, student, teacher, teacher, 0.2, 0.2, Visibility(True))
    wanted, wanted_parts = triton_forward.row_kl_forward(*inputs)
    kl, parts = torch.full_like(wanted, 7.0), torch.full_like(wanted_parts, 7.0)
    kl[0, 1, 290] = float("nan")
    triton_forward.repair(inputs, kl, parts)
    touched = kl != 7.0
    assert touched[0, 1, 290] and not touched[0, 0].any() and not touched[0, 1, :128].any()
    assert torch.equal(kl[touched], wanted[touched])
    assert torch.equal(parts[:, touched], wanted_parts[:, touched])


def row_kl_triton_runs(device):
    from rope_kernels.row_kl import custom_op

    return custom_op.runs_on_triton(torch.empty(0, device=device))


def test_borders_may_be_a_list():
    student, teacher = relations(2, 1, 8, 32)
    wanted = relation_kl(student, teacher, cu_seqlens=torch.tensor([0, 3, 8, 9, 16]))
    assert torch.equal(relation_kl(student, teacher, cu_seqlens=[0, 3, 8, 9, 16]), wanted)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    "change", [{"causal": 1}, {"first": None}, {"end": 3}, {"dtype": torch.int64}, {"n": 7}], ids=str
)
def test_parts_that_make_no_visibility_are_refused(change, device):
    parts = dict.fromkeys(("document", "first", "end"), torch.zeros(1, 8, dtype=torch.int32, device=device))
    if "dtype" in change or "n" in change:
        shape = (1, change.get("n", 8))
        parts["first"] = torch.zeros(shape, dtype=change.get("dtype", torch.int32), device=device)
    given = {"causal": True, **parts, **{name: x for name, x in change.items() if name in ("causal", "first", "end")}}
    with pytest.raises(ValueError, match="causal must be True or False, got 1|(first|end) must be int32 .*, got "):
        Visibility(**given)


@pytest.mark.parametrize("document", [torch.zeros(8), torch.zeros(1, 8), torch.zeros(8, dtype=torch.int64), [[0, 0]]])
def test_documents_that_are_no_integers_of_tokens_are_refused(document):
    with pytest.raises(ValueError, match=r"document must be \[batch, n\] integers, -1 on padding.*, got "):
        Visibility.of_documents(document)


def test_a_number_that_comes_again_is_another_document(device):
    """On every path: kernels read where a document begins and ends, chunks read its number."""
    student, teacher = relations(1, 2, 9, 32, device=device)
    numbers = torch.tensor([[-1, 5, 5, -1, 5, 0, 0, 5, 5]], device=device)
    runs = [[-1, 0, 0, -1, 0, 1, 1, 2, 2]]
    seen = visible(9, documents=runs, key_mask=numbers.cpu() >= 0, device=device)
    wanted = relation_kl_ref(student.double(), teacher.double(), seen).float()
    found = relation_kl(student, teacher, visibility=Visibility.of_documents(numbers))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-6)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 3),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    n=st.integers(1, 17),
    causal=st.booleans(),
    padding=st.sampled_from(["none", "left", "right"]),
    border=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_float64_equals_the_twin_with_every_gradient(batch, kv_heads, group, n, causal, padding, border, seed):
    """GQA, padding, packed documents (at a border before each token, documents of one token), all three operators."""
    torch.manual_seed(seed)
    heads = kv_heads * group
    student_q, teacher_q = (torch.randn(batch, heads, n, 8, dtype=torch.float64) for _ in range(2))
    student_k, teacher_k = (torch.randn(batch, kv_heads, n, 8, dtype=torch.float64) for _ in range(2))
    leaves = [student_q.requires_grad_(), student_k.requires_grad_()]
    key_mask = torch.ones(batch, n, dtype=torch.bool)
    for b in range(batch) if padding != "none" else ():
        cut = int(torch.randint(0, n + 1, ()))
        key_mask[b, slice(0, cut) if padding == "left" else slice(cut, n)] = False
    new = torch.rand(batch, n) < border
    new[:, 0] = True
    borders = [*new.flatten().nonzero().flatten().tolist(), batch * n]
    seen = visible(n, causal=causal, key_mask=key_mask, documents=new.cumsum(1).tolist())
    given = {"causal": causal, "key_mask": key_mask, "cu_seqlens": borders}
    weight = torch.rand(batch, heads, n, dtype=torch.float64)

    def maps(x):
        scores = (x @ x.transpose(-1, -2) * 8**-0.5).masked_fill(~seen, -torch.inf)
        return scores.softmax(-1).nan_to_num(0.0)

    pairs = [
        (relation_kl(student_q, teacher_q, **given), relation_kl_ref(student_q, teacher_q, seen)),
        (relation_mse(student_q, teacher_q, **given), (maps(student_q) - maps(teacher_q)).square().sum(-1)),
        (
            attention_map_kl(student_q, student_k, teacher_q, teacher_k, **given),
            attention_map_kl_ref(student_q, student_k, teacher_q, teacher_k, seen),
        ),
    ]
    for found, wanted in pairs:
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
        assert not found.masked_select(~seen.any(-1).expand_as(found)).any()
        grads = (torch.autograd.grad((x * weight).sum(), leaves, allow_unused=True) for x in (found, wanted))
        for mine, right in zip(*grads, strict=True):
            assert (mine is None) == (right is None)
            if mine is not None:
                torch.testing.assert_close(mine, right.nan_to_num(0.0), rtol=1e-9, atol=1e-12)
