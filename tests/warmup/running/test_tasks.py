"""The two tasks: a chunk is decoded once for all variants, and shards are sealed of chunks that stand and are whole."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tpucache.errors import BuildError, SampleError
from tpucache.recipe import Recipe
from tpucache.store.format import WORK_NAME
from tpucache.warmup.planning.blocks import Block, Chunk
from tpucache.warmup.records.augment import resolve
from tpucache.warmup.records.encode import record_fields
from tpucache.warmup.records.presize import presize
from tpucache.warmup.running.context import Job
from tpucache.warmup.running.tasks import build_chunk, seal_shard
from tpucache.warmup.sources import FolderSource, Sample
from tpucache.warmup.sources.base import Item
from tpucache.warmup.work import chunks as spool
from tpucache.warmup.work.lock import hold
from tpucache.warmup.work.receipts import SealedShard, load_receipt

VARIANTS = tuple(range(9))


class CountingSource:
    """A folder that counts how often each sample is loaded."""

    def __init__(self, root: Path) -> None:
        self._folder = FolderSource(root)
        self.loads: Counter[int] = Counter()
        self.list = self._folder.list

    def load(self, sample: Sample) -> Item:
        self.loads[sample.number] += 1
        return self._folder.load(sample)


@pytest.fixture
def job(tmp_path: Path, photos: Path, jitter: str) -> Iterator[Job]:
    work = tmp_path / "cache" / WORK_NAME
    work.mkdir(parents=True)
    source = CountingSource(photos)
    recipe = Recipe(size=16, variants=8, seed=3, augment=jitter)
    fields = record_fields(source.load(source.list().samples[0]), recipe)
    source.loads.clear()
    with hold(work) as run:
        yield Job(source, recipe, resolve(jitter, 16, 16), fields, work, work.parent, skip_errors=False, run=run)


@pytest.fixture
def block(job: Job) -> Block:
    return Block(2, tuple(job.source.list().samples[10:20]), VARIANTS)


def chunks_of(block: Block) -> list[Chunk]:
    parts = block.samples[:4], block.samples[4:]
    return [Chunk(block.number, number, part, block.variants) for number, part in enumerate(parts)]


def build(job: Job, block: Block) -> list[SealedShard]:
    for chunk in chunks_of(block):
        build_chunk(job, chunk)
    shards = [seal_shard(job, block, variant, 2) for variant in block.variants]
    return [shard for shard in shards if shard is not None]


def files(job: Job) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(job.shards.iterdir()) if path.is_file()}


def plain(shard: SealedShard | None) -> object:
    assert shard is not None
    return shard.entry, shard.rows.dtype, shard.rows.tolist(), shard.note


def test_eight_variants_cost_one_decode(job: Job, block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []
    clean = "tpucache.warmup.records.encode.presize_in_view"
    real = __import__("tpucache.warmup.records.encode", fromlist=["x"]).presize_in_view
    monkeypatch.setattr(clean, lambda *parts: (decoded.append(1), real(*parts))[1])
    shards = build(job, block)
    assert [shard.entry.name for shard in shards] == [f"v{variant:02d}-00002.lmdb" for variant in VARIANTS]
    assert {shard.entry.records for shard in shards} == {10}
    assert len(decoded) == 10
    assert job.source.loads == dict.fromkeys(range(10, 20), 1)


def test_building_again_gives_the_same_bytes_and_receipts(job: Job, block: Block) -> None:
    first, before = build(job, block), files(job)
    assert [plain(shard) for shard in build(job, block)] == [plain(shard) for shard in first]
    assert files(job) == before


def test_how_a_block_is_cut_does_not_show(job: Job, block: Block) -> None:
    build(job, block)
    before = files(job)
    spool.remove(job.work, 2)
    build_chunk(job, Chunk(2, 0, block.samples, VARIANTS))
    for variant in VARIANTS:
        seal_shard(job, block, variant, 1)
    assert files(job) == before


def test_sums_are_exact_over_the_clean_images(job: Job, block: Block) -> None:
    note = build(job, block)[0].note
    loaded = [presize(job.source.load(s).fields["image"], job.recipe, s.path) for s in block.samples]
    images = np.stack(loaded).astype(np.int64)
    assert note.sums == images.sum(axis=(0, 1, 2)).tolist()
    assert note.squares == (images**2).sum(axis=(0, 1, 2)).tolist()


def test_a_receipt_returns_the_shard_as_it_was_sealed(job: Job, block: Block) -> None:
    for shard in build(job, block):
        assert plain(load_receipt(job.shards, job.work, 2, shard.entry.variant)) == plain(shard)
    assert load_receipt(job.shards, job.work, 1, 0) is None


@pytest.mark.parametrize("harm", ["missing", "short"])
def test_a_receipt_does_not_stand_for_a_shard_that_does_not(job: Job, block: Block, harm: str) -> None:
    build(job, block)
    path = job.shards / "v02-00002.lmdb"
    if harm == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-4096])
    assert load_receipt(job.shards, job.work, 2, 2) is None
    assert load_receipt(job.shards, job.work, 2, 1) is not None


def test_a_bad_sample_fails_its_chunk_and_leaves_nothing(job: Job, block: Block, tmp_path: Path) -> None:
    (tmp_path / "bad.jpg").write_bytes(b"no image")
    bad = Sample(20, os.fspath(tmp_path / "bad.jpg"), 0)
    with pytest.raises(SampleError, match=r"bad\.jpg") as caught:
        build_chunk(job, Chunk(2, 0, (*block.samples, bad), VARIANTS))
    assert caught.value.path == bad.path
    assert [path.name for path in job.work.iterdir()] == ["lock"]


def test_skipped_samples_are_told_and_the_others_are_as_without_them(job: Job, block: Block) -> None:
    whole = build(job, block)
    gone = dataclasses.replace(block.samples[3], path="cat/gone.jpg")
    rest = dataclasses.replace(block, samples=(*block.samples[:3], gone, *block.samples[4:]))
    built = build(dataclasses.replace(job, skip_errors=True), rest)
    assert built[0].note.numbers == [10, 11, 12, 14, 15, 16, 17, 18, 19]
    (skipped,) = built[0].note.skipped
    assert (skipped.number, skipped.path) == (13, "cat/gone.jpg")
    assert "cannot be read" in skipped.reason
    for before, after in zip(whole, built, strict=True):
        np.testing.assert_array_equal(np.delete(before.rows["crc32"], 3), after.rows["crc32"])


def test_no_shard_is_sealed_while_a_chunk_is_missing(job: Job, block: Block) -> None:
    build_chunk(job, chunks_of(block)[0])
    assert seal_shard(job, block, 0, 2) is None
    assert files(job) == {}


@pytest.mark.parametrize("harm", ["note cut", "note of zeros", "records cut", "records gone"])
def test_a_chunk_torn_by_a_power_cut_does_not_stand(job: Job, block: Block, harm: str) -> None:
    for chunk in chunks_of(block):
        build_chunk(job, chunk)
    path = job.work / ("chunk-00002-000001.json" if "note" in harm else "chunk-00002-000001-v0003.bin")
    if harm == "records gone":
        path.unlink()
    else:
        path.write_bytes(bytes(path.stat().st_size) if "zeros" in harm else path.read_bytes()[:-7])
    assert spool.load(job.work, 2, 1, VARIANTS) is None
    assert seal_shard(job, block, 3, 2) is None


def test_records_torn_by_a_power_cut_are_found_when_sealed_and_made_again(job: Job, block: Block) -> None:
    build(job, block)
    before = files(job)
    torn = job.work / "chunk-00002-000001-v0003.bin"
    torn.write_bytes(bytes(torn.stat().st_size))
    with pytest.raises(BuildError):
        seal_shard(job, block, 3, 2)
    assert spool.load(job.work, 2, 1, VARIANTS) is None
    build(job, block)
    assert files(job) == before
