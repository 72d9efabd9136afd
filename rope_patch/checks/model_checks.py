"""Checks that this package computes the right numbers on a causal LM with RoPE. `rope-patch check` runs all of them.

Memory holds one copy of the weights. For a large model, checks that need a second copy run on its first layers.
"""

import copy
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel

from ..attention.rounding import differs_by_rounding, inputs_rounded_otherwise
from ..families.attention_calls import attention_name, watched_attention
from ..forward.cache_arguments import cache_argument, returned_cache
from ..layout.labelled import Labelled
from ..losses import (
    REQUEST,
    CopiedTeacher,
    RelationDistiller,
    RelationTargets,
    SelfDistiller,
    ViewConsistency,
    ViewRequest,
)
from ..patch import patch_model, rope_view, unpatch_model
from ..views import Skip

# largest relative error of values that are equal up to rounding, which grows with the layers of a model. A view moves
# logits by more, as "prefix under a skip" reports. Gradients may be further apart if rounding alone moves them as far:
# those of Gemma-3-270M in bfloat16 differed by 0.07
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
LARGE = 4 * 2**30  # bytes of weights above which only the first layers are copied
IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")


class WrongError(Exception):
    """A check has found wrong numbers."""


class CheckedModel:
    """A model with the inputs, outputs and tolerances that the checks share.

    Args:
        model: in eval mode, not patched.
        n_tokens: length of a sequence, in tokens.
    """

    def __init__(self, model: PreTrainedModel, n_tokens: int) -> None:
        self.model = model
        self.n_tokens, self.split = n_tokens, n_tokens // 2
        self.dtype = next(model.parameters()).dtype
        self.tolerance = TOLERANCE[self.dtype]
        vocabulary = model.config.get_text_config().vocab_size
        generator = torch.Generator().manual_seed(0)
        # the first ids of most vocabularies are special
        ids = torch.randint(min(1000, vocabulary // 2), vocabulary, (2, n_tokens), generator=generator)
        self.ids = ids.to(model.device)
        self.view = Skip(split=self.split, skip=4 * n_tokens)
        self.is_large = sum(p.numel() * p.element_size() for p in model.parameters()) > LARGE

    def logits(self, ids: torch.Tensor | None = None, **inputs: Any) -> torch.Tensor:
        """Float32 logits of a forward without a cache."""
        inputs = {"input_ids": self.ids if ids is None else ids, "use_cache": False, **inputs}
        with torch.no_grad():
            return self.model(**inputs).logits.float()

    @cached_property
    def plain(self) -> torch.Tensor:
        """Logits of the model without a patch."""
        return self.logits()

    def require_equal(self, actual: torch.Tensor, expected: torch.Tensor, what: str, rounding: float = 0.0) -> str:
        """Return the relative error as text.

        Raises:
            WrongError: the norm of the error is above tolerance * norm(expected) + rounding.
        """
        error = _relative_error(actual, expected)
        if not error <= self.tolerance + (rounding / expected.double().norm()).item():
            raise WrongError(f"{what}: relative error {error:.1e}, allowed {self.tolerance:.0e}")
        return f"{error:.0e}"

    @contextmanager
    def trained_weights(self) -> Iterator[dict[str, torch.nn.Parameter]]:
        """Training mode, with gradients for weights of the first and last attention: those of all may not fit."""
        weights = [(n, p) for n, p in self.model.named_parameters() if "attn" in n or "attention" in n]
        weights = [(n, p) for n, p in weights or self.model.named_parameters() if p.ndim == 2]
        chosen = dict([*weights[:3], *weights[-3:]])
        self.model.requires_grad_(False).train()
        for parameter in chosen.values():
            parameter.requires_grad_(True)
        try:
            yield chosen
        finally:
            self.model.zero_grad(set_to_none=True)
            self.model.requires_grad_(False).eval()

    def first_layers(self) -> PreTrainedModel:
        """The model itself if it is small, else one with its first layers, until each type of layer is there.

        A rescaling may change only some types.
        """
        if not self.is_large:
            return self.model
        config = copy.deepcopy(self.model.config)
        text = config.get_text_config(decoder=True)
        n_layers, types = text.num_hidden_layers, getattr(text, "layer_types", None) or []
        kept = min(n_layers, max([2, *(1 + types.index(kind) for kind in set(types))]))
        for name, value in list(vars(text).items()):
            if isinstance(value, list) and len(value) == n_layers:
                setattr(text, name, value[:kept])
        text.num_hidden_layers = kept
        small = type(self.model)._from_config(config, dtype=self.dtype, attn_implementation=attention_name(self.model))
        small.load_state_dict(self.model.state_dict(), strict=False)
        return small.to(self.model.device).eval().requires_grad_(False)


Check = Callable[[CheckedModel], str]


# Each check returns what it found, and raises WrongError for wrong numbers or ValueError if it does not fit the model.


def _identity(checked: CheckedModel) -> str:
    with rope_view(checked.model, "standard"):
        seen = checked.logits()
    patch_model(checked.model, "skip")
    asleep = checked.logits()
    unpatch_model(checked.model)
    for name, logits in {
        "under view 'standard'": seen,
        "patched, in eval": asleep,
        "unpatched": checked.logits(),
    }.items():
        if not torch.equal(logits, checked.plain):
            raise WrongError(f"logits {name} differ by {(logits - checked.plain).abs().max():.1e}")
    return "same bits under view 'standard', patched and unpatched"


def _constant_shift(checked: CheckedModel) -> str:
    with rope_view(checked.model, index=(torch.arange(checked.n_tokens) + 7)[None]):
        return "error " + checked.require_equal(checked.logits(), checked.plain, "all RoPE indices moved by 7")


def _prefix_under_skip(checked: CheckedModel) -> str:
    with rope_view(checked.model, checked.view):
        seen = checked.logits()
    error = checked.require_equal(seen[:, : checked.split], checked.plain[:, : checked.split], "logits before the skip")
    moved = (seen - checked.plain)[:, checked.split :].norm() / checked.plain[:, checked.split :].norm()
    if moved == 0:
        raise WrongError("a skip does not change the logits behind it")
    return f"error {error}; logits behind it move by {moved:.0e}"


def _prefix_reaches_the_end(checked: CheckedModel) -> str:
    for token in (0, checked.split // 2, checked.split - 1):
        changed = checked.ids.clone()
        changed[:, token] = changed[:, token + 1]
        if torch.equal(checked.logits(changed)[:, -1], checked.plain[:, -1]):
            continue  # out of reach of sliding windows
        with rope_view(checked.model, checked.view):
            moved = (checked.logits(changed) - checked.logits())[:, -1].abs().max().item()
        if moved == 0:
            raise WrongError(f"token {token} does not reach the last token: a jump was read as a document border")
        return f"another token {token} moves the last token's logits by {moved:.0e}"
    raise ValueError("no token before the skip reaches the last one through this model's windows: use fewer --tokens")


def _packed_documents(checked: CheckedModel) -> str:
    halves = checked.ids[:1].split([checked.split, checked.n_tokens - checked.split], 1)
    positions = torch.cat([torch.arange(h.shape[1], device=checked.ids.device) for h in halves])[None]
    alone = torch.cat([checked.logits(h) for h in halves], 1)
    plain = checked.logits(checked.ids[:1], position_ids=positions)
    if (plain - alone).norm() > checked.tolerance * alone.norm():
        raise ValueError("without a patch, this model attends across the borders of packed documents: pad instead")
    view = Skip(split=3, skip=4 * checked.n_tokens)  # moves tokens of both documents
    with rope_view(checked.model, view):
        expected = torch.cat([checked.logits(h) for h in halves], 1)
        return "error " + checked.require_equal(
            checked.logits(checked.ids[:1], position_ids=positions), expected, "packed documents"
        )


def _cached_decoding(checked: CheckedModel) -> str:
    with rope_view(checked.model, checked.view), torch.no_grad():
        first = checked.model(checked.ids[:, :-2], use_cache=True)
        cache = returned_cache(first)
        if cache is None:
            raise ValueError("this model returns no key-value cache")
        rest = []
        for ids in (checked.ids[:, -2:-1], checked.ids[:, -1:]):
            rest.append(checked.model(ids, **cache_argument(checked.model, cache), use_cache=True))
            cache = returned_cache(rest[-1])
        logits = torch.cat([out.logits for out in rest], 1).float()
        return "error " + checked.require_equal(logits, checked.logits()[:, -2:], "tokens decoded with a cache")


def _rescale(model: PreTrainedModel) -> str:
    """Rescale by the first method that the family supports, and return its name."""
    tried: dict[str, dict[str, Any]] = {"yarn": {"factor": 2.0}, "pi": {"factor": 2.0}, "abf": {"theta": 1e7}}
    reasons = []
    for method, options in tried.items():
        try:
            patch_model(model, method, **options)
            return method
        except ValueError as error:
            reasons.append(str(error))
    raise ValueError(reasons[0])


def _save_and_reload(checked: CheckedModel) -> str:
    model = checked.first_layers()
    part = CheckedModel(model, checked.n_tokens)
    native = part.logits()
    try:
        method = _rescale(model)
        rescaled = part.logits()
        if torch.equal(rescaled, native):
            raise WrongError(f"{method} changes nothing")
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            again: Any = type(model).from_pretrained(
                folder, dtype=checked.dtype, attn_implementation=attention_name(model), device_map=None
            )
        reloaded = CheckedModel(again.to(model.device).eval(), checked.n_tokens).logits()
    finally:
        unpatch_model(model)
    if not torch.equal(part.logits(), native):
        raise WrongError("unpatch_model does not restore the native bits")
    same = (
        "same bits"
        if torch.equal(reloaded, rescaled)
        else "error " + part.require_equal(reloaded, rescaled, "reloaded")
    )
    return f"{method}: {same}{_size_note(checked, model)}"


def _captured_attention(checked: CheckedModel) -> str:
    plain, plain_logits = _captured(checked.model, checked)
    if not plain:
        raise ValueError("attention is not called through Transformers' table: relations cannot be distilled")
    if not torch.equal(plain_logits, checked.plain):
        raise WrongError("watching attention changes logits")
    with rope_view(checked.model, checked.view):
        seen, _ = _captured(checked.model, checked)
    first = min(plain)
    checked.require_equal(seen[first][2], plain[first][2], "values of the first layer under a view")
    turned = [layer for layer in plain if not torch.equal(seen[layer][0], plain[layer][0])]
    if not turned:
        raise WrongError("no layer's queries change under a view")
    q, k, v = plain[first]
    return f"{len(plain)} layers; queries {q.shape[1]} x {q.shape[3]}, keys {k.shape[1]}, values {v.shape[1]} heads"


def _checkpointing(checked: CheckedModel) -> str:
    if not checked.model.supports_gradient_checkpointing:
        raise ValueError("this model has no gradient checkpointing")
    gradients = []
    with checked.trained_weights() as weights:
        for on in (False, True):
            if on:
                checked.model.gradient_checkpointing_enable({"use_reentrant": False})
            torch.manual_seed(0)  # dropout
            try:
                with rope_view(checked.model, checked.view):
                    loss = checked.model(checked.ids, labels=checked.ids, use_cache=False).loss
                loss.backward()
            finally:
                checked.model.gradient_checkpointing_disable()
            gradients.append(_gradients(weights))
            checked.model.zero_grad(set_to_none=True)
    return "error " + checked.require_equal(gradients[1], gradients[0], "gradients")


def _self_distillation(checked: CheckedModel) -> str:
    patch_model(checked.model, checked.view)
    with checked.trained_weights() as weights:
        loss, kl, gradients, in_one_pass = _distilled(checked, weights, one_pass=True)
        expected_loss, _, expected, _ = _distilled(checked, weights, one_pass=False)
        # in an untrained model the views hardly differ, and rounding can make the KL negative
        if kl == 0 or not kl > -_rounding_of_kl(checked.ids.numel(), checked.plain.shape[-1]):
            raise WrongError(f"the KL between the views is {kl.item()}")
        checked.require_equal(loss, expected_loss, "loss of one forward against two")
        error, note = _relative_error(gradients, expected), ""
        if not error <= checked.tolerance:
            with inputs_rounded_otherwise(checked.model):
                moved = _distilled(checked, weights, one_pass=False)[2]
            note = _within_rounding(gradients, expected, moved)
    passes = "" if in_one_pass else "; this model needs two passes"
    return f"gradients of one forward against two: error {error:.0e}{note}{passes}"


def _distilled(
    checked: CheckedModel, weights: dict[str, torch.nn.Parameter], one_pass: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]:
    """Loss, KL and gradients of self-distillation, and whether both views ran in one pass."""
    distiller = SelfDistiller(checked.model, ViewConsistency(), one_pass=one_pass)
    labelled = Labelled.of({"input_ids": checked.ids, "labels": checked.ids})
    request = ViewRequest(labelled, labelled.n_labels, labelled.n_documents)
    with distiller.active():
        checked.model(checked.ids, logits_to_keep=1, use_cache=False, **{REQUEST: request})
        request.result.loss.backward()
    gradients = _gradients(weights)
    checked.model.zero_grad(set_to_none=True)
    return request.result.loss.detach(), request.result.rows.kl.sum(), gradients, distiller.one_pass


def _within_rounding(gradients: torch.Tensor, expected: torch.Tensor, moved: torch.Tensor) -> str:
    """Raise WrongError if the error is above that of `moved` gradients, from inputs that were rounded differently."""
    error, rounding = _relative_error(gradients, expected), _relative_error(moved, expected)
    if not differs_by_rounding(gradients[None], expected[None], moved[None]):
        raise WrongError(f"gradients: relative error {error:.1e}, where rounding alone moves them by {rounding:.1e}")
    return f", where rounding alone moves them by {rounding:.0e}"


def _relation_distillation(checked: CheckedModel) -> str:
    model = checked.first_layers()
    part = CheckedModel(model, checked.n_tokens)
    taught, _ = _captured(model, part)
    method = _rescale(model)
    try:
        with part.trained_weights() as weights:
            distiller = RelationDistiller(model, RelationTargets(), CopiedTeacher(model))
            with distiller.active():
                request = distiller.request(part.ids)
                model(part.ids, use_cache=False, logits_to_keep=1, **{REQUEST: request})
                loss = sum(request.loss(name) for name in "qkv")
                loss.backward()
            gradients = _gradients(weights)
        learned, _ = _captured(model, part)
    finally:
        unpatch_model(model)
    if not gradients.isfinite().all() or not gradients.norm() > 0:
        raise WrongError(f"the gradient's norm is {gradients.norm():.1e}")
    # q, k and v of each layer
    expected: Any = sum(_relation_kl(learned[i][x], taught[i][x]) for i in taught for x in range(3)) / len(taught)
    rounding = _rounding_of_kl(3 * part.ids.numel(), part.n_tokens)
    error = part.require_equal(loss.detach(), expected, "loss", rounding)
    return f"{method}: error {error}{_size_note(checked, model)}"


def _attention_implementations(checked: CheckedModel) -> str:
    mine = attention_name(checked.model)
    with rope_view(checked.model, checked.view):
        expected, notes = checked.logits(), [mine]
        for name in IMPLEMENTATIONS:
            half = checked.dtype in (torch.float16, torch.bfloat16)
            if name == mine or (name.startswith("flash") and not (half and checked.ids.is_cuda)):
                continue
            try:
                checked.model.set_attn_implementation(name)
            except (ValueError, ImportError):
                continue  # not installed, or not for this family
            try:
                with ExitStack() as stack:
                    if not checked.ids.is_cuda:  # flex attention then compiles for longer than it saves, or warns
                        stack.enter_context(torch.compiler.set_stance("force_eager"))
                        stack.enter_context(warnings.catch_warnings())
                        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
                    notes.append(f"{name} {checked.require_equal(checked.logits(), expected, name)}")
            except ValueError:
                continue  # not on this device
            finally:
                checked.model.set_attn_implementation(mine)
    if len(notes) == 1:
        raise ValueError(f"{mine} is the only implementation that runs here")
    return ", ".join(notes)


CHECKS: dict[str, Check] = {
    "identity": _identity,
    "constant shift": _constant_shift,
    "prefix under a skip": _prefix_under_skip,
    "prefix to last row": _prefix_reaches_the_end,
    "packed documents": _packed_documents,
    "cached decoding": _cached_decoding,
    "save and reload": _save_and_reload,
    "q, k, v capture": _captured_attention,
    "checkpointing": _checkpointing,
    "self-distill": _self_distillation,
    "relation-distill": _relation_distillation,
    "attention": _attention_implementations,
}


def _size_note(checked: CheckedModel, model: PreTrainedModel) -> str:
    if model is checked.model:
        return ""
    return f" (first {model.config.get_text_config(decoder=True).num_hidden_layers} layers)"


def _relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """norm(actual - expected) / norm(expected)."""
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def _gradients(weights: dict[str, torch.nn.Parameter]) -> torch.Tensor:
    gradients = [p.grad.flatten().float() for p in weights.values() if p.grad is not None]
    if not gradients:
        raise WrongError(f"no gradient reaches {', '.join(weights)}")
    return torch.cat(gradients)


def _captured(
    model: PreTrainedModel, checked: CheckedModel
) -> tuple[dict[int, tuple[torch.Tensor, ...]], torch.Tensor]:
    """(query, key, value) by layer, and the logits."""
    inputs_by_layer: dict[int, tuple[torch.Tensor, ...]] = {}

    def keep(call: Any) -> None:
        inputs_by_layer[call.module.layer_idx] = tuple(x.detach().clone() for x in (call.query, call.key, call.value))

    with watched_attention(model, keep):
        logits = checked.logits()
    return inputs_by_layer, logits


def _rounding_of_kl(n_rows: int, n_columns: int) -> float:
    """Rounding error of a sum of `n_rows` KLs in float32: each has two log-sum-exps of about ln(n_columns)."""
    return torch.finfo(torch.float32).eps * math.log(n_columns) * n_rows


def _relation_kl(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """KL of causal softmax(X X^T / sqrt(d)), X [batch, heads, n, d]: summed over rows and tokens, mean over heads."""
    n = student.shape[2]
    hidden = torch.ones(n, n, dtype=torch.bool, device=student.device).triu(1)  # later tokens
    scores = [
        (x.double() @ x.double().mT * x.shape[-1] ** -0.5).masked_fill(hidden, -1e300) for x in (teacher, student)
    ]
    p, q = (x.log_softmax(-1) for x in scores)
    return (p.exp() * (p - q)).sum() / student.shape[1]


def run_check(checked: CheckedModel, check: Check) -> tuple[str, str]:
    """The outcome of a check, "ok", "refused" or "WRONG", and its details. The model is unpatched afterwards."""
    try:
        return "ok", check(checked)
    except WrongError as error:
        return "WRONG", str(error)
    except (ValueError, ImportError) as error:  # this package and Transformers raise these for unsupported models
        return "refused", str(error).partition("\n")[0]
    except Exception as error:  # the other checks still run
        return "WRONG", f"{type(error).__name__}: {error}".partition("\n")[0]
    finally:
        unpatch_model(checked.model)
