"""Every view of this package keeps what `check_view` asks for, and one that breaks a promise is named with it."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from support.cells import CASES

from rope_patch.testing import check_view
from rope_patch.testing.views import check_checkpointing, check_decoding, check_layouts
from rope_patch.views import VIEWS, Skip, View


@pytest.mark.parametrize("name", CASES)
def test_every_view_keeps_what_it_promises(name):
    check_view(CASES[name].view)


@dataclass(frozen=True)
class FromTorch(Skip):
    """Draws from torch's generator."""

    def draw(self, length, key):
        return {"split": length // 2, "skip": torch.randint(1, 50, length.shape)}


@dataclass(frozen=True)
class OfTheBatch(Skip):
    """Goes by the longest document of the batch."""

    def draw(self, length, key):
        return {"split": length // 2, "skip": length.max().expand(length.shape)}


@dataclass(frozen=True)
class NotElementwise(View):
    """Moves tokens by how many of them it is called for."""

    def draw(self, length, key):
        return {}

    def rope_index(self, t, parameters):
        return t + t.shape[-1] * (t >= 3)


@dataclass(frozen=True)
class WrongStart(Skip):
    """Says that the token before the split is the first that moves."""

    def affected_from(self, t, documents, parameters):
        return super().affected_from(t, documents, parameters) - 1


@dataclass(frozen=True)
class NeverChanges(Skip):
    """Says that nothing is changed."""

    def can_change(self, length):
        return torch.zeros_like(length, dtype=torch.bool)


@dataclass(frozen=True)
class ForgetsAnOption(Skip):
    """Leaves out one of its options."""

    far: int = 5

    def options(self):
        return {name: value for name, value in super().options().items() if name != "far"}


@dataclass(frozen=True)
class FartherEachTime(View):
    """Counts its calls, so that layers that run again see other positions."""

    name = "farther-each-time"
    calls = []

    def draw(self, length, key):
        return {}

    def rope_index(self, t, parameters):
        self.calls.append(1)
        return t * len(self.calls)


@pytest.mark.parametrize(
    ("view", "broken"),
    [
        (FromTorch(), "draws must come from `key` and the document alone"),
        (OfTheBatch(), "draws must come from `key` and the document alone"),
        (NotElementwise(), "and rope_index must be elementwise"),
        (
            WrongStart(split=4, skip=3),
            r"affected_from of .* gives \[3, 3, 3\] .* from tokens \[4, 4",
        ),
        (NeverChanges(split=4, skip=3), "can_change of .* is false for 8 tokens, and a draw changes them"),
        (ForgetsAnOption(far=6), "make another view"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_a_promise_that_is_broken_is_named(view, broken, monkeypatch):
    name = type(view).__name__
    monkeypatch.setitem(VIEWS, name, type(view))
    monkeypatch.setattr(type(view), "name", name, raising=False)
    with pytest.raises(AssertionError, match=broken):
        check_view(view)


@pytest.mark.parametrize(
    ("check", "view"),
    [
        (check_layouts, NotElementwise()),
        (check_decoding, NotElementwise()),
        (check_decoding, FartherEachTime()),
        (partial(check_checkpointing, reentrant=False), FartherEachTime()),
        (partial(check_checkpointing, reentrant=True), FartherEachTime()),
    ],
)
def test_a_model_shows_what_is_broken(check, view, monkeypatch):
    monkeypatch.setattr(NotElementwise, "name", "not-elementwise", raising=False)
    with pytest.raises(AssertionError, match="under .*the largest difference is"):
        check(view)
