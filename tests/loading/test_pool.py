"""Batch buffers come back when, and only when, nothing refers to them."""

from __future__ import annotations

import numpy as np
import torch

from tpucache.loading.pool import BufferPool
from tpucache.store.codec import Field

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
