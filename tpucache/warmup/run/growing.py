"""GrowingScheduler: builds samples in the order in which readers ask for them. Readers can read finished records.

Each worker writes records into its own spool file, and a log has the position of each record (see
`tpucache.store.growing`). When all samples of a block are built, its shards are written from the spool files. In a
finished cache, records, labels and columns are ordered by sample number, so that the order of requests does not change
the cache.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import secrets
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tpucache.errors import BuildError, SourceError, UnfinishedError
from tpucache.machine import pread
from tpucache.progress import BuildProgress
from tpucache.store.ahead import MOST_FILES
from tpucache.store.files import OpenFile, is_late, write_atomically
from tpucache.store.growing import ARRIVED_DTYPE, ARRIVED_NAME, FAILURE_NAME, SPOOL_BIT, list_asked, spool_name
from tpucache.store.writer import ShardWriter
from tpucache.warmup.blocks import Block, Chunk
from tpucache.warmup.estimate import Remaining
from tpucache.warmup.plan import BuildPlan
from tpucache.warmup.run.chunks import BuiltShard, ChunkInfo, join_infos, load_receipt
from tpucache.warmup.run.executors import Executor, Task
from tpucache.warmup.run.folder import disk_failure
from tpucache.warmup.run.tasks import (
    BuildContext,
    WrittenShard,
    add_samples,
    check_run,
    end_loading,
    install_shard,
    keep_freed_memory,
    load_ahead,
    temporary_shard,
    written_shard,
)
from tpucache.warmup.sources.source import Sample

Rows = npt.NDArray[Any]

#: The `info` of the samples in the spool files: a line of JSON for each group of samples (see `_Group`).
_INFOS_NAME: Final = "arrived.jsonl"
#: A reader waits for a whole task, but each task has a cost of a few milliseconds. So the first tasks are small, the
#: next ones large, and the last ones small again, so that all workers end at the same time.
_TASK_SAMPLES: Final = 16
_MOST_SAMPLES: Final = 64
#: Each task waits once for its first files. So tasks are larger if the storage answers late.
_MOST_LATE_SAMPLES: Final = 512
_TASK_SHARE: Final = 24  # a task is at most 1/24 of the finished samples, and of the remaining ones
_TASK_BYTES: Final = 16 << 20
_SYNCED_AT_ONCE: Final = 4
#: Fewer samples than this are built in this process for a moment, before workers are started.
_FEW: Final = 64


def has_arrivals(work: Path) -> bool:
    """Return whether a work folder has the log of a build that readers can follow."""
    return (work / ARRIVED_NAME).exists()


def can_grow(context: BuildContext, plan: BuildPlan) -> bool:
    """Return whether a cache can be read while it is built, because its samples, labels and classes are known already.

    A build that was started with chunks is continued with chunks, and cannot be read.
    """
    rule = plan.label_rule
    is_known = plan.existing is None and not context.skip_errors and (rule is None or rule.like is None)
    return is_known and not any(context.work.glob("chunk-*"))


@dataclass(frozen=True)
class _Group:
    """Built samples of one block: their `info`, and a row of the log for each of their records."""

    block: int
    info: ChunkInfo
    rows: Rows


class _Made(NamedTuple):
    """The result of a task: the `groups` of built samples. `is_whole` says whether these are all samples of the task.

    `samples_a_task` is how many samples a task should have, given the storage's delay that the worker has measured.
    """

    groups: list[_Group]
    is_whole: bool
    samples_a_task: int


class GrowingScheduler:
    """Builds the shards of a new cache, or continues an interrupted build. Samples for which readers ask come first."""

    def __init__(
        self,
        context: BuildContext,
        blocks: Sequence[Block],
        on_progress: Callable[[BuildProgress], None] = lambda progress: None,
    ) -> None:
        """Find the shards and records that an earlier run built. `on_progress` is called after each task."""
        self._context, self._blocks, self._on_progress = context, {block.number: block for block in blocks}, on_progress
        self._samples: list[Sample] = [sample for block in blocks for sample in block.samples]
        self._firsts = [block.samples[0].number for block in blocks]
        self._variants = sorted(blocks[0].variants)
        self._sealed: dict[tuple[int, int], BuiltShard] = {}
        self._infos: dict[int, list[ChunkInfo]] = {block.number: [] for block in blocks}
        #: The log's row of each variant and sample. Without a record, `file` and the length are 0.
        self._rows = np.zeros((len(self._variants), len(self._samples)), ARRIVED_DTYPE)
        self._is_made = np.zeros(len(self._samples), np.bool_)
        self._is_given = np.zeros(len(self._samples), np.bool_)  # to a worker
        self._queues: dict[str, Iterator[int]] = {}  # numbers of samples, by the file in which a reader asks for them
        self._rest = iter(range(len(self._samples)))
        self._being_sealed: set[int] = set()  # blocks whose shards were given to workers
        self._bytes = 0
        self._samples_a_task = 1
        self._workers = 1
        self._stopped = False
        self.known: dict[int, dict[int, int]] = {}  # checksums of one sample of each block, by its number
        self._find_shards()
        self._find_arrivals()

    def check_unchanged(self, changed: Sequence[Sample]) -> None:
        """Raise SourceError if an earlier run made records of a sample in `changed`, whose size has changed."""
        if found := [sample for sample in changed if self._is_made[sample.number]]:
            raise SourceError(
                f"{len(found):,} samples have another size than when their records were made, such as "
                f"{found[0].path!r}. Bring them back as they were, or give another folder to build anew."
            )

    def remaining(self) -> Remaining:
        """Return the amount of remaining work."""
        left = [
            Chunk(
                block.number, 0, tuple(each for each in block.samples if not self._is_made[each.number]), block.variants
            )
            for block in self._blocks.values()
        ]
        unsealed = [
            (len(block.samples) * len(variants), 0)
            for block in self._blocks.values()
            if (variants := self._left(block))
        ]
        spooled = sum(path.stat().st_size for path in self._context.work.glob("spool-*"))
        return Remaining([chunk for chunk in left if chunk.samples], unsealed, spooled, is_read=True)

    def build(self, executor: Executor) -> list[BuiltShard]:
        """Build the missing shards, and return the shards of all blocks. Raises UnfinishedError when the time is up."""
        self._on_progress(self._progress())
        self._workers = executor.workers
        (self._context.work / FAILURE_NAME).unlink(missing_ok=True)
        with _open_log(self._context.work) as log, (self._context.work / _INFOS_NAME).open("a") as infos:
            few = int((~self._is_made).sum()) < _FEW
            try:
                for result in executor.run(self._tasks(), few=few):
                    self._take(result, log, infos)
            finally:
                end_loading()  # if tasks ran in this process
        if not self._is_late():
            # A disk syncs several files in little more time than one, and workers do not wait for it.
            with ThreadPoolExecutor(_SYNCED_AT_ONCE, "tpucache-sync") as pool:
                written = executor.run(self._seals(), few=len(self._blocks) == 1)
                for shard in [pool.submit(install_shard, self._context, each) for each in written]:
                    self._add_shard(shard.result())
        if not all(not self._left(block) for block in self._blocks.values()):
            progress = self._progress()
            raise UnfinishedError(
                f"the time limit is near: {progress.samples:,} of {progress.total:,} samples are finished in "
                f"{self._context.shards}. Run the same command again to continue."
            )
        return [self._sealed[number, variant] for number, block in self._blocks.items() for variant in block.variants]

    def _is_late(self) -> bool:
        return self._stopped or self._context.deadline.is_past

    def _left(self, block: Block) -> list[int]:
        """Return the variants of a block that have no shard yet."""
        return [variant for variant in block.variants if (block.number, variant) not in self._sealed]

    def _tasks(self) -> Iterator[Task]:
        """Yield tasks that build missing samples, beginning with those that readers ask for.

        While no reader asks for samples, also yield tasks that write the shards of completed blocks.
        """
        planned: deque[tuple[list[Chunk], bool]] = deque()  # the next tasks, and whether a reader asks for them
        while not self._is_late():
            is_slow = is_late(self._context.latency) or self._samples_a_task > 1
            if planned and list_asked(self._context.work):  # what a reader asks for comes before what nobody asked for
                for chunk in [chunk for chunks, is_asked in planned if not is_asked for chunk in chunks]:
                    self._is_given[[sample.number for sample in chunk.samples]] = False
                planned = deque(task for task in planned if task[1])
                self._rest = iter(range(len(self._samples)))
            while len(planned) <= (self._workers if is_slow else 0):
                some, is_asked = self._next_samples()
                planned.append((self._cut(some), is_asked))
            chunks, is_asked = planned.popleft()
            if not is_asked:
                for number in [number for number, block in self._blocks.items() if self._can_seal(block)]:
                    yield from self._seals_of(self._blocks[number])
            if not chunks:
                return
            # Workers take tasks in turns. So this worker's next task is probably the one as many tasks later.
            later = planned[self._workers - 1][0] if is_slow else []
            then = [sample for chunk in later for sample in chunk.samples][:MOST_FILES]
            yield _run_samples, (self._context, chunks, len(self._samples), then)

    def _next_samples(self) -> tuple[list[int], bool]:
        """Return the numbers of the samples of the next task, and whether a reader asks for one of them."""
        for name in list_asked(self._context.work):
            self._queues[name] = self._read_asked(self._context.work / name)
        some: list[int] = []
        given = int(self._is_given.sum())
        left = len(self._samples) - given
        most = min(_MOST_SAMPLES, max(_TASK_SAMPLES, min(given, left) // _TASK_SHARE))
        late = min(_MOST_LATE_SAMPLES, self._samples_a_task, given, max(_MOST_SAMPLES, left // self._workers))
        most, weight, is_asked = max(most, late), 0, False
        for name in (*sorted(self._queues, reverse=True), ""):
            for number in self._queues[name] if name else self._rest:
                if self._is_given[number]:
                    continue
                self._is_given[number] = True
                some.append(number)
                weight += self._samples[number].bytes
                is_asked |= bool(name)
                if len(some) >= most or weight >= _TASK_BYTES:
                    return some, is_asked
            self._queues.pop(name, None)
        return some, is_asked

    def _read_asked(self, path: Path) -> Iterator[int]:
        """Return the samples that a reader asks for in a file, and remove the file; no samples if it cannot be read."""
        try:
            found = np.load(path, allow_pickle=False)
            path.unlink()
        except (OSError, ValueError, EOFError):
            return iter(())
        if found.ndim != 1 or found.dtype.kind not in "iu":
            return iter(())
        return iter(found[(found >= 0) & (found < len(self._samples))].tolist())

    def _cut(self, numbers: list[int]) -> list[Chunk]:
        chunks: dict[int, list[Sample]] = {}
        places = np.searchsorted(self._firsts, numbers, side="right") - 1
        blocks = list(self._blocks)
        for number, place in sorted(zip(numbers, places.tolist(), strict=True)):
            chunks.setdefault(blocks[place], []).append(self._samples[number])
        return [Chunk(block, 0, tuple(some), tuple(self._variants)) for block, some in chunks.items()]

    def _take(self, result: Any, log: FileIO, infos: Any) -> None:
        """Save the result of a task: first the `info` of its groups, then their rows in the log that readers follow."""
        if isinstance(result, WrittenShard):
            self._add_shard(install_shard(self._context, result))
            return
        self._samples_a_task, self._stopped = result.samples_a_task, self._stopped or not result.is_whole
        try:
            for group in result.groups:
                infos.write(json.dumps({"block": group.block, "info": group.info.to_dict()}) + "\n")
            infos.flush()
            for group in result.groups:
                _append(log.fileno(), memoryview(group.rows.tobytes()))
                self._add(group)
        except OSError as error:
            raise disk_failure(self._context.work, error) from error
        self._on_progress(self._progress())

    def _add(self, group: _Group) -> None:
        self._infos[group.block].append(group.info)
        numbers = np.array(group.info.numbers, np.int64)
        self._rows.reshape(-1)[group.rows["row"].astype(np.int64)] = group.rows
        self._is_made[numbers] = self._is_given[numbers] = True
        self._bytes += int(group.rows["length"].sum())

    def _add_shard(self, shard: BuiltShard) -> None:
        self._sealed[shard.entry.block, shard.entry.variant] = shard
        self._on_progress(self._progress())

    def _can_seal(self, block: Block) -> bool:
        """Return whether all samples of a block are built, and its shards are neither written nor in a task."""
        first = block.samples[0].number
        is_made = self._is_made[first : first + len(block.samples)].all()
        return bool(is_made and self._left(block)) and block.number not in self._being_sealed

    def _seals(self) -> Iterator[Task]:
        self._being_sealed.clear()
        for block in self._blocks.values():
            if self._is_late():
                return
            yield from self._seals_of(block)

    def _seals_of(self, block: Block) -> Iterator[Task]:
        self._being_sealed.add(block.number)
        first = block.samples[0].number
        info = _in_order(join_infos(self._infos[block.number]))
        bare = dataclasses.replace(block, samples=())
        for variant in self._left(block):
            rows = self._rows[self._variants.index(variant), first : first + len(block.samples)]
            yield _run_seal, (self._context, bare, variant, first, rows.copy(), info)

    def _find_shards(self) -> None:
        context = self._context
        for block in self._blocks.values():
            receipts = [load_receipt(context.shards, context.work, block.number, variant) for variant in block.variants]
            for shard in receipts:
                if shard and not shard.info.skipped and shard.info.covers(block.samples):
                    self._sealed[block.number, shard.entry.variant] = shard
            if not self._left(block):
                numbers = np.array([sample.number for sample in block.samples])
                self._is_made[numbers] = self._is_given[numbers] = True
                first = {
                    variant: int(self._sealed[block.number, variant].rows["crc32"][0]) for variant in block.variants
                }
                self.known[block.samples[0].number] = first

    def _find_arrivals(self) -> None:
        """Find the undamaged records in spool files, and ignore all other records."""
        work = self._context.work
        logged = _read_log(work, self._rows.size)
        groups = _read_groups(work, logged[logged["file"] >= SPOOL_BIT], self._rows)
        kept = [group for group in groups if group.block in self._infos and not self._is_made[group.info.numbers].any()]
        for group in kept:
            self._add(group)
        self._bytes = 0
        if has_arrivals(work):
            lines = [json.dumps({"block": group.block, "info": group.info.to_dict()}) + "\n" for group in kept]
            write_atomically(work / _INFOS_NAME, "".join(lines).encode())
        self._correct_log(_last_rows(logged, self._rows.size))
        for block in self._blocks.values():
            first = block.samples[0].number
            if self._is_made[first] and first not in self.known:
                self.known[first] = dict(zip(self._variants, self._rows[:, first]["crc32"].tolist(), strict=True))

    def _correct_log(self, logged: Rows) -> None:
        """Append rows to the log, so that the last row of each record is right. Raises BuildError.

        A record that is only in a shard gets a row with its position in the shard. A record that is lost gets a row
        with the length 0, because readers would otherwise read it where the log says. `logged` has the last row so far
        for each variant and sample.
        """
        places, positions = self._rows.copy(), {number: at for at, number in enumerate(self._blocks)}
        for (number, variant), shard in self._sealed.items():
            at = self._variants.index(variant)
            first, count = self._blocks[number].samples[0].number, len(shard.rows)
            rows = places[at, first : first + count]
            if not rows["length"].all():
                for name in ("offset", "length", "crc32"):
                    rows[name] = shard.rows[name]
                rows["row"] = at * len(self._samples) + first + np.arange(count)
                rows["file"] = at * len(self._blocks) + positions[number]
        found = places.reshape(-1)
        is_lost = (found["length"] == 0) & (logged["length"] > 0)
        found[is_lost] = logged[is_lost]
        found["length"][is_lost] = 0
        is_new = is_lost | ((found["length"] > 0) & (found != logged))
        if is_new.any():
            try:
                with _open_log(self._context.work) as log:
                    _append(log.fileno(), memoryview(found[is_new].tobytes()))
            except OSError as error:
                raise disk_failure(self._context.work, error) from error

    def _progress(self) -> BuildProgress:
        return BuildProgress(int(self._is_made.sum()), len(self._samples), 0, self._bytes)


def _open_log(work: Path) -> FileIO:
    return FileIO(work / ARRIVED_NAME, "ab")


def _read_log(work: Path, size: int) -> Rows:
    """Return the rows of the log whose record number is below `size`. Without a log, return no rows."""
    try:
        data = (work / ARRIVED_NAME).read_bytes()
    except FileNotFoundError:
        return np.zeros(0, ARRIVED_DTYPE)
    whole = len(data) // ARRIVED_DTYPE.itemsize * ARRIVED_DTYPE.itemsize
    if whole < len(data):  # torn by a power cut
        os.truncate(work / ARRIVED_NAME, whole)
    rows = np.frombuffer(data[:whole], ARRIVED_DTYPE)
    return rows[rows["row"] < size]


def _last_rows(logged: Rows, size: int) -> Rows:
    """Return the last row in `logged` of each of `size` records; a row of zeros for a record without one."""
    rows = np.zeros(size, ARRIVED_DTYPE)
    rows[logged["row"].astype(np.int64)] = logged
    return rows


def _read_groups(work: Path, logged: Rows, shape: Rows) -> list[_Group]:
    """Return the groups of samples in spool files, without groups that have a damaged or missing record.

    `logged` has the rows of the log that point to spool files. `shape` is any array of the shape (variants, samples).
    """
    try:
        lines = (work / _INFOS_NAME).read_text().splitlines()
    except FileNotFoundError:
        return []
    rows = _last_rows(logged, shape.size)
    is_right: npt.NDArray[np.bool_] = np.all(_are_right(work, rows).reshape(shape.shape), axis=0)
    found = []
    for line in lines:
        try:
            content = json.loads(line)
            info, block = ChunkInfo.from_dict(content["info"]), content["block"]
        except (ValueError, KeyError, TypeError):  # torn by a power cut
            continue
        numbers = np.array(info.numbers, np.int64)
        if len(numbers) and is_right[numbers].all():
            is_right[numbers] = False  # ignore later lines with the same samples
            found.append(_Group(block, info, rows.reshape(shape.shape)[:, numbers].reshape(-1)))
    return found


def _are_right(work: Path, rows: Rows) -> npt.NDArray[np.bool_]:
    """Return for each row whether its record is in a spool file and has the right checksum."""
    is_right = np.zeros(len(rows), np.bool_)
    for file in np.unique(rows["file"][rows["length"] > 0]).tolist():
        try:
            opened = OpenFile(work / spool_name(file))
        except FileNotFoundError:
            continue
        for at in np.flatnonzero((rows["file"] == file) & (rows["length"] > 0)).tolist():
            record = pread(opened.number, int(rows["length"][at]), int(rows["offset"][at]))
            is_right[at] = zlib.crc32(record) == rows["crc32"][at]
    return is_right


def _in_order(info: ChunkInfo) -> ChunkInfo:
    order = np.argsort(info.numbers).tolist()

    def sort(values: list[Any]) -> list[Any]:
        return [values[at] for at in order]

    return dataclasses.replace(
        info,
        numbers=sort(info.numbers),
        labels=sort(info.labels),
        columns={name: sort(values) for name, values in info.columns.items()},
        digests={name: info.digests[name] for name in sorted(info.digests, key=int)},
    )


class _Record(NamedTuple):
    """One record of the sample `number`, in the variant with the index `place` among the sorted variants."""

    place: int
    number: int
    data: bytes


class _Built(NamedTuple):
    """Built samples of one block, whose records are not in a file yet."""

    block: int
    info: ChunkInfo
    records: list[_Record]

    def keep(self, number: int, records: Sequence[bytes]) -> None:
        self.records.extend(_Record(place, number, record) for place, record in enumerate(records))


class _Spool(NamedTuple):
    file: int
    descriptor: int


@functools.lru_cache(maxsize=1)
def _spool(work: Path, _run: str) -> _Spool:
    """Return the spool file that this process writes in a run. Another run gets another file. Raises OSError."""
    while True:
        file = SPOOL_BIT | secrets.randbits(30)  # numbers with the next bit stand for readers' files in memory
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)
            return _Spool(file, os.open(work / spool_name(file), flags, 0o666))
        except FileExistsError:
            continue


def _run_samples(context: BuildContext, chunks: Sequence[Chunk], samples: int, then: Sequence[Sample]) -> _Made:
    """Build the records of the samples of `chunks`, and append them to the spool file of this process.

    `samples` is the number of samples of the cache. `then` are the samples with which this worker's next task probably
    begins. They are read ahead.
    """
    keep_freed_memory()
    groups: list[_Group] = []
    built: list[_Built] = []  # chunks whose records are not in the spool file yet
    is_whole = True
    with load_ahead(context, chunks, then) as items:
        for chunk in chunks:
            built.append(_Built(chunk.block, ChunkInfo(), []))
            is_whole = add_samples(context, chunk, 0, built[-1].info, items, built[-1].keep) == len(chunk.samples)
            if sum(len(record.data) for each in built for record in each.records) >= _TASK_BYTES:
                groups += _write(context, built, samples)
                built = []
            if not is_whole:
                break
    groups += _write(context, built, samples)
    return _Made(groups, is_whole, context.lateness.samples_a_task)


def _write(context: BuildContext, built: Sequence[_Built], samples: int) -> list[_Group]:
    """Append the records of chunks to the spool file of this process, and return a group for each chunk with records.

    `samples` is the number of samples of the cache. A task has a few samples of each block, so all chunks are written
    together, which is faster.
    """
    built = [each for each in built if each.records]
    made = [record for each in built for record in each.records]
    if not made:
        return []
    check_run(context)
    rows = np.zeros(len(made), ARRIVED_DTYPE)
    rows["length"] = [len(record.data) for record in made]
    rows["crc32"] = [zlib.crc32(record.data) for record in made]
    rows["row"] = [record.place * samples + record.number for record in made]
    try:
        spool = _spool(context.work, context.run)
        start = os.fstat(spool.descriptor).st_size
        for record in made:
            _append(spool.descriptor, memoryview(record.data))
    except OSError as error:
        raise disk_failure(context.work, error) from error
    rows["file"] = spool.file
    rows["offset"] = start + np.concatenate([[0], np.cumsum(rows["length"][:-1], dtype=np.int64)])
    stops = np.cumsum([len(each.records) for each in built])
    return [
        _Group(each.block, each.info, some)
        for each, some in zip(built, np.split(rows, stops[:-1].tolist()), strict=True)
    ]


def _append(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _run_seal(
    context: BuildContext, block: Block, variant: int, first: int, rows: Rows, info: ChunkInfo
) -> WrittenShard:
    """Write the shard of one variant of a block from spool files, under a temporary name. Raises BuildError.

    `rows` are the log's rows of the shard's records, in the order of the samples. `first` is the number of the first
    sample. `info` describes all samples of the block.
    """
    check_run(context)
    aside = temporary_shard(context, block.number, variant)
    files: dict[int, OpenFile] = {}
    try:
        with ShardWriter(aside) as writer:
            for number, row in enumerate(rows, first):
                file = int(row["file"])
                if file not in files:
                    files[file] = OpenFile(context.work / spool_name(file))
                record = pread(files[file].number, int(row["length"]), int(row["offset"]))
                writer.append(number, record, int(row["crc32"]))
            check_run(context)
            return written_shard(aside, block.number, variant, writer.finish(), [info])
    except OSError as error:
        raise disk_failure(context.work, error) from error
    except BuildError:
        # A power cut may have damaged spool files. Forget them, so that the next run builds their samples again.
        (context.work / _INFOS_NAME).unlink(missing_ok=True)
        raise
