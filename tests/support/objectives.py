"""Every objective on one batch, without a trainer: the loss with its gradients. Shared by CPU and GPU tests."""

from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from rope_patch import patch_model, rope_view
from rope_patch.layout.labelled import Labelled
from rope_patch.losses import (
    REQUEST,
    CopiedTeacher,
    HiddenDistiller,
    HiddenTargets,
    LogitKL,
    NativeDistiller,
    NativeRequest,
    NativeTargets,
    NextTokenRequest,
    RelationDistiller,
    RelationTargets,
    SelfDistiller,
    StandardRequest,
    ViewConsistency,
    ViewRequest,
)
from rope_patch.patch import view_source
from rope_patch.views import Uniform

from .cells import Cell, compare_gradients

VIEW = {"method": "skip", "skip": Uniform(1, 40)}
RELATIONS = {
    "relation-distill": RelationTargets(),
    "relation-distill pre": RelationTargets(rope="pre"),
    "relation-distill ATTN+V": RelationTargets(q=0.0, k=0.0, attention=1.0),
    "relation-distill mse": RelationTargets(divergence="mse"),
}
SELF = ("self-distill", "self-distill two passes", "self-distill sequential")
OBJECTIVES = ("clm", *SELF, *RELATIONS, "hidden-distill", "native-distill")


def loss_and_gradients(
    objective: str, model: Any, inputs: dict[str, Any], divisors: tuple[int, int], first_sample: int = 0
) -> torch.Tensor:
    """The loss of a batch; every token is a label. Gradients, where they are on, are added to those of the model.

    Args:
        objective: of `OBJECTIVES`.
        model: as it was loaded.
        inputs: keyword arguments of the model.
        divisors: labels and documents that sums are divided by: those of the step that the batch is a part of.
        first_sample: ordinal of its first document within the step.
    """
    model.train()
    if objective.startswith(("clm", "self")):
        patch_model(model, **VIEW)
        view_source(model).clock.set(3, first_sample)
        run = _next_token if objective == "clm" else _self_distill
        return run(objective, model, inputs, divisors)
    patch_model(model, "yarn", factor=4.0)
    if objective == "native-distill":
        patch_model(model, **VIEW)
        view_source(model).clock.set(3, first_sample)
        return _keep_native(model, inputs, divisors)
    return _teach(objective, model, inputs, divisors)


def _labelled(inputs: dict[str, Any]) -> Labelled:
    return Labelled.of({name: x for name, x in inputs.items() if isinstance(x, torch.Tensor)})


def _next_token(objective: str, model: Any, inputs: dict[str, Any], divisors: tuple[int, int]) -> torch.Tensor:
    logits = model(**inputs, use_cache=False).logits
    labels = _labelled(inputs).next_label
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / divisors[0]
    return _backward(loss)


def _backward(loss: torch.Tensor) -> torch.Tensor:
    if torch.is_grad_enabled():
        loss.backward()
    return loss.detach()


def _self_distill(objective: str, model: Any, inputs: dict[str, Any], divisors: tuple[int, int]) -> torch.Tensor:
    labelled, two_passes = _labelled(inputs), objective.endswith("two passes")
    distiller = SelfDistiller(model, ViewConsistency(kl_weight=0.7), one_pass=not two_passes)
    assert distiller.one_pass != two_passes

    def call(request: NextTokenRequest) -> torch.Tensor:
        model(**inputs, logits_to_keep=1, use_cache=False, **{REQUEST: request})
        return _backward(request.result.loss)

    with distiller.active():
        if not objective.endswith("sequential"):
            return call(ViewRequest(labelled, *divisors))
        earlier = StandardRequest(labelled, divisors[0])
        with rope_view(model, "standard"):
            first = call(earlier)
        return first + call(ViewRequest(labelled, *divisors, earlier))


def _keep_native(model: Any, inputs: dict[str, Any], divisors: tuple[int, int]) -> torch.Tensor:
    distiller = NativeDistiller(model, NativeTargets(clm_weight=0.5), CopiedTeacher(model))
    # every document has a token more than labels
    request = NativeRequest(_labelled(inputs), sum(divisors), divisors[0], divisors[0])
    with distiller.active():
        model(**inputs, use_cache=False, logits_to_keep=1, **{REQUEST: request})
        return _backward(request.loss)


def _teach(objective: str, model: Any, inputs: dict[str, Any], divisors: tuple[int, int]) -> torch.Tensor:
    teacher, options = CopiedTeacher(model), {}
    if objective == "hidden-distill":
        distiller: Any = HiddenDistiller(model, HiddenTargets(), teacher)
        options["output_hidden_states"] = True
    else:
        distiller = RelationDistiller(model, RELATIONS[objective], teacher, logit_kl=LogitKL(weight=0.5, last=4))
    with distiller.active():
        request = distiller.request(inputs["input_ids"], inputs.get("attention_mask"), inputs.get("position_ids"))
        model(**inputs, use_cache=False, logits_to_keep=1, **options, **{REQUEST: request})
        if objective == "hidden-distill":
            loss = request.distance
        else:
            loss = sum(w * request.loss(name) for name, w in distiller.targets.weights.items())
            loss = loss + 0.5 * request.logit_kl
        return _backward(loss / divisors[0])


def divisors_of(cell: Cell) -> tuple[int, int]:
    """Labels and documents of a batch."""
    return sum(len(ids) - 1 for ids in cell.documents), len(cell.documents)


def alone(objective: str, make_model: Any, cell: Cell) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """What `loss_and_gradients` must give for the batch: each document on its own, sums over them.

    Args:
        objective: of `OBJECTIVES`.
        make_model: gives a fresh model.
        one: the batch, of which only the documents are looked at.
    """
    losses, gradients = [], {}
    for ordinal, ids in enumerate(cell.documents):
        model = make_model()
        ids = ids[None].to(model.device)
        losses.append(loss_and_gradients(objective, model, {"input_ids": ids}, divisors_of(cell), ordinal))
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradients[name] = gradients.get(name, 0) + parameter.grad.double().cpu()
    return torch.stack(losses).sum(), gradients


def compare(
    model: Any, loss: torch.Tensor, expected: tuple[torch.Tensor, dict[str, torch.Tensor]], tolerance: float
) -> None:
    """Loss and every gradient."""
    assert abs(loss.item() / expected[0].item() - 1) < tolerance
    compare_gradients(model, expected[1], tolerance)
