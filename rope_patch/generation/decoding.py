"""Decoding from prompts that `KVRows` hold, token by token, greedily or by sampling."""

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
    rate 1 (the Gumbel-max trick). `draw` fills a float32 buffer before each call, so that a CUDA graph can hold the
    call and every replay reads new draws.

    Args:
        temperature: above 0.
        seed: of the draws.
        like: a tensor of the shape and device of the logits, [rows, vocab_size].
    """

    def __init__(self, temperature: float, seed: int, like: torch.Tensor) -> None:
        self.temperature = temperature
        self.generator = torch.Generator(like.device).manual_seed(seed)
        self.gumbel = torch.empty_like(like, dtype=torch.float32)  # [rows, vocab_size]

    def draw(self) -> None:
        """Fill the buffer for the next call."""
        self.gumbel.exponential_(generator=self.generator).log_().neg_()  # -ln e

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Tokens [rows] of logits [rows, vocab_size]."""
        # adds logits of 16 bits in float32, without a copy of them
        return torch.add(self.gumbel, logits, alpha=1 / self.temperature).argmax(-1)


class Decoder:
    """Decodes prompts that rows hold, batch by batch; batches of as many rows share one CUDA graph.

    Args:
        rows: filled with prompts before each call, and called inside `rows.attention()`.
        choice: chooses a token by its logits.
    """

    def __init__(self, rows: KVRows, choice: Greedy | Sampling) -> None:
        self.rows, self.choice = rows, choice
        self._steps: dict[int, _Step] = {}  # by number of rows

    def decode(
        self,
        logits: torch.Tensor,
        lengths: Sequence[int],
        max_new_tokens: Sequence[int],
        ends: Collection[int],
        step_done: Callable[[], object] = lambda: None,
    ) -> list[list[int]]:
        """Decode rows 0, 1, ... together, and return the new tokens of each, up to the first end token.

        A row that has ended keeps decoding beside the others, until the longest one ends.

        Args:
            logits: after each prompt, [rows, vocab_size].
            lengths: tokens of each prompt.
            max_new_tokens: of each row.
            ends: end tokens.
            step_done: called after each new token of all rows.
        """
        device = logits.device
        self.choice.draw()
        token, slots = self.choice(logits), torch.tensor(lengths, device=device)  # [rows]
        if (step := self._steps.get(len(lengths))) is None:
            step = self._steps[len(lengths)] = _Step(self.rows, token.clone(), slots, self.choice)
        else:  # a graph reads them from where it was captured
            step.token.copy_(token)
            step.slots.copy_(slots)
        limits = torch.tensor(max_new_tokens, device=device)
        stops = torch.tensor(list(ends), dtype=torch.int64, device=device)
        tokens, ended = [token], torch.isin(token, stops) | (limits <= 1)
        step_done()
        while not bool(ended.all()):
            step.take(max(max_new_tokens) - len(tokens))
            tokens.append(step.token.clone())  # the next step overwrites it
            ended |= torch.isin(step.token, stops) | (limits <= len(tokens))
            step_done()
        decoded = torch.stack(tokens, 1).tolist()
        return [up_to_end(row[:limit], ends) for row, limit in zip(decoded, max_new_tokens, strict=True)]


class _Step:
    """One more token of each row: the first step runs eagerly, later ones as a CUDA graph, without Python."""

    def __init__(self, rows: KVRows, token: torch.Tensor, slots: torch.Tensor, choice: Greedy | Sampling) -> None:
        self.rows, self.choice = rows, choice
        # [rows]: the last token of each row and its index; `take` overwrites both
        self.token, self.slots = token, slots
        self.graph: torch.cuda.CUDAGraph | None = None
        self.warm = self.captured = False
        devices = {p.device for p in rows.causal_lm.parameters()}
        self.stream = torch.cuda.Stream(token.device) if len(devices) == 1 and token.is_cuda else None

    def take(self, left: int) -> None:
        """Replace `token` by the next one; `left` steps may follow, and fewer than three are not worth a graph."""
        self.choice.draw()
        if self.stream is None:
            self._run()
            return
        with torch.cuda.device(self.token.device):
            if self.warm and not self.captured and left > 2:
                self.graph, self.captured = self._captured(self.stream), True
            if self.graph is not None:
                self.graph.replay()
            else:  # warm up on the graph's stream: what libraries set up for a stream must not happen in the capture
                self.stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self.stream):
                    self._run()
                torch.cuda.current_stream().wait_stream(self.stream)
                self.warm = True

    def _run(self) -> None:
        logits = self.rows.decode(self.token, self.slots)
        self.token.copy_(self.choice(logits))
        self.slots += 1

    def _captured(self, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        try:
            # "thread_local": CUDA calls of other threads do not end the capture
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                self._run()
        except torch.OutOfMemoryError:  # fewer rows with a graph are faster than many without
            raise
        except RuntimeError:  # the forward reads values of tensors, as some mixtures of experts do
            return None
        return graph


def end_tokens(causal_lm: Any) -> list[int]:
    """IDs of the end tokens in a model's generation config."""
    ends = causal_lm.generation_config.eos_token_id
    return [] if ends is None else torch.as_tensor(ends).flatten().tolist()


def first_end(ids: Sequence[int], ends: Collection[int]) -> int | None:
    """Index of the first end token among `ids`; None if there is none."""
    return next((k for k, i in enumerate(ids) if i in ends), None)


def up_to_end(ids: list[int], ends: Collection[int]) -> list[int]:
    """`ids` up to the first end token, which is included; all of them if there is none."""
    end = first_end(ids, ends)
    return ids if end is None else ids[: end + 1]
