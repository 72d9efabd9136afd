"""What is in force on a patched model, and which RoPE indices the forward in flight gets.

One `RopeState` per model hangs on its decoder and is shared by the hooks. Only modules outside the checkpointed layers
read it, so a recompute in backward never sees a later state. It holds tensors and plain values: it can be copied,
pickled and traced.
"""

import threading
import weakref
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import nn

from .call_stack import frames
from .draws import DrawKey
from .layout.documents import Documents, document_numbers, locate_documents
from .local_layers import LocalLayers
from .open_views import OpenSources
from .views.base import Parameters, View

if TYPE_CHECKING:
    from .rescale import RopeParameters
    from .rescalings import Rescaling

When = Literal["train", "always"]


@dataclass
class Batch:
    """What a decoder was called with, as far as positions go."""

    rows: int
    seq_len: int
    device: torch.device
    position_ids: torch.Tensor | None
    attention_mask: torch.Tensor | None
    cached: int  # tokens that the KV cache already holds
    training: bool
    ids: torch.Tensor | None = None  # [rows, seq_len]; None where the call has embeddings
    cache: Any = None
    compresses: bool = False  # rotary modules are asked for other positions than those of the tokens


class BoundIndex(Protocol):
    """The RoPE indices of one forward."""

    def __call__(self, position_ids: torch.Tensor) -> torch.Tensor:
        """RoPE indices in the shape that `position_ids` broadcasts to."""
        ...


@dataclass(eq=False)  # not frozen: Dynamo before torch 2.13 loses the fields of frozen ones made while tracing
class BoundView:
    """A view with its draws: a function of the true positions, elementwise."""

    view: View
    documents: Documents
    parameters: Parameters
    continues: bool = False  # a cache that holds these draws

    def rows(self, order: torch.Tensor) -> "BoundView":
        """The same for other rows: row i is what row order[i] was."""
        n_rows = len(self.documents.start)
        taken = {
            name: p.index_select(p.ndim - 2, order.to(p.device)) if p.ndim >= 2 and p.shape[-2] == n_rows else p
            for name, p in self.parameters.items()
        }
        return BoundView(self.view, self.documents.rows(order), taken)

    def affected_from(self, t: torch.Tensor, n_layers: int) -> torch.Tensor:
        """First token of each document that any of `n_layers` layers sees at another distance, as `View` says it.

        Args:
            t: index of each token in its document, [1 or batch, seq_len], -1 on padding; whole documents.
            n_layers: of the model.
        """
        firsts = [
            group.view.affected_from(t, group.documents, group.parameters) for _, group in self.by_layer(n_layers)
        ]
        return torch.stack(firsts).amin(0)

    def by_layer(self, n_layers: int) -> "list[tuple[list[int], BoundView]]":
        """Groups of layers that share positions."""
        groups = self.view.layer_groups(n_layers, self.parameters)
        return [(layers, BoundView(view, self.documents, parameters)) for layers, view, parameters in groups if layers]

    def __call__(self, position_ids: torch.Tensor) -> torch.Tensor:
        """Start + r(position - start) for each document; padding gets some index, which nothing attends to."""
        start = self.documents.start
        if start.shape[-1] not in (1, position_ids.shape[-1]):
            return self._by_row()(position_ids)
        return start + self.view.rope_index(position_ids - start, self.parameters)

    def _by_row(self) -> "BoundView":
        """The same, said once a row instead of once a token, for positions of other things than the tokens."""
        drawn = {name: p for name, p in self.parameters.items() if p.ndim >= 2}
        if not all(bool((x == x[..., -1:]).all()) for x in (self.documents.ordinal, *drawn.values())):
            raise ValueError(
                "a rotary module of this model asks for positions of windows of tokens, which may lie across "
                "documents: a RoPE view there needs one document a row, and one draw for all of it. Leave packing "
                "(position_ids that begin anew) out."
            )
        rows = {name: p[..., -1:] for name, p in drawn.items()}
        return BoundView(self.view, self.documents.last_column(), {**self.parameters, **rows}, self.continues)


@dataclass(eq=False)
class BoundTable:
    """Explicit indices for the tokens of this forward, [batch, seq_len]; `table` has those of earlier ones too.

    Compressed keys, as of DeepSeek-V4, stand for windows of tokens and ask at the place of a window's first token,
    which may lie before this forward: they get the index of that token. A forward of one token asks for both in one
    shape, so that only the positions themselves tell them apart: `own` are those of the tokens.
    """

    index: torch.Tensor
    table: torch.Tensor
    own: torch.Tensor | None = None  # [1 or batch, seq_len]; None where no rotary module is asked for other ones
    continues: bool = False  # a cache that holds keys at earlier ones

    def __call__(self, position_ids: torch.Tensor) -> torch.Tensor:
        n_asked, n_tokens = position_ids.shape[-1], self.index.shape[-1]
        if self.own is None and n_asked != n_tokens:
            raise ValueError(
                f"index holds {n_tokens} RoPE indices a row, but a rotary module of this model asked for {n_asked}. "
                "Use a view, which is a function of positions, instead."
            )
        if self.own is None or (n_asked == n_tokens and bool((position_ids == self.own.to(position_ids)).all())):
            return self.index
        return self.table.gather(1, position_ids.to(self.table.device).expand(self.table.shape[0], -1))


class DrawClock:
    """Which optimizer step, and which sample of it, the next forward draws for.

    Args:
        seed: of all draws.

    Without a trainer every forward that draws is a step of its own. `set` and `set_step` take over: draws then depend
    on what the caller says alone, until `release`.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        # tensors, as a Python counter would make torch.compile trace every step anew
        self.step = torch.zeros((), dtype=torch.int64)
        self.first_sample = torch.zeros((), dtype=torch.int64)
        self.progress = torch.ones((), dtype=torch.float64)
        self.is_set = False
        self.by_content = False
        self.pairs = False
        self.driver: int | None = None

    def set(self, step: int, first_sample: int, progress: float = 1.0) -> None:
        """Let the next forward draw for documents first_sample, first_sample + 1, ... of optimizer step `step`.

        Args:
            step: any integer of 64 bits.
            first_sample: ordinal of the forward's first document within the step, at least 0.
            progress: of training, from 0 to 1, which curricula go by; 1 is its end.

        Raises:
            ValueError: one of them is no such number; the clock is as it was.
        """
        self._write(step, first_sample, progress)
        self.by_content, self.pairs, self.driver = False, False, None

    def set_step(self, step: int, progress: float = 1.0, *, pairs: bool = False, driver: int | None = None) -> None:
        """Let forwards from now on draw for optimizer step `step`, each document by what it holds, not by its place.

        Whichever models of the step read a document, in whatever batch and on whatever rank, then draw alike for it,
        and nobody has to count documents. A document that comes twice in a step draws twice the same. Forwards in
        evaluation mode, of a view that is always on, draw for step -1 at the end of progress: every evaluation alike.

        Args:
            step: any integer of 64 bits.
            progress: of training, from 0 to 1.
            pairs: whether a batch holds the chosen rows and then the rejected ones: both rows of a pair draw by what
                the chosen one holds.
            driver: number of the callback that sets the clock, if one does.

        Raises:
            ValueError: one of them is no such number; the clock is as it was.
        """
        self._write(step, 0, progress)
        self.by_content, self.pairs, self.driver = True, pairs, driver

    def release(self) -> None:
        """Let every forward be a step of its own again."""
        self.is_set, self.by_content, self.pairs, self.driver = False, False, False, None
        self.progress.fill_(1.0)

    def _write(self, step: int, first_sample: int, progress: float) -> None:
        for name, value, low in (("step", step, -(2**63)), ("first_sample", first_sample, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**63:
                raise ValueError(f"{name} must be an integer in [{low}, 2**63), got {value!r}.")
        if isinstance(progress, bool) or not isinstance(progress, int | float) or not 0 <= progress <= 1:
            raise ValueError(
                f"progress must be a number from 0, the start of training, to 1, its end, got {progress!r}."
            )
        self.step.fill_(step)
        self.first_sample.fill_(first_sample)
        self.progress.fill_(progress)
        self.is_set = True

    def key(self, documents: Documents) -> DrawKey:
        """The key of these documents, told apart by their place."""
        device = documents.ordinal.device
        if torch.compiler.is_compiling():
            step, first, progress = (x.to(device, copy=True) for x in (self.step, self.first_sample, self.progress))
            return DrawKey(self.seed, step, documents.ordinal + first, progress=progress)
        # as numbers: a copy to a GPU would wait for all that it has to do
        progress = torch.full((), self.progress.item(), dtype=torch.float64, device=device)
        sample = documents.ordinal + int(self.first_sample)
        return DrawKey(self.seed, int(self.step), sample, progress=progress)

    def key_of(self, documents: Documents, ids: torch.Tensor | None, t: torch.Tensor, training: bool) -> DrawKey:
        """The key of the documents of a forward, told apart as the clock was set.

        Args:
            documents: of the batch.
            ids: of its tokens, [batch, seq_len], None where the call has embeddings.
            t: index of each token in its document, [1 or batch, seq_len], -1 on padding.
            training: whether the forward is one of training.
        """
        key = self.key(documents)
        if not self.by_content:
            return key
        if ids is None:
            raise ValueError(
                "under RopeViewCallback a view draws for a document by its token ids, and this forward has "
                "inputs_embeds instead, as prompt learning and images have: leave out the view, or prompt learning."
            )
        numbers = document_numbers(ids, t, documents)
        if self.pairs:
            rows = len(ids)
            if rows % 2 or documents.start.shape[1] != 1:
                raise ValueError(
                    "this trainer's batches hold chosen rows and as many rejected ones, one document a row; got "
                    f"{rows} rows{'' if documents.start.shape[1] == 1 else ' with position_ids of packed documents'}."
                )
            numbers = numbers[: rows // 2].repeat(2, 1)
        if training:
            return replace(key, sample=numbers)
        return replace(key, sample=numbers, step=-1, progress=torch.ones((), dtype=torch.float64, device=ids.device))

    def tick(self) -> None:
        """Move on after a forward, unless somebody sets the clock."""
        if not self.is_set:
            self.step += 1


class ViewSource:
    """A view in force with its clock; gives each forward its RoPE indices."""

    def __init__(self, view: View, seed: int) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ValueError(f"seed must be an integer, got {seed!r}.")
        self.view = view
        self.clock = DrawClock(seed)
        self.last: BoundView | None = None  # of the last forward that drew: for logging
        self.checked_length = 0  # of documents that the view is known to take, where a forward's may be shorter
        self.of_trainer = False  # put on for one run: the next trainer of the model does not keep it

    def bind(self, batch: Batch) -> BoundView:
        """Draw for a forward; one that continues a cache keeps the draws that filled it."""
        last = getattr(batch.cache, _DRAWS, None)
        if batch.cached and last is not None:
            if isinstance(last, BoundTable):
                raise ValueError(_other_indices("explicit indices (rope_view(index=...))", f"{self.view!r} is"))
            return self._continued(last, batch)
        documents = locate_documents(
            batch.rows, batch.seq_len, batch.device, batch.position_ids, _current(batch.attention_mask, batch)
        )
        if batch.cached:
            # tokens behind a prefix that was run under no view, e.g. of prefix tuning: it begins their document
            before = _cached_tokens(batch)
            start = documents.start if batch.position_ids is None else documents.start - before
            documents = Documents(start, documents.length + before, documents.ordinal)
        if self.view.follows_progress and not self.clock.is_set:
            raise ValueError(
                f"{self.view!r} has a curriculum, and nobody has told its clock how far training is. RopeSFTTrainer "
                "does, and so does another trainer after trainer.add_callback(rope_patch.RopeViewCallback(trainer)); "
                "in a loop of your own call rope_patch.patch.view_source(model).clock.set(step, first_sample, "
                "progress) before each forward, with progress from 0 to 1, or leave out curriculum."
            )
        # a fixed split may lie behind the end of all documents of one batch, if not behind those of every one
        self.view.check_length(max(_longest(documents, batch), self.checked_length))
        t = _in_document(batch, documents)
        key = self.clock.key_of(documents, batch.ids, t, batch.training)
        parameters = self.view.draw_for(batch.ids, t, documents, key)
        self.clock.tick()
        self.last = BoundView(self.view, documents, parameters)
        return self.last

    def _continued(self, last: BoundView, batch: Batch) -> BoundView:
        rows = last.documents.start.shape[0]
        if last.view != self.view:
            raise ValueError(_other_view(last.view, f"{self.view!r} is"))
        if rows != batch.rows:
            raise ValueError(
                f"decoding under a view goes on with the {rows} rows that filled the cache, got {batch.rows} rows. "
                "Start generation from an empty cache inside the view."
            )
        # [batch, n], or [n_layers, batch, n]
        parameters = {n: p[..., -1:] if p.ndim >= 2 else p for n, p in last.parameters.items()}
        return BoundView(last.view, last.documents.last_column(), parameters, continues=True)


_DRAWS = "_rope_patch_draws"
_IN_VIEW = "_rope_patch_in_view"  # whether a forward that continues the cache under its view is on its way


def forget_draws(cache: Any) -> None:
    """Let a cache that was emptied forget the draws that once filled it, for a forward at true positions.

    Raises:
        ValueError: the cache is not empty: the forward would go on with keys at indices of a view.
    """
    draws: BoundIndex | None = getattr(cache, _DRAWS, None)
    if draws is None:
        return
    if cache.get_seq_length():
        _require_true_positions(draws)
    setattr(cache, _DRAWS, None)


def _require_true_positions(draws: "BoundIndex") -> None:
    """Raise if a cache that `draws` have filled holds keys at other indices than their positions."""
    if isinstance(draws, BoundTable):
        raise ValueError(_other_indices("explicit indices (rope_view(index=...))", "none are"))
    if isinstance(draws, BoundView) and draws.view.perturbs:
        raise ValueError(_other_view(draws.view, "no view is"))


def _other_view(filled: View, now: str) -> str:
    return _other_indices(f"the RoPE indices of {filled!r}", now)


def _other_indices(filled: str, now: str) -> str:
    return (
        f"past_key_values holds keys at {filled}, and {now} in force now: distances to them would be those of neither. "
        "Decode under the view that filled the cache, or start from an empty one."
    )


class _CacheMethod:
    """Stands in for a method of one cache."""

    def __init__(self, cache: Any, method: str) -> None:
        # weak: a cache that held itself through its own method would stay until the garbage collector comes by
        self.cache, self.method = weakref.ref(cache), method

    def own(self, *args: Any, **kwargs: Any) -> Any:
        """What the cache's class does."""
        cache = self.cache()
        return getattr(type(cache), self.method)(cache, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_CacheMethod":
        return type(self)(memo.get(id(self.cache()), self.cache()), self.method)

    def __getstate__(self) -> dict[str, Any]:
        return {"cache": self.cache(), "method": self.method}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.cache, self.method = weakref.ref(state["cache"]), state["method"]


class _OtherRows(_CacheMethod):
    """A method that changes the rows, as when beams change places: their draws go along."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Do it; the one argument holds the chosen rows, or how often to repeat each."""
        self.own(*args, **kwargs)
        cache: Any = self.cache()
        draws = getattr(cache, _DRAWS)
        if not isinstance(draws, BoundView):
            return  # forgotten, or a table, which the block holds for all rows
        (rows,) = (*args, *kwargs.values())
        if isinstance(rows, int):
            rows = torch.arange(len(draws.documents.start)).repeat_interleave(rows)
        elif rows.dtype == torch.bool:
            rows = rows.nonzero().flatten()
        else:
            rows = rows % len(draws.documents.start)  # negative ones count from the end
        setattr(cache, _DRAWS, draws.rows(rows))


class _UnderView(_CacheMethod):
    """`update`, which attention calls: refuses keys of a forward that no view decides, as of a model without hooks."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do it, if the forward is one under a view, or the cache is empty."""
        cache: Any = self.cache()
        draws = getattr(cache, _DRAWS)
        layer = kwargs.get("layer_idx", args[2] if len(args) > 2 else None)
        if layer == 0 and draws is not None and not getattr(cache, _IN_VIEW) and cache.get_seq_length():
            _require_true_positions(draws)
        return self.own(*args, **kwargs)


def keep_draws(cache: Any, bound: "BoundIndex") -> None:
    """Leave the draws on the cache that they have filled: other forwards may come before it is continued."""
    setattr(cache, _DRAWS, bound)
    setattr(cache, _IN_VIEW, False)
    cache.update = _UnderView(cache, "update")
    for method in ("reorder_cache", "batch_select_indices", "batch_repeat_interleave"):
        if hasattr(cache, method):
            setattr(cache, method, _OtherRows(cache, method))


class TableSource:
    """Explicit RoPE indices in force, [batch, total tokens]."""

    def __init__(self, index: torch.Tensor) -> None:
        self.index = index

    def bind(self, batch: Batch) -> BoundTable:
        """The part of the table for the tokens of this forward: those after what the cache holds."""
        filled = getattr(batch.cache, _DRAWS, None)
        if batch.cached and isinstance(filled, BoundView) and filled.view.perturbs:
            raise ValueError(_other_view(filled.view, "explicit indices are"))
        rows, tokens = self.index.shape
        end = batch.cached + batch.seq_len
        if rows not in (1, batch.rows) or end > tokens or (not batch.cached and end != tokens and batch.training):
            raise ValueError(
                f"index must be [batch, seq_len] for the forward that it is used in, got {tuple(self.index.shape)} "
                f"for {batch.rows} rows and tokens {batch.cached} to {end}."
            )
        table = self.index.to(batch.device).expand(batch.rows, -1)
        part = table[:, batch.cached : end]
        return BoundTable(part, table, _positions(batch) if batch.compresses else None, continues=bool(batch.cached))


def _current(attention_mask: torch.Tensor | None, batch: Batch) -> torch.Tensor | None:
    """The mask of this forward's own tokens: a cache's covers earlier ones too, and a static one's those to come."""
    if attention_mask is None or attention_mask.ndim != 2:
        return None
    end = batch.cached + batch.seq_len
    if attention_mask.shape[1] >= end:
        return attention_mask[:, batch.cached : end]
    return attention_mask[:, -batch.seq_len :]


def _cached_tokens(batch: Batch) -> torch.Tensor | int:
    """Tokens in the cache that are not padding, [rows, 1], as far as the mask tells."""
    mask = batch.attention_mask
    if mask is None or mask.ndim != 2 or mask.shape[1] < batch.cached + batch.seq_len:
        return batch.cached
    return mask[:, : batch.cached].bool().sum(1, keepdim=True)


def _positions(batch: Batch) -> torch.Tensor:
    """True positions of the tokens of this forward, [1 or rows, seq_len]."""
    if batch.position_ids is not None:
        return batch.position_ids
    return torch.arange(batch.cached, batch.cached + batch.seq_len, device=batch.device)[None]


def _in_document(batch: Batch, documents: Documents) -> torch.Tensor:
    """Index of each token in its document, [1 or rows, seq_len], -1 on padding."""
    positions = _positions(batch)
    mask = _current(batch.attention_mask, batch)
    t = positions - documents.start
    return t if mask is None else t.masked_fill(~mask.bool(), -1)


def _longest(documents: Documents, batch: Batch) -> int:
    """Tokens of the longest document; of the row where there are no data to branch on, as in traced graphs."""
    if (
        torch.compiler.is_compiling()
        or batch.device.type == "meta"
        or (batch.position_ids is None and batch.attention_mask is None)
    ):
        return batch.cached + batch.seq_len
    return int(documents.length.max())


class Turns:
    """One thread at a time is in a forward of the model: the indices in flight are the model's, not the thread's.

    A thread's own storage would do, but Dynamo drops what a traced forward writes there. A copy of the model has turns
    of its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: threading.Thread | None = None

    def __reduce__(self) -> "tuple[type[Turns], tuple[()]]":
        return Turns, ()

    def begin(self, decoder: nn.Module) -> None:
        """Wait until no other thread is in a forward of `decoder`."""
        if self._owner is threading.current_thread():
            return  # an interrupt threw it out of a forward, past `end`
        while not self._lock.acquire(timeout=0.5):
            if self._owner is not None and not _is_inside(self._owner, decoder):
                break  # the owner was thrown out of its forward by an exception, past `end`
        self._owner = threading.current_thread()

    def end(self) -> None:
        """Let the next thread in."""
        if self._owner is threading.current_thread():
            self._owner = None
            self._lock.release()


def _is_inside(thread: threading.Thread, module: nn.Module) -> bool:
    """Whether a call of `module` is on the stack of `thread`."""
    return any(f.f_code.co_name == "_call_impl" and f.f_locals.get("self") is module for f in frames(thread))


class Leader:
    """The decoder whose mode another one goes by; a copy of the other goes by none."""

    def __init__(self, decoder: nn.Module | None = None) -> None:
        self._decoder = None if decoder is None else weakref.ref(decoder)

    def __reduce__(self) -> "tuple[type[Leader], tuple[()]]":
        return Leader, ()

    @property
    def training(self) -> bool:
        """Whether it is in training mode."""
        decoder = None if self._decoder is None else self._decoder()
        return decoder is not None and decoder.training


@dataclass
class RopeState:
    """All that was done to a model. Lives at `decoder._rope_patch`.

    Args:
        original: RoPE parameters of the model before the first patch, bit for bit.
        native: the same with frequencies in float32: what the model was trained with.
        current: those in force.
        start: those that a rescaling starts from: `native`, or those that a loaded adapter was trained with.
        start_rescalings: what made `start` of `native`, in order.
        rescaling: the rescaling that made `current` of `start`, if any.
        local: the layers that a view leaves at true positions.
        source: the view of `patch_model`, if any.
        when: in which forwards that view is sampled.
        ended: the view of a training that is over, and when it was sampled: what adapters record from then on.
        leader: of a reference model, the decoder whose training it takes part in.
        overrides: sources of the `rope_view` blocks that are open, innermost last.
        turns: of the threads that call the model.
        bound: indices of the forward in flight.
        applied: whether a rotary module has used them.
        layers_call_rotary: a rotary module sits inside a layer, so that checkpointing runs it again in backward.
        native_blocks: how many `native_rope` blocks are open.
        beside_native: those that come back at their end, and what the modules held of them.
        temporary: whether a block put the patch on, which then ends with the last block.
    """

    original: "RopeParameters"
    native: "RopeParameters"
    current: "RopeParameters"
    start: "RopeParameters"
    start_rescalings: "tuple[Rescaling, ...]" = ()
    local: LocalLayers = LocalLayers()
    rescaling: "Rescaling | None" = None
    source: ViewSource | None = None
    when: When = "train"
    ended: tuple[View, When] | None = None
    leader: "Leader | None" = None
    overrides: "OpenSources[ViewSource | TableSource]" = field(default_factory=OpenSources)
    turns: Turns = field(default_factory=Turns)
    bound: BoundIndex | None = None
    applied: bool = False
    layers_call_rotary: bool = False
    native_blocks: int = 0
    beside_native: "tuple[RopeParameters, RopeParameters] | None" = None
    temporary: bool = False

    def require_no_native_rope(self, what: str) -> None:
        """Raise ValueError inside `native_rope`, whose end puts back the RoPE parameters from before."""
        if self.native_blocks:
            raise ValueError(inside_native_rope(what))

    def __getstate__(self) -> dict[str, Any]:
        self.require_no_native_rope("copying or pickling the model")
        return self.__dict__

    @property
    def rescalings(self) -> "tuple[Rescaling, ...]":
        """All that made the RoPE parameters in force of the native ones, in order; () if they are native."""
        return self.start_rescalings if self.rescaling is None else (*self.start_rescalings, self.rescaling)

    def settle(self) -> None:
        """Let rescalings from now on start from the RoPE parameters in force, which the weights were trained with."""
        self.start, self.start_rescalings, self.rescaling = self.current, self.rescalings, None

    def in_training(self, decoder: nn.Module) -> bool:
        """Whether a forward of `decoder` belongs to training; that of a reference model does if its leader's would."""
        return decoder.training if self.leader is None else self.leader.training

    def active(self, training: bool) -> ViewSource | TableSource | None:
        """The source that decides the next forward's indices; None for true positions."""
        override = self.overrides.innermost()
        if override is not None:
            return override
        if self.source is not None and (training or self.when == "always"):
            return self.source
        return None

    def enter(self, batch: Batch) -> None:
        """Begin a forward of the decoder."""
        source = self.active(batch.training)
        self.applied = False
        self.bound = None if source is None else source.bind(batch)
        if batch.cached and getattr(batch.cache, _DRAWS, None) is not None:
            setattr(batch.cache, _IN_VIEW, True)

    def leave(self, finished: bool, cache: Any) -> None:
        """End it; a view that no rotary module has used would be lost in silence.

        Args:
            finished: whether it returned.
            cache: that a forward in inference returned, if any.
        """
        bound, self.bound = self.bound, None
        if cache is not None and getattr(cache, _DRAWS, None) is not None:
            setattr(cache, _IN_VIEW, False)
        if cache is not None and isinstance(bound, BoundView | BoundTable) and not bound.continues:
            keep_draws(cache, bound)
        if finished and bound is not None and not self.applied:
            raise RuntimeError(
                "A RoPE view was in force but the model called none of its rotary modules in this forward, so it had "
                "no effect. Either its config switches RoPE off or this model computes positions elsewhere."
            )


def inside_native_rope(what: str) -> str:
    """Why a call is refused inside `native_rope`."""
    return f"{what} was called inside native_rope: leave the block first."


STATE_ATTRIBUTE = "_rope_patch"


def state_of(decoder: Any) -> RopeState | None:
    """The state of a patched decoder, None if it is not patched."""
    return getattr(decoder, STATE_ATTRIBUTE, None)


def has_view(decoder: nn.Module, *, training: bool | None = None) -> bool:
    """Whether the next forward of a decoder, patched or not, gets other indices than its true positions.

    Args:
        decoder: of the model.
        training: whether that forward belongs to training; None for what the decoder's mode says.
    """
    state = state_of(decoder)
    if state is None:
        return False
    return state.active(state.in_training(decoder) if training is None else training) is not None
