"""Inputs of the KLs of rows, and what they are to be as exact as."""

import torch


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
    wanted = [x.detach().double().requires_grad_() for x in inputs]
    (exact(*wanted) * weight.double()).sum().backward()
    torch_inputs = [x.detach().clone().requires_grad_() for x in inputs]
    torch_kl = plain(*torch_inputs)
    (torch_kl.float() * weight).sum().backward()
    with torch.no_grad():
        pairs = [(ours, torch_kl, exact(*wanted))]
    pairs += [(g, t.grad, w.grad) for g, t, w in zip(grads, torch_inputs, wanted, strict=True)]
    for mine, theirs, right in pairs:
        assert mine.isfinite().all()
        # as the largest of all entries, so that one wrong entry shows
        # and float32 rounding of probabilities near 1, which torch is spared in rows that see one key or few: they are
        # formed again from scores of up to 30 and their log-sum, each rounded to 1e-7 of itself
        slack = 2 * (theirs.double() - right).abs().max() + 1e-6 * right.abs().max() + 4e-6
        assert (mine.double() - right).abs().max() <= slack
