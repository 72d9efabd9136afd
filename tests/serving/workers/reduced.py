"""What a worker saves: of its logits all, or what is left of those of rows too long to keep; and what it writes."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

CHUNK = 512  # tokens whose logits a program that reads a row in parts gives at once


def save(
    job: dict[str, Any],
    logits_of: Callable[[np.ndarray], Iterable[np.ndarray]],
    write: Callable[[np.ndarray, list[list[int]], int], list[list[int]]] | None = None,
) -> None:
    """Write the outcome of `job` to its .npz.

    Args:
        job: with "ids", an .npy of [1, n] token ids; "rows", name -> how many of them; "out"; and, for long rows,
            "kept", name -> the places whose logits are kept. "asked", where it is there, has name -> "text", how many
            tokens of the row come before its questions, "questions", of token ids, and "tokens", how many to write.
        logits_of: a row of token ids [n] -> its logits, [some, vocabulary] of consecutive tokens each.
        write: the same text [n], which `logits_of` has just read, questions, tokens -> the likeliest tokens behind the
            text and each question by itself. Without it, nothing is written.
    """
    ids = np.load(job["ids"])[0]
    arrays: dict[str, np.ndarray] = {}
    for row, length in job["rows"].items():
        chunks = logits_of(ids[:length])
        if "kept" in job:
            arrays |= {f"{row}|{what}": a for what, a in reduced(ids[:length], chunks, job["kept"][row]).items()}
        else:
            arrays[row] = np.concatenate(list(chunks))
        if write is not None and (asked := job.get("asked", {}).get(row)):
            arrays[f"{row}|written"] = np.array(write(ids[: asked["text"]], asked["questions"], asked["tokens"]))
    np.savez(job["out"], **arrays)


def reduced(ids: np.ndarray, chunks: Iterable[np.ndarray], kept: list[int]) -> dict[str, np.ndarray]:
    """The parts of a row's logits that are told.

    Returns:
        "logits" [len(kept), vocabulary] of the kept places, "loss" [n - 1] of each token but the first, in nats, and
        "likeliest" [n], the token with the largest logit at each place.
    """
    logits, losses, likeliest = [], [], []
    first = 0
    for chunk in chunks:
        end = first + len(chunk)
        logits.append(chunk[[place - first for place in kept if first <= place < end]].astype(np.float32))
        likeliest.append(chunk.argmax(-1))
        targets = ids[first + 1 : end + 1]
        rows = chunk[: len(targets)].astype(np.float64)
        top = rows.max(-1)
        normaliser = top + np.log(np.exp(rows - top[:, None]).sum(-1))
        losses.append(normaliser - rows[np.arange(len(targets)), targets])
        first = end
    if first != len(ids):
        raise RuntimeError(f"the program gave logits of {first} tokens for a row of {len(ids)}")
    return {"logits": np.concatenate(logits), "loss": np.concatenate(losses), "likeliest": np.concatenate(likeliest)}
