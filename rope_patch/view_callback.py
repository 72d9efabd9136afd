"""The callback with which Transformers' Trainer and TRL's trainers draw views, and what it refuses."""

import itertools
from typing import Any

from torch import nn
from transformers import TrainerCallback

from .document_lengths import longest_document
from .draw_clock import progress_at
from .patch import patch_model
from .rotary import find_decoder
from .sources import ViewSource
from .state import Leader, state_of
from .trainers import CLOCK_ATTRIBUTE, reference_of, require_same_rope_as_reference
from .views import View

_NUMBERS = itertools.count()

# how TRL's trainers batch: whether rows are the chosen ones and then the rejected ones
_PAIRS = {
    "SFTTrainer": False,
    "DPOTrainer": True,
    "RewardTrainer": True,
    "KTOTrainer": False,
    "GRPOTrainer": False,
    "RLOOTrainer": False,
}
_SAMPLE_REPLIES = ("GRPOTrainer", "RLOOTrainer")


class RopeViewCallback(TrainerCallback):
    """Lets a trainer that is not ours draw views per (seed, optimizer step, document).

    `trainer.add_callback(RopeViewCallback(trainer))` after `patch_model(model, view)` and before `trainer.train()`. It
    tells the view's clock the optimizer step and, for curricula, the progress of training. A document is known by its
    tokens: policy and reference model draw alike for it, ranks draw apart because they read other documents, and
    neither accumulation nor resuming changes a draw. Of preference pairs both rows draw by the chosen one.

    A `ref_model` gets the view too, in forwards of training. When training ends, the view stays on and its clock is
    released.

    Args:
        trainer: a `transformers.Trainer`, or TRL's SFTTrainer, DPOTrainer, KTOTrainer, RewardTrainer, GRPOTrainer or
            RLOOTrainer, or a subclass of your own.

    Raises:
        ValueError: the trainer's model has no view, its `ref_model` other RoPE frequencies, or the trainer or one of
            its arguments would let views draw apart.
    """

    def __init__(self, trainer: Any) -> None:
        decoder = find_decoder(trainer.model)
        self._decoder = decoder
        self._pairs = _require_supported(trainer, _view_of(trainer, decoder).view)
        require_same_rope_as_reference(trainer, decoder)
        self._trainer = trainer
        self._number = next(_NUMBERS)
        setattr(trainer, CLOCK_ATTRIBUTE, self._number)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        source = _view_of(self._trainer, self._decoder)
        _require_supported(self._trainer, source.view)
        require_same_rope_as_reference(self._trainer, self._decoder)
        _share_view(self._trainer, self._decoder)
        source.checked_length = _checked_length(self._trainer, source.view)
        self.on_step_begin(args, state, control)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        progress = progress_at(state.global_step, state.max_steps)
        clock = _view_of(self._trainer, self._decoder).clock
        clock.set_step(state.global_step, progress, pairs=self._pairs, driver=self._number)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        _view_of(self._trainer, self._decoder).clock.release()


def _view_of(trainer: Any, decoder: nn.Module) -> ViewSource:
    state = state_of(decoder)
    if state is None or state.source is None:
        raise ValueError(
            f"the model of this {type(trainer).__name__} has no view that a clock could drive: call patch_model(model, "
            "view) first, or leave RopeViewCallback out; a rescaling alone needs none."
        )
    return state.source


def _checked_length(trainer: Any, view: View) -> int:
    """Tokens of a training document that the view takes; 0 if none is known, and each forward has to hold one."""
    longest = longest_document(trainer.train_dataset)
    if longest is None:
        return 0
    limit = getattr(trainer.args, "max_length", None)  # to which TRL's collators truncate
    longest = longest if limit is None else min(longest, limit)
    try:
        view.check_length(longest)
    except ValueError:  # of a forward then, which may have shorter documents from a collator of the user's
        return 0
    return longest


def _require_supported(trainer: Any, view: View) -> bool:
    """Raise ValueError for what would let views draw apart; whether rows come in pairs."""
    classes = type(trainer).__mro__
    name = type(trainer).__name__
    if any(c.__name__ == "RopeSFTTrainer" for c in classes):
        raise ValueError("RopeSFTTrainer sets the clock of its view itself: leave RopeViewCallback out.")
    known = next(
        (c.__name__ for c in classes if c.__module__.startswith("trl.") and c.__name__ != "_BaseTrainer"), None
    )
    if known is not None and known not in _PAIRS:
        raise ValueError(
            f"views under {name} are not supported: which of its forwards have to draw alike is not known. Known are "
            f"transformers.Trainer and TRL's {', '.join(_PAIRS)}. Use one of them or RopeSFTTrainer, or patch only a "
            "rescaling."
        )
    args = trainer.args
    parallelism: Any = getattr(trainer.accelerator, "parallelism_config", None)
    for kind in ("cp", "sp"):
        if getattr(parallelism, f"{kind}_size", 1) > 1:
            raise ValueError(f"a view draws for whole documents, and {kind}_size > 1 gives each rank a part of them.")
    if getattr(args, "precompute_ref_log_probs", False) and view.perturbs:
        raise ValueError(
            "precompute_ref_log_probs=True reads the reference's log-probabilities before training, under other "
            "positions than the view will draw: set it to False."
        )
    if known in _SAMPLE_REPLIES and view.perturbs:
        _require_one_draw_a_reply(name, args, view)
    return known is not None and _PAIRS[known]


def _require_one_draw_a_reply(name: str, args: Any, view: View) -> None:
    """Raise unless policy, old policy and reference read each reply within one optimizer step, and alone."""
    if args.use_vllm:
        raise ValueError(
            f"views under {name} with use_vllm=True are not supported: its log-probabilities are those of true "
            "positions, and the correction for the difference would undo the view. Set use_vllm=False, or patch only a "
            "rescaling."
        )
    per_generation = args.steps_per_generation * args.num_iterations
    if args.gradient_accumulation_steps % per_generation:
        raise ValueError(
            f"under a view {name} must use up its replies within the optimizer step that samples them, as draws go by "
            "steps: gradient_accumulation_steps must be a multiple of steps_per_generation * num_iterations, got "
            f"{args.gradient_accumulation_steps} and {args.steps_per_generation} * {args.num_iterations}."
        )
    if view.draws_by_forward:
        raise ValueError(
            f"{view!r} draws once a micro-batch, and {name} shuffles replies between the forwards that have to draw "
            "alike: choose granularity 'step' or 'sample'."
        )


def _share_view(trainer: Any, decoder: Any) -> None:
    """Give a `ref_model` the view of the model, with its clock, in the forwards that belong to training."""
    reference = reference_of(trainer)
    model_state = state_of(decoder)
    assert model_state is not None and model_state.source is not None
    if reference is None or not model_state.source.view.perturbs:
        return
    before = state_of(reference)
    if before is not None and before.source is not None and before.source.view != model_state.source.view:
        raise ValueError(
            f"ref_model samples {before.source.view!r} and model {model_state.source.view!r}: leave the view of "
            "ref_model out, RopeViewCallback gives it that of the model."
        )
    patch_model(reference, model_state.source.view)
    state = state_of(reference)
    assert state is not None
    state.source, state.when, state.leader = model_state.source, model_state.when, Leader(decoder)
