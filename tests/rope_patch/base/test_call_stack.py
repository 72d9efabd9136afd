"""The calls in progress, of this thread and of others."""

import gc
import threading
import weakref

from rope_patch.base.call_stack import frames


def names(thread=None):
    return [frame.f_code.co_name for frame in frames(thread)]


def test_frames_begin_with_the_caller_and_go_outwards():
    def inner():
        return names()

    def outer():
        return inner()

    assert [name for name in outer() if name in ("frames", "inner", "outer")] == ["inner", "outer"]
    assert outer()[-1] == names()[-1] and len(outer()) == len(names()) + 2


def test_frames_of_another_thread_and_of_one_that_has_ended():
    inside, leave = threading.Event(), threading.Event()

    def waits_in_here():
        inside.set()
        leave.wait()

    thread = threading.Thread(target=waits_in_here)
    assert names(thread) == []  # not begun
    thread.start()
    inside.wait()
    assert "waits_in_here" in names(thread) and "waits_in_here" not in names()
    leave.set()
    thread.join()
    assert names(thread) == []


def test_looking_through_the_stack_keeps_nothing_alive():
    class Thing:
        pass

    def asks():
        thing = Thing()
        is_inside = any(frame.f_code.co_name == "asks" for frame in frames())
        for _ in frames():
            return weakref.ref(thing) if is_inside else None

    gc.disable()
    try:
        assert asks()() is None
    finally:
        gc.enable()
