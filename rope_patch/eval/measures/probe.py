"""A quick look at a model: where its context window ends, and what to do about it."""

from dataclasses import dataclass
from math import ceil, log

import torch
from torch import nn

from ...describe import describe
from ...patch import patch_model, unpatch_model
from .comparisons import in_distribution_penalty
from .loss_by_position import LossByPosition, loss_by_position
from .subject import Subject

# nats per token that the loss beyond the window may exceed that within it: the noise of a few rows
FLAT = 0.1
# percent that the loss within the window may rise before fine-tuning is advised to repair it
CHEAP = 2.0
# share of ln(vocabulary), the loss of a random guess, from which a model predicts next to nothing
GUESSING = 0.75

_BY_LOSS = (
    "This advice is based on loss, which does not show what the model finds in long text: trained on books with YaRN "
    "and this view, SmolLM2-135M found fewer passkeys in 2048 tokens than before. If the model has to answer "
    "questions, use `rope-patch extend`, which trains with questions."
)
_SKIP_REASON = (
    "Fine-tune with a skip view: rows stay as short as the window, and every step trains on positions up to the new "
    "length."
)


@dataclass(frozen=True)
class ProbeResult:
    """The result of `probe`. `print` shows findings, advice and recipe.

    Args:
        native: loss by position of the model as it is.
        yarn: loss by position on the same rows with untrained YaRN that reaches the end of the rows; None if it was
            not tried.
        factor: factor of that YaRN.
        recipe: fields for `RopeSFTConfig`; {} if nothing has to be done.
        words: findings and advice, one sentence an item.
    """

    native: LossByPosition
    yarn: LossByPosition | None
    factor: float | None
    recipe: dict[str, object]
    words: list[str]

    def __str__(self) -> str:
        lines = list(self.words)
        if self.recipe:
            lines += [_BY_LOSS, "", "RopeSFTConfig("]
            lines += [f"    {name}={value!r}," for name, value in self.recipe.items()]
            lines += [")"]
        return "\n".join(lines)


def probe(model: nn.Module, rows: torch.Tensor, *, progress: bool = True) -> ProbeResult:
    """Measure loss by position on `rows`, try YaRN without training, and say what to do.

    The advice follows from the measured losses. If the loss does not rise beyond the window, nothing has to be done. If
    untrained YaRN keeps it from rising, use YaRN and a short fine-tuning with a skip view. Otherwise, fine-tune with a
    skip view, which needs no rescaling. A model whose loss within the window is near ln(vocabulary), the loss of a
    guess, gets no advice.

    Args:
        model: a causal LM without patches. It is not changed.
        rows: held-out token ids, int64 [n_rows, seq_len], longer than the trained window.
        progress: whether to show bars.

    Raises:
        ValueError: the rows do not reach beyond the window, the config names no window, the model is patched, or its
            losses are not finite.
    """
    rope = describe(model)
    if rope.patched:
        raise ValueError("probe tries a rescaling and needs a model without patches: call unpatch_model first.")
    subject = Subject(model)
    window = subject.trained_window
    if window is None:
        raise ValueError("the model's config names no trained window, so probe cannot look for its end.")
    subject.check_rows(rows, at_least=window + 2)
    seq_len = rows.shape[1]
    native = loss_by_position(model, rows, progress=progress, title="as it is")
    if not native.loss[1:].isfinite().all():  # comparisons with NaN are false, which would look like a cliff
        raise ValueError(
            f"the losses of {rope.model} are not finite, so nothing can be said about its window: load it in another "
            "dtype, e.g. with --dtype float32, and check that its weights are complete."
        )
    guess, inside = log(subject.vocab_size), native.in_window()
    if inside >= GUESSING * guess:
        words = [
            f"{rope.model} predicts next to nothing, also within the {window} positions that its config names: its "
            f"loss there is {inside:.3f} nats per token, and guessing among {subject.vocab_size} tokens gives "
            f"{guess:.3f}.",
            "Its weights are untrained or damaged, or the rows were made by another tokenizer. No advice on its window "
            "can be given.",
        ]
        return ProbeResult(native, None, None, {}, words)
    cliff, start = native.cliff(), native.cliff_start(tolerance=FLAT)
    words = [
        f"{rope.model} was trained on {window} positions. Its loss there is {inside:.3f} nats per token. Beyond them, "
        f"up to {seq_len}, its loss is {inside + cliff:.3f}."
    ]
    if start is None:
        words.append(
            "It does not rise up to there: far text does no harm. Whether the model uses it, loss does not show: "
            "measure it with `rope-patch eval --gain --passkey`."
        )
        return ProbeResult(native, None, None, {}, words)
    words.append(f"It rises for good at position {start}.")
    max_length = min(4096, window)
    skip: dict[str, object] = {
        "view": "skip",
        "view_args": {"skip": {"law": "uniform", "high": seq_len - max_length}},
        "max_length": max_length,
    }
    rope_type = rope.rope_parameters.get("rope_type", "default")
    if rope_type != "default":
        words += [f"The model already has a RoPE scaling ({rope_type}), so no other one was tried.", _SKIP_REASON]
        return ProbeResult(native, None, None, skip, words)
    factor = float(ceil(seq_len / window))
    patch_model(model, "yarn", factor=factor)
    try:
        yarn = loss_by_position(model, rows, progress=progress, title=f"YaRN {factor:g}x, untrained")
    finally:
        unpatch_model(model)
    penalty, left = in_distribution_penalty(yarn, native, window), yarn.cliff(window)
    words.append(
        f"YaRN {factor:g}x without training changes the loss within the window by {penalty:+.1f} %. Beyond "
        f"the window, it leaves a rise of {left:+.3f} nats, where it was {cliff:+.3f}."
    )
    if left > max(FLAT, cliff / 10):
        words.append(f"YaRN does not keep the loss from rising. {_SKIP_REASON}")
        return ProbeResult(native, yarn, factor, skip, words)
    words.append(
        "So rescale with YaRN. That may be enough as it is, and a short fine-tuning with a skip view makes it safe."
        if penalty <= CHEAP
        else f"So rescale with YaRN, and win back the {penalty:.1f} % with a short fine-tuning with a skip view, whose "
        "rows fit in the window."
    )
    return ProbeResult(native, yarn, factor, {"rescale": "yarn", "rescale_args": {"factor": factor}, **skip}, words)
