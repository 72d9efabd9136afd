"""What a model is, as far as an extension asks, without its weights."""

import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from rope_patch import describe
from rope_patch.attention.windowed import BLOCK
from rope_patch.checkpoints import load_checkpoint
from rope_patch.hub_revision import require_revision
from rope_patch.own_code import load_pretrained
from rope_patch.rotary import find_decoder
from rope_patch.special_tokens import SpecialTokens

from ..checkpoint import require_folder_or_id, require_tokenizer
from ..model_files import commit_of

_HEAD_NORMS = ("q_norm", "k_norm", "query_norm", "key_norm", "q_layernorm", "k_layernorm")
_QKV = ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "Wqkv")


@dataclass(frozen=True)
class ModelFacts:
    """A model by its config and its tokenizer.

    Args:
        name: hub id or folder.
        config: of the causal LM.
        tokenizer: of the model.
        window: positions that it was pretrained on.
        dtype: of its checkpoint.
        revision: branch, tag or commit of a model on the hub; None is "main".
        commit: that the revision was when the run was begun, from which all is loaded: a branch may move on. None of a
            folder, or where the cache does not tell.
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
        """Read config and tokenizer; no weights.

        Args:
            name: hub id or folder.
            revision: of a model on the hub; None is "main".
            commit: that a run was begun with which goes on; None is what the revision is now.

        Raises:
            ValueError: no such model or revision, a revision of a folder, a model without RoPE, window or tokenizer,
                with code of its own, an adapter, or a model that is rescaled already.
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
                f"{_said(name, revision)} is no folder with a checkpoint, and from the hub: {reason}"
            ) from error
        text = config.get_text_config(decoder=True)
        window = getattr(text, "max_position_embeddings", None)
        if window is None:
            raise ValueError(
                f"the config of {name} names no window (max_position_embeddings), so where it ends is not known."
            )
        dtype = getattr(text, "dtype", None) or getattr(config, "dtype", None) or torch.float32
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        return cls(name, config, tokenizer, window, dtype, revision, commit)

    @property
    def said(self) -> str:
        """Name and revision, in words."""
        moves = self.revision is not None and self.commit not in (None, self.revision)
        return _said(self.name, self.revision) + (f", commit {self.commit}" if moves else "")

    @property
    def base_revision(self) -> str | None:
        """What a card and adapters name: the commit, which the export loads once more; None of a folder."""
        return self.commit or self.revision

    def load(self, dtype: torch.dtype) -> Any:
        """The model with its weights, on the CPU.

        Raises:
            ValueError: weights are missing, of another shape, or damaged.
        """
        return load_checkpoint(self.name, dtype=dtype, revision=self.base_revision)

    def twin(self) -> PreTrainedModel:
        """The model without weights: tensors on the device "meta", RoPE and all modules as they are."""
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(copy.deepcopy(self.config))

    @cached_property
    def description(self) -> Any:
        """What `rope_patch.describe` says of it."""
        return describe(self._twin)

    @cached_property
    def missing(self) -> dict[str, str]:
        """What its family cannot do -> why."""
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
        return tuple(sorted({name for name, _ in _attention_linears(find_decoder(self._twin))}))

    @cached_property
    def _twin(self) -> PreTrainedModel:
        return self.twin()

    def lines(self) -> list[str]:
        """What there is to know, in words."""
        begin = self.tokenizer.convert_ids_to_tokens(list(self.begin))
        sliding = self.description.local_layers
        return [
            f"{self.description.model}, {self.size.parameters:,} parameters, checkpoint in {str(self.dtype)[6:]}.",
            f"Its window is {self.window:,} positions: it was trained on texts of at most so many tokens.",
            "It has a chat template, so it is asked and taught in chats too."
            if self.is_chat
            else "It has no chat template, so it is a base model, asked and taught in running text.",
            f"Its tokenizer begins every text with {' '.join(begin)}."
            if begin
            else "Its tokenizer puts nothing before a text.",
            *(
                [f"Its layers of type {', '.join(sliding)} look back a short way only and keep their positions."]
                if sliding
                else []
            ),
        ]


@dataclass(frozen=True)
class ModelSize:
    """Numbers that memory and time follow from.

    Args:
        parameters: all, tied ones once.
        in_layers: of the decoder's layers.
        qkv: of the projections to queries, keys and values.
        lora_per_rank: values that a rank of adapters on the attention projections adds.
        n_layers: layers.
        n_full: layers that attend to a whole text.
        sliding_window: tokens that the other layers attend to; 0 where there are none.
        hidden: features of a token.
        norms: norms of these features in a layer.
        normed: features of queries and keys together that have norms of their own, 0 in most families.
        intermediate: features within an MLP.
        queries: features of all query heads together.
        keys: features of all key heads together.
        vocabulary: entries of the output head.
    """

    parameters: int
    in_layers: int
    qkv: int
    lora_per_rank: int
    n_layers: int
    n_full: int
    sliding_window: int
    hidden: int
    norms: int
    normed: int
    intermediate: int
    queries: int
    keys: int
    vocabulary: int

    @property
    def block(self) -> int:
        """Queries that look through a window at once where no mask of n x n is made, see `rope_patch.attention`."""
        return max(self.sliding_window, BLOCK)

    @property
    def keys_in_block(self) -> float:
        """Keys that a block of queries meets, as multiples of these."""
        return 1 + self.sliding_window / self.block

    @classmethod
    def of(cls, model: PreTrainedModel) -> "ModelSize":
        """Of a model, with or without weights."""
        decoder = find_decoder(model)
        config: Any = decoder.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        n_full = sum(kind != "sliding_attention" for kind in types)
        ends_of: Any = model
        embedding, head = ends_of.get_input_embeddings().weight, ends_of.get_output_embeddings().weight
        tied = head is embedding or bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))
        ends = embedding.numel() + (0 if tied else head.numel())
        linears = list(_attention_linears(decoder))
        in_layers = sum(p.numel() for p in decoder.parameters()) - embedding.numel()
        queries = config.num_attention_heads * head_dim
        keys = (getattr(config, "num_key_value_heads", None) or config.num_attention_heads) * head_dim
        norms = _norms(decoder)
        of_hidden = sum(size == config.hidden_size for name, size in norms if name not in _HEAD_NORMS)
        has_head_norms = any(name in _HEAD_NORMS for name, _ in norms)
        return cls(
            parameters=in_layers + ends,
            in_layers=in_layers,
            qkv=sum(sum(p.numel() for p in linear.parameters()) for name, linear in linears if name in _QKV),
            lora_per_rank=sum(linear.in_features + linear.out_features for _, linear in linears),
            n_layers=config.num_hidden_layers,
            n_full=n_full,
            sliding_window=(getattr(config, "sliding_window", None) or 0) if n_full < len(types) else 0,
            hidden=config.hidden_size,
            norms=of_hidden // config.num_hidden_layers,  # the last one stands behind the layers
            normed=queries + keys if has_head_norms else 0,
            intermediate=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            queries=queries,
            keys=keys,
            vocabulary=head.shape[0],
        )


def _said(name: str, revision: str | None) -> str:
    return name if revision is None else f"{name} at revision {revision}"


def _attention_linears(decoder: nn.Module) -> list[tuple[str, Any]]:
    """(name within its layer's attention, module) of every linear module of attention."""
    return [
        (name, module)
        for parent in decoder.modules()
        if getattr(parent, "layer_idx", None) is not None and "Attention" in type(parent).__name__
        for name, module in parent.named_children()
        if isinstance(module, nn.Linear)
    ]


def _norms(decoder: nn.Module) -> list[tuple[str, int]]:
    """(name within its layer, features) of every norm with a weight."""
    return [
        (name.rpartition(".")[2], weight.numel())
        for name, module in decoder.named_modules()
        if isinstance(weight := getattr(module, "weight", None), torch.Tensor) and weight.dim() == 1
    ]
