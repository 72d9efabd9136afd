import math

import pytest
import torch
from support.tiny import MIXED, VOCAB, gemma3, tiny, tokens, transformed_logits

from rope_patch import patch_model, rope_view
from rope_patch.eval import LossByPosition, loss_by_position
from rope_patch.views import Skip


@torch.no_grad()
def test_it_is_the_cross_entropy_of_the_logits():
    model = tiny(dtype=torch.float64)
    rows = tokens(5, 30)
    curve = loss_by_position(model, rows, batch_size=2, progress=False)
    log_probabilities = model(rows).logits.log_softmax(-1)
    expected = -log_probabilities[:, :-1].gather(-1, rows[:, 1:, None])[..., 0].mean(0)
    torch.testing.assert_close(curve.loss[1:], expected, rtol=1e-5, atol=1e-6)
    assert math.isnan(curve.loss[0]) and curve.n_rows == 5 and curve.seq_len == 30


def test_a_curve_without_a_cliff_says_why():
    loss = torch.full((200,), 2.0, dtype=torch.float64)
    reasons = {
        None: "the trained window is not known",
        199: "rows of 200 tokens end within the window of 199 positions",
        400: "rows of 200 tokens end within the window of 400 positions",
    }
    for window, reason in reasons.items():
        curve = LossByPosition(loss, 1, window)
        assert len(curve.headline()) == 1
        assert curve.reading() == [
            f"model: 2.000 nats per token. Nothing beyond the window was measured: {reason}.",
            "Lower is better.",
        ]
    beyond = LossByPosition(loss, 1, 100).reading()
    assert "beyond it (+0.000). No rise beyond the window lasts." in beyond[0] and "far text does no harm" in beyond[2]


SLIDING = {
    "gemma3": gemma3,
    "gemma3 under ntk": lambda: patch_model(gemma3(), "ntk", factor=4.0),
    "qwen3-mixed": lambda: tiny("qwen3", **MIXED),
    "mistral-sliding": lambda: tiny("mistral-sliding"),
}


@torch.no_grad()
def cross_entropies(model, rows):
    logits = model(rows).logits[:, :-1].transpose(1, 2)
    return torch.nn.functional.cross_entropy(logits, rows[:, 1:], reduction="none").mean(0).double()


@pytest.mark.parametrize("name", SLIDING)
def test_sliding_windows_are_read_without_a_mask_of_all_pairs(name, monkeypatch):
    monkeypatch.setattr("rope_patch.attention.windowed.BLOCK", 16)
    model, rows, n = SLIDING[name](), tokens(2, 200), 200
    expected, masks = cross_entropies(model, rows), []
    attend = torch.nn.functional.scaled_dot_product_attention

    def watching(query, *args, attn_mask=None, **options):
        masks.append((query.shape[-2], None if attn_mask is None else attn_mask.numel()))
        return attend(query, *args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watching)
    curve = loss_by_position(model, rows, progress=False)
    torch.testing.assert_close(curve.loss[1:], expected, rtol=1e-5, atol=1e-5)
    assert any(size for _, size in masks), "no sliding layer was read"
    assert max(size or 0 for _, size in masks) < n * n / 20


def test_a_view_in_force_is_read_under_sliding_windows_too():
    model, rows = gemma3(), tokens(1, 60)
    with rope_view(model, Skip(split=20, skip=30)):
        expected = cross_entropies(model, rows)
        curve = loss_by_position(model, rows, progress=False)
    torch.testing.assert_close(curve.loss[1:], expected, rtol=1e-5, atol=1e-5)
    assert (expected - cross_entropies(model, rows)).abs().max() > 1e-3


@torch.no_grad()
def test_a_model_that_knows_nothing_loses_the_log_of_the_vocabulary():
    model = tiny()
    model.lm_head.weight.zero_()
    curve = loss_by_position(model, tokens(2, 100), progress=False)
    torch.testing.assert_close(curve.loss[1:], torch.full((99,), math.log(VOCAB), dtype=torch.float64))
    assert curve.cliff(80) == pytest.approx(0, abs=1e-6)


def transformed(kind):
    """Families that scale or cap their logits, and an adapter on the head."""
    if kind == "adapter on the head":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(tiny(), LoraConfig(target_modules=["lm_head"], init_lora_weights=False))
        assert not torch.equal(model(tokens(1, 4)).logits, tiny()(tokens(1, 4)).logits)
        return model.eval()
    return transformed_logits(kind)


@pytest.mark.parametrize("kind", ["Gemma2", "Cohere", "Granite", "adapter on the head"])
def test_what_a_family_does_to_its_logits_counts(kind):
    model, rows = transformed(kind), tokens(2, 40)
    with torch.no_grad():
        logits = model(rows).logits.double()
        expected = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), rows[:, 1:], reduction="none")
    curve = loss_by_position(model, rows, progress=False)
    torch.testing.assert_close(curve.loss[1:], expected.mean(0), rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        assert torch.equal(model(rows).logits.double(), logits), "the model is as it was"


def test_means_and_cliff_by_hand():
    # loss p at position p: means are midpoints
    curve = LossByPosition(torch.tensor([math.nan, *range(1, 200)], dtype=torch.float64), 1)
    assert curve.mean(10, 13) == 11
    assert curve.in_window(100) == (64 + 100) / 2
    assert curve.cliff(100) == (101 + 199) / 2 - 82
    assert curve.bins([64, 66, 70]) == [{"first": 64, "end": 66, "loss": 64.5}, {"first": 66, "end": 70, "loss": 67.5}]
    assert curve.to_dict()["loss"][:3] == [None, 1, 2]
    for first, end in ((0, 5), (5, 5), (5, 201)):
        with pytest.raises(ValueError, match="positions must satisfy 1 <= first < end <= 200"):
            curve.mean(first, end)


def test_views_of_training_are_off_and_the_mode_comes_back():
    model = patch_model(tiny(), "nope").train()
    rows = tokens(2, 30)
    curve = loss_by_position(model, rows, progress=False)
    assert model.training
    torch.testing.assert_close(curve.loss[1:], loss_by_position(tiny(), rows, progress=False).loss[1:])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (torch.zeros(3, dtype=torch.long), "rows must be \\[n_rows, seq_len\\] with seq_len >= 2, got \\(3,\\)"),
        (torch.zeros(2, 1, dtype=torch.long), "rows must be"),
        (torch.full((1, 4), VOCAB), f"rows must hold ids in \\[0, {VOCAB}\\)"),
    ],
)
def test_rows_that_do_not_fit_are_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        loss_by_position(tiny(), rows, progress=False)
    with pytest.raises(ValueError, match="LlamaModel has no linear output head"):
        loss_by_position(tiny().model, tokens(1, 4), progress=False)


def test_the_picture_is_written_twice(tmp_path):
    curve = LossByPosition(torch.rand(300, dtype=torch.float64), 1, window=100)
    files = curve.plot(tmp_path / "folder" / "x")
    assert [f.name for f in files] == ["x.png", "x.svg"]
    assert files[0].read_bytes()[:4] == b"\x89PNG" and "window: 100" in files[1].read_text()


def test_the_cliff_starts_where_a_rise_begins_that_lasts():
    def start(loss):
        return LossByPosition(torch.tensor([float("nan"), *loss[1:]], dtype=torch.float64), 1, window=128).cliff_start()

    flat, up = 2.0, 3.0
    assert start([flat] * 640) is None
    assert start([flat] * 400 + [up] * 240) == 399, "the first of the means of ten positions that lies above"
    assert start([flat] * 200 + [up] * 100 + [flat] * 340) is None, "it comes back"
    assert start([flat] * 590 + [up] * 50) is None, "less than an eighth of 512 positions"
    assert start([flat] * 570 + [up] * 70) == 569
