"""The last tokens at the end of a target window: formula, draws, what is refused."""

import torch
from hypothesis import strategies as st
from support.views import PAD, Case, L, behind_skip, built, drawn, first_changed, index, key, maybe

from rope_patch.views import EndPrompt

CASES = {
    "endprompt": Case(EndPrompt(target=200, cue_tokens=4), lambda t, n, drawn: behind_skip(t, n - 4, 200 - n)),
    "endprompt-random": Case(
        EndPrompt(target=200, cue_tokens=4, placement="random"),
        lambda t, n, drawn: behind_skip(t, n - 4, drawn["skip"]),
    ),
    "endprompt-parts": Case(
        EndPrompt(target=200, cue_tokens=4, placement="parts"),
        lambda t, n, drawn: behind_skip(
            behind_skip(t, n - 4, drawn["skip"]), drawn["split_2"] + drawn["skip"], drawn["skip_2"] - drawn["skip"]
        ),
    ),
}


STRATEGIES = {
    "endprompt": lambda farthest: built(
        EndPrompt,
        target=farthest,
        cue_tokens=st.integers(0, 6) | st.sampled_from([[[PAD]], [[PAD], [4, PAD]], [[5, PAD, PAD], [6]]]),
        placement=maybe(st.sampled_from(["end", "random", "parts"])),
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


def test_both_parts_of_the_cue_follow_poses_law():
    """By counts of all outcomes: u_1 is uniform, u_2 uniform from u_1 on, and the border anywhere in the first half."""
    n, b, target, samples = 8, 5, 12, 20_000
    view = EndPrompt(target=target, cue_tokens=b, placement="parts")
    documents = torch.full((samples, 1), n)
    index = view.rope_index(torch.arange(n)[None], view.draw(documents, key(samples)))
    assert torch.equal(index[:, : n - b], torch.arange(n - b).expand(samples, -1)), "the body stays"
    assert (index.diff(dim=1) > 0).all() and index.max() == target - 1
    outcomes, counts = torch.unique(index, dim=0, return_counts=True)
    share = dict(zip(map(tuple, outcomes.tolist()), (counts / samples).tolist(), strict=True))
    expected = {}
    for c in (1, 2, 3):
        for u_1 in range(target - n + 1):
            for u_2 in range(u_1, target - n + 1):
                rows = (*range(n - b), *(t + (u_1 if t < n - b + c else u_2) for t in range(n - b, n)))
                expected[rows] = expected.get(rows, 0) + 1 / 3 / (target - n + 1) / (target - n + 1 - u_1)
    assert share.keys() == expected.keys()
    assert all(abs(share[row] - p) < 5 * (p / samples) ** 0.5 for row, p in expected.items())


def test_a_cue_of_one_token_has_one_part():
    one, whole = (EndPrompt(target=60, cue_tokens=1, placement=placement) for placement in ("parts", "random"))
    assert index(one) == index(whole)
