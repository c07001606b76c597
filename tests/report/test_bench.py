"""bench: what it says of a cache whose images a device finishes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tpucache import CachedDataset, Recipe, UsageError, build_cache
from tpucache.report.bench import BatchUpload, run_bench


@pytest.fixture(scope="module")
def planes(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> CachedDataset:
    """Some of the photographs at 16x16 as yuv420."""
    folder = tmp_path_factory.mktemp("planes") / "cache"
    build_cache(photos / "ant", folder, Recipe(size=16, codec="yuv420"), jobs=1)
    return CachedDataset(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("finish", "handed"), [("host", 16 * 16 * 3), ("device", 16 * 16 * 3 // 2)])
def test_bytes_are_those_on_disk_and_those_that_the_device_is_handed(planes, finish, handed):
    found = run_bench(planes, batch_size=16, rounds=1, seconds=0.01, finish=finish).to_dict()
    on_disk = sum(entry.bytes for entry in planes.manifest.shards) // len(planes)
    assert (found["finish"], found["bytes_per_image"], found["batch_bytes_per_image"]) == (finish, on_disk, handed)


@pytest.mark.parametrize("device_rate", [None, 1e6])
def test_sending_is_measured_and_what_waits_for_it_is_idle(planes, device_rate):
    sent = []

    def send(batch):
        time.sleep(0.2)  # reading takes far less, also on a busy machine
        sent.append(batch)
        return batch

    options = {"batch_size": 16, "rounds": 1, "seconds": 0.05, "device_rate": device_rate}
    found = run_bench(planes, upload=BatchUpload(send), **options)
    assert 0 < found.upload_images_per_second <= 16 / 0.2
    assert {len(images) for images, _ in sent} == {16}
    assert found.images_per_second > found.upload_images_per_second
    assert found.idle is None if device_rate is None else found.idle > 0.9
    assert run_bench(planes, **options).upload_images_per_second is None


def test_a_batch_that_does_not_divide_over_the_cores_is_refused(planes):
    with pytest.raises(UsageError, match="does not divide over 3 cores"):
        run_bench(planes, batch_size=16, upload=BatchUpload(lambda batch: batch, cores=3))
