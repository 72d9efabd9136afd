"""Check before training that a view changes something in the documents of a run."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers.utils import logging

from rope_patch.base.draws import DrawKey
from rope_patch.forward.drawn_view import DrawnView
from rope_patch.layout.documents import locate_documents
from rope_patch.views import View
from rope_patch.views.base import TRUE_POSITIONS

logger = logging.get_logger(__name__)

_LENGTHS, _DRAWS = 16, 4  # at most

Part = tuple[torch.Tensor | None, torch.Tensor]
"""Token IDs of documents, one after the other (None if only lengths count), and the number of tokens of each."""


def require_effect_on(
    view: View,
    lengths: torch.Tensor,
    n_layers: int,
    *,
    reads_last: bool,
    controls: bool,
    documents: Callable[[], Iterable[Part]],
) -> None:
    """Draw for documents of a run, and raise if no draw changes a distance that the loss depends on.

    A view that depends on lengths draws for documents of 16 of the run's lengths, four times each. A view that depends
    on tokens (`View.reads_tokens`) draws for the run's own documents until one is changed, mostly one of the first few;
    it is refused after four draws for all of them.

    Args:
        view: drawn in training.
        lengths: tokens of each document, int64 [documents].
        n_layers: of the model.
        reads_last: whether the loss depends on what the last token of a document sees, which has no next token.
        controls: whether views that change nothing on purpose (`View.why_control`) pass, with a warning.
        documents: gives token IDs of all documents, int64 [tokens], and their lengths, int64 [documents], in parts.

    Raises:
        ValueError: nothing changes.
    """
    if not view.perturbs:
        return
    alternatives = view.alternatives()
    if len(alternatives) > 1:  # a few draws may all be of one view, so each is checked by itself
        options: Any = {"reads_last": reads_last, "controls": controls, "documents": documents}
        for alternative in alternatives:
            require_effect_on(alternative, lengths, n_layers, **options)
        return
    control = view.why_control() if controls else None
    if control is not None:
        logger.warning(f"view {view.name!r} is a control: {control}, so this trains as view={TRUE_POSITIONS!r} does.")
        return
    distinct = lengths.unique()
    if not view.reads_tokens:  # from the shortest to the longest, as a view may change only some of them
        changeable = distinct[view.can_change(distinct)]
        tried = torch.linspace(0, len(changeable) - 1, min(_LENGTHS, len(changeable))).round().long()
        by_length: list[Part] = [(None, length) for length in changeable[tried].split(1)]
    for step in range(_DRAWS):
        for part in documents() if view.reads_tokens else by_length:
            if _changes(view, part, step, n_layers, reads_last):
                return
    where = "" if reads_last else ", except for the last token of a document, after which nothing is predicted"
    size = f"{distinct[0]} tokens" if len(distinct) == 1 else f"{distinct[0]} to {distinct[-1]} tokens"
    tokens = " No document has the view's tokens at a place where they would change it." if view.reads_tokens else ""
    conditions = "; ".join(view.conditions())
    raise ValueError(
        f"view_args: {view!r} changes no distance between tokens in documents of {size}{where}: training would be the "
        f"same as with view={TRUE_POSITIONS!r}.{tokens} {conditions and f'Of this view: {conditions}. '}"
        f"Change view_args, or choose view={TRUE_POSITIONS!r}."
    )


def _changes(view: View, part: Part, step: int, n_layers: int, reads_last: bool) -> bool:
    """Whether a draw moves a token before the end of one of these documents."""
    ids, lengths = part
    if not view.can_change(lengths).any():
        return False
    t = torch.cat([torch.arange(n) for n in lengths.tolist()])[None]  # [1, tokens], documents one after the other
    # one document has its draws once, and not at each token
    documents = locate_documents(1, t.shape[1], t.device, t if len(lengths) > 1 else None, None)
    # progress 1: a curriculum may change nothing at its start
    key = DrawKey(0, step, documents.ordinal, progress=torch.ones((), dtype=torch.float64))
    drawn = DrawnView(view, documents, view.draw_for(None if ids is None else ids[None], t, documents, key))
    counted = documents.length - (0 if reads_last else 1)
    return bool((drawn.affected_from(t, n_layers) < counted).any())
