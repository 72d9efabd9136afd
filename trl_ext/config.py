"""What `RopeSFTTrainer` adds to TRL's configuration."""

import json
import math
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from transformers import TrainingArguments
from trl import SFTConfig

from rope_patch.methods import find_view, resolve_rescaling, resolve_view
from rope_patch.rescalings import RESCALINGS, Rescaling
from rope_patch.views import View
from rope_patch.views.base import TRUE_POSITIONS, as_recipe

from .data.cues import require_cue, views_with_cues
from .objectives import OBJECTIVES, ObjectiveOptions, objective_of

LONG_DOCUMENTS: dict[str, Any] = {"max_length": None, "long_documents": "split"}
"""Defaults of recipes and `extend` that differ from TRL's, which drop the ends of long documents."""

_CHOICES = {
    "long_documents": ("truncate", "split", "full-rows"),
    "trainable": ("all", "qkv"),
    "long_rows": ("auto", "on", "off"),
}
_PART_OF_LOSS = re.compile(r"(.*_)?(ce|kl)|(eval_)?(.*_)?(relation|hidden)/\w+")
"""Metrics of evaluations that are parts of a loss, of named sets too."""


def _helped(name: str) -> str:
    """An objective in the help of `--objective`: without its clause if it is of a package that is not imported yet."""
    return f"{name!r} {OBJECTIVES[name].help}" if name in [*OBJECTIVES] else repr(name)


@dataclass
class RopeSFTConfig(SFTConfig):
    """Configuration of [`RopeSFTTrainer`]: everything of [`~trl.SFTConfig`], and what follows.

    Fields of TRL have TRL's defaults, so that the same arguments give the same rows: documents are truncated to
    `max_length`, 1024 tokens. Before training a log line says what is left out of a dataset, and how to keep it.
    Recipes have `max_length=None` and `long_documents="split"` where they do not say otherwise.

    > Parameters that control the data

    Args:
        long_documents: "truncate" keeps the first `max_length` tokens of every document, or what `packing_strategy`
            says, as TRL does. "split" cuts a text longer than `max_length` into rows that together hold all of it, each
            of which begins with the tokens that the tokenizer puts before a text; documents without a token to predict
            are left out. Prompts and completions, messages and documents with masked labels stay whole and are
            truncated, but with `packing` all are cut, and packed by `packing_strategy`; "wrapped" cuts by itself.
            "full-rows" cuts each text into rows of exactly `max_length` tokens and leaves out its last, shorter one, as
            LinearARD does: the tokenizer's special tokens stand in front of each row and behind the last.

    > Parameters that control the window

    Args:
        rescale: rescaling to apply to the model before training, by name, on top of the one that an adapter was trained
            with if `load_adapter` has loaded it; None leaves its frequencies.
        rescale_args: its options, e.g. `{"factor": 4.0}`.

    > Parameters that control the objective

    Args:
        objective: "clm" is the next-token loss on the sampled view; "self-distill" that under true positions plus the
            KL of the sampled view's predictions to those (RPSD); "relation-distill" makes the rescaled model's
            relations those of the model as it was pretrained (LinearARD); "hidden-distill" its hidden states (LongReD);
            "native-distill" its predictions, under the sampled view, with a next-token loss beside.
        objective_args: its options, e.g. `{"kl_weight": 0.5}`; `rope-patch methods NAME` explains those of each.
        view: view to sample in every training forward, by name; "standard" changes nothing.
        view_args: its options, e.g. `{"skip": {"law": "uniform", "high": 32768}}`.
        view_seed: seed of the view's draws; None takes `seed`.
        trainable: without adapters, "all" trains every weight, "qkv" the projections to queries, keys and values only.
        shifted_attention: LongLoRA: in training each head attends within groups of this share of `max_length` tokens,
            half of the heads with shifted borders (`rope_patch.shifted_attention`); the paper takes 0.25. None: full
            attention, as evaluation and everything afterwards has.
        cue: what `append_cue` puts behind each document of the training set for view "endprompt", whose `cue_tokens` it
            then sets; of a list, one behind each document; None, if documents end with a cue already.
        teacher_offload: whether what a teacher needs waits on the CPU: its tensors and, without adapters, its weights.

    > Parameters that control memory

    Args:
        long_rows: "on" trains rows as long as memory allows, with the same gradients: feed-forward layers and norms run
            on some tokens at a time, checkpoints of layers wait on the host, attention makes no mask of n x n, and
            states of the optimizer can be moved to the host where they do not fit. "auto" switches that on where a step
            would not fit the device by an estimate, which is logged, and leaves out masks of 16384 x 16384 and more in
            any case, but of compiled models. "off" does none of it. "on" needs `gradient_checkpointing`.
    """

    _OWN_DICT_FIELDS: ClassVar = ["rescale_args", "objective_args", "view_args"]
    _VALID_DICT_FIELDS = [*SFTConfig._VALID_DICT_FIELDS, *_OWN_DICT_FIELDS]

    long_documents: Literal["truncate", "split", "full-rows"] = field(
        default="truncate",
        metadata={
            "help": "Documents longer than max_length: 'truncate' drops the tokens beyond it, as TRL does, 'split' "
            "cuts texts, and with packing all documents, into rows that are all read, 'full-rows' cuts texts into rows "
            "of max_length tokens each, without the shorter rests."
        },
    )
    rescale: str | None = field(
        default=None,
        metadata={"help": f"Rescaling of the RoPE frequencies: {', '.join(RESCALINGS.names())}."},
    )
    rescale_args: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Options of the rescaling as a JSON object, e.g. '{\"factor\": 4.0}'."}
    )
    objective: str = field(
        default="clm",
        metadata={"help": f"Loss: {'; '.join(map(_helped, OBJECTIVES.names()))}."},
    )
    objective_args: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Options of the objective as a JSON object, e.g. '{\"kl_weight\": 0.5}'."}
    )
    view: str = field(
        default=TRUE_POSITIONS,
        metadata={
            "help": "View of the RoPE indices, drawn anew in each training forward; "
            f"{TRUE_POSITIONS!r} changes nothing."
        },
    )
    view_args: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": 'Options of the view as a JSON object, e.g. {"skip": {"law": "uniform", "high": 32768}}.'},
    )
    view_seed: int | None = field(default=None, metadata={"help": "Seed of the view's draws. None: the same as seed."})
    trainable: Literal["all", "qkv"] = field(
        default="all", metadata={"help": "Weights to train without adapters: all, or those of q, k and v projections."}
    )
    shifted_attention: float | None = field(
        default=None,
        metadata={
            "help": "Share of max_length within which heads attend in training (LongLoRA: 0.25). None: all of it."
        },
    )
    cue: None | str | list[str] = field(
        default=None,
        metadata={
            "help": f"Cue behind each document for {views_with_cues()}: 'sentence', 'word', 'end-of-turn', a text, or, "
            "in a recipe, a list of which each document gets one."
        },
    )
    teacher_offload: bool = field(
        default=False, metadata={"help": "Keep what the teacher needs on the CPU while it is not in use."}
    )
    long_rows: Literal["auto", "on", "off"] = field(
        default="auto",
        metadata={
            "help": "Rows as long as memory allows, by tiles of tokens and by checkpoints on the host: 'on', 'off', or "
            "'auto', where a step would not fit otherwise. Gradients are the same."
        },
    )

    def __post_init__(self) -> None:
        for name in self._OWN_DICT_FIELDS:  # before Transformers parses them, whose error names no field
            value = options = getattr(self, name)
            if isinstance(value, str):
                try:
                    options = json.loads(value)
                except json.JSONDecodeError:
                    options = value  # no mapping, refused below
                # Transformers parses strings that begin with "{"
                setattr(self, name, value.strip())
            if value is not None and not isinstance(options, dict):
                raise ValueError(f"{name} must be a dict, or a JSON object such as '{{\"name\": 4.0}}', got {value!r}.")
        says_which_is_better = self.greater_is_better is not None
        super().__post_init__()
        if not says_which_is_better and _PART_OF_LOSS.fullmatch(self.metric_for_best_model or ""):
            self.greater_is_better = False  # which Transformers sets for names that end in "loss" alone
        self.view_args = as_recipe(self.view_args)  # which reports and records can write
        # a wrong name or option stops here, before a model is loaded
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                allowed = f"{', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}"
                raise ValueError(f"{name} must be {allowed}, got {getattr(self, name)!r}.")
        if self.max_steps == 0:
            raise ValueError(
                "max_steps must be at least 1, or below 0 to train for num_train_epochs, got 0: Transformers trains no "
                "step then, and the result would be the original model."
            )
        if self.make_rescaling() is None and self.rescale_args:
            raise ValueError(f"rescale_args needs rescale, the name of the rescaling; got {self.rescale_args}.")
        if self.view == TRUE_POSITIONS and self.view_args:
            raise ValueError(f"view_args needs view, the name of the view; got {self.view_args}.")
        self._check_data()
        self._check_view()
        self._check_loss()

    @classmethod
    def of(cls, args: TrainingArguments) -> "RopeSFTConfig":
        """`args` as this class: itself if it is one, else a new one with its fields, as SFTTrainer converts.

        Raises:
            TypeError: no training arguments, or of a class with fields of its own, which would be lost.
        """
        if isinstance(args, cls):
            return args
        if not isinstance(args, TrainingArguments):
            raise TypeError(
                "args must be a RopeSFTConfig, an SFTConfig or plain TrainingArguments, got "
                f"{args if isinstance(args, type) else type(args).__name__}."
            )
        values = {option.name: getattr(args, option.name) for option in fields(args) if option.init}
        lost = sorted(set(values) - {option.name for option in fields(cls)})
        if lost:
            raise TypeError(
                f"args is of class {type(args).__name__}, whose fields {', '.join(lost)} RopeSFTConfig lacks: derive "
                "the class from RopeSFTConfig."
            )
        return cls(**values)

    def _check_data(self) -> None:
        if self.packing and self.max_length is None:
            raise ValueError("packing=True needs rows of one length, got max_length=None: set it, in tokens.")
        if self.long_documents == "full-rows" and (self.max_length is None or self.packing):
            raise ValueError(
                "long_documents='full-rows' makes rows of max_length tokens each: set max_length, and leave packing "
                f"out; got max_length={self.max_length}, packing={self.packing}."
            )
        if self.max_length is not None and not (isinstance(self.max_length, int) and self.max_length > 1):
            raise ValueError(f"max_length must be an integer of at least 2 tokens, or None, got {self.max_length!r}.")
        template = Path(self.chat_template_path or "")
        if template.suffix in (".jinja", ".j2") and not template.is_file():  # TRL looks for a tokenizer of that name
            raise ValueError(
                "chat_template_path must be a file with a template, or a folder or hub id of a tokenizer that has one, "
                f"got {self.chat_template_path}, and there is no such file."
            )

    def _check_view(self) -> None:
        if self.cue is not None:
            for text in self.cue if isinstance(self.cue, list) and self.cue else [self.cue]:
                require_cue(text)
            if self.long_documents != "split":
                raise ValueError(
                    f"cue goes with long_documents='split', got {self.long_documents!r}: a text is cut into pieces "
                    "that all end with the cue. Set long_documents='split'."
                )
            option, options = find_view(self.view).cue_option, self.view_options
            if option is None or option in options or self.max_length is None:  # in `options`: the user gave cue_tokens
                raise ValueError(
                    f"cue goes with {views_with_cues()}, whose {option or 'option'} it sets, and with a max_length; "
                    f"got cue={self.cue!r}, view={self.view!r}, view_args={options}, max_length={self.max_length}."
                )
        view = self.make_view()
        view.check_run(self)
        if view.cuts is not None and (self.packing or self.padding_free):
            raise ValueError(
                f"view {view.name!r} with {view.cuts} cuts one document a row: switch packing and padding_free off, or "
                f"leave out {view.cuts}; got packing={self.packing}, padding_free={self.padding_free}."
            )

    @property
    def n_gpu(self) -> int:
        """GPUs of this process, one at most: for more Trainer takes `nn.DataParallel`, whose copies have no patch."""
        return min(super().n_gpu, 1)

    @property
    def view_options(self) -> dict[str, Any]:
        """`view_args`, {} for None."""
        return dict(self.view_args or {})  # type: ignore[arg-type]  # a dict once __post_init__ has parsed it

    def make_rescaling(self) -> Rescaling | None:
        """The rescaling of `rescale` and `rescale_args`, None without one.

        Raises:
            ValueError: an unknown rescaling or option, one that is missing, or a value out of its range.
        """
        return None if self.rescale is None else resolve_rescaling(self.rescale, dict(self.rescale_args or {}))  # type: ignore[arg-type]

    def make_view(self) -> View:
        """The view of `view` and `view_args`; options that it takes from texts are stand-ins until those are known.

        Raises:
            ValueError: an unknown view or option, one that is missing, or a value out of its range.
        """
        kind = find_view(self.view)
        stand_ins = dict(kind.from_text)
        if self.cue is not None and kind.cue_option is not None:
            stand_ins[kind.cue_option] = 1  # tokens of a cue, until a tokenizer has counted them
        return resolve_view(self.view, {**stand_ins, **self.view_options})

    def _check_loss(self) -> None:
        options, share = self.objective_options, self.shifted_attention
        for name in ("neftune_noise_alpha", "label_smoothing_factor"):
            if getattr(self, name) and not options.is_trl_loss:
                raise ValueError(
                    f"{name} goes with TRL's own loss, objective='clm' without objective_args, got {name}="
                    f"{getattr(self, name)}, objective={self.objective!r}, objective_args={self.objective_args}. Leave "
                    "it out."
                )
        if self.loss_type == "dft" and not options.takes_dft:
            raise ValueError(
                "loss_type='dft' weighs the tokens of a next-token loss, and that of objective "
                f"{self.objective!r} is none, or a part that it does not weigh: leave it out."
            )
        if share is not None:
            if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
                raise ValueError(f"shifted_attention must be a share in (0, 1), or None, got {share!r}.")
            if self.max_length is None or share * self.max_length < 2:
                raise ValueError(
                    f"shifted_attention needs a max_length of which {share} is 2 tokens or more, got {self.max_length}."
                )
            if options.compares_forwards:
                raise ValueError(
                    "shifted_attention is for next-token training: other objectives and LongCE compare forwards that "
                    f"would all attend so; got objective={self.objective!r}, objective_args={self.objective_args}."
                )
        reentrant = self.checkpointing_options.get("use_reentrant")
        if self.long_rows == "on" and (not self.gradient_checkpointing or reentrant):
            raise ValueError(
                "long_rows='on' needs checkpointing that is not reentrant, got gradient_checkpointing="
                f"{self.gradient_checkpointing} and use_reentrant={reentrant}: set "
                "gradient_checkpointing=True and gradient_checkpointing_kwargs={'use_reentrant': False}."
            )

    @property
    def checkpointing_options(self) -> dict[str, Any]:
        """`gradient_checkpointing_kwargs`: Transformers reads a new name where it has one, and TRL sets the old one."""
        options: Any = getattr(self, "activation_checkpointing_kwargs", self.gradient_checkpointing_kwargs)
        return options or {}

    @property
    def objective_options(self) -> ObjectiveOptions:
        """What the objective reads of this configuration, checked."""
        return objective_of(self).options_class.of(self)

    @property
    def has_own_loss(self) -> bool:
        """Whether another loss than TRL's is minimised."""
        return not self.objective_options.is_trl_loss

    @property
    def needs_rope(self) -> bool:
        """Whether training needs a model with RoPE that can be patched; otherwise it is TRL's alone."""
        return (
            self.rescale is not None
            or self.view != TRUE_POSITIONS
            or self.has_own_loss
            or self.shifted_attention is not None
            or self.trainable != "all"
            or self.long_rows == "on"
        )

    @property
    def shifted_group(self) -> int | None:
        """Tokens of a group of `shifted_attention`, None without."""
        if self.shifted_attention is None or self.max_length is None:
            return None
        return math.ceil(self.shifted_attention * self.max_length)
