"""What each program makes of each rope type, as far as it is not right: data, from running the programs.

docs/serving.md has the whole table with the versions. What is not listed here was found right, for the families in
`TESTED`.
"""

import copy
from dataclasses import dataclass
from typing import Any

from ..rope.rotary import is_nested

TESTED = ("llama", "qwen2", "qwen3", "mistral", "gemma3_text", "phi3")
"""Model types that the programs were run with."""

# keys of RoPE parameters that some program reads -> model types for which Transformers reads them, too. `type` comes
# before `rope_type` in mlx-lm; `alpha` is read under 'dynamic', the mscales under 'longrope', the others under 'yarn'
_READ_ELSEWHERE: dict[str, tuple[str, ...]] = {
    "type": (),
    "alpha": ("hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text"),
    "short_mscale": ("phimoe",),
    "long_mscale": ("phimoe",),
    "attn_factor": (),
    "extrapolation_factor": (),
    "apply_yarn_scaling": (),
}

# options that are there in name only: what every program does without them
_DEFAULTS = {"beta_fast": 32, "beta_slow": 1, "truncate": True, "attention_factor": None}


@dataclass(frozen=True)
class Wrong:
    """RoPE parameters that a program serves wrong.

    Args:
        program: its name in `PROGRAMS`.
        rope_type: of the RoPE parameters.
        reason: what the program does instead, as the end of "llama.cpp ...".
        instead: what to do about it.
        options: keys of theirs, any of which makes it wrong; () where the type itself does.
        families: model types that it holds for; () for all.
        right_for: model types that it does not hold for.
        folds: whether it is mended by folding the attention factor into the weights.
    """

    program: str
    rope_type: str
    reason: str
    instead: str
    options: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    right_for: tuple[str, ...] = ()
    folds: bool = False


_RESCALE = "Rescale with 'yarn' without further options, 'ntk' or 'abf', which it serves right, and train again"
_TRANSFORMERS = "or serve it with Transformers"

OUTCOMES = (
    Wrong("vllm", "longrope", "gives rows within the trained window the long factors", f"{_RESCALE}, {_TRANSFORMERS}."),
    Wrong("vllm", "dynamic", "ends its table at the trained window", f"{_RESCALE}, {_TRANSFORMERS}."),
    *(
        Wrong(
            "sglang",
            rope_type,
            "does not rescale at all",
            "Rescale with 'ntk' or 'abf', which it serves right, and train again, or serve it with vLLM.",
            families=("gemma3_text",),
        )
        for rope_type in ("linear", "yarn", "llama3", "longrope")
    ),
    Wrong("sglang", "yarn", "ignores attention_factor", "", options=("attention_factor",), folds=True),
    Wrong("sglang", "longrope", "ignores attention_factor", "", options=("attention_factor",), folds=True),
    Wrong("sglang", "dynamic", "does not follow the length of the row", f"{_RESCALE}, {_TRANSFORMERS}."),
    Wrong(
        "llama.cpp",
        "yarn",
        "ignores attention_factor, mscale and mscale_all_dim",
        "",
        options=("attention_factor", "mscale", "mscale_all_dim"),
        folds=True,
    ),
    Wrong(
        "llama.cpp",
        "yarn",
        "takes beta_fast 32 and beta_slow 1 whatever the checkpoint says, and always rounds",
        "Leave out beta_fast, beta_slow and truncate and train again, or serve it with vLLM or Transformers.",
        options=("beta_fast", "beta_slow", "truncate"),
    ),
    Wrong(
        "llama.cpp",
        "llama3",
        "reads these RoPE parameters for Llama and Mistral only",
        f"{_RESCALE}, or serve it with vLLM or Transformers.",
        right_for=("llama", "mistral"),
    ),
    Wrong(
        "llama.cpp",
        "longrope",
        "does not rescale at all or, for Phi-3, gives all rows the factors of the context that it is served with",
        f"{_RESCALE}, {_TRANSFORMERS}.",
    ),
    Wrong("llama.cpp", "dynamic", "does not rescale at all", f"{_RESCALE}, {_TRANSFORMERS}."),
    Wrong("mlx", "yarn", "ignores attention_factor", "", options=("attention_factor",), folds=True),
    Wrong(
        "mlx",
        "yarn",
        "always rounds the ends of the ramp",
        "Leave out truncate and train again, or serve it with vLLM or Transformers.",
        options=("truncate",),
    ),
    Wrong("mlx", "longrope", "gives rows within the trained window the long factors", f"{_RESCALE}, {_TRANSFORMERS}."),
    Wrong(
        "mlx",
        "dynamic",
        "takes another base for each part of a prompt that it reads, and keeps the keys of the parts before",
        f"{_RESCALE}, {_TRANSFORMERS}.",
    ),
)


def as_transformers_reads(config: Any, *, scales_softmax: bool) -> dict[str, Any]:
    """The RoPE parameters of a text config without what programs would read there and Transformers does not.

    Args:
        config: of the text model.
        scales_softmax: whether `mscale_all_dim` scales the softmax of its family.
    """
    parameters = config.rope_parameters
    if not is_nested(parameters):
        return _as_read(parameters, config.model_type, scales_softmax)
    return {
        # `truncate` Transformers looks for beside the layer types
        layer_type: of_type
        and {k: v for k, v in _as_read(of_type, config.model_type, scales_softmax).items() if k != "truncate"}
        for layer_type, of_type in parameters.items()
    }


def _as_read(parameters: dict[str, Any], model_type: str, scales_softmax: bool) -> dict[str, Any]:
    ignored = {key for key, families in _READ_ELSEWHERE.items() if model_type not in families}
    # Transformers takes both or neither, and neither beside an attention factor; programs take one alone, too
    if parameters.get("attention_factor") is not None or not (
        parameters.get("mscale") and parameters.get("mscale_all_dim")
    ):
        ignored |= {"mscale"} if scales_softmax else {"mscale", "mscale_all_dim"}
    return {key: copy.deepcopy(value) for key, value in parameters.items() if key not in ignored}


def wrong_outcomes(program: str, config: Any) -> list[Wrong]:
    """What `program` would make wrong of the RoPE parameters of a text config."""
    parameters = config.rope_parameters
    of_layer_types = parameters.values() if is_nested(parameters) else [parameters]
    return [wrong for wrong in OUTCOMES if any(o and _holds(wrong, program, o, config) for o in of_layer_types)]


def _holds(wrong: Wrong, program: str, parameters: dict[str, Any], config: Any) -> bool:
    if (wrong.program, wrong.rope_type) != (program, parameters.get("rope_type")):
        return False
    if config.model_type in wrong.right_for or (wrong.families and config.model_type not in wrong.families):
        return False
    set_options = {key for key, value in parameters.items() if key not in _DEFAULTS or value != _DEFAULTS[key]}
    return not wrong.options or bool(set_options.intersection(wrong.options))
