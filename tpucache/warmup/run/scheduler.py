"""Scheduler: gives the samples of a build to workers, and their records, once a block is complete, to its shards.

Samples for which readers ask come first. A finished cache does not show the order.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import SampleError, UnfinishedError
from tpucache.native import Array
from tpucache.progress import BuildProgress
from tpucache.store.ahead import MOST_FILES, Threads
from tpucache.store.files import is_late
from tpucache.store.growing import ARRIVED_DTYPE, FAILURE_NAME, list_asked, spool_name, take_asked
from tpucache.warmup.blocks import TASK_BYTES, Block, samples_a_task
from tpucache.warmup.estimate import Remaining
from tpucache.warmup.run.executors import Executor, Task
from tpucache.warmup.run.folder import PLAN_NAME, disk_failure
from tpucache.warmup.run.spool import BuiltShard, ChunkInfo, Spooled, are_right, load_receipt
from tpucache.warmup.run.tasks import (
    BuildContext,
    Made,
    WrittenShard,
    build_samples,
    end_loading,
    install_shard,
    seal_block,
)
from tpucache.warmup.sources.source import Sample

Positions = npt.NDArray[np.int64]

#: A reader waits for a whole task, but each task has a cost of a few milliseconds. So the first tasks are small, the
#: next ones large, and the last ones small again, so that all workers end at the same time.
_TASK_SAMPLES: Final = 16
_MOST_SAMPLES: Final = 64
_TASK_SHARE: Final = 24  # a task is at most 1/24 of the finished samples, and of the remaining ones
#: Each task waits once for its first files. So tasks are larger if the storage answers late.
_MOST_LATE_SAMPLES: Final = 512
#: A disk syncs several files in little more time than one.
_SYNCED_AT_ONCE: Final = 4
#: Fewer samples than this are built in this process for a moment, before workers are started.
_FEW: Final = 64


class _Building:
    """A block that is being built. `first` is the position of its first sample among all samples of the build."""

    def __init__(self, block: Block, first: int) -> None:
        self.block, self.part = block, slice(first, first + len(block.samples))
        self.numbers = np.array([sample.number for sample in block.samples], np.int64)
        self.rows = np.zeros((len(block.samples), len(block.variants)), ARRIVED_DTYPE)  # of the log
        self.infos: list[ChunkInfo] = []
        self.shards: dict[int, BuiltShard] = {}  # by variant

    @property
    def missing(self) -> list[int]:
        return [variant for variant in self.block.variants if variant not in self.shards]

    def places(self, numbers: Sequence[int]) -> Positions:
        return np.searchsorted(self.numbers, np.array(numbers, np.int64))

    def has(self, info: ChunkInfo) -> bool:
        return bool(np.isin(np.array(info.every_number, np.int64), self.numbers).all())


class Scheduler:
    """Builds the shards of blocks, or continues an interrupted build."""

    def __init__(
        self,
        context: BuildContext,
        blocks: Sequence[Block],
        on_progress: Callable[[BuildProgress], None] = lambda progress: None,
        on_shard: Callable[[BuiltShard], None] = lambda shard: None,
    ) -> None:
        self._context, self._on_progress, self._on_shard = context, on_progress, on_shard
        self._log = context.log
        self._samples: list[Sample] = [sample for block in blocks for sample in block.samples]
        self._variants = sorted({variant for block in blocks for variant in block.variants})
        firsts = itertools.accumulate((len(block.samples) for block in blocks), initial=0)
        self._order = [_Building(block, first) for block, first in zip(blocks, firsts, strict=False)]
        self._blocks = {each.block.number: each for each in self._order}
        self._firsts = [each.part.start for each in self._order]
        self._is_made = np.zeros(len(self._samples), np.bool_)
        self._is_given = np.zeros(len(self._samples), np.bool_)  # to a worker
        self._queues: dict[str, Iterator[int]] = {}  # positions, by the file in which a reader asks for them
        self._next = 0  # the position of the next sample for which no reader asks
        self._complete: deque[_Building] = deque()  # blocks whose shards can be written
        self._skipped = self._bytes = 0
        self._samples_a_task = 1  # more if the storage answers late
        self._stopped = False  # whether the deadline stopped a worker
        self._kept: list[Spooled] = []  # of an earlier run
        self.known: dict[int, dict[int, int]] = {}  # checksums of one sample of each block or task, by its number
        self.rewritten: dict[int, dict[int, int]] = {}  # of files that were written since the build began
        self._find_shards()
        self._find_records()

    def made_of(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples of which an earlier run made records."""
        made = {sample.number for sample, is_made in zip(self._samples, self._is_made, strict=True) if is_made}
        return [sample for sample in samples if sample.number in made]

    def remaining(self) -> Remaining:
        unsealed = [each for each in self._order if each.missing]
        return Remaining(
            [
                (sample, each.block.variants)
                for each in unsealed
                for sample, is_made in zip(each.block.samples, self._is_made[each.part].tolist(), strict=True)
                if not is_made
            ],
            [len(each.block.samples) * len(each.missing) for each in unsealed],
            most=max((self._usual(each.block) * len(each.block.variants) for each in unsealed), default=0),
            spooled=sum(int(made.rows["length"].sum()) for made in self._kept),
            is_followed=self._context.is_followed,
        )

    def prepare(self) -> None:
        """Forget what cannot be used of an earlier run, before readers look."""
        work = self._context.work
        try:
            (work / FAILURE_NAME).unlink(missing_ok=True)
            self._log.begin()
            self._log.keep(self._kept)
            if self._context.is_followed:
                self._correct_log()
                return
            used = {number for made in self._kept for number in made.rows["file"].flat}
            for path in {*work.glob(spool_name(0).replace("0" * 8, "*"))} - {work / spool_name(each) for each in used}:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise disk_failure(work, error) from error

    def build(self, executor: Executor) -> list[BuiltShard]:
        """Build the missing shards, and return the shards of all blocks."""
        self._on_progress(self._progress())
        for each in self._order:
            for shard in each.shards.values():
                self._on_shard(shard)
        few = int((~self._is_made).sum()) < _FEW or len(self._blocks) == 1
        try:
            for result in executor.run(self._tasks(executor), few=few):
                self._take(result)
            results = executor.run(self._last_seals(executor), few=len(self._blocks) == 1)
            with Threads(_SYNCED_AT_ONCE, "tpucache-sync") as pool:  # most blocks end at the same time
                for installed in [pool.submit(self._install, result) for result in results]:
                    self._add_shard(installed.result())
        except SampleError as error:
            if not self._context.skip_errors:
                raise
            reason = f"{error.reason}; the cache already has records of this sample, so it cannot be skipped"
            raise SampleError(error.path, reason, error.file) from error
        finally:
            end_loading()  # if tasks ran in this process
        if any(each.missing for each in self._order):
            progress = self._progress()
            raise UnfinishedError(
                f"the time limit is near: {progress.samples:,} of {progress.total:,} samples are finished in "
                f"{self._context.shards}. Run the same command again to continue."
            )
        return [each.shards[variant] for each in self._order for variant in each.block.variants]

    def _is_late(self) -> bool:
        return self._stopped or self._context.deadline.is_past

    def _may_skip(self, block: Block) -> bool:
        return self._context.skip_errors and 0 in block.variants

    def _tasks(self, executor: Executor) -> Iterator[Task]:
        workers = executor.workers
        planned: deque[tuple[list[int], bool]] = deque()  # the next tasks, and whether a reader asks for them
        while not self._is_late():
            is_slow = (is_late(self._context.latency) or self._samples_a_task > 1) and not executor.is_cluster
            if planned and self._asked():  # what a reader asks for comes before what nobody asked for
                self._is_given[[at for some, is_asked in planned if not is_asked for at in some]] = False
                planned = deque(task for task in planned if task[1])
                self._next = 0
            while len(planned) <= (workers if is_slow else 0):
                planned.append(self._next_samples(workers))
            some, is_asked = planned.popleft()
            while self._complete and not is_asked:
                yield from self._seals_of(self._complete.popleft(), executor)
            if not some:
                return
            # Workers take tasks in turns. So this worker's next task is probably the one as many tasks later.
            then = [self._samples[at] for at in planned[workers - 1][0][:MOST_FILES]] if is_slow else []
            yield build_samples, (self._context, self._cut(some), then)

    def _asked(self) -> list[str]:
        return list_asked(self._context.work) if self._context.is_followed else []

    def _next_samples(self, workers: int) -> tuple[list[int], bool]:
        """Return the positions of the samples of the next task, and whether a reader asks for one of them."""
        for name in self._asked():
            self._queues[name] = iter(take_asked(self._context.work / name, len(self._samples)).tolist())
        some: list[int] = []
        weight, is_asked, most = 0, False, 1
        for name in (*sorted(self._queues, reverse=True), ""):
            for at in self._queues[name] if name else self._unasked():
                if self._is_given[at]:
                    continue
                if not some:
                    most = self._most_samples(self._at(at).block, workers)
                elif not self._context.is_followed and self._at(at) is not self._at(some[0]):
                    return some, is_asked
                self._is_given[at] = True
                some.append(at)
                weight += self._samples[at].bytes
                is_asked |= bool(name)
                if len(some) >= most or weight >= TASK_BYTES:
                    return some, is_asked
            self._queues.pop(name, None)
        return some, is_asked

    def _unasked(self) -> Iterator[int]:
        while self._next < len(self._samples):
            yield self._next
            self._next += 1

    def _most_samples(self, block: Block, workers: int) -> int:
        given = int(self._is_given.sum())
        left = len(self._samples) - given
        late = min(_MOST_LATE_SAMPLES, self._samples_a_task, max(_MOST_SAMPLES, left // workers))
        if not self._context.is_followed:
            return max(late, self._usual(block))
        return max(min(late, given), min(_MOST_SAMPLES, max(_TASK_SAMPLES, min(given, left) // _TASK_SHARE)))

    def _usual(self, block: Block) -> int:
        return samples_a_task(block, self._context.encoder.fields, len(self._samples))

    def _at(self, position: int) -> _Building:
        return self._order[bisect.bisect_right(self._firsts, position) - 1]

    def _cut(self, positions: Sequence[int]) -> list[Block]:
        samples: dict[int, list[Sample]] = {}
        for at in sorted(positions):
            samples.setdefault(self._at(at).block.number, []).append(self._samples[at])
        return [self._blocks[number].block.part(some) for number, some in samples.items()]

    def _last_seals(self, executor: Executor) -> Iterator[Task]:
        while self._complete and not self._is_late():
            yield from self._seals_of(self._complete.popleft(), executor)

    def _seals_of(self, each: _Building, executor: Executor) -> Iterator[Task]:
        info = ChunkInfo.join(each.infos).in_order()
        rows = each.rows[each.places(info.numbers)]
        for variant in each.missing:
            of_variant = rows[:, each.block.variants.index(variant)]
            yield seal_block, (self._context, each.block.number, variant, of_variant, info, executor.is_cluster)

    def _take(self, result: Made | WrittenShard | BuiltShard) -> None:
        if isinstance(result, Made):
            self._samples_a_task, self._stopped = result.samples_a_task, self._stopped or not result.is_whole
            groups = []
            for made in result.groups:
                each, rows = self._blocks[made.block], made.rows.copy()  # Ray's results are read-only
                rows["row"] = self._row_numbers(each, each.places(made.info.numbers))
                groups.append(made._replace(rows=rows))
            if groups:
                self._log.append(groups)
            for made in groups:
                self._add(made)
                self._bytes += int(made.rows["length"].sum())
            self._on_progress(self._progress())
        else:  # if a worker on this machine wrote a shard, this process syncs it
            self._add_shard(self._install(result))

    def _install(self, result: WrittenShard | BuiltShard) -> BuiltShard:
        return install_shard(self._context, result) if isinstance(result, WrittenShard) else result

    def _row_numbers(self, each: _Building, places: Positions) -> Positions:
        variants = np.searchsorted(self._variants, each.block.variants)
        return np.asarray(variants[None] * len(self._samples) + (each.part.start + places)[:, None])

    def _add(self, made: Spooled) -> None:
        each = self._blocks[made.block]
        each.infos.append(made.info)
        each.rows[each.places(made.info.numbers)] = made.rows
        positions = each.part.start + each.places(made.info.every_number)
        self._is_made[positions] = self._is_given[positions] = True
        self._skipped += len(made.info.skipped)
        if self._is_made[each.part].all():
            self._complete.append(each)

    def _add_shard(self, shard: BuiltShard) -> None:
        each = self._blocks[shard.entry.block]
        each.shards[shard.entry.variant] = shard
        self._on_shard(shard)
        self._count_built(each)
        self._on_progress(self._progress())

    def _count_built(self, each: _Building) -> None:
        if each.missing:
            return
        if not self._is_made[each.part].all():
            self._is_made[each.part] = self._is_given[each.part] = True
            self._skipped += len(each.shards[each.block.variants[0]].info.skipped)
        if not self._context.is_followed:
            for number in {*each.rows["file"][each.rows["length"] > 0].tolist()}:
                (self._context.work / spool_name(number)).unlink(missing_ok=True)
        each.rows = each.rows[:0].copy()

    def _find_shards(self) -> None:
        context = self._context
        for each in self._order:
            for variant in each.block.variants:
                shard = load_receipt(context.shards, context.work, context.build, each.block.number, variant)
                # An earlier run may have skipped samples that this one must not skip, or may have had other samples.
                is_usable = shard and (self._may_skip(each.block) or not shard.info.skipped)
                if shard and is_usable and shard.info.covers(each.block.samples):
                    each.shards[variant] = shard
            if not each.missing:
                info = each.shards[each.block.variants[0]].info
                self._count_built(each)
                shards = [each.shards[variant].rows["crc32"] for variant in each.block.variants]
                self._know(each.block, info.numbers, np.stack(shards, 1))

    def _find_records(self) -> None:
        self._logged = self._log.last_rows(len(self._variants) * len(self._samples))
        is_wanted = np.tile(~self._is_made, len(self._variants))
        is_right = np.zeros(len(self._logged), np.bool_)
        is_right[is_wanted] = are_right(self._context.work, self._logged[is_wanted])
        for number, info in self._log.infos():
            each = self._blocks.get(number)
            if each is None or not each.has(info) or (info.skipped and not self._may_skip(each.block)):
                continue
            rows = self._row_numbers(each, each.places(info.numbers))
            is_new = not self._is_made[each.part.start + each.places(info.every_number)].any()
            if is_new and is_right[rows].all():
                self._kept.append(Spooled(number, info, self._logged[rows]))
                self._add(self._kept[-1])
                self._know(each.block, info.numbers, self._logged[rows]["crc32"])
        self._complete = deque(each for each in self._order if each.missing and self._is_made[each.part].all())

    def _know(self, block: Block, numbers: Sequence[int], checksums: Array) -> None:
        """Keep the checksums (samples, variants) of what is compared with the source."""
        plan = self._context.work / PLAN_NAME
        began = plan.stat().st_mtime_ns if plan.exists() else math.inf  # a repair compares by itself
        written = {sample.number: sample.written_ns for sample in block.samples}
        for number, own in zip(numbers, checksums.tolist(), strict=True):
            found = dict(zip(block.variants, own, strict=True))
            if number == numbers[0]:
                self.known[number] = found
            if written[number] > began:
                self.rewritten[number] = found

    def _correct_log(self) -> None:
        """Append rows to the log, so that the last row of each record is right, and says so if it is lost."""
        logged = self._logged
        found = logged.copy()
        found["length"] = 0
        for made in self._kept:
            found[made.rows["row"].astype(np.int64)] = made.rows
        for at, each in enumerate(self._order):
            for variant, shard in each.shards.items():
                numbers = self._row_numbers(each, np.arange(len(shard.rows)))[:, each.block.variants.index(variant)]
                for name in ("offset", "length", "crc32"):
                    found[name][numbers] = shard.rows[name]
                found["row"][numbers] = numbers
                found["file"][numbers] = self._variants.index(variant) * len(self._blocks) + at
        is_new = (found != logged) & ((found["length"] > 0) | (logged["length"] > 0))
        if is_new.any():
            self._log.append_rows(found[is_new])

    def _progress(self) -> BuildProgress:
        return BuildProgress(int(self._is_made.sum()), len(self._samples), self._skipped, self._bytes)
