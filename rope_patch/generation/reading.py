"""Reading prompts into `KVRows`, each shared beginning once, and greedy replies to them."""

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from rope_kernels.common.gpu_memory import free_gpu_bytes

from .decoding import Decoder, Greedy, end_tokens
from .kv_rows import KVRows

# up to so many tokens, several prompts are read in one forward, even if they share more than it reuses: a forward of
# fewer takes as long on a GPU, which waits for Python
_TOGETHER = {"cuda": 16384, "cpu": 256}
_CHUNK = 16384  # tokens of a prompt that one forward reads
_LEAST_CHUNK = 1024
# A long prompt is read from a multiple of so many tokens to another, as cuDNN's attention, the fastest on a GPU, plans
# anew for each length (attention/prefix.py).
_ROUND = {"cuda": 2048, "cpu": 1}
# Keys and values that are held at once. It is the same on each machine, because a reply can change with the number of
# rows beside it: in 16 bits a matrix product of other rows rounds otherwise.
_HELD = 8 << 30


class Question(NamedTuple):
    """A prompt, and the right answer to it.

    Args:
        prompt: token IDs.
        max_new_tokens: most tokens of a reply.
        answer: token IDs of the right answer, for teacher forcing; () for none.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    answer: Sequence[int] = ()


class Reply(NamedTuple):
    """A model's greedy reply to a question.

    Args:
        written: the new tokens, up to the end token, which is included.
        forced: for each token of the right answer, the model's choice after the prompt and the answer's earlier tokens.
    """

    written: list[int]
    forced: list[int]


class Reader:
    """Replies to prompts.

    Args:
        causal_lm: a causal LM that `KVRows` can read.
        kv_bytes: bytes of keys and values of one token.
        batch_size: most prompts that are held at once; None means 8 GiB of keys and values.
        chunk: tokens of a prompt that one forward reads; None means 16384.
    """

    def __init__(self, causal_lm: Any, kv_bytes: int, batch_size: int | None, chunk: int | None) -> None:
        self.causal_lm, self.kv_bytes = causal_lm, kv_bytes
        self.batch_size, self.chunk = batch_size, chunk
        self.device: torch.device = causal_lm.get_input_embeddings().weight.device
        self.ends = end_tokens(causal_lm)

    def replies(self, questions: Sequence[Question], done: Callable[[int], None]) -> list[Reply]:
        """The model's reply to each question.

        Args:
            questions: prompts and right answers.
            done: called with the number of prompts that have been read.
        """
        # sorted, a prompt shares no longer beginning with any earlier one than with the one before it
        order = sorted(range(len(questions)), key=lambda i: list(questions[i].prompt))
        in_order = [questions[i] for i in order]
        ids = [torch.tensor(list(q.prompt), device=self.device) for q in in_order]
        # a row that has ended keeps decoding beside the others, until the longest reply ends
        longest = max(map(len, ids))
        new_tokens = max(max(q.max_new_tokens, len(q.answer)) for q in in_order)
        capacity = max(longest + new_tokens, self._end_of(longest))
        of_row = self.kv_bytes * capacity
        n_rows = max(_HELD // of_row, 1)
        # a quarter is for the activations of a chunk, and for what nobody counts
        room = 3 * free_bytes(self.device) // 4
        while n_rows > 1 and n_rows * of_row > room:
            n_rows //= 2
        n_rows = min(n_rows, len(ids), self.batch_size or len(ids))
        chunk = self.chunk or _CHUNK
        answered: list[Reply] = []
        while len(answered) < len(ids):
            out_of_memory = False
            rows = KVRows(self.causal_lm, n_rows, capacity)
            decoder = Decoder(rows, Greedy())
            try:
                with rows.attention():
                    while len(answered) < len(ids):
                        first = len(answered)
                        held = ids[first - n_rows : first] if rows.calls else []
                        batch = ids[first : first + n_rows]
                        logits = self._read(rows, batch, held, chunk, done, first)
                        answered += self._replies(decoder, logits, in_order[first : first + n_rows])
            except torch.OutOfMemoryError:
                if n_rows == 1 and chunk <= _LEAST_CHUNK:
                    raise
                out_of_memory = True
            if out_of_memory:  # outside `except`, because the exception holds on to tensors
                # halving chunks costs no time, but they stop at the least: rows give way to memory that others hold
                n_rows, chunk = max(n_rows // 2, 1), max(chunk // 2, min(chunk, _LEAST_CHUNK))
                del rows, decoder
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
        n_before: int,
    ) -> torch.Tensor:
        """Read `batch`, after `n_before` prompts, into rows that hold `held`; logits after each, [rows, vocab_size]."""
        before = [*held[-1:], *batch]
        # tokens that each prompt has in common with the one before it; its last token is always read
        shared = [0] * (len(batch) + 1 - len(before))  # the very first prompt has none before it
        for earlier, prompt in zip(before, before[1:], strict=False):
            n = min(len(earlier), len(prompt))
            differ = (earlier[:n] != prompt[:n]).nonzero()
            shared.append(min(int(differ[0]) if len(differ) else n, len(prompt) - 1))
        together, first = _of(self.device, _TOGETHER), 0
        while first < len(batch):
            # prompts first, ..., last - 1 are read together from `begin` on, shorter ones with padding behind them
            begin, last, longest = shared[first], first + 1, len(batch[first])
            while last < len(batch):
                wider, common = max(longest, len(batch[last])), min(begin, shared[last])
                if (last + 1 - first) * (wider - common) > together:
                    break
                begin, last, longest = common, last + 1, wider
            stop = longest - 1  # `end` reads the last token
            if last - first == 1 and stop > together:
                begin, stop = begin - begin % _of(self.device, _ROUND), self._end_of(stop)
            if begin:
                # from the row above, or from the last row of the batch before
                rows.copy_prefix(first - 1 if first else len(held) - 1, first, last, begin)
            tokens = pad_sequence([p[begin:-1] for p in batch[first:last]], batch_first=True)
            tokens = pad(tokens, (0, stop - begin - tokens.shape[1]))
            if tokens.shape[1]:
                rows.read(tokens, first, begin, max(chunk // len(tokens), 1))
            done(n_before + last)
            first = last
        return rows.end(batch)

    def _end_of(self, n: int) -> int:
        """Where reading a prompt of n tokens ends, if no other is read with it."""
        step = _of(self.device, _ROUND)
        return n + -n % step if n > _of(self.device, _TOGETHER) else n

    def _replies(self, decoder: Decoder, logits: torch.Tensor, questions: Sequence[Question]) -> list[Reply]:
        """Replies of rows that hold the prompts of `questions`, with `logits` [rows, vocab_size] after them."""
        choices = logits.float().argmax(-1).tolist()
        # teacher forcing writes keys and values after the prompt, where decoding overwrites them token by token
        forced = [
            self._forced(decoder.rows, row, question, choice)
            for row, (question, choice) in enumerate(zip(questions, choices, strict=True))
        ]
        return [Reply(*both) for both in zip(self._decode(decoder, logits, questions), forced, strict=True)]

    def _forced(self, rows: KVRows, row: int, question: Question, choice: int) -> list[int]:
        """The model's choice at each token of the right answer; at the first it is `choice`."""
        answer = list(question.answer[:-1])
        if not answer:
            return [choice][: len(question.answer)]
        ids = torch.tensor([answer], device=self.device)
        begin = len(question.prompt)
        logits = rows.read(ids, row, begin, begin + len(answer), keep=len(answer))  # in one forward
        return [choice, *logits[0].float().argmax(-1).tolist()]

    def _decode(self, decoder: Decoder, logits: torch.Tensor, questions: Sequence[Question]) -> list[list[int]]:
        """The new tokens of each row, with `logits` [rows, vocab_size] after the prompts."""
        lengths, limits = [len(q.prompt) for q in questions], [q.max_new_tokens for q in questions]
        return decoder.decode(logits, lengths, limits, self.ends)


def _of(device: torch.device, values: dict[str, int]) -> int:
    return values.get(device.type, values["cpu"])


def free_bytes(device: torch.device) -> int:
    """Bytes that one process may take: all that is free to it on a GPU, half of what is free on a CPU."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free_gpu_bytes(device) + unused
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, OSError, ValueError):  # not Linux
        return 4 << 30
