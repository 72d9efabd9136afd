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
"""What documents end with: as many tokens behind each, or one of a set, as token ids."""

MAX_INDEX = 2**24
"""Largest RoPE index: Transformers multiplies it in float32, which holds no larger integer exactly.

The index is exact up to here, its angle is not: index times frequency is rounded to 24 bits, so that cosines of fast
frequencies are off by up to .03 at 2**20 and .5 at 2**24, in Transformers as here.
"""


class TrainingText(Protocol):
    """The training set of a run before it is tokenized, which a trainer hands to `View.prepare_text`."""

    @property
    def dataset(self) -> Any:
        """The rows, a `datasets.Dataset` in one of TRL's formats, or what else the trainer was given."""

    @property
    def args(self) -> Any:
        """The trainer's configuration, a `trl_ext.RopeSFTConfig`."""

    @property
    def tokenizer(self) -> Any:
        """Of the model; loaded when it is asked for."""

    def ended_with(self, cue: str | Sequence[str]) -> tuple[Any, Cue]:
        """The rows with a cue, or one of several, behind each document, and what `cue_option` is to say of them."""


class View:
    """Base of all views; subclasses are frozen dataclasses registered in `VIEWS`.

    A view acts on t = 0, 1, ..., the index of a token within its document, and has two parts: `draw` gives the
    parameters of each document, `rope_index` maps t with them. The second is elementwise, so that it is right for a
    whole row, for a packed row, for one token that is decoded with a cache and for a shard of a row.

    All else that a trainer has to know of a view are methods with defaults, which it asks of every view alike: what to
    do with texts (`prepare_text`, `cue`), with long documents (`cuts`, `kept`, `cut`), what to refuse (`check_run`,
    `check_length`, `can_change`) and how far positions go (`reach`, `targets`).
    """

    name: ClassVar[str]
    perturbs: ClassVar[bool] = True  # False: `rope_index` is t whatever is drawn
    synonyms: ClassVar[tuple[str, ...]] = ()  # other names of the method, lower case with hyphens, for errors
    cites: ClassVar[tuple[str, ...]] = ()  # BibTeX of its papers, for the card of a model that was made with it
    cue_option: ClassVar[str | None] = None  # the option that says what documents end with; a trainer's `cue` sets it
    # options that `prepare_text` finds out, each with a stand-in by which the others are checked before
    from_text: ClassVar[Mapping[str, object]] = MappingProxyType({})

    def __init_subclass__(cls) -> None:
        """Refuse an option with the name of a method, which `dataclass` would take for the option's default."""
        super().__init_subclass__()
        for name in cls.__dict__.get("__annotations__", {}):
            method = vars(View).get(name)
            if callable(method) or isinstance(method, property | classmethod):
                raise TypeError(
                    f"{cls.__name__} has an option {name!r}, which is a method of View: give it another name."
                )

    def cited(self) -> tuple[str, ...]:
        """BibTeX of the papers of this view and of those within it."""
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
        """Parameters of the documents of a batch. A view that looks at tokens overrides this, and others `draw`.

        Args:
            ids: of the tokens, [batch, seq_len]; None where a model is given embeddings.
            t: index of each token in its document, [1 or batch, seq_len], -1 on padding.
            documents: of the batch.
            key: source of randomness, in the shape of documents.

        Returns:
            As `draw`; what has one value a token, [batch, seq_len], goes on with the last one in decoding.
        """
        return self.draw(documents.length, key)

    def rope_index(self, t: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        """RoPE index minus that of the document's first token, int64 or float64, for t (int64 or float64)."""
        raise NotImplementedError

    def affected_from(self, t: torch.Tensor, documents: Documents, parameters: Parameters) -> torch.Tensor:
        """First token of each document whose distance to an earlier one is not the true one.

        That is min{t : r(t) - r(0) != t} for what was drawn, or the document's length where no t is so. Rows before it
        predict the same as without the view, since RoPE sees differences of indices alone.

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
        real = (t >= 0) & (t < length)
        # one place a document, and one for all tokens that are none's first: there are at most as many as tokens
        nowhere = ordinal.numel()
        begin = torch.zeros(nowhere + 1, dtype=moved.dtype, device=t.device)
        begin.scatter_(0, torch.where(real & (t == 0), ordinal, nowhere).flatten(), moved.flatten())
        changed = real & (moved - begin[ordinal] != t)
        first = torch.full_like(begin, torch.iinfo(torch.int64).max, dtype=torch.int64)
        first.scatter_reduce_(0, ordinal.flatten(), torch.where(changed, t, length).flatten(), "amin")
        return torch.minimum(first[documents.ordinal], documents.length)

    @classmethod
    def prepare_text(cls, options: dict[str, Any], text: TrainingText) -> tuple[dict[str, Any], Any]:
        """The view's options and the training set that belong together, made before documents are tokenized.

        By default a view with a `cue_option` has the `cue` of the trainer's configuration put behind all documents.

        Args:
            options: as the user gave them.
            text: the training set, its tokenizer and the configuration.

        Returns:
            Options, those `from_text` among them, and the training set.

        Raises:
            ValueError: texts or tokenizer lack what the view needs.
        """
        if cls.cue_option is None or text.args.cue is None:
            return options, text.dataset
        dataset, cue = text.ended_with(text.args.cue)
        return {**options, cls.cue_option: cue}, dataset

    def cue(self) -> Cue:
        """What documents end with that is no text of theirs, whose loss `cue_weight` weighs; 0 for nothing."""
        return 0 if self.cue_option is None else getattr(self, self.cue_option)

    @property
    def cuts(self) -> str | None:
        """The option that cuts documents, as "name=value" for messages; None where documents stay whole."""
        return None

    def kept(self, length: torch.Tensor) -> torch.Tensor:
        """How many tokens of documents of `length` tokens `cut` keeps, in the shape of `length`."""
        return length

    def cut(self, length: torch.Tensor, key: DrawKey) -> torch.Tensor | None:
        """Which tokens of each document to keep in a step, drawn with the key that `draw` then gets for what is kept.

        Args:
            length: of the documents, one a row, [batch, 1].
            key: of `draw`.

        Returns:
            Indices into the row, rising, [batch, most tokens kept]; those from a document's own length on are none of
            its tokens. None where no document is too long.
        """
        return None

    def check_run(self, args: Any) -> None:
        """Raise ValueError, with the reason and what to do, if no run of this configuration can train under the view.

        Args:
            args: of the trainer, a `trl_ext.RopeSFTConfig`. It is called before anything is loaded: options `from_text`
                may be stand-ins.
        """

    def why_control(self) -> str | None:
        """Why next-token training is meant to be as without the view, which is then told and not refused; else None."""
        return None

    def conditions(self) -> list[str]:
        """What must hold for documents to be changed, a clause each; the error that none is changed lists them."""
        return []

    def alternatives(self) -> "Sequence[View]":
        """The views of which each document takes one: each of them has to change something."""
        return [self]

    @property
    def reads_tokens(self) -> bool:
        """Whether draws go by token ids, and not by lengths alone."""
        return type(self).draw_for is not View.draw_for

    @property
    def draws_by_forward(self) -> bool:
        """Whether a draw is shared by the documents of a forward, so that it depends on how a step is divided."""
        return False

    def can_change(self, length: torch.Tensor) -> torch.Tensor:
        """Whether some draw changes a distance between two tokens of a document of `length` tokens.

        Where it is False a document is as without the view in every step. The last token, which is read with no label
        behind it, counts here as any other: `Skip(split=20)` can change documents of 21 tokens.

        Args:
            length: tokens of the documents, int64 of any shape.

        Returns:
            bool in the shape of `length`; by default from two tokens on.
        """
        return length > 1 if self.perturbs else torch.zeros_like(length, dtype=torch.bool)

    def affected_share(self, t: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        """Probability over draws that `affected_from` is at most t, float64, for t below `length`.

        Under a curriculum it holds at every point of training at which the view changes anything.

        Raises:
            ValueError: the view does not know it.
        """
        raise ValueError(
            f"{title(self)} does not know how often a token lies behind its first changed one, by which reduction "
            "'uniform' divides: use 'sequence' or 'token', or another view, e.g. 'skip'."
        )

    @property
    def follows_progress(self) -> bool:
        """Whether draws depend on the progress of training, which somebody then has to tell the clock."""
        return any(isinstance(getattr(self, field.name), Curriculum) for field in fields(cast(Any, self)))

    @property
    def layerwise(self) -> bool:
        """Whether layers have positions of their own: `layer_groups` then says which."""
        return False

    @property
    def names_layers(self) -> bool:
        """Whether a layerwise view acts on just the layers that it was given, local ones too."""
        return False

    @property
    def rescales(self) -> bool:
        """Whether `frequencies` differ from those of the RoPE parameters in force."""
        return False

    @property
    def stands_alone(self) -> bool:
        """Whether the view cannot be a part of another one."""
        return self.layerwise or self.rescales

    def frequencies(self, inv_freq: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        """Frequencies of a forward, radians per position, from those of the RoPE parameters, [head_dim / 2]."""
        return inv_freq

    def layer_groups(self, n_layers: int, parameters: Parameters) -> "list[tuple[list[int], View, Parameters]]":
        """Layers that share positions, each group with its view and that one's parameters; together all layers."""
        return [(list(range(n_layers)), self, parameters)]

    def check_length(self, length: int) -> None:
        """Raise ValueError if rows of `length` tokens cannot be viewed this way."""

    def reach(self, length: int, last: int | None = None) -> int | None:
        """Largest RoPE index that a document of `length` tokens can be given, counted from that of its first token.

        Args:
            length: tokens of the document, at least 1.
            last: index of its last token as the view receives it; None is length - 1. Views before this one in a
                `compose` may have moved it.

        Returns:
            The index, rounded up; None where the view does not know it.
        """
        return None

    def targets(self) -> list[tuple[str, int]]:
        """The windows that the view trains, each with the name of the view whose `target` it is, in positions.

        A model's window must hold them. Views that show positions of no window in particular have none.
        """
        return []

    def largest_skip(self, length: torch.Tensor) -> torch.Tensor | None:
        """Largest r(t) - t that can be drawn for documents of `length` tokens, by which a KL is logged in quarters.

        Returns:
            int64 in the shape of `length`; None where the view draws none.
        """
        return None

    def check_layers(self, n_layers: int, local: Collection[int] = ()) -> None:
        """Raise ValueError if a layerwise view does not fit a model.

        Args:
            n_layers: of the model.
            local: the layers that stay at true positions, unless the view `names_layers`.
        """

    def options(self) -> dict[str, Any]:
        """The arguments that make an equal view, as a recipe has them."""
        return {f.name: as_recipe(getattr(self, f.name)) for f in fields(self)}  # type: ignore[arg-type]


def as_recipe(value: Any) -> Any:
    """An option with dictionaries for the views and laws in it, from which `resolve_view` makes equal ones."""
    if isinstance(value, View):
        return {"view": value.name, **value.options()}
    if isinstance(value, Law):
        return value.options()
    if isinstance(value, dict):
        return {name: as_recipe(entry) for name, entry in value.items()}
    return type(value)(map(as_recipe, value)) if isinstance(value, list | tuple) else value


def title(owner: object) -> str:
    """How errors call a view."""
    return f"view {getattr(owner, 'name', type(owner).__name__)!r}"
