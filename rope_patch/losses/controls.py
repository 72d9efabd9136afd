"""Controls for self-distillation: the standard view against itself under noise that is not one of positions."""

import math
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from ..attention.masks import additive_mask
from ..base.validators import require_number
from ..families.attention_calls import AttentionCall, attention_kernel, attention_name, sliding_window
from ..layout.labelled import Labelled
from .forward_loss import Arguments, DecoderCall
from .passes import PairedStates, Pairing, Passes, ViewRequest

Kind = Literal["dropout", "attention_noise"]

# of flex attention's forward: numbers that make noise stand in registers beside the scores, and of its own tiles of
# 128 x 128 on Hopper they overflow: eight times the time (benchmarks/noise_attention.py)
SMALL_TILES = {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 32}
# sin(2 pi x) for |x| <= 1/4 by its Taylor series, off by 6e-8 at most: CUDA's own cosine reduces large angles through
# memory, for each score
_SINE = [(-1) ** k * (2 * math.pi) ** (2 * k + 1) / math.factorial(2 * k + 1) for k in range(6)]


@dataclass(frozen=True, kw_only=True)
class Control:
    """What stands in for a view, over all rows of a document.

    - "dropout": both passes drop features of what attention and MLP of each layer give, at random, apart.
    - "attention_noise": the second pass adds normal noise to the scores of attention, before the softmax. With flex
      attention memory stays linear; sdpa and eager take a mask of n x n numbers a head.

    Args:
        kind: of noise, "dropout" or "attention_noise".
        strength: probability of a feature to be dropped, or standard deviation of the noise. The paper gives neither.

    Source: RPSD, arXiv:2604.14339, its controls.
    """

    kind: Kind
    strength: float = 0.1

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind must be one of {get_args(Kind)}, got {self.kind!r}.")
        largest = 1.0 if self.kind == "dropout" else float("inf")
        require_number(f"strength of {self.kind!r}", self.strength, below=largest)


class NoisyPasses(Passes):
    """A forward as it is, then one under noise, both at true positions.

    Noise comes from torch's generator, which a checkpoint's recompute repeats and a trainer's checkpoint holds. A batch
    of an evaluation starts from `evaluation_seed`, which a caller sets for each one: evaluations in batches of the same
    size have the same noise.

    Args:
        causal_lm: the model.
        decoder: its decoder.
        control: the noise.

    Raises:
        ValueError: layers without attention and MLP, or an attention that takes no such mask.
    """

    def __init__(self, causal_lm: Any, decoder: Any, control: Control) -> None:
        self.causal_lm, self.decoder, self.control = causal_lm, decoder, control
        self._modules = _noisy_modules(decoder) if control.kind == "dropout" else []
        if control.kind == "attention_noise" and attention_kernel(causal_lm) not in ("sdpa", "eager", "flex"):
            raise ValueError(
                f"attention_noise changes scores, which {attention_name(causal_lm)!r} does not let: load the model "
                "with flex_attention, or for short rows with sdpa."
            )
        self.evaluation_seed = 0
        self._dropping = False

    def pair(self, call: DecoderCall, request: ViewRequest) -> Pairing:
        # in training the first pass drops too; its loss in evaluation is the plain one
        self._dropping = self.decoder.training
        standard = call.run_before().last_hidden_state
        self._dropping = True
        if self.control.kind == "attention_noise":
            if attention_kernel(self.causal_lm) == "flex":
                request.attention = _NoisyFlexAttention(self.control.strength)
            else:
                request.attention = _NoisyAttention(request.labelled, self.decoder.config, self.control.strength)
        output = yield None
        first = torch.zeros_like(request.labelled.documents.length)
        return PairedStates(standard, output.last_hidden_state, first, request.labelled)

    def standard(self, call: DecoderCall) -> Generator[Arguments | None, Any, torch.Tensor]:
        self._dropping = self.decoder.training
        return (yield from super().standard(call))

    @contextmanager
    def active(self) -> Iterator[None]:
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


def _noisy_modules(decoder: Any) -> list[nn.Module]:
    """Attention and MLP of each layer."""
    modules: list[nn.Module] = []
    for layer in decoder.layers:
        children = list(layer.children())
        attention = [m for m in children if "attention" in type(m).__name__.lower()]
        mlp = [m for m in children if any(part in type(m).__name__.lower() for part in ("mlp", "moe", "feedforward"))]
        if not attention or not mlp:
            names = ", ".join(type(m).__name__ for m in children)
            raise ValueError(f"dropout goes behind attention and MLP of each layer, which has only: {names}.")
        modules += [*attention, *mlp]
    return modules


@dataclass(frozen=True)
class _NoisyAttention:
    """Attention within documents, with noise on the scores: a mask [batch, n_heads, n, n], so for short rows."""

    labelled: Labelled
    config: Any
    strength: float

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        query, labelled = call.query, self.labelled
        document = labelled.ordinal.masked_fill(~labelled.valid, -1)
        distance = labelled.t[:, :, None] - labelled.t[:, None]
        seen = (document[:, :, None] == document[:, None]) & (distance >= 0)
        window = sliding_window(call, self.config)
        if window is not None:
            seen &= distance < window
        seen |= torch.eye(query.shape[2], dtype=torch.bool, device=query.device)
        shape = (*query.shape[:3], query.shape[2])
        noise = self.strength * torch.randn(shape, dtype=query.dtype, device=query.device)
        mask = additive_mask(seen[:, None], noise)
        return call.with_inputs(query, call.key, call.value, mask)


@dataclass(frozen=True)
class _NoisyFlexAttention:
    """Attention with noise on the scores, which flex attention forms tile by tile, without a mask of n x n."""

    strength: float

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        words = torch.randint(-(2**31), 2**31, call.query.shape[:2], dtype=torch.int32, device=call.query.device)
        noise = HashedNoise(words, torch.full((), self.strength, device=words.device))
        options: dict[str, Any] = {"position_bias": noise}
        if tiles := _tiles(call.query):
            options["kernel_options"] = {**tiles, **(call.options.get("kernel_options") or {})}
        return call.with_inputs(call.query, call.key, call.value, call.mask, **options)


def _tiles(query: torch.Tensor) -> dict[str, int]:
    """Options of flex attention for these queries: small tiles where they were measured, else none.

    Numbers of 32 bits, and the shared memory of other GPUs, may not hold them for large heads.
    """
    hopper = query.is_cuda and torch.cuda.get_device_capability(query.device)[0] == 9
    return SMALL_TILES if hopper and query.element_size() == 2 else {}


@dataclass(frozen=True)
class HashedNoise:
    """Normal noise for each score of attention, from a hash of where it is, without a tensor [batch, n_heads, n, n].

    A backward that forms scores again meets the same noise. Box and Muller's transform of two numbers of 16 bits.

    Args:
        words: a draw for each row and head, int32 of all 32 bits, [batch, n_heads].
        strength: standard deviation, float32, []. Where one process had two, torch.compile makes a symbol of a float,
            which the backward of flex attention refuses.

    Source: of the hash, github.com/skeeto/hash-prospector; G. Box and M. Muller, "A note on the generation of random
        normal deviates", 1958.
    """

    words: torch.Tensor
    strength: torch.Tensor

    def __getitem__(self, place: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Noise of (row, head, query, key), integer tensors that broadcast, as float32."""
        row, head, query, key = place
        word = self.words[row, head] ^ (query * 65537 + key).to(torch.int32)
        for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97), (15, 1)):
            # the shift of an int32 brings its sign with it
            word = (word ^ ((word >> shift) & ((1 << (32 - shift)) - 1))) * factor
        radius = torch.sqrt(-2 * torch.log(((word & 0xFFFF).float() + 0.5) / 65536))
        turn = ((word >> 16) & 0xFFFF).float() / 65536
        return self.strength * radius * _cosine(turn)


def _cosine(turn: torch.Tensor) -> torch.Tensor:
    """cos(2 pi turn) for 0 <= turn < 1."""
    x = (turn - 0.5).abs() - 0.25  # sin(2 pi x) is the same
    square = x * x
    series = _SINE[-1] * square + _SINE[-2]
    for factor in reversed(_SINE[:-2]):
        series = series * square + factor
    return series * x
