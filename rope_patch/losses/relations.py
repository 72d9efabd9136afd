"""Distillation of the relations between queries, keys and values, computed inside each layer."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from rope_kernels import Visibility, attention_map_kl, relation_kl, relation_mse
from rope_kernels.common.autocast import as_multiplied

from ..base.validators import require_integer, require_number
from ..families.attention_calls import AttentionCall, attention_name
from ..families.capabilities import why_no_losses, why_no_relations
from ..forward.hooks import is_checkpointing
from ..rope.rotary import find_decoder, named_rotary_modules
from .distiller import Distiller
from .forward_loss import REQUEST, DecoderCall, LossRequest, require
from .heads import head_kl
from .targets import RelationTargets
from .teacher import OtherTeacher, SharedTeacher

# numbers of a relation, 8 heads of 128 features and 8192 tokens, whose kernels take .9 ms of an H200: copying it beside
# others would take longer than launching it
_FILLS_A_GPU = 2**23


@dataclass(frozen=True, kw_only=True)
class LogitKL:
    """KL(teacher, student) of next-token distributions on the last tokens of each document.

    Args:
        weight: weight in the loss; 0 only logs it, as in the paper's figure 4.
        last: number of tokens at the end of each document that count.
        temperature: divides the logits; the KL is not multiplied by its square.
    """

    weight: float
    last: int = 512
    temperature: float = 1.0

    def __post_init__(self) -> None:
        require_number("weight", self.weight, least=0)
        require_number("temperature", self.temperature)
        require_integer("last", self.last, least=1)

    def last_tokens(self, document: torch.Tensor) -> torch.Tensor:
        """Which tokens count, bool [batch, n], given the document of each, int64 [batch, n], -1 on padding."""
        valid = document >= 0
        in_row = valid.flip(1).cumsum(1).flip(1)  # [batch, n], real tokens of the row from each one on
        n_documents = int(document.max().clamp(min=0)) + 1
        row = torch.arange(len(document), device=document.device)[:, None]
        place = (row * n_documents + document.clamp(min=0)).flatten()  # [batch n], of (row, document)
        # [batch documents], real tokens of the row from the document's last one on
        at_end = in_row.new_full((len(document) * n_documents,), document.shape[1])
        at_end.scatter_reduce_(0, place, in_row.masked_fill(~valid, document.shape[1]).flatten(), "amin")
        return valid & (in_row - at_end[place].view_as(in_row) < self.last)


class RelationRequest(LossRequest):
    """Keeps the teacher's queries, keys and values of each layer; the student's layers write their losses to it.

    A layer's loss is computed inside the layer, so that gradient checkpointing repeats it, and the student's queries,
    keys and values of all layers are never in memory at once.

    Args:
        valid: which tokens are real, bool [batch, n].
        document: of each token, int64 [batch, n], -1 on padding.
        targets: which relations count.
        student_factor: YaRN's attention factor in the student's q and k; 1 if there is none or it stays.
        offload: whether the teacher's tensors are kept on the CPU.
        recomputes: whether layers run again in backward.
    """

    chosen: torch.Tensor  # bool [batch, n], the tokens that the logit KL counts
    taught: torch.Tensor  # [N, H_t], the teacher's states of these

    def __init__(
        self,
        valid: torch.Tensor,
        document: torch.Tensor,
        targets: RelationTargets,
        student_factor: float,
        offload: bool,
        recomputes: bool,
    ) -> None:
        super().__init__(valid, document)
        # with one document a row and no padding, kernels need causality only and compare no borders
        plain = bool((document == 0).all()) or bool((document == document[:, :1]).all() and valid.all())
        self.visibility = Visibility(True) if plain else Visibility.of_documents(document)
        self.targets = targets
        self.student_factor = student_factor
        self.offload = offload
        self.recomputes = recomputes
        self.with_gradient = False  # whether the student's forward was called with gradients on
        # (cos, sin) by whether the teacher runs, then by layer type, None if all layers have one pair
        self.rotations: dict[bool, dict[Any, tuple[torch.Tensor, torch.Tensor]]] = {True: {}, False: {}}
        self.teacher: dict[int, dict[str, torch.Tensor]] = {}  # by layer, then by "q", "k" or "v"
        # layer -> one sum per target over tokens and heads, divided by the heads, in the order of targets.weights
        self.sums: dict[int, torch.Tensor] = {}
        # (layer, relations) -> what the forward of their KL found, for the backward of a checkpointed layer
        self.found: dict[tuple[int, str], list[torch.Tensor]] = {}
        self.logit_kl: torch.Tensor | None = None

    def visit(self, call: AttentionCall) -> None:
        """Record the teacher's tensors of a layer, or compute the student's loss against them."""
        # q is [batch, n_heads, n, head_dim], k and v have n_kv_heads
        layer, query, key = call.module.layer_idx, call.query, call.key
        if self.targets.layers is not None and layer not in self.targets.layers:
            return
        if self.targets.rope == "pre":
            query, key = self._unrotated(call.module, query, key)
        tensors = {"q": query, "k": key, "v": call.value}
        needed = set(self.targets.weights) - {"attention"} | ({"q", "k"} if self.targets.attention else set())
        if self.teaching:
            kind, what = type(call.module).__name__, None
            if key.shape[2] != query.shape[2]:
                what = f"{kind} attends to {key.shape[2]} keys in a row of {query.shape[2]} tokens"
            elif layer in self.teacher:
                what = f"attention of layer {layer} ({kind}) runs more than once a forward"
            if what is not None:
                raise ValueError(
                    f"{what}, so its tokens have no single relation: choose other `layers`, or another objective."
                )
            device = "cpu" if self.offload else query.device
            self.teacher[layer] = {n: self._of_whole_rows(tensors[n].detach()).to(device) for n in sorted(needed)}
            return
        # TRL forces reentrant checkpointing for PEFT under ZeRO-3: https://github.com/deepspeedai/DeepSpeed/pull/8130
        if self.with_gradient and not torch.is_grad_enabled():
            raise ValueError(
                "reentrant gradient checkpointing runs layers without gradients first, which loses the gradients of "
                "relations. Call model.gradient_checkpointing_enable({'use_reentrant': False}), also after PEFT's "
                "prepare_model_for_kbit_training, whose default is reentrant."
            )
        teacher = {n: t.to(query.device, non_blocking=True) for n, t in self.teacher[layer].items()}
        student = {n: self._of_whole_rows(tensors[n]) for n in teacher}
        rows = self._rows(layer, student, teacher, call.scale)
        n_heads = {name: query.shape[1] for name in self.targets.weights}
        if self.targets.denominator == "own_heads":
            n_heads |= {name: tensors[name].shape[1] for name in n_heads if name != "attention"}
        losses = [rows[name].sum() / n_heads[name] for name in self.targets.weights]  # scalars
        # a recompute needs only the graph; the value is there already
        self.sums.setdefault(layer, torch.stack(losses))

    def _of_whole_rows(self, x: torch.Tensor) -> torch.Tensor:
        """The tensor for comparison: whole sequences; if ranks share a sequence, for a part of the heads."""
        x = as_multiplied(x)
        return x if self.shard is None else self.shard.by_heads(x)

    def _rows(
        self, layer: int, student: dict[str, torch.Tensor], teacher: dict[str, torch.Tensor], scaling: float
    ) -> dict[str, torch.Tensor]:
        """Target -> divergence of each row of its maps, [batch, its heads, n]."""
        factor = self.student_factor**-2  # squared, because both factors of a product have it
        rows: dict[str, torch.Tensor] = {}

        def found(names: str) -> list[torch.Tensor] | None:
            return self.found.setdefault((layer, names), []) if self.recomputes else None

        # relations of the same width and scale share one kernel launch, unless each fills a GPU by itself
        alike: dict[tuple[int, float, str], list[str]] = {}
        for name in self.targets.weights:
            if name == "attention":
                rows[name] = attention_map_kl(
                    student["q"],
                    student["k"],
                    teacher["q"],
                    teacher["k"],
                    student_scale=scaling * factor,
                    teacher_scale=scaling,
                    visibility=self.visibility,
                    found=found(name),
                )
            else:
                x = student[name]
                alone = name if x.numel() >= _FILLS_A_GPU else ""
                alike.setdefault((x.shape[-1], 1.0 if name == "v" else factor, alone), []).append(name)
        for (head_dim, correction, _), names in alike.items():
            divergence: Any = relation_mse
            if self.targets.divergence == "kl":
                divergence = partial(relation_kl, found=found("".join(names)))
            # [batch, heads of all names, n]
            together = divergence(
                torch.cat([student[name] for name in names], 1) if len(names) > 1 else student[names[0]],
                torch.cat([teacher[name] for name in names], 1) if len(names) > 1 else teacher[names[0]],
                student_scale=head_dim**-0.5 * correction,
                teacher_scale=head_dim**-0.5,
                visibility=self.visibility,
            )
            parts = together.split([student[name].shape[1] for name in names], 1)
            rows.update(zip(names, parts, strict=True))
        return rows

    def _unrotated(self, module: Any, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys before RoPE, by the family's rotation with negative angles."""
        rotations = self.rotations[self.teaching]
        kind = getattr(module, "layer_type", None) or getattr(module, "attention_type", None)
        cos, sin = rotations[kind] if kind in rotations else rotations[None]
        rotate = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
        if rotate is None:
            raise ValueError(
                f"rope='pre' undoes the rotation with the family's apply_rotary_pos_emb; {type(module).__name__} has "
                "none. Use rope='post'."
            )
        # cos and sin have the attention factor m: m^2 = cos^2 + sin^2, and dividing by m^2 undoes it. Clones, because
        # Liger rotates in place, and attention still reads these tensors.
        square = cos.float().square() + sin.float().square()
        return rotate(query.clone(), key.clone(), (cos / square).to(cos.dtype), (-sin / square).to(sin.dtype))

    def loss(self, name: str) -> torch.Tensor:
        """Mean over layers of the sums of one target; divided by the number of tokens it is that part of the loss."""
        if not self.sums:
            raise RuntimeError(
                "relations cannot be distilled, because this family does not pass keyword arguments on to its "
                "attention: use another objective."
            )
        place = list(self.targets.weights).index(name)
        return torch.stack([self.sums[layer][place] for layer in sorted(self.sums)]).mean()


class RelationDistiller(Distiller):
    """Distils the relations of a teacher into a rescaled student, during the student's forward.

    Args:
        model: the student, patched, bare or wrapped.
        targets: which relations count.
        teacher: the same weights with adapters off, a frozen copy, or another model.
        logit_kl: an additional KL on the last tokens, or None.
        offload: whether the teacher's tensors are kept on the CPU until the student's layer needs them.

    Raises:
        ValueError: student and teacher have the same RoPE, a layer does not exist, or the family does not support an
            option; in the first forward, gradient checkpointing is reentrant.

    Source: LinearARD, arXiv:2604.00004.
    """

    def __init__(
        self,
        model: nn.Module,
        targets: RelationTargets,
        teacher: SharedTeacher | OtherTeacher,
        *,
        logit_kl: LogitKL | None = None,
        offload: bool = False,
    ) -> None:
        super().__init__(model, teacher)
        if isinstance(teacher, OtherTeacher):
            student, other = (
                (m.config.get_text_config(decoder=True).num_hidden_layers, attention_name(m))
                for m in (self.causal_lm, teacher.copy)
            )
            if student != other:
                raise ValueError(
                    "student and teacher must have the same number of layers and the same attention implementation, "
                    f"got {student} and {other}: load both with the same attn_implementation."
                )
        self.targets, self.logit_kl, self.offload = targets, logit_kl, offload
        if targets.rope == "pre" and self.state is not None and self.state.layers_call_rotary:
            raise ValueError(
                f"rope='pre' needs RoPE outside the layers, and {type(self.causal_lm).__name__} computes it inside: "
                "use rope='post'."
            )
        require(why_no_relations(self.causal_lm, self.decoder))
        if logit_kl is not None:
            require(why_no_losses(self.causal_lm, self.decoder))
        n_layers = self.decoder.config.num_hidden_layers
        if targets.layers is not None and max(targets.layers) >= n_layers:
            raise ValueError(f"layers must be below {n_layers}, the layers of this model, got {targets.layers}.")
        self._student_factor = self._attention_factor() if targets.strip_attention_factor else 1.0
        self._in_flight: RelationRequest | None = None

    def _new_request(self, valid: torch.Tensor, document: torch.Tensor) -> RelationRequest:
        recomputes = is_checkpointing(self.decoder)
        return RelationRequest(valid, document, self.targets, self._student_factor, self.offload, recomputes)

    @contextmanager
    def _watching(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self.targets.rope == "pre":
                copies = [] if isinstance(self.teacher, SharedTeacher) else [find_decoder(self.teacher.copy)]
                for decoder in (self.decoder, *copies):
                    handles = [decoder.register_forward_pre_hook(self._note_request, with_kwargs=True)]
                    for _, module in named_rotary_modules(decoder):
                        handles.append(module.register_forward_hook(self._keep_rotation, with_kwargs=True))
                    for handle in handles:
                        stack.callback(handle.remove)
            yield

    def before(self, request: RelationRequest, call: DecoderCall) -> None:
        request.with_gradient = torch.is_grad_enabled()
        taught = self._ask_teacher(request, call).last_hidden_state
        if self.logit_kl is not None:
            chosen = self.logit_kl.last_tokens(request.document)
            request.chosen = chosen if request.shard is None else request.shard.local(chosen)
            request.taught = taught[request.chosen]

    def after(self, request: RelationRequest, output: Any) -> None:
        if self.logit_kl is None:
            return  # the layers have computed their losses
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.logit_kl.weight > 0):
            request.logit_kl = head_kl(
                self.causal_lm,
                self.teacher.head,
                output.last_hidden_state[request.chosen],
                request.taught,
                temperature=self.logit_kl.temperature,
            )
        del request.taught

    def _note_request(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # hooks of rotary modules do not get the decoder's keyword arguments
        self._in_flight = kwargs.get(REQUEST)

    def _keep_rotation(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._in_flight is not None:
            # called as (hidden, position_ids) or, once per layer type, as (hidden, position_ids, layer_type)
            kind = kwargs.get("layer_type", args[2] if len(args) > 2 else None)
            self._in_flight.rotations[self._in_flight.teaching][kind] = output

    def _attention_factor(self) -> float:
        factors = {getattr(m, "attention_scaling", 1.0) for _, m in named_rotary_modules(self.decoder)}
        partial = getattr(self.decoder.config, "partial_rotary_factor", None) not in (None, 1, 1.0)
        if len(factors) > 1 or not isinstance(next(iter(factors)), float | int) or (partial and factors != {1.0}):
            raise ValueError(
                "strip_attention_factor needs one factor for all features of q and k; this model has several factors, "
                "or rotates only a part of the features. Leave it out, or rescale with attention_factor=1.0."
            )
        return float(factors.pop())
