"""Which optimizer step a training forward belongs to, learnt from the trainer or the optimizer around it."""

import gc
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from .draw_clock import DrawClock
from .sources import ViewSource
from .state import RopeState
from .trainers import give_rope_to_reference, running_trainer

_OPTIMIZER = -1  # driver of a clock that follows an optimizer; callbacks are numbered from 0
# clock -> the decoder whose optimizer it follows
_FOLLOWING: "weakref.WeakKeyDictionary[DrawClock, weakref.ref[nn.Module]]" = weakref.WeakKeyDictionary()
# steps that an optimizer has taken, since this process or, if its state keeps count, since its training began
_STEPS: "weakref.WeakKeyDictionary[Optimizer, int]" = weakref.WeakKeyDictionary()


def learn_step(
    state: RopeState, decoder: nn.Module, patch: Callable[..., Any], *, training: bool, draws: bool, has_ids: bool
) -> None:
    """Before a forward, set the clock of the model's view to the optimizer step, unless the user's code sets it.

    Args:
        state: of the decoder.
        decoder: of the model.
        patch: `patch_model`.
        training: whether the forward belongs to training.
        draws: whether the view is sampled in it: in all forwards of training except those of `generate`.
        has_ids: whether the forward has token ids, which draws are keyed by.

    Raises:
        ValueError: under this trainer or one of its arguments, forwards that need the same draw would get different
            ones; a `ref_model` has other frequencies; or all ranks would get the same draws.
    """
    if state.leader is not None:
        return
    trainer = running_trainer("training_step", "prediction_step")
    source = state.source if training and state.source is not None and state.source.view.perturbs else None
    if trainer is None:
        if draws and source is not None:
            _go_by_optimizer(source, decoder, has_ids)
        return
    if getattr(trainer, "sets_clock", False):  # RopeSFTTrainer
        return
    give_rope_to_reference(trainer, decoder, state, patch)
    if source is not None:
        from .view_callback import join  # which imports Trainer's callbacks

        join(trainer, decoder, state, patch)


def _go_by_optimizer(source: ViewSource, decoder: nn.Module, has_ids: bool) -> None:
    """Let the clock of a view follow the optimizer of a training loop, unless the user's code sets it."""
    clock = source.clock
    if clock.driver not in (None, _OPTIMIZER) and running_trainer("train") is None:
        clock.release()  # its trainer was interrupted
    if clock.is_set:
        return
    # a curriculum also needs the number of steps, which an optimizer does not know
    known = has_ids and not source.view.follows_progress and _follow_optimizer(clock, decoder)
    if not known and _ranks() > 1:
        raise ValueError(
            f"all {_ranks()} ranks would draw alike from {source.view!r}: no optimizer over the model's "
            "parameters was found whose steps could be counted. Call "
            "rope_patch.patch.view_source(model).clock.set_step(step) before each step."
        )


def _follow_optimizer(clock: DrawClock, decoder: nn.Module) -> bool:
    """Let a clock follow the optimizer that steps the parameters of `decoder`; returns whether there is one.

    Torch keeps no list of optimizers, so this looks through all objects, once. After resuming, the state of an
    optimizer such as Adam tells how many steps it has taken.
    """
    if clock in _FOLLOWING:
        return False
    _FOLLOWING[clock] = weakref.ref(decoder)
    _count_steps()
    # accelerate's wrapper is an Optimizer too, but has no hooks
    optimizers = [o for o in gc.get_objects() if issubclass(type(o), Optimizer)]
    real = [o for o in optimizers if "_optimizer_step_post_hooks" in vars(o) and _holds(o, decoder)]
    steps = {o: _saved_steps(o) or _STEPS.get(o, 0) for o in real}
    for optimizer in sorted(steps, key=steps.__getitem__):
        _set_clocks(optimizer, steps[optimizer])
    return bool(steps)


def _holds(optimizer: Optimizer, decoder: nn.Module) -> bool:
    """Whether an optimizer steps a parameter of `decoder`."""
    parameters = set(map(id, decoder.parameters()))
    return any(id(p) in parameters for group in optimizer.param_groups for p in group["params"])


def _saved_steps(optimizer: Optimizer) -> int:
    """Steps in the state of an optimizer, 0 if it keeps no count."""
    # the maximum, because a parameter without gradients, such as an unused expert's, has fewer
    counts = (state["step"] for state in (*optimizer.state.values(), *optimizer.param_groups) if "step" in state)
    return max(map(int, counts), default=0)


@cache
def _count_steps() -> None:
    """Move clocks at each step of the optimizer that they follow."""
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _set_clocks(optimizer, _STEPS[optimizer] + 1 if optimizer in _STEPS else max(_saved_steps(optimizer), 1))


def _after_load(optimizer: Optimizer) -> None:
    steps = _saved_steps(optimizer)
    if steps:
        _set_clocks(optimizer, steps)


def _set_clocks(optimizer: Optimizer, steps: int) -> None:
    """Set the clocks that follow an optimizer to its step, and let free clocks of its model follow it."""
    if optimizer not in _STEPS:
        optimizer.register_load_state_dict_post_hook(_after_load)
    _STEPS[optimizer] = steps
    for clock, reference in list(_FOLLOWING.items()):
        decoder = reference()
        # with one optimizer per parameter, the first one that steps has moved the clock already
        behind = clock.driver == _OPTIMIZER and int(clock.step) != steps
        # a clock that nobody sets belongs to a loop that made its optimizer after the first forward
        if (behind or not clock.is_set) and decoder is not None and _holds(optimizer, decoder):
            clock.set_step(steps, driver=_OPTIMIZER)


def _ranks() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
