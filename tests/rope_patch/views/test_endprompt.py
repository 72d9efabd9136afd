"""The last tokens at the end of a target window: formula, draws, what is refused."""

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
