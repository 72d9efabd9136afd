"""Losses that are computed while a model's forward runs, inside any wrapper, by hooks of its decoder."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..adapters.watch import adapter_configs
from ..families.attention_calls import AttentionCall, watched_attention
from ..families.capabilities import why_unreachable
from ..forward.state import state_of
from ..layout.shards import SequenceShard
from ..rope.rotary import find_causal_lm, find_decoder

TAPE = "distillation_tape"
"""Name of the keyword argument that carries a `Tape` through a model, down to its attention."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a decoder."""

Steps = Generator[Arguments | None, Any, Any]
"""What runs around one forward of a decoder. Everything before its `yield` runs before the decoder's forward. `yield`
gives the decoder other arguments, or None for its own, and returns its output. The rest runs with that output."""


class Tape:
    """Goes through one forward as a keyword argument, with what a loss needs of the batch; the loss comes back on it.

    A plain object, since wrappers rebuild dictionaries, dataclasses and tensors that they are given.

    Args:
        valid: which tokens are real, bool [batch, n].
        document: of each token, int64 [batch, n], -1 on padding.
    """

    shard: SequenceShard | None = None  # which of these tokens the rank holds; None: all

    def __init__(self, valid: torch.Tensor, document: torch.Tensor) -> None:
        self.valid = valid
        self.document = document
        self.teaching = False  # whether the forward in flight is a teacher's
        self.steps: Steps | None = None  # of the forward in flight
        self.compared = False  # whether the decoder has run with it

    def visit(self, call: AttentionCall) -> torch.Tensor | None:
        """Look at an attention call of the forward that carries this tape; what is returned replaces its output."""
        return None


@dataclass(frozen=True)
class DecoderCall:
    """A call of a decoder whose forward has not begun.

    Args:
        decoder: which is called.
        args: its positional arguments.
        kwargs: its keyword arguments, the tape among them.
    """

    decoder: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def without_tape(self) -> dict[str, Any]:
        """The keyword arguments of another forward over the same tokens, of which no hook is to take notice."""
        return {name: value for name, value in self.kwargs.items() if name != TAPE}

    def run_before(self) -> Any:
        """The output of a forward of its own over the same tokens, before the one that was called for."""
        return self.decoder(*self.args, **self.without_tape)


class ForwardLoss:
    """Inside `active()`, a forward that is given `distillation_tape=TAPE` leaves a loss on it.

    Backward has to run inside the block too. What a loss does around the decoder's forward is its `_steps`.

    Args:
        model: patched or not, bare or wrapped.

    Raises:
        ValueError: its family keeps the tape from its decoder, it learns prompts, or its embeddings are noised
            (NEFTune).
    """

    def __init__(self, model: nn.Module) -> None:
        self.causal_lm: Any = find_causal_lm(model)
        self.decoder: Any = find_decoder(model)
        require(why_unreachable(self.causal_lm, self.decoder))
        _refuse_prompts(model)
        self._refuse_noise()
        # Transformers' attention functions are those of encoders of images too, which may be handed the tape
        self._text_modules = {id(module) for module in self.decoder.modules()}
        self.state = state_of(self.decoder)

    def _refuse_noise(self) -> None:
        alpha = getattr(self.causal_lm.get_input_embeddings(), "neftune_noise_alpha", None)
        if alpha is not None:
            raise ValueError(
                f"the embeddings of this model are noised (NEFTune, neftune_noise_alpha={alpha}), each forward anew, "
                "and what is distilled compares forwards: switch it off, e.g. with transformers' deactivate_neftune."
            )

    def check_length(self, length: int) -> None:
        """Raise ValueError if documents of `length` tokens are more than the loss can read."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """Forwards with a tape give the loss inside the block."""
        self._refuse_noise()  # it may have come since
        handles = [
            # before the hook that draws the view: a teacher's own forward ends with no view in force
            self.decoder.register_forward_pre_hook(self._before_decoder, with_kwargs=True, prepend=True),
            self.decoder.register_forward_hook(self._after_decoder, with_kwargs=True),
            self.causal_lm.register_forward_hook(_require_compared, with_kwargs=True),
        ]
        try:
            with watched_attention(self.causal_lm, self._take_tape), self._watching():
                yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """What else has to be in place while forwards run."""
        yield

    def _take_tape(self, call: AttentionCall) -> torch.Tensor | None:
        tape: Tape | None = call.options.pop(TAPE, None)
        return None if tape is None or id(call.module) not in self._text_modules else tape.visit(call)

    def _before_decoder(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        tape: Tape | None = kwargs.get(TAPE)
        if tape is None or tape.teaching:
            return None
        tape.steps = self._steps(tape, DecoderCall(decoder, args, kwargs))
        return next(tape.steps)

    def _after_decoder(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        tape: Tape | None = kwargs.get(TAPE)
        if tape is None or tape.teaching:
            return
        assert tape.steps is not None
        try:
            tape.steps.send(output)
        except StopIteration:
            tape.steps, tape.compared = None, True
        else:
            raise AssertionError(f"{type(self).__name__}._steps must yield once a forward")

    def _steps(self, tape: Any, call: DecoderCall) -> Steps:
        """Compute the loss around the decoder's forward, onto the tape."""
        raise NotImplementedError


def require(reason: str | None) -> None:
    """Raise the reason why something is not possible, if there is one."""
    if reason is not None:
        raise ValueError(reason)


@contextmanager
def without_gradient(device_type: str) -> Iterator[None]:
    """No gradients, and no cast weights kept by autocast: those would be found without gradient by a later forward."""
    enabled = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type)
    with torch.no_grad(), torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=False):
        yield


def _require_compared(causal_lm: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    tape = kwargs.get(TAPE)
    if isinstance(tape, Tape) and not (tape.compared or tape.teaching):
        raise ValueError(
            f"{type(causal_lm).__name__} does not pass keyword arguments on to its decoder, so nothing can be "
            "distilled in it. Use objective='clm'."
        )


def _refuse_prompts(model: nn.Module) -> None:
    for name, config in adapter_configs(model).items():
        if config.is_prompt_learning:
            raise ValueError(
                f"adapter {name!r} learns prompts ({config.peft_type.value}): its virtual tokens stand before those of "
                "the row, and losses that read states of the decoder would take the one for the other. Use LoRA, or "
                "objective='clm' without objective_args."
            )
