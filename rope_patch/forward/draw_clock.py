"""Which optimizer step and which documents the draws of the next forward are for."""

from dataclasses import replace
from typing import Any

import torch

from ..base.draws import DrawKey
from ..layout.documents import Documents, document_numbers


def progress_at(step: int, n_steps: int) -> float:
    """Progress of a training of `n_steps` optimizer steps at `step`: 0 at the first step, 0, and 1 at the last.

    A run of one step has progress 1.
    """
    return min(step / (n_steps - 1), 1.0) if n_steps > 1 else 1.0


class DrawClock:
    """Which optimizer step, and which sample of it, the next forward draws for.

    Args:
        seed: of all draws.

    A trainer or optimizer sets it (`training_step`), or your own loop does by `set` or `set_step`. Draws then depend on
    these values only, until `release`. A clock that nobody sets counts every forward that draws as a step.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        # tensors, because torch.compile would trace again for each value of a Python counter
        self.step = torch.zeros((), dtype=torch.int64, device="cpu")
        self.first_sample = torch.zeros((), dtype=torch.int64, device="cpu")
        self.progress = torch.ones((), dtype=torch.float64, device="cpu")
        self.is_set = False  # by the user's code, a trainer or an optimizer
        self.by_content = False  # whether the tokens of a document key its draw, or its ordinal
        self.pairs = False  # whether a batch is chosen rows and then rejected ones
        self.driver: int | None = None  # which callback or optimizer sets the clock; None for the user's code

    def __getstate__(self) -> dict[str, Any]:
        # the callback or optimizer that drives this clock does not drive that of a copy
        free = {"is_set": False, "by_content": False, "pairs": False, "driver": None}
        return self.__dict__ if self.driver is None else {**self.__dict__, **free}

    def set(self, step: int, first_sample: int, progress: float = 1.0) -> None:
        """Let the next forward draw for documents first_sample, first_sample + 1, ... of optimizer step `step`.

        Args:
            step: any integer.
            first_sample: ordinal of the forward's first document within the step, at least 0.
            progress: of training, from 0 to 1, which curricula go by; 1 is its end.

        Raises:
            ValueError: `progress` is out of range; the clock is as it was.
        """
        self._write(step, first_sample, progress)
        self.by_content, self.pairs, self.driver = False, False, None

    def set_step(self, step: int, progress: float = 1.0, *, pairs: bool = False, driver: int | None = None) -> None:
        """Let forwards from now on draw for optimizer step `step`, keyed by the tokens of each document, not its place.

        All models that read a document in this step get the same draw for it, in any batch and on any rank. A document
        that occurs twice in a step gets the same draw twice. In evaluation mode, a view that is always on draws for
        step -1 and progress 1, so that all evaluations draw the same.

        Args:
            step: any integer.
            progress: of training, from 0 to 1.
            pairs: whether a batch holds the chosen rows and then the rejected ones: both rows of a pair draw by the
                tokens of the chosen one.
            driver: which callback or optimizer sets the clock; None for the user's own code.

        Raises:
            ValueError: `progress` is out of range; the clock is as it was.
        """
        self._write(step, 0, progress)
        self.by_content, self.pairs, self.driver = True, pairs, driver

    def release(self) -> None:
        """Count every forward as a step again."""
        self.is_set, self.by_content, self.pairs, self.driver = False, False, False, None
        self.progress.fill_(1.0)

    def _write(self, step: int, first_sample: int, progress: float) -> None:
        if not 0 <= progress <= 1:  # NaN is refused too
            raise ValueError(
                f"progress must be a number from 0, the start of training, to 1, its end, got {progress!r}."
            )
        self.step.fill_(step)
        self.first_sample.fill_(first_sample)
        self.progress.fill_(progress)
        self.is_set = True

    def key(self, documents: Documents) -> DrawKey:
        """The key of these documents, by their order."""
        device = documents.ordinal.device
        if torch.compiler.is_compiling():
            step, first, progress = (x.to(device, copy=True) for x in (self.step, self.first_sample, self.progress))
            return DrawKey(self.seed, step, documents.ordinal + first, progress=progress)
        # as Python numbers: a copy to a GPU would wait for its queued work
        progress = torch.full((), self.progress.item(), dtype=torch.float64, device=device)
        sample = documents.ordinal + int(self.first_sample)
        return DrawKey(self.seed, int(self.step), sample, progress=progress)

    def key_of(self, documents: Documents, ids: torch.Tensor | None, t: torch.Tensor, training: bool) -> DrawKey:
        """The key of the documents of a forward, by order or by tokens, as the clock was set.

        Args:
            documents: of the batch.
            ids: of its tokens, [batch, seq_len], None where the call has embeddings.
            t: index of each token in its document, [1 or batch, seq_len], -1 on padding.
            training: whether the forward is one of training.
        """
        key = self.key(documents)
        if not self.by_content:
            return key
        if ids is None:
            raise ValueError(
                "in a trainer, a view draws by the token ids of a document, and this forward has inputs_embeds, "
                "as with prompt learning and images: leave out the view, or prompt learning."
            )
        numbers = document_numbers(ids, t, documents)
        if self.pairs:
            rows = len(ids)
            if rows % 2 or documents.start.shape[1] != 1:
                raise ValueError(
                    "this trainer's batches must hold chosen rows and as many rejected ones, one document a row; got "
                    f"{rows} rows{'' if documents.start.shape[1] == 1 else ' with position_ids of packed documents'}."
                )
            numbers = numbers[: rows // 2].repeat(2, 1)
        if training:
            return replace(key, sample=numbers)
        return replace(key, sample=numbers, step=-1, progress=torch.ones((), dtype=torch.float64, device=ids.device))

    def tick(self) -> None:
        """Count a forward as a step, unless a trainer or loop sets the clock."""
        if not self.is_set:
            self.step += 1
