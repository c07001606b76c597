"""One block: one shard a variant, each sample decoded once, and a receipt that is believed only while it is true."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tpucache.errors import SampleError
from tpucache.recipe import Recipe
from tpucache.warmup.augment import resolve
from tpucache.warmup.build import WORK_NAME, BlockTask, build_block
from tpucache.warmup.lock import hold
from tpucache.warmup.plan import Block
from tpucache.warmup.presize import presize
from tpucache.warmup.receipt import BuiltBlock, load_receipt
from tpucache.warmup.sources import FolderSource, Sample

_RECIPE = Recipe(size=16, variants=2, seed=3)


class _CountingSource:
    """A folder that counts how often each sample is loaded, and calls back."""

    def __init__(self, root: Path) -> None:
        self._folder = FolderSource(root)
        self.loads: Counter[int] = Counter()
        self.list = self._folder.list

    def load(self, sample: Sample) -> bytes:
        self.loads[sample.number] += 1
        return self._folder.load(sample)


@pytest.fixture
def task(tmp_path: Path, photos: Path, jitter: str) -> Iterator[BlockTask]:
    cache = tmp_path / "cache"
    (cache / WORK_NAME).mkdir(parents=True)
    source = _CountingSource(photos)
    recipe = dataclasses.replace(_RECIPE, augment=jitter)
    samples = tuple(source.list().samples[10:20])
    with hold(cache / WORK_NAME) as run:
        yield BlockTask(Block(2, samples), source, recipe, resolve(jitter, 16, 16), cache, skip_errors=False, run=run)


def _shards(cache: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(cache.iterdir()) if path.is_file()}


def _plain(block: BuiltBlock | None) -> dict[str, object]:
    """Return a block as values that compare with ==."""
    assert block is not None
    values = {field.name: getattr(block, field.name) for field in dataclasses.fields(block)}
    values["rows"] = [(rows.dtype, rows.tolist()) for rows in block.rows]
    values["sample_numbers"] = (block.sample_numbers.dtype, block.sample_numbers.tolist())
    return values


def test_a_block_becomes_one_shard_a_variant_and_each_sample_is_loaded_once(task: BlockTask) -> None:
    built = build_block(task)
    assert list(_shards(task.cache)) == ["v00-00002.lmdb", "v01-00002.lmdb", "v02-00002.lmdb"]
    assert [entry.name for entry in built.shards] == list(_shards(task.cache))
    assert [entry.variant for entry in built.shards] == [0, 1, 2]
    assert {entry.records for entry in built.shards} == {10}
    assert task.source.loads == dict.fromkeys(range(10, 20), 1)
    assert built.sample_numbers.tolist() == list(range(10, 20))


def test_building_a_block_again_gives_the_same_bytes_and_receipt(task: BlockTask) -> None:
    first = build_block(task)
    shards = _shards(task.cache)
    assert _plain(build_block(task)) == _plain(first)
    assert _shards(task.cache) == shards


def test_sums_are_exact_over_the_clean_images(task: BlockTask) -> None:
    built = build_block(task)
    images = np.stack([presize(task.source.load(s), task.recipe, s.path) for s in task.block.samples]).astype(np.int64)
    assert built.sums == tuple(images.sum(axis=(0, 1, 2)).tolist())
    assert built.squares == tuple((images**2).sum(axis=(0, 1, 2)).tolist())


def test_a_receipt_returns_the_block_as_it_was_built(task: BlockTask) -> None:
    built = build_block(task)
    assert _plain(load_receipt(task.cache / WORK_NAME, 2)) == _plain(built)
    assert load_receipt(task.cache / WORK_NAME, 1) is None


@pytest.mark.parametrize("name", ["v00-00002.lmdb", "v02-00002.lmdb"])
@pytest.mark.parametrize("harm", ["missing", "short"])
def test_a_receipt_does_not_stand_for_shards_that_do_not(task: BlockTask, name: str, harm: str) -> None:
    build_block(task)
    path = task.cache / name
    if harm == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-4096])
    assert load_receipt(task.cache / WORK_NAME, 2) is None


def test_a_bad_sample_fails_the_block_and_leaves_nothing(task: BlockTask, tmp_path: Path) -> None:
    (tmp_path / "bad.jpg").write_bytes(b"no image")
    bad = Sample(20, os.fspath(tmp_path / "bad.jpg"), 0)
    with pytest.raises(SampleError, match=r"bad\.jpg") as caught:
        build_block(dataclasses.replace(task, block=Block(2, (*task.block.samples, bad))))
    assert caught.value.path == bad.path
    assert _shards(task.cache) == {}
    assert [path.name for path in (task.cache / WORK_NAME).iterdir()] == ["lock"]


def test_skipped_samples_are_told_and_the_others_keep_their_numbers(task: BlockTask) -> None:
    gone = dataclasses.replace(task.block.samples[3], path="cat/gone.jpg")
    samples = (*task.block.samples[:3], gone, *task.block.samples[4:])
    built = build_block(dataclasses.replace(task, block=Block(2, samples), skip_errors=True))
    assert built.sample_numbers.tolist() == [10, 11, 12, 14, 15, 16, 17, 18, 19]
    (skipped,) = built.skipped
    assert (skipped.number, skipped.path) == (13, "cat/gone.jpg")
    assert "cannot be read" in skipped.reason
    assert {entry.records for entry in built.shards} == {9}
    assert _plain(load_receipt(task.cache / WORK_NAME, 2)) == _plain(built)


def test_a_skipped_sample_does_not_change_how_the_others_are_augmented(task: BlockTask, tmp_path: Path) -> None:
    whole = build_block(task)
    gone = dataclasses.replace(task.block.samples[0], path="cat/gone.jpg")
    rest = Block(2, (gone, *task.block.samples[1:]))
    built = build_block(dataclasses.replace(task, block=rest, skip_errors=True))
    for before, after in zip(whole.rows, built.rows, strict=True):
        np.testing.assert_array_equal(before["crc32"][1:], after["crc32"])
