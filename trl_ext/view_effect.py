"""Whether a view changes anything that is learned from the documents of a run, told before it starts."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from transformers.utils import logging

from rope_patch.documents import locate_documents
from rope_patch.draws import DrawKey
from rope_patch.state import BoundView
from rope_patch.views import Compose, EndPrompt, Mix, PerLayer, View

logger = logging.get_logger(__name__)

_LENGTHS, _DRAWS = 16, 4

Part = tuple[torch.Tensor | None, torch.Tensor]
"""Token ids of documents, one behind the other, None where only lengths count, and the number of each one's."""


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

    A view that goes by lengths draws for documents of 16 of the run's lengths, four times each. One that goes by tokens
    (a set of cues, `LongRecipe`) draws for the run's own documents until one is changed, which the first few are, and
    four times for all of them before it is refused.

    Args:
        view: that is drawn in training.
        lengths: tokens of each document, int64 [documents].
        n_layers: of the model.
        reads_last: whether the loss depends on what the last token of a document sees, which has no next token.
        controls: whether EndPrompt's own controls pass, cues of no token and of one, which are there to change
            nothing: the first token of a cue is predicted from the body, and behind the last nothing is. It is told.
        documents: gives token ids of all documents, int64 [tokens], and their lengths, int64 [documents], in parts.

    Raises:
        ValueError: nothing changes.
    """
    if not view.perturbs:
        return
    if isinstance(view, Mix):  # a few draws may all be of one view: each is looked at by itself
        for part in view.views:
            require_effect_on(part, lengths, n_layers, reads_last=reads_last, controls=controls, documents=documents)
        return
    if controls and isinstance(view, EndPrompt) and _longest_cue(view) <= 1:
        logger.warning(
            f"view 'endprompt' with cue_tokens={view.cue_tokens} is a control: no token is predicted from far, so this "
            "trains as view='standard' does."
        )
        return
    distinct = lengths.unique()
    by_tokens = any(map(_goes_by_tokens, _parts(view)))
    look = documents if by_tokens else partial(_of_lengths, distinct[view.can_change(distinct)])
    if any(_changes(view, part, step, n_layers, reads_last) for step in range(_DRAWS) for part in look()):
        return
    where = "" if reads_last else ", but for the last token of a document, behind which nothing is predicted"
    size = f"{distinct[0]} tokens" if len(distinct) == 1 else f"{distinct[0]} to {distinct[-1]} tokens"
    tokens = " No document has the tokens that it goes by where they would change one." if by_tokens else ""
    raise ValueError(
        f"view_args: {view!r} changes no distance between tokens in documents of {size}{where}: training would be that "
        f"of view='standard'.{tokens} A fixed split must lie within documents, a target beyond them, a cue must have "
        "two tokens or more and end documents, sentence_ends must be within them, and the views of a composition must "
        "not undo each other. Change view_args, or choose view='standard'."
    )


def _of_lengths(lengths: torch.Tensor) -> Iterator[Part]:
    """A document of each of some lengths: a view reaches the shortest, or the longest, or those in between."""
    tried = torch.linspace(0, len(lengths) - 1, min(_LENGTHS, len(lengths))).round().long()
    return ((None, length) for length in lengths[tried].split(1))


def _changes(view: View, part: Part, step: int, n_layers: int, reads_last: bool) -> bool:
    ids, lengths = part
    if not view.can_change(lengths).any():
        return False
    t = torch.cat([torch.arange(n) for n in lengths.tolist()])[None]
    # one document has its draws once, and not at each token
    documents = locate_documents(1, t.shape[1], t.device, t if len(lengths) > 1 else None, None)
    key = DrawKey(0, step, documents.ordinal, progress=torch.ones((), dtype=torch.float64))
    bound = BoundView(view, documents, view.draw_for(None if ids is None else ids[None], t, documents, key))
    counted = documents.length - (0 if reads_last else 1)
    return bool((bound.affected_from(t, n_layers) < counted).any())


def _parts(view: View) -> list[View]:
    if isinstance(view, Compose):
        return [part for inner in view.views for part in _parts(inner)]
    return _parts(view.view) if isinstance(view, PerLayer) else [view]


def _goes_by_tokens(view: View) -> bool:
    """Whether draws need token ids; one length of cue needs none."""
    by_length = isinstance(view, EndPrompt) and isinstance(view.cue_tokens, int)
    return type(view).draw_for is not View.draw_for and not by_length


def _longest_cue(view: EndPrompt) -> int:
    return view.cue_tokens if isinstance(view.cue_tokens, int) else max(map(len, view.cue_tokens))
