"""CachedLoader: threads read records straight into the rows of pooled batch buffers."""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, Protocol, TypeVar, get_args

import numpy as np

from tpucache.errors import UsageError
from tpucache.loading.dataset import CachedDataset
from tpucache.loading.indices import Positions, integer_positions, overrides, to_integer
from tpucache.loading.metrics import LoaderMetrics
from tpucache.loading.order import EpochOrder, Shuffle, make_order, make_sampled_order
from tpucache.loading.reading.buffers import AllocatedBuffers, BufferPool, BufferPools
from tpucache.loading.reading.record_reader import Divide, WaysRead
from tpucache.loading.sampler import global_batches, rank_slice, rank_windows
from tpucache.loading.samples import Samples
from tpucache.loading.state import LoaderState, read_state
from tpucache.loading.tensors import Subset, pinned_empty
from tpucache.loading.threads import ReadingThreads

if TYPE_CHECKING:
    from torch.utils.data import Sampler

    from tpucache.loading.augment import HostCrop
    from tpucache.loading.finishing import BatchFinish, Device, FinishSettings
    from tpucache.ondevice.settings import AugmentSettings
    from tpucache.ondevice.slots import Placed, RecordSlots

Batch = Any  # (images, labels), or a dict of tensors where a record has more fields than an image

Buffers = BufferPool | AllocatedBuffers

AnySamples = TypeVar("AnySamples", bound=Samples)
Self = TypeVar("Self", bound="BatchLoader[Any]")

Finish = Literal["host", "device"]
#: What an iteration shows after one that was left before its end: the next epoch, or the same one from its start.
Reiterate = Literal["next", "same"]

_log: Final = logging.getLogger("tpucache")

_CHUNK_BYTES: Final = 8 << 20
_FORESEEN_EPOCHS: Final = 16  # after them, each of 16 hosts has read most samples
_LOOKED_UP: Final = 64  # batches
_SPAN: Final = 1024  # positions of an order without windows that are hinted at together


class Uncounted(NamedTuple):
    """A batch that was read, and the function that counts it as seen: call it when the batch is handed out."""

    batch: Batch
    confirm: Callable[[], None]


class _Read(NamedTuple):
    """A batch that was read, its number of samples, and where their records were."""

    batch: Batch
    samples: int
    ways: WaysRead | None


class _GlobalBatch(NamedTuple):
    """A batch of all ranks: its number since the first epoch, and where it begins and ends in the epoch's order."""

    step: int
    bounds: tuple[int, int]


@dataclass(frozen=True)
class LoaderOptions:
    """How a loader forms batches and reads them. Raises UsageError for values out of range."""

    batch_size: int
    seed: int = 0
    drop_last: bool = False
    threads: int = 2
    prefetch: int = 2
    rank: int = 0
    world_size: int = 1
    pin_memory: bool = False
    reiterate: Reiterate = "next"
    finishing: FinishSettings | None = None  # what is done to a batch on the device

    def __post_init__(self) -> None:
        least = {"batch_size": 1, "seed": 0, "threads": 1, "prefetch": 0, "rank": 0, "world_size": 1}
        for name, low in least.items():
            object.__setattr__(self, name, to_integer(name, getattr(self, name), low))
        if self.rank >= self.world_size:
            raise UsageError(f"rank is 0 to {self.world_size - 1} in a world of {self.world_size}, not {self.rank}")
        if not isinstance(self.drop_last, bool):
            raise UsageError(f"drop_last is True or False, not {self.drop_last!r}")
        if self.reiterate not in get_args(Reiterate):
            raise UsageError(f'reiterate is "next" or "same", not {self.reiterate!r}')


class BatchLoader(Generic[AnySamples]):
    """Iterates batches of samples in an order: what `CachedLoader` and `MixedLoader` have in common.

    Each iteration is an epoch, whether it is finished or left early, as by `break` or `islice`: the next one has
    another order, a function of (seed, epoch) alone. With `reiterate="same"`, an iteration that was left early begins
    again instead. `state_dict` and `load_state_dict` continue it where it was left. An iteration that gave no batch
    does not count: iterations that begin before any of them has given a batch show the same epoch. A loader of no
    samples gives no batch.

    `close`, or leaving a `with` block, frees the buffers that no batch uses. After a fork in the middle of an epoch,
    the new process begins a new iteration: continuing its parent's raises UsageError. A pickled loader, as for another
    process, is at the same place, and has buffers and metrics of its own.
    """

    def __init__(
        self, samples: AnySamples, order: EpochOrder, options: LoaderOptions, crop: HostCrop | None = None
    ) -> None:
        """Begin at the first epoch, with memory for the first batches; `crop` reads crops in place of whole images.

        Raises UsageError where the last batch has fewer samples than there are ranks.
        """
        self.dataset, self.order, self.options = samples, order, options
        self._crop = crop
        self.batch_size, self.drop_last = options.batch_size, options.drop_last
        self.rank, self.world_size = options.rank, options.world_size
        self._global_batch = self.batch_size * self.world_size
        self.seed = options.seed
        self._place = (0, 0)  # epoch and position in one, because a thread may feed while another saves the state
        self._following = (0, 0)  # where the next iteration begins
        self._iterations = 0  # how many have begun: each knows its number
        self._outdated = 0  # iterations up to this number began before the epoch was set
        self._is_ambiguous = False  # an iteration gave a batch although a later one has begun
        self._metrics = LoaderMetrics()
        self._is_closed = False
        self._finish = None if options.finishing is None else _make_finish(options.finishing, samples, crop)
        self._pool: Buffers | None = None  # made when it is first asked for, in each process
        left = self.samples % self._global_batch
        if 0 < left < self.world_size and not self.drop_last:
            raise UsageError(_too_few(left, self.world_size))
        if left and not len(self):
            _log.warning(
                "the loader gives no batches: %s samples do not fill one of %s, and drop_last leaves them out",
                f"{self.samples:,}",
                f"{self._global_batch:,}",
            )
        if samples.networks:  # nothing is waited for before the first batch is asked for
            samples.buffer_pools.compile_loops(self.batch_size)
        else:
            # One more than are read ahead: the caller holds it while the next one is read.
            self._buffers.prepare(min(options.prefetch + 2, len(self)), min(self.batch_size, self.samples))
        samples.prepare(options.threads)

    def __len__(self) -> int:
        """Return the batches of a whole epoch."""
        whole, rest = divmod(self.samples, self._global_batch)
        return whole + (rest > 0 and not self.drop_last)

    @property
    def epoch(self) -> int:
        """The epoch of the current iteration; before the first one and after the end of one, that of the next."""
        return self._place[0]

    def __iter__(self) -> Iterator[Batch]:
        return self._begin(is_counted=True).batches()

    def iterate_ahead(self) -> Generator[Uncounted, None, None]:
        """Begin an iteration whose batches are read ahead of the loop that takes them.

        The loader's place moves when a batch's `confirm` is called, not when the batch is read: `state_dict` is right
        however many are read ahead. Call each `confirm` once, in the order of the batches. Raises UsageError for a
        loader that finishes its batches itself.
        """
        self._refuse_finishing()
        return self._begin(is_counted=False).batches()

    def iterate_records(self, slots: RecordSlots) -> Generator[Uncounted, None, None]:
        """Begin an iteration like `iterate_ahead`, whose batches are `RecordBatch`: the places of records in `slots`.

        Only records without a place are read. Where all have one, nothing is read and no thread is started. Raises
        UsageError for a loader that finishes its batches itself.
        """
        self._refuse_finishing()
        return self._begin(is_counted=False, slots=slots).batches()

    def record_owners(self, cores: int) -> Positions | None:
        """Return the core of this rank that gets each record in every epoch, -1 where it is none of them.

        None where the order may give a record to any core, as all orders but "local" do.
        """
        devices = self.order.devices(len(self.dataset), self.seed, self.world_size * cores)
        if devices is None:
            return None
        own = devices[self.dataset.record_indices(np.arange(self.dataset.records))] - self.rank * cores
        return np.where((own >= 0) & (own < cores), own, -1)

    def _refuse_finishing(self) -> None:
        if self.options.finishing is not None:
            raise UsageError(
                "this loader brings its batches to a device and finishes them there: where something else does that, "
                "make a CachedLoader without augment, normalise and device"
            )

    def _begin(self, *, is_counted: bool, slots: RecordSlots | None = None) -> _Iteration:
        self._refuse_closed()
        epoch, start = self._following
        self._iterations += 1
        self._is_ambiguous = False
        self._place = self._after(epoch, start)
        if self._place[0] > epoch:  # there is no batch to give
            self._following = self._place
        return _Iteration(self, self._iterations, epoch, start, is_counted, slots)

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in self.__dict__.items() if name != "_pools"}
        own = {"_pool": None, "_finish": None, "_metrics": LoaderMetrics(), "_iterations": 0, "_outdated": 0}
        return {**kept, **own}

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the buffers; asking for a batch raises UsageError from then on. Batches and the dataset stay usable.

        Closing again does nothing.
        """
        if self._pool is not None:
            self._pools.drop(self._pool)
        self._pool, self._is_closed = None, True

    def metrics(self) -> dict[str, Any]:
        """Return figures of this loader since it was made, as a dict of plain numbers.

        `batches` and `samples` were handed out; `seconds` have passed since the first was asked for, in which the
        loader's thread was blocked for `waited_seconds`; `wait_p50`, `wait_p95` and `wait_p99` are seconds for a batch,
        of the last 1,024. `queue` says how many batches were `ready` when the last one was asked for, of `size`.
        `records` and `bytes` were read out of `memory`, a `map` or a `file`; `bytes` also over the `network`, as far as
        this process did, for which `network` has requests, failures and waiting, None for a cache in a folder. `hits`
        is the share of records that were in memory or mapped. `maps` has the numbers of shards that are mapped, by the
        way, and of those that are not, by the reason (see `CachedDataset.maps`).
        """
        return self._metrics.to_dict(self.options.prefetch + 1, self.dataset.networks, self.dataset.maps)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; the epoch of a state that was just loaded continues where the state says."""
        epoch = to_integer("epoch", epoch, 0)
        self._go_to(epoch, self._following[1] if epoch == self._following[0] else 0)

    def state_dict(self) -> dict[str, int | str]:
        """Return the place in the epoch, the batches handed out so far counted as seen.

        Where `Feeder` or `tpucache.jax.feed` read ahead, those are counted that they handed out.
        It holds what `load_state_dict` compares, too: the dataset's digest, and the order's name.
        Raises UsageError while several iterations of this loader run side by side: they have no common place.
        """
        if self._is_ambiguous:
            raise UsageError(
                "this loader was begun again, or its epoch set, while an earlier iteration continued to give batches: "
                "there is no single place to save. Make a CachedLoader for each iteration"
            )
        return self._state().to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another loader was, whatever its ranks and batch size; `set_epoch` of its epoch keeps that.

        Raises UsageError where records of the variants in use, labels, selection or order are not the same.
        """
        saved = read_state(state, self._state(), self.order.text_by_sample)
        self.order.check(saved)
        first, stop = min(self._bounds(saved.position), key=lambda batch: batch[1] - batch[0], default=(0, 0))
        if 0 < stop - first < self.world_size:
            raise UsageError(_too_few(stop - first, self.world_size))
        self.seed, self.order = saved.seed, self.order.continued(saved.order, saved.chunk)
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
        )

    def _go_to(self, epoch: int, position: int) -> None:
        """Let the next iteration begin there; iterations that run no longer move the loader."""
        self._place = self._following = epoch, position
        self._outdated, self._is_ambiguous = self._iterations, False

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise UsageError("this loader is closed: make another CachedLoader")

    @property
    def _buffers(self) -> Buffers:
        self._refuse_closed()
        if self._pool is None:
            self._pools = self.dataset.buffer_pools if self._crop is None else BufferPools(self._crop.fields)
            self._pool = self._pools.pool(self.batch_size, pinned_empty if self.options.pin_memory else None)
        return self._pool

    @property
    def samples(self) -> int:
        """How many samples an epoch has, of all ranks together."""
        return self.order.length(len(self.dataset))

    def _after(self, epoch: int, position: int) -> tuple[int, int]:
        """Return a place in an epoch; where no batch is left, it is the start of the next one.

        Trainers that know the length never ask for the batch after the last: they must not see the epoch again.
        """
        return (epoch, position) if any(self._bounds(position)) else (epoch + 1, 0)

    def _bounds(self, start: int) -> Iterator[tuple[int, int]]:
        """Yield where each global batch begins and ends in the epoch's order."""
        return global_batches(start, self.samples, self._global_batch, self.world_size, self.drop_last)

    def _finished(self, settings: FinishSettings, batch: Any, *drawn: Any) -> Any:
        if self._finish is None:  # in a copy of the loader
            self._finish = _make_finish(settings, self.dataset, self._crop)
        return self._finish(batch, *drawn)

    def _count(self, iteration: _Iteration, stop: int) -> None:
        """Note that an iteration has handed out the samples before `stop`, unless the epoch was set since it began.

        Of several iterations the newest says where the loader is, and an older one never moves it back.
        """
        if iteration.number > self._outdated:
            place, epoch = self._after(iteration.epoch, stop), iteration.epoch
            self._place = place if iteration.number == self._iterations else self._place
            following = (max(place[0], epoch + (self.options.reiterate == "next")), 0)
            self._following = following if self._following[0] == epoch else max(self._following, following)
        self._is_ambiguous |= iteration.number <= self._outdated or iteration.number < self._iterations


class _Iteration:
    """One pass of a loader over an epoch, from a position on: its order, the batches on their way, and what comes next.

    With `slots`, batches are the places of records there. Batches that are not counted are `Uncounted`.
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
        self._pending: deque[tuple[_GlobalBatch, Future[_Read]]] = deque()

    def batches(self) -> Generator[Any, None, None]:
        """Read batches ahead in threads, and hand them out in their order."""
        loader, options, slots, pending = self._loader, self._loader.options, self._slots, self._pending
        rest = self._start
        submit = self._submit if slots is None else functools.partial(self._submit_missing, slots)
        if slots is None or not slots.is_full:
            # One host that reads all in each epoch needs every sample equally soon: it need not look far ahead.
            further = functools.partial(self.expected, _FORESEEN_EPOCHS) if options.world_size > 1 else None
            self._dataset.expect(loader, self.expected, further)
            hinted, windows = self._start, self._parts_ahead(self._start)
            reach, rest = max(self._window, loader._global_batch), loader.samples
            with ReadingThreads(options.threads, options.prefetch + 1) as threads:
                for batch in self._global_batches(self._start):
                    if slots is not None and slots.is_full:  # from here on nothing is read
                        rest = batch.bounds[0]
                        break
                    while hinted < batch.bounds[1] + reach and (parts := next(windows, None)):
                        hinted = self._hint(parts, threads)
                    pending.append((batch, submit(batch, threads)))
                    if len(pending) > options.prefetch:
                        yield self._take()
                        threads.check()
                while pending:
                    yield self._take()
                    threads.check()
        if slots is not None:
            yield from self._placed_batches(slots, rest)

    def expected(self, epochs: int = 2) -> Iterator[tuple[Positions, int, int]]:
        """Yield what will be read to the end of the epoch, and in later ones whose order is known already."""
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
        """Yield the parts of the epoch's order, from a position on, that this rank reads of each window."""
        loader = self._loader
        return rank_windows(loader._bounds(start), self._window, loader.rank, loader.world_size)

    def _own(self, batch: _GlobalBatch) -> Positions:
        """Return the samples of this rank in a batch."""
        return self._positions[rank_slice(*batch.bounds, self._loader.rank, self._loader.world_size)]

    def _hint(self, parts: list[slice], threads: ReadingThreads) -> int:
        """Have a thread tell the kernel that these parts of the order come next; return where they end."""
        ahead = np.concatenate([self._positions[part] for part in parts])
        threads.hint(functools.partial(self._dataset.hint, ahead, self.epoch, self._order.shared))
        end: int = parts[-1].stop
        return end

    def _submit(self, batch: _GlobalBatch, threads: ReadingThreads) -> Future[_Read]:
        """Have a thread read a batch."""
        return threads.submit(functools.partial(self._read, batch, threads.divide))

    def _submit_missing(self, slots: RecordSlots, batch: _GlobalBatch, threads: ReadingThreads) -> Future[_Read]:
        """Give the records of a batch their places, and have a thread read those that had none."""
        own = self._own(batch)
        placed = slots.place(self._dataset.record_numbers(own, self.epoch, self._order.shared))
        if placed.missing:
            return threads.submit(functools.partial(self._read_records, placed, slots.chunk, threads.divide))
        read: Future[_Read] = Future()
        read.set_result(_Read(placed.with_arrays([]), len(own), None))
        return read

    def _take(self) -> Any:
        """Wait for the next batch, and return it as it is handed out."""
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
        """Yield batches of records that all have places: nothing is read, and many are looked up at once."""
        loader = self._loader
        bounds = self._global_batches(start)
        while batches := list(itertools.islice(bounds, _LOOKED_UP)):
            own = [self._own(batch) for batch in batches]
            placed = slots.place(self._dataset.record_numbers(np.concatenate(own), self.epoch, self._order.shared))
            begin = 0
            for batch, part in zip(batches, own, strict=True):
                loader._refuse_closed()
                end = begin + len(part)
                loader._metrics.note(time.perf_counter(), loader.options.prefetch + 1, len(part), None)
                yield Uncounted(placed.part(slice(begin, end)), functools.partial(loader._count, self, batch.bounds[1]))
                begin = end

    def _read(self, batch: _GlobalBatch, divide: Divide) -> _Read:
        """Read samples, or crops of them, into a buffer of the loader's pool."""
        indices, pool, crop = self._own(batch), self._loader._buffers, self._loader._crop
        buffer = pool.take()
        try:
            read = self._dataset.read_into if crop is None else crop.reading(*self._drawn(batch))
            ways = read(buffer, indices, self.epoch, self._order.shared, divide)
        except BaseException:
            pool.give_back(buffer)
            raise
        return _Read(self._dataset.to_batch(pool.lend(buffer, len(indices)), indices), len(indices), ways)

    def _read_records(self, placed: Placed, rows: int, divide: Divide) -> _Read:
        """Read chunks of `rows` rows; the rows of a chunk that has fewer records are not written to."""
        pin_memory = self._loader.options.pin_memory
        pool = self._dataset.buffer_pools.pool(rows, pinned_empty if pin_memory else None)
        batches = []
        for _, numbers in placed.missing:
            buffer = pool.take()
            try:
                self._dataset.read_records(buffer, numbers, divide)
            except BaseException:
                pool.give_back(buffer)
                raise
            indices = np.resize(self._dataset.record_indices(numbers), rows)
            batches.append(self._dataset.to_batch(pool.lend(buffer, rows), indices))
        return _Read(placed.with_arrays(batches), len(placed.slots), None)

    def _drawn(self, batch: _GlobalBatch) -> tuple[int, int, int, slice]:
        """Return what random numbers follow from: seed, step, the rows of the global batch, and those of this rank."""
        rows = batch.bounds[1] - batch.bounds[0]
        return self._seed, batch.step, rows, rank_slice(0, rows, self._loader.rank, self._loader.world_size)


class HasCached(Protocol):
    """A dataset of other items whose samples are those of a CachedDataset, such as `tpucache.ImageFolder`."""

    def to_cached(self) -> CachedDataset:
        """Return the CachedDataset. Raises UsageError where its samples are not the same."""
        ...


class CachedLoader(BatchLoader[CachedDataset]):
    """Batches of a CachedDataset: `for images, labels in CachedLoader(dataset, 256, shuffle=True)`.

    Images are uint8 (batch, channels, height, width), channels last in memory, over a pooled buffer that nothing
    copied; it is used again once nothing refers to the batch any more, so a batch may be kept as long as wished.

    Epochs, state and `close` are those of `BatchLoader`.
    """

    def __init__(
        self,
        dataset: CachedDataset | Subset[Any] | HasCached,
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
        """Prepare memory for the first batches, and map or keep what is in the page cache, in at most 0.5 s.

        `batch_size` is one rank's; rank r of `world_size` gets its slice of every global batch. The last batch is
        short unless `drop_last`; where it has fewer samples than there are ranks, some ranks would get an empty
        batch, whose mean loss is NaN, so that is refused. `threads` read at once, `prefetch` batches ahead; where there
        are more threads than batches, several read one.

        `shuffle` "full" (or True) mixes all samples: for caches that fit into memory. "block" mixes within a window of
        `window` samples, made of chunks of about 8 MiB in random order, and has the kernel read the next window ahead:
        for caches that do not. There a whole chunk shows the same variant of variant="epoch", another one each epoch.
        "local" divides the samples over all `cores` of all ranks, at random and for good, and shuffles each core's
        part: so a core that keeps its samples in its memory needs those alone. Give the `cores` that divide a batch of
        this rank.

        `finish` "device" leaves images of the codecs yuv420, dct-zstd and dct-lz4 packed, uint8 (batch, n): fewer bytes
        and less work for the host. `tpucache.ondevice.decoder` finishes them. Others are decoded on the host.
        `pin_memory` reads into page-locked memory, for `images.to("cuda", non_blocking=True)`.

        `reiterate` says what is shown after an iteration that was left early: the "next" epoch, as loaders of torch
        do, or the "same" one from its start.

        `device`, such as "cuda", is where batches come out, their packed images decoded there. With `normalise` images
        are float32 (batch, channels, height, width), less the cache's mean and divided by its standard deviation.
        `augment` normalises, too, and augments with random numbers of (seed, step) alone, those of `tpucache.jax.feed`:
        they are the same on every device, on any number of ranks, and in a loop that is resumed. Mixed labels are
        float32 (batch, classes). With `views`, all of them have as many rows for each sample, side by side. Without a
        device, both are done on the CPU: there, random crops and flips are made while records are read, by `threads`,
        and `size` is the height and width of the crops where it is not that of the images.

        One of these draws the samples of an epoch, in an order of its own: `weights`, one number a sample, by which
        len(dataset) samples are drawn with replacement; `balance`, the same with each class equally often; or a torch
        `sampler` (see `SamplerOrder`), whose length is the epoch's.
        Raises UsageError.
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
        chunk = max(1, _CHUNK_BYTES // chosen.usual_record_bytes)
        drawn = make_sampled_order(chosen, shuffle, weights, balance, sampler)
        if to_integer("cores", cores, 1) > 1 and shuffle != "local":
            raise UsageError('cores says how shuffle="local" divides the samples: leave it out for other orders')
        if shuffle == "local":
            _check_local(chosen, options.batch_size, cores)
        parts, each = options.world_size * cores, options.batch_size // cores
        is_by_epoch = chosen.variant == "epoch"
        order = drawn or make_order(shuffle, window, chunk, changes_variants=is_by_epoch, parts=parts, each=each)
        super().__init__(chosen, order, options, crop)


def _check_local(dataset: CachedDataset, batch_size: int, cores: int) -> None:
    """Raise UsageError unless each sample can be given to one core, and each core as many of every batch."""
    if batch_size % cores:
        raise UsageError(
            f"a batch of {batch_size} does not divide evenly over {cores} cores: choose another batch_size"
        )
    if len(np.unique(dataset.positions)) < len(dataset):
        raise UsageError(
            'shuffle="local" gives each sample to one core, and some are selected several times: select each once'
        )


def _make_finish(settings: FinishSettings, samples: Any, crop: HostCrop | None) -> BatchFinish:
    from tpucache.loading.finishing import BatchFinish  # ten modules that most loaders do not need

    return BatchFinish(settings, samples, crop)


def _make_crop(dataset: CachedDataset, finishing: FinishSettings | None) -> HostCrop | None:
    """Return what crops the images of a dataset on the host, None where a device does. Raises UsageError."""
    from tpucache.loading.augment import HostCrop, why_not

    settings, size = (None, None) if finishing is None else (finishing.augment, finishing.size)
    reason = why_not(settings, dataset)
    if finishing is not None and not finishing.is_on_cpu:
        reason = f"{finishing.device} is another device"
    if reason is None and settings is not None:
        return HostCrop(settings, dataset, size)
    if size is not None:
        raise UsageError(
            f"size is that of random crops on the CPU, and {reason}. On a device, "
            "tpucache.ondevice.decoder(dataset, size, crop=True) makes crops of any size"
        )
    return None


def _cached_dataset(dataset: Any) -> CachedDataset:
    """Return the CachedDataset that a dataset, a Subset of one, or what has `to_cached`, is.

    Raises UsageError for any other.
    """
    if isinstance(dataset, Subset) and type(dataset).__getitem__ is Subset.__getitem__:
        whole = _cached_dataset(dataset.dataset)
        return whole.select(integer_positions(dataset.indices, len(whole)))
    if hasattr(dataset, "to_cached"):
        dataset = dataset.to_cached()
    if not isinstance(dataset, CachedDataset):
        raise UsageError(f"CachedLoader reads a CachedDataset, not {type(dataset).__name__}: use DataLoader")
    if any(overrides(dataset, CachedDataset, name) for name in ("__getitem__", "__getitems__")):
        raise UsageError(
            f"{type(dataset).__name__} changes samples one by one, which CachedLoader would not do: use DataLoader, or "
            "change whole batches after the loader"
        )
    return dataset


def _too_few(samples: int, ranks: int) -> str:
    return (
        f"the last global batch of the epoch has {samples} samples for {ranks} ranks: some would get an empty batch. "
        "Use drop_last=True, another batch_size, or fewer ranks"
    )
