"""Made-up results of retrieval and of loss by position, for what is said of them."""

import torch

from rope_patch.eval import LossByPosition, RetrievalGrid

WINDOW = 2048


def grid(scores, reply="The pass key is 7.", lengths=(1000, 4000), kind="passkey"):
    """One depth; `scores` of each length."""
    n = len(scores[0])
    flat = [score for of in scores for score in of]
    return RetrievalGrid(
        kind=kind,
        lengths=list(lengths),
        depths=[0.5],
        accuracy=[[sum(of) / n] for of in scores],
        trials=n,
        places=[0.5] * len(flat),
        scores=flat,
        forced_scores=flat,
        replies=[
            {"length": length, "question": "\nWhat is the pass key? It is", "expected": "7", "reply": reply, "score": 1}
            for length in lengths
        ],
    )


def losses(beyond, within=2.0):
    """One row, twice as long as the window."""
    loss = torch.cat([torch.full((WINDOW,), within), torch.full((WINDOW,), beyond)]).double()
    return LossByPosition(loss, 1, WINDOW, (tuple(loss.unflatten(0, (-1, 64)).mean(-1).tolist()),), "a row")
