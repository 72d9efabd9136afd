"""What the check of an export compares: rows at the beginning of the window, and across all of it."""

import pytest
import torch
from support.tiny import tiny

from rope_patch import export, patch_model
from rope_patch.export import exporting, reloading
from rope_patch.export.reloading import has_room, reference_of, require_same_logits

WINDOW, ORIGINAL = 2400, 600
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
LONGROPE |= {"original_max_position_embeddings": ORIGINAL, "factor": 4.0}


def longrope(**changed):
    return tiny(max_position_embeddings=WINDOW, rope_parameters={**LONGROPE, **changed})


def saved(model, folder):
    model.save_pretrained(folder)
    return folder


def test_what_differs_in_long_texts_alone_is_found(tmp_path, monkeypatch):
    model, other = longrope(), saved(longrope(long_factor=[2.0] * 4), tmp_path / "other")
    reference = reference_of(model, model.config, WINDOW)
    assert [row["input_ids"].shape for row in reference.rows] == [(1, 512)] * 2 and reference.last == WINDOW - 1
    assert require_same_logits(saved(model, tmp_path / "same"), model, reference) < 1e-5
    with pytest.raises(RuntimeError, match="the exported checkpoint is another model"):
        require_same_logits(other, model, reference)
    near = reloading.Reference(reference.rows[1:], reference.logits[1:], "cpu", 511)
    assert require_same_logits(other, model, near) < 1e-5, "the short factors are the same"


def test_rounding_in_half_precision_is_no_other_model_also_where_it_moves_one_logit_far(tmp_path):
    model = tiny(max_position_embeddings=64).to(torch.bfloat16)
    reference, folder = reference_of(model, model.config, 64), saved(model, tmp_path / "same")
    exact = reference.logits[0].clone()
    reference.logits[0][0, 0] += 3 * exact.std()
    expected = 3 * exact.std() / exact.numel() ** 0.5 / reference.logits[0].std()
    assert require_same_logits(folder, model, reference) == pytest.approx(
        expected.item(), rel=0.1
    )  # and what rounding adds
    torch.manual_seed(0)
    reference.logits[0].copy_(exact + 0.3 * exact.std() * torch.randn_like(exact))
    with pytest.raises(RuntimeError, match="differ by 0.2.* standard deviations of logits, and may differ by 0.2"):
        require_same_logits(folder, model, reference)


def test_the_far_row_is_that_of_the_formula():
    """Rotations by the long factors at positions across the window, as a row of them all would have."""
    model = longrope()
    far = reference_of(model, model.config, WINDOW)
    row = far.rows[0]
    positions = row["position_ids"][0]
    assert positions[:256].tolist() == list(range(256))
    assert positions[256:].tolist() == list(range(WINDOW - 256, WINDOW))
    whole = torch.zeros(1, WINDOW, dtype=torch.int64)
    whole[0, positions] = row["input_ids"][0]
    seen = torch.zeros(1, WINDOW, dtype=torch.int64)
    seen[0, positions] = 1
    logits = model(input_ids=whole, attention_mask=seen).logits[0, -64:]
    torch.testing.assert_close(far.logits[0], logits, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("window", [None, 64, 512])
def test_a_row_that_fills_the_window_is_read_once(window):
    model = tiny(max_position_embeddings=window or 512)
    reference = reference_of(model, model.config, window)
    assert len(reference.rows) == 1 and reference.last == (window or 512) - 1


def test_a_model_that_takes_no_positions_is_compared_at_near_ones(tmp_path, monkeypatch):
    model = tiny(max_position_embeddings=WINDOW)
    forward = type(model).forward

    def without(self, input_ids, **inputs):
        if "position_ids" in inputs:
            raise TypeError("forward() got an unexpected keyword argument 'position_ids'")
        return forward(self, input_ids, **inputs)

    monkeypatch.setattr(type(model), "forward", without)
    done = export(model, tmp_path / "out")
    assert done.checked_tokens == 512 and done.checked_to == 511
    assert "(512 tokens, up to position 511)" in str(done)


def test_a_gpu_has_room_for_the_model_and_the_checkpoint_that_the_check_loads():
    assert has_room(16 << 30, 34 << 30) and not has_room(16 << 30, (34 << 30) - 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_folder_is_checked_on_a_gpu_with_room(tmp_path, monkeypatch):
    devices, of_rows = [], exporting.reference_of
    monkeypatch.setattr(
        exporting, "reference_of", lambda *given: devices.append(given[0].device.type) or of_rows(*given)
    )
    folder = saved(tiny(max_position_embeddings=64), tmp_path / "model")
    assert export(folder, tmp_path / "near").difference < 1e-5
    monkeypatch.setattr("rope_kernels.common.gpu_memory.free_gpu_bytes", lambda: 1 << 30)
    assert export(folder, tmp_path / "far").difference < 1e-5 and devices == ["cuda", "cpu"]


def test_a_table_of_frequencies_that_grows_is_as_it_was(tmp_path):
    model = patch_model(tiny(max_position_embeddings=ORIGINAL), "dynamic-ntk", factor=4.0)
    before = model.model.rotary_emb.inv_freq.clone()
    done = export(model, tmp_path / "out")
    assert done.checked_to == model.config.max_position_embeddings - 1 > 512
    assert torch.equal(model.model.rotary_emb.inv_freq, before)
