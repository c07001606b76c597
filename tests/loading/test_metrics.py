"""A loader's metrics are what happened: records, bytes and waits."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from patience import wait_for

from tpucache import CachedDataset, CachedLoader, MixedLoader
from tpucache.loading.reading.record_reader import WaysRead
from tpucache.loading.state import LoaderMetrics

SAMPLES, BYTES = 48, 16 * 16 * 3


def few(cache: Path, **options: Any) -> CachedDataset:
    return CachedDataset(cache, **options)[:SAMPLES]


@pytest.mark.usefixtures("no_leases")
@pytest.mark.parametrize(("in_memory", "first", "second"), [(False, "file", "file"), (True, "file", "memory")])
def test_records_and_bytes_are_counted_by_where_they_were(cache, in_memory, first, second):
    loader = CachedLoader(few(cache, in_memory=in_memory), 20, shuffle=True)
    assert loader.metrics()["batches"] == loader.metrics()["seconds"] == loader.metrics()["hits"] == 0
    assert [len(labels) for _, labels in loader] == [20, 20, 8]
    found = loader.metrics()
    assert (found["batches"], found["samples"]) == (3, SAMPLES)
    assert found["records"] == {"memory": 0, "map": 0, "file": 0, first: SAMPLES}
    assert found["bytes"] == {"memory": 0, "map": 0, "file": 0, "network": 0, first: SAMPLES * BYTES}
    assert found["hits"] == 0
    for _ in loader:
        pass
    found = loader.metrics()
    assert sum(found["records"].values()) == 2 * SAMPLES == found["samples"]
    assert found["records"][second] == (SAMPLES if in_memory else 2 * SAMPLES)
    assert found["hits"] == (0.5 if in_memory else 0)
    assert found["network"] is None
    json.dumps(found)


def test_mapped_records_are_hits(cache, monkeypatch):
    monkeypatch.setattr("tpucache.loading.reading.maps.cannot_shrink", lambda number: True)
    loader = CachedLoader(few(cache), 16)
    for _ in loader:
        pass
    found = loader.metrics()
    assert found["records"] == {"memory": 0, "map": SAMPLES, "file": 0}
    assert found["bytes"]["map"] == SAMPLES * BYTES
    assert found["hits"] == 1


def test_a_mixture_counts_the_records_of_all_its_caches(cache):
    dataset = few(cache)
    loader = MixedLoader([CachedLoader(dataset, 4, shuffle=True), CachedLoader(dataset.select(range(8)), 4)], [3, 1])
    batches = [len(labels) for _, labels in loader]
    assert loader.metrics()["samples"] == sum(loader.metrics()["records"].values()) == sum(batches)


def test_waits_are_those_of_the_loop_and_the_queue_is_what_was_ready(cache, monkeypatch):
    read, real = [], CachedDataset.read_into
    monkeypatch.setattr(CachedDataset, "read_into", lambda self, *of: (real(self, *of), read.append(1))[0])
    loader = CachedLoader(few(cache), 8, threads=1, prefetch=3)
    batches = iter(loader)
    next(batches)
    began = time.perf_counter()
    wait_for(lambda: len(read) == 4)  # the next three are read meanwhile, by one thread
    idle = time.perf_counter() - began
    next(batches)
    found = loader.metrics()
    assert found["queue"]["size"] == 4
    assert found["queue"]["ready"] >= 2  # the last one was read a moment ago
    assert found["seconds"] >= idle
    assert 0 < found["wait_p50"] <= found["wait_p95"] <= found["wait_p99"] <= found["waited_seconds"] < found["seconds"]


def test_quantiles_are_of_the_latest_waits(monkeypatch):
    now = time.perf_counter()
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    metrics = LoaderMetrics()
    for wait in [9.0] * 50 + [0.001 * number for number in range(1024)]:
        metrics.note(now - wait, 0, 4, WaysRead(memory=4))
    found = metrics.to_dict(3, [], {})
    assert found["wait_p50"] == pytest.approx(0.512, abs=0.05)
    assert found["wait_p99"] == pytest.approx(1.013, abs=0.05)
    assert found["records"]["memory"] == found["samples"] == 4 * 1074
