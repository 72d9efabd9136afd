"""View KL against the logits of two forwards."""

import pytest
import torch
from support.tiny import tiny, tokens

from rope_patch import patch_model, rope_view
from rope_patch.eval import view_kl
from rope_patch.views import Skip


@pytest.mark.parametrize(("family", "direction"), [("llama", "reverse"), ("qwen3", "forward")])
def test_it_is_the_kl_of_the_logits(family, direction):
    model, rows, split = tiny(family, dtype=torch.float64), tokens(3, 24), 10
    curve = view_kl(model, rows, [0, 5, 40], split=split, direction=direction, progress=False)
    with torch.no_grad():
        standard = model(rows).logits.log_softmax(-1)[:, split:]
        for skip, value in zip([0, 5, 40], curve.kl, strict=True):
            with rope_view(model, Skip(split=split, skip=skip) if skip else "standard"):
                moved = model(rows).logits.log_softmax(-1)[:, split:]
            p, q = (moved, standard) if direction == "reverse" else (standard, moved)
            assert value == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-4, abs=1e-7)
    assert curve.kl[0] == pytest.approx(0, abs=1e-9) and curve.kl[2] > 0


def test_an_unknown_direction_is_refused():
    with pytest.raises(ValueError, match="direction must be 'reverse' or 'forward', got 'both'"):
        view_kl(tiny(), tokens(1, 24), [1], direction="both", progress=False)


def test_a_view_that_is_always_in_force_is_no_standard():
    model, rows = tiny(dtype=torch.float64), tokens(2, 24)
    plain = view_kl(model, rows, [0, 5], split=10, progress=False).kl
    patch_model(model, "dilation", factor=2, when="always")
    assert view_kl(model, rows, [0, 5], split=10, progress=False).kl == pytest.approx(plain, abs=1e-9)
