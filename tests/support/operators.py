"""Inputs of the operators, their implementations, and the accuracy that these must have."""

import pytest
import torch

from rope_kernels import attention_map_kl, attention_map_kl_ref, relation_kl, relation_kl_ref

# Chunked torch on a CPU; Triton's interpreter on a CPU, which reads the code that a GPU compiles; a GPU, with the
# kernels that it chooses, and with those for any GPU in place of Hopper's.
IMPLEMENTATIONS = ["chunked", "interpreter", *(pytest.param(x, marks=pytest.mark.gpu) for x in ("gpu", "any gpu"))]


def implementation(name, monkeypatch, dtype=torch.float32):
    """Choose an implementation for all operators until the test ends, and return its device."""
    if name == "interpreter":
        if dtype == torch.bfloat16:
            pytest.skip("the interpreter computes in numpy, which has no bfloat16")
        if torch.cuda.is_available():
            pytest.skip("the kernels are compiled here")
        for module in ("row_kl.custom_op", "vocabulary.chunked", "vocabulary.linear_ce_rows"):
            monkeypatch.setattr(f"rope_kernels.{module}.runs_on_triton", lambda x: True)
        # a vocabulary of some 20 words crosses the border of a tile
        monkeypatch.setattr("rope_kernels.vocabulary.triton_rows._BLOCK", 16)
        _patch_once(monkeypatch)
    if name == "any gpu":
        monkeypatch.setattr("rope_kernels.row_kl.custom_op.runs_on_hopper", lambda *_: False)
    return "cuda" if name.endswith("gpu") else "cpu"


def _patch_once(monkeypatch):
    """Half of the interpreter's time goes into patching `triton.language` at every call of a function in a kernel."""
    from triton.runtime import interpreter

    patched = set()

    def call(self, *args, **kwargs):
        if id(self.fn.__globals__) not in patched:
            interpreter._patch_lang(self.fn)  # never undone by the interpreter either
            patched.add(id(self.fn.__globals__))
        return self.rewrite()(*args, **kwargs)

    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)


def visible(n, *, causal=True, key_mask=None, documents=None, device="cpu"):
    """[batch or 1, 1, n, n], one pair at a time: it shares no idea with the code under test."""
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


def relations(batch, n_heads, n, head_dim, *, dtype=torch.float32, device="cpu", spread=1.0):
    """Rows that attend to themselves and their like, as real keys do, and a student that is a little off."""
    common = torch.randn(batch, n_heads, 1, head_dim, device=device)
    teacher = spread * (common + torch.randn(batch, n_heads, n, head_dim, device=device))
    student = teacher + 0.3 * torch.randn_like(teacher)
    return student.to(dtype).requires_grad_(), teacher.to(dtype)


def check(ours, inputs, plain, exact, weight):
    """Values and gradients: at most twice the error that plain torch makes in the same dtype."""
    (ours * weight).sum().backward()
    grads = [x.grad for x in inputs]
    expected = [x.detach().double().requires_grad_() for x in inputs]
    (exact(*expected) * weight.double()).sum().backward()
    torch_inputs = [x.detach().clone().requires_grad_() for x in inputs]
    torch_kl = plain(*torch_inputs)
    (torch_kl.float() * weight).sum().backward()
    with torch.no_grad():
        pairs = [(ours, torch_kl, exact(*expected))]
    pairs += [(g, t.grad, w.grad) for g, t, w in zip(grads, torch_inputs, expected, strict=True)]
    for mine, theirs, right in pairs:
        assert mine.isfinite().all()
        # as the largest of all entries, so that one wrong entry shows
        # and float32 rounding of probabilities near 1, which torch is spared in rows that see one key or few: they are
        # formed again from scores of up to 30 and their log-sum, each rounded to 1e-7 of itself
        slack = 2 * (theirs.double() - right).abs().max() + 1e-6 * right.abs().max() + 4e-6
        assert (mine.double() - right).abs().max() <= slack


def check_relation(student, teacher, seen, weight, scales=None, **visible):
    """`relation_kl` of inputs under `seen`, which `visible` describes to the operator; its values are returned."""
    scales = scales or {}
    kl = relation_kl(student, teacher, **visible, **scales)
    check(
        kl,
        [student],
        lambda s: relation_kl_ref(s, teacher, seen, **scales),
        lambda s: relation_kl_ref(s, teacher.double(), seen, **scales),
        weight,
    )
    return kl


def check_attention_map(q, k, teacher_q, teacher_k, seen, weight, **visible):
    """`attention_map_kl`, in the same way."""
    check(
        attention_map_kl(q, k, teacher_q, teacher_k, **visible),
        [q, k],
        lambda a, b: attention_map_kl_ref(a, b, teacher_q, teacher_k, seen),
        lambda a, b: attention_map_kl_ref(a, b, teacher_q.double(), teacher_k.double(), seen),
        weight,
    )
