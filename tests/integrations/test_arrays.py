"""Arrays that others make of a batch stay as they were, whatever the loader reads afterwards."""

from __future__ import annotations

import os
from unittest import mock

import numpy as np
import pytest

from tpucache import CachedDataset, CachedLoader

pytestmark = pytest.mark.filterwarnings("ignore")  # they warn of themselves


def test_numpy_views_of_a_batch_keep_its_buffer(cache):
    loader = CachedLoader(CachedDataset(cache), 10, shuffle=True)
    kept = [(part, part.copy()) for images, _ in loader for part in [images.permute(0, 2, 3, 1).numpy()[3:5, ::2]]]
    list(loader)
    assert all(np.array_equal(part, copy) for part, copy in kept)


def test_jax_arrays_of_a_batch_keep_its_buffer(cache, needs):
    needs("jax")
    with mock.patch.dict(os.environ):  # jax sets variables that other libraries' look for a TPU trips over
        import jax.numpy as jnp

    loader = CachedLoader(CachedDataset(cache), 10, shuffle=True)
    kept = []
    for images, _ in loader:
        pixels = images.permute(0, 2, 3, 1).numpy()
        kept.append((jnp.asarray(pixels), pixels.copy()))  # on the CPU it may be the same memory
        del images, pixels
    list(loader)
    assert all(np.array_equal(array, copy) for array, copy in kept)
