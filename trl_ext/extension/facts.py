"""The facts of a model that an extension needs, without its weights."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from rope_patch import describe, patch_model
from rope_patch.base.hub_revision import require_revision
from rope_patch.base.remote_code import load_pretrained
from rope_patch.checkpoints.checked_loading import load_checkpoint
from rope_patch.layout.special_tokens import SpecialTokens
from rope_patch.rope.rotary import find_decoder

from ..memory.size import ModelSize, attention_linears
from ..runs.checkpoint import require_folder_or_id, require_tokenizer
from ..runs.model_files import commit_of


@dataclass(frozen=True)
class ModelFacts:
    """A model's config, tokenizer and sizes.

    Args:
        name: hub id or folder.
        config: of the causal LM.
        tokenizer: of the model.
        window: positions that it was pretrained on.
        dtype: of its checkpoint.
        revision: branch, tag or commit of a model on the hub; None is "main".
        commit: of the revision when the run began, from which everything is loaded: a branch may move. None for a
            folder, or if the cache does not tell.
    """

    name: str
    config: Any
    tokenizer: Any
    window: int
    dtype: torch.dtype
    revision: str | None = None
    commit: str | None = None

    @classmethod
    def of(cls, name: str, revision: str | None = None, commit: str | None = None) -> "ModelFacts":
        """Read config and tokenizer, no weights; a resumed run gives the `commit` with which it began.

        Raises:
            ValueError: no such model or revision, a revision of a folder, a model without RoPE, context window or
                tokenizer, with Python code of its own, an adapter, or a model with a RoPE scaling.
        """
        require_revision(revision, name, "--model-revision")
        if (Path(name) / "adapter_config.json").is_file():
            raise ValueError(f"{name} is an adapter: merge it first, with rope-patch export {name} --output FOLDER.")
        require_folder_or_id(name, "MODEL")
        try:
            config = load_pretrained(AutoConfig, name, "MODEL", revision=commit or revision or "main")
            commit = commit or commit_of(name, revision)
            require_tokenizer(name, "MODEL")
            tokenizer = load_pretrained(AutoTokenizer, name, "MODEL", revision=commit or revision or "main")
        except OSError as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"{_full_name(name, revision)} is no folder with a checkpoint, and from the hub: {reason}"
            ) from error
        text = config.get_text_config(decoder=True)
        window = getattr(text, "max_position_embeddings", None)
        if window is None:
            raise ValueError(
                f"the config of {name} has no max_position_embeddings, so its context window is not known."
            )
        dtype = getattr(text, "dtype", None) or getattr(config, "dtype", None) or torch.float32
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype  # a nested config may have its name
        return cls(name, config, tokenizer, window, dtype, revision, commit)

    @property
    def full_name(self) -> str:
        """Name, revision and commit."""
        moves = self.revision is not None and self.commit not in (None, self.revision)  # a branch or a tag
        return _full_name(self.name, self.revision) + (f", commit {self.commit}" if moves else "")

    @property
    def base_revision(self) -> str | None:
        """The commit for model cards, adapters and the export; None for a folder."""
        return self.commit or self.revision

    def load(self, dtype: torch.dtype, rescaling: Mapping[str, Any] | None = None) -> Any:
        """The model with its weights, on the CPU, rescaled by {"rescale", "rescale_args"}."""
        model = load_checkpoint(self.name, dtype=dtype, revision=self.base_revision)
        return model if rescaling is None else patch_model(model, rescaling["rescale"], **rescaling["rescale_args"])

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone, for another process: what is worked out from them has modules without weights."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def twin(self) -> PreTrainedModel:
        """The model without weights: tensors on the device "meta", RoPE and all modules as they are."""
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(copy.deepcopy(self.config))

    @cached_property
    def description(self) -> Any:
        """The description by `rope_patch.describe`."""
        return describe(self._twin)

    @cached_property
    def missing(self) -> dict[str, str]:
        """Capability that its family lacks -> why."""
        return self.description.missing_capabilities

    @property
    def is_chat(self) -> bool:
        """Whether its tokenizer has a chat template."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    @cached_property
    def begin(self) -> tuple[int, ...]:
        """Token ids that its tokenizer puts before a text."""
        return SpecialTokens.of(self.tokenizer).begin

    @cached_property
    def size(self) -> "ModelSize":
        """Its numbers of weights and features."""
        return ModelSize.of(self._twin)

    @cached_property
    def attention_projections(self) -> tuple[str, ...]:
        """Names of the linear modules within attention, which adapters go on."""
        return tuple(sorted({name for name, _ in attention_linears(find_decoder(self._twin))}))

    @cached_property
    def _twin(self) -> PreTrainedModel:
        return self.twin()

    def lines(self) -> list[str]:
        """Sentences about the model, for the plan."""
        begin = self.tokenizer.convert_ids_to_tokens(list(self.begin))
        sliding = self.description.local_layers
        return [
            f"{self.description.model}, {self.size.parameters:,} parameters, checkpoint in {str(self.dtype)[6:]}.",
            f"Its context window is {self.window:,} positions.",
            "It has a chat template, so training and questions use chats too."
            if self.is_chat
            else "It has no chat template, so training and questions use running text.",
            *([f"Its tokenizer begins every text with {' '.join(begin)}."] if begin else []),
            *([f"Layers of type {', '.join(sliding)} attend to near tokens and keep their RoPE."] if sliding else []),
        ]


def _full_name(name: str, revision: str | None) -> str:
    return name if revision is None else f"{name} at revision {revision}"
