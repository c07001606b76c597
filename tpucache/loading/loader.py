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
from tpucache.loading.indices import integer_positions, overrides, to_integer
from tpucache.loading.metrics import LoaderMetrics
from tpucache.loading.order import EpochOrder, Shuffle, make_order, make_sampled_order
from tpucache.loading.reading.buffers import AllocatedBuffers, BufferPool, BufferPools
from tpucache.loading.reading.record_reader import Divide, WaysRead
from tpucache.loading.sampler import Positions, global_batches, rank_slice, rank_windows
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
_FORESEEN_EPOCHS: Final = 16  # in which each of 16 hosts reads most samples once
_LOOKED_UP: Final = 64  # batches
_SPAN: Final = 1024  # positions of the order that are hinted at once where it has no windows


class Uncounted(NamedTuple):
    """A batch that was read, and the function to call when it is handed out, which counts it as seen."""

    batch: Batch
    confirm: Callable[[], None]


class _Read(NamedTuple):
    """A batch that was read, of so many samples, and where their records were."""

    batch: Batch
    samples: int
    ways: WaysRead | None


class _Place(NamedTuple):
    """Where a global batch is: seed and epoch, its number since the first epoch, and its part of the epoch's order."""

    seed: int
    epoch: int
    step: int
    first: int
    stop: int


@dataclass(frozen=True)
class LoaderOptions:
    """How a loader forms batches and reads them. Raises UsageError for values that mean nothing."""

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
    another order, a function of (seed, epoch) alone. With `reiterate="same"`, one that is left early is begun again
    instead. Where it was left, `state_dict` and `load_state_dict` continue it. An iteration that gave no batch does not
    count. So of several side by side, those that begin before any of them has given a batch show the same epoch, and
    one that begins later shows the next. Samples without any give no batch.

    `close`, or leaving a `with` block, frees the buffers that no batch uses. A process that is forked in the middle of
    an epoch begins a new iteration: to continue the one of its parent raises UsageError. A pickled loader, as for
    another process, is at the same place; buffers and metrics are each process's own.
    """

    def __init__(
        self, samples: AnySamples, order: EpochOrder, options: LoaderOptions, crop: HostCrop | None = None
    ) -> None:
        """Begin at the first epoch, with memory for the first batches; `crop` reads crops of images instead of images.

        Raises UsageError for too small a last batch.
        """
        self.dataset, self.order, self.options = samples, order, options
        self._crop = crop
        self.batch_size, self.drop_last = options.batch_size, options.drop_last
        self.rank, self.world_size = options.rank, options.world_size
        self.seed = options.seed
        self._place = (0, 0)  # epoch and position in one, because a thread may feed while another saves the state
        self._following = (0, 0)  # where the next iteration begins
        self._iterations = 0  # begun so far; what each one knows of itself is its number
        self._outdated = 0  # iterations up to this number were begun before the epoch was set
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
            # One more than are read ahead, which the caller holds while the next one is read.
            self._buffers.prepare(min(options.prefetch + 2, len(self)), min(self.batch_size, self.samples))
        samples.prepare(options.threads)

    def __len__(self) -> int:
        """Return the batches of a whole epoch."""
        whole, rest = divmod(self.samples, self._global_batch)
        return whole + (rest > 0 and not self.drop_last)

    @property
    def epoch(self) -> int:
        """The epoch that the iteration under way is of; after its end, and before the first one, that of the next."""
        return self._place[0]

    def __iter__(self) -> Iterator[Batch]:
        return self._iterate(is_counted=True)

    def iterate_ahead(self) -> Generator[Uncounted, None, None]:
        """Begin an iteration like any other, for what reads batches ahead of the loop that takes them.

        The loader's place moves when a batch's `confirm` is called, not when it is read: so `state_dict` is right
        whatever is read ahead. Call each `confirm` once, in the order of the batches. Raises UsageError for a loader
        that finishes its batches itself.
        """
        self._refuse_finishing()
        return self._iterate(is_counted=False)

    def iterate_records(self, slots: RecordSlots) -> Generator[Uncounted, None, None]:
        """Begin an iteration like `iterate_ahead`, whose batches are `RecordBatch`: the places of records in `slots`.

        Only records that have no place yet are read. Where all have one, nothing is read and no thread is started.
        Raises UsageError for a loader that finishes its batches itself.
        """
        self._refuse_finishing()
        return self._iterate(is_counted=False, slots=slots)

    def record_owners(self, cores: int) -> Positions | None:
        """Return which of this rank's cores each record comes to in every epoch, -1 for none of them.

        None where the order gives any record to any core, as all orders but "local" do.
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

    def _iterate(self, *, is_counted: bool, slots: RecordSlots | None = None) -> Generator[Any, None, None]:
        self._refuse_closed()
        epoch, start = self._following
        self._iterations += 1
        self._is_ambiguous = False
        self._place = self._after(epoch, start)
        if self._place[0] > epoch:  # there is no batch to give
            self._following = self._place
        order = self.order.positions(len(self.dataset), self.seed, epoch)
        if slots is not None and slots.is_full:
            return self._run_rows(self._iterations, epoch, start, order, slots)
        return self._run(self._iterations, epoch, start, order, is_counted, slots)

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

    @property
    def _global_batch(self) -> int:
        return self.batch_size * self.world_size

    def _run(
        self,
        iteration: int,
        epoch: int,
        start: int,
        order: Positions,
        is_counted: bool,
        slots: RecordSlots | None,
    ) -> Generator[Any, None, None]:
        pending: deque[tuple[_Place, Future[_Read]]] = deque()
        seed, steps = self.seed, itertools.count(epoch * len(self) + start // self._global_batch)
        hinted, shared = start, self.order.shared
        window = self.order.window or _SPAN
        windows = rank_windows(self._bounds(start), window, self.rank, self.world_size)
        expected = functools.partial(self._expected, epoch, start, order)
        # One host that reads all in each epoch needs every sample equally soon: there is nothing to look ahead for.
        further = functools.partial(expected, epochs=_FORESEEN_EPOCHS) if self.world_size > 1 else None
        if slots is None or not slots.is_full:
            self.dataset.expect(self, expected, further)
        if slots is not None:
            windows = itertools.takewhile(lambda _: not slots.is_full, windows)
        read = self._read if self._crop is None else functools.partial(self._read_crops, self._crop)
        with ReadingThreads(self.options.threads, self.options.prefetch + 1) as threads:
            for first, stop in self._bounds(start):
                while hinted < stop + max(window, stop - first) and (parts := next(windows, None)):
                    ahead = np.concatenate([order[part] for part in parts])
                    threads.hint(functools.partial(self.dataset.hint, ahead, epoch, shared))
                    hinted = parts[-1].stop
                place = _Place(seed, epoch, next(steps), first, stop)
                own = order[rank_slice(first, stop, self.rank, self.world_size)]
                if slots is None:
                    pending.append((place, threads.submit(functools.partial(read, own, place, shared, threads.divide))))
                elif slots.is_full:  # from here on nothing is read
                    while pending:
                        yield self._next(pending, iteration, is_counted)
                    yield from self._run_rows(iteration, epoch, first, order, slots)
                    return
                else:
                    numbers = self.dataset.record_numbers(own, epoch, shared)
                    pending.append((place, self._read_missing(slots, numbers, threads)))
                if len(pending) > self.options.prefetch:
                    yield self._next(pending, iteration, is_counted)
                    threads.check()
            while pending:
                yield self._next(pending, iteration, is_counted)
                threads.check()

    def _run_rows(
        self, iteration: int, epoch: int, start: int, order: Positions, slots: RecordSlots
    ) -> Generator[Uncounted, None, None]:
        """Yield batches of records that all have places: nothing is read, and many are looked up at once."""
        bounds = self._bounds(start)
        while batches := list(itertools.islice(bounds, _LOOKED_UP)):
            own = [order[rank_slice(first, stop, self.rank, self.world_size)] for first, stop in batches]
            numbers = self.dataset.record_numbers(np.concatenate(own), epoch, self.order.shared)
            placed, begin = slots.place(numbers), 0
            for (_, stop), part in zip(batches, own, strict=True):
                self._refuse_closed()
                end = begin + len(part)
                self._metrics.note(time.perf_counter(), self.options.prefetch + 1, len(part), None)
                batch = placed.part(slice(begin, end))
                yield Uncounted(batch, functools.partial(self._count, iteration, epoch, stop))
                begin = end

    def _expected(
        self, epoch: int, start: int, order: Positions, epochs: int = 2
    ) -> Iterator[tuple[Positions, int, int]]:
        """Yield what will be read to the end of the epoch, and of the next ones, where their order is known already."""
        window, shared = self.order.window or _SPAN, self.order.shared
        for each in range(epoch, epoch + epochs if self.order.sampling is None else epoch + 1):
            if each > epoch:
                start, order = 0, self.order.positions(len(self.dataset), self.seed, each)
            for parts in rank_windows(self._bounds(start), window, self.rank, self.world_size):
                yield np.concatenate([order[part] for part in parts]), each, shared

    def _after(self, epoch: int, position: int) -> tuple[int, int]:
        """Return a place in an epoch; where no batch is left, it is the start of the next one.

        Trainers that know the length never ask for the batch after the last: they must not see the epoch again.
        """
        over = next(self._bounds(position), None) is None
        return (epoch + 1, 0) if over else (epoch, position)

    def _bounds(self, start: int) -> Iterator[tuple[int, int]]:
        """Yield where each global batch begins and ends in the epoch's order."""
        return global_batches(start, self.samples, self._global_batch, self.world_size, self.drop_last)

    def _next(self, pending: deque[tuple[_Place, Future[_Read]]], iteration: int, is_counted: bool) -> Any:
        self._refuse_closed()
        place, future = pending.popleft()
        asked, ready = time.perf_counter(), future.done() + sum(other.done() for _, other in pending)
        batch, samples, ways = future.result()
        self._metrics.note(asked, ready, samples, ways)
        if not is_counted or self.options.finishing is not None:
            count = functools.partial(self._count, iteration, place.epoch, place.stop)
            if self.options.finishing is None:
                return Uncounted(batch, count)
            batch = self._finished(self.options.finishing, batch, place)
            count()
            return batch
        self._count(iteration, place.epoch, place.stop)
        return batch

    def _finished(self, settings: FinishSettings, batch: Any, place: _Place) -> Any:
        if self._finish is None:  # in a copy of the loader
            self._finish = _make_finish(settings, self.dataset, self._crop)
        return self._finish(batch, *self._drawn(place))

    def _count(self, iteration: int, epoch: int, stop: int) -> None:
        """Note that the samples of an epoch before `stop` are handed out, unless the loader went elsewhere since."""
        if iteration > self._outdated:
            place = self._after(epoch, stop)
            if iteration == self._iterations:
                self._place = place
            following = (max(place[0], epoch + (self.options.reiterate == "next")), 0)
            # Of iterations side by side, an older one takes nothing back.
            self._following = following if self._following[0] == epoch else max(self._following, following)
        self._is_ambiguous |= iteration <= self._outdated or iteration < self._iterations

    def _read_missing(self, slots: RecordSlots, numbers: Positions, threads: ReadingThreads) -> Future[_Read]:
        """Give records their places, in the order of the batches, and have those read that had none."""
        placed = slots.place(numbers)
        if placed.missing:
            return threads.submit(functools.partial(self._read_records, placed, slots.chunk, threads.divide))
        read: Future[_Read] = Future()
        read.set_result(_Read(placed.with_arrays([]), len(numbers), None))
        return read

    def _read_records(self, placed: Placed, rows: int, divide: Divide) -> _Read:
        """Read chunks of `rows` rows; where one has fewer records, its other rows are whatever was in memory."""
        pool = self.dataset.buffer_pools.pool(rows, pinned_empty if self.options.pin_memory else None)
        batches = []
        for _, numbers in placed.missing:
            buffer = pool.take()
            try:
                self.dataset.read_records(buffer, numbers, divide)
            except BaseException:
                pool.give_back(buffer)
                raise
            indices = np.resize(self.dataset.record_indices(numbers), rows)
            batches.append(self.dataset.to_batch(pool.lend(buffer, rows), indices))
        return _Read(placed.with_arrays(batches), len(placed.slots), None)

    def _read_crops(self, crop: HostCrop, indices: Positions, place: _Place, shared: int, divide: Divide) -> _Read:
        return self._read(indices, place, shared, divide, crop.reading(*self._drawn(place)))

    def _read(
        self,
        indices: Positions,
        place: _Place,
        shared: int,
        divide: Divide,
        read_into: Callable[..., WaysRead] | None = None,
    ) -> _Read:
        pool = self._buffers
        buffer = pool.take()
        try:
            ways = (read_into or self.dataset.read_into)(buffer, indices, place.epoch, shared, divide)
        except BaseException:
            pool.give_back(buffer)
            raise
        return _Read(self.dataset.to_batch(pool.lend(buffer, len(indices)), indices), len(indices), ways)

    def _drawn(self, place: _Place) -> tuple[int, int, int, slice]:
        """Return what random numbers are drawn for: seed, step, the rows of the global batch, and this rank's."""
        rows = place.stop - place.first
        return place.seed, place.step, rows, rank_slice(0, rows, self.rank, self.world_size)


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
