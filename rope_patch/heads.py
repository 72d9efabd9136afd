"""What a family does to the products of its head before they are logits."""

from typing import Any


def logit_transform(config: Any) -> tuple[float, float | None]:
    """(scale, softcap) of z = softcap tanh(scale product / softcap), softcap None for none.

    `logit_scale` (Cohere), `output_multiplier` and `lm_head_multiplier` (Falcon-H1) multiply, `logits_scaling` divides
    (Granite) except in HyperCLOVA X, and `final_logit_softcapping` bounds (Gemma).

    Args:
        config: of the text model.
    """
    scale = None
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if scale is None:
            scale = getattr(config, name, None)
    scaling = getattr(config, "logits_scaling", None)
    if scale is None and scaling is not None:
        scale = scaling if config.model_type == "hyperclovax" else 1 / scaling
    return 1.0 if scale is None else float(scale), getattr(config, "final_logit_softcapping", None)
