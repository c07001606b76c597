"""What a loader keeps before its first epoch: only what is in the page cache, for a moment, and nothing decoded."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tpucache import CachedDataset, CachedLoader, DamageError, Recipe, build_cache
from tpucache.loading.reading import record_reader as reader_module
from tpucache.loading.reading.record_reader import RecordReader
from tpucache.store.reader import ShardReader


@pytest.fixture(autouse=True)
def small_caches_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "_LEAST_PREPARED", 1)
    monkeypatch.setattr(reader_module, "PREPARE_SECONDS", 60)
    monkeypatch.setattr(ShardReader, "is_in_memory", lambda *_: True)  # other programs may need that memory


def kept(loader: CachedLoader) -> int:
    """Read an epoch, and count the records that were in memory before it."""
    before = loader.metrics()["records"]["memory"]
    deque(loader, 0)
    return loader.metrics()["records"]["memory"] - before


@pytest.mark.usefixtures("no_leases")
@pytest.mark.parametrize("variant", [0, "epoch"])
def test_the_first_epoch_comes_out_of_memory(cache: Path, variant) -> None:
    dataset = CachedDataset(cache, variant)
    loader = CachedLoader(dataset, 40, shuffle=True)
    found = torch.cat([images for images, _ in loader])
    assert loader.metrics()["records"]["memory"] == len(dataset)
    other = CachedLoader(CachedDataset(cache, variant, in_memory=False), 40, shuffle=True)
    assert torch.equal(found, torch.cat([images for images, _ in other]))


@pytest.mark.usefixtures("no_leases")
@pytest.mark.parametrize(
    ("name", "value"), [("_LEAST_PREPARED", 1 << 30), ("PREPARE_SECONDS", 0), ("_MOST_PREPARED", 20 * 16 * 16 * 3)]
)
def test_little_data_is_left_and_so_is_what_takes_long(
    cache: Path, name: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, name, value)
    dataset = CachedDataset(cache)
    loader = CachedLoader(dataset, 40)
    assert kept(loader) == (20 if name == "_MOST_PREPARED" else 0)
    assert kept(loader) == len(dataset)


def test_what_is_not_in_the_page_cache_is_left(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShardReader, "is_in_memory", lambda *_: False)
    dataset = CachedDataset(cache)
    assert kept(CachedLoader(dataset, 40)) == 0


def test_where_nothing_is_to_be_kept_nothing_is(cache: Path) -> None:
    dataset = CachedDataset(cache, in_memory=False)
    assert kept(CachedLoader(dataset, 40)) == 0


@pytest.mark.parametrize("codec", ["dct-lz4", "jpeg"])
def test_packed_records_are_kept_and_decoded_ones_left(photos: Path, tmp_path: Path, codec: str) -> None:
    build_cache(photos, tmp_path / "cache", Recipe(size=16, codec=codec), jobs=1)
    for finish in ("host", "device"):
        dataset = CachedDataset(tmp_path / "cache")
        loader = CachedLoader(dataset, 40, finish=finish)
        is_packed = codec == "dct-lz4" and finish == "device"
        assert kept(loader) == (len(dataset) if is_packed else 0)


def test_a_second_loader_reads_nothing_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = CachedDataset(cache)
    CachedLoader(dataset, 40)
    monkeypatch.setattr(RecordReader, "read_into", lambda *_, **__: pytest.fail("a record was read again"))
    CachedLoader(dataset, 20)


@pytest.mark.usefixtures("no_leases")
@pytest.mark.parametrize("way", ["keep", "map"])
@pytest.mark.parametrize("is_gone", [True, False])
def test_what_is_missing_or_damaged_is_found_when_it_is_read_and_not_by_making_a_loader(
    cache: Path, copy: Path, is_gone: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "map":
        monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY))
    assert CachedDataset(cache).reading.way == way
    dataset = CachedDataset(copy)
    entry = dataset.manifest.shards[0]
    row = dataset.cache.index[np.array([0])][0]
    if is_gone:
        (copy / entry.name).unlink()
    else:
        with (copy / entry.name).open("r+b") as file:
            file.seek(int(row["offset"]))
            file.write(bytes(int(row["length"])))
    loader = CachedLoader(dataset, 50)
    with pytest.raises(DamageError, match=f"{entry.name} .*{'cannot be opened' if is_gone else 'holds other'}"):
        list(loader)
