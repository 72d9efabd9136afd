"""A model of the command line: a checkpoint or an adapter, with or without a RoPE scaling."""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..runs.checkpoint import base_of_adapter, require_checkpoint, require_tokenizer

NATIVE = "native"
"""In place of a RoPE scaling: that of the checkpoint, for an adapter without a record of its training."""
_FORM = "[LABEL=]PATH[@METHOD:OPTION=VALUE,...]"


@dataclass(frozen=True)
class ModelSpec:
    """One model of the command line.

    Args:
        label: its name in figures and tables.
        path: hub id or folder of a checkpoint, or folder of an adapter.
        method: RoPE scaling to apply after loading, on top of the one that an adapter was trained with; NATIVE for an
            adapter that was trained with the RoPE of its checkpoint and does not record it; or None.
        options: of the RoPE scaling.
        model_revision: branch, tag or commit of `path` on the hub; None is "main".
        argument: name of the argument, for messages.
    """

    label: str
    path: str
    method: str | None
    options: dict[str, Any]
    model_revision: str | None = None
    argument: str = "--model"

    def of_revision(self, revision: str | None) -> "ModelSpec":
        """The same model at a revision on the hub, None for "main".

        Raises:
            ValueError: `path` is a folder, or the revision is empty.
        """
        from rope_patch.base.hub_revision import require_revision

        require_revision(revision, self.path, "--model-revision")
        return replace(self, model_revision=revision)

    @classmethod
    def parse(cls, text: str) -> "ModelSpec":
        """Read [LABEL=]PATH[@METHOD:OPTION=VALUE,...], e.g. `yarn=my-model@yarn:factor=4`.

        A folder whose name has `=` in it needs no label.

        Raises:
            ValueError: another form, or an unknown method or option.
        """
        from rope_patch.methods import resolve_rescaling

        named, at, rescaled = text.partition("@")
        label, equals, path = named.partition("=")
        if not equals or Path(named).is_dir():
            # of `.` the folder's own name, of a link the link's; Path("") would be the current folder
            label, path = Path(os.path.abspath(named)).name if named else "", named
        method, _, rest = rescaled.partition(":")
        options: dict[str, Any] = {}
        for item in filter(None, rest.split(",")):
            key, equals, value = item.partition("=")
            if not equals:
                raise ValueError(f"a model is named as {_FORM}, got {text!r}, where {item!r} has no value.")
            try:
                options[key] = json.loads(value)
            except json.JSONDecodeError:
                options[key] = value  # a text needs no quotation marks
        if not label or not path or (at and not method):
            raise ValueError(f"a model is named as {_FORM}, got {text!r}.")
        if method and method != NATIVE:  # a mistake in it ends here, before a model is loaded
            resolve_rescaling(method, options)
        return cls(label, path, method or None, options)

    @property
    def checkpoint(self) -> str:
        """`path`, or the base model of the adapter that is there."""
        return base_of_adapter(self.path) or self.path

    @property
    def is_adapter(self) -> bool:
        """Whether `path` holds an adapter."""
        return self.checkpoint != self.path

    @property
    def revision(self) -> str:
        """Of `checkpoint` on the hub: the base model may have changed there since the adapter was trained."""
        from rope_patch.export.sources import revision_of_base

        return revision_of_base(Path(self.path)) if self.is_adapter else self.model_revision or "main"

    @property
    def is_checkpoint(self) -> bool:
        """Whether `path` is the whole model: no adapter, and no RoPE scaling after loading."""
        return not self.is_adapter and self.method is None

    @property
    def for_others(self) -> str:
        """What another program loads: `path`, or the folder of a revision in the cache."""
        if self.model_revision is None:
            return self.path
        from transformers.utils import cached_file

        return str(Path(str(cached_file(self.path, "config.json", revision=self.model_revision))).parent)

    def config(self) -> Any:
        """The config of the checkpoint's language model; ValueError if there is no such checkpoint."""
        return self._whole_config().get_text_config(decoder=True)

    def _whole_config(self) -> Any:
        argument = f"{self.argument} {self.path}" if self.is_adapter else self.argument
        return require_checkpoint(self.checkpoint, argument, self.revision)

    def twin(self) -> Any:
        """The checkpoint's model without weights: tensors on the device "meta"."""
        import torch
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(self._whole_config())

    def trained_window(self) -> int | None:
        """Positions that the checkpoint was pretrained on; None if its config names none."""
        from rope_patch.rescalings.in_place import pretrained_window

        config = self.config()
        declared = getattr(config, "max_position_embeddings", None)
        return pretrained_window(getattr(config, "rope_parameters", None) or {}, declared)

    def check(self) -> None:
        """Raise what its files show, before another model of the command line is measured.

        Raises:
            ValueError: there is no such model, or the RoPE of an adapter is not known.
            ImportError: an adapter needs PEFT, which is not installed.
        """
        from rope_patch.adapters.sidecar import SIDECAR_NAME

        self.config()
        if self.method == NATIVE and (Path(self.path) / SIDECAR_NAME).is_file():
            raise ValueError(
                f"{self.argument} {self.path}@{NATIVE}: {SIDECAR_NAME} in it records the RoPE that the adapter was "
                f"trained with. Leave @{NATIVE} out."
            )
        if self.is_adapter:
            try:
                import peft  # noqa: F401
            except ImportError as error:
                raise ImportError(
                    f"{self.argument} {self.path} is an adapter: pip install 'rope-patch[peft]'."
                ) from error
            self._require_known_rope()

    def _require_known_rope(self) -> None:
        from rope_patch.adapters.sidecar import SIDECAR_NAME

        if self.method is None and not (Path(self.path) / SIDECAR_NAME).is_file():
            raise ValueError(
                f"the adapter in {self.path} was saved without {SIDECAR_NAME}, so the RoPE that it was trained with is "
                f"not known. Name it: {self.path}@{NATIVE}, or e.g. {self.path}@yarn:factor=4."
            )

    def load(self, device: str, dtype: Any) -> Any:
        """The model, in eval mode; an adapter comes with the RoPE that it was trained with.

        Raises:
            ValueError: that RoPE is not known, or weights are missing or damaged.
        """
        from rope_patch import patch_model
        from rope_patch.checkpoints.checked_loading import load_checkpoint, with_adapter

        if self.is_adapter:
            self._require_known_rope()
        model: Any = load_checkpoint(self.checkpoint, dtype=dtype, revision=self.revision)
        model = model.to(device)
        if self.is_adapter:
            model = with_adapter(model, self.path)
        if self.method not in (None, NATIVE):
            patch_model(model, self.method, **self.options)
        return model.eval()

    @property
    def tokenizer_source(self) -> tuple[str, str]:
        """Name and revision of its tokenizer: `path` or, for an adapter without one, its base model."""
        # training saves the tokenizer beside an adapter, which may have tokens of its own
        own = (Path(self.path) / "tokenizer_config.json").is_file()
        return (self.path, "main") if own else (self.checkpoint, self.revision)

    def load_tokenizer(self) -> Any:
        """The tokenizer of `tokenizer_source`; ValueError if there is none."""
        from transformers import AutoTokenizer

        from rope_patch.base.remote_code import load_pretrained

        source, revision = self.tokenizer_source
        require_tokenizer(source, self.argument)
        return load_pretrained(AutoTokenizer, source, self.argument, revision=revision)
