"""Facts parsed from the modeling code of Transformers, which the table of families must agree with."""

import ast
import inspect
import re
import textwrap
from functools import cache

from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rope_patch.rope.rotary import named_rotary_modules, text_modules

_ROTATION = re.compile(r"_?apply_rotary")


@cache
def _tree(function):
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):
        return None
    return next((node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)), None)


@cache
def _names_in(forward):
    nodes = list(ast.walk(_tree(forward) or ast.Module([], [])))
    return {n.id for n in nodes if isinstance(n, ast.Name)} | {n.attr for n in nodes if isinstance(n, ast.Attribute)}


def layers_with_rope(decoder):
    """Indices of the layers whose code applies RoPE."""
    return [i for i, layer in enumerate(getattr(decoder, "layers", ())) if _is_rotated(decoder, i, layer)]


def _is_rotated(decoder, i, layer):
    if not _gets_embeddings(decoder, i, layer):
        return False
    return any(tree and _rotates(tree.body, m) for m in layer.modules() for tree in [_tree(type(m).forward)])


def _gets_embeddings(decoder, i, layer):
    """Whether a decoder hands cosines and sines to a layer, and no `None`."""
    bases = getattr(decoder.config, "layer_rope_theta", None)
    if bases is not None and not bases[i]:
        return False
    types = getattr(decoder.config, "layer_types", None)
    names = {"self": decoder, "layer_type": types and types[i], "decoder_layer": layer, "i": i}
    for node in ast.walk(_tree(type(decoder).forward) or ast.Module([], [])):
        if isinstance(node, ast.keyword | ast.Assign) and isinstance(node.value, ast.IfExp):
            target = node.arg if isinstance(node, ast.keyword) else ast.unparse(node.targets[0])
            is_true = _value(node.value.test, names)
            chosen = node.value.body if is_true else node.value.orelse
            if str(target).endswith("position_embeddings") and is_true is not None and ast.unparse(chosen) == "None":
                return False
    return True


def _rotates(statements, module):
    """Whether a call of apply_rotary... is run; both branches are, where the arguments of a call decide."""
    for statement in statements:
        if isinstance(statement, ast.If):
            is_true = _value(statement.test, {"self": module})
            branches = [*(statement.body if is_true is not False else ()), *(statement.orelse if not is_true else ())]
            if _rotates(branches, module):
                return True
        elif any(_ROTATION.match(node.id) for node in ast.walk(statement) if isinstance(node, ast.Name)):
            return True
    return False


def _value(condition, names):
    """What a condition on `names` comes to, None if it depends on more than those."""
    try:
        return bool(eval(compile(ast.Expression(condition), "<condition>", "eval"), names))
    except Exception:  # names of arguments, and attributes of these
        return None


def rotary_reads_config(decoder):
    """Whether a rotary module reads the config in its forward."""
    return any("config" in _names_in(type(module).forward) for _, module in named_rotary_modules(decoder))


def reads_rope_parameters(decoder):
    """Whether a module below the decoder reads RoPE parameters in its forward."""
    return any("rope_parameters" in _names_in(type(m).forward) for _, m in text_modules(decoder) if m is not decoder)


def attention_gets_keywords(decoder):
    """Whether keyword arguments of the decoder reach calls of Transformers' attention functions."""
    modules, kinds = dict(decoder.named_modules()), set()
    for name, module in text_modules(decoder):
        forward = type(module).forward
        table = getattr(inspect.unwrap(forward), "__globals__", {}).get("ALL_ATTENTION_FUNCTIONS")
        if table is ALL_ATTENTION_FUNCTIONS and "ALL_ATTENTION_FUNCTIONS" in _names_in(forward):
            kinds |= _kinds_above(modules, name) | {type(module)}
    return bool(kinds) and all(map(_passes_on, kinds))


def decoder_gets_keywords(causal_lm, decoder):
    """Whether keyword arguments of a causal LM reach its decoder."""
    modules = dict(causal_lm.named_modules())
    name = next(name for name, module in modules.items() if module is decoder)
    return all(map(_passes_on, _kinds_above(modules, name)))


def between_decoder_and_head(causal_lm, decoder):
    """Children with weights that the forward of a causal LM reads, beside the decoder and the output head."""
    head = causal_lm.get_output_embeddings()
    return [
        name
        for name, child in causal_lm.named_children()
        if child is not head and decoder not in child.modules() and any(True for _ in child.parameters())
        if name in _names_in(type(causal_lm).forward)
    ]


def _kinds_above(modules, name):
    parts = name.split(".") if name else []
    above = [modules[".".join(parts[:n])] for n in range(len(parts))]
    return {type(module) for module in above} - {nn.ModuleList, nn.ModuleDict, nn.Sequential}


@cache
def _passes_on(kind):
    """Whether a `forward` hands its own **kwargs to more than the loss."""
    function = _tree(kind.forward)
    keywords = function.args.kwarg
    return keywords is not None and any(
        keyword.arg is None and isinstance(keyword.value, ast.Name) and keyword.value.id == keywords.arg
        for call in ast.walk(function)
        if isinstance(call, ast.Call)
        and not (isinstance(call.func, ast.Attribute) and call.func.attr == "loss_function")
        for keyword in call.keywords
    )
