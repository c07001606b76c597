"""Builder: the state of one run. Which chunks and shards stand, how to make the others, how far it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpucache.errors import BuildError, SampleError, SourceError, UnfinishedError
from tpucache.warmup.planning.blocks import Block, Chunk, cut_block
from tpucache.warmup.planning.estimate import Remaining
from tpucache.warmup.running.context import Job
from tpucache.warmup.running.executor import Engine, Task
from tpucache.warmup.running.tasks import ChunkDone, build_chunk, find_begun, seal_shard
from tpucache.warmup.sources.base import Sample
from tpucache.warmup.work import chunks as spool
from tpucache.warmup.work.receipts import SealedShard, load_receipt


@dataclass(frozen=True)
class Standing:
    """How far a warmup is: samples dealt with, all of them, those skipped among them, and bytes made by this run."""

    samples: int
    total: int
    skipped: int
    bytes: int


class Builder:
    """Builds the shards of blocks, from what an earlier run left of them on."""

    def __init__(
        self,
        job: Job,
        blocks: Sequence[Block],
        report: Callable[[Standing], None] = lambda standing: None,
    ) -> None:
        """Look for what exists already. `report` is called with the progress; no task begins after the deadline."""
        self._job, self._blocks, self._report = job, blocks, report
        self._total = sum(len(block.samples) for block in blocks)
        self._chunks = {block.number: cut_block(block, job.fields, self._total) for block in blocks}
        self._sealed: dict[tuple[int, int], SealedShard] = {}
        self._done: dict[tuple[int, int], ChunkDone] = {}
        self._begun: dict[tuple[int, int], ChunkDone] = {}  # chunks that a deadline cut short
        self._kept: set[int] = set()  # by earlier runs
        self.known: dict[int, dict[int, int]] = {}  # checksums of one of each chunk's or shard's samples
        self._made = 0
        self._stopped = False  # a worker saw the deadline pass
        for block in blocks:
            self._find(block)

    def check_unchanged(self, changed: Sequence[Sample]) -> None:
        """Raise SourceError when a sample that has records already is among those that are others now."""
        if found := [sample for sample in changed if sample.number in self._kept]:
            raise SourceError(
                f"{len(found):,} samples have another size than when their records were made, such as "
                f"{found[0].path!r}. Bring them back as they were, or give another folder to build anew."
            )

    def left(self) -> list[Chunk]:
        """Return the chunks that no run has built yet."""
        chunks = [chunk for block in self._blocks for chunk in self._chunks[block.number]]
        return [chunk for chunk in chunks if (chunk.block, chunk.number) not in self._done]

    def remaining(self) -> Remaining:
        """Return what is still to be done, by its amount."""
        unsealed = []
        for block in self._blocks:
            variants = [variant for variant in block.variants if (block.number, variant) not in self._sealed]
            if variants:
                most = max(len(chunk.samples) for chunk in self._chunks[block.number])
                unsealed.append((len(block.samples) * len(variants), most * len(block.variants)))
        return Remaining(self.left(), unsealed, spool.size(self._job.work))

    def build(self, engine: Engine) -> list[SealedShard]:
        """Return all shards of the blocks, built now or before. Raises UnfinishedError when the time is up."""
        self._tell()
        while missing := [block for block in self._blocks if not self._whole(block)]:
            before = len(self._done), len(self._sealed)
            try:
                for result in engine.run(self._tasks(missing)):
                    self._take(*result)
            except SampleError as error:
                if not self._job.skip_errors:
                    raise
                raise SampleError(
                    error.path, f"{error.reason}; the cache has it already, so that it cannot be skipped any more"
                ) from error
            if self._stopped or self._late():
                break
            if (len(self._done), len(self._sealed)) == before:
                raise BuildError(f"the shards of {self._job.shards} cannot be sealed: run the same command again")
        if not all(map(self._whole, self._blocks)):
            standing = self._standing()
            raise UnfinishedError(
                f"the time limit is near: {standing.samples:,} of {standing.total:,} samples stand in "
                f"{self._job.shards}. Run the same command again to continue."
            )
        return [self._sealed[block.number, variant] for block in self._blocks for variant in block.variants]

    def _tasks(self, blocks: Sequence[Block]) -> Iterator[Task]:
        """Yield what is missing: the chunks of each block, then, behind those of the next block, its shards."""
        behind: list[Task] = []
        for block in blocks:
            for chunk in self._chunks[block.number]:
                if (block.number, chunk.number) not in self._done:
                    if self._late():
                        return
                    yield _run_chunk, (self._job_for(block), chunk)
            yield from behind
            bare = dataclasses.replace(block, samples=())  # sealing reads the spool, and workers are sent little
            chunks = len(self._chunks[block.number])
            behind = [
                (_run_seal, (self._job, bare, variant, chunks))
                for variant in block.variants
                if (block.number, variant) not in self._sealed
            ]
        for task in behind:
            if self._late():
                return
            yield task

    def _job_for(self, block: Block) -> Job:
        """A sample that has records already must have the others, too: it cannot be skipped any more."""
        added = 0 not in block.variants
        return dataclasses.replace(self._job, skip_errors=False) if added else self._job

    def _late(self) -> bool:
        return self._job.deadline.is_past

    def _find(self, block: Block) -> None:
        """Take note of what an earlier run left of a block."""
        job = self._job
        receipts = [load_receipt(job.shards, job.work, block.number, variant) for variant in block.variants]
        # What an earlier run was allowed to skip, this one may have to fail at.
        sealed = [shard for shard in receipts if shard and (job.skip_errors or not shard.note.skipped)]
        self._sealed.update({(block.number, shard.entry.variant): shard for shard in sealed})
        for chunk in self._chunks[block.number]:
            standing = spool.load(job.work, block.number, chunk.number, block.variants)
            if standing is None or not (job.skip_errors or not standing.note.skipped):
                if begun := find_begun(job, chunk):
                    self._kept.update(begun.note.numbers)
                    self._know(begun.note.numbers, begun.crcs)
                    done = ChunkDone(len(begun.note.numbers), len(begun.note.skipped), 0, whole=False)
                    self._begun[block.number, chunk.number] = done
                continue
            dealt = sorted([*standing.note.numbers, *(skip.number for skip in standing.note.skipped)])
            if dealt == [sample.number for sample in chunk.samples]:
                self._kept.update(standing.note.numbers)
                self._know(standing.note.numbers, standing.crcs)
                done = ChunkDone(len(standing.note.numbers), len(standing.note.skipped), 0)
                self._done[block.number, chunk.number] = done
        if self._whole(block):
            note = sealed[0].note
            self._kept.update(note.numbers)
            self._know(note.numbers, {s.entry.variant: s.rows["crc32"].tolist() for s in sealed})
            for chunk in self._chunks[block.number]:
                self._done[block.number, chunk.number] = ChunkDone(0, 0, 0)
            self._done[block.number, 0] = ChunkDone(len(note.numbers), len(note.skipped), 0)
            spool.remove(job.work, block.number)

    def _know(self, numbers: Sequence[int], checksums: Mapping[int, Sequence[int]]) -> None:
        if numbers:
            self.known[numbers[0]] = {variant: values[0] for variant, values in checksums.items()}

    def _take(self, block: Block | Chunk, result: Any) -> None:
        if isinstance(block, Chunk):
            (self._done if result.whole else self._begun)[block.block, block.number] = result
            self._stopped |= not result.whole
            self._made += result.bytes
        elif isinstance(result, SealedShard):
            self._sealed[block.number, result.entry.variant] = result
            if self._whole(block):
                spool.remove(self._job.work, block.number)
        else:  # a chunk was missing: what stands of them is looked for anew
            for chunk in self._chunks[block.number]:
                if spool.load(self._job.work, block.number, chunk.number, block.variants) is None:
                    self._done.pop((block.number, chunk.number), None)
        self._tell()

    def _whole(self, block: Block) -> bool:
        return all((block.number, variant) in self._sealed for variant in block.variants)

    def _standing(self) -> Standing:
        chunks = {**self._begun, **self._done}.values()
        kept = sum(done.kept for done in chunks)
        skipped = sum(done.skipped for done in chunks)
        return Standing(kept + skipped, self._total, skipped, self._made)

    def _tell(self) -> None:
        self._report(self._standing())


def _run_chunk(job: Job, chunk: Chunk) -> tuple[Chunk, ChunkDone]:
    return dataclasses.replace(chunk, samples=()), build_chunk(job, chunk)


def _run_seal(job: Job, block: Block, variant: int, chunks: int) -> tuple[Block, SealedShard | None]:
    return block, seal_shard(job, block, variant, chunks)
