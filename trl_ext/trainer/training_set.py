"""From documents to rows of tokens, before the first step: what is cut and what is left out."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch
from datasets import Dataset, IterableDataset
from transformers.utils import logging

from rope_patch.layout.document_lengths import document_lengths
from rope_patch.layout.special_tokens import SpecialTokens

from ..config import RopeSFTConfig
from ..data.document_survey import Survey
from ..data.long_documents import STAY_WHOLE, cut_batch, cut_into_rows
from .dataset_checks import column_names, has_lists, named_sets

logger = logging.get_logger(__name__)

Prepare = Callable[[Any, RopeSFTConfig, bool], Any]
"""TRL's preparation of a dataset, with a config and whether to pack."""

_PART = 2**16  # tokens that are looked at together


def with_masked_loss(args: RopeSFTConfig, *datasets: Any) -> RopeSFTConfig:
    """`args`, or a copy in which the loss is of completions, where the rows of one of `datasets` say what those are.

    TRL decides so for prompts and completions, and would not read the mask of rows of token IDs. It counts every token
    of rows without a mask whatever the setting.

    Args:
        args: of the trainer.
        datasets: to train on and to evaluate on, each one, several by name or None.
    """
    sets = [part for dataset in datasets for _, part in named_sets(dataset, "") if hasattr(part, "column_names")]
    if args.completion_only_loss is None and any({"input_ids", "completion_mask"} <= {*column_names(p)} for p in sets):
        args = copy.copy(args)
        args.completion_only_loss = True
    return args


def document_tokens(dataset: Dataset) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Token ids of the documents that `document_lengths` counts, in parts of 2**16 tokens on average.

    Yields:
        Token IDs of some documents, one after the other, int64 [tokens], and their lengths, int64 [documents].
    """
    tokens = document_lengths(dataset)
    assert tokens is not None
    packed = "seq_lengths" in dataset.column_names
    rows = dataset.select_columns(["input_ids", *(["seq_lengths"] if packed else [])])
    for batch in rows.with_format("arrow").iter(max(_PART * len(dataset) // max(int(tokens.sum()), 1), 1)):
        lengths = pc.list_flatten(batch["seq_lengths"]) if packed else pc.list_value_length(batch["input_ids"])
        ids = pc.list_flatten(batch["input_ids"])
        yield torch.tensor(ids.to_numpy(), dtype=torch.int64), torch.tensor(lengths.to_numpy(), dtype=torch.int64)


def prepare_rows(
    dataset: Any,
    name: str,
    args: RopeSFTConfig,
    tokenizer: Any,
    packing: bool,
    prepare: Prepare,
) -> Any:
    """Rows of a dataset by TRL's own preparation, and one logged line of what is left out of them.

    TRL tokenizes first, except for `long_documents="full-rows"`, where `cut_into_rows` makes rows of the texts. With
    "split", documents without a token to predict are then left out, and documents longer than `max_length` are cut if
    the kind of data allows it. Otherwise the rows are TRL's.

    Args:
        dataset: as the user gave it.
        name: of it, for messages.
        args: of the trainer.
        tokenizer: of the model.
        packing: whether rows hold several documents.
        prepare: TRL's preparation, which truncates, packs and shuffles a tokenized dataset.

    Raises:
        ValueError: no document has a token to predict, `max_length` leaves no room for one, or a packed row has more
            than `max_length` tokens.
    """
    fills_rows = args.long_documents == "full-rows"
    if fills_rows:
        with args.main_process_first(desc="cutting documents"):
            dataset, coverage = cut_into_rows(dataset, tokenizer, args.max_length or 0, args.dataset_text_field)
        if args.process_index == 0:
            logger.warning(f"{name}: {coverage}")
    columns = column_names(dataset)
    if "seq_lengths" in columns:  # packed again, each row would count as one document
        if args.max_length is not None and isinstance(dataset, Dataset) and has_lists(dataset, "input_ids"):
            parts = dataset.select_columns(["input_ids"]).with_format("arrow").iter(1000)
            longest = max((pc.max(pc.list_value_length(part["input_ids"])).as_py() for part in parts), default=0)
            if longest > args.max_length:
                raise ValueError(
                    f"{name} has a column seq_lengths, so its rows are packed already and must have at most max_length="
                    f"{args.max_length} tokens, got one of {longest}. Raise max_length, or give documents one a row."
                )
        unchanged = copy.copy(args)
        unchanged.max_length = None
        return prepare(dataset, unchanged, False)
    # 1. TRL tokenizes, and neither truncates nor packs.
    tokenize_only = copy.copy(args)
    tokenize_only.max_length, tokenize_only.shuffle_dataset = None, False
    tokenized = prepare(dataset, tokenize_only, False)
    policy = LongDocumentPolicy.of(args, tokenizer, packing, columns)
    if isinstance(tokenized, IterableDataset):
        return _prepare_stream(tokenized, name, args, policy, lambda rows: prepare(*policy.truncated(rows), packing))
    if not has_lists(tokenized, "input_ids", "labels"):
        return prepare(tokenized, args, packing)
    # 2. Documents that nothing can be learned from are counted, and left out where documents are split.
    limit = args.max_length if policy.truncates else None
    survey = partial(Survey.of, special=policy.special, labelled=policy.labelled, joined=policy.wraps)
    # its arrays, and all that are made of them below, are [documents]
    documents = survey(tokenized, limit=limit, keep_end=args.truncation_mode == "keep_end")
    _require_text_to_predict(documents.teaches, name)
    if not (documents.teaches & documents.teaches_kept).any():
        raise ValueError(
            f"max_length={args.max_length} truncates every token to predict in {name}: all completions lie beyond it. "
            "Raise max_length."
        )
    notes: list[str] = []
    left_out: list[str] = []
    untaught = ~documents.teaches
    if untaught.any():
        (left_out if policy.splits else notes).append(
            f"{_count(untaught.sum(), 'document')} of {_count(documents.lengths[untaught].sum(), 'token')} "
            "without a token to predict (empty, one token, special tokens only, or all masked)"
        )
    lost = documents.teaches & ~documents.teaches_kept & (not packing)  # with packing TRL keeps their beginnings
    if lost.any():
        left_out.append(
            f"{_count(lost.sum(), 'document')} of {_count(documents.lengths[lost].sum(), 'token')} "
            "whose completion lies behind max_length"
        )
    # TRL drops the lost ones as it truncates, and with "truncate" decides about untaught ones too
    kept = ~(lost | untaught if policy.splits else lost)
    if policy.splits and not kept.all():
        tokenized = tokenized.select(np.flatnonzero(kept))
    # 3. Longer documents are cut if their kind allows it.
    lengths, masked = documents.lengths[kept], documents.masked[kept]
    longer = lengths > args.max_length if args.max_length is not None else np.zeros_like(masked)
    cut = longer & policy.cuts(masked)
    if cut.any():
        tokenized = policy.cut(tokenized)
        notes.append(f"{_count(cut.sum(), 'document')} longer than max_length cut into rows that are all read")
        if (cut & (masked | policy.whole)).any():
            notes.append("also conversations, prompts and completions, whose later rows lack what came before")
        pieces = survey(tokenized)  # rows by now
        if not pieces.teaches.all():
            tokenized = tokenized.select(np.flatnonzero(pieces.teaches))
            tokens = pieces.lengths[~pieces.teaches].sum()
            left_out.append(f"{_count(tokens, 'token')} in rows of a cut document that have no token to predict")
    truncated = longer & ~cut & policy.truncates
    if truncated.any():
        tokens = (lengths[truncated] - args.max_length).sum()
        left_out.append(
            f"{_count(tokens, 'token')} ({tokens / documents.tokens:.1%} of all) behind max_length in "
            f"{_count(truncated.sum(), 'document')} ({policy.remedy()})"
        )
    # 4. TRL truncates, packs and shuffles.
    rows = prepare(*policy.truncated(tokenized), packing)
    if policy.splits and policy.wraps and (single := int((survey(rows).lengths == 1).sum())):
        left_out.append(f"{_count(single, 'token')} in rows of one token, at the end of what is packed at once")
    if args.process_index == 0 and not fills_rows:
        size = "" if args.max_length is None else f" of at most {args.max_length}"
        what = f"{name}: {_count(len(documents.lengths), 'document')} of {_count(documents.tokens, 'token')}"
        notes = [f"{what} in {_count(len(rows), 'packed row' if packing else 'row')}{size}", *notes, *policy.notes]
        logger.warning(f"{', '.join(notes)}. Left out: {'; '.join(left_out) or 'nothing'}.")
    return rows


@dataclass(frozen=True)
class LongDocumentPolicy:
    """How documents longer than `max_length` are cut or truncated."""

    args: RopeSFTConfig
    tokenizer: Any
    begin: tuple[int, ...] | None  # special tokens before a text; None if they are not known
    special: tuple[int, ...]
    packing: bool
    columns: tuple[str, ...]

    @classmethod
    def of(cls, args: RopeSFTConfig, tokenizer: Any, packing: bool, columns: Sequence[str]) -> "LongDocumentPolicy":
        try:
            begin = SpecialTokens.of(tokenizer).begin
        except ValueError:
            begin = None  # an error only where a text has to be cut
        if args.max_length is not None and args.max_length <= max(len(begin or ()), 1):
            raise ValueError(
                f"max_length must leave room for a token to predict beside the {len(begin or ())} tokens that the "
                f"tokenizer puts before a text, got {args.max_length}."
            )
        return cls(args, tokenizer, begin, tuple(tokenizer.all_special_ids), packing, tuple(columns))

    @property
    def whole(self) -> bool:
        """Whether documents lose their meaning where they are cut, as chats do."""
        return any(column in self.columns for column in STAY_WHOLE)

    @property
    def wraps(self) -> bool:
        """Whether rows are cut from joined documents."""
        return self.packing and self.args.packing_strategy == "wrapped"

    @property
    def labelled(self) -> bool:
        return not self.args.objective_options.counts_every_token

    @property
    def splits(self) -> bool:
        return self.args.long_documents != "truncate"

    @property
    def truncates(self) -> bool:
        """Whether TRL truncates what is still longer."""
        return self.args.max_length is not None and (not self.packing or self.args.packing_strategy == "bfd")

    @property
    def notes(self) -> list[str]:
        view = self.args.make_view()
        if view.cuts is None:
            return []
        return [f"of longer rows view {view.name!r} reads another part each epoch ({view.cuts})"]

    def cuts(self, masked: np.ndarray) -> np.ndarray:
        """Which documents may be cut, given which have masked labels."""
        if not self.splits or self.wraps:  # "wrapped" packing cuts by itself
            return np.zeros_like(masked)
        return np.ones_like(masked) if self.packing else ~masked & (not self.whole)

    def cut(self, tokenized: Any) -> Any:
        """The dataset with its long documents cut."""
        assert self.args.max_length is not None
        begin = self.begin
        if begin is None:  # rows as input_ids begin as they are given
            begin = () if "input_ids" in self.columns else SpecialTokens.of(self.tokenizer).begin
        others = not self.args.remove_unused_columns
        function = partial(
            cut_batch, max_length=self.args.max_length, begin=begin, whole=not self.packing, others=others
        )
        options: dict[str, Any] = {"batched": True, "batch_size": 16, "remove_columns": column_names(tokenized)}
        if isinstance(tokenized, IterableDataset):
            return tokenized.map(function, **options)
        style = tokenized.format["type"]
        with self.args.main_process_first(desc="cutting long documents"):
            made = tokenized.with_format(None).map(
                function,
                **options,
                writer_batch_size=64,  # rows may be long
                num_proc=self.args.dataset_num_proc,
                desc="Cutting documents longer than max_length",
            )
        return made.with_format(style)

    def truncated(self, tokenized: Any) -> tuple[Any, RopeSFTConfig]:
        """The dataset and config for TRL, with documents already truncated if the objective ignores labels.

        TRL drops documents without a label when it truncates, and distillation learns from these too.
        """
        if self.labelled or self.packing or self.args.max_length is None:
            return tokenized, self.args
        n = self.args.max_length
        part = slice(-n, None) if self.args.truncation_mode == "keep_end" else slice(n)
        args = copy.copy(self.args)
        args.max_length = None
        options: dict[str, Any] = {} if isinstance(tokenized, IterableDataset) else {"desc": "Truncating documents"}
        with self.args.main_process_first(desc="truncating documents"):
            return tokenized.map(
                lambda row: {name: row[name][part] for name in ("input_ids", "labels")}, **options
            ), args

    def remedy(self) -> str:
        """How to keep more of the text."""
        if not self.splits and (self.packing or not self.whole):
            return "long_documents='split' keeps them"
        return "documents with prompts, completions or masked labels stay whole: raise max_length"


def _prepare_stream(
    tokenized: IterableDataset,
    name: str,
    args: RopeSFTConfig,
    policy: LongDocumentPolicy,
    prepare: Callable[[Any], Any],
) -> Any:
    """`prepare_rows` of a stream, which can be read only once, so that nothing is counted."""
    cuts = args.max_length is not None and bool(policy.cuts(np.zeros(1, dtype=bool)).any())
    if cuts:
        tokenized = policy.cut(tokenized)
    taught = tokenized.filter(partial(_teaches, special=frozenset(policy.special), labelled=policy.labelled))
    if next(iter(taught), None) is None:  # reads the stream up to its first document that teaches
        _require_text_to_predict(np.zeros(0, dtype=bool), name)
    if args.process_index == 0:
        longer = f"Documents longer than max_length={args.max_length}"
        sentences = [f"{name} is a stream, whose documents and tokens are not counted"]
        if cuts:
            sentences.append(f"{longer} are cut into rows that are all read")
        if policy.truncates and (policy.whole or not cuts):
            sentences.append(f"{longer} are truncated, and the rest is left out ({policy.remedy()})")
        elif policy.truncates:
            sentences.append("Those with masked labels are truncated to max_length")
        if policy.splits:
            sentences.append("Documents without a token to predict are left out")
        logger.warning(". ".join([*sentences, *policy.notes]) + ".")
    return prepare(taught if policy.splits else tokenized)


def require_taught(dataset: Any, name: str, args: RopeSFTConfig, tokenizer: Any) -> None:
    """Raise ValueError if no document of a set without TRL's preparation has a token to predict; log how many lack."""
    if not isinstance(dataset, Dataset) or dataset.format["type"] == "custom" or "seq_lengths" in dataset.column_names:
        return
    if not has_lists(dataset, "input_ids", "labels"):
        return
    labelled = not args.objective_options.counts_every_token
    documents = Survey.of(dataset, tuple(tokenizer.all_special_ids), labelled=labelled)
    _require_text_to_predict(documents.teaches, name)
    if not documents.teaches.all() and args.process_index == 0:
        logger.warning(
            f"{name}: {_count((~documents.teaches).sum(), 'document')} without a token to predict stay in it."
        )


def _require_text_to_predict(teaches: np.ndarray, name: str) -> None:
    if not teaches.any():
        raise ValueError(
            f"{name} must have a document of at least two tokens with a label after the first, and none of its "
            f"{len(teaches) or ''} documents has: they are empty, of one token, of special tokens only, or all masked. "
            "Look at the column that the text is read from."
        )


def _teaches(row: Mapping[str, Any], special: frozenset[int], labelled: bool) -> bool:
    ids, labels = row["input_ids"], row["labels"] if labelled else row["input_ids"]
    return any(label != -100 for label in labels[1:]) and any(token not in special for token in ids)


def _count(n: Any, what: str) -> str:
    return f"{int(n):,} {what}{'' if n == 1 else 's'}"
