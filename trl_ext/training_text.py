"""The training set as a view wants it, before TRL tokenizes it."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from datasets import Dataset
from torch import nn
from transformers import AutoTokenizer, ProcessorMixin

from rope_patch.methods import find_view

from .cues import CueTokens, append_cue

if TYPE_CHECKING:
    from .config import RopeSFTConfig


@dataclass(frozen=True)
class TrainingText:
    """What `View.prepare_text` is given.

    Args:
        model: of the trainer, or its name.
        args: of the trainer.
        dataset: to train on, as the trainer was given it.
        processing_class: tokenizer or processor that the trainer was given, None if it is to load the model's.
    """

    model: str | nn.Module
    args: "RopeSFTConfig"
    dataset: Any
    processing_class: Any

    @cached_property
    def tokenizer(self) -> Any:
        """The one that the trainer was given, or the model's, loaded here as TRL does later."""
        if self.processing_class is not None:
            processor = isinstance(self.processing_class, ProcessorMixin)
            return self.processing_class.tokenizer if processor else self.processing_class
        if isinstance(self.model, str):
            loading: Any = self.args.model_init_kwargs or {}  # parsed from JSON by now
            name, revision = self.model, loading.get("revision")
        else:
            config: Any = self.model.config
            name, revision = config._name_or_path, None
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=self.args.trust_remote_code)

    def ended_with(self, cue: str | Sequence[str]) -> tuple[Dataset, CueTokens]:
        """The rows with a cue, or one of several, behind each document, tokenized and cut by `append_cue`.

        Returns:
            The dataset, and the cue's number of tokens, or the token ids of each of several.

        Raises:
            ValueError: a training set that is no `datasets.Dataset`, or what `append_cue` refuses.
        """
        args = self.args
        if not isinstance(self.dataset, Dataset):
            raise ValueError(f"cue needs a datasets.Dataset as train_dataset, got {type(self.dataset).__name__}.")
        assert args.max_length is not None  # the configuration refuses a cue without one
        seed = args.seed if args.view_seed is None else args.view_seed
        return append_cue(
            self.dataset,
            self.tokenizer,
            cue=cue,
            max_length=args.max_length,
            seed=seed,
            text_field=args.dataset_text_field,
        )


def prepare_text(
    model: str | nn.Module, args: "RopeSFTConfig", dataset: Any, processing_class: Any
) -> tuple["RopeSFTConfig", Any]:
    """A trainer's `args` and training set as its view prepares them; those given stay as they are."""
    options = args.view_options
    prepared, dataset = find_view(args.view).prepare_text(
        dict(options), TrainingText(model, args, dataset, processing_class)
    )
    if prepared != options:
        args = copy.copy(args)
        args.view_args = prepared
    return args, dataset
