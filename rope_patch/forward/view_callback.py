"""The callback that sets the clock of a view in Transformers' Trainer and TRL's, and checks of these trainers."""

import itertools
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import TrainerCallback

from ..layout.document_lengths import longest_document
from ..rope.rotary import find_decoder
from ..views import View
from .draw_clock import progress_at
from .sources import ViewSource
from .state import Leader, RopeState, state_of
from .trainers import reference_of

_NUMBERS = itertools.count()  # of callbacks, the drivers of clocks

# supported trainers of TRL and LLaMA-Factory -> whether a batch is chosen rows followed by rejected rows
_PAIRS = {
    "SFTTrainer": False,
    "DPOTrainer": True,
    "RewardTrainer": True,
    "KTOTrainer": False,
    "GRPOTrainer": False,
    "RLOOTrainer": False,
    "CPOTrainer": True,
    "ORPOTrainer": True,
    "GKDTrainer": False,
    "PairwiseTrainer": True,
}
_SAMPLE_REPLIES = ("GRPOTrainer", "RLOOTrainer")

Patch = Callable[..., Any]  # `patch_model`, passed as an argument because its module imports this one


class RopeViewCallback(TrainerCallback):
    """Tells the view of a model the optimizer step of its trainer, and for curricula how far training is.

    A patched model adds it to its trainer in the first training forward; `callbacks=[RopeViewCallback()]` does so
    explicitly. Draws are keyed by the tokens of a document: policy and reference model get the same draw for it, ranks
    get different ones because they read different documents, and neither accumulation nor resuming changes a draw. In
    preference pairs, the chosen row decides for both. A `ref_model` gets the rescaling and the view of the model. When
    training ends, the view stays on and its clock is released.

    Raises:
        ValueError: when training begins, the model has no view; in the first forward, `ref_model` has other RoPE
            frequencies, or under this trainer forwards that need the same draw would get different ones.
    """

    def __init__(self) -> None:
        self.number = next(_NUMBERS)
        self.trainer: Any = None  # set in the first forward
        self.pairs = False

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if view_of(model) is None and self.trainer is None:
            raise ValueError(
                "the model of this trainer has no view: call patch_model(model, view) first, or leave RopeViewCallback "
                "out, which a rescaling alone does not need."
            )
        self.trainer = None  # its arguments may have changed since the last run

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.set_clock(view_of(model), state)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        source = view_of(model)
        if source is not None:
            source.clock.release()

    def set_clock(self, source: ViewSource | None, state: Any) -> None:
        """Let a view draw for the optimizer step in a trainer's `state`."""
        if source is not None:
            progress = progress_at(state.global_step, state.max_steps)
            source.clock.set_step(state.global_step, progress, pairs=self.pairs, driver=self.number)


def view_of(model: nn.Module) -> ViewSource | None:
    """The view that `patch_model` put on a model, if any."""
    state = state_of(find_decoder(model))
    return None if state is None else state.source


def join(trainer: Any, decoder: nn.Module, state: RopeState, patch: Patch) -> None:
    """Let the view of a model draw for the step of the trainer that is running a training forward.

    Args:
        trainer: it gets the callback if it has none.
        decoder: of the model.
        state: of the decoder.
        patch: `patch_model`.
    """
    source = state.source
    assert source is not None
    callbacks = trainer.callback_handler.callbacks
    callback = next((c for c in callbacks if isinstance(c, RopeViewCallback)), None)
    if callback is None:
        callback = RopeViewCallback()
        trainer.add_callback(callback)
    if callback.trainer is not trainer or source.clock.driver != callback.number:
        callback.pairs = _require_supported(trainer, source.view)
        _share_view(trainer, decoder, state, patch)
        source.checked_length = _checked_length(trainer, source.view)
        callback.trainer = trainer
        callback.set_clock(source, trainer.state)
    elif int(source.clock.step) != trainer.state.global_step:  # a second model, which the callback does not get
        callback.set_clock(source, trainer.state)


def _checked_length(trainer: Any, view: View) -> int:
    """Tokens of the longest training document if the view accepts it; 0 leaves the check to each forward."""
    longest = longest_document(trainer.train_dataset)
    if longest is None:
        return 0
    limit = getattr(trainer.args, "max_length", None)  # TRL's collators truncate to it
    longest = longest if limit is None else min(longest, limit)
    try:
        view.check_length(longest)
    except ValueError:  # the user's collator may make shorter documents, so each forward checks
        return 0
    return longest


def _require_supported(trainer: Any, view: View) -> bool:
    """Raise ValueError if forwards that need the same draw could get different ones; returns whether rows are pairs."""
    classes = type(trainer).__mro__
    name = type(trainer).__name__
    known = next(
        (c.__name__ for c in classes if c.__module__.startswith(("trl.", "llamafactory.")) and c.__name__ in _PAIRS),
        None,
    )
    trl_class = next((c.__name__ for c in classes if c.__module__.startswith("trl.")), None)
    if trl_class not in (None, "_BaseTrainer", *_PAIRS):
        raise ValueError(
            f"views under {name} are not supported: it is not known which of its forwards need the same draw. Use "
            f"transformers.Trainer, {', '.join(_PAIRS)} or RopeSFTTrainer, or patch only a rescaling."
        )
    args = trainer.args
    parallelism: Any = getattr(trainer.accelerator, "parallelism_config", None)
    for kind in ("cp", "sp"):
        if getattr(parallelism, f"{kind}_size", 1) > 1:
            raise ValueError(
                f"a view draws for whole documents, and {kind}_size > 1 gives each rank a part of one: set it to 1."
            )
    if getattr(args, "precompute_ref_log_probs", False):
        raise ValueError(
            "precompute_ref_log_probs=True computes the reference's log-probabilities before training, at other "
            "positions than the view will draw: set it to False."
        )
    if known in _SAMPLE_REPLIES:
        _require_one_draw_a_reply(name, args, view)
    return known is not None and _PAIRS[known]


def _require_one_draw_a_reply(name: str, args: Any, view: View) -> None:
    """Raise unless policy, old policy and reference read each reply in one optimizer step, with the same draw."""
    if args.use_vllm:
        raise ValueError(
            f"views under {name} with use_vllm=True are not supported: vLLM's log-probabilities are those of "
            "true positions, and the correction for the difference would undo the view. Set use_vllm=False, or patch "
            "only a rescaling."
        )
    per_generation = args.steps_per_generation * args.num_iterations
    if args.gradient_accumulation_steps % per_generation:
        raise ValueError(
            f"with a view, {name} must use its replies in the optimizer step that samples them, as draws depend on the "
            "step: gradient_accumulation_steps must be a multiple of steps_per_generation * num_iterations, got "
            f"{args.gradient_accumulation_steps} and {args.steps_per_generation} * {args.num_iterations}."
        )
    if view.draws_by_forward:
        raise ValueError(
            f"{view!r} draws once a micro-batch, and {name} shuffles replies between forwards that need the same draw: "
            "choose granularity 'step' or 'sample'."
        )


def _share_view(trainer: Any, decoder: nn.Module, state: RopeState, patch: Patch) -> None:
    """Give a `ref_model` the view of the model and its clock, for the forwards of training."""
    reference = reference_of(trainer)
    if reference is None or reference is decoder:
        return
    assert state.source is not None
    before = state_of(reference)
    former = before.source if before is not None and before.leader is None else None
    if former is not None and former.view != state.source.view:
        raise ValueError(
            f"ref_model has view {former.view!r} and model has {state.source.view!r}: do not patch ref_model with a "
            "view, it gets that of the model."
        )
    patch(reference, state.source.view)
    shared = state_of(reference)
    assert shared is not None
    shared.source, shared.when, shared.leader = state.source, state.when, Leader(decoder)
