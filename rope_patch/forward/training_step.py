"""Which optimizer step a training forward belongs to, as the trainer or the optimizer around it tells."""

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

_OPTIMIZER = -1  # driver of a clock that goes by an optimizer; callbacks count from 0
# clock -> the decoder whose optimizer it goes by
_FOLLOWING: "weakref.WeakKeyDictionary[DrawClock, weakref.ref[nn.Module]]" = weakref.WeakKeyDictionary()
# steps that an optimizer has taken, since this process or, if its state keeps count, since its training began
_STEPS: "weakref.WeakKeyDictionary[Optimizer, int]" = weakref.WeakKeyDictionary()


def learn_step(
    state: RopeState, decoder: nn.Module, patch: Callable[..., Any], *, training: bool, draws: bool, has_ids: bool
) -> None:
    """Before a forward, set the clock of the model's view to the optimizer step, unless somebody else sets it.

    Args:
        state: of the decoder.
        decoder: of the model.
        patch: `patch_model`.
        training: whether the forward belongs to training.
        draws: whether it draws, as all of training do but those of `generate`.
        has_ids: whether the forward has token ids, by which a document is known.

    Raises:
        ValueError: the trainer or one of its arguments would let views draw apart, a `ref_model` has other
            frequencies, or several ranks would draw alike.
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
    """Let the clock of a view go by the optimizer of a loop, unless somebody else sets it."""
    clock = source.clock
    if clock.driver not in (None, _OPTIMIZER) and running_trainer("train") is None:
        clock.release()  # the run of its trainer broke off
    if clock.is_set:
        return
    # a curriculum needs the number of steps too, which no optimizer tells
    known = has_ids and not source.view.follows_progress and _follow_optimizer(clock, decoder)
    if not known and _ranks() > 1:
        raise ValueError(
            f"all {_ranks()} ranks would draw alike from {source.view!r}: no optimizer over the model's "
            "parameters was found whose steps could be counted. Call "
            "rope_patch.patch.view_source(model).clock.set_step(step) before each step."
        )


def _follow_optimizer(clock: DrawClock, decoder: nn.Module) -> bool:
    """Let a clock go by the steps of the optimizer over the parameters of `decoder`; whether there is one.

    Torch keeps no list of optimizers, so all objects are looked through, once. After resuming, the state of an
    optimizer such as Adam says how many steps it has taken.
    """
    if clock in _FOLLOWING:
        return False
    _FOLLOWING[clock] = weakref.ref(decoder)
    _count_steps()
    # accelerate's wrapper is an optimizer too, without hooks of its own
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
    """Steps by the state of an optimizer, 0 if it keeps no count."""
    # of all parameters, as one that got no gradient, such as an expert's, has fewer
    counts = (state["step"] for state in (*optimizer.state.values(), *optimizer.param_groups) if "step" in state)
    return max(map(int, counts), default=0)


@cache
def _count_steps() -> None:
    """Have each step of an optimizer move the clocks that go by it."""
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _set_clocks(optimizer, _STEPS[optimizer] + 1 if optimizer in _STEPS else max(_saved_steps(optimizer), 1))


def _after_load(optimizer: Optimizer) -> None:
    steps = _saved_steps(optimizer)
    if steps:
        _set_clocks(optimizer, steps)


def _set_clocks(optimizer: Optimizer, steps: int) -> None:
    """Let the clocks that go by an optimizer, or will, stand at its step."""
    if optimizer not in _STEPS:
        optimizer.register_load_state_dict_post_hook(_after_load)
    _STEPS[optimizer] = steps
    for clock, reference in list(_FOLLOWING.items()):
        decoder = reference()
        # where each parameter has an optimizer, the first of them has moved it on
        behind = clock.driver == _OPTIMIZER and int(clock.step) != steps
        # a clock that nobody sets is that of a loop whose optimizer came after its first forward
        if (behind or not clock.is_set) and decoder is not None and _holds(optimizer, decoder):
            clock.set_step(steps, driver=_OPTIMIZER)


def _ranks() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
