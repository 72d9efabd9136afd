"""The last tokens at the end of a target window: formula, draws, what is refused."""

import pytest
import torch
from hypothesis import strategies as st
from support.views import PAD, Case, L, behind_skip, built, drawn, first_changed, index, maybe

from rope_patch.views import EndPrompt

CASES = {
    "endprompt": Case(EndPrompt(target=200, cue_tokens=4), lambda t, n, drawn: behind_skip(t, n - 4, 200 - n)),
    "endprompt-random": Case(
        EndPrompt(target=200, cue_tokens=4, placement="random"),
        lambda t, n, drawn: behind_skip(t, n - 4, drawn["skip"]),
    ),
}


STRATEGIES = {
    "endprompt": lambda farthest: built(
        EndPrompt,
        target=farthest,
        cue_tokens=st.integers(0, 6) | st.sampled_from([[[PAD]], [[PAD], [4, PAD]], [[5, PAD, PAD], [6]]]),
        placement=maybe(st.sampled_from(["end", "random"])),
    )
}


def test_endprompt_puts_the_last_tokens_at_the_end_of_the_target():
    assert index(EndPrompt(target=100, cue_tokens=3)) == [*range(9), 97, 98, 99]
    assert index(EndPrompt(target=100, cue_tokens=0)) == list(range(L))
    assert index(EndPrompt(target=100, cue_tokens=L)) == list(range(L)), "no body"
    view = EndPrompt(target=100, cue_tokens=3, placement="random")
    parameters = drawn(view)
    first = parameters["split"] + parameters["skip"]
    assert (parameters["split"] == 9).all() and first.min() == 9 and first.max() == 97
    assert torch.equal(first_changed(view, parameters, torch.full((2000, 1), L)) == 9, parameters["skip"] > 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EndPrompt(target=9, cue_tokens=0, placement="random"), "cue_tokens=0 is the control without one"),
        (lambda: EndPrompt(target=9, cue_tokens=True), "cue_tokens must be an integer or None, got True"),
        (lambda: EndPrompt(target=1, cue_tokens=1), "target must be at least 2, got 1"),
        (lambda: EndPrompt(target=9, cue_tokens=-1), "cue_tokens must be at least 0, got -1"),
        (lambda: EndPrompt(target=9, cue_tokens=[[3], [3]]), "different cues as lists of one or more token ids"),
        (lambda: EndPrompt(target=9, cue_tokens=[[3], []]), "different cues as lists of one or more token ids"),
        (lambda: EndPrompt(target=9, cue_tokens=[3, 4]), "different cues as lists of one or more token ids"),
        (lambda: EndPrompt(target=9, cue_tokens="word"), "different cues as lists of one or more token ids"),
        (lambda: EndPrompt(target=9, cue_tokens=1, placement="start"), "placement must be one of"),
        (lambda: EndPrompt(target=9, cue_tokens=1).check_length(10), "documents of 10 tokens reach beyond target=9"),
    ],
)
def test_what_endprompt_cannot_do_is_said(make, message):
    with pytest.raises(ValueError, match=message):
        make()
