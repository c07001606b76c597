"""Batch buffers come back when, and only when, nothing refers to them."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import weakref
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from patience import PATIENCE

from tpucache.errors import UsageError
from tpucache.loading.reading import memory as buffers_module
from tpucache.loading.reading.memory import Buffer, BufferPool
from tpucache.store.fields import Field

FIELDS = (Field("image", "raw", "|u1", (4, 4, 3)), Field("mask", "raw", "|u1", (4, 4)))


def test_a_buffer_comes_back_when_the_last_tensor_over_any_field_dies():
    pool = BufferPool(FIELDS, 2)
    first = pool.take()
    image, mask = (torch.from_numpy(array) for array in pool.lend(first, 2))
    row = image[1].permute(2, 0, 1)
    del image
    assert pool.take() is not first
    del mask
    assert pool.take() is not first
    del row
    assert pool.take() is first


def test_numpy_views_of_a_tensor_keep_its_buffer_out():
    pool = BufferPool(FIELDS[:1], 2)
    buffer = pool.take()
    (array,) = pool.lend(buffer, 1)
    view = torch.from_numpy(array).numpy()[0, 1:]
    del array
    assert pool.take() is not buffer
    del view
    assert pool.take() is buffer


def test_rows_are_views_of_the_arrays():
    buffer = BufferPool(FIELDS, 3).take()
    for array in buffer.arrays:
        array[:] = 0
    buffer.views(np.array([1]))[0][0][:] = bytes(range(48))
    assert buffer.arrays[0][1].ravel().tolist() == list(range(48))
    assert not np.any(buffer.arrays[0][[0, 2]])


def test_a_buffer_whose_fields_die_in_two_threads_at_once_comes_back_once():
    pool = BufferPool(FIELDS, 2)
    fields = pool.lend(pool.take(), 2)
    begin, meeting = threading.Barrier(2), threading.Barrier(2)

    def pause(frame: FrameType, event: str, _: Any) -> Any:
        """Let both threads reach each line of the pool before either runs it."""
        if frame.f_code.co_filename != buffers_module.__file__:
            return None
        if event == "line":
            with contextlib.suppress(threading.BrokenBarrierError):  # the other thread has nothing to do
                meeting.wait(0.2)
        return pause

    def free(array: list[Any]) -> None:
        begin.wait(PATIENCE)
        sys.settrace(pause)
        try:
            array.clear()
        finally:
            sys.settrace(None)

    holders = [[fields.pop()], [fields.pop()]]
    threads = [threading.Thread(target=free, args=(holder,)) for holder in holders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pool.take() is not pool.take()


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "left"), [(0.0, 2), (30.0, 100)])
def test_buffers_that_no_batch_needed_for_a_while_are_freed(seconds, left, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(buffers_module, "_SECONDS", seconds)
    pool = BufferPool(FIELDS, 2)
    kept = [pool.lend(pool.take(), 2) for _ in range(100)]
    buffers = weakref.WeakSet(array.base._buffer for array, _ in kept)
    assert len(buffers) == 100
    del kept
    for _ in range(2 * 64):
        one, two = pool.take(), pool.take()
        pool.give_back(one)
        pool.give_back(two)
    del one, two
    gc.collect()
    assert len(buffers) == left


def test_buffers_that_were_prepared_are_the_first_that_are_lent(monkeypatch: pytest.MonkeyPatch):
    pool = BufferPool(FIELDS, 2)
    pool.prepare(3, 2)
    with monkeypatch.context() as patch:
        patch.setattr(buffers_module, "Buffer", lambda *_: pytest.fail("a buffer was made although one was prepared"))
        buffers = [pool.take() for _ in range(3)]
    assert len({id(buffer) for buffer in buffers}) == 3
    for buffer in buffers:
        pool.give_back(buffer)
    pool.prepare(5, 2)  # batches were read since: as many as they need are there
    assert len(pool._free) == 3


@pytest.mark.parametrize("seconds", [0.0, 30.0])
def test_buffers_that_are_in_use_now_and_then_are_kept(seconds, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(buffers_module, "_SECONDS", seconds)
    pool = BufferPool(FIELDS, 2)
    first = [pool.take() for _ in range(3)]
    for _ in range(200):
        for buffer in first:
            pool.give_back(buffer)
        assert {id(pool.take()) for _ in range(3)} == {id(buffer) for buffer in first}


def test_a_batch_that_no_memory_holds_is_refused():
    with pytest.raises(UsageError, match=r"a batch of 1,048,576 samples takes .* GB, more than there is"):
        Buffer([Field("image", "raw", "|u1", (1 << 15, 1 << 15, 1))], 1 << 20)
    with pytest.raises(UsageError, match="make batches smaller"):
        Buffer([Field("image", "raw", "<f8", (1 << 15, 1 << 15, 1))], 1 << 40)


def test_a_buffer_may_have_no_rows_and_fields_no_bytes():
    fields = (*FIELDS, Field("nothing", "raw", "<f4", (0, 3)), Field("number", "raw", "<i8", ()))
    assert Buffer(fields, 0).views(np.arange(0)) == []
    (row,) = Buffer(fields, 1).views(np.arange(1))
    assert [len(part) for part in row] == [48, 16, 0, 8]


def test_a_buffer_of_its_own_for_each_batch_gives_the_garbage_collection_little_to_look_at():
    # What it looks at in each batch sets it off, again and again, and all threads stop meanwhile.
    buffers = BufferPool(FIELDS, 2048, np.empty)
    gc.disable()
    try:
        before = len(gc.get_objects())
        buffer = buffers.take()
        taken = len(gc.get_objects()) - before
        assert len(buffer.views(np.arange(5))) == 5
    finally:
        gc.enable()
    assert taken < 100
