"""Losses for a training loop of your own: one call a micro-batch, then `backward`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..forward.drawn_view import Batch, DrawnView
from ..forward.sources import ViewSource
from ..layout.labelled import Labelled, document_of_tokens
from ..patch import source_in_force
from ..rope.rotary import find_decoder
from ..views import View
from ..views.by_name import resolve_view
from .consistency import ViewConsistency
from .forward_loss import ForwardLoss, LossRequest, call_with
from .passes import ViewRequest
from .relations import RelationDistiller
from .self_distillation import SelfDistiller
from .targets import RelationTargets
from .teacher import OtherTeacher, SharedTeacher


def self_distillation_loss(
    model: nn.Module,
    batch: dict[str, Any],
    *,
    view: str | View | Mapping[str, Any],
    step: int,
    seed: int = 0,
    progress: float = 1.0,
    consistency: ViewConsistency | None = None,
    counts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Next-token loss at true positions, and the KL of a view's predictions to those, in nats.

        loss = mean over labels of -ln q(label)
        + kl_weight mean over documents of 1 / (L - s) sum_{t=s}^{L-2} KL(p_t || q_t)

    q is the next-token distribution at true positions, held fixed in the KL, and p that under the view, which moves a
    document of L tokens from token s on. `ViewConsistency` has the variants.

    A step of several micro-batches, or of several ranks, is the sum of its parts: add up `self_distillation_counts` of
    all micro-batches, on all ranks, and pass the sum to each call. DDP and FSDP average gradients over ranks: multiply
    the loss by their number there. A draw depends on seed, step and the tokens of the document alone.

    Args:
        model: a causal LM with RoPE in training mode, patched or not, bare or wrapped. A rescaling stays in force; the
            view replaces that of `patch_model`.
        batch: arguments of the model: `input_ids` [batch, n], and `labels` (-100 for none; without them every token has
            one), `attention_mask` (1 for real tokens) and `position_ids` (which count from 0 in each packed document)
            of that shape if there are any.
        view: a view, its name, or both name and options as `{"view": "skip", "split": 512}`.
        step: of the optimizer.
        seed: of the draws.
        progress: of training, from 0 to 1, for a view with a curriculum.
        consistency: weights, direction and means; None takes the paper's.
        counts: of the optimizer step, int64 [2]; None takes those of the batch.

    Returns:
        A scalar. Its backward may run at any time, also under gradient checkpointing.

    Raises:
        ValueError: the model is in evaluation mode, the view moves nothing, or the family cannot be distilled from
            itself.

    Source: RPSD, arXiv:2604.14339, Eq. 3-6.
    """
    if not find_decoder(model).training:
        raise ValueError("self_distillation_loss needs a model in training mode: call model.train() before it.")
    labelled = Labelled.of(batch)
    with _self_distiller(model, view, step, seed, progress, consistency) as distiller:
        # without labels, or without documents that the view can change, a sum is 0 and its divisor would be too
        n_labels, n_compared = (_counts(distiller, labelled) if counts is None else counts).clamp(min=1).tolist()
        request = ViewRequest(labelled, n_labels, n_compared)
        with distiller.active():
            tie = call_with(model, batch, request)
    loss = request.result.loss + tie  # tie is 0, with a graph to every parameter
    del request.result  # checkpointed layers hold the request: if it held their graph, neither would be freed
    return distiller.backward_outside(loss)


def self_distillation_counts(
    model: nn.Module,
    batch: dict[str, Any],
    *,
    view: str | View | Mapping[str, Any],
    step: int,
    seed: int = 0,
    progress: float = 1.0,
    consistency: ViewConsistency | None = None,
) -> torch.Tensor:
    """What a micro-batch adds to the divisors of `self_distillation_loss`, whose arguments these are.

    Returns:
        int64 [2] on the device of the batch: queries with a label, and the divisor of the KL. By default the latter is
        the number of documents in which the view can change a prediction that is compared.
    """
    with _self_distiller(model, view, step, seed, progress, consistency) as distiller:
        return _counts(distiller, Labelled.of(batch))


@contextmanager
def _self_distiller(
    model: nn.Module,
    view: str | View | Mapping[str, Any],
    step: int,
    seed: int,
    progress: float,
    consistency: ViewConsistency | None,
) -> Iterator[SelfDistiller]:
    source = _DrawnAt(view, step, seed, progress)
    with source_in_force(model, source):
        yield SelfDistiller(model, consistency or ViewConsistency(), source=source)


class _DrawnAt(ViewSource):
    """Draws for this step in evaluation too, by the tokens of each document."""

    def __init__(self, view: str | View | Mapping[str, Any], step: int, seed: int, progress: float) -> None:
        super().__init__(resolve_view(view), seed)
        self.clock.set_step(step, progress)

    def bind(self, batch: Batch) -> DrawnView:
        return super().bind(replace(batch, training=True))


def _counts(distiller: SelfDistiller, labelled: Labelled) -> torch.Tensor:
    return torch.tensor([labelled.n_labels, distiller.kl_count(labelled)], device=labelled.ids.device)


def relation_loss(
    student: nn.Module,
    teacher: nn.Module | SharedTeacher | OtherTeacher,
    batch: dict[str, Any],
    *,
    targets: RelationTargets | None = None,
    n_tokens: int | None = None,
) -> torch.Tensor:
    """Divergence of the student's relations between queries, keys and values from the teacher's, in nats.

        loss = sum_X weight_X mean over tokens i, layers and heads of KL(R_teacher(i) || R_student(i))

    with R(i) = softmax over j <= i of X_i X_j / sqrt(head_dim) within the document, and X in q, k and v.
    `RelationTargets` has the variants.

    Args:
        student: a causal LM with RoPE, patched or not, bare or wrapped. Its patches stay in force.
        teacher: another model with as many layers and heads, in evaluation mode, on the student's device; or
            `SharedTeacher(student)`, the student without its adapters and its rescaling; or `CopiedTeacher(student)`,
            made before training.
        batch: arguments of the model, as in `self_distillation_loss`; labels are not read.
        targets: which relations count; None takes the paper's.
        n_tokens: real tokens of the optimizer step, on all ranks; None takes those of the batch. DDP and FSDP average
            gradients over ranks: multiply the loss by their number there.

    Returns:
        A scalar. Its backward may run at any time, also under gradient checkpointing that is not reentrant.

    Raises:
        ValueError: the models do not fit each other, a copy has the student's RoPE, or the family hides its attention.

    Source: LinearARD, arXiv:2604.00004.
    """
    taught = OtherTeacher(teacher) if isinstance(teacher, nn.Module) else teacher
    distiller = RelationDistiller(student, targets or RelationTargets(), taught)
    request = distiller.request(batch["input_ids"], batch.get("attention_mask"), batch.get("position_ids"))
    with distiller.active():
        tie = call_with(student, batch, request)
    total = torch.stack([weight * request.loss(name) for name, weight in distiller.targets.weights.items()]).sum()
    total = total / max(1, int(request.valid.sum()) if n_tokens is None else n_tokens)
    request.sums = {layer: sums.detach() for layer, sums in request.sums.items()}  # see self_distillation_loss
    return distiller.backward_outside(total + tie)


class _StatesRequest(LossRequest):
    states: torch.Tensor


class _LastStates(ForwardLoss):
    def after(self, request: _StatesRequest, output: Any) -> None:
        request.states = output.last_hidden_state


def view_states(
    model: nn.Module,
    batch: dict[str, Any],
    *views: str | View | Mapping[str, Any] | None,
    step: int,
    seed: int = 0,
    progress: float = 1.0,
) -> list[torch.Tensor]:
    """Last hidden states of the same tokens under several views, to compare in a loss of your own.

    Each view has a forward of its own. Draws depend on seed, step and the tokens of the document alone, in evaluation
    too; all views have the same random numbers. `model.get_output_embeddings()` makes logits of the states in families
    that neither scale nor cap them.

    Args:
        model: a causal LM with RoPE, patched or not, bare or wrapped; a rescaling stays in force.
        batch: arguments of the model, as in `self_distillation_loss`; labels are not read.
        *views: views, their names, or `{"view": NAME, OPTION: ...}`; "standard" is true positions, and None what is in
            force: in training, the view of `patch_model` with its own draws.
        step: of the optimizer.
        seed: of the draws.
        progress: of training, from 0 to 1, for views with a curriculum.

    Returns:
        For each view [batch, n, hidden], with gradient; padding has any value. Backward may run at any time.
    """
    ids = batch["input_ids"]
    document = document_of_tokens(ids, batch.get("attention_mask"), batch.get("position_ids"))
    reader, states = _LastStates(model), []
    for view in views:
        request = _StatesRequest(document >= 0, document)  # padding is in document -1
        drawn = nullcontext() if view is None else source_in_force(model, _DrawnAt(view, step, seed, progress))
        with drawn, reader.active():
            tie = call_with(model, batch, request)
        states.append(reader.backward_outside(request.states + tie))
        del request.states
    return states
