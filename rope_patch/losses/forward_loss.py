"""Losses that are computed while a model's forward runs, inside any wrapper, by hooks of its decoder."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..adapters.watch import adapter_configs
from ..families.attention_calls import AttentionCall, watched_attention
from ..families.capabilities import why_unreachable
from ..forward.state import state_of
from ..layout.shards import SequenceShard
from ..rope.rotary import find_causal_lm, find_decoder

REQUEST = "loss_request"
"""Name of the keyword argument that carries a `LossRequest` through a model, down to its attention."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a decoder."""


class LossRequest:
    """Carries the batch's labels into a forward as a keyword argument; the forward writes the loss to it.

    What `ForwardLoss.before` computes waits here for `ForwardLoss.after`, which drops what is large. A request is a
    plain object, because wrappers such as DDP rebuild the dictionaries, dataclasses and tensors they pass on.

    Args:
        valid: which tokens are real, bool [batch, n].
        document: of each token, int64 [batch, n], -1 on padding.
    """

    shard: SequenceShard | None = None  # which of these tokens this rank holds; None means all

    def __init__(self, valid: torch.Tensor, document: torch.Tensor) -> None:
        self.valid = valid
        self.document = document
        self.teaching = False  # whether the running forward is a teacher's
        self.compared = False  # whether the decoder has run with this request

    def visit(self, call: AttentionCall) -> torch.Tensor | None:
        """Called in each attention call of the forward; a tensor that it returns replaces the output of attention."""
        return None


@dataclass(frozen=True)
class DecoderCall:
    """A call of a decoder whose forward has not begun; its keyword arguments hold the request."""

    decoder: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run_before(self) -> Any:
        """Run an extra forward over the same tokens before the one that was called, and return its output."""
        # without the request, the loss hooks do nothing
        return self.decoder(*self.args, **{name: x for name, x in self.kwargs.items() if name != REQUEST})


class ForwardLoss:
    """Inside `active()`, a forward that gets a `LossRequest` as `loss_request` writes a loss to it.

    Backward has to run inside the block too, unless it is that of `backward_outside(loss)`. A subclass computes its
    loss in `after`, and in `before` what has to run before the decoder's own forward.

    Args:
        model: patched or not, bare or wrapped.

    Raises:
        ValueError: the model does not pass the request to its decoder, has prompt-learning adapters, or adds noise to
            its embeddings (NEFTune).
    """

    def __init__(self, model: nn.Module) -> None:
        self.causal_lm: Any = find_causal_lm(model)
        self.decoder: Any = find_decoder(model)
        require(why_unreachable(self.causal_lm, self.decoder))
        refuse_prompts(model)
        alpha = getattr(self.causal_lm.get_input_embeddings(), "neftune_noise_alpha", None)
        if alpha is not None:
            raise ValueError(
                f"this model adds noise to its embeddings (NEFTune, neftune_noise_alpha={alpha}), which differs "
                "in each forward, and distillation compares forwards. Switch it off, e.g. with transformers' "
                "deactivate_neftune."
            )
        # image encoders call the same attention functions and may get the request: only these modules answer it
        self._text_modules = {id(module) for module in self.decoder.modules()}
        self.state = state_of(self.decoder)

    def check_length(self, length: int) -> None:
        """Raise ValueError if the loss cannot read documents of `length` tokens."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """Compute the loss of each forward in the block that gets a request."""
        handles = [
            # before the hook that draws the view: the end of a teacher's forward clears the view in force
            self.decoder.register_forward_pre_hook(self._call_before, with_kwargs=True, prepend=True),
            self.decoder.register_forward_hook(self._call_after, with_kwargs=True),
            self.causal_lm.register_forward_hook(self._require_compared, with_kwargs=True),
        ]
        try:
            with watched_attention(self.causal_lm, self._take_request), self._watching():
                yield
        finally:
            for handle in handles:
                handle.remove()

    def backward_outside(self, output: torch.Tensor) -> torch.Tensor:
        """The loss or states of a forward, whose backward may run after `active()`: it watches attention itself.

        Gradient checkpointing calls the attention of each layer again in backward, with the request.
        """
        watched: torch.Tensor = _WatchedBackward.apply(output, self)
        return watched

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Hooks and settings of a subclass that stay in place while forwards run."""
        yield

    def _take_request(self, call: AttentionCall) -> torch.Tensor | None:
        request: LossRequest | None = call.options.pop(REQUEST, None)
        return None if request is None or id(call.module) not in self._text_modules else request.visit(call)

    def _call_before(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        request: LossRequest | None = kwargs.get(REQUEST)
        if request is None or request.teaching:
            return None
        return self.before(request, DecoderCall(decoder, args, kwargs))

    def _call_after(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        request: LossRequest | None = kwargs.get(REQUEST)
        if request is not None and not request.teaching:
            self.after(request, output)
            request.compared = True

    def _require_compared(
        self, causal_lm: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        request: LossRequest | None = kwargs.get(REQUEST)
        if request is not None and not (request.compared or request.teaching):
            raise ValueError(
                f"{type(causal_lm).__name__} does not pass keyword arguments on to its decoder, so the loss cannot be "
                "computed there. Use objective='clm'."
            )

    def before(self, request: Any, call: DecoderCall) -> Arguments | None:
        """Run before the decoder's forward; returns new arguments for it, or None to keep them."""
        return None

    def after(self, request: Any, output: Any) -> None:
        """Compute the loss from the decoder's output, and write it to the request; by default nothing."""


class _WatchedBackward(torch.autograd.Function):
    """The identity; from its backward on, attention is watched until the whole backward pass ends."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, forward_loss: ForwardLoss) -> torch.Tensor:  # noqa: D102
        ctx.forward_loss = forward_loss
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: D102
        block = ExitStack()
        block.enter_context(watched_attention(ctx.forward_loss.causal_lm, ctx.forward_loss._take_request))
        # not called if the backward pass raises: then the block ends as Python frees it
        torch.autograd.Variable._execution_engine.queue_callback(block.close)
        return gradient, None


def call_with(model: nn.Module, inputs: dict[str, Any], request: LossRequest, **options: Any) -> torch.Tensor:
    """Run a model with a request; returns a zero that ties every parameter of the path to the loss.

    The loss needs no logits; those of the last token are what wrappers that wait for all gradients want.

    Args:
        model: bare or wrapped.
        inputs: a batch; its labels are left out.
        request: gets the loss.
        **options: of the model's forward.
    """
    inputs = {name: value for name, value in inputs.items() if name not in ("labels", "shift_labels")}
    outputs = model(**{**inputs, **options, "logits_to_keep": 1, "use_cache": False, REQUEST: request})
    zero: torch.Tensor = 0.0 * outputs.logits.float().sum()
    return zero


def require(reason: str | None) -> None:
    """Raise the reason why something is not possible, if there is one."""
    if reason is not None:
        raise ValueError(reason)


def refuse_prompts(model: nn.Module) -> None:
    """Raise ValueError if an adapter of the model learns prompts."""
    for name, config in adapter_configs(model).items():
        if config.is_prompt_learning:
            raise ValueError(
                f"adapter {name!r} learns prompts ({config.peft_type.value}): it puts virtual tokens before those of "
                "the sequence, and losses of hidden states would mix up the two. Use LoRA, or objective='clm' without "
                "objective_args."
            )


@contextmanager
def without_gradient(device_type: str) -> Iterator[None]:
    """Switch off gradients and the weight cache of autocast.

    Autocast would keep the weights it cast here, and a later forward with gradients would use them without a gradient.
    """
    enabled = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type)
    # https://github.com/pytorch/pytorch/issues/112583, fixed by https://github.com/pytorch/pytorch/pull/165068
    with torch.no_grad(), torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=False):
        yield
