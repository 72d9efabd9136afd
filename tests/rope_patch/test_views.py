"""The registry of views; each has a test file of its own in tests/rope_patch/views."""

import pytest

from rope_patch.views import VIEWS, Standard


def test_an_unknown_view_is_refused_by_name():
    with pytest.raises(ValueError, match="Unknown view 'skp'. Did you mean 'skip'\\? Known: chunk-permute, compose"):
        VIEWS["skp"]


def test_a_second_claim_on_a_name_is_refused():
    with pytest.raises(ValueError, match="view 'skip' is already registered, as Skip."):
        VIEWS.register("skip")(Standard)
