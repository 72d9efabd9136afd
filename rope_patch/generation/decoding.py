"""What follows prompts that `KVRows` hold, token by token: the most likely one, or one drawn at random."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from .kv_rows import KVRows


class Greedy:
    """The most likely token of each row."""

    def draw(self) -> None:
        """Prepare the next call: nothing is drawn."""

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Tokens [rows] of logits [rows, vocab_size]."""
        return logits.float().argmax(-1)


class Sampling:
    """A random token of each row: token v with probability softmax(logits / temperature)[v].

    It is argmax_v(logits[v] / temperature - ln e[v]), where each e[v] is drawn from the exponential distribution of
    rate 1 (the Gumbel-max trick). The draws lie in a buffer of float32 that `draw` fills before each call, so that a
    CUDA graph can hold the call and every replay reads new ones.

    Args:
        temperature: above 0.
        seed: of the draws.
        like: logits as they will come, [rows, vocab_size].
    """

    def __init__(self, temperature: float, seed: int, like: torch.Tensor) -> None:
        self.temperature = temperature
        self.generator = torch.Generator(like.device).manual_seed(seed)
        self.gumbel = torch.empty_like(like, dtype=torch.float32)

    def draw(self) -> None:
        """Fill the buffer for the next call."""
        self.gumbel.exponential_(generator=self.generator).log_().neg_()

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Tokens [rows] of logits [rows, vocab_size]."""
        # logits in half precision are added in float32, without a copy of them
        return torch.add(self.gumbel, logits, alpha=1 / self.temperature).argmax(-1)


def decode(
    rows: KVRows,
    logits: torch.Tensor,
    lengths: Sequence[int],
    max_new_tokens: Sequence[int],
    ends: Collection[int],
    choice: Greedy | Sampling,
    step_done: Callable[[], object] = lambda: None,
) -> list[list[int]]:
    """The new tokens of each row, up to the first that ends a text.

    A row whose text has ended goes on beside the others, to the end of the longest.

    Args:
        rows: filled with prompts; called inside `rows.attention()`.
        logits: behind each prompt, [rows, vocab_size].
        lengths: tokens of each prompt.
        max_new_tokens: of each row.
        ends: tokens of which each ends a text.
        choice: of a token by its logits.
        step_done: called after each new token of all rows.
    """
    choice.draw()
    token, device = choice(logits), logits.device
    step = _Step(rows, token, torch.tensor(lengths, device=device), choice)
    limits = torch.tensor(max_new_tokens, device=device)
    stops = torch.tensor(list(ends), dtype=torch.int64, device=device)
    made, ended = [token.clone()], torch.isin(token, stops) | (limits <= 1)
    step_done()
    while not bool(ended.all()):
        step.take(max(max_new_tokens) - len(made))
        made.append(token.clone())
        ended |= torch.isin(token, stops) | (limits <= len(made))
        step_done()
    written = torch.stack(made, 1).tolist()
    return [up_to_end(row[:limit], ends) for row, limit in zip(written, max_new_tokens, strict=True)]


class _Step:
    """One more token of each row: run as it is first, then as a CUDA graph, which a GPU runs without Python.

    Args:
        rows: filled with prompts.
        token: last token of each row, [n]; `take` puts the next one in its place.
        slots: place of that token in its row, [n].
        choice: of a token by its logits; what it draws, it draws outside of the graph.
    """

    def __init__(self, rows: KVRows, token: torch.Tensor, slots: torch.Tensor, choice: Greedy | Sampling) -> None:
        self.rows, self.token, self.slots, self.choice = rows, token, slots, choice
        self.graph: torch.cuda.CUDAGraph | None = None
        devices = {p.device for p in rows.causal_lm.parameters()}
        self.stream = torch.cuda.Stream(token.device) if len(devices) == 1 and token.is_cuda else None
        self.taken = 0

    def take(self, left: int) -> None:
        """Replace `token` by the one after it.

        Args:
            left: steps that may come, this one included: a graph has to pay for its making.
        """
        self.choice.draw()
        if self.stream is None:
            self._run()
            return
        with torch.cuda.device(self.token.device):
            if self.taken == 1 and left > 2:
                self.graph = self._captured(self.stream)
            if self.graph is not None:
                self.graph.replay()
            else:  # beside the default stream, as what a first run sets up there would be set up in the graph again
                self.stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self.stream):
                    self._run()
                torch.cuda.current_stream().wait_stream(self.stream)
        self.taken += 1

    def _run(self) -> None:
        logits = self.rows.decode(self.token, self.slots)
        self.token.copy_(self.choice(logits))
        self.slots += 1

    def _captured(self, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self._run()
        except torch.OutOfMemoryError:  # fewer rows with a graph are faster than many without
            raise
        except RuntimeError:  # a family whose forward looks at values, as of some mixtures of experts
            return None
        return graph


def end_tokens(causal_lm: Any) -> list[int]:
    """Ids of which each ends what a model writes, by the generation config that comes with it."""
    ends = causal_lm.generation_config.eos_token_id
    return [] if ends is None else torch.as_tensor(ends).flatten().tolist()


def first_end(ids: Sequence[int], ends: Collection[int]) -> int | None:
    """Place of the first of `ends` among `ids`; None if there is none."""
    return next((k for k, i in enumerate(ids) if i in ends), None)


def up_to_end(ids: list[int], ends: Collection[int]) -> list[int]:
    """`ids` up to the first of `ends`, which is included; all where there is none."""
    end = first_end(ids, ends)
    return ids if end is None else ids[: end + 1]
