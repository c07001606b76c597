"""Arrays that others make of a batch stay as they were, whatever the loader reads afterwards."""

from __future__ import annotations

import numpy as np

from tpucache import CachedDataset, CachedLoader


def test_numpy_views_of_a_batch_keep_its_buffer(cache):
    loader = CachedLoader(CachedDataset(cache), 10, shuffle=True)
    kept = [(part, part.copy()) for images, _ in loader for part in [images.permute(0, 2, 3, 1).numpy()[3:5, ::2]]]
    list(loader)
    assert all(np.array_equal(part, copy) for part, copy in kept)
