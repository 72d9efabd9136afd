"""Learning to read far from what is known of a short text: an arm of research/experiments/keeping.py.

On-policy self-distillation. The student, under the arm's rescaling, reads a row x of `evidence_rows`: facts spread in
a book and a question behind it, in a share of the rows with gaps in its RoPE indices. It writes an answer y itself,
each token drawn from its own prediction p(. | x, y_<t). The teacher, the native model with native RoPE at true
positions, reads nothing but the sentence e that holds the answer, the question, and what the student wrote. With N
the tokens of all answers of a step, whose rows the weights before it have all answered,

    loss = 1/N sum over answers, t of sum over v of p(v | x, y_<t) ln (p(v | x, y_<t) / q(v | e, y_<t)),

the reverse KL(student || teacher) in nats a token. No gradient goes through q or through the drawing of y. The student
is shown no right answer, and nothing else has weight.

Source: OPSDL, arXiv:2604.17535, its loss; rows, gaps and rates are ours.
"""

import math
import random
import re
import time
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch
from transformers import get_scheduler

from evidence_rows import EvidenceRow, closing_tokens, evidence_rows
from harness import autocast
from rope_patch import rope_view
from rope_patch.base.draws import DrawKey
from rope_patch.eval.measures.subject import Subject
from rope_patch.generation.decoding import end_tokens
from rope_patch.generation.sampling import sampled_tokens
from rope_patch.views import View

NEW_TOKENS = 16  # of an answer, at most
ROWS_PER_STEP = 8


def train_on_evidence(
    model: Any,
    teacher: Any,
    tokenizer: Any,
    texts: Sequence[str],
    n: int,
    *,
    length: int,
    view: View,
    rate: float,
    seed: int,
) -> dict[str, Any]:
    """`distil_from_evidence` on `n` rows in `texts`, each of `length` tokens with room for its answer.

    Half of the rows are in the tokenizer's chat template, if it has one.
    """
    begin = time.perf_counter()
    chat = 0.5 if tokenizer.chat_template else 0.0
    rows = evidence_rows(tokenizer, texts, n, length=length - NEW_TOKENS, chat=chat, seed=seed)
    made = time.perf_counter() - begin
    return {
        "rows_seconds": made,
        **distil_from_evidence(model, teacher, tokenizer, rows, view, rate=rate, seed=seed),
    }


def distil_from_evidence(
    model: Any, teacher: Any, tokenizer: Any, rows: Sequence[EvidenceRow], view: View, *, rate: float, seed: int
) -> dict[str, Any]:
    """Train `model` in place; how long it took, what was read and, of each step, what was logged.

    The log has the loss (`reverse_kl`), the mean over answers of the teacher's probability of the whole answer
    (`teacher_probability`) and the share of answers that hold the right value (`right`).

    Args:
        model: the student, float32 weights, rescaled.
        teacher: the native model.
        tokenizer: of both.
        rows: in their order, a step for every 8; prompts of one length.
        view: of the student's RoPE indices, drawn for each row.
        rate: learning rate, reached after a twentieth of the steps; it falls by a cosine to a tenth.
        seed: of gaps and answers.
    """
    student, taught = Subject(model.eval()), Subject(teacher.eval())
    ends = sorted({*end_tokens(student.causal_lm), *closing_tokens(tokenizer)})
    batches = [rows[first : first + ROWS_PER_STEP] for first in range(0, len(rows), ROWS_PER_STEP)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = get_scheduler(
        "cosine_with_min_lr",
        optimizer,
        num_warmup_steps=math.ceil(0.05 * len(batches)),
        num_training_steps=len(batches),
        scheduler_specific_kwargs={"min_lr_rate": 0.1},
    )
    begin, log = time.perf_counter(), []
    for step, batch in enumerate(batches):
        index = row_index(view, len(batch), len(batch[0].prompt), step, seed)
        answers = sampled_answers(model, batch, index, ends, random.Random(f"answers {seed} {step}").getrandbits(62))
        n_tokens = sum(map(len, answers))
        kl, probabilities = 0.0, []
        for row, answer, of_row in zip(batch, answers, index, strict=True):
            with torch.no_grad():
                log_q = log_probabilities(taught, row.evidence, answer)
            log_p = log_probabilities(student, row.prompt, answer, of_row)
            loss = reverse_kl(log_p, log_q).sum() / n_tokens
            loss.backward()
            kl += loss.item()
            said = log_q.gather(1, torch.tensor(answer, device=log_q.device)[:, None])
            probabilities.append(said.sum().exp().item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        entry = {"step": step + 1, "learning_rate": optimizer.param_groups[0]["lr"], "reverse_kl": kl}
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        right = [holds(row.value, tokenizer.decode(answer)) for row, answer in zip(batch, answers, strict=True)]
        entry |= {"teacher_probability": fmean(probabilities), "right": fmean(right), "tokens": n_tokens}
        log.append(entry)
    return {
        "train_seconds": time.perf_counter() - begin,
        "steps": len(batches),
        "learning_rate": rate,
        # each is read twice: to answer, and with gradients
        "student_tokens": sum(len(row.prompt) for row in rows),
        "answer_tokens": sum(entry["tokens"] for entry in log),
        "log": log,
    }


def reverse_kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """Sum over v of p(v) ln (p(v) / q(v)), [tokens], of log-probabilities [tokens, vocab_size]: p learns, q teaches."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def row_index(view: View, rows: int, length: int, step: int, seed: int) -> torch.Tensor:
    """RoPE indices of prompts of `length` tokens and their answers, [rows, length + NEW_TOKENS].

    Drawn once, so that a row is read alike when it is answered and when it trains. An answer goes on behind its
    prompt's last index; with it a row ends below the view's target.
    """
    key = DrawKey(seed, step, torch.arange(rows)[:, None])
    parameters = view.draw(torch.full((rows, 1), length + NEW_TOKENS), key)
    index = view.rope_index(torch.arange(length).expand(rows, -1), parameters)
    return torch.cat([index, index[:, -1:] + torch.arange(1, NEW_TOKENS + 1)], 1)


def sampled_answers(
    model: Any, rows: Sequence[EvidenceRow], index: torch.Tensor, ends: Sequence[int], seed: int
) -> list[list[int]]:
    """What the student writes behind each prompt, read with `index`, up to the end of a sentence or a line."""
    prompts = [row.prompt for row in rows]
    if len({len(prompt) for prompt in prompts}) > 1:
        raise ValueError("prompts of a step must have one length: padding would take other RoPE indices.")
    with rope_view(model, index=index), autocast(model):
        return sampled_tokens(
            model, prompts, max_new_tokens=NEW_TOKENS, ends=ends, temperature=1.0, seed=seed, pad_token=ends[0]
        )


def log_probabilities(
    subject: Subject, prompt: Sequence[int], answer: Sequence[int], index: torch.Tensor | None = None
) -> torch.Tensor:
    """Log-probabilities where each token of `answer` is predicted, [tokens, vocab_size] float32.

    Args:
        subject: student or teacher.
        prompt: what the answer stands behind.
        answer: at least one token.
        index: the student's RoPE indices, one a token or more, read in the precision of its training; None reads at
            true positions in float32, as the teacher's texts are short.
    """
    ids = torch.tensor([[*prompt, *answer[:-1]]], device=subject.device)
    if index is None:
        hidden = subject.hidden(ids)
    else:
        with rope_view(subject.model, index=index[None, : ids.shape[1]]), autocast(subject.model):
            hidden = subject.hidden(ids)
    # outside of autocast: of logits rounded to bf16, a KL of hundredths is noise
    return subject.log_probabilities(hidden[0, -len(answer) :].float())


def holds(value: str, text: str) -> bool:
    """Whether `text` has `value` in it, and not as a part of a longer number or word."""
    return re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text) is not None
