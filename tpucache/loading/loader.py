"""CachedLoader: threads read records straight into the rows of pooled batch buffers."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, Self, TypeVar, get_args

import numpy as np

from tpucache.errors import StoreError, UsageError
from tpucache.loading.ahead import ReadingThreads, Uncounted
from tpucache.loading.dataset import CachedDataset
from tpucache.loading.order import (
    EpochOrder,
    Shuffle,
    global_batches,
    make_order,
    make_sampled_order,
    rank_slice,
    rank_windows,
)
from tpucache.loading.reading.memory import BufferPool, BufferPools
from tpucache.loading.reading.record_reader import Divide, WaysRead
from tpucache.loading.state import LoaderMetrics, LoaderState, read_state, scale_text
from tpucache.loading.tensors import Positions, Subset, integer_positions, overrides, pinned_empty, to_integer
from tpucache.store.ahead import Threads
from tpucache.store.fields import CHUNK_BYTES

if TYPE_CHECKING:
    from torch.utils.data import Sampler

    from tpucache.loading.finishing import BatchFinish, Device, FinishSettings, HostCrop
    from tpucache.loading.mixed import MixedSamples
    from tpucache.ondevice.resident import RecordBatch, RecordSlots
    from tpucache.ondevice.settings import AugmentSettings

Batch = Any  # (images, labels), or a dict of tensors if a record has more fields than an image

AnySamples = TypeVar("AnySamples", bound="CachedDataset | MixedSamples")

Finish = Literal["host", "device"]
#: The epoch of an iteration after one that was left early: the next epoch, or the same one from its start.
Reiterate = Literal["next", "same"]

_log: Final = logging.getLogger("tpucache")

_LOOKED_UP: Final = 64  # batches whose rows in the device's memory are looked up together
_LATE_BYTES: Final = 256 << 20  # of records, decoded, that are read ahead from storage that answers late
_SPAN: Final = 1024  # samples per hint, if the order has no windows


class _ReadBatch(NamedTuple):
    """A batch that was read. `ways` is None for records that are read for the device's memory: these are not
    counted.
    """

    batch: Batch
    samples: int
    ways: WaysRead | None


class _GlobalBatch(NamedTuple):
    """A batch of all ranks: its number since the first epoch, and its bounds (start, stop) in the epoch's order."""

    step: int
    bounds: tuple[int, int]


@dataclass(frozen=True)
class LoaderOptions:
    """The options of a loader, which `CachedLoader` explains. Raises UsageError for values out of range."""

    batch_size: int
    seed: int = 0
    drop_last: bool = False
    threads: int = 2
    prefetch: int = 2
    rank: int = 0
    world_size: int = 1
    pin_memory: bool = False
    reiterate: Reiterate = "next"
    finishing: FinishSettings | None = None  # how batches are finished on the device

    def __post_init__(self) -> None:
        least = {"batch_size": 1, "seed": 0, "threads": 1, "prefetch": 0, "rank": 0, "world_size": 1}
        for name, low in least.items():
            object.__setattr__(self, name, to_integer(name, getattr(self, name), low))
        if self.rank >= self.world_size:
            raise UsageError(f"rank is 0 to {self.world_size - 1} for world_size {self.world_size}, not {self.rank}")
        if not isinstance(self.drop_last, bool):
            raise UsageError(f"drop_last is True or False, not {self.drop_last!r}")
        if self.reiterate not in get_args(Reiterate):
            raise UsageError(f'reiterate is "next" or "same", not {self.reiterate!r}')


class BatchLoader(Generic[AnySamples]):
    """Iterates over batches of samples in an order. `CachedLoader` and `MixedLoader` derive from it.

    Each iteration is one epoch, also if it is left early, for example by `break`: the next one has the next epoch's
    order, which is a function of (seed, epoch) alone. With `reiterate="same"`, it repeats that epoch from the start. To
    continue in the middle, use `state_dict` and `load_state_dict`. An iteration that gave no batch does not count.

    `close`, or leaving a `with` block, frees the buffers that no batch uses. A process that is forked in the middle of
    an epoch must begin a new iteration: continuing its parent's raises UsageError. A pickled loader has the same
    position, and buffers and metrics of its own.
    """

    def __init__(
        self, samples: AnySamples, order: EpochOrder, options: LoaderOptions, crop: HostCrop | None = None
    ) -> None:
        """Start at the first epoch, and allocate memory for the first batches.

        `crop`, if given, reads crops instead of whole images. Raises UsageError if the last batch has fewer samples
        than there are ranks.
        """
        self.dataset, self.order, self.options = samples, order, options
        self._crop = crop
        self.batch_size, self.drop_last = options.batch_size, options.drop_last
        self.rank, self.world_size = options.rank, options.world_size
        self._global_batch = self.batch_size * self.world_size
        self.seed = options.seed
        self._place = (0, 0)  # epoch and position; one tuple, because another thread may save the state meanwhile
        self._following = (0, 0)  # the epoch and position at which the next iteration begins
        self._iterations = 0  # the number of iterations that have begun
        self._outdated = 0  # iterations up to this number began before the epoch was set
        self._is_ambiguous = False  # whether an iteration gave a batch after a later one had begun
        self._metrics = LoaderMetrics()
        self._is_closed = False
        self._finish = None if options.finishing is None else _make_finish(options.finishing, samples, crop)
        self._pool: BufferPool | None = None  # made on first use, in each process
        self._begun = 0  # the position in the first epoch up to which the kernel was asked to read ahead
        left = self.samples % self._global_batch
        if 0 < left < self.world_size and not self.drop_last:
            raise UsageError(_too_few(left, self.world_size))
        if left and not len(self):
            _log.warning(
                "the loader gives no batches: %s samples do not fill a batch of %s, and drop_last leaves them out",
                f"{self.samples:,}",
                f"{self._global_batch:,}",
            )
        #: The kernel is asked to read a sample at least this many samples before the sample is needed.
        self._reach = max(order.window or _SPAN, self._global_batch)
        if samples.is_late:
            each = sum(field.nbytes for field in samples.record_fields)
            self._reach = max(self._reach, _LATE_BYTES // max(1, each))
        if samples.networks:  # a cache at a URL: do not block before the first batch is requested
            samples.buffer_pools.compile_loops(self.batch_size)
        else:
            # A sampler of the user's must not be asked for an epoch more than once.
            begun = (
                samples.is_late
                and order.sampling is None
                and Threads(1, "tpucache-hint").submit(_Iteration(self, 0, 0, 0, False, None).begin)
            )
            # The batches that are read ahead, the one that is handed out, and the one that the caller still holds.
            self._buffers.prepare(min(options.prefetch + 2, len(self)), min(self.batch_size, self.samples))
            if begun:
                self._begun = begun.result()
        samples.prepare(options.threads)

    def __len__(self) -> int:
        """Return the number of batches in a whole epoch."""
        whole, rest = divmod(self.samples, self._global_batch)
        return whole + (rest > 0 and not self.drop_last)

    @property
    def epoch(self) -> int:
        """The epoch of the current iteration. Between iterations it is the epoch of the next iteration."""
        return self._place[0]

    def __iter__(self) -> Iterator[Batch]:
        return self._begin(is_counted=True).batches()

    def iterate_ahead(self) -> Generator[Uncounted, None, None]:
        """Begin an iteration for code that reads ahead: a batch counts when its `confirm` is called, in their order."""
        self._refuse_finishing()
        return self._begin(is_counted=False).batches()

    def iterate_records(self, slots: RecordSlots) -> Generator[Uncounted, None, None]:
        """Begin an iteration as in `iterate_ahead`, whose batches are `RecordBatch`."""
        self._refuse_finishing()
        return self._begin(is_counted=False, slots=slots).batches()

    def record_owners(self, cores: int) -> Positions | None:
        """Return the core of this rank that uses each record in every epoch: int64 (records,), -1 for none.

        Returns None if a record may go to any core: only the order "local" assigns records to cores.
        """
        devices = self.order.devices(len(self.dataset), self.seed, self.world_size * cores)
        if devices is None:
            return None
        own = devices[self.dataset.record_indices(np.arange(self.dataset.records))] - self.rank * cores
        return np.where((own >= 0) & (own < cores), own, -1)

    def _refuse_finishing(self) -> None:
        if self.options.finishing is not None:
            raise UsageError(
                "this loader already moves its batches to a device and finishes them there: make a CachedLoader "
                "without augment, normalise and device"
            )

    def _begin(self, *, is_counted: bool, slots: RecordSlots | None = None) -> _Iteration:
        self._refuse_closed()
        epoch, start = self._following
        self._iterations += 1
        self._is_ambiguous = False
        self._place = self._after(epoch, start)
        if self._place[0] > epoch:  # the iteration has no batch
            self._following = self._place
        return _Iteration(self, self._iterations, epoch, start, is_counted, slots)

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in self.__dict__.items() if name != "_pools"}
        return {
            **kept,
            "_pool": None,
            "_finish": None,
            "_metrics": LoaderMetrics(),
            "_begun": 0,
            "_iterations": 0,
            "_outdated": 0,
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the buffers. Requesting a batch raises UsageError afterwards. Batches and the dataset stay usable."""
        if self._pool is not None:
            self._pools.drop(self._pool)
        self._pool, self._is_closed = None, True

    def metrics(self) -> dict[str, Any]:
        """Return metrics of this loader since it was made, as a dict of plain numbers.

        - `batches`, `samples`: how many were handed out.
        - `seconds`: the time since the first batch was requested.
        - `waited_seconds`: how long the loop was blocked in all; `wait_p50`, `wait_p95`, `wait_p99`: percentiles of the
          seconds per batch, over the last 1,024 batches.
        - `queue`: how many batches were `ready` when the last one was requested, and the `size` of the queue.
        - `records`, `bytes`: how many were read from `memory`, from a `map` and from a `file`; `bytes` also over the
          `network` by this process.
        - `hits`: the fraction of records that were in memory or mapped.
        - `maps`: the number of shards by how they are mapped, or why not (see `CachedDataset.maps`).
        - `network`: requests, failures and waiting time; None for a cache in a folder.
        """
        return self._metrics.to_dict(self.options.prefetch + 1, self.dataset.networks, self.dataset.maps)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, an integer from 0.

        If a state of this epoch was loaded just before, keep the position of that state.
        """
        epoch = to_integer("epoch", epoch, 0)
        self._go_to(epoch, self._following[1] if epoch == self._following[0] else 0)

    def state_dict(self) -> dict[str, int | str]:
        """Return the position after the batches that were handed out, for `load_state_dict`.

        Of what `Feeder` or `tpucache.jax.feed` read ahead, only the batches that they handed out count. Raises
        UsageError while several iterations of this loader run at the same time: they have no common position.
        """
        if self._is_ambiguous:
            raise UsageError(
                "this loader was begun again, or its epoch set, while an earlier iteration continued to give batches: "
                "there is no single position to save. Make a CachedLoader for each iteration"
            )
        return self._state().to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position in a state that a loader's `state_dict` returned.

        That loader may have had another number of ranks and another batch size. `set_epoch` with the state's epoch
        keeps the position. Raises UsageError if records, labels, selection or order differ, or if the last batch would
        have fewer samples than there are ranks.
        """
        saved = read_state(state, self._state(), self.order.text_by_sample)
        self.order.check(saved)
        first, stop = min(self._bounds(saved.position), key=lambda batch: batch[1] - batch[0], default=(0, 0))
        if 0 < stop - first < self.world_size:
            raise UsageError(_too_few(stop - first, self.world_size))
        self.seed, self.order, self._begun = saved.seed, self.order.continued(saved.order, saved.chunk), 0
        self._go_to(saved.epoch, saved.position)

    def _state(self) -> LoaderState:
        epoch, position = self._place
        return LoaderState(
            seed=self.seed,
            epoch=epoch,
            position=position,
            samples=self.samples,
            order=self.order.text,
            chunk=self.order.chunk,
            fingerprint=self.dataset.manifest.fingerprint,
            digest=self.dataset.digest,
            drawn=self.order.digest(self.seed, epoch),
            scale=scale_text(self.dataset.label_scale),
        )

    def _go_to(self, epoch: int, position: int) -> None:
        self._place = self._following = epoch, position
        self._outdated, self._is_ambiguous = self._iterations, False

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise UsageError("this loader is closed: make another CachedLoader")

    @property
    def _buffers(self) -> BufferPool:
        self._refuse_closed()
        if self._pool is None:
            self._pools = self.dataset.buffer_pools if self._crop is None else BufferPools(self._crop.fields)
            self._pool = self._pools.pool(self.batch_size, pinned_empty if self.options.pin_memory else None)
        return self._pool

    @property
    def samples(self) -> int:
        """The number of samples in an epoch, of all ranks together."""
        return self.order.length(len(self.dataset))

    def _after(self, epoch: int, position: int) -> tuple[int, int]:
        """Return `epoch` and `position`; if that epoch has no batch after the position, the start of the next epoch.

        Trainers that know the length never request the batch after the last one, so the epoch must end before that.
        """
        return (epoch, position) if any(self._bounds(position)) else (epoch + 1, 0)

    def _bounds(self, start: int) -> Iterator[tuple[int, int]]:
        return global_batches(start, self.samples, self._global_batch, self.world_size, self.drop_last)

    def _finished(self, settings: FinishSettings, batch: Any, *drawn: Any) -> Any:
        if self._finish is None:  # a pickled copy has none
            self._finish = _make_finish(settings, self.dataset, self._crop)
        return self._finish(batch, *drawn)

    def _count(self, iteration: _Iteration, stop: int) -> None:
        """Record that an iteration has handed out the samples before `stop`."""
        if iteration.number > self._outdated:
            place, epoch = self._after(iteration.epoch, stop), iteration.epoch
            self._place = place if iteration.number == self._iterations else self._place
            following = (max(place[0], epoch + (self.options.reiterate == "next")), 0)
            self._following = following if self._following[0] == epoch else max(self._following, following)
        self._is_ambiguous |= iteration.number <= self._outdated or iteration.number < self._iterations


class _Iteration:
    """One pass of a loader over an epoch, from a position on: the order, and the batches that are being read.

    With `slots`, batches are `RecordBatch`. Unless `is_counted`, they are `Uncounted`: taking one does not change the
    loader's state.
    """

    def __init__(
        self,
        loader: BatchLoader[Any],
        number: int,
        epoch: int,
        start: int,
        is_counted: bool,
        slots: RecordSlots | None,
    ) -> None:
        self._loader, self._dataset, self._order = loader, loader.dataset, loader.order
        self._seed = loader.seed
        self.number, self.epoch, self._start = number, epoch, start
        self._is_counted, self._slots = is_counted, slots
        self._positions = self._order.positions(len(self._dataset), self._seed, epoch)
        self._window = self._order.window or _SPAN
        self._pending: deque[tuple[_GlobalBatch, Future[_ReadBatch]]] = deque()

    def batches(self) -> Generator[Any, None, None]:
        loader, options, slots, pending = self._loader, self._loader.options, self._slots, self._pending
        rest = self._start
        submit = self._submit if slots is None else functools.partial(self._submit_missing, slots)
        if slots is None or not slots.is_full:
            self._dataset.expect(loader, self.expected)
            hinted, windows, begun = self._start, self._parts_ahead(self._start), 0 if self.epoch else loader._begun
            reach, rest, loader._begun = loader._reach, loader.samples, 0
            with ReadingThreads(options.threads, options.prefetch + 1) as threads:
                for batch in self._global_batches(self._start):
                    if slots is not None and slots.is_full:  # nothing needs to be read from here on
                        rest = batch.bounds[0]
                        break
                    while hinted < batch.bounds[1] + reach and (parts := next(windows, None)):
                        hinted = parts[-1].stop if parts[-1].stop <= begun else self._hint(parts, threads)
                    pending.append((batch, submit(batch, threads)))
                    if len(pending) > options.prefetch:
                        yield self._take()
                        threads.check()
                while pending:
                    yield self._take()
                    threads.check()
        if slots is not None:
            yield from self._placed_batches(slots, rest)

    def begin(self) -> int:
        """Ask the kernel to read the first records ahead, and return the position in the order after these."""
        end = self._start
        for parts in self._parts_ahead(self._start):
            ahead = np.concatenate([self._positions[part] for part in parts])
            with contextlib.suppress(StoreError):
                self._dataset.hint(ahead, self.epoch, self._order.shared)
            end = parts[-1].stop
            if end >= self._start + self._loader._reach:
                break
        return end

    def expected(self, epochs: int = 2) -> Iterator[tuple[Positions, int, int]]:
        """Yield the samples that this rank will read in this epoch and later ones, in the form of `samples.Windows`."""
        for epoch in range(self.epoch, self.epoch + epochs if self._order.sampling is None else self.epoch + 1):
            start, positions = self._start, self._positions
            if epoch > self.epoch:
                start, positions = 0, self._order.positions(len(self._dataset), self._seed, epoch)
            for parts in self._parts_ahead(start):
                yield np.concatenate([positions[part] for part in parts]), epoch, self._order.shared

    def _global_batches(self, start: int) -> Iterator[_GlobalBatch]:
        step = self.epoch * len(self._loader) + start // self._loader._global_batch
        return map(_GlobalBatch, itertools.count(step), self._loader._bounds(start))

    def _parts_ahead(self, start: int) -> Iterator[list[slice]]:
        """Yield, for each window from position `start` on, the slices of the epoch's order that this rank reads."""
        loader = self._loader
        return rank_windows(loader._bounds(start), self._window, loader.rank, loader.world_size)

    def _own(self, batch: _GlobalBatch) -> Positions:
        return self._positions[rank_slice(*batch.bounds, self._loader.rank, self._loader.world_size)]

    def _hint(self, parts: list[slice], threads: ReadingThreads) -> int:
        ahead = np.concatenate([self._positions[part] for part in parts])
        threads.hint(functools.partial(self._dataset.hint, ahead, self.epoch, self._order.shared))
        end: int = parts[-1].stop
        return end

    def _submit(self, batch: _GlobalBatch, threads: ReadingThreads) -> Future[_ReadBatch]:
        return threads.submit(functools.partial(self._read, batch, threads.divide))

    def _submit_missing(self, slots: RecordSlots, batch: _GlobalBatch, threads: ReadingThreads) -> Future[_ReadBatch]:
        own = self._own(batch)
        placed = slots.place(self._dataset.record_numbers(own, self.epoch, self._order.shared))
        if placed.uploads:
            return threads.submit(functools.partial(self._read_records, placed, slots.chunk, threads.divide))
        read: Future[_ReadBatch] = Future()
        read.set_result(_ReadBatch(placed, len(own), None))
        return read

    def _take(self) -> Any:
        self._loader._refuse_closed()
        place, future = self._pending.popleft()
        asked, ready = time.perf_counter(), future.done() + sum(other.done() for _, other in self._pending)
        batch, samples, ways = future.result()
        self._loader._metrics.note(asked, ready, samples, ways)
        if not self._is_counted:
            return Uncounted(batch, functools.partial(self._loader._count, self, place.bounds[1]))
        if self._loader.options.finishing is not None:
            batch = self._loader._finished(self._loader.options.finishing, batch, *self._drawn(place))
        self._loader._count(self, place.bounds[1])
        return batch

    def _placed_batches(self, slots: RecordSlots, start: int) -> Generator[Uncounted, None, None]:
        """Yield batches whose records are all in the device's memory: nothing is read."""
        loader = self._loader
        bounds = self._global_batches(start)
        while batches := list(itertools.islice(bounds, _LOOKED_UP)):
            own = [self._own(batch) for batch in batches]
            placed = slots.place(self._dataset.record_numbers(np.concatenate(own), self.epoch, self._order.shared))
            begin = 0
            for batch, part in zip(batches, own, strict=True):
                loader._refuse_closed()
                rows = slice(begin, begin + len(part))
                loader._metrics.note(time.perf_counter(), loader.options.prefetch + 1, len(part), None)
                read = placed._replace(slots=placed.slots[rows], numbers=placed.numbers[rows])
                yield Uncounted(read, functools.partial(loader._count, self, batch.bounds[1]))
                begin = rows.stop

    def _read(self, batch: _GlobalBatch, divide: Divide) -> _ReadBatch:
        indices, pool, crop = self._own(batch), self._loader._buffers, self._loader._crop
        buffer = pool.take()
        try:
            read = self._dataset.read_into if crop is None else crop.reading(*self._drawn(batch))
            ways = read(buffer, indices, self.epoch, self._order.shared, divide)
        except BaseException:
            pool.give_back(buffer)
            raise
        return _ReadBatch(self._dataset.to_batch(pool.lend(buffer, len(indices)), indices), len(indices), ways)

    def _read_records(self, placed: RecordBatch, rows: int, divide: Divide) -> _ReadBatch:
        pin_memory = self._loader.options.pin_memory
        pool = self._dataset.buffer_pools.pool(rows, pinned_empty if pin_memory else None)
        uploads = []
        for chunk, numbers in placed.uploads:
            buffer = pool.take()
            try:
                self._dataset.read_records(buffer, numbers, divide)
            except BaseException:
                pool.give_back(buffer)
                raise
            indices = np.resize(self._dataset.record_indices(numbers), rows)
            uploads.append((chunk, self._dataset.to_batch(pool.lend(buffer, rows), indices)))
        return _ReadBatch(placed._replace(uploads=uploads), len(placed.slots), None)

    def _drawn(self, batch: _GlobalBatch) -> tuple[int, int, int, slice]:
        """Return what random numbers need: seed, step, rows of the global batch, and this rank's slice of them."""
        rows = batch.bounds[1] - batch.bounds[0]
        return self._seed, batch.step, rows, rank_slice(0, rows, self._loader.rank, self._loader.world_size)


class CachedLoader(BatchLoader[CachedDataset]):
    """Batches of a CachedDataset: `for images, labels in CachedLoader(dataset, 256, shuffle=True)`.

    Images are uint8 (batch, channels, height, width), with channels last in memory. They are a view of a pooled buffer,
    not a copy, which is reused when nothing refers to the batch any more: keep a batch as long as you like.
    `BatchLoader` explains epochs, state and `close`.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: Shuffle = False,
        seed: int = 0,
        drop_last: bool = False,
        threads: int = 2,
        prefetch: int = 2,
        window: int = 4096,
        rank: int = 0,
        world_size: int = 1,
        finish: Finish = "host",
        weights: Any = None,
        balance: bool = False,
        sampler: Sampler[int] | None = None,
        pin_memory: bool = False,
        reiterate: Reiterate = "next",
        cores: int = 1,
        augment: AugmentSettings | None = None,
        normalise: bool = False,
        device: Device = None,
        size: int | tuple[int, int] | None = None,
    ) -> None:
        """Allocate memory for the first batches, and map or read records that are in the page cache, in at most 0.5 s.

        `dataset` is a CachedDataset, a Subset of one, or what wraps one, such as `tpucache.ImageFolder`.

        **Batches.** `batch_size` is the size per rank. A global batch has the samples of all ranks together; rank r of
        `world_size` gets its slice of it. The last batch is short unless `drop_last` is set, and refused if it has
        fewer samples than there are ranks. `threads` threads read `prefetch` batches ahead; if there are more threads
        than batches, several read one batch. `pin_memory` reads into page-locked memory, for `images.to("cuda",
        non_blocking=True)`. `reiterate` decides what follows an iteration that was left early: the "next" epoch, as in
        torch's DataLoader, or the "same" epoch from its start.

        **Order.** `shuffle="full"` (or True) shuffles all samples, for caches that fit into memory. "block", for larger
        caches, reads chunks of about 8 MiB in random order and shuffles within a window of `window` samples, of which
        the next is read ahead. With variant="epoch", all samples of a chunk then have the same variant. "local" assigns
        each sample at random to one accelerator core of all ranks, the same in every epoch, so that a core that keeps
        its samples in memory needs no others; `cores` is the number of cores that share a batch of this rank.

        Alternatively, one of these arguments chooses the samples of an epoch: `weights`, one number per sample, draws
        len(dataset) samples with replacement; `balance` draws each class equally often; `sampler` is a torch Sampler
        (see `SamplerOrder`), whose length is the number of samples in an epoch.

        **Decoding.** `finish="device"` leaves images of the codecs yuv420, dct-zstd and dct-lz4 packed, uint8 (batch,
        n): fewer bytes, and less work for the host. `tpucache.ondevice.decoder` decodes them on the device.

        **Finishing.** With `device`, such as "cuda", batches are moved to that device, and packed images are decoded
        there. `normalise` gives float32 images (batch, channels, height, width): minus the cache's mean, divided by its
        standard deviation. `augment` normalises and augments, by random numbers of (seed, step) alone, as in
        `tpucache.jax.feed`: the same on every device, on any number of ranks, and after resuming. Mixed labels are
        float32 (batch, classes). With several `views`, each sample has that many consecutive rows. Without a `device`,
        the CPU does all of this: the reading threads make random crops, of `size` (height and width, by default the
        images'), and flips.

        Raises UsageError for arguments that are invalid or do not fit together.
        """
        if finish not in get_args(Finish):
            raise UsageError(f"finish is one of {', '.join(get_args(Finish))}, not {finish!r}")
        chosen = _cached_dataset(dataset)
        if finish == "device":
            chosen = chosen.packed()
        finishing = crop = None
        if augment is not None or normalise or device is not None or size is not None:
            from tpucache.loading.finishing import FinishSettings

            finishing = FinishSettings.of(augment, normalise, device, size)
            crop = _make_crop(chosen, finishing)
            chosen = chosen if crop is None else crop.dataset
        pin_memory = pin_memory or (finishing is not None and finishing.device.startswith("cuda"))
        options = LoaderOptions(
            batch_size, seed, drop_last, threads, prefetch, rank, world_size, pin_memory, reiterate, finishing
        )
        window = to_integer("window", window, 1)
        chunk = max(1, CHUNK_BYTES // chosen.usual_record_bytes)
        drawn = make_sampled_order(chosen, shuffle, weights, balance, sampler)
        if to_integer("cores", cores, 1) > 1 and shuffle != "local":
            raise UsageError('cores says how shuffle="local" divides the samples: leave cores out for other orders')
        if shuffle == "local":
            _check_local(chosen, options.batch_size, cores)
        parts, each = options.world_size * cores, options.batch_size // cores
        is_by_epoch = chosen.variant == "epoch"
        order = drawn or make_order(shuffle, window, chunk, changes_variants=is_by_epoch, parts=parts, each=each)
        super().__init__(chosen, order, options, crop)


def _check_local(dataset: CachedDataset, batch_size: int, cores: int) -> None:
    if batch_size % cores:
        raise UsageError(
            f"a batch of {batch_size} does not divide evenly over {cores} cores: choose another batch_size"
        )
    if len(np.unique(dataset.positions)) < len(dataset):
        raise UsageError(
            'shuffle="local" gives each sample to one core, and some samples are selected twice: select each once'
        )


def _make_finish(settings: FinishSettings, samples: Any, crop: HostCrop | None) -> BatchFinish:
    from tpucache.loading.finishing import BatchFinish  # imported here: ten modules that most loaders do not need

    return BatchFinish(settings, samples, crop)


def _make_crop(dataset: CachedDataset, finishing: FinishSettings | None) -> HostCrop | None:
    from tpucache.loading.finishing import HostCrop, why_not

    settings, size = (None, None) if finishing is None else (finishing.augment, finishing.size)
    reason = why_not(settings, dataset, size)
    if finishing is not None and not finishing.is_on_cpu:
        reason = f"{finishing.device} is another device"
    if reason is None and settings is not None:
        return HostCrop(settings, dataset, size)
    if size is not None:
        raise UsageError(
            f"size only applies to random crops on the CPU, and {reason}. On a device, "
            "tpucache.ondevice.decoder(dataset, size, crop=True) makes crops of any size"
        )
    return None


def _cached_dataset(dataset: Any) -> CachedDataset:
    methods = ("__getitem__", "__getitems__", "__len__")
    if isinstance(dataset, Subset) and not any(overrides(dataset, Subset, name) for name in methods):
        whole = _cached_dataset(dataset.dataset)
        return whole.select(integer_positions(dataset.indices, len(whole)))
    if hasattr(type(dataset), "to_cached"):  # a wrapper may pass on attributes of the dataset that it changes
        dataset = dataset.to_cached()
    if not isinstance(dataset, CachedDataset):
        raise UsageError(f"CachedLoader reads a CachedDataset, not {type(dataset).__name__}: use DataLoader")
    if changed := next((name for name in methods if overrides(dataset, CachedDataset, name)), None):
        raise UsageError(
            f"{type(dataset).__name__} changes single samples in {changed}, which CachedLoader would skip: use "
            "DataLoader, or change whole batches after the loader"
        )
    return dataset


def _too_few(samples: int, ranks: int) -> str:
    return (
        f"the last global batch of the epoch has {samples} samples for {ranks} ranks: some ranks would get an empty "
        "batch. Use drop_last=True, another batch_size, or fewer ranks"
    )
