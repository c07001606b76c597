"""Scheduler: finds the existing chunks and shards of a build, makes tasks for missing ones, and reports progress."""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from tpucache.errors import BuildError, SampleError, SourceError, UnfinishedError
from tpucache.progress import BuildProgress
from tpucache.store.ahead import MOST_FILES
from tpucache.store.files import is_late
from tpucache.warmup.blocks import Block, Chunk, cut_block
from tpucache.warmup.estimate import Remaining
from tpucache.warmup.run.chunks import (
    BuiltShard,
    ChunkInfo,
    StoredChunk,
    load_chunk,
    load_receipt,
    remove_chunks,
    stored_bytes,
)
from tpucache.warmup.run.executors import Executor, Task
from tpucache.warmup.run.tasks import (
    BuildContext,
    ChunkResult,
    WrittenShard,
    build_block,
    build_chunk,
    end_loading,
    find_partial_chunk,
    install_shard,
    load_ahead,
    seal_shard,
    write_shard,
)
from tpucache.warmup.sources.source import Sample

#: The most source bytes of a small block. Building one takes a few seconds, so that a kill loses little.
SMALL_BYTES: Final = 48 << 20


class Scheduler:
    """Builds the shards of blocks, or continues an interrupted build."""

    def __init__(
        self,
        context: BuildContext,
        blocks: Sequence[Block],
        on_progress: Callable[[BuildProgress], None] = lambda progress: None,
        on_shard: Callable[[BuiltShard], None] = lambda shard: None,
    ) -> None:
        """Find the chunks and shards of an earlier run.

        `on_progress` is called after each task, and `on_shard` with each finished shard, first those of earlier runs.
        """
        self._context, self._blocks, self._on_progress = context, blocks, on_progress
        self._on_shard = on_shard
        self._total = sum(len(block.samples) for block in blocks)
        self._chunks = {block.number: cut_block(block, context.encoder.fields, self._total) for block in blocks}
        self._sealed: dict[tuple[int, int], BuiltShard] = {}
        self._done: dict[tuple[int, int], ChunkResult] = {}
        self._partial: dict[tuple[int, int], ChunkResult] = {}  # chunks that a deadline cut short
        self._kept: set[int] = set()  # numbers of samples whose records an earlier run has made
        self.known: dict[int, dict[int, int]] = {}  # checksums of one sample of each chunk or shard, by its number
        self._made = 0
        self._built: set[int] = set()  # blocks whose shards are all finished
        self._stopped = False  # whether the deadline stopped a worker
        self._samples_a_task = 1  # larger if the storage is slow to answer
        for block in blocks:
            self._find_shards(block)

    def check_unchanged(self, changed: Sequence[Sample]) -> None:
        """Raise SourceError if an earlier run made records of a sample in `changed`, whose size has changed."""
        if found := [sample for sample in changed if sample.number in self._kept]:
            raise SourceError(
                f"{len(found):,} samples have another size than when their records were made, such as "
                f"{found[0].path!r}. Bring them back as they were, or give another folder to build anew."
            )

    def remaining(self) -> Remaining:
        """Return the amount of remaining work."""
        chunks = [chunk for block in self._blocks for chunk in self._chunks[block.number]]
        unsealed = []
        for block in self._blocks:
            variants = [variant for variant in block.variants if (block.number, variant) not in self._sealed]
            if variants:
                most = max(len(chunk.samples) for chunk in self._chunks[block.number])
                unsealed.append((len(block.samples) * len(variants), most * len(block.variants)))
        left = [chunk for chunk in chunks if (chunk.block, chunk.number) not in self._done]
        return Remaining(left, unsealed, stored_bytes(self._context.work))

    def build(self, executor: Executor) -> list[BuiltShard]:
        """Build the missing shards, and return the shards of all blocks. Raises UnfinishedError when the time is up."""
        self._on_progress(self._progress())
        for shard in list(self._sealed.values()):
            self._on_shard(shard)
        while missing := [block for block in self._blocks if not self._is_built(block)]:
            before = len(self._done), len(self._sealed)
            self._run_tasks(executor, missing)
            if self._stopped or self._context.deadline.is_past:
                break
            if (len(self._done), len(self._sealed)) == before:
                raise BuildError(f"the shards of {self._context.shards} cannot be finished: run the same command again")
        if not all(map(self._is_built, self._blocks)):
            progress = self._progress()
            raise UnfinishedError(
                f"the time limit is near: {progress.samples:,} of {progress.total:,} samples are finished in "
                f"{self._context.shards}. Run the same command again to continue."
            )
        return [self._sealed[block.number, variant] for block in self._blocks for variant in block.variants]

    def _run_tasks(self, executor: Executor, blocks: Sequence[Block]) -> None:
        try:
            for results in executor.run(self._tasks(blocks, executor), few=len(blocks) == 1):
                for result in results:
                    self._take(*result)
        except SampleError as error:
            if not self._context.skip_errors:
                raise
            raise SampleError(
                error.path,
                f"{error.reason}; the cache already has records of this sample, so it cannot be skipped",
                error.file,
            ) from error
        finally:
            end_loading()  # if tasks ran in this process

    def _tasks(self, blocks: Sequence[Block], executor: Executor) -> Iterator[Task]:
        """Yield the tasks for missing chunks and shards.

        A small block is one task. For other blocks, tasks build the chunks, and then write the shards. The tasks for
        the shards of a block follow those for the chunks of the next block, so that no worker waits for a block's last
        chunk.
        """
        small = self._small_blocks(blocks, executor)
        for at, block in enumerate(small):
            if self._context.deadline.is_past:
                return
            chunks = self._chunks[block.number]
            then = self._first_of(small[at + executor.workers :])
            yield _run_block, (self._context_for(block), _bare(block), chunks, then)
        seal = _run_seal if executor.is_cluster else _run_write
        shard_tasks: list[Task] = []  # those of the previous block
        whole = {block.number for block in small}
        for block in blocks:
            if block.number in whole:
                continue
            left = deque(
                chunk for chunk in self._chunks[block.number] if (block.number, chunk.number) not in self._done
            )
            while left:
                if self._context.deadline.is_past:
                    return
                some = self._take_some(left, executor.workers)
                others = (executor.workers - 1) * len(some)  # chunks that other workers probably get
                then = [] if executor.is_cluster else self._first_of(itertools.islice(left, others, None))
                yield _run_chunks, (self._context_for(block), some, then)
            yield from shard_tasks
            count = len(self._chunks[block.number])
            shard_tasks = [
                (seal, (self._context, _bare(block), variant, count))
                for variant in block.variants
                if (block.number, variant) not in self._sealed
            ]
        for task in shard_tasks:
            if self._context.deadline.is_past:
                return
            yield task

    def _first_of(self, work: Iterable[Block | Chunk]) -> list[Sample]:
        """Return the samples that the worker of the current task will probably need next; [] if storage is not slow.

        `work` has the chunks or blocks that follow the current tasks of all workers. Workers take tasks in turns.
        """
        if not is_late(self._context.latency) and self._samples_a_task == 1:
            return []
        samples = itertools.chain.from_iterable(each.samples for each in work)
        return list(itertools.islice(samples, MOST_FILES))

    def _take_some(self, left: deque[Chunk], workers: int) -> list[Chunk]:
        """Take the chunks of one task: one, or several if the storage is slow, so that workers wait less often."""
        most = max(1, len(left) // workers)
        taken = [left.popleft()]
        while left and len(taken) < most and sum(len(chunk.samples) for chunk in taken) < self._samples_a_task:
            taken.append(left.popleft())
        return taken

    def _small_blocks(self, blocks: Sequence[Block], executor: Executor) -> list[Block]:
        """Return the blocks that are so small that one task builds a whole block, without chunk files.

        The number of these blocks is a multiple of the number of workers. On a cluster there are none.
        """
        if executor.is_cluster:
            return []
        begun = {number for number, _ in (*self._done, *self._partial, *self._sealed)}
        small = [
            block
            for block in blocks
            if block.variants == (0,)
            and block.number not in begun
            and all(sample.bytes for sample in block.samples)  # 0 means that a size is not known
            and sum(sample.bytes for sample in block.samples) <= SMALL_BYTES
        ]
        return small[: len(small) // executor.workers * executor.workers]

    def _context_for(self, block: Block) -> BuildContext:
        """Return the context of a block's tasks. If the cache has the block's samples already, none may be skipped."""
        added = 0 not in block.variants
        return dataclasses.replace(self._context, skip_errors=False) if added else self._context

    def _find_shards(self, block: Block) -> None:
        context = self._context
        receipts = [load_receipt(context.shards, context.work, block.number, variant) for variant in block.variants]
        # An earlier run may have skipped samples that this one must not skip, or may have retried other samples.
        sealed = [
            shard
            for shard in receipts
            if shard and (context.skip_errors or not shard.info.skipped) and shard.info.covers(block.samples)
        ]
        self._sealed.update({(block.number, shard.entry.variant): shard for shard in sealed})
        for chunk in self._chunks[block.number]:
            self._find_chunk(block, chunk)
        if self._is_built(block):
            info = sealed[0].info
            self._remember(info.numbers, {s.entry.variant: s.rows["crc32"].tolist() for s in sealed})
            self._count_built(block.number, info)
            remove_chunks(context.work, block.number)

    def _count_built(self, block: int, info: ChunkInfo) -> None:
        """Count the samples of a block whose shards are all finished."""
        self._built.add(block)
        for chunk in self._chunks[block]:
            self._done[block, chunk.number] = ChunkResult(0, 0, 0)
        self._done[block, 0] = ChunkResult(len(info.numbers), len(info.skipped), 0)

    def _find_chunk(self, block: Block, chunk: Chunk) -> None:
        context = self._context
        stored = load_chunk(context.work, block.number, chunk.number, block.variants)
        if stored is None or (stored.info.skipped and not context.skip_errors):
            if partial := find_partial_chunk(context, chunk):
                self._remember(partial.info.numbers, partial.crcs)
                self._partial[block.number, chunk.number] = _found(partial, whole=False)
            return
        if stored.info.covers(chunk.samples):
            self._remember(stored.info.numbers, stored.crcs)
            self._done[block.number, chunk.number] = _found(stored)

    def _remember(self, numbers: Sequence[int], checksums: Mapping[int, Sequence[int]]) -> None:
        self._kept.update(numbers)
        if numbers:
            self.known[numbers[0]] = {variant: values[0] for variant, values in checksums.items()}

    def _take(self, task: Block | Chunk, result: Any) -> None:
        """Store the result of a task, and report the progress.

        If a worker on this machine wrote a shard, this process syncs it, while the worker does its next task.
        """
        if isinstance(result, WrittenShard):
            result = install_shard(self._context, result)
        if isinstance(task, Chunk):
            if task.block not in self._built:  # a shard's result may arrive before that of its last chunk
                (self._done if result.whole else self._partial)[task.block, task.number] = result
            self._stopped |= not result.whole
            self._made += result.bytes
            self._samples_a_task = result.samples_a_task
        elif isinstance(result, BuiltShard):
            self._sealed[task.number, result.entry.variant] = result
            self._on_shard(result)
            if (task.number, 0) not in self._done:  # the block was built in one task, without chunks
                self._made += int(result.rows["length"].sum())
            if self._is_built(task):
                self._count_built(task.number, result.info)
                remove_chunks(self._context.work, task.number)
        else:  # a chunk was missing, or the deadline stopped a block: find the existing chunks again
            for chunk in self._chunks[task.number]:
                self._done.pop((task.number, chunk.number), None)
                self._find_chunk(task, chunk)
        self._on_progress(self._progress())

    def _is_built(self, block: Block) -> bool:
        return all((block.number, variant) in self._sealed for variant in block.variants)

    def _progress(self) -> BuildProgress:
        results = {**self._partial, **self._done}.values()
        kept = sum(result.kept for result in results)
        skipped = sum(result.skipped for result in results)
        return BuildProgress(kept + skipped, self._total, skipped, self._made)


def _found(stored: StoredChunk, whole: bool = True) -> ChunkResult:
    """The result counts no bytes, because nothing was built now. If not `whole`, `stored` is a chunk's beginning."""
    return ChunkResult(len(stored.info.numbers), len(stored.info.skipped), 0, whole)


def _bare(block: Block) -> Block:
    """Return a block without its samples, so that tasks are small."""
    return dataclasses.replace(block, samples=())


def _run_chunks(
    context: BuildContext, chunks: Sequence[Chunk], then: Sequence[Sample]
) -> list[tuple[Chunk, ChunkResult]]:
    """Build chunks one after the other, until the deadline stops one.

    Returns each begun chunk, without its samples, and its result. `then` are the samples with which this worker's next
    task probably begins. They are read ahead.
    """
    done: list[tuple[Chunk, ChunkResult]] = []
    with load_ahead(context, chunks, then) as items:
        for chunk in chunks:
            done.append((dataclasses.replace(chunk, samples=()), build_chunk(context, chunk, items)))
            if not done[-1][1].whole:
                break
    return done


def _run_block(
    context: BuildContext, block: Block, chunks: Sequence[Chunk], then: Sequence[Sample]
) -> list[tuple[Block, WrittenShard | None]]:
    return [(block, build_block(context, chunks, then))]


def _run_seal(context: BuildContext, block: Block, variant: int, chunks: int) -> list[tuple[Block, BuiltShard | None]]:
    return [(block, seal_shard(context, block, variant, chunks))]


def _run_write(
    context: BuildContext, block: Block, variant: int, chunks: int
) -> list[tuple[Block, WrittenShard | None]]:
    return [(block, write_shard(context, block, variant, chunks))]
