"""bench: what it says of a cache whose images a device finishes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpucache import CachedDataset, Recipe, build_cache
from tpucache.report.bench import run_bench


@pytest.fixture(scope="module")
def planes(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> CachedDataset:
    """Some of the photographs at 16x16 as yuv420."""
    folder = tmp_path_factory.mktemp("planes") / "cache"
    build_cache(photos / "ant", folder, Recipe(size=16, codec="yuv420"), jobs=1)
    return CachedDataset(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("finish", "handed"), [("host", 16 * 16 * 3), ("device", 16 * 16 * 3 // 2)])
def test_bytes_are_those_on_disk_and_those_that_the_device_is_handed(planes, finish, handed):
    found = run_bench(planes, batch_size=16, threads=1, device_rate=None, finish=finish, rounds=1, seconds=0.01)
    on_disk = sum(entry.bytes for entry in planes.manifest.shards) // len(planes)
    assert (found.bytes_per_image, found.batch_bytes_per_image) == (on_disk, handed)
