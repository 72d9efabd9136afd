"""One thread at a time in a forward of a patched model."""

import threading

from torch import nn

from ..base.call_stack import frames


class ForwardLock:
    """Lets one thread at a time into a forward of the model, whose hooks keep the indices of that forward.

    Thread-local storage would need no lock, but Dynamo drops what a traced forward writes there. A copy of the model
    gets a new lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: threading.Thread | None = None

    def __reduce__(self) -> "tuple[type[ForwardLock], tuple[()]]":
        return ForwardLock, ()

    def acquire(self, decoder: nn.Module) -> None:
        """Wait until no other thread is in a forward of `decoder`."""
        if self._owner is threading.current_thread():
            return  # an interrupt left a forward without `release`
        while not self._lock.acquire(timeout=0.5):
            # torch's frame of each module that the owner is in
            calls = [] if self._owner is None else [f for f in frames(self._owner) if f.f_code.co_name == "_call_impl"]
            if self._owner is not None and all(call.f_locals.get("self") is not decoder for call in calls):
                break  # an interrupt took the owner out of its forward without `release`
        self._owner = threading.current_thread()

    def release(self) -> None:
        """Let the next thread into a forward."""
        if self._owner is threading.current_thread():
            self._owner = None
            self._lock.release()
