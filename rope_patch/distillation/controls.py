"""Controls for self-distillation: the standard view against itself under noise that is not one of positions."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from ..attention_calls import AttentionCall, attention_kernel, attention_name, sliding_window
from ..checked_numbers import require_number
from .consistency import ConsistencyDistiller, ViewConsistency, ViewTape
from .distiller import TAPE
from .labelled import Labelled
from .longce import LongCE

Kind = Literal["dropout", "attention_noise"]


@dataclass(frozen=True, kw_only=True)
class Control:
    """What stands in for a view, over all rows of a document.

    - "dropout": both passes drop features of what attention and MLP of each layer give, at random, apart.
    - "attention_noise": the second pass adds normal noise to the scores of attention, before the softmax. With flex
      attention memory stays linear; sdpa and eager take a mask of n x n numbers a head.

    Args:
        kind: see above.
        strength: probability of a feature to be dropped, or standard deviation of the noise. The paper gives neither.

    Source: RPSD, arXiv:2604.14339, its controls.
    """

    kind: Kind
    strength: float = 0.1

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"control must be one of {get_args(Kind)} or None, got {self.kind!r}.")
        largest = 1.0 if self.kind == "dropout" else float("inf")
        require_number(f"strength of {self.kind!r}", self.strength, below=largest)


class _Untouched(ViewTape):
    """Goes through the first pass: no hook of the second one takes it for its own, in a recompute neither."""

    def __init__(self) -> None:
        self.teaching = self.taught = True

    def visit(self, call: AttentionCall) -> None:
        return None


class ControlDistiller(ConsistencyDistiller):
    """Distils a model into itself under noise, in two passes of one call.

    Noise comes from torch's generator, which a checkpoint's recompute repeats and a trainer's checkpoint holds. A batch
    of an evaluation starts from `evaluation_seed`, which a caller sets for each one: evaluations in batches of the same
    size have the same noise.

    Args:
        model: bare or wrapped, with no view that perturbs.
        consistency: direction and divisors; s is 0.
        control: the noise.
        longce: token weights of the cross-entropy, or None.

    Raises:
        ValueError: a view that perturbs, layers without attention and MLP, or an attention that takes no such mask.
    """

    def __init__(
        self, model: nn.Module, consistency: ViewConsistency, control: Control, longce: LongCE | None = None
    ) -> None:
        super().__init__(model, consistency, longce)
        if self.state is not None and self.state.source is not None and self.state.source.view.perturbs:
            raise ValueError("a control compares true positions with themselves: leave view at 'standard'.")
        self.control = control
        self._modules = self._noisy_modules() if control.kind == "dropout" else []
        if control.kind == "attention_noise" and attention_kernel(self.core) not in ("sdpa", "eager", "flex"):
            raise ValueError(
                f"attention_noise changes scores, which {attention_name(self.core)!r} does not let: load the model "
                "with flex_attention, or for short rows with sdpa."
            )
        self.evaluation_seed = 0
        self._dropping = False

    def affected_from(self, labelled: Labelled) -> torch.Tensor:
        return torch.zeros_like(labelled.documents.length)

    def _first(self, labelled: Labelled) -> torch.Tensor:
        return self.affected_from(labelled)

    def _noisy_modules(self) -> list[nn.Module]:
        found: list[nn.Module] = []
        for layer in self.decoder.layers:
            children = list(layer.children())
            attention = [m for m in children if "attention" in type(m).__name__.lower()]
            mlp = [
                m for m in children if any(part in type(m).__name__.lower() for part in ("mlp", "moe", "feedforward"))
            ]
            if not attention or not mlp:
                names = ", ".join(type(m).__name__ for m in children)
                raise ValueError(f"dropout goes behind attention and MLP of each layer, which has only: {names}.")
            found += [*attention, *mlp]
        return found

    def _before_student(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tape = kwargs.get(TAPE)
        if tape is None or tape.taught:
            return
        tape.taught = True
        self._read_short(tape, decoder)
        # in training the first pass drops too; its loss in evaluation is the plain one
        self._dropping = decoder.training
        if not self.compares:
            return
        tape.standard = decoder(*args, **{**kwargs, TAPE: _Untouched()}).last_hidden_state
        self._dropping = True
        if self.control.kind == "attention_noise":
            if attention_kernel(self.core) == "flex":
                tape.attention = _NoisyFlexAttention(self.control.strength)
            else:
                tape.attention = _NoisyAttention(tape.labelled, self.decoder.config, self.control.strength)

    @contextmanager
    def _watching(self) -> Iterator[None]:
        handles = [module.register_forward_hook(self._drop) for module in self._modules]
        try:
            if self.decoder.training:
                yield
            else:  # the same noise in each evaluation
                with torch.random.fork_rng():
                    torch.manual_seed(self.evaluation_seed)
                    yield
        finally:
            self._dropping = False
            for handle in handles:
                handle.remove()

    def _drop(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not self._dropping:
            return None
        if isinstance(output, tuple):
            return F.dropout(output[0], self.control.strength), *output[1:]
        return F.dropout(output, self.control.strength)


@dataclass(frozen=True)
class _NoisyAttention:
    """Attention within documents, with noise on the scores: a mask [batch, n_heads, n, n], so for short rows."""

    labelled: Labelled
    config: Any
    strength: float

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        query, one = call.query, self.labelled
        document = one.ordinal.masked_fill(~one.valid, -1)
        distance = one.t[:, :, None] - one.t[:, None]
        seen = (document[:, :, None] == document[:, None]) & (distance >= 0)
        window = sliding_window(call, self.config)
        if window is not None:
            seen &= distance < window
        seen |= torch.eye(query.shape[2], dtype=torch.bool, device=query.device)
        shape = (*query.shape[:3], query.shape[2])
        noise = self.strength * torch.randn(shape, dtype=query.dtype, device=query.device)
        mask = noise.masked_fill(~seen[:, None], torch.finfo(query.dtype).min)
        return call.with_inputs(query, call.key, call.value, mask)


@dataclass(frozen=True)
class _NoisyFlexAttention:
    """Attention with noise on the scores, which flex attention forms tile by tile, without a mask of n x n."""

    strength: float

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        words = torch.randint(-(2**31), 2**31, call.query.shape[:2], dtype=torch.int32, device=call.query.device)
        noise = HashedNoise(words, self.strength)
        return call.with_inputs(call.query, call.key, call.value, call.mask, position_bias=noise)


@dataclass(frozen=True)
class HashedNoise:
    """Normal noise for each score of attention, from a hash of where it is, without a tensor [batch, n_heads, n, n].

    A backward that forms scores again meets the same noise. Box and Muller's transform of two numbers of 16 bits.

    Args:
        words: a draw for each row and head, int32 of all 32 bits, [batch, n_heads].
        strength: standard deviation.

    Source: of the hash, github.com/skeeto/hash-prospector; G. Box and M. Muller, "A note on the generation of random
        normal deviates", 1958.
    """

    words: torch.Tensor
    strength: float

    def __getitem__(self, place: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Noise of (row, head, query, key), integer tensors that broadcast, as float32."""
        row, head, query, key = place
        word = self.words[row, head] ^ (query * 65537 + key).to(torch.int32)
        for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97), (15, 1)):
            # the shift of an int32 brings its sign with it
            word = (word ^ ((word >> shift) & ((1 << (32 - shift)) - 1))) * factor
        radius = torch.sqrt(-2 * torch.log(((word & 0xFFFF).float() + 0.5) / 65536))
        angle = ((word >> 16) & 0xFFFF).float() * (2 * math.pi / 65536)
        return self.strength * radius * torch.cos(angle)
