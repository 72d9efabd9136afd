"""Values that would be taken for others, or end in a Python error, are refused by name."""

import pytest
import torch
from support.tiny import tiny

from rope_patch import patch_model, rope_view

INF = float("inf")


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("yarn", {"factor": 4.0, "beta_fast": 1.0, "beta_slow": 32.0}, "beta_fast must be above beta_slow"),
        ("yarn", {"factor": 4.0, "rope_theta": 1.0}, "rope_theta must be a number above 1, got 1.0"),
        ("pi", {"factor": INF}, "factor .* must be a number of at least 1"),
        ("abf", {"theta": 1e-300}, "theta must be a number above 1, got 1e-300"),
        ("llama3", {"factor": 2.0, "rope_theta": 1}, "rope_theta must be a number above 1"),
        ("longrope", {"factor": 2.0, "long_factor": [1.0] * 4, "rope_theta": -5}, "rope_theta must be a number"),
        ("dynamic-ntk", {"factor": 2.0, "rope_theta": 1.0}, "rope_theta must be a number above 1"),
    ],
)
def test_a_rescaling_refuses(method, options, message):
    model = tiny()
    with pytest.raises(ValueError, match=message):
        patch_model(model, method, **options)
    assert not model.model._forward_pre_hooks and model.config.rope_parameters["rope_type"] == "default"


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (torch.zeros(1, 4, dtype=torch.complex64), "got torch.complex64"),
        (torch.zeros(1, 4, dtype=torch.uint16), "got torch.uint16"),
        (torch.zeros(1, 4, dtype=torch.uint8), "are not exact beyond position 2048"),
        (torch.zeros(1, 4, dtype=torch.float16), "are not exact beyond position 2048"),
        (torch.zeros(0, 4, dtype=torch.int64), r"non-empty .* got torch.int64 \(0, 4\)"),
        (torch.full((1, 4), -(2**63)), "index must be finite and within"),
        (torch.tensor([[0.0, float("nan")]]), "index must be finite and within"),
        (torch.tensor([[0.0, INF]]), "index must be finite and within"),
    ],
)
def test_an_index_is_refused(index, message):
    with pytest.raises(ValueError, match=message), rope_view(tiny(), index=index):
        pass


def test_angles_are_as_rough_as_the_docs_of_the_largest_index_say():
    frequencies = 10000.0 ** (-torch.arange(64, dtype=torch.float64) / 64)
    for power, bound in ((20, 0.03), (24, 0.5)):
        index = torch.arange(2**power - 20_000, 2**power)[:, None]
        rounded = (index.float() * frequencies.float()).double().cos()
        error = (rounded - (index * frequencies.float().double()).cos()).abs().max()
        assert 0.9 * bound < error < 1.1 * bound
