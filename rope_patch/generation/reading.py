"""Prompts read into `KVRows`, each part that several share once, and answered greedily."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from rope_kernels.common.gpu_memory import free_gpu_bytes

from .decoding import Greedy, decode, end_tokens
from .kv_rows import KVRows

# tokens of several prompts that are read in one forward rather than for each prompt what it does not share
_TOGETHER = {"cuda": 8192, "cpu": 256}
_CHUNK_CPU = 8192
_LEAST_CHUNK, _MOST_CHUNK = 1024, 131072


class Question(NamedTuple):
    """A prompt, and what is asked about it.

    Args:
        prompt: token ids.
        max_new_tokens: tokens of a reply at most.
        answer: token ids of the right answer, behind which the model's own choices are looked up; () for none.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    answer: Sequence[int] = ()


class Reply(NamedTuple):
    """What a model says to a question.

    Args:
        written: the new tokens, each chosen behind those before, up to the one that ends an answer.
        forced: for each token of the right answer, the model's choice behind the prompt and the answer's tokens before.
    """

    written: list[int]
    forced: list[int]


class Reader:
    """Answers prompts.

    Args:
        causal_lm: a causal LM that `KVRows` can read.
        kv_bytes: of keys and values of one token.
        batch_size: prompts held at once, at most; None means as many as free memory holds.
        chunk: tokens of a prompt read in one forward; None means by free memory.
    """

    def __init__(self, causal_lm: Any, kv_bytes: int, batch_size: int | None, chunk: int | None) -> None:
        self.causal_lm, self.kv_bytes = causal_lm, kv_bytes
        self.batch_size, self.chunk = batch_size, chunk
        self.device: torch.device = causal_lm.get_input_embeddings().weight.device
        self.ends = end_tokens(causal_lm)

    def replies(self, questions: Sequence[Question], done: Callable[[int], None]) -> list[Reply]:
        """The model's reply to each question.

        Args:
            questions: prompts and what is asked about them.
            done: called with the number of prompts that have been read.
        """
        # in this order, no prompt shares more with any before it than with the last one
        order = sorted(range(len(questions)), key=lambda i: list(questions[i].prompt))
        in_order = [questions[i] for i in order]
        ids = [torch.tensor(list(q.prompt), device=self.device) for q in in_order]
        # a row whose reply is done goes on beside the others, to the end of the longest reply
        most = max((max(q.max_new_tokens, len(q.answer)) for q in in_order), default=0)
        capacity = max((len(p) for p in ids), default=0) + most
        n_rows = self._rows_in_memory(capacity, len(in_order))
        chunk = self._chunk_in_memory(capacity * n_rows)
        answered: list[Reply] = []
        while len(answered) < len(ids):
            out_of_memory = False
            rows = KVRows(self.causal_lm, n_rows, capacity)
            try:
                with rows.attention():
                    while len(answered) < len(ids):
                        first = len(answered)
                        held = ids[first - n_rows : first] if rows.calls else []
                        batch = ids[first : first + n_rows]
                        logits = self._read(rows, batch, held, chunk, partial(_add_to, done, first))
                        answered += self._replies(rows, logits, in_order[first : first + n_rows])
            except torch.OutOfMemoryError:
                if n_rows == 1 and chunk <= _LEAST_CHUNK:
                    raise
                out_of_memory = True
            if out_of_memory:  # here, as the exception holds on to tensors
                # short chunks take as long as long ones: where other programs hold the memory, rows are to go first
                n_rows, chunk = max(n_rows // 2, 1), max(chunk // 2, min(chunk, _LEAST_CHUNK))
                del rows
                torch.cuda.empty_cache()
        replies = [Reply([], [])] * len(in_order)
        for i, reply in zip(order, answered, strict=True):
            replies[i] = reply
        return replies

    def _read(
        self,
        rows: KVRows,
        batch: list[torch.Tensor],
        held: list[torch.Tensor],
        chunk: int,
        done: Callable[[int], None],
    ) -> torch.Tensor:
        """Fill rows with `batch` and return the logits after each prompt, where rows hold `held` so far."""
        before = [*held[-1:], *batch]
        shared = [0] * (len(batch) + 1 - len(before)) + [
            min(_common(a, b), len(b) - 1) for a, b in zip(before, before[1:], strict=False)
        ]
        together = _TOGETHER.get(self.device.type, _TOGETHER["cpu"])
        logits, first = [], 0
        while first < len(batch):
            begin, last, n = shared[first], first + 1, len(batch[first])
            while last < len(batch) and len(batch[last]) == n:
                if (last + 1 - first) * (n - min(begin, shared[last])) > together:
                    break
                begin, last = min(begin, shared[last]), last + 1
            if begin:
                rows.copy_prefix(first - 1 if first else len(held) - 1, first, last, begin)
            tokens = torch.stack([p[begin:] for p in batch[first:last]])
            logits.append(rows.read(tokens, first, begin, max(chunk // len(tokens), 1))[:, -1])
            done(last)
            first = last
        return torch.cat(logits)

    def _replies(self, rows: KVRows, logits: torch.Tensor, questions: Sequence[Question]) -> list[Reply]:
        """Of rows that hold the prompts of `asked`, with `logits` [rows, vocab_size] behind them."""
        choices = logits.float().argmax(-1).tolist()
        # what this reads lies behind the prompt, where the reply overwrites it token by token
        forced = [
            self._forced(rows, row, question, choice)
            for row, (question, choice) in enumerate(zip(questions, choices, strict=True))
        ]
        written = self._decode(rows, logits, questions)
        return [Reply(*both) for both in zip(written, forced, strict=True)]

    def _forced(self, rows: KVRows, row: int, question: Question, choice: int) -> list[int]:
        """The model's choice at each token of the right answer; at the first it is `choice`."""
        answer = list(question.answer[:-1])
        if not answer:
            return [choice][: len(question.answer)]
        ids = torch.tensor([answer], device=self.device)
        logits = rows.read(ids, row, len(question.prompt), len(answer), keep=len(answer))
        return [choice, *logits[0].float().argmax(-1).tolist()]

    def _decode(self, rows: KVRows, logits: torch.Tensor, questions: Sequence[Question]) -> list[list[int]]:
        """The new tokens of each row, with `logits` [rows, vocab_size] behind the prompts."""
        lengths, limits = [len(q.prompt) for q in questions], [q.max_new_tokens for q in questions]
        return decode(rows, logits, lengths, limits, self.ends, Greedy())

    def _rows_in_memory(self, capacity: int, n_prompts: int) -> int:
        """Prompts to be held at once."""
        free = free_bytes(self.device)
        # an eighth for what a chunk of a prompt takes, and a tenth for what nobody counts
        n_rows = int(0.9 * free * 7 / 8) // (self.kv_bytes * capacity)
        return max(min(n_rows, n_prompts, self.batch_size or n_prompts), 1)

    def _chunk_in_memory(self, held: int) -> int:
        """Tokens to be read in one forward beside the keys and values of `held` ones."""
        if self.chunk is not None:
            return self.chunk
        if self.device.type != "cuda":
            return _CHUNK_CPU
        left = free_bytes(self.device) - held * self.kv_bytes
        return min(max(left // 4 // self._activation_bytes(), _LEAST_CHUNK), _MOST_CHUNK)

    def _activation_bytes(self) -> int:
        """About what one token takes in a layer and between layers."""
        config = self.causal_lm.config.get_text_config(decoder=True)
        hidden = config.hidden_size
        inner = getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", None)
        inner = inner if isinstance(inner, int) else 4 * hidden
        experts = getattr(config, "num_experts_per_tok", None) or 1
        return self.causal_lm.get_input_embeddings().weight.element_size() * (16 * hidden + 6 * inner * experts)


def _add_to(done: Callable[[int], None], before: int, n: int) -> None:
    done(before + n)


def _common(a: torch.Tensor, b: torch.Tensor) -> int:
    """Tokens that two prompts begin with alike."""
    n = min(len(a), len(b))
    differ = (a[:n] != b[:n]).nonzero()
    return int(differ[0]) if len(differ) else n


def free_bytes(device: torch.device) -> int:
    """Bytes that one process may take: all of its share that is free on a GPU, half of what is free beside a CPU."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free_gpu_bytes(device) + unused
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, OSError, ValueError):  # not a Linux
        return 4 << 30
