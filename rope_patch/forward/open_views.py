"""Which `rope_view` blocks are open on a model, each in the thread and coroutine that opened it.

Threads, coroutines and graphs of torch.compile may share a model. Context variables keep threads and coroutines apart;
Dynamo cannot trace these, so that graphs read a thread-local list.
"""

import threading
from contextvars import ContextVar
from typing import Generic, TypeVar

import torch

S = TypeVar("S")

# (stack, source) of each block that is open in a context, innermost last
_HERE: ContextVar[tuple[tuple[object, object], ...]] = ContextVar("rope_patch_open_views", default=())


class _ThreadStack(threading.local):
    """The open sources of one thread, innermost last; a copy has none."""

    def __init__(self) -> None:
        self.stack: tuple[object, ...] = ()

    def __reduce__(self) -> "tuple[type[_ThreadStack], tuple[()]]":
        return _ThreadStack, ()


class OpenSources(Generic[S]):
    """A stack of sources of RoPE indices, innermost last; a copy or a pickle of the model has none of them."""

    def __init__(self) -> None:
        self._everywhere: list[S] = []  # in all threads
        self._traced = _ThreadStack()  # in this one, for graphs

    def __reduce__(self) -> "tuple[type[OpenSources[S]], tuple[()]]":
        return OpenSources, ()

    def __len__(self) -> int:
        return len(self._everywhere)

    @torch.compiler.disable  # Dynamo drops what is written to a thread's own storage
    def append(self, source: S) -> None:
        """Open a block here."""
        self._everywhere.append(source)
        self._traced.stack = (*self._traced.stack, source)
        _HERE.set((*_HERE.get(), (self, source)))

    @torch.compiler.disable
    def remove(self, source: S) -> None:
        """Close the last block with `source`, whichever are open inside it."""
        last = max(i for i, other in enumerate(self._everywhere) if other is source)
        del self._everywhere[last]
        here = [i for i, other in enumerate(self._traced.stack) if other is source]
        if here:  # otherwise it was opened in another thread
            self._traced.stack = self._traced.stack[: here[-1]] + self._traced.stack[here[-1] + 1 :]
        entries = _HERE.get()
        here = [i for i, entry in enumerate(entries) if entry[0] is self and entry[1] is source]
        if here:
            _HERE.set(entries[: here[-1]] + entries[here[-1] + 1 :])

    def pop(self) -> None:
        """Close the last block that was opened here."""
        source = self.innermost()
        assert source is not None
        self.remove(source)

    def innermost(self) -> S | None:
        """What the innermost block of this thread and coroutine opened, None where no block is open.

        Raises:
            ValueError: blocks are open on the model, but none of them here.
        """
        if torch.compiler.is_compiling():
            return self._traced.stack[-1] if self._traced.stack else None  # type: ignore[return-value]
        if not self._everywhere:
            return None
        for owner, source in reversed(_HERE.get()):
            if owner is self and any(source is other for other in self._everywhere):
                return source  # type: ignore[return-value]
        raise ValueError(
            "rope_view is open on this model in another thread or coroutine, but not in this one, so the RoPE indices "
            "of this forward are not known. Open rope_view where the model is called, with 'standard' for true "
            "positions, or run the thread in the context of the block: "
            "Thread(target=contextvars.copy_context().run, args=(model.generate, ...)). Continuous batching "
            "(generate_batch) runs the model in its own thread and does not work with rope_view: use generate."
        )
