"""Controls (ablations) of self-distillation: noise in dropout or attention scores instead of a view."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from ..attention.masks import additive_mask
from ..base.validators import require_number
from ..families.attention_calls import AttentionCall, attention_kernel, attention_name, sliding_window
from ..layout.labelled import Labelled
from .forward_loss import DecoderCall
from .passes import Passes, ViewRequest

Kind = Literal["dropout", "attention_noise"]

# tiles of flex attention's forward: the noise needs registers beside the scores, and with the default tiles of
# 128 x 128 they spill on Hopper, which takes eight times as long (benchmarks/noise_attention.py)
SMALL_TILES = {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 32}
# Taylor series of sin(2 pi x) for |x| <= 1/4, error at most 6e-8: CUDA's cosine would go through memory for each
# score, to reduce large angles
_SINE = [(-1) ** k * (2 * math.pi) ** (2 * k + 1) / math.factorial(2 * k + 1) for k in range(6)]


@dataclass(frozen=True, kw_only=True)
class Control:
    """Noise instead of a view, for all rows of a document.

    - "dropout": both passes apply dropout to the outputs of attention and MLP of each layer, independently.
    - "attention_noise": the second pass adds normal noise to the scores of attention, before the softmax. Flex
      attention needs memory linear in n; sdpa and eager need a mask of n x n numbers per head.

    Args:
        kind: "dropout" or "attention_noise".
        strength: dropout probability, or standard deviation of the noise. The paper gives neither.

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
    """A plain forward, then one under noise, both at true positions.

    Noise comes from torch's generator, so gradient checkpointing repeats it and a trainer's checkpoint saves its state.
    In evaluation, the caller sets `evaluation_seed` for each batch, so that evaluations with the same batch size have
    the same noise.

    Raises:
        ValueError: layers without attention and MLP, or an attention implementation without additive masks.
    """

    def __init__(self, causal_lm: Any, decoder: Any, control: Control) -> None:
        self.causal_lm, self.decoder, self.control = causal_lm, decoder, control
        self._modules = _noisy_modules(decoder) if control.kind == "dropout" else []
        if control.kind == "attention_noise" and attention_kernel(causal_lm) not in ("sdpa", "eager", "flex"):
            raise ValueError(
                f"attention_noise changes scores, which {attention_name(causal_lm)!r} does not allow: load the model "
                "with flex_attention, or for short sequences with sdpa."
            )
        self.evaluation_seed = 0
        self._dropping = False

    def before_standard(self) -> None:
        # in training this pass has dropout too; in evaluation its loss is the plain one
        self._dropping = self.decoder.training

    def before(self, request: ViewRequest, call: DecoderCall) -> None:
        self.before_standard()
        request.standard = call.run_before().last_hidden_state
        self._dropping = True
        if self.control.kind == "attention_noise":
            if attention_kernel(self.causal_lm) == "flex":
                request.attention = partial(_noisy_flex_attention, strength=self.control.strength)
            else:
                request.attention = partial(
                    _noisy_attention,
                    labelled=request.labelled,
                    config=self.decoder.config,
                    strength=self.control.strength,
                )

    def after(self, request: ViewRequest, output: Any) -> None:
        request.view = output.last_hidden_state
        request.first_changed = torch.zeros_like(request.labelled.documents.length)  # noise changes every token

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
            raise ValueError(
                f"dropout is applied to the outputs of attention and MLP, and a layer of this model has: {names}."
            )
        modules += [*attention, *mlp]
    return modules


def _noisy_attention(call: AttentionCall, labelled: Labelled, config: Any, strength: float) -> torch.Tensor:
    """Attention within documents, with noise on the scores by a mask [batch, n_heads, n, n], for short sequences."""
    query = call.query  # [batch, n_heads, n, head_dim]
    # [batch, n]; padding attends to padding, so that no softmax is empty
    document = labelled.ordinal.masked_fill(~labelled.valid, -1)
    distance = labelled.t[:, :, None] - labelled.t[:, None]  # [batch, n, n], and so is seen
    seen = (document[:, :, None] == document[:, None]) & (distance >= 0)
    window = sliding_window(call, config)
    if window is not None:
        seen &= distance < window
    noise = strength * torch.randn((*query.shape[:3], query.shape[2]), dtype=query.dtype, device=query.device)
    return call.with_inputs(query, call.key, call.value, additive_mask(seen[:, None], noise))


def _noisy_flex_attention(call: AttentionCall, strength: float) -> torch.Tensor:
    """Attention with noise on the scores, which flex attention computes tile by tile, without a mask of n x n."""
    words = torch.randint(-(2**31), 2**31, call.query.shape[:2], dtype=torch.int32, device=call.query.device)
    noise = HashedNoise(words, torch.full((), strength, device=words.device))
    options: dict[str, Any] = {"position_bias": noise}
    if tiles := _tiles(call.query):
        options["kernel_options"] = {**tiles, **(call.options.get("kernel_options") or {})}
    return call.with_inputs(call.query, call.key, call.value, call.mask, **options)


def _tiles(query: torch.Tensor) -> dict[str, int]:
    """Options of flex attention for these queries: small tiles on the GPU where they were measured, else none.

    In float32, or on other GPUs, large heads may not fit into shared memory with these tiles.
    """
    hopper = query.is_cuda and torch.cuda.get_device_capability(query.device)[0] == 9
    return SMALL_TILES if hopper and query.element_size() == 2 else {}


@dataclass(frozen=True)
class HashedNoise:
    """Normal noise for each attention score, from a hash of its place, without a tensor [batch, n_heads, n, n].

    A backward that recomputes scores gets the same noise. It is the Box-Muller transform of two 16-bit numbers.

    Args:
        words: a draw for each row and head, int32 of all 32 bits, [batch, n_heads].
        strength: standard deviation, float32 tensor []: for a second value of a Python float, torch.compile makes a
            symbol, which the backward of flex attention does not accept.

    Source: of the hash, github.com/skeeto/hash-prospector; G. Box and M. Muller, "A note on the generation of random
        normal deviates", 1958.
    """

    words: torch.Tensor
    strength: torch.Tensor

    def __getitem__(self, place: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Noise of (row, head, query, key), integer tensors that broadcast, as float32."""
        row, head, query, key = place
        word = self.words[row, head] ^ (query * 65537 + key).to(torch.int32)  # one number a pair below 65535 tokens
        for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97), (15, 1)):
            # shifting an int32 keeps its sign, so mask it off
            word = (word ^ ((word >> shift) & ((1 << (32 - shift)) - 1))) * factor
        # of the low 16 bits, in (0, 1), and then of the high ones, in [0, 1)
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
