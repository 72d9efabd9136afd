"""Self-distillation between views in two calls of the model, each with its own backward: one graph lives at a time."""

from typing import Any

import torch

from rope_kernels import RowMetrics
from rope_kernels.vocabulary.checks import IGNORE_INDEX

from .consistency import ViewTape
from .distiller import TAPE
from .two_views import ViewDistiller

_LOGITS_BYTES = 2**29  # of float32 logits of both views


class SequentialTape(ViewTape):
    """A tape that goes through two calls of the model: the standard view, then the sampled one."""

    of_labels: torch.Tensor | None = None  # [N] indices of the first call's rows among the flattened queries
    first: RowMetrics  # of them


class SequentialDistiller(ViewDistiller):
    """`ViewDistiller` for training in two calls; q is held fixed, so that the KL needs its states and no graph of them.

    The first call, with true positions in force and a `SequentialTape`, gives the cross-entropy, whose backward may run
    at once; the second, with the same tape, the rest of the loss. Gradients are those of one call. Other tapes go
    through one call, as evaluation does.
    """

    def _before_student(self, decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tape = kwargs.get(TAPE)
        if not isinstance(tape, SequentialTape):
            return super()._before_student(decoder, args, kwargs)
        if tape.teaching:
            return None
        if tape.of_labels is None:
            self._read_short(tape, decoder)
        else:
            self._ask_teacher(tape, args, kwargs)
        return None

    def _compare_student(self, tape: ViewTape, output: Any) -> None:
        if not isinstance(tape, SequentialTape):
            super()._compare_student(tape, output)
        elif tape.of_labels is None:
            self._next_token(tape, output.last_hidden_state)
            tape.of_labels, tape.first = tape.queries, tape.rows
            tape.standard = output.last_hidden_state.detach()
        else:
            self._against_first(tape, output)

    def _head_options(self, tape: ViewTape) -> dict[str, Any]:
        """Fewer rows at a time: where weights are trained, the loss is what memory peaks at, beside all gradients."""
        if not isinstance(tape, SequentialTape):
            return super()._head_options(tape)
        vocabulary = self.core.get_output_embeddings().weight.shape[0]
        rows = _LOGITS_BYTES // (2 * 4 * vocabulary)
        return {**super()._head_options(tape), "chunk_rows": max(1, rows // 128 * 128 or rows)}

    def _against_first(self, tape: SequentialTape, output: Any) -> None:
        kl_weight = self._choose_rows(tape)
        labels = tape.labelled.next_label.flatten()
        standard, view = self._states(tape, output.last_hidden_state)
        ours = labels[tape.queries]
        self._sweep(tape, standard, view, torch.full_like(ours, IGNORE_INDEX), ours, kl_weight)
        # what the first call has found, at its rows of these
        assert tape.of_labels is not None
        found = {}
        for name, values in vars(tape.first).items():
            every = values.new_zeros(len(labels)).index_copy(0, tape.of_labels, values)
            found[name] = every[tape.queries]
        tape.rows = RowMetrics(**{**found, "kl": tape.rows.kl})
