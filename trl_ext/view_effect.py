"""Whether a view changes anything that is learned from the documents of a run, told before it starts."""

import torch
from transformers.utils import logging

from rope_patch.documents import locate_documents
from rope_patch.draws import DrawKey
from rope_patch.state import BoundView
from rope_patch.views import Compose, EndPrompt, Mix, PerLayer, View

logger = logging.get_logger(__name__)

_LENGTHS, _DRAWS = 16, 4


def require_effect_on(view: View, lengths: torch.Tensor, n_layers: int, *, reads_last: bool, controls: bool) -> None:
    """Draw for documents of a run's lengths, and raise if no draw changes a distance that the loss depends on.

    Args:
        view: that is drawn in training.
        lengths: tokens of each document, int64 [documents].
        n_layers: of the model.
        reads_last: whether the loss depends on what the last token of a document sees, which has no next token.
        controls: whether EndPrompt's own controls pass, cues of no token and of one, which are there to change
            nothing: the first token of a cue is predicted from the body, and behind the last nothing is. It is told.

    Raises:
        ValueError: nothing changes.
    """
    if not view.perturbs:
        return
    if isinstance(view, Mix):  # a few draws may all be of one view: each is looked at by itself
        for part in view.views:
            require_effect_on(part, lengths, n_layers, reads_last=reads_last, controls=controls)
        return
    if controls and isinstance(view, EndPrompt) and view.cue_tokens in (0, 1):
        logger.warning(
            f"view 'endprompt' with cue_tokens={view.cue_tokens} is a control: no token is predicted from far, so this "
            "trains as view='standard' does."
        )
        return
    distinct = lengths.unique()
    changed = distinct[view.can_change(distinct)]
    if len(changed) and any(map(_goes_by_tokens, _parts(view))):
        return  # which tokens a document holds decides, and here are lengths alone
    # a view reaches the shortest ones, or the longest, or those in between: all are tried
    tried = changed[torch.linspace(0, len(changed) - 1, min(_LENGTHS, len(changed))).round().long()]
    if any(_changes(view, int(length), n_layers, reads_last) for length in tried):
        return
    where = "" if reads_last else ", but for the last token of a document, behind which nothing is predicted"
    size = f"{distinct[0]} tokens" if len(distinct) == 1 else f"{distinct[0]} to {distinct[-1]} tokens"
    raise ValueError(
        f"view_args: {view!r} changes no distance between tokens in documents of {size}{where}: training would be that "
        "of view='standard'. A fixed split must lie within documents, a target beyond them, a cue must have two tokens "
        "or more, and the views of a composition must not undo each other. Change view_args, or choose view='standard'."
    )


def _changes(view: View, length: int, n_layers: int, reads_last: bool) -> bool:
    device = torch.device("cpu")
    documents, t = locate_documents(1, length, device, None, None), torch.arange(length)[None]
    for step in range(_DRAWS):
        key = DrawKey(0, step, documents.ordinal, progress=torch.ones((), dtype=torch.float64))
        bound = BoundView(view, documents, view.draw_for(None, t, documents, key))
        first = bound.affected_from(t, n_layers)
        if bool((first < (length if reads_last else length - 1)).any()):
            return True
    return False


def _parts(view: View) -> list[View]:
    if isinstance(view, Compose):
        return [part for inner in view.views for part in _parts(inner)]
    return _parts(view.view) if isinstance(view, PerLayer) else [view]


def _goes_by_tokens(view: View) -> bool:
    """Whether draws need token ids; one length of cue needs none."""
    by_length = isinstance(view, EndPrompt) and isinstance(view.cue_tokens, int)
    return type(view).draw_for is not View.draw_for and not by_length
