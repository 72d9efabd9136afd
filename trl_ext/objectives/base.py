"""The interface of objectives: options, loss, and the registry."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, get_args, get_type_hints

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from rope_patch.base.registry import Registry, from_options, require_known
from rope_patch.forward.draw_clock import DrawClock
from rope_patch.layout.labelled import real_tokens
from rope_patch.layout.shards import SequenceShard
from rope_patch.losses import CopiedTeacher, SharedTeacher, view_states
from rope_patch.losses.forward_loss import ForwardLoss, call_with
from rope_patch.losses.teacher import adapter_layers
from rope_patch.rope.rotary import find_causal_lm
from rope_patch.views import View

from .step_means import Part

if TYPE_CHECKING:
    from ..config import RopeSFTConfig

logger = logging.get_logger(__name__)

OBJECTIVES = Registry("objective")


@dataclass(frozen=True)
class ActivationFactors:
    """How much of a batch's activations lives at a time, as multiples of next-token training on the same tokens.

    Args:
        graphs: of what checkpointed layers keep.
        at_once: of the tokens that go through a layer at a time.
        states: tensors [tokens, hidden] while the loss is formed, such as those that are compared.
        beside: such tensors that stay while layers run.
        kept: bytes of a token that all layers together keep beside their inputs where they are checkpointed.
    """

    graphs: float = 1.0
    at_once: float = 1.0
    states: float = 2.0
    beside: float = 0.0
    kept: int = 0


@dataclass(frozen=True, kw_only=True)
class ObjectiveOptions:
    """Options of an objective: a field for each one in `objective_args`, which the docstring explains under `Args`.

    Options that belong together are one field, a dataclass, which a recipe gives as a mapping.
    """

    takes_dft: ClassVar[bool] = False
    """Whether its next-token loss can be that of TRL's `loss_type="dft"`."""

    @classmethod
    def of(cls, args: "RopeSFTConfig") -> Self:
        """Read and check `args.objective_args`.

        Raises:
            ValueError: an option is unknown, missing, out of its range, or does not go with the rest of the config.
        """
        options = _from_mapping(cls, f"objective_args of {args.objective!r}", args.objective_args or {})  # type: ignore[arg-type]  # a dict once parsed
        options.check_run(args)
        return options

    def check_run(self, args: "RopeSFTConfig") -> None:
        """Raise ValueError if the options do not go with the rest of the config."""

    @property
    def needs_teacher(self) -> bool:
        """Whether the pretrained model teaches."""
        return False

    def cited(self) -> tuple[str, ...]:
        """BibTeX of the papers behind these options, for the model card."""
        return ()

    @property
    def is_trl_loss(self) -> bool:
        """Whether the loss is TRL's own, with all of its options."""
        return False

    @property
    def compares_forwards(self) -> bool:
        """Whether the loss compares forwards of a step, so that dropout or other noise would count as a difference."""
        return True

    @property
    def counts_every_token(self) -> bool:
        """Whether tokens without a label, and the last token of a document, count too."""
        return True

    @property
    def reads_short_contexts(self) -> bool:
        """Whether a step also reads short windows of tokens, as many as the rank's own documents have."""
        return False

    def activation_factors(self, config: Any, moved: float = 1.0, *, shared: bool = False) -> ActivationFactors:
        """The most activations that live at a time, for estimates of memory.

        Args:
            config: of the decoder.
            moved: the largest share of a row whose positions a draw of the view changes.
            shared: whether ranks share each row.
        """
        return ActivationFactors()

    def record(self) -> dict[str, Any]:
        """The options for the record of a run, without those that change no number."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


class Objective:
    """A loss of the model, registered in `OBJECTIVES` under its name. A subclass defines `help` and `loss`.

    Forwards of training run under the sampled view, those of evaluation at true positions.

    Args:
        model: patched, with its adapters, before anything wraps it.
        args: of the trainer.
        accelerator: of the trainer.
        teacher: the pretrained model, if it exists already.
        options: None takes those of `args`.
    """

    name: ClassVar[str]
    help: ClassVar[str]
    """One clause for the help of `--objective`."""
    synonyms: ClassVar[tuple[str, ...]] = ()
    """Other names of the method, for errors."""
    options_class: ClassVar[type[ObjectiveOptions]] = ObjectiveOptions
    takes_view_controls: ClassVar[bool] = False
    """Whether views that change nothing on purpose, as a control, are allowed."""

    shares_sequences: ClassVar[bool] = False
    """Whether several ranks may share a sequence: `read`, `counts` and the divisors of `loss` are then those of whole
    rows, and sums of a loss those of the tokens, or heads, of `shard`."""
    _forward_options: ClassVar[Mapping[str, Any]] = {}
    """Arguments of the model's forward."""

    options: Any

    def __init__(
        self,
        model: nn.Module,
        args: "RopeSFTConfig",
        accelerator: Accelerator,
        teacher: SharedTeacher | CopiedTeacher | None = None,
        options: ObjectiveOptions | None = None,
    ) -> None:
        self.args, self.accelerator, self.teacher = args, accelerator, teacher
        self.options = self.options_class.of(args) if options is None else options
        self.forward_loss: Any = self._make_loss(model)  # last, as it reads the others

    @classmethod
    def build(cls, model: nn.Module, args: "RopeSFTConfig", accelerator: Accelerator) -> "Objective":
        """Make the objective of `args`, or the two that alternate."""
        return cls(model, args, accelerator)

    @property
    def draws(self) -> bool:
        """Whether forwards of the step draw the view."""
        return True

    @property
    def causal_lm(self) -> PreTrainedModel:
        """The model without wrappers. `rope_patch.losses.head_kl` compares states by its head, as the family does."""
        causal_lm: PreTrainedModel = self.forward_loss.causal_lm
        return causal_lm

    @property
    def shard(self) -> SequenceShard | None:
        """The tokens of whole rows that the current forward has, where several ranks share a sequence."""
        state = self.forward_loss.state
        return None if state is None else state.shard

    def check_length(self, length: int) -> None:
        """Raise, or warn, if documents of `length` tokens are more than the objective can compare."""

    def check_documents(self, lengths: torch.Tensor) -> None:
        """Raise, or warn, if training documents of these lengths, int64 [documents], add nothing to the loss."""

    def check_evaluation(self, length: int, view: View) -> None:
        """Raise if evaluations cannot read documents of `length` tokens; `view` is the one that trains."""
        self.forward_loss.check_length(length)

    def begin(self, step: int | None, first_document: int = 0) -> None:
        """Called before the batches of an optimizer step are read, and with None before one of an evaluation.

        Args:
            step: the first one is 0.
            first_document: ordinal of the batch's first document within the evaluation.
        """

    def active(self) -> AbstractContextManager[None]:
        """Open around forward and backward of a step."""
        return self.forward_loss.active()

    def read(self, batch: dict[str, Any]) -> Any:
        """Read what `counts` and `loss` need of a batch: by default a mask of real tokens, bool [batch, n]."""
        return real_tokens(batch["input_ids"], batch.get("attention_mask"))

    def counts(self, read: Any) -> dict[str, int]:
        """Count what a batch's sums are divided by; counts are added up over an optimizer step."""
        return {"tokens": int(read.sum())}

    def loss(
        self, model: nn.Module, inputs: dict[str, Any], read: Any, counts: dict[str, int], batch_counts: dict[str, int]
    ) -> tuple[torch.Tensor, dict[str, Part]]:
        """Run the model, most simply by `states`, and compute the loss of a batch.

        Args:
            model: the one under training, wrapped as the trainer has it.
            inputs: of the batch.
            read: of the batch.
            counts: of the optimizer step that the batch belongs to.
            batch_counts: of the batch alone.

        Returns:
            The loss, and its parts before weighting, each as its sum over the batch's tokens, documents or rows and
            the number of those. The loss of a step is made of the means over all its batches.
        """
        request = self._request(inputs, read, counts)
        tie = self._call(model, inputs, request)  # 0; it ties every weight to the loss, see `call_with`
        loss, parts = self._combine(request, counts, batch_counts)
        return loss + tie, parts

    def states(
        self, model: nn.Module, inputs: dict[str, Any], *views: str | View | Mapping[str, Any] | None
    ) -> list[torch.Tensor]:
        """Last hidden states of the batch under several views, [batch, n, hidden] each, with gradient.

        Args:
            model: of `loss`.
            inputs: of `loss`.
            *views: as in `view_states`, drawn for this optimizer step; None is the view of the run, which moves nothing
                in an evaluation.
        """
        source = None if self.forward_loss.state is None else self.forward_loss.state.source
        clock = DrawClock(0) if source is None else source.clock
        step, progress = int(clock.step), float(clock.progress)
        return view_states(model, inputs, *views, step=step, seed=clock.seed, progress=progress)

    def evaluation_loss(self, means: dict[str, float]) -> float | None:
        """The loss of an evaluation, made of the means of its parts; None for Trainer's mean over batches.

        Args:
            means: by name, without parts that have a count of 0.
        """
        return None

    def _call(self, model: nn.Module, inputs: dict[str, Any], request: Any) -> torch.Tensor:
        return call_with(model, inputs, request, **self._forward_options)

    def _warn_beyond_window(self, length: int) -> None:
        state = self.forward_loss.state
        window = None if state is None else state.native.max_position_embeddings
        if window is not None and length > window:
            logger.warning(
                f"the teacher is the pretrained model, and documents have up to {length} tokens, beyond its window of "
                f"{window}, where its predictions are bad. Lower max_length."
            )

    def _native(self, model: nn.Module) -> SharedTeacher | CopiedTeacher:
        """The pretrained model: the same weights without adapters if there are any, else a copy."""
        if self.teacher is None:
            # a `PeftModel` around the model, or adapters without it, as `model.add_adapter` puts them in
            has_adapters = find_causal_lm(model) is not model or adapter_layers(model)
            self.teacher = (
                SharedTeacher(model) if has_adapters else CopiedTeacher(model, offload=self.args.teacher_offload)
            )
        return self.teacher

    def _make_loss(self, model: nn.Module) -> ForwardLoss:
        """Make what computes the loss in a forward that gets a request, if `loss` is not overridden."""
        return ForwardLoss(model)

    def _request(self, inputs: dict[str, Any], read: Any, counts: dict[str, int]) -> Any:
        # requests hold whole rows, even where this rank runs a part of each
        batch = inputs if self.shard is None else self.shard.batch
        return self.forward_loss.request(batch["input_ids"], batch.get("attention_mask"), batch.get("position_ids"))

    def _combine(
        self, request: Any, counts: dict[str, int], batch_counts: dict[str, int]
    ) -> tuple[torch.Tensor, dict[str, Part]]:
        """The loss and its parts, from what the forward has left on the request."""
        raise NotImplementedError


def objective_of(args: "RopeSFTConfig") -> type[Objective]:
    """The class of the objective that `args` names."""
    require_known("objective", OBJECTIVES, args.objective)  # OBJECTIVES[...] would raise a bare TypeError for a list
    kind: type[Objective] = OBJECTIVES[args.objective]
    return kind


T = TypeVar("T")


def option_classes(cls: type) -> dict[str, type]:
    """The fields of a dataclass that hold a dataclass, or None, and their classes."""
    hints = get_type_hints(cls)
    return {
        f.name: kind
        for f in fields(cls)
        for kind in (hints[f.name], *get_args(hints[f.name]))  # of `X | None`, X and NoneType
        if isinstance(kind, type) and is_dataclass(kind)
    }


def _from_mapping(cls: type[T], owner: str, options: Mapping[str, Any]) -> T:
    """Make the dataclass `cls` from `options`, and dataclasses of mappings in them; errors name `owner`."""
    made = dict(options)
    for name, kind in option_classes(cls).items():
        if isinstance(made.get(name), Mapping):  # from a recipe or a flag; code may give the dataclass itself
            made[name] = _from_mapping(kind, f"{name} in {owner}", made[name])
        elif made.get(name) is not None and not isinstance(made[name], kind):
            raise ValueError(f"{name} in {owner} must be a mapping of options, or None, got {made[name]!r}.")
    try:
        return from_options(cls, owner, made)
    except ValueError as error:
        # errors about names of options, and those of mappings inside, say already whose they are
        raise error if owner in str(error) else ValueError(f"{owner}: {error}") from error
