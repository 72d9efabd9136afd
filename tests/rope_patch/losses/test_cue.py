"""What is no weight of a cue is refused where it is made."""

import pytest

from rope_patch.losses import CueWeight


@pytest.mark.parametrize("tokens", [1.5, None, "ab", [], [1, 2], [[]], [[True]], ["ab"], [[1], [1]]], ids=str)
def test_what_is_no_set_of_cues_is_refused(tokens):
    with pytest.raises(ValueError, match="cue_tokens must be an integer of at least 1, or different cues as lists"):
        CueWeight(tokens=tokens, weight=0.5)


@pytest.mark.parametrize("tokens", [0, -1, True])
def test_what_is_no_number_of_tokens_is_refused(tokens):
    with pytest.raises(ValueError, match=f"cue_tokens must be an integer of at least 1, got {tokens}"):
        CueWeight(tokens=tokens, weight=0.5)


@pytest.mark.parametrize("weight", [-0.1, float("nan"), float("inf"), True, "1", None])
def test_what_is_no_weight_is_refused(weight):
    with pytest.raises(ValueError, match=f"cue_weight must be a number of at least 0, got {weight!r}"):
        CueWeight(tokens=2, weight=weight)
