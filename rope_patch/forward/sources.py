"""Where a forward's RoPE indices come from: a view with its clock, or a table of explicit indices."""

import torch

from ..base.validators import require_integer
from ..layout.documents import Documents, locate_documents
from ..views.base import View
from .cached_draws import draws_of, why_other_indices
from .draw_clock import DrawClock
from .drawn_view import Batch, DrawnView, IndexTable


class ViewSource:
    """A view in force with its clock; gives each forward its RoPE indices."""

    def __init__(self, view: View, seed: int) -> None:
        require_integer("seed", seed)
        self.view = view
        self.clock = DrawClock(seed)
        self.last: DrawnView | None = None  # of the last forward that drew: for logging
        self.checked_length = 0  # longest training document, checked once: a batch may have shorter ones only
        self.of_trainer = False  # added for one run of a trainer: the next trainer removes it

    def bind(self, batch: Batch) -> DrawnView:
        """Draw for a forward; one that continues a cache keeps the draws that filled it."""
        last = draws_of(batch.cache)
        if batch.cached and last is not None:
            if isinstance(last, IndexTable) or last.view != self.view:
                raise ValueError(why_other_indices(last, f"{self.view!r} is"))
            return self._continued(last, batch)
        documents = locate_documents(
            batch.rows, batch.seq_len, batch.device, batch.position_ids, _current(batch.attention_mask, batch)
        )
        if batch.cached:
            # the cache was filled without a view, e.g. by prefix tuning: its tokens are the beginning of the document
            mask: torch.Tensor | None = batch.attention_mask
            before: torch.Tensor | int = batch.cached
            if mask is not None and mask.ndim == 2 and mask.shape[1] >= batch.cached + batch.seq_len:
                before = mask[:, : batch.cached].bool().sum(1, keepdim=True)  # without padding, [rows, 1]
            start = documents.start if batch.position_ids is None else documents.start - before
            documents = Documents(start, documents.length + before, documents.ordinal)
        if self.view.follows_progress and not self.clock.is_set:
            raise ValueError(
                f"{self.view!r} has a curriculum, and its clock does not know how far training is. Trainers of "
                "Transformers and TRL set it. In your own loop, use patch_model and call "
                "rope_patch.patch.view_source(model).clock."
                "set_step(step, progress) before each step, with progress from 0 to 1 (rope_view has no progress). Or "
                "leave out curriculum."
            )
        longest = batch.cached + batch.seq_len
        can_read = not torch.compiler.is_compiling() and batch.device.type != "meta"
        if can_read and (batch.position_ids is not None or batch.attention_mask is not None):
            longest = int(documents.length.max())
        # a fixed split may lie beyond all documents of one batch, but not beyond those of every batch
        self.view.check_length(max(longest, self.checked_length))
        t = _positions(batch) - documents.start  # [1 or rows, seq_len], index of each token in its document
        current = _current(batch.attention_mask, batch)
        t = t if current is None else t.masked_fill(~current.bool(), -1)
        key = self.clock.key_of(documents, batch.ids, t, batch.training)
        parameters = self.view.draw_for(batch.ids, t, documents, key)
        self.clock.tick()
        self.last = DrawnView(self.view, documents, parameters, t=t)
        if self.view.perturbs:
            for log in batch.logs:
                assert key.sample is not None
                log.add(self.last, key.step, key.sample)
        return self.last

    def _continued(self, last: DrawnView, batch: Batch) -> DrawnView:
        rows = last.documents.start.shape[0]
        if rows != batch.rows:
            raise ValueError(
                f"decoding under a view continues with the {rows} rows that filled the cache, got {batch.rows} rows. "
                "Start generation from an empty cache inside the view."
            )
        # new tokens belong to the last document of a row, so take the draws of its last token, from [batch, n], or
        # from [n_layers, batch, n] if each layer has its own
        parameters = {n: p[..., -1:] if p.ndim >= 2 else p for n, p in last.parameters.items()}
        return DrawnView(last.view, last.documents.last_column(), parameters, continues=True)


class TableSource:
    """Explicit RoPE indices in force, [batch, total tokens]."""

    def __init__(self, index: torch.Tensor) -> None:
        self.index = index

    def bind(self, batch: Batch) -> IndexTable:
        """The part of the table for the tokens of this forward: those after what the cache holds."""
        filled = draws_of(batch.cache)
        if batch.cached and isinstance(filled, DrawnView) and filled.view.perturbs:
            raise ValueError(why_other_indices(filled, "explicit indices are"))
        rows, tokens = self.index.shape
        end = batch.cached + batch.seq_len
        # in inference the rest of the table may be for tokens that are generated later
        if rows not in (1, batch.rows) or end > tokens or (not batch.cached and end != tokens and batch.training):
            raise ValueError(
                f"index must be [batch, seq_len] for the forward that it is used in, got {tuple(self.index.shape)} "
                f"for {batch.rows} rows and tokens {batch.cached} to {end}."
            )
        table = self.index.to(batch.device).expand(batch.rows, -1)
        part = table[:, batch.cached : end]
        return IndexTable(part, table, _positions(batch) if batch.compresses else None, continues=bool(batch.cached))


def _current(attention_mask: torch.Tensor | None, batch: Batch) -> torch.Tensor | None:
    """The mask of this forward's tokens only: with a cache, the mask covers earlier and perhaps later tokens too."""
    if attention_mask is None or attention_mask.ndim != 2:
        return None
    end = batch.cached + batch.seq_len
    if attention_mask.shape[1] >= end:
        return attention_mask[:, batch.cached : end]
    return attention_mask[:, -batch.seq_len :]


def _positions(batch: Batch) -> torch.Tensor:
    """True positions of the tokens of this forward, [1 or rows, seq_len]."""
    if batch.position_ids is not None:
        return batch.position_ids
    return torch.arange(batch.cached, batch.cached + batch.seq_len, device=batch.device)[None]
