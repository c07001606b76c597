"""An opened cache knows where each record's row is, opens files when they are used, and shares what it opened."""

from __future__ import annotations

import dataclasses
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from opened import open_files

from tpucache.errors import DamageError, UsageError
from tpucache.store.cache import Cache, annotation_counts
from tpucache.store.manifest import Manifest

RECORDS = [[b"%d of %d" % (sample, variant) * (sample + 1) for sample in range(7)] for variant in range(3)]


@pytest.fixture
def cache(tmp_path: Path, write_cache: Callable[..., Manifest]) -> Cache:
    write_cache(tmp_path, RECORDS)
    return Cache.open(tmp_path)


def record(cache: Cache, variant: int, position: int) -> bytes:
    (row,) = cache.index[cache.rows(variant, [position])]
    return bytes(cache.reader.read(row))


def test_each_position_may_have_a_variant_of_its_own(cache: Cache) -> None:
    positions, variants = np.array([6, 0, 3, 3]), np.array([2, 0, 1, 2])
    together = cache.rows(variants, positions)
    assert together.tolist() == [int(cache.rows(int(v), p)) for v, p in zip(variants, positions, strict=True)]
    assert len(set(together.tolist())) == 4


def test_variants_may_have_gaps(cache: Cache) -> None:
    sparse = Cache(cache.directory, dataclasses.replace(cache.manifest, variants=(0, 3, 9)))
    assert sparse.rows(9, np.arange(7)).tolist() == cache.rows(2, np.arange(7)).tolist()
    assert sparse.rows(np.array([9, 3]), np.array([1, 1])).tolist() == [15, 8]


@pytest.mark.parametrize("variant", [-1, 1, 4, 10, np.array([0, 4])])
def test_a_variant_that_the_cache_lacks_is_refused(cache: Cache, variant: int) -> None:
    sparse = Cache(cache.directory, dataclasses.replace(cache.manifest, variants=(0, 3, 9)))
    with pytest.raises(UsageError, match=r"has variants \(0, 3, 9\), not"):
        sparse.rows(variant, np.arange(2))


def test_the_shards_rows_are_all_rows_in_order(cache: Cache) -> None:
    rows = np.concatenate([cache.rows_of(shard) for shard in cache.manifest.shards])
    assert rows.tolist() == list(range(21))
    for number, shard in enumerate(cache.manifest.shards):
        assert set(cache.index_of(shard)["shard"].tolist()) == {number}


def test_opening_a_cache_opens_its_manifest_alone(cache: Cache) -> None:
    for entry in cache.manifest.files:
        (cache.directory / entry.name).unlink()
    opened = Cache.open(cache.directory)
    for use in (lambda: opened.index, lambda: opened.samples, lambda: record(opened, 0, 0)):
        with pytest.raises(DamageError):
            use()


def test_a_pickled_cache_is_small_and_reads_where_it_arrives(cache: Cache) -> None:
    expected = record(cache, 1, 2)
    data = pickle.dumps(cache)
    assert len(data) < 10_000
    assert record(pickle.loads(data), 1, 2) == expected


def test_its_files_close_when_nothing_refers_to_it(tmp_path: Path, cache: Cache) -> None:
    other = Path(shutil.copytree(cache.directory, tmp_path / "copy"))
    opened = Cache.open(other)
    record(opened, 0, 0)
    assert open_files(other)
    del opened
    assert not open_files(other)


def test_counts_of_annotations_that_are_none_are_left_out(cache: Cache) -> None:
    counts = {"boxes": {"source": 7, "0": 0, "1": -1, "2": True, "3": 1.5, "4": "5"}, "masks": [1]}
    manifest = dataclasses.replace(cache.manifest, source={"annotations": counts})
    assert annotation_counts(manifest) == {"boxes": {"source": 7, "0": 0}}
    for none in ([], None, "boxes"):
        assert annotation_counts(dataclasses.replace(cache.manifest, source={"annotations": none})) == {}
