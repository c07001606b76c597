"""The two tasks: a chunk is decoded once for all variants, and shards are sealed of complete chunks."""

from __future__ import annotations

import dataclasses
import errno
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from patience import PATIENCE
from PIL import Image

from tpucache.errors import BuildError, SampleError
from tpucache.recipe import Recipe
from tpucache.store.format import WORK_NAME
from tpucache.warmup.blocks import Block, Chunk
from tpucache.warmup.deadline import Deadline
from tpucache.warmup.plan import resolve
from tpucache.warmup.records.arrays import record_fields
from tpucache.warmup.records.encode import SampleEncoder
from tpucache.warmup.records.presize import presize
from tpucache.warmup.run import tasks
from tpucache.warmup.run.chunks import BuiltShard, load_chunk, load_receipt, remove_chunks
from tpucache.warmup.run.folder import hold
from tpucache.warmup.run.tasks import (
    BuildContext,
    ChunkResult,
    WrittenShard,
    build_block,
    build_chunk,
    install_shard,
    load_ahead,
    seal_shard,
    write_shard,
)
from tpucache.warmup.sources import FolderSource, Sample
from tpucache.warmup.sources.source import Item

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
def context(tmp_path: Path, photos: Path, jitter: str) -> Iterator[BuildContext]:
    work = tmp_path / "cache" / WORK_NAME
    work.mkdir(parents=True)
    source = CountingSource(photos)
    recipe = Recipe(size=16, variants=8, seed=3, augment=jitter)
    fields = record_fields(source.load(source.list().samples[0]), recipe)
    source.loads.clear()
    with hold(work) as run:
        encoder = SampleEncoder(source, recipe, resolve(jitter, 16, 16), fields)
        yield BuildContext(encoder, work, work.parent, skip_errors=False, run=run)


@pytest.fixture
def block(context: BuildContext) -> Block:
    return Block(2, tuple(context.encoder.source.list().samples[10:20]), VARIANTS)


def chunks_of(block: Block) -> list[Chunk]:
    parts = block.samples[:4], block.samples[4:]
    return [Chunk(block.number, number, part, block.variants) for number, part in enumerate(parts)]


def build_one(context: BuildContext, chunk: Chunk) -> ChunkResult:
    with load_ahead(context, [chunk]) as items:
        return build_chunk(context, chunk, items)


def build(context: BuildContext, block: Block) -> list[BuiltShard]:
    for chunk in chunks_of(block):
        build_one(context, chunk)
    shards = [seal_shard(context, block, part, 2) for part in block.variants]
    return [shard for shard in shards if shard is not None]


def files(context: BuildContext) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(context.shards.iterdir()) if path.is_file()}


def plain(shard: BuiltShard | None) -> object:
    assert shard is not None
    return shard.entry, shard.rows.dtype, shard.rows.tolist(), shard.info


@pytest.mark.slow
def test_eight_variants_cost_one_decode(context: BuildContext, block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded, real = [], Image.open
    monkeypatch.setattr(Image, "open", lambda *parts: (decoded.append(1), real(*parts))[1])
    shards = build(context, block)
    assert [shard.entry.name for shard in shards] == [f"v{variant:02d}-00002.lmdb" for variant in range(9)]
    assert {shard.entry.records for shard in shards} == {10}
    assert len(decoded) == 10
    assert context.encoder.source.loads == dict.fromkeys(range(10, 20), 1)


@pytest.mark.slow
def test_building_again_gives_the_same_bytes_and_receipts(context: BuildContext, block: Block) -> None:
    first, before = build(context, block), files(context)
    assert [plain(shard) for shard in build(context, block)] == [plain(shard) for shard in first]
    assert files(context) == before


@pytest.mark.slow
def test_how_a_block_is_cut_does_not_show(context: BuildContext, block: Block) -> None:
    build(context, block)
    before = files(context)
    remove_chunks(context.work, 2)
    build_one(context, Chunk(2, 0, block.samples, VARIANTS))
    for part in VARIANTS:
        seal_shard(context, block, part, 1)
    assert files(context) == before


@pytest.mark.slow
@pytest.mark.parametrize("together", [1, 2, 1000])
def test_sums_are_exact_over_the_clean_images(
    context: BuildContext, block: Block, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "_ADDED_BYTES", together * 16 * 16 * 3)
    note = build(context, block)[0].info
    loaded = [
        presize(context.encoder.source.load(s).fields["image"], context.encoder.recipe, s.path) for s in block.samples
    ]
    images = np.stack(loaded).astype(np.int64)
    assert note.sums == images.sum(axis=(0, 1, 2)).tolist()
    assert note.squares == (images**2).sum(axis=(0, 1, 2)).tolist()


def test_a_receipt_returns_the_shard_as_it_was_sealed(context: BuildContext, block: Block) -> None:
    for shard in build(context, block):
        assert plain(load_receipt(context.shards, context.work, 2, shard.entry.variant)) == plain(shard)
    assert load_receipt(context.shards, context.work, 1, 0) is None


@pytest.mark.slow
def test_no_flipped_bit_of_what_is_kept_changes_what_is_read_of_it(context: BuildContext, block: Block) -> None:
    (shard, *_), part = build(context, block), 0
    names = ("chunk-00002-000000.json", "shard-00002-v0000.npz")
    reads: list[Callable[[], object]] = [
        lambda: load_chunk(context.work, 2, 0, VARIANTS),
        lambda: (kept := load_receipt(context.shards, context.work, 2, part)) and plain(kept),
    ]
    assert reads[1]() == plain(shard)
    for name, read in zip(names, reads, strict=True):
        path, right = context.work / name, read()
        whole = path.read_bytes()
        for bit in range(0, 8 * len(whole), 7):
            flipped = bytearray(whole)
            flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(flipped)
            assert read() in (None, right), (name, bit)
        path.write_bytes(whole)


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["missing", "short"])
def test_a_receipt_does_not_count_without_its_shard(context: BuildContext, block: Block, harm: str) -> None:
    build(context, block)
    path = context.shards / "v02-00002.lmdb"
    if harm == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-4096])
    assert load_receipt(context.shards, context.work, 2, 2) is None
    assert load_receipt(context.shards, context.work, 2, 1) is not None


def test_a_bad_sample_fails_its_chunk_and_leaves_nothing(context: BuildContext, block: Block, tmp_path: Path) -> None:
    (tmp_path / "bad.jpg").write_bytes(b"no image")
    bad = Sample(20, os.fspath(tmp_path / "bad.jpg"), 0)
    with pytest.raises(SampleError, match=r"bad\.jpg") as caught:
        build_one(context, Chunk(2, 0, (*block.samples, bad), VARIANTS))
    assert caught.value.path == bad.path
    assert [path.name for path in context.work.iterdir()] == ["lock"]


@pytest.mark.slow
def test_skipped_samples_are_reported_and_the_others_are_as_without_them(context: BuildContext, block: Block) -> None:
    whole = build(context, block)
    gone = dataclasses.replace(block.samples[3], path="cat/gone.jpg")
    rest = dataclasses.replace(block, samples=(*block.samples[:3], gone, *block.samples[4:]))
    built = build(dataclasses.replace(context, skip_errors=True), rest)
    assert built[0].info.numbers == [10, 11, 12, 14, 15, 16, 17, 18, 19]
    (skipped,) = built[0].info.skipped
    assert (skipped.number, skipped.path) == (13, "cat/gone.jpg")
    assert "cannot be read" in skipped.reason
    for before, after in zip(whole, built, strict=True):
        np.testing.assert_array_equal(np.delete(before.rows["crc32"], 3), after.rows["crc32"])


def test_no_shard_is_sealed_while_a_chunk_is_missing(context: BuildContext, block: Block) -> None:
    build_one(context, chunks_of(block)[0])
    assert seal_shard(context, block, 0, 2) is None
    assert files(context) == {}


@pytest.mark.parametrize("harm", ["note cut", "note of zeros", "records cut", "records gone"])
def test_a_chunk_torn_by_a_power_cut_is_not_used(context: BuildContext, block: Block, harm: str) -> None:
    for chunk in chunks_of(block):
        build_one(context, chunk)
    path = context.work / ("chunk-00002-000001.json" if "note" in harm else "chunk-00002-000001-v0003.bin")
    if harm == "records gone":
        path.unlink()
    else:
        path.write_bytes(bytes(path.stat().st_size) if "zeros" in harm else path.read_bytes()[:-7])
    assert load_chunk(context.work, 2, 1, VARIANTS) is None
    assert seal_shard(context, block, 3, 2) is None


@pytest.mark.slow
def test_records_torn_by_a_power_cut_are_found_when_sealed_and_made_again(context: BuildContext, block: Block) -> None:
    build(context, block)
    before = files(context)
    torn = context.work / "chunk-00002-000001-v0003.bin"
    torn.write_bytes(bytes(torn.stat().st_size))
    with pytest.raises(BuildError):
        seal_shard(context, block, 3, 2)
    assert load_chunk(context.work, 2, 1, VARIANTS) is None
    build(context, block)
    assert files(context) == before


@dataclass(frozen=True)
class Countdown(Deadline):
    """A deadline that is past once it was asked about so often."""

    times: list[None] = field(default_factory=list)

    @property
    def is_past(self) -> bool:
        return not self.times or self.times.pop() is not None


@pytest.fixture
def clean(block: Block) -> list[Chunk]:
    return chunks_of(dataclasses.replace(block, variants=(0,)))


def whole(written: WrittenShard | None) -> tuple[object, ...]:
    assert written is not None
    shard = written.shard
    return shard.entry, shard.rows.tolist(), shard.info, written.aside.read_bytes()


def by_chunks(context: BuildContext, chunks: list[Chunk]) -> WrittenShard | None:
    for chunk in chunks:
        if load_chunk(context.work, 2, chunk.number, (0,)) is None:
            build_one(context, chunk)
    return write_shard(context, Block(2, (), (0,)), 0, len(chunks))


def test_a_block_built_whole_is_what_its_chunks_make(
    context: BuildContext, clean: list[Chunk], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = whole(by_chunks(context, clean))
    remove_chunks(context.work, 2)
    monkeypatch.setattr(tasks, "save_chunk", None)  # it needs none
    assert whole(build_block(context, clean)) == expected


@pytest.mark.parametrize("done", [0, 3, 4, 7])
def test_a_block_that_the_deadline_stops_is_continued_by_its_chunks(
    context: BuildContext, clean: list[Chunk], done: int
) -> None:
    late = dataclasses.replace(context, deadline=Countdown(times=[None] * done))
    assert build_block(late, clean) is None
    assert not list(context.work.glob("*.lmdb.*"))
    assert [load_chunk(context.work, 2, number, (0,)) is not None for number in (0, 1)] == [done >= 4, False]
    continued = whole(by_chunks(context, clean))
    assert context.encoder.source.loads == dict.fromkeys(range(10, 20), 1)  # type: ignore[attr-defined]  # CountingSource
    remove_chunks(context.work, 2)
    assert continued == whole(build_block(context, clean))


def test_a_bad_sample_of_a_block_leaves_the_chunks_before_it(context: BuildContext, clean: list[Chunk]) -> None:
    bad = dataclasses.replace(clean[1], samples=(*clean[1].samples, Sample(20, "cat/gone.jpg", 0)))
    with pytest.raises(SampleError, match=r"gone\.jpg"):
        build_block(context, [clean[0], bad])
    first = load_chunk(context.work, 2, 0, (0,))
    assert first is not None
    assert first.info.numbers == [sample.number for sample in clean[0].samples]
    assert load_chunk(context.work, 2, 1, (0,)) is None
    assert not list(context.work.glob("*.lmdb.*"))


def test_a_shard_is_synced_before_it_gets_its_name(
    context: BuildContext, block: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, sync = list[int](), os.fsync
    for chunk in chunks_of(block):
        build_one(context, chunk)
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(os.fstat(file).st_ino), sync(file))[1])
    written = write_shard(context, block, 3, 2)
    assert written is not None
    assert (synced, files(context)) == ([], {})
    number = written.aside.stat().st_ino
    shard = install_shard(context, written)
    assert synced[0] == number == (context.shards / shard.entry.name).stat().st_ino
    assert plain(shard) == plain(load_receipt(context.shards, context.work, 2, 3))


def test_a_shard_that_cannot_be_synced_is_removed(
    context: BuildContext, block: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for chunk in chunks_of(block):
        build_one(context, chunk)
    written = write_shard(context, block, 3, 2)
    assert written is not None
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BuildError, match=r"v03-00002\.lmdb cannot be written: .*No space left"):
        install_shard(context, written)
    assert not written.aside.exists()
    assert files(context) == {}


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries give memory back by their own rules")
def test_memory_of_a_chunks_records_is_used_again_for_the_next() -> None:
    """A page fault for every page of every record takes longer than hashing it."""
    script = """
import resource
from tpucache.warmup.run.tasks import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        [bytes(150_528) for _ in range(48)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed_memory()
faults()
print(faults())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert int(done.stdout) < 1000  # of 14,112 pages; Python itself fetches some
