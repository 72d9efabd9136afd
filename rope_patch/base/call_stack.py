"""The calls in progress, for what no argument tells.

A module is not told who calls it: whether a forward belongs to `generate` or to a trainer's step, which wrappers are
being saved around a decoder, and whether a thread was thrown out of a forward by an interrupt, which runs no hook.
Transformers, TRL and PEFT hand none of it down, and wrapping their methods would change classes that other models
share. So the stack is read, in a few places, and every one reads it here.
"""

import sys
import threading
from collections.abc import Iterator
from types import FrameType


def frames(thread: threading.Thread | None = None) -> Iterator[FrameType]:
    """The frames of the calls in progress in this thread or in `thread`, innermost first; none if it has ended.

    Those of this thread begin with the caller of whoever asks for the first frame: a function that keeps its own frame
    in a variable would stay in memory, with all that it holds, until the garbage collector comes by.
    """
    frame = sys._getframe(2) if thread is None else sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back
