"""A rescaling that breaks a promise is named with it; tests/rope_patch/test_rescalings.py runs ours."""

from dataclasses import dataclass

import pytest

from rope_patch.rescalings import PI, RESCALINGS
from rope_patch.testing import check_rescaling


@dataclass(frozen=True)
class Piles(PI):
    """Multiplies the factor with each patch."""

    calls = []

    def rope_parameters(self, native):
        self.calls.append(1)
        return {**super().rope_parameters(native), "factor": float(len(self.calls))}


@dataclass(frozen=True)
class ForgetsAnOption(PI):
    """Leaves out one of its options."""

    other: int = 5

    def options(self):
        return {"factor": self.factor}


@pytest.mark.parametrize(
    ("rescaling", "broken"),
    [
        (Piles(factor=2.0), "a second patch with"),
        (ForgetsAnOption(factor=2.0, other=6), "make another rescaling"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_a_promise_that_is_broken_is_named(rescaling, broken, monkeypatch):
    name = type(rescaling).__name__
    monkeypatch.setitem(RESCALINGS, name, type(rescaling))
    monkeypatch.setattr(type(rescaling), "name", name)
    with pytest.raises(AssertionError, match=broken):
        check_rescaling(rescaling)
