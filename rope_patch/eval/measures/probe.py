"""A minute's look at a model: where its window ends, and what to do about it."""

from dataclasses import dataclass
from math import ceil, log

import torch
from torch import nn

from ...describe import describe
from ...patch import patch_model, unpatch_model
from .comparisons import in_distribution_penalty
from .loss_by_position import LossByPosition, loss_by_position
from .subject import Subject

# nats per token by which the loss beyond the window may exceed that within it, scatter of a few rows
FLAT = 0.1
# percent by which the loss within the window may rise before it is worth repairing
CHEAP = 2.0
# share of ln(vocabulary), the loss of a guess, from which on a model predicts next to nothing
GUESSING = 0.75


@dataclass(frozen=True)
class ProbeResult:
    """What `probe` returns. `print` it.

    Args:
        native: loss by position of the model as it is.
        yarn: the same rows under an untrained YaRN that reaches the end of the rows; None where none is needed.
        factor: of that YaRN.
        recipe: fields for `RopeSFTConfig`, or {} where nothing is to be done.
        words: the findings and the advice, one sentence an item.
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

    The advice compares what was measured on this model: nothing where there is no cliff; YaRN and a short fine-tuning
    on a skip view where YaRN alone flattens it; else fine-tuning on a skip view, which needs no rescaling. A model
    whose loss within the window is near that of a guess, ln(vocabulary), is named as one, and gets no advice.

    Args:
        model: a causal LM without patches; it is left as it was.
        rows: held-out token ids, int64 [n_rows, seq_len], longer than the trained window.
        progress: whether to show bars.

    Raises:
        ValueError: the rows do not reach beyond the window, the config names none, the model is patched, or its
            losses are not finite.
    """
    rope = describe(model)
    if rope.patched:
        raise ValueError(
            "probe tries a rescaling of its own and needs a model without patches: call unpatch_model first."
        )
    subject = Subject(model)
    window = subject.trained_window
    if window is None:
        raise ValueError("the model's config names no trained window, so there is no end of it to look for.")
    subject.check_rows(rows, at_least=window + 2)
    native = loss_by_position(model, rows, progress=progress, title="as it is")
    if not native.loss[1:].isfinite().all():  # comparisons with NaN are false, and would read as a cliff
        raise ValueError(
            f"the losses of {rope.model} are not finite, so nothing can be said of its window: load it in another "
            "dtype, as --dtype float32 does, and look whether its weights are whole."
        )
    guess = log(subject.vocab_size)
    if native.in_window() >= GUESSING * guess:
        words = [
            f"{rope.model} predicts next to nothing, also within the {window} positions that its config names: its "
            f"loss there is {native.in_window():.3f} nats per token, and guessing among {subject.vocab_size} tokens "
            f"gives {guess:.3f}.",
            "Its weights are untrained or damaged, or the rows were made by another tokenizer. No advice on its window "
            "can be given.",
        ]
        return ProbeResult(native, None, None, {}, words)
    cliff, start, inside = native.cliff(), native.cliff_start(tolerance=FLAT), native.in_window()
    words = [
        f"{rope.model} was trained on {window} positions. Its loss there is {inside:.3f} nats per token, beyond them, "
        f"up to {rows.shape[1]}, it is {inside + cliff:.3f}."
    ]
    if start is None:
        words.append(
            f"There is no cliff up to {rows.shape[1]} tokens: far text does no harm. Whether the model uses it is not "
            "told by loss, but by `rope-patch eval --gain --passkey`."
        )
        return ProbeResult(native, None, None, {}, words)
    words.append(f"The cliff begins at position {start}.")
    if rope.rope_parameters.get("rope_type", "default") != "default":
        words.append(
            f"Its RoPE is rescaled already ({rope.rope_parameters['rope_type']}), so no other rescaling was tried."
        )
        return ProbeResult(native, None, None, _skip_recipe(window, rows.shape[1], {}), [*words, _SKIP_REASON])
    factor = float(ceil(rows.shape[1] / window))
    patch_model(model, "yarn", factor=factor)
    try:
        yarn = loss_by_position(model, rows, progress=progress, title=f"YaRN {factor:g}x, untrained")
    finally:
        unpatch_model(model)
    penalty, left = in_distribution_penalty(yarn, native, window), yarn.cliff(window)
    words.append(
        f"YaRN {factor:g}x without any training changes the loss within the window by {penalty:+.1f} % and leaves a "
        f"cliff of {left:+.3f} nats, where it was {cliff:+.3f}."
    )
    if left <= max(FLAT, cliff / 10):
        rescale: dict[str, object] = {"rescale": "yarn", "rescale_args": {"factor": factor}}
        words.append(
            "So rescale with YaRN"
            + (
                "; that may be enough as it is, and a short fine-tuning on a skip view makes it sure."
                if penalty <= CHEAP
                else f", and win back the {penalty:.1f} % with a short fine-tuning on a skip view: rows fit the window."
            )
        )
        return ProbeResult(native, yarn, factor, _skip_recipe(window, rows.shape[1], rescale), words)
    words.append(f"YaRN does not flatten the cliff. {_SKIP_REASON}")
    return ProbeResult(native, yarn, factor, _skip_recipe(window, rows.shape[1], {}), words)


_BY_LOSS = (
    "All of this goes by loss, which does not tell what the model finds in long text: trained on books under YaRN and "
    "such skips, SmolLM2-135M found fewer passkeys in 2048 tokens than before. Where answers count, take "
    "`rope-patch extend`, which trains with questions."
)
_SKIP_REASON = (
    "Fine-tune on a skip view: rows stay as short as the window, and every step reads positions up to the wanted "
    "length."
)


def _skip_recipe(window: int, target: int, rescale: dict[str, object]) -> dict[str, object]:
    max_length = min(4096, window)
    return {
        **rescale,
        "view": "skip",
        "view_args": {"skip": {"law": "uniform", "high": target - max_length}},
        "max_length": max_length,
    }
