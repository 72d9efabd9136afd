"""How far a model's predictions are from those of the model that it was made of."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from rope_patch.eval.measures.subject import Subject

Batch = tuple[list[int], torch.Tensor]
LOGITS = 2**28  # that are held at once, at most, but for losses of one long text: 1 GiB in float32


@torch.no_grad()
def kl_from(native: Any, model: Any, texts: Iterable[Sequence[int]]) -> float:
    """KL(native || model) of next-token predictions in nats, mean over the tokens of `texts`, which are token ids."""
    texts = [list(text) for text in texts]
    subjects, total = [Subject(m) for m in (native, model)], 0.0
    vocab_size = subjects[0].vocab_size
    for numbers, ids in padded(texts, vocab_size):
        lengths = torch.tensor([len(texts[k]) for k in numbers])
        real = (torch.arange(ids.shape[1]) < lengths[:, None]).to(model.device)
        states = (subject.hidden(ids.to(model.device))[real] for subject in subjects)
        # one text may be long, and a vocabulary large
        parts = (of_model.split(max(LOGITS // vocab_size, 1)) for of_model in states)
        for of_tokens in zip(*parts, strict=True):
            log_p, log_q = (s.log_probabilities(h) for s, h in zip(subjects, of_tokens, strict=True))
            total += float((log_p.exp() * (log_p - log_q)).sum(-1).double().sum())
    return total / sum(map(len, texts))


@torch.no_grad()
def losses_of(native: Any, prompts: Sequence[Sequence[int]], replies: Sequence[Sequence[int]]) -> list[float]:
    """Mean over each reply's tokens of -ln p by `native`, which reads it behind its prompt."""
    texts = [[*prompt, *reply] for prompt, reply in zip(prompts, replies, strict=True)]
    losses = [0.0] * len(texts)
    for numbers, ids in padded(texts, native.config.get_text_config().vocab_size):
        ids = ids.to(native.device)
        logits = native(input_ids=ids).logits
        for k, row, of_row in zip(numbers, ids, logits, strict=True):
            first, end = len(prompts[k]), len(texts[k])
            # a token is predicted where the one before it stands
            losses[k] = float(torch.nn.functional.cross_entropy(of_row[first - 1 : end - 1].float(), row[first:end]))
    return losses


def padded(texts: Sequence[Sequence[int]], vocab_size: int) -> Iterator[Batch]:
    """Batches of texts alike in length: their numbers, and ids [texts, tokens] with zeros behind those that end before.

    A model that attends causally reads nothing of what stands behind a text's end.
    """
    batch: list[int] = []
    for k in sorted(range(len(texts)), key=lambda k: len(texts[k])):
        if batch and (len(batch) + 1) * len(texts[k]) * vocab_size > LOGITS:
            yield batch, _together([texts[n] for n in batch])
            batch = []
        batch.append(k)
    if batch:
        yield batch, _together([texts[n] for n in batch])


def _together(texts: Sequence[Sequence[int]]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
