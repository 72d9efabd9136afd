"""What `RopeSFTTrainer` adds to TRL's configuration."""

from dataclasses import dataclass, field
from typing import Any, Literal

from trl import SFTConfig

from rope_patch.methods import resolve_rescaling, resolve_view


@dataclass
class RopeSFTConfig(SFTConfig):
    """Configuration of [`RopeSFTTrainer`]: everything of [`~trl.SFTConfig`], and what follows.

    `max_length` is None here, so that nothing is truncated: TRL's own default of 1024 tokens would cut every long text.

    > Parameters that control the window

    Args:
        rescale: rescaling to apply to the model before training, by name; None leaves its frequencies.
        rescale_args: its options, e.g. `{"factor": 4.0}`.

    > Parameters that control the objective

    Args:
        objective: "clm" is the next-token loss on the sampled view.
        view: view to sample in every training forward, by name; "standard" changes nothing.
        view_args: its options, e.g. `{"max_skip": 32768}`.
        view_seed: seed of the view's draws; None takes `seed`.
    """

    _VALID_DICT_FIELDS = [*SFTConfig._VALID_DICT_FIELDS, "rescale_args", "view_args"]

    max_length: int | None = field(
        default=None,
        metadata={"help": "Maximum tokens in a row; longer ones are truncated or, when packing, split. None: any."},
    )
    rescale: str | None = field(
        default=None,
        metadata={"help": "Rescaling of the RoPE frequencies: pi, ntk, dynamic-ntk, abf, yarn, longrope, llama3."},
    )
    rescale_args: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Options of the rescaling as a JSON object, e.g. '{\"factor\": 4.0}'."}
    )
    objective: Literal["clm"] = field(
        default="clm", metadata={"help": "Loss: 'clm' is next-token cross-entropy on the sampled view."}
    )
    view: str = field(
        default="standard",
        metadata={"help": "View of the RoPE indices, drawn anew in each training forward; 'standard' changes nothing."},
    )
    view_args: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Options of the view as a JSON object, e.g. '{\"max_skip\": 32768}'."}
    )
    view_seed: int | None = field(default=None, metadata={"help": "Seed of the view's draws. None: the same as seed."})

    def __post_init__(self) -> None:
        super().__post_init__()
        # a wrong name or option stops here, before a model is loaded
        if self.rescale is not None:
            resolve_rescaling(self.rescale, self._options("rescale_args"))
        elif self.rescale_args:
            raise ValueError(f"rescale_args needs rescale, the name of the rescaling; got {self.rescale_args}.")
        resolve_view(self.view, self._options("view_args"))
        if self.objective != "clm":
            raise ValueError(f"objective must be 'clm', got {self.objective!r}.")

    def _options(self, name: str) -> dict[str, Any]:
        options = getattr(self, name)
        if options is not None and not isinstance(options, dict):
            raise ValueError(f"{name} must be a JSON object such as '{{\"factor\": 4.0}}', got {options!r}.")
        return options or {}
