"""The view of a trainer: in force while it runs, with a clock that says which step and documents it draws for."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import TrainerState

from rope_patch.base.draws import DrawKey
from rope_patch.forward.draw_clock import progress_at
from rope_patch.forward.sources import ViewSource
from rope_patch.forward.state import When, state_of
from rope_patch.layout.documents import locate_documents
from rope_patch.rope.rotary import find_decoder

from ..objectives.step_means import Part
from .model_setup import has_rope


class TrainerView:
    """The view that a model has when its trainer is made.

    Its `source` draws it, and is None for a model without RoPE.

    Args:
        model: patched, or without RoPE.
    """

    def __init__(self, model: nn.Module) -> None:
        self.source: ViewSource | None = None
        self._when: When = "train"
        self._runs = 0  # of train, evaluate and predict, one inside the other
        if has_rope(model):
            state = state_of(find_decoder(model))
            assert state is not None and state.source is not None  # at the least the standard view
            self.source, self._when = state.source, state.when

    @property
    def perturbs(self) -> bool:
        """Whether it changes positions at all."""
        return self.source is not None and self.source.view.perturbs

    @contextmanager
    def in_force(self, model: nn.Module) -> Iterator[None]:
        """Put on the view of this trainer while it runs, and take it off afterwards, as nothing sets its clock then.

        A view that the user put on stays, and its clock runs by itself again. Files saved later still name the view.
        """
        source = self.source
        if source is None:
            yield
            return
        state = state_of(find_decoder(model))
        if state is None:
            raise ValueError(
                "the model was unpatched after this trainer was made, and would train without its rescaling and view: "
                "make a new trainer."
            )
        before = state.source, state.when  # the user's view, or this one: `evaluate` runs inside `train`
        state.source, state.when = source, self._when
        self._runs += 1
        try:
            yield
        finally:
            self._runs -= 1
            if not self._runs:
                source.clock.release()
                state.ended = source.view, self._when
                if source.of_trainer:
                    state.source, state.when = (None, "train") if before[0] is source else before

    def set_clock(self, state: TrainerState, first_sample: int) -> None:
        """Draw for the optimizer step of `state`, from its document `first_sample` on."""
        if self.source is not None:
            progress = progress_at(state.global_step, state.max_steps)
            self.source.clock.set(state.global_step, first_sample, progress)

    def set_evaluation_clock(self, first_sample: int) -> None:
        """Draw for an evaluation, from its document `first_sample` on: the same every time.

        Only a view that is always on, and the KL of self-distillation, draw there.
        """
        if self.source is not None:
            self.source.clock.set(-1, first_sample)  # no step of a training has this number

    def key(self, batch: dict[str, Any]) -> DrawKey:
        """The key that the forward of a batch, one document a row, will draw with, by the clock as it is set."""
        assert self.source is not None
        rows, seq_len = batch["input_ids"].shape
        mask = batch.get("attention_mask")
        return self.source.clock.key(locate_documents(rows, seq_len, batch["input_ids"].device, None, mask))

    def drawn(self) -> dict[str, Part]:
        """Sum over documents of each drawn parameter in the last forward, and their number."""
        last = None if self.source is None else self.source.last
        if last is None:  # the objective reads other views
            return {}
        return {f"view/{name}": last.total(name) for name in last.logged()}
