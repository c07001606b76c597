"""Grain reads a CachedDataset in threads and in processes, and takes its own checkpoint on another mount."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from tpucache import CachedDataset

pytestmark = pytest.mark.filterwarnings("ignore")  # it warns of itself


@pytest.fixture
def grain(needs):
    needs("grain")
    import grain

    return grain


def batches(grain, cache, **options):
    source = grain.MapDataset.source(CachedDataset(cache)).seed(3).shuffle()
    arrays = source.map(lambda item: (item[0].numpy(), item[1].numpy()))
    return arrays.batch(30).to_iter_dataset(grain.ReadOptions(**options))


def test_grain_gives_the_cache_s_samples_whatever_reads_them(grain, cache):
    dataset = CachedDataset(cache)
    one, many = (list(batches(grain, cache, num_threads=threads)) for threads in (1, 8))
    for (images, labels), (others, other_labels) in zip(one, many, strict=True):
        assert np.array_equal(images, others)
        assert np.array_equal(labels, other_labels)
    seen = sorted(image.tobytes() for images, _ in one for image in images)
    assert seen == sorted(image.contiguous().numpy().tobytes() for image, _ in dataset)


def test_grain_s_checkpoint_is_taken_where_the_cache_lies_elsewhere(grain, cache, tmp_path):
    moved = shutil.copytree(cache, tmp_path / "moved")
    first = iter(batches(grain, cache))
    next(first)
    second = iter(batches(grain, moved))
    second.set_state(first.get_state())
    for (images, _), (others, _) in zip(first, second, strict=True):
        assert np.array_equal(images, others)
