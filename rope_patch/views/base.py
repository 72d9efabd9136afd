"""What a view is: a rule from token index to RoPE index, drawn anew for each document."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, cast

import torch

from ..base.draws import DrawKey
from ..base.registry import VIEWS as VIEWS
from ..layout.documents import Documents
from .laws import Curriculum, Law

TRUE_POSITIONS = "standard"
"""Name of the view that changes nothing, which stands for having none."""

Parameters = dict[str, torch.Tensor]

Cue = int | Sequence[Sequence[int]]
"""A prompt at the end of documents: its number of tokens, or a set of prompts as lists of token ids."""

MAX_INDEX = 2**24
"""Largest RoPE index: Transformers multiplies it in float32, which holds no larger integer exactly.

The index is exact up to here, its angle is not: index times frequency is rounded to 24 bits, so that cosines of fast
frequencies are off by up to .03 at 2**20 and .5 at 2**24, in Transformers as here.
"""


class TrainingText(Protocol):
    """The training set of a run before it is tokenized, which a trainer hands to `View.prepare_text`."""

    @property
    def dataset(self) -> Any:
        """The rows: a `datasets.Dataset` in one of TRL's formats, or whatever the trainer was given."""

    @property
    def args(self) -> Any:
        """The trainer's configuration, a `trl_ext.RopeSFTConfig`."""

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, loaded at the first use."""

    def ended_with(self, cue: str | Sequence[str]) -> tuple[Any, Cue]:
        """Append a cue, or one of several, to each document; returns the rows and the value of `cue_option`."""


class View:
    """Base of all views; subclasses are frozen dataclasses registered in `VIEWS`.

    A view acts on t = 0, 1, ..., the index of a token within its document. `draw` gives the parameters of each
    document, and `rope_index` maps t with them. `rope_index` is elementwise, so it holds for a whole row, a packed row,
    a token that is decoded with a cache and a shard of a row.

    The other methods have defaults. Trainers call them to prepare texts (`prepare_text`, `cue`), to shorten documents
    (`cuts`, `kept`, `cut`), to refuse a run (`check_run`, `check_length`, `can_change`) and to know how far positions
    go (`reach`, `targets`).
    """

    name: ClassVar[str]
    perturbs: ClassVar[bool] = True  # False: `rope_index` is t whatever is drawn
    synonyms: ClassVar[tuple[str, ...]] = ()  # other names of the method, for errors
    cites: ClassVar[tuple[str, ...]] = ()  # BibTeX of its papers, for the model card
    cue_option: ClassVar[str | None] = None  # the option that describes the cue; a trainer's `cue` sets it
    # options that `prepare_text` sets, each with a placeholder that lets the other options be checked earlier
    from_text: ClassVar[Mapping[str, object]] = MappingProxyType({})

    def __init_subclass__(cls) -> None:
        """Refuse an option with a method's name: `dataclass` would take the method as the option's default."""
        super().__init_subclass__()
        for name in cls.__dict__.get("__annotations__", {}):
            method = vars(View).get(name)
            if callable(method) or isinstance(method, property | classmethod):
                raise TypeError(
                    f"{cls.__name__} has an option {name!r}, which is a method of View: give it another name."
                )

    def cited(self) -> tuple[str, ...]:
        """BibTeX of the papers of this view and of the views in it."""
        return self.cites

    def draw(self, length: torch.Tensor, key: DrawKey) -> Parameters:
        """Parameters of each document.

        Args:
            length: tokens of the document, int64, [batch, 1] or [batch, seq_len] (one value a token in packed rows).
            key: source of randomness, in the same shape.

        Returns:
            Tensors that broadcast with `length`.
        """
        raise NotImplementedError

    def draw_for(self, ids: torch.Tensor | None, t: torch.Tensor, documents: Documents, key: DrawKey) -> Parameters:
        """Parameters of the documents of a batch. Views that read tokens or draw for each override this, not `draw`.

        `key.sorted(t)`, `key.rank(t)` and `key.pick(candidates, t)` draw document by document.

        Args:
            ids: token ids, [batch, seq_len]; None where a model is given embeddings.
            t: index of each token in its document, [1 or batch, seq_len], -1 on padding.
            documents: of the batch.
            key: source of randomness, in the shape of documents.

        Returns:
            Tensors that broadcast with t. Decoding with a cache repeats the last token's value of those that are
            [batch, seq_len].
        """
        return self.draw(documents.length, key)

    def rope_index(self, t: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        """RoPE index r(t), counted from where the document begins, int64 or float64, for t (int64 or float64)."""
        raise NotImplementedError

    def affected_from(self, t: torch.Tensor, documents: Documents, parameters: Parameters) -> torch.Tensor:
        """First token s of each document whose distance to an earlier token changes.

        s = min{t : r(t) - r(0) != t, or the query of t is scaled} for what was drawn, or the document's length if there
        is no such t. Tokens before s predict the same as without the view, since RoPE sees only differences of indices.

        Args:
            t: index of each token in its document, [1 or batch, seq_len], -1 on padding; whole documents.
            documents: of the batch.
            parameters: of `draw_for` for the same batch.

        Returns:
            int64 in the shape of documents.
        """
        shape = (len(documents.start), t.shape[-1])
        t, ordinal, length = (x.expand(shape) for x in (t, documents.ordinal, documents.length))
        moved = self.rope_index(t, parameters).expand(shape)
        scale = self.query_scale(moved.double(), parameters)
        real = (t >= 0) & (t < length)
        # a document has at least one token, so `nowhere` numbers are enough; the last place takes all other tokens
        nowhere = ordinal.numel()
        begin = torch.zeros(nowhere + 1, dtype=moved.dtype, device=t.device)  # r(0) by document
        begin.scatter_(0, torch.where(real & (t == 0), ordinal, nowhere).flatten(), moved.flatten())
        changed = real & ((moved - begin[ordinal] != t) | (False if scale is None else scale != 1))
        first = torch.full_like(begin, torch.iinfo(torch.int64).max, dtype=torch.int64)  # s by document
        first.scatter_reduce_(0, ordinal.flatten(), torch.where(changed, t, length).flatten(), "amin")
        return torch.minimum(first[documents.ordinal], documents.length)

    @classmethod
    def prepare_text(cls, options: dict[str, Any], text: TrainingText) -> tuple[dict[str, Any], Any]:
        """Fit the view's options and the training set to each other, before documents are tokenized.

        By default, for a view with a `cue_option`, the `cue` of the trainer's configuration is appended to documents.

        Args:
            options: as the user gave them.
            text: the training set, its tokenizer and the configuration.

        Returns:
            The options, with those of `from_text`, and the training set.

        Raises:
            ValueError: texts or tokenizer lack what the view needs.
        """
        if cls.cue_option is None or text.args.cue is None:
            return options, text.dataset
        dataset, cue = text.ended_with(text.args.cue)
        return {**options, cls.cue_option: cue}, dataset

    def cue(self) -> Cue:
        """The cue at the end of documents, whose loss `cue_weight` scales; 0 for none."""
        return 0 if self.cue_option is None else getattr(self, self.cue_option)

    @property
    def cuts(self) -> str | None:
        """The option that shortens documents, as "name=value" for messages; None if they stay whole."""
        return None

    def kept(self, length: torch.Tensor) -> torch.Tensor:
        """Number of tokens that `cut` keeps of documents of `length` tokens, in the shape of `length`."""
        return length

    def cut(self, length: torch.Tensor, key: DrawKey) -> torch.Tensor | None:
        """Draw which tokens of each document to keep in a step.

        Args:
            length: tokens of each document, one document a row, [batch, 1].
            key: the same key as that of `draw`, which is called for the shortened documents.

        Returns:
            Rising indices into the row, [batch, most tokens kept]; an index at or beyond the document's length is not
            one of its tokens. None if no document is too long.
        """
        return None

    def check_run(self, args: Any) -> None:
        """Raise ValueError, with the reason and what to do, if this configuration cannot train under the view.

        Args:
            args: of the trainer, a `trl_ext.RopeSFTConfig`. The call comes before anything is loaded, so options of
                `from_text` may still be placeholders.
        """

    def why_control(self) -> str | None:
        """Why training is intended to equal training without the view, which then gives a warning; else None."""
        return None

    def conditions(self) -> list[str]:
        """Clauses that must hold for a document to change; the error for a view without effect lists them."""
        return []

    def alternatives(self) -> "Sequence[View]":
        """The views of which each document takes one; each of them must change some document."""
        return [self]

    @property
    def reads_tokens(self) -> bool:
        """Whether draws depend on token ids, beside lengths."""
        return type(self).draw_for is not View.draw_for

    @property
    def draws_by_forward(self) -> bool:
        """Whether the documents of a forward share a draw, which then depends on how a step is split into forwards."""
        return False

    def can_change(self, length: torch.Tensor) -> torch.Tensor:
        """Whether some draw changes a distance between two tokens of a document of `length` tokens.

        The last token counts too, although no label follows it: `Skip(split=20)` can change documents of 21 tokens.

        Args:
            length: tokens of the documents, int64 of any shape.

        Returns:
            bool in the shape of `length`; by default from two tokens on.
        """
        return length > 1 if self.perturbs else torch.zeros_like(length, dtype=torch.bool)

    def affected_share(self, t: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        """P(`affected_from` <= t) over draws, float64, for t below `length`.

        Under a curriculum: at each point of training at which the view changes anything.

        Raises:
            ValueError: there is no formula for this view.
        """
        raise ValueError(
            f"view {self.name!r} does not know how often a token lies behind the first changed token, by which "
            "reduction 'uniform' divides: use 'sequence' or 'token', or another view, e.g. 'skip'."
        )

    @property
    def follows_progress(self) -> bool:
        """Whether draws depend on the progress of training, so that the clock must be set."""
        return any(isinstance(getattr(self, field.name), Curriculum) for field in fields(cast(Any, self)))

    @property
    def layerwise(self) -> bool:
        """Whether positions differ by layer, as `layer_groups` returns them."""
        return False

    @property
    def names_layers(self) -> bool:
        """Whether a layerwise view acts on exactly the layers that it names, also on local ones."""
        return False

    @property
    def rescales(self) -> bool:
        """Whether `frequencies` differ from those of the present RoPE parameters."""
        return False

    @property
    def stands_alone(self) -> bool:
        """Whether the view cannot be part of another view."""
        return self.layerwise or self.rescales or self.scales_queries

    @property
    def scales_queries(self) -> bool:
        """Whether there is a `query_scale`."""
        return type(self).query_scale is not View.query_scale

    def query_scale(self, index: torch.Tensor, parameters: Parameters) -> torch.Tensor | None:
        """Factor of the query of each token, float64 in the shape of `index`; None where queries stay.

        Layers with sliding-window or chunked attention are left out.

        Args:
            index: r(t), float64, [1 or batch, n], at least 0.
            parameters: of `draw`.
        """
        return None

    def frequencies(self, inv_freq: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        """Frequencies of a forward from those of the RoPE parameters, [head_dim / 2], radians per position."""
        return inv_freq

    def layer_groups(self, n_layers: int, parameters: Parameters) -> "list[tuple[list[int], View, Parameters]]":
        """Groups of layers that share positions, each with its view and parameters; together all layers."""
        return [(list(range(n_layers)), self, parameters)]

    def check_length(self, length: int) -> None:
        """Raise ValueError if documents of `length` tokens do not fit the view; by default, if `reach` is too large."""
        largest = self.reach(length)
        if largest is not None and largest > MAX_INDEX:
            raise ValueError(
                f"view {self.name!r}: RoPE indices would reach {largest}; at most {MAX_INDEX} (2**24) are exact in "
                "float32. Use shorter rows or a smaller range."
            )

    def reach(self, length: int, last: int | None = None) -> int | None:
        """Largest RoPE index that a document of `length` tokens can get, counted from that of its first token.

        Args:
            length: tokens of the document, at least 1.
            last: index of its last token as the view receives it; None is length - 1. Views before this one in a
                `compose` may have moved it.

        Returns:
            The index, rounded up; None if the view does not know it.
        """
        return None

    def targets(self) -> list[tuple[str, int]]:
        """(name of the view, its `target` in positions) of each context window that the view trains.

        The model's window must hold them.
        """
        return []

    def largest_skip(self, length: torch.Tensor) -> torch.Tensor | None:
        """Largest r(t) - t that can be drawn for documents of `length` tokens; logs split a KL into quarters of it.

        Returns:
            int64 in the shape of `length`; None if skips are not drawn.
        """
        return None

    def check_layers(self, n_layers: int, local: Collection[int] = ()) -> None:
        """Raise ValueError if a layerwise view does not fit a model.

        Args:
            n_layers: of the model.
            local: the layers that stay at true positions, unless the view `names_layers`.
        """

    def options(self) -> dict[str, Any]:
        """The arguments of an equal view, in the form of a recipe."""
        return {f.name: as_recipe(getattr(self, f.name)) for f in fields(self)}  # type: ignore[arg-type]


def as_recipe(value: Any) -> Any:
    """An option with dictionaries in place of its views and laws, from which `resolve_view` makes equal ones."""
    if isinstance(value, View):
        return {"view": value.name, **value.options()}
    if isinstance(value, Law):
        return value.options()
    if isinstance(value, dict):
        return {name: as_recipe(entry) for name, entry in value.items()}
    return type(value)(map(as_recipe, value)) if isinstance(value, list | tuple) else value


def require_ids(owner: View, ids: torch.Tensor | None) -> torch.Tensor:
    """The token ids that a view reads; raises ValueError if there are none."""
    if ids is None:
        raise ValueError(f"view {owner.name!r} reads tokens: call the model with input_ids, not with embeddings.")
    return ids
