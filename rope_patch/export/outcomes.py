"""RoPE parameters that each program serves wrong: data, from running the programs.

docs/serving.md has the whole table with the versions. What is not listed was found right, for the families in `TESTED`.
"""

import copy
import math
from dataclasses import dataclass
from typing import Any

from ..rope.rotary import has_own_attention_factor, is_longrope, is_nested, with_factor

TESTED = ("llama", "qwen2", "qwen3", "mistral", "gemma3_text", "phi3")
"""Model types that the programs were tested with."""

# keys of RoPE parameters that some program reads -> model types for which Transformers reads them too. mlx-lm prefers
# `type` to `rope_type`; `alpha` is read under 'dynamic', the mscales under 'longrope', the others under 'yarn'
_READ_ELSEWHERE: dict[str, tuple[str, ...]] = {
    "type": (),
    "alpha": ("hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text"),
    "short_mscale": ("phimoe",),
    "long_mscale": ("phimoe",),
    "attn_factor": (),
    "extrapolation_factor": (),
    "apply_yarn_scaling": (),
}

# values that every program takes by default, so that such an option changes nothing
_DEFAULTS = {"beta_fast": 32, "beta_slow": 1, "truncate": True, "attention_factor": None}


@dataclass(frozen=True)
class Wrong:
    """RoPE parameters that a program serves wrong.

    Args:
        program: its name in `PROGRAMS`.
        rope_type: of the RoPE parameters.
        reason: what the program does, to follow its name in a sentence.
        instead: what the user can do.
        options: keys of the RoPE parameters, any of which is served wrong; () if the rope type is.
        families: model types that are served wrong; () for all.
        right_for: model types that are served right.
        folds: whether folding the attention factor into the weights makes it right.
        by_length: whether only long_factor and short_factor that differ are served wrong.
    """

    program: str
    rope_type: str
    reason: str
    instead: str
    options: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    right_for: tuple[str, ...] = ()
    folds: bool = False
    by_length: bool = False


_RESCALE = "Rescale with 'yarn' without further options, 'ntk' or 'abf', which it serves right, and train again"
_TRANSFORMERS = "or serve it with Transformers"

OUTCOMES = (
    Wrong(
        "vllm",
        "longrope",
        "gives rows within the trained window the long factors",
        f"{_RESCALE}, {_TRANSFORMERS}.",
        by_length=True,
    ),
    Wrong("vllm", "longrope", "ignores attention_factor", "", options=("attention_factor",), folds=True),
    # https://github.com/vllm-project/vllm/pull/55910
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
        "does not rescale at all",
        f"{_RESCALE}, {_TRANSFORMERS}.",
        right_for=("phi3",),
    ),
    Wrong(
        "llama.cpp",
        "longrope",
        "gives all rows the factors of the context that it is served with",
        f"{_RESCALE}, {_TRANSFORMERS}.",
        families=("phi3",),
        by_length=True,
    ),
    Wrong(
        "llama.cpp",
        "longrope",
        "ignores attention_factor",
        "",
        options=("attention_factor",),
        families=("phi3",),
        folds=True,
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
    Wrong(
        "mlx",
        "longrope",
        "gives rows within the trained window the long factors",
        f"{_RESCALE}, {_TRANSFORMERS}.",
        by_length=True,
    ),
    Wrong("mlx", "longrope", "ignores attention_factor", "", options=("attention_factor",), folds=True),
    Wrong(
        "mlx",
        "dynamic",
        "takes another base for each part of a prompt that it reads, and keeps the keys of the parts before",
        f"{_RESCALE}, {_TRANSFORMERS}.",
    ),
)


def as_transformers_reads(config: Any, *, scales_softmax: bool) -> dict[str, Any]:
    """The RoPE parameters of a text config without options that other programs read and Transformers ignores.

    Args:
        config: of the text model.
        scales_softmax: whether `mscale_all_dim` scales the softmax of its family.
    """
    parameters = config.rope_parameters
    if not is_nested(parameters):
        return _as_read(parameters, config.model_type, scales_softmax)
    return {
        # Transformers looks for `truncate` beside the layer types, not in them
        layer_type: options
        and {k: v for k, v in _as_read(options, config.model_type, scales_softmax).items() if k != "truncate"}
        for layer_type, options in parameters.items()
    }


def _as_read(parameters: dict[str, Any], model_type: str, scales_softmax: bool) -> dict[str, Any]:
    ignored = {key for key, families in _READ_ELSEWHERE.items() if model_type not in families}
    # Transformers reads both mscales or none, and none beside an attention factor; programs also read one alone
    if parameters.get("attention_factor") is not None or not (
        parameters.get("mscale") and parameters.get("mscale_all_dim")
    ):
        ignored |= {"mscale"} if scales_softmax else {"mscale", "mscale_all_dim"}
    return {key: copy.deepcopy(value) for key, value in parameters.items() if key not in ignored}


def wrong_outcomes(program: str, config: Any) -> list[Wrong]:
    """The RoPE parameters of a text config that `program` would serve wrong."""
    parameters = config.rope_parameters
    by_layer_type = parameters.values() if is_nested(parameters) else [parameters]
    return [wrong for wrong in OUTCOMES if any(o and _holds(wrong, program, o, config) for o in by_layer_type)]


def _holds(wrong: Wrong, program: str, parameters: dict[str, Any], config: Any) -> bool:
    if (wrong.program, wrong.rope_type) != (program, parameters.get("rope_type")):
        return False
    if config.model_type in wrong.right_for or (wrong.families and config.model_type not in wrong.families):
        return False
    if wrong.by_length and parameters["long_factor"] == parameters["short_factor"]:
        return False
    set_options = {key for key, value in parameters.items() if key not in _DEFAULTS or value != _DEFAULTS[key]}
    if is_longrope(wrong.rope_type):
        # programs take LongRoPE's attention factor from the windows, whatever `factor` says
        window = config.max_position_embeddings
        stretch = max(1.0, window / parameters["original_max_position_embeddings"])
        if not math.isclose(with_factor(parameters, window)["factor"], stretch, rel_tol=1e-3):
            set_options.add("attention_factor")
        elif not has_own_attention_factor(parameters, window):
            set_options.discard("attention_factor")
    return not wrong.options or bool(set_options.intersection(wrong.options))
