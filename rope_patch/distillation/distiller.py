"""Distillation in one call of a model: the teacher's forward runs before the student's, inside any wrapper."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..adapter_watch import adapter_configs
from ..attention_calls import AttentionCall, watched_attention
from ..documents import locate_documents
from ..limits import why_unreachable
from ..rotary import find_core, find_decoder
from ..state import state_of
from .teacher import CopiedTeacher, SharedTeacher, without_gradient

TAPE = "distillation_tape"
"""Name of the keyword argument that carries a `Tape` through a model, down to its attention."""


class Tape:
    """Goes through one forward as a keyword argument; what is distilled is written on it.

    A plain object, since wrappers rebuild dictionaries and tensors that they are given.

    Args:
        valid: which tokens are real, bool [batch, n].
        document: of each token, int64 [batch, n], -1 on padding.
    """

    def __init__(self, valid: torch.Tensor, document: torch.Tensor) -> None:
        self.valid = valid
        self.document = document
        self.teaching = False  # whether the forward in flight is the teacher's
        self.taught = False
        self.compared = False  # whether the student's decoder has run with it

    def visit(self, call: AttentionCall) -> torch.Tensor | None:
        """Look at an attention call of the forward that carries this tape; what is returned replaces its output."""
        return None


class Distiller:
    """Inside `active()`, a forward that is given `distillation_tape=distiller.tape(...)` distils.

    It first runs the teacher on the same inputs, then the student. Backward has to run inside the block too.

    Args:
        model: the student, patched, bare or wrapped.
        teacher: the same weights with adapters off, or a frozen copy; None where a subclass needs none.

    Raises:
        ValueError: the student's RoPE is the teacher's, its family keeps the tape from its decoder, it learns prompts,
            or its embeddings are noised (NEFTune).
    """

    def __init__(self, model: nn.Module, teacher: SharedTeacher | CopiedTeacher | None = None) -> None:
        self.core: Any = find_core(model)
        self.decoder: Any = find_decoder(model)
        self.teacher: Any = teacher
        require(why_unreachable(self.core, self.decoder))
        _refuse_prompts(model)
        self._refuse_noise()
        # Transformers' attention functions are those of encoders of images too, which may be handed the tape
        decoders = [self.decoder, *([find_decoder(teacher.copy)] if isinstance(teacher, CopiedTeacher) else [])]
        self._text_modules = {id(module) for decoder in decoders for module in decoder.modules()}
        self.state = state_of(self.decoder)
        if teacher is not None:
            self._require_difference()

    def _refuse_noise(self) -> None:
        alpha = getattr(self.core.get_input_embeddings(), "neftune_noise_alpha", None)
        if alpha is not None:
            raise ValueError(
                f"the embeddings of this model are noised (NEFTune, neftune_noise_alpha={alpha}), each forward anew, "
                "and what is distilled compares forwards: switch it off, e.g. with transformers' deactivate_neftune."
            )

    def _take_tape(self, call: AttentionCall) -> torch.Tensor | None:
        tape: Tape | None = call.options.pop(TAPE, None)
        return None if tape is None or id(call.module) not in self._text_modules else tape.visit(call)

    def _require_difference(self) -> None:
        source = None if self.state is None else self.state.source
        if self.state is None or (not self.state.rescalings and not (source and source.view.perturbs)):
            raise ValueError(
                "teacher and student have the same RoPE, so there is nothing to distil: rescale the student, e.g. with "
                "rescale='yarn', or give it a view."
            )

    def require_taught_length(self, teacher: str, length: int) -> None:
        """Raise ValueError, of a `teacher` called so, if documents of `length` tokens are beyond its native window."""
        window = None if self.state is None else self.state.native.max_position_embeddings
        if window is not None and length > window:
            raise ValueError(
                f"{teacher} reads documents of at most {window} tokens, its window, got one of {length}. Lower "
                "max_length; views reach further positions than rows have tokens."
            )

    def tape(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> Any:
        """A tape for one forward of these inputs, with documents and padding as the model itself finds them."""
        batch, seq_len = input_ids.shape
        valid = real_tokens(input_ids, attention_mask)
        document = torch.zeros_like(input_ids)
        if position_ids is not None:
            found = locate_documents(batch, seq_len, input_ids.device, position_ids, attention_mask)
            document = found.ordinal.expand(batch, seq_len)
        return self._new_tape(valid, document.masked_fill(~valid, -1))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Forwards with a tape distil inside the block."""
        self._refuse_noise()  # it may have come since
        handles = [
            # before the hook that draws the student's view: the teacher's own forward ends with no view in force
            self.decoder.register_forward_pre_hook(self._before_student, with_kwargs=True, prepend=True),
            self.decoder.register_forward_hook(self._after_student, with_kwargs=True),
            self.core.register_forward_hook(_require_compared, with_kwargs=True),
        ]
        try:
            with watched_attention(self.core, self._take_tape), self._watching():
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _before_student(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tape = kwargs.get(TAPE)
        if tape is None or tape.teaching or tape.taught:
            return
        tape.teaching = True
        try:
            with without_gradient(tape.valid.device.type), self.teacher.ready() as teacher:
                self._keep_teacher(tape, teacher(*args, **kwargs))
        finally:
            tape.teaching = False
        tape.taught = True

    def _after_student(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        tape = kwargs.get(TAPE)
        if tape is not None and not tape.teaching:
            self._compare_student(tape, output)
            tape.compared = True

    def _new_tape(self, valid: torch.Tensor, document: torch.Tensor) -> Any:
        raise NotImplementedError

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """What else has to be in place while forwards run."""
        yield

    def _keep_teacher(self, tape: Any, output: Any) -> None:
        """Take what is needed from the output of the teacher's decoder."""

    def _compare_student(self, tape: Any, output: Any) -> None:
        """Compare the output of the student's decoder."""


def require(reason: str | None) -> None:
    """Raise the reason why something is not possible, if there is one."""
    if reason is not None:
        raise ValueError(reason)


def real_tokens(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """Which tokens are not padding, bool [batch, n]."""
    return torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()


def _require_compared(core: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    tape = kwargs.get(TAPE)
    if isinstance(tape, Tape) and not (tape.compared or tape.teaching):
        raise ValueError(
            f"{type(core).__name__} does not pass keyword arguments on to its decoder, so nothing can be distilled in "
            "it. Use objective='clm'."
        )


def _refuse_prompts(model: nn.Module) -> None:
    for name, config in adapter_configs(model).items():
        if config.is_prompt_learning:
            raise ValueError(
                f"adapter {name!r} learns prompts ({config.peft_type.value}): its virtual tokens stand before those of "
                "the row, and losses that read states of the decoder would take the one for the other. Use LoRA, or "
                "objective='clm' without token_weighting and cue_weight."
            )
