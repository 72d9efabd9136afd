"""The scale and soft cap that a family applies to its logits, and losses through its output head."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from rope_kernels import RowMetrics, linear_ce_kl


def logit_transform(config: Any) -> tuple[float, float | None]:
    """(scale, softcap) of z = softcap tanh(scale product / softcap), softcap None for none, by the text config.

    `logit_scale` (Cohere), `output_multiplier` and `lm_head_multiplier` (Falcon-H1) multiply, `logits_scaling` divides
    (Granite) except in HyperCLOVA X, and `final_logit_softcapping` bounds (Gemma).
    """
    scale = None
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if scale is None:
            scale = getattr(config, name, None)
    scaling = getattr(config, "logits_scaling", None)
    if scale is None and scaling is not None:
        scale = scaling if config.model_type == "hyperclovax" else 1 / scaling
    return 1.0 if scale is None else float(scale), getattr(config, "final_logit_softcapping", None)


def head_losses(
    causal_lm: Any,
    hidden_std: torch.Tensor,
    hidden_view: torch.Tensor | None,
    labels: torch.Tensor,
    ce_weight: torch.Tensor,
    kl_weight: torch.Tensor | None,
    teacher: tuple[Any, torch.Tensor] | None = None,
    *,
    temperature: float = 1.0,
    **options: Any,
) -> tuple[torch.Tensor, RowMetrics]:
    """`rope_kernels.linear_ce_kl` through the head of a causal LM, with its scale and soft cap of logits.

    Args:
        causal_lm: the causal LM.
        hidden_std: last hidden states, [N, H] of any floating dtype.
        hidden_view: those of the view, [N, H], or None for the cross-entropy alone.
        labels: [N].
        ce_weight: [N].
        kl_weight: [N] or None.
        teacher: output head and last hidden states of another model, [N, H_t], as target of the KL; None means the
            standard view.
        temperature: divides all logits, also those of the cross-entropy.
        **options: of `linear_ce_kl`.

    Raises:
        ValueError: an output head is quantized, or `linear_ce_kl` refuses an argument.
    """
    head = causal_lm.get_output_embeddings()
    other: Any = None if teacher is None else teacher[0]
    scale, softcap = logit_transform(causal_lm.config.get_text_config())
    # z / T has the form of z: softcap / T tanh(scale / T product / (softcap / T))
    scale, softcap = scale / temperature, None if softcap is None else softcap / temperature
    metrics: list[RowMetrics] = []  # filled by `loss`, as `_with_weights` returns one tensor

    def loss(
        hidden_std: torch.Tensor, hidden_view: torch.Tensor | None, hidden_teacher: torch.Tensor | None
    ) -> torch.Tensor:
        _require_floating(head, other)
        if hidden_teacher is not None:
            options["teacher_hidden"] = hidden_teacher.to(other.weight.dtype)
            options["teacher_weight"], options["teacher_bias"] = _beside(hidden_teacher, other)
        total, row_metrics = linear_ce_kl(
            hidden_std.to(head.weight.dtype),
            None if hidden_view is None else hidden_view.to(head.weight.dtype),
            head.weight,
            labels,
            ce_weight,
            kl_weight,
            bias=getattr(head, "bias", None),
            logit_scale=scale,
            softcap=softcap,
            **options,
        )
        metrics.append(row_metrics)
        return total

    total = _with_weights([head, other], loss, hidden_std, hidden_view, None if teacher is None else teacher[1])
    return total, metrics[0]


def head_kl(
    causal_lm: Any, teacher_head: Any, hidden: torch.Tensor, teacher_hidden: torch.Tensor, *, temperature: float = 1.0
) -> torch.Tensor:
    """sum_i KL(softmax(z_t / T) || softmax(z / T)) of rows i, in nats, through the heads of a causal LM and a teacher.

    Both sides have the scale and soft cap of the causal LM; there is no factor T^2.

    Args:
        causal_lm: the causal LM.
        teacher_head: the teacher's output head.
        hidden: last hidden states, [N, H] of any floating dtype.
        teacher_hidden: the teacher's last hidden states, [N, H_t] of any floating dtype, constants.
        temperature: T, above 0.

    Raises:
        ValueError: an output head is quantized, or `rope_kernels.linear_ce_kl` refuses an argument.

    Source: LinearARD, arXiv:2604.00004, its optional logit KL on the last positions.
    """
    ones = torch.ones(len(hidden), device=hidden.device)
    no_labels, no_ce = torch.full_like(ones, -100, dtype=torch.int64), torch.zeros_like(ones)
    teacher = teacher_head, teacher_hidden
    return head_losses(
        causal_lm,
        hidden.detach(),
        hidden,
        no_labels,
        no_ce,
        ones,
        teacher,
        temperature=temperature,
        direction="forward",
    )[0]


def _beside(hidden: torch.Tensor, head: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias of a teacher's head on the device of its hidden states; an offloaded copy is on the CPU."""
    bias = getattr(head, "bias", None)
    return head.weight.to(hidden.device), None if bias is None else bias.to(hidden.device)


def _require_floating(*heads: Any) -> None:
    """Refuse heads with integer weights, since hidden states are cast to the dtype of the weights."""
    for head in heads:
        if head is not None and not head.weight.is_floating_point():
            raise ValueError(
                "the loss multiplies by the weights of the output head, which must be floating point, got "
                f"{type(head).__name__} with {head.weight.dtype}: leave it out of quantization "
                "(llm_int8_skip_modules=['lm_head'] of BitsAndBytesConfig)."
            )


def _with_weights(heads: list[Any], compute: Callable[..., torch.Tensor], *hidden: torch.Tensor | None) -> torch.Tensor:
    """Call `compute(*hidden)`, which reads the weights of heads.

    DeepSpeed ZeRO-3 gathers a weight only for forward and backward of its module. So `compute` runs there as the
    forward of the heads, nested, and ZeRO-3's hooks gather the weights, release them and reduce their gradients. If a
    weight were read elsewhere, it would stay gathered through the model's forward.
    """
    for head in {id(head): head for head in heads if head is not None}.values():
        if any(hasattr(parameter, "ds_id") for parameter in head.parameters()):
            compute = partial(_as_forward_of, head, compute)  # the next head's forward calls this one's
    return compute(*hidden)


def _as_forward_of(head: Any, compute: Callable[..., torch.Tensor], *hidden: torch.Tensor | None) -> torch.Tensor:
    """`head(*hidden)` with its hooks and `compute` in place of its forward."""
    patched = vars(head).get("forward")  # other code may have patched this instance
    head.forward = compute
    try:
        output: torch.Tensor = head(*hidden)
    finally:
        if patched is None:
            del head.forward
        else:
            head.forward = patched
    return output
