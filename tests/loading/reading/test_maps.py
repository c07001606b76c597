"""Shards are mapped only where nobody can cut them short, and then read the same."""

from __future__ import annotations

import fcntl
import itertools
import os
import pickle
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from opened import maps_of

from tpucache import CachedDataset, CachedLoader, DamageError, Recipe, build_cache
from tpucache.loading.reading import maps as maps_module
from tpucache.store.cache import Cache
from tpucache.store.reader import ShardReader

SEALS = fcntl.F_ADD_SEALS if hasattr(fcntl, "F_ADD_SEALS") else 1033
SEAL_SHRINK = 2


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file system is mounted read-only, as far as can be seen."""
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY))


@pytest.fixture
def no_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is read from a file."""
    with monkeypatch.context() as patch:
        patch.setattr(ShardReader, "scatter", lambda *_, **__: pytest.fail("a record was read from its file"))
        yield


def mapped(dataset: CachedDataset) -> int:
    """Count the shards that are mapped."""
    return sum(dataset.maps.get(how, 0) for how in maps_module.MAPPED)


def shards_of(dataset: CachedDataset) -> int:
    """Count the shards that a dataset may read."""
    return sum((entry.variant > 0) == (dataset.variant == "epoch") for entry in dataset.manifest.shards)


@pytest.mark.usefixtures("no_leases")
def test_a_file_on_a_writable_mount_that_gives_no_leases_is_not_mapped(cache: Path) -> None:
    dataset = CachedDataset(cache)
    list(CachedLoader(dataset, 50))
    assert mapped(dataset) == 0
    assert dataset.reading.way == "keep"


@pytest.mark.usefixtures("read_only")
@pytest.mark.parametrize("seconds", [0, 60])
@pytest.mark.parametrize("is_warm", [False, True])
def test_a_loader_is_made_with_maps_of_what_is_in_the_page_cache(cache: Path, is_warm: bool, seconds: float) -> None:
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(ShardReader, "is_in_memory", lambda *_: is_warm)
    dataset = CachedDataset(cache)
    if not seconds:
        clock = itertools.count(0, 100)  # each look at the clock is later than there is time
        monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    loader = CachedLoader(dataset, 50)
    monkeypatch.undo()
    count = shards_of(dataset) if is_warm and seconds else 0
    assert mapped(dataset) == count
    if count:
        monkeypatch.setattr(maps_module, "populate", lambda *_: pytest.fail("a page was not in the page table"))
        list(loader)
        monkeypatch.undo()


@pytest.mark.usefixtures("read_only", "no_reads")
@pytest.mark.parametrize("variant", [0, "epoch"])
@pytest.mark.parametrize("in_memory", ["auto", False])
def test_on_a_read_only_mount_batches_come_out_of_maps(cache: Path, variant, in_memory) -> None:
    dataset = CachedDataset(cache, variant, in_memory=in_memory)
    for epoch in range(3):
        dataset.set_epoch(epoch)
        for number, (images, labels) in enumerate(CachedLoader(dataset, 40, seed=epoch)):
            for at in (0, len(images) - 1):
                assert labels[at] == dataset.labels[40 * number + at]
    assert mapped(dataset) == shards_of(dataset)
    assert dataset.reading == ("map", 0)


@pytest.mark.usefixtures("read_only")
def test_late_storage_is_asked_once_for_each_record_of_an_epoch(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the loader, and not by its threads again. What no loader has asked for is asked for when it is read."""
    asked: list[int] = []
    monkeypatch.setattr(ShardReader, "hint", lambda _, rows: asked.extend(rows["crc32"].tolist()))
    monkeypatch.setattr(maps_module.BUDGET, "available", lambda: 0)  # pages are not expected to stay in memory
    opened = Cache.open(cache)
    opened.latency = 1.0
    dataset = CachedDataset(opened, in_memory=False)
    every = sorted(dataset.cache.index.read_all()["crc32"][: len(dataset)].tolist())
    loader = CachedLoader(dataset, 40)
    for epoch in (1, 2):
        list(loader)
        assert sorted(asked) == sorted(epoch * every)
    asked.clear()
    dataset[3]
    assert len(asked) == 1


@pytest.mark.usefixtures("read_only")
@pytest.mark.parametrize("codec", ["raw", "png", "jpeg", "zstd", "yuv420", "dct-zstd", "dct-lz4"])
def test_every_codec_gives_the_same_out_of_a_map(photos: Path, tmp_path: Path, codec: str) -> None:
    (tmp_path / "few").mkdir()
    for path in sorted(photos.glob("ant/*"))[:20]:
        shutil.copy(path, tmp_path / "few")
    build_cache(tmp_path / "few", tmp_path / "cache", Recipe(size=16, codec=codec), jobs=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(maps_module, "can_populate", lambda: False)
        plain = CachedDataset(tmp_path / "cache", in_memory=False)
        expected = [plain[at][0] for at in range(20)]
    for finish in ("host", "device"):
        whole = CachedDataset(tmp_path / "cache", in_memory=False)
        for dataset in (whole.packed() if finish == "device" else whole,):
            list(CachedLoader(dataset, 7))
            assert mapped(dataset) > 0
    assert all(torch.equal(whole[at][0], expected[at]) for at in range(20))


@pytest.mark.parametrize("seals", [0, SEAL_SHRINK])
def test_a_memory_file_is_safe_once_it_is_sealed(seals: int) -> None:
    number = os.memfd_create("shard", os.MFD_ALLOW_SEALING)
    try:
        os.truncate(number, 4096)
        fcntl.fcntl(number, SEALS, seals)
        assert maps_module.cannot_shrink(number) is bool(seals)
    finally:
        os.close(number)


@pytest.mark.slow
@pytest.mark.usefixtures("read_only")
def test_maps_end_with_their_dataset_and_a_pickled_one_maps_anew(cache: Path) -> None:
    dataset = CachedDataset(cache, in_memory=False)
    first = dataset[3][0]
    assert mapped(dataset) == 1
    copy = pickle.loads(pickle.dumps(dataset))
    assert mapped(copy) == 0
    assert maps_of(cache) == 1
    assert torch.equal(copy[3][0], first)
    assert maps_of(cache) == 2
    dataset.close()
    copy.close()
    assert maps_of(cache) == 0


@pytest.mark.usefixtures("read_only")
@pytest.mark.parametrize("change", [{"offset": 1 << 40}, {"offset": 2**64 - 1}, {"length": 1 << 31}, {"crc32": 0}])
def test_an_index_that_lies_is_an_error_and_not_a_crash(cache: Path, change: dict[str, int]) -> None:
    dataset = CachedDataset(cache, in_memory=False)
    rows = dataset.cache.index.read_all().copy()
    for name, value in change.items():
        rows[name][5] = value
    maps = maps_module.ShardMaps(dataset.cache.reader, len(rows))
    with pytest.raises(DamageError, match=r"v00-00000\.lmdb"):
        maps.addresses(np.array([5]), rows[[5]])


@pytest.mark.usefixtures("read_only")
@pytest.mark.parametrize("length", [16 * 16 * 3 - 1, 16 * 16 * 3 + 1])
def test_a_mapped_record_of_another_length_is_an_error(cache: Path, length: int) -> None:
    dataset = CachedDataset(cache, in_memory=False)
    dataset[0]
    rows = dataset.cache.index._opened.rows
    rows["length"][5] = length
    assert mapped(dataset) == 1
    with pytest.raises(DamageError, match=r"v00-00000\.lmdb .* the index is wrong"):
        dataset[5]
    with pytest.raises(DamageError, match=r"v00-00000\.lmdb .* the index is wrong"):
        next(iter(CachedLoader(dataset, 10)))


@pytest.mark.usefixtures("read_only")
def test_nothing_is_mapped_where_the_system_does_not_tell_of_pages_that_it_cannot_read(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maps_module, "can_populate", lambda: False)
    dataset = CachedDataset(cache)
    list(CachedLoader(dataset, 50))
    assert mapped(dataset) == 0
    assert dataset.reading.way == "keep"


@pytest.mark.usefixtures("read_only")
def test_pages_that_cannot_be_read_are_an_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = CachedDataset(cache, in_memory=False)
    monkeypatch.setattr(maps_module, "populate", lambda *_: False)
    with pytest.raises(DamageError, match=r"v00-00000\.lmdb cannot be read"):
        dataset[3]


@pytest.mark.usefixtures("read_only")
@pytest.mark.parametrize("is_warm", [False, True])
def test_pages_out_of_the_page_cache_are_read_record_by_record(cache: Path, monkeypatch, is_warm: bool) -> None:
    asked: list[int] = []
    populate = maps_module.populate
    monkeypatch.setattr(ShardReader, "is_in_memory", lambda *_: is_warm)

    def counting(start: int, length: int) -> bool:
        asked.append(length)
        return populate(start, length)

    monkeypatch.setattr(maps_module, "populate", counting)
    dataset = CachedDataset(cache, in_memory=False)
    for _ in range(2):
        list(CachedLoader(dataset[:40], 10))
    shards = shards_of(dataset)
    assert len(asked) == (
        2 * shards if is_warm else 40 + 1
    )  # the first record of a shard is compared with its checksum
    count = len(asked)
    list(CachedLoader(dataset[:40], 10))
    assert len(asked) == count


TRUNCATE = """
import os, sys
from pathlib import Path
from tpucache import CachedDataset, CachedLoader, DamageError
batches = iter(CachedLoader(CachedDataset(sys.argv[1]), 10, threads=3))
next(batches)
for shard in Path(sys.argv[1]).glob("*.lmdb"):
    os.truncate(shard, 4096)
try:
    list(batches)
except DamageError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_shard_cut_short_while_a_loader_runs_is_an_error_and_not_a_crash(
    copy: Path, run_with_torch: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = run_with_torch(TRUNCATE, copy)
    assert done.returncode == 0, done
    assert "ends before byte" in done.stdout
