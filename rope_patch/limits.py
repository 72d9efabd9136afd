"""What a family cannot do, and why. Distillers ask before they start, `describe` tells."""

import ast
import inspect
import sys
import textwrap
from functools import cache
from typing import Any

from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .rotary import find_core, find_decoder, layers_call_rotary, text_modules

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

# q and k get a weight a channel after RoPE there, so that scores no longer depend on differences of indices alone
_WEIGHTS_AFTER_ROPE = ("hunyuan_v1_dense", "hunyuan_v1_moe")


def limits(model: nn.Module) -> dict[str, str]:
    """What cannot be done with a model that has RoPE -> the reason; what is not named can."""
    core, decoder = find_core(model), find_decoder(model)
    found = {
        "gradient checkpointing": why_no_checkpointing(decoder),
        "self-distillation": why_no_self_distillation(core, decoder),
        "relation distillation": why_no_relations(core, decoder),
    }
    return {what: reason for what, reason in found.items() if reason is not None}


def why_no_checkpointing(decoder: nn.Module) -> str | None:
    """Why a view and gradient checkpointing do not go together."""
    if layers_call_rotary(decoder):
        return (
            f"{type(decoder).__name__} applies RoPE inside its layers, which gradient checkpointing runs again in "
            "backward, when the view has ended: gradients would be wrong. Switch gradient checkpointing off."
        )
    return None


def why_no_self_distillation(core: nn.Module, decoder: nn.Module) -> str | None:
    """Why two views of one model cannot be compared."""
    if layers_call_rotary(decoder):
        return (
            f"{type(core).__name__} computes RoPE inside its layers, which have one view a step: objective "
            "'self-distill' needs two. Use objective='clm' with the view."
        )
    return why_unreachable(core, decoder) or why_no_head(core, decoder)


def why_no_head(core: Any, decoder: nn.Module) -> str | None:
    """Why logits are not the product of last hidden states and a matrix, scaled and capped."""
    head = core.get_output_embeddings()
    for name, child in core.named_children():
        beside = child is not head and decoder not in child.modules() and any(True for _ in child.parameters())
        if beside and name in _read_by(type(core), "forward"):
            return (
                f"{type(core).__name__} puts its {name} ({type(child).__name__}) between the decoder and the output "
                "head, and losses of hidden states take the head alone."
            )
    return None


def why_no_relations(core: nn.Module, decoder: nn.Module) -> str | None:
    """Why queries, keys and values cannot be taken as attention gets them."""
    keeps = keeps_from_attention(decoder)
    return why_unreachable(core, decoder) or (keeps and f"{keeps}, so that relations cannot be distilled.")


def why_not_relative(decoder: Any) -> str | None:
    """Why a shift of all indices changes predictions."""
    if decoder.config.model_type in _WEIGHTS_AFTER_ROPE:
        return "weights on queries and keys after RoPE, so that a shift of all indices counts"
    return None


def keeps_from_attention(decoder: nn.Module) -> str | None:
    """What keeps keyword arguments of a forward from the attention functions of Transformers, None if nothing does."""
    places = [name for name, module in text_modules(decoder) if _asks_for_attention(type(module))]
    if not places:
        return f"{type(decoder).__name__} computes attention in code of its own, outside Transformers' functions"
    modules = dict(decoder.named_modules())
    chain = {type(modules[part]) for name in places for part in _above(name)}
    for kind in sorted(chain - set(_CONTAINERS), key=lambda kind: kind.__name__):
        if not _passes_on(kind):
            return f"{kind.__name__} does not pass keyword arguments on to attention"
    return None


def why_unreachable(core: nn.Module, decoder: nn.Module) -> str | None:
    """Why a keyword argument of a causal LM does not reach its decoder."""
    modules = dict(core.named_modules())
    name = next(name for name, module in modules.items() if module is decoder)
    kinds = [type(modules[part]) for part in _above(name)[:-1]]
    for kind in kinds:
        if not _passes_on(kind):
            return f"{kind.__name__} does not pass keyword arguments on to its decoder, so a distillation cannot reach it."
    return None


def _asks_for_attention(kind: type) -> bool:
    """Whether `forward` looks its attention up in Transformers' table; a family may have a table of its own."""
    table = vars(sys.modules[kind.__module__]).get("ALL_ATTENTION_FUNCTIONS")
    return table is ALL_ATTENTION_FUNCTIONS and "ALL_ATTENTION_FUNCTIONS" in _read_by(kind, "forward")


def _above(name: str) -> list[str]:
    """The names of a module and of all that hold it, outermost first."""
    parts = name.split(".") if name else []
    return [".".join(parts[:n]) for n in range(len(parts) + 1)]


@cache
def _function(kind: type, method: str) -> ast.FunctionDef | None:
    """The code of a method below its decorators, None where there is no source to read."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(getattr(kind, method)))))
    except (OSError, TypeError, SyntaxError):
        return None
    return next((node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)), None)


@cache
def _read_by(kind: type, method: str) -> frozenset[str]:
    """Names and attributes that a method mentions."""
    function = _function(kind, method)
    if function is None:
        return frozenset()
    names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    return frozenset(names | {node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)})


@cache
def _passes_on(kind: type) -> bool:
    """Whether `forward` hands its own **kwargs to more than the loss; yes where its code cannot be read."""
    function = _function(kind, "forward")
    if function is None:
        return True
    own = function.args.kwarg
    return own is not None and any(
        keyword.arg is None and isinstance(keyword.value, ast.Name) and keyword.value.id == own.arg
        for call in ast.walk(function)
        if isinstance(call, ast.Call) and not (isinstance(call.func, ast.Attribute) and call.func.attr == "loss_function")
        for keyword in call.keywords
    )
