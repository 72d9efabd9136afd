"""A bar over the tokens that a model reads, which moves within one long row."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from ...rope.rotary import find_decoder

Done = Callable[[int], None]
"""Takes the tokens that are through by now: the decoder's layers alone do not say when losses are computed."""


@contextmanager
def token_bar(model: nn.Module, tokens: int, title: str, *, show: bool, times_read: int = 1) -> Iterator[Done]:
    """Show how many of `tokens` the model has read, and the time left.

    One forward of a long row takes minutes on a CPU, so the bar moves after every layer, by that layer's share.

    Args:
        model: the model that reads; hooks are on its layers inside the block only.
        tokens: of all forwards in the block together.
        title: what the bar is called.
        show: whether there is a bar.
        times_read: how often the model reads each of the tokens.

    Yields:
        A function to be called with the tokens that are through.
    """
    if not show:
        yield lambda _: None
        return
    layers = _layers(model)
    with ExitStack() as stack:
        bar = stack.enter_context(tqdm(total=tokens, desc=title, unit="token", unit_scale=True))

        def move(_: nn.Module, __: Any, output: Any) -> None:
            if torch.compiler.is_compiling():
                return
            hidden = output[0] if isinstance(output, tuple) else output
            # one share more than there are layers: what comes after the last one is not through yet
            share = hidden.numel() / hidden.shape[-1] / (len(layers) + 1) / times_read
            bar.update(max(min(share, tokens - bar.n), 0))

        for layer in layers:
            stack.callback(layer.register_forward_hook(move).remove)
        yield lambda through: bar.update(max(min(through, tokens) - bar.n, 0))


def tell(line: str) -> None:
    """Print a line above the bars that are shown."""
    tqdm.write(line)


def _layers(model: nn.Module) -> list[nn.Module]:
    """The decoder's layers; the decoder itself where a family keeps them in another way."""
    decoder = find_decoder(model)
    n_layers = getattr(decoder.config, "num_hidden_layers", None)
    groups = [m for m in decoder.modules() if isinstance(m, nn.ModuleList) and len(m) == n_layers]
    return list(groups[0]) if groups else [decoder]
