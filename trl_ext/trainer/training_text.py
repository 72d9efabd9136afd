"""Preparation of the training set by a view, before TRL tokenizes it."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasets import Dataset
from torch import nn
from transformers import AutoTokenizer, ProcessorMixin
from trl import is_conversational

from rope_patch.methods import find_view

from ..data.cues import CueTokens, append_cue

if TYPE_CHECKING:
    from ..config import RopeSFTConfig


@dataclass(frozen=True)
class TrainingText:
    """The argument of `View.prepare_text`.

    Args:
        model: of the trainer, or its name.
        args: of the trainer.
        dataset: to train on, as the trainer was given it.
        processing_class: tokenizer or processor that the trainer was given, None if it is to load the model's.
        formatting_func: of the trainer.
    """

    model: str | nn.Module
    args: "RopeSFTConfig"
    dataset: Any
    processing_class: Any
    formatting_func: Any = None

    @cached_property
    def tokenizer(self) -> Any:
        """The trainer's tokenizer, or the model's, with the end-of-sequence token and template that `args` name."""
        args, tokenizer = self.args, self.processing_class
        if isinstance(tokenizer, ProcessorMixin):
            tokenizer = tokenizer.tokenizer
        elif tokenizer is None:
            name: Any = self.model
            revision = None
            if isinstance(self.model, str):
                loading: Any = args.model_init_kwargs or {}  # parsed from JSON by now
                revision = loading.get("revision")
            else:
                name = name.config._name_or_path
            tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=args.trust_remote_code)
        template = self._template_file
        if args.eos_token is None and template is None:
            return tokenizer
        tokenizer = copy.deepcopy(tokenizer)  # TRL changes the user's own later
        if args.eos_token is not None:
            tokenizer.eos_token = args.eos_token
        if template is not None:
            tokenizer.chat_template = template.read_text(encoding="utf-8")
        return tokenizer

    @property
    def _template_file(self) -> Path | None:
        """`chat_template_path` if it is a template, which TRL distinguishes from a tokenizer by its suffix."""
        path = Path(self.args.chat_template_path or "")
        return path if path.suffix in (".jinja", ".j2") and path.is_file() else None

    def ended_with(self, cue: str | Sequence[str]) -> tuple[Dataset, CueTokens]:
        """The rows with a cue, or one of several, behind each document, tokenized and cut by `append_cue`.

        Returns:
            The dataset, and the cue's number of tokens, or the token ids of each of several.

        Raises:
            ValueError: the training set is no `datasets.Dataset`, a setting for texts or chats would have no effect, or
                `append_cue` refuses the rows.
        """
        args = self.args
        if not isinstance(self.dataset, Dataset):
            raise ValueError(f"cue needs a datasets.Dataset as train_dataset, got {type(self.dataset).__name__}.")
        # rows are token IDs behind the cue, for which TRL ignores settings of texts and chats
        if self.formatting_func is not None:
            raise ValueError(
                "cue does not work with formatting_func, as documents are tokenized before it is called: give "
                "train_dataset.map(lambda row: {'text': formatting_func(row)}, remove_columns=train_dataset"
                ".column_names)."
            )
        if args.assistant_only_loss:
            raise ValueError(
                "cue does not work with assistant_only_loss, as chats are token IDs before TRL looks for replies: "
                "leave it out, and give prompt and completion, or input_ids and assistant_masks."
            )
        chats = (
            len(self.dataset) > 0
            and "input_ids" not in self.dataset.column_names
            and is_conversational(self.dataset[0])  # TRL looks at the first row, too
        )
        if chats and args.chat_template_path is not None and self._template_file is None:
            raise ValueError(
                "cue needs a chat_template_path that is a template file, .jinja or .j2, as chats are tokenized before "
                f"TRL loads another tokenizer, got {args.chat_template_path!r}."
            )
        assert args.max_length is not None  # the configuration refuses a cue without one
        return append_cue(
            self.dataset,
            self.tokenizer,
            cue=cue,
            max_length=args.max_length,
            seed=args.seed if args.view_seed is None else args.view_seed,
            text_field=args.dataset_text_field,
        )


def prepare_text(
    model: str | nn.Module, args: "RopeSFTConfig", dataset: Any, processing_class: Any, formatting_func: Any = None
) -> tuple["RopeSFTConfig", Any]:
    """A trainer's `args` and training set as its view prepares them; the given ones stay unchanged."""
    options = args.view_options
    prepared, dataset = find_view(args.view).prepare_text(
        dict(options), TrainingText(model, args, dataset, processing_class, formatting_func)
    )
    if prepared != options:
        args = copy.copy(args)
        args.view_args = prepared
    return args, dataset
