"""A progress bar over the tokens that a model reads; it moves within one long row."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from ...rope.rotary import find_decoder

Done = Callable[[int], None]
"""Called with the number of tokens finished so far, losses included; the bar's own hooks see only decoder layers."""


@contextmanager
def token_bar(model: nn.Module, tokens: int, title: str, *, show: bool, times_read: int = 1) -> Iterator[Done]:
    """Show how many of `tokens` the model has read, and the time left.

    One forward pass over a long row takes minutes on a CPU, so forward hooks move the bar after every layer.

    Args:
        model: the model that reads; its layers have the hooks only inside the block.
        tokens: total over all forward passes in the block.
        title: label of the bar.
        show: whether to show a bar.
        times_read: how often the model reads each token.

    Yields:
        A function to call with the number of tokens finished so far.
    """
    if not show:
        yield lambda _: None
        return
    decoder = find_decoder(model)
    n_layers = getattr(decoder.config, "num_hidden_layers", None)
    groups = [m for m in decoder.modules() if isinstance(m, nn.ModuleList) and len(m) == n_layers]
    layers = list(groups[0]) if groups else [decoder]  # the decoder itself where a family has no list of layers
    with ExitStack() as stack:
        bar = stack.enter_context(tqdm(total=tokens, desc=title, unit="token", unit_scale=True))

        def move(_: nn.Module, __: Any, output: Any) -> None:
            if torch.compiler.is_compiling():
                return
            hidden = output[0] if isinstance(output, tuple) else output
            # one share is kept for the work after the last layer, such as the losses
            share = hidden.numel() / hidden.shape[-1] / (len(layers) + 1) / times_read
            bar.update(max(min(share, tokens - bar.n), 0))

        for layer in layers:
            stack.callback(layer.register_forward_hook(move).remove)
        yield lambda finished: bar.update(max(min(finished, tokens) - bar.n, 0))


def tell(line: str) -> None:
    """Print a line above the progress bars."""
    tqdm.write(line)
