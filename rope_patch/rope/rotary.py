"""The rotary modules of a Transformers model, the decoder that calls them, and their state."""

import inspect
import math
import re
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..base.family_table import family_of

_ROTARY_CLASS = re.compile(r"(Rotary|RoPE|Rope).*Embed")
# attributes that DeepSpeed ZeRO-3 adds to every module
_OF_DEEPSPEED = re.compile(r"ds_|(pre|post)_bwd_fn$|applied_pre_backward_ref_cnt$")
# attributes of every module, or that other libraries add
_OF_OTHERS = ("training", "config", "forward")
# what torch.compile, checkpointing and FSDP1 add to the names of modules that they wrap
_WRAPPERS = re.compile(r"\b(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
_OTHER_MODALITIES = ("vision", "visual", "image", "audio")

# relative error of frequencies after a cast to bfloat16, which has 8 bits; different RoPE parameters differ by more
_ROUNDING = 2**-7
# relative error of one formula in float32 on different devices; a cast to 16 bits rounds some frequency by more
_LAST_BITS = 1e-6


def text_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """`named_modules()` without image and audio encoders."""
    for name, module in model.named_modules():
        if not is_of_other_modality(name):
            yield name, module


def is_of_other_modality(name: str) -> bool:
    """Whether a module of this name belongs to an image or audio encoder."""
    return any(part in name for part in _OTHER_MODALITIES)


def named_rotary_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Every rotary module of the text decoder with its name, found by class name and the argument `position_ids`.

    Attribute names differ between families: `rotary_emb`, `pos_emb`, `rotary_embs.0`, `rotary_emb_local`.
    """
    return _rotary_among(model.named_modules())


def _rotary_among(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, Any]]:
    for name, module in modules:
        if isinstance(module, PreTrainedModel) or not _ROTARY_CLASS.search(type(module).__name__):
            continue
        if getattr(module, "config", None) is None or is_of_other_modality(name):
            continue
        if "position_ids" in inspect.signature(type(module).forward).parameters:
            yield name, module


def rotary_by_name(decoder: nn.Module) -> dict[str, Any]:
    """Every rotary module by `own_name`, which stays the same when layers are wrapped after the patch."""
    return {own_name(name): module for name, module in named_rotary_modules(decoder)}


def own_name(name: str) -> str:
    """A module's name without wrappers that may be added later."""
    return _WRAPPERS.sub("", name)


def parameter_names(decoder: nn.Module) -> tuple[str, ...]:
    """Argument names of a decoder's forward, in order: some families pass arguments by position."""
    return tuple(inspect.signature(type(decoder).forward).parameters)[1:]


def find_decoder(model: nn.Module) -> PreTrainedModel:
    """The innermost Transformers model that holds all rotary modules, e.g. the `LlamaModel` of a `LlamaForCausalLM`.

    The view is applied there: some versions of PEFT call the inner model directly, and every wrapper around the whole
    model (DDP, compile, PEFT) keeps it.

    Raises:
        ValueError: no Transformers model, none with RoPE, or several decoders with RoPE.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model must be a loaded model, got {model!r}: load it with AutoModelForCausalLM.from_pretrained."
            if isinstance(model, str)
            else f"model must be a loaded model, got {type(model).__name__}."
        )
    known = None if torch.compiler.is_compiling() else _known_decoder(model)  # Dynamo cannot trace weak references
    if known is not None:
        return known
    modules = list(model.named_modules())  # once: each walk through a patched decoder reads the call stack
    rotary = dict(_rotary_among(modules))
    candidates = [m for _, m in modules if isinstance(m, PreTrainedModel)]
    if not candidates:
        raise ValueError(
            f"model must be or wrap a transformers.PreTrainedModel, got {type(model).__name__}, which holds none."
        )
    if not rotary:
        config = candidates[0].config
        reason = family_of(config).no_rotary_module or "no rotary module was found in it"
        raise ValueError(
            f"model type {config.model_type!r} has no RoPE that can be patched: {reason}. Use a model whose decoder "
            "has a rotary module, as Llama, Qwen, Mistral and Gemma have."
        )
    owners = _owners(model, rotary)
    if len(owners) > 1:
        names = ", ".join(sorted(type(owner).__name__ for owner in owners))
        inside = {id(module) for module in find_causal_lm(model).modules()}
        if not inside.issuperset(map(id, owners)):
            raise ValueError(
                f"the adapter of this {type(model).__name__} has a decoder with RoPE of its own ({names}), as PEFT's "
                "Shadow has: a patch would hold for one of them. A view does not go with such an adapter. A rescaling "
                "does where it comes first: call patch_model(base, ...) before get_peft_model, which copies the "
                "rescaled config. From then on give rope_patch the base model, model.get_base_model()."
            )
        raise ValueError(
            f"model type {candidates[0].config.model_type!r} has RoPE in several transformers ({names}) over sequences "
            "of their own, such as bytes and patches of bytes: a view has no one meaning there."
        )
    inner = set(rotary.values())
    # modules() lists parents before children
    name, decoder = [(n, m) for n, m in modules if isinstance(m, PreTrainedModel) and inner <= set(m.modules())][-1]
    if not torch.compiler.is_compiling():
        _DECODERS[model] = (name, weakref.ref(decoder))
    return decoder


# of each model, the name of its decoder and the decoder: each forward looks for it, and a walk through all modules of
# a large model takes milliseconds
_DECODERS: "weakref.WeakKeyDictionary[nn.Module, tuple[str, weakref.ref[PreTrainedModel]]]" = (
    weakref.WeakKeyDictionary()
)


def _known_decoder(model: nn.Module) -> PreTrainedModel | None:
    """The decoder that `find_decoder` found in `model` before; None if it is no longer at that name."""
    name, decoder = _DECODERS.get(model, ("", None))
    if decoder is None:
        return None
    try:
        return decoder() if model.get_submodule(name) is decoder() else None
    except AttributeError:  # wrapped since, e.g. by FSDP
        return None


def rotary_owners(model: nn.Module) -> list[nn.Module]:
    """The innermost Transformers models with rotary modules; several if parts read different sequences."""
    return _owners(model, dict(named_rotary_modules(model)))


def _owners(model: nn.Module, rotary: Iterable[str]) -> list[nn.Module]:
    return list(dict.fromkeys(_owner(model, name) for name in rotary))  # modules compare by identity


def _owner(model: nn.Module, name: str) -> nn.Module:
    """The innermost Transformers model that holds the module of this name."""
    holder = owner = model
    for part in name.split("."):
        if isinstance(holder, PreTrainedModel):
            owner = holder
        holder = getattr(holder, part)
    return owner


def find_causal_lm(model: nn.Module) -> PreTrainedModel:
    """The outermost Transformers model inside any wrapper (PEFT, DDP, compile)."""
    return next(m for m in model.modules() if isinstance(m, PreTrainedModel))


def base_model_name(causal_lm: nn.Module) -> str | None:
    """Name of the child that computes hidden states from token IDs; None if there is none."""
    prefix, children = getattr(causal_lm, "base_model_prefix", None), dict(causal_lm.named_children())
    if prefix in children:  # not in Llama 4 and Mllama, whose `base_model` is the whole model
        return prefix
    return next((name for name, child in children.items() if isinstance(child, PreTrainedModel)), None)


def find_base_model(causal_lm: Any) -> Any:
    """The child of `base_model_name`, or `causal_lm` itself if there is none."""
    name = base_model_name(causal_lm)
    return causal_lm if name is None else getattr(causal_lm, name)


def layers_call_rotary(decoder: nn.Module) -> bool:
    """Whether layers hold rotary modules, so that gradient checkpointing runs them again in backward."""
    layers = [module for module in decoder.modules() if isinstance(module, nn.ModuleList)]
    inside = {id(m) for group in layers for _, m in named_rotary_modules(group)}
    owners = {id(m) for group in layers for m in group}
    return bool(inside - owners)


def is_nested(rope_parameters: dict[str, Any]) -> bool:
    """Whether RoPE parameters are a dictionary per layer type, with None for types without RoPE."""
    return bool(rope_parameters) and all(value is None or isinstance(value, dict) for value in rope_parameters.values())


def with_factor(parameters: dict[str, Any], window: int | None) -> dict[str, Any]:
    """RoPE parameters of one set of frequencies, with the default factor of Transformers filled in.

    For 'longrope' and 'yarn' it is window / L0, with `window` from the config. So the attention factor depends on the
    window.
    """
    has_default = parameters.get("rope_type") in ("longrope", "yarn") and parameters.get("factor") is None
    if window is None or not has_default:
        return parameters
    return {**parameters, "factor": window / parameters["original_max_position_embeddings"]}


def with_factors(rope_parameters: dict[str, Any], window: int | None) -> dict[str, Any]:
    """`with_factor` for `rope_parameters`, which may differ by layer type."""
    if is_nested(rope_parameters):
        return {layer_type: of_type and with_factor(of_type, window) for layer_type, of_type in rope_parameters.items()}
    return with_factor(rope_parameters, window)


def has_own_attention_factor(parameters: dict[str, Any], window: int | None) -> bool:
    """Whether RoPE parameters have another attention factor than Transformers' default."""
    own, rope_type = parameters.get("attention_factor"), parameters["rope_type"]
    if own is None or rope_type not in ("yarn", "longrope"):
        return False
    stretch = math.log(max(1.0, with_factor(parameters, window)["factor"]))
    if rope_type == "longrope":
        formula = math.sqrt(1 + stretch / math.log(parameters["original_max_position_embeddings"]))
    else:
        over, under = parameters.get("mscale"), parameters.get("mscale_all_dim")
        over, under = (over, under) if over and under else (1.0, 0.0)  # 0.1 ln(factor) + 1
        formula = (0.1 * over * stretch + 1) / (0.1 * under * stretch + 1)
    return not math.isclose(own, formula, rel_tol=1e-6)


def rope_types(module: Any) -> set[str]:
    """RoPE types of a rotary module."""
    return set(_types_by_prefix(module).values())


def _types_by_prefix(module: Any) -> dict[str, str]:
    """RoPE types of a rotary module by the prefix of its buffers' names, "" or one per layer type."""
    rope_type = getattr(module, "rope_type", "default")
    of_prefix = {f"{name}_": t for name, t in rope_type.items()} if isinstance(rope_type, dict) else {"": rope_type}
    return {prefix: t for prefix, t in of_prefix.items() if t is not None}


def is_dynamic(rope_type: str) -> bool:
    """Whether a RoPE type changes its frequencies at a longer sequence and keeps them afterwards."""
    return "dynamic" in rope_type


def is_longrope(rope_type: str) -> bool:
    """Whether a RoPE type chooses one of two sets of frequencies by the largest index of a forward."""
    return rope_type == "longrope"


def depends_on_length(rope_type: str) -> bool:
    """Whether the frequencies of a RoPE type depend on the largest index of a forward."""
    return is_dynamic(rope_type) or is_longrope(rope_type)


def frequencies_go_by_row(module: Any) -> bool:
    """Whether the frequencies of a rotary module depend on the largest index of a forward.

    Those of 'longrope' with equal short_factor and long_factor do not.
    """
    parameters = getattr(module.config, "rope_parameters", None) or {}
    one_set = not is_nested(parameters) and parameters.get("short_factor") == parameters.get("long_factor")
    return any(is_dynamic(t) or (is_longrope(t) and not one_set) for t in rope_types(module))


def configs_of_forwards(decoder: nn.Module) -> dict[str, Any]:
    """Configs, by `own_name`, of the rotary modules that read RoPE parameters from the config in every forward."""
    return {
        name: module.config
        for name, module in rotary_by_name(decoder).items()
        if any(map(depends_on_length, rope_types(module)))
    }


@contextmanager
def frequencies_kept(model: nn.Module) -> Iterator[None]:
    """Skip LongRoPE's choice between short and long divisors where both are equal.

    Transformers reads the largest index in each forward of 'longrope'. Before 5.21 this waits for the GPU and cannot be
    part of a CUDA graph.
    """
    named = {
        module: module.rope_type
        for _, module in named_rotary_modules(model)
        if any(map(depends_on_length, rope_types(module))) and not frequencies_go_by_row(module)
    }
    for module in named:
        module.rope_type = "default"
    try:
        yield
    finally:
        for module, rope_type in named.items():
            module.rope_type = rope_type


def _growing_prefixes(module: Any) -> list[str]:
    """Prefixes of the buffers' names of the 'dynamic' RoPE types of a rotary module."""
    return [prefix for prefix, t in _types_by_prefix(module).items() if is_dynamic(t)]


def forget_rows(model: nn.Module) -> None:
    """Restore the initial frequencies of a 'dynamic' RoPE type.

    Transformers keeps those of the longest sequence so far, so outputs beyond the window depend on earlier inputs.
    """
    for _, module in named_rotary_modules(model):
        for prefix in _growing_prefixes(module):
            original = getattr(module, f"{prefix}original_inv_freq")
            device = getattr(module, f"{prefix}inv_freq").device
            module.register_buffer(f"{prefix}inv_freq", original.to(device), persistent=False)
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


@contextmanager
def rows_forgotten(model: nn.Module) -> Iterator[None]:
    """After the block, restore the frequencies that a 'dynamic' RoPE type had before it."""
    before = [(m, RotaryState.of(m)) for _, m in named_rotary_modules(model) if _growing_prefixes(m)]
    try:
        yield
    finally:
        for module, state in before:
            state.write(module)


def rotary_states(decoder: nn.Module) -> "dict[str, RotaryState]":
    """The `RotaryState` of every rotary module, by `own_name`."""
    return {name: RotaryState.of(module) for name, module in rotary_by_name(decoder).items()}


def is_recomputed(module: Any, buffer: str) -> bool:
    """Whether a buffer of a rotary module is chosen anew by each forward."""
    return any(map(depends_on_length, rope_types(module))) and not buffer.endswith("original_inv_freq")


@dataclass(frozen=True)
class RotaryState:
    """Everything in a rotary module that depends on its RoPE parameters.

    Args:
        attributes: plain attributes such as `rope_type`, `attention_scaling`, `max_seq_len_cached`.
        buffers: `inv_freq` and `original_inv_freq`, float32, radians per position, and whether each is persistent.
        held: the module's tensors, on its device, that are known to have the values of `buffers`.
    """

    attributes: dict[str, Any]
    buffers: dict[str, tuple[torch.Tensor, bool]]
    held: dict[str, torch.Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __reduce__(self) -> "tuple[type[RotaryState], tuple[Any, ...]]":
        # without `held`, which may be on a device that the reader does not have
        return RotaryState, (self.attributes, self.buffers)

    @classmethod
    def of(cls, module: nn.Module) -> "RotaryState":
        """The state of `module`, with the same tensors."""
        attributes = {
            n: v
            for n, v in vars(module).items()
            if not (n.startswith("_") or n in _OF_OTHERS or _OF_DEEPSPEED.match(n))
        }
        buffers = {
            n: (b, n not in module._non_persistent_buffers_set) for n, b in module._buffers.items() if b is not None
        }
        return cls(attributes, buffers)

    def write(self, module: nn.Module) -> None:
        """Write this state to `module`, which keeps its hooks and config."""
        device = next((b.device for b in module.buffers()), torch.device("cpu"))
        for name in set(RotaryState.of(module).attributes) - set(self.attributes):
            delattr(module, name)
        for name, value in self.attributes.items():
            setattr(module, name, value)
        for name, (buffer, persistent) in self.buffers.items():
            self.held[name] = buffer.to(device)
            module.register_buffer(name, self.held[name], persistent=persistent)

    def was_rounded_in(self, module: nn.Module) -> bool:
        """Whether `module`, which should have this state, was cast to 16 bits. torch.compile can trace this."""
        return any(_is_rounded(getattr(module, name)) for name in self.buffers)

    def was_replaced_in(self, module: nn.Module) -> bool:
        """Whether `module`, which should have this state, has other frequencies, e.g. after a cast down and up again.

        A new tensor is compared once, since moving between devices also makes new tensors. A graph of torch.compile
        cannot branch on values and takes any new tensor for a changed one.
        """
        for name, (buffer, _) in self.buffers.items():
            in_module = getattr(module, name)
            if in_module is buffer or in_module is self.held.get(name):
                continue
            if in_module.is_meta or buffer.is_meta or is_recomputed(module, name):
                continue
            if torch.compiler.is_compiling() or not torch.equal(in_module.cpu(), buffer.cpu()):
                return True
            self.held[name] = in_module
        return False

    def restored_to_float32(self, module: Any) -> "RotaryState":
        """The state that Transformers builds from the config of `module`, if this one is the same but rounded."""
        if any(_is_rounded(buffer) for buffer, _ in self.buffers.values()):
            return fresh_state(module, module.config)
        if any(buffer.is_meta for buffer, _ in self.buffers.values()):
            return self
        # after a cast up again, only the values tell
        fresh = fresh_state(module, module.config)
        compared = [
            (buffer, fresh.buffers[name][0])
            for name, (buffer, _) in self.buffers.items()
            if name in fresh.buffers and not is_recomputed(module, name)
        ]
        if all(_is_close(*pair, rtol=_LAST_BITS, atol=0.0) for pair in compared):
            return self
        return fresh if all(is_but_rounded(*pair) for pair in compared) else self


def _is_rounded(buffer: torch.Tensor) -> bool:
    return buffer.is_floating_point() and buffer.dtype != torch.float32


def _is_close(buffer: torch.Tensor, expected: torch.Tensor, *, rtol: float, atol: float) -> bool:
    return buffer.shape == expected.shape and torch.allclose(
        buffer.detach().cpu().double(), expected.cpu().double(), rtol=rtol, atol=atol
    )


def is_but_rounded(buffer: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether frequencies differ from the expected ones only by the rounding of a cast to 16 bits."""
    return _is_close(buffer, expected, rtol=_ROUNDING, atol=1e-6)  # float16 has steps of 6e-8 next to 0


def fresh_state(module: nn.Module, config: Any) -> RotaryState:
    """The state that Transformers builds for this kind of rotary module from `config`, on the CPU."""
    return RotaryState.of(type(module)(config))


def attention_scales(decoder: nn.Module) -> dict[tuple[str, str], float]:
    """Softmax scales of all modules, by (module name, attribute); in 14 families they include YaRN's factor."""
    return {
        (own_name(name), attribute): getattr(module, attribute)
        for name, module in decoder.named_modules()
        for attribute in ("scaling", "softmax_scale")
        if isinstance(getattr(module, attribute, None), float)
    }
