"""Inspect the Python stack where callers pass no context.

A module does not know whether a forward belongs to `generate` or to a trainer's step, which wrapper of a decoder is
being saved, or whether an interrupt ended a forward of another thread, which runs no hook. Transformers, TRL and PEFT
do not pass this on, and wrapping their methods would change classes that other models share.
"""

import sys
import threading
from collections.abc import Iterator
from types import FrameType


def frames(thread: threading.Thread | None = None) -> Iterator[FrameType]:
    """The stack frames of this thread or of `thread`, innermost first; none if it has ended.

    For this thread, the first frame is the caller of the function that iterates: a function that keeps its own frame in
    a variable is a reference cycle, which keeps all its locals in memory until garbage collection.
    """
    frame = sys._getframe(2) if thread is None else sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back
