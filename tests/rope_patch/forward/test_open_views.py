"""Views of threads, coroutines and copies; native_rope in any order; what an interrupt leaves behind."""

import asyncio
import contextvars
import copy
import gc
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from support.tiny import tiny, tokens

from rope_patch import describe, native_rope, patch, patch_model, rope_view, unpatch_model
from rope_patch.views import Cyclic, RandomBase, Skip

VIEW = Skip(split=4, skip=100)


@torch.no_grad()
def test_threads_see_their_own_views():
    model, ids = patch_model(tiny(), "standard"), tokens(2, 16)
    views = [Skip(split=4, skip=30 * (i + 1)) for i in range(4)]
    expected = []
    for view in views:
        with rope_view(model, view):
            expected.append(model(ids).logits)
    begin = threading.Barrier(4)

    def run(i):
        begin.wait()
        actual = []
        for _ in range(10):
            with rope_view(model, views[i]):
                actual.append(model(ids).logits)
        return actual

    with ThreadPoolExecutor(4) as pool:
        for i, actual in enumerate(pool.map(run, range(4))):
            assert all(torch.equal(logits, expected[i]) for logits in actual)


@torch.no_grad()
def test_a_block_that_begins_while_that_of_another_thread_ends_keeps_its_view(monkeypatch):
    model, ids = tiny(), tokens(1, 12)
    twin = tiny()
    with rope_view(twin, Skip(split=4, skip=30)):
        expected = twin(ids).logits
    ending, begun = threading.Event(), threading.Event()
    uninstall = patch._uninstall

    def slow(*args, **kwargs):  # the other block begins here, when this one has found that it is the last
        ending.set()
        begun.wait(0.5)
        uninstall(*args, **kwargs)

    monkeypatch.setattr(patch, "_uninstall", slow)
    seen = []

    def other():
        ending.wait(5)
        with rope_view(model, Skip(split=4, skip=30)):
            begun.set()
            thread.join()
            seen.append(model(ids).logits)

    def one():
        with rope_view(model, Skip(split=2, skip=9)):
            model(ids)

    thread, second = threading.Thread(target=one), threading.Thread(target=other)
    thread.start()
    second.start()
    second.join(10)
    assert len(seen) == 1 and torch.equal(seen[0], expected)


def test_a_thread_without_a_view_beside_one_with_a_view_is_told():
    model, ids = tiny(), tokens(1, 8)
    with rope_view(model, VIEW), ThreadPoolExecutor(1) as pool:
        seen = model(ids).logits
        with pytest.raises(ValueError, match="rope_view is open on this model in another thread or coroutine"):
            pool.submit(model, ids).result()
        inherited = pool.submit(contextvars.copy_context().run, model, ids).result().logits
    assert torch.equal(inherited, seen)
    with ThreadPoolExecutor(1) as pool:  # and nobody is kept waiting by the call that was refused
        assert not torch.equal(pool.submit(model, ids).result(timeout=60).logits, seen)


@torch.no_grad()
def test_coroutines_see_their_own_views():
    model, ids = patch_model(tiny(), "standard"), tokens(1, 8)
    expected = []
    for skip in (50, 90):
        with rope_view(model, Skip(split=4, skip=skip)):
            expected.append(model(ids).logits)

    async def one(skip):
        actual = []
        for _ in range(3):
            with rope_view(model, Skip(split=4, skip=skip)):
                await asyncio.sleep(0)
                actual.append(model(ids).logits)
            await asyncio.sleep(0)
        return actual

    async def both():
        return await asyncio.gather(one(50), one(90))

    for actual, right in zip(asyncio.run(both()), expected, strict=True):
        assert all(torch.equal(logits, right) for logits in actual)


@torch.no_grad()
@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_copy_made_inside_a_block_has_no_view(how):
    model, ids = tiny(), tokens(1, 8)
    expected = model(ids).logits
    with rope_view(model, VIEW):
        other = how(model)
        assert torch.equal(other(ids).logits, expected)
    assert torch.equal(other(ids).logits, expected) and describe(other).view is None
    unpatch_model(other)
    assert not other.model._forward_pre_hooks and torch.equal(other(ids).logits, expected)


@torch.no_grad()
def test_a_model_that_came_unpatched_is_not_patched_inside_native_rope():
    model, ids = tiny(), tokens(1, 8)
    expected = model(ids).logits
    with native_rope(model), native_rope(model):
        for context in (nullcontext(), rope_view(model, "standard")):
            with context, pytest.raises(ValueError, match="patch_model was called inside native_rope"):
                patch_model(model, "pi", factor=4.0)
        assert torch.equal(model(ids).logits, expected) and torch.equal(copy.deepcopy(model)(ids).logits, expected)
    assert not torch.equal(patch_model(model, "pi", factor=4.0)(ids).logits, expected)


@torch.no_grad()
def test_nothing_takes_the_schedule_away_inside_native_rope():
    model, ids = patch_model(tiny(), "pi", factor=4.0), tokens(1, 8)
    expected = model(ids).logits
    with native_rope(model):
        for call in (
            lambda: unpatch_model(model),
            lambda: patch_model(model, "yarn", factor=2.0),
            lambda: patch_model(model, "skip"),
            lambda: copy.deepcopy(model),
        ):
            with pytest.raises(ValueError, match="inside native_rope: leave the block first"):
                call()
    assert torch.equal(model(ids).logits, expected) and describe(model).rope_parameters["factor"] == 4.0


@torch.no_grad()
@pytest.mark.parametrize("order", ["native first", "view first"])
def test_blocks_may_end_in_any_order(order):
    model, ids = tiny(), tokens(1, 8)
    expected = model(ids).logits
    view, native = rope_view(model, VIEW), native_rope(model)
    for block in (view, native):
        block.__enter__()
    for block in (native, view) if order == "native first" else (view, native):
        block.__exit__(None, None, None)
    assert torch.equal(model(ids).logits, expected)
    assert not model.model._forward_pre_hooks and not hasattr(model.model, "_rope_patch")


@torch.no_grad()
def test_native_blocks_of_a_rescaled_model_may_end_in_any_order():
    model, ids = patch_model(tiny(), "pi", factor=4.0), tokens(1, 8)
    expected = model(ids).logits
    first, second = native_rope(model), native_rope(model)
    first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    assert not torch.equal(model(ids).logits, expected)
    second.__exit__(None, None, None)
    assert torch.equal(model(ids).logits, expected)


def test_an_error_at_the_beginning_of_native_rope_leaves_the_model_as_it_was(monkeypatch):
    model = patch_model(tiny(), "pi", factor=4.0)
    before = model.model.rotary_emb.inv_freq.clone()
    state = model.model._rope_patch
    write = type(state.native.rotary["rotary_emb"]).write

    def fails(self, module):
        write(self, module)
        if torch.equal(module.inv_freq, state.native.rotary["rotary_emb"].buffers["inv_freq"][0]):
            raise RuntimeError("stop")

    monkeypatch.setattr(type(state.native.rotary["rotary_emb"]), "write", fails)
    with pytest.raises(RuntimeError, match="stop"), native_rope(model):
        pass
    assert torch.equal(model.model.rotary_emb.inv_freq, before) and not state.native_blocks
    monkeypatch.undo()
    unpatch_model(model)


@torch.no_grad()
def test_an_interrupt_in_a_forward_leaves_nothing_behind():
    """Hooks that are always called are not called for it."""
    model, ids = tiny(), tokens(1, 8)
    expected = model(ids).logits

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = model.model.rotary_emb.register_forward_hook(interrupt, prepend=True)
    with pytest.raises(KeyboardInterrupt), rope_view(model, RandomBase(8.0)):
        model(ids)
    handle.remove()
    assert torch.equal(model(ids).logits, expected)
    patch_model(model, Cyclic())
    handle = model.model.rotary_emb.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.train()(ids)
    handle.remove()
    model.eval()
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(model, ids).result(timeout=60).logits, expected)


@torch.no_grad()
def test_caches_are_gone_as_soon_as_nobody_holds_them():
    model, ids = tiny(), tokens(2, 8)
    gc.collect()
    gc.disable()
    try:
        with rope_view(model, VIEW):
            caches = [weakref.ref(model(ids, use_cache=True).past_key_values) for _ in range(50)]
        assert sum(cache() is not None for cache in caches) == 0
    finally:
        gc.enable()
