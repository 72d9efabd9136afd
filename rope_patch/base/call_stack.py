"""Inspect the Python stack where callers pass no context.

A module does not know its caller: whether a forward belongs to `generate` or to a trainer's step, which wrapper around
a decoder is being saved, or whether an interrupt took a thread out of a forward, which runs no hook. Transformers, TRL
and PEFT do not pass this on, and wrapping their methods would change classes that other models share.
"""

import sys
import threading
from collections.abc import Iterator
from types import FrameType


def frames(thread: threading.Thread | None = None) -> Iterator[FrameType]:
    """The stack frames of this thread or of `thread`, innermost first; none if it has ended.

    For this thread, the first frame is the caller of the function that iterates. A function that kept its own frame in
    a variable would be a cycle, in memory with all its locals until garbage collection.
    """
    frame = sys._getframe(2) if thread is None else sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back
