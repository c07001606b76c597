"""The simulated file system and the simulated hosts of the benchmark of scale."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scripts.bench.scale import step_seconds
from scripts.bench.shared_files import SharedFiles, Sharing, SimulatedThreads, link_shards, write_huge
from tpucache import CachedDataset, CachedLoader
from tpucache.store.fields import Field

IMAGE = Field("image", "raw", "|u1", (32, 32, 3))
SLOW = Sharing(latency=0.5, bandwidth=1e9, requests=1000, read_ahead=False)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> CachedDataset:
    folder = tmp_path_factory.mktemp("huge")
    write_huge(folder, 640, IMAGE, shard_bytes=1 << 20)
    link_shards(folder, CachedDataset(folder).manifest.shards)
    return CachedDataset(folder, in_memory=False)


def seconds(
    dataset: CachedDataset, sharing: Sharing, threads: int = 1, world_size: int = 1
) -> tuple[float, SharedFiles]:
    """Return when the last batch of an epoch was read, of one rank; shards are open and the index is in memory."""
    files = SharedFiles(sharing)
    with SimulatedThreads.in_place(files):
        loader = CachedLoader(dataset, 64, shuffle="block", window=128, threads=threads, world_size=world_size)
        for number, _ in enumerate(loader):
            files.now = max(files.now, SimulatedThreads.ready[number])
    return files.now, files


def test_every_record_that_is_not_read_ahead_takes_a_latency(dataset: CachedDataset) -> None:
    seconds(dataset, SLOW)
    one, files = seconds(dataset, SLOW)
    assert files.requests == 640
    assert files.bytes == 640 * IMAGE.nbytes
    assert one == pytest.approx(640 * SLOW.latency, rel=0.01)
    assert one / 4 <= seconds(dataset, SLOW, threads=4)[0] < one / 3


@pytest.mark.slow
@pytest.mark.thorough
def test_requests_under_way_and_the_bandwidth_are_limits(dataset: CachedDataset) -> None:
    two = replace(SLOW, requests=2)
    assert seconds(dataset, two, threads=16)[0] == pytest.approx(640 / 2 * SLOW.latency, rel=0.05)
    narrow = replace(SLOW, latency=1e-3, bandwidth=1e5)
    assert seconds(dataset, narrow, threads=16)[0] == pytest.approx(640 * IMAGE.nbytes / 1e5, rel=0.05)


def test_reading_ahead_asks_for_neighbours_at_once_and_for_a_rank_s_own_samples_only(dataset: CachedDataset) -> None:
    ahead = replace(SLOW, read_ahead=True)
    alone, files = seconds(dataset, ahead)
    assert alone < 20
    assert files.requests < 100
    _, shared = seconds(dataset, replace(ahead, bandwidth=1e12), world_size=5)
    assert shared.bytes < 0.6 * files.bytes  # gaps between its own samples are read, too


def test_the_slowest_host_sets_the_step_unless_enough_batches_wait() -> None:
    times = np.full((4, 200), 0.5)
    assert step_seconds(times, 1.0, 2) == pytest.approx(1.0)
    slow = times.copy()
    slow[2] *= 4
    assert step_seconds(slow, 1.0, 2) == pytest.approx(2.0, rel=0.02)
    stops = times.copy()
    stops[1, 50::50] += 5
    assert step_seconds(stops, 1.0, 2) > 1.03
    assert step_seconds(stops, 1.0, 12) == pytest.approx(1.0)
