"""The batches of a CachedLoader as sharded JAX arrays.

A thread uploads batches ahead, while the program uses earlier batches. One jitted function then decodes, normalises and
augments each batch on the device.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from tpucache.errors import UsageError
from tpucache.jax.resident import KeptRecords, TableForm, of_first_axis, to_jax_dtype
from tpucache.loading.ahead import Ahead
from tpucache.loading.loader import BatchLoader, CachedLoader
from tpucache.native import Array
from tpucache.ondevice.arrays import ArrayLibrary
from tpucache.ondevice.augment import BatchAugment, check_fields, check_labels
from tpucache.ondevice.decode import field_decoder
from tpucache.ondevice.draws import draw
from tpucache.ondevice.resident import RecordBatch, Resident, as_named, channels_last, without_records
from tpucache.ondevice.settings import AugmentSettings, ResidentChoice
from tpucache.store.fields import IMAGE, LABEL, Field

#: The number of batches at the start of an epoch for which waiting is not counted: reading begins then, and the first
#: steps compile.
_UNCOUNTED: Final = 2

_Dtype = Literal["float32", "bfloat16"]
Batch = Any  # (images, labels), or a dict of arrays where an image is not the only field of a record

IS_SAMPLE: Final = "is_sample"  # the key in a dict that says which rows are samples, not padding

#: A function that finishes a batch: (fields by name, labels, random numbers) -> (fields by name, labels), all arrays on
#: the device.
Finish = Callable[[Mapping[str, Any], Any, Any], tuple[dict[str, Any], Any]]

# Constants stay numpy arrays, so that no device is used before the jitted function with them is called.
_JAX: Final = ArrayLibrary(jnp, lambda constant: constant)


def feed(
    loader: CachedLoader,
    sharding: jax.sharding.Sharding | None = None,
    *,
    augment: AugmentSettings | None = None,
    normalise: bool = False,
    seed: int = 0,
    depth: int = 2,
    pad_last: bool = False,
    dtype: _Dtype = "float32",
    resident: ResidentChoice | Resident = "auto",
) -> Feed:
    """Return an iterator of (images, labels) as sharded arrays. Each iteration is one epoch of the loader.

    Images are (batch, height, width, channels), in the cache's dtype, such as uint8. With `normalise` they are
    normalised by the cache's statistics (those of the first cache of a MixedLoader), computed in float32, and returned
    as `dtype`. `augment` normalises, too, and augments with random numbers that depend only on `seed` and the step, as
    in training with torch. Packed images (`CachedLoader(finish="device")`) are decoded on the device. Labels are int32
    (batch,), or float32 (batch, outputs) if the cache has vectors or labels are mixed. If an image is not the only
    field of a record, a batch is a dict of arrays, with the labels under "label". If `augment.views` is above 1, all
    arrays have one row for each view of a sample, and the views of a sample are neighbours. Unless
    `jax_enable_x64` is set, 64-bit numbers become 32-bit.

    With `pad_last`, a short batch is filled up with zeros, so that every batch has one shape and can be divided evenly.
    Each batch then has one more array, which says which of its rows are samples: bool (batch,), the last of (images,
    labels, is_sample), or "is_sample" in a dict.

    With `resident` "yes", records stay packed in the memory of the devices. Each record is uploaded once, when it is
    first needed. After that the host sends only the numbers of the rows in which the devices store the records, and the
    function that finishes a batch gathers these rows. Batches are the same as with "no". Each core holds a part of
    the records; with `CachedLoader(shuffle="local", cores=…)` a core needs no records of other cores. With "auto",
    records stay on the devices from the second iteration on, if the devices say how much memory they have and the
    records fit into 80 % of the memory that is left after the first two steps. Several feeds may use one `Resident`,
    one feed at a time. If the devices have too little memory after all, DeviceFullError is raised; with "auto", batches
    are then sent as with "no", and a warning says so.

    `sharding` says how the first axis is divided; by default, evenly over all devices. With several processes, each has
    a loader with the rank and world size that `process_slice(sharding)` returns, and the arrays are global batches;
    processes to which a mesh gives the same samples have the same rank. A thread uploads `depth` batches ahead. The
    caller's thread starts the computations, so that all processes start them in the same order.

    Raises UsageError if the arguments do not fit together; the iteration raises it for integers that do not fit into
    32 bits.
    """
    if dtype not in get_args(_Dtype):
        raise UsageError(f"dtype is one of {', '.join(get_args(_Dtype))}, not {dtype!r}")
    settings = AugmentSettings() if augment is None and normalise else augment
    if dtype != "float32" and settings is None:
        raise UsageError(f"images that are not normalised keep their dtype: add normalise=True for {dtype}")
    if not isinstance(resident, Resident) and resident not in get_args(ResidentChoice):
        raise UsageError(f'resident is "auto", "yes", "no" or a Resident, not {resident!r}')
    sharding = of_first_axis(sharding)
    _check(loader, sharding, pad_last)
    if pad_last and loader.order.name == "local":
        raise UsageError('pad_last is for evaluation, and shuffle="local" for training: leave one of them out')
    if settings is not None and settings.mixes:
        if pad_last:
            raise UsageError(
                "mixup and cutmix would mix samples with the padding of pad_last: leave them or pad_last out"
            )
        named = without_records(loader.dataset, len(loader.dataset))
        check_labels(np.asarray(named[LABEL]), settings, named)
    kept = KeptRecords(loader, sharding, resident)
    return Feed(_Epochs(loader, sharding, settings, seed, depth, pad_last, dtype, kept))


def process_slice(sharding: jax.sharding.Sharding | None = None) -> dict[str, int]:
    """Return `rank` and `world_size` for a loader that reads only the samples that this process's devices need.

    An example is `CachedLoader(dataset, batch // slice["world_size"], **slice)` with `slice = process_slice(sharding)`,
    where `batch` is the size of the global batch. The default is a sharding over all devices. Processes whose devices
    need the same samples have the same rank: this happens if the mesh has an axis that does not divide the batch.

    Raises UsageError if a process needs samples that are not consecutive in the batch, if the samples of two processes
    overlap only in part, or differ in number. It also raises UsageError if the sharding has no device of this process.
    """
    sharding = of_first_axis(sharding)
    count = len(sharding.device_set)
    rows: dict[int, set[int]] = {}
    for device, (index,) in sharding.devices_indices_map((count,)).items():
        rows.setdefault(device.process_index, set()).update(range(*index.indices(count)))
    slices = sorted({tuple(sorted(each)) for each in rows.values()})
    if [row for each in slices for row in each] != list(range(count)) or len({*map(len, slices)}) > 1:
        raise UsageError(
            "the mesh does not divide a batch into equal slices of consecutive samples, one for each process: order "
            "the mesh's devices so that the devices of one process are neighbours along the axis of the batch"
        )
    if jax.process_index() not in rows:
        raise UsageError(
            f"the sharding has no device of process {jax.process_index()}: give a sharding over the devices of all "
            "processes"
        )
    return {"rank": slices.index(tuple(sorted(rows[jax.process_index()]))), "world_size": len(slices)}


class Feed:
    """An iterator over the batches of a loader as sharded JAX arrays. `feed` returns it.

    An error in reading or uploading is raised in place of the batch. A loop that ends early leaves no thread.

    `state_dict` and `load_state_dict` are those of the loader, but count the batches that this Feed has yielded, not
    the batches that were read ahead.
    """

    def __init__(self, epochs: _Epochs) -> None:
        self._epochs = epochs
        self._current: Generator[Batch, None, None] | None = None  # the iteration that `next` continues

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch."""
        return len(self._epochs.loader)

    @property
    def waited_seconds(self) -> float:
        """How many seconds the caller waited for batches, not counting the first two batches of each epoch."""
        return self._epochs.waited_seconds

    @property
    def waited(self) -> float:
        """The fraction of the time, from 0 to 1, in which the caller waited for batches.

        The time before the third batch of each epoch does not count.
        """
        return self.waited_seconds / self._epochs.seconds if self._epochs.seconds else 0.0

    def __reduce__(self) -> tuple[object, ...]:
        raise UsageError(
            "a Feed cannot be pickled, because it has this process's devices, and a thread: give the loader to the "
            "other process, and call feed there"
        )

    def __iter__(self) -> Iterator[Batch]:
        return self._epochs.run()

    def __next__(self) -> Batch:
        self._current = self._current or self._epochs.run()
        try:
            return next(self._current)
        except StopIteration:
            self._current = None
            raise

    def metrics(self) -> dict[str, Any]:
        """Return the loader's metrics, and under the key `upload` the metrics of the feed.

        The loader's metrics count how long the uploading thread waited for the loader. Under `upload`, `waited_seconds`
        and `waited` are this Feed's properties of these names, `sent_bytes` is the number of bytes sent to the devices,
        `cpu_seconds` the CPU time of the uploading thread, and `resident` says whether records stay on the devices, and
        why.
        """
        epochs = self._epochs
        upload = {
            "waited_seconds": self.waited_seconds,
            "waited": self.waited,
            "resident": epochs.kept.describe(),
            "sent_bytes": epochs.sent_bytes,
            "cpu_seconds": epochs.cpu_seconds,
        }
        return {**epochs.loader.metrics(), "upload": upload}

    def state_dict(self) -> dict[str, int | str]:
        """Return the loader's state, counting the batches that were yielded; see CachedLoader.state_dict."""
        return self._epochs.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration begin where the loader or Feed was when it returned `state`.

        An iteration that `next` has begun ends. Raises UsageError if data or order differ; see
        CachedLoader.load_state_dict.
        """
        self._epochs.loader.load_state_dict(state)
        self.close()

    def close(self) -> None:
        """End the iteration that `next` began, and its thread."""
        if self._current is not None:
            self._current.close()
            self._current = None


@dataclass
class _Epochs:
    """The iterations of a Feed.

    A running iteration refers only to this object, not to the Feed, so that a Feed that the program drops is freed.
    """

    loader: CachedLoader
    sharding: jax.sharding.Sharding
    augment: AugmentSettings | None
    seed: int
    depth: int
    pads: bool
    dtype: _Dtype
    kept: KeptRecords
    waited_seconds: float = 0.0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    sent_bytes: int = 0

    def __post_init__(self) -> None:
        dataset = self.loader.dataset
        manifest = dataset.manifest
        check_fields(self.augment, dataset.names)
        image = {field.name: field for field in manifest.fields}.get(IMAGE)
        #: `make_finish` with all arguments but the last.
        self._make_finish = functools.partial(
            make_finish,
            image,
            any(field.name == IMAGE and len(field.shape) == 1 for field in dataset.record_fields),
            self.augment,
            tuple(manifest.statistics.mean),
            tuple(manifest.statistics.std),
            len(manifest.classes),
            self.dtype,
        )
        self._finish = self._make_finish()
        self._size = (0, 0) if image is None else (image.shape[0], image.shape[1])
        self._draws = None if self.augment == AugmentSettings() else self.augment
        self._views = (self.augment or AugmentSettings()).views

    def run(self) -> Generator[Batch, None, None]:
        batches, end = self.kept.begin()
        first = self._next_step() if self._draws else 0
        with Ahead(batches, self._upload, self.depth, first, self._upload_rows, end) as ahead:
            counted: tuple[float, ...] = ()  # when counting began, and the seconds waited before
            try:
                for number, uploaded in enumerate(ahead):
                    if number == _UNCOUNTED:
                        counted = time.perf_counter(), ahead.waited_seconds
                        self.kept.decide()
                    *parts, is_sample = uploaded
                    fields, labels = self._finished(*parts)
                    yield _to_batch(fields, labels, is_sample)
                    del uploaded, parts, fields, labels
            finally:
                self.cpu_seconds += ahead.cpu_seconds
                if counted:
                    self.seconds += time.perf_counter() - counted[0]
                    self.waited_seconds += ahead.waited_seconds - counted[1]

    def _next_step(self) -> int:
        """Return the number of the first batch of an iteration that has just begun, counted from the first epoch."""
        place = self.loader.state_dict()
        whole = self.loader.batch_size * self.loader.world_size
        return int(place["epoch"]) * len(self.loader) + int(place["position"]) // whole

    def _finished(self, fields: Any, labels: Any, draws: Any) -> tuple[dict[str, Any], Any]:
        if fields is not None:
            return self._finish(fields, labels, draws)
        resident, sent = labels
        if (read := resident.receive_or_read(sent)) is not None:  # the records do not fit
            return self._finish(*self._put_batch(read), draws)
        tables = sorted(resident.tables.items())
        finish = self._make_finish(tuple((name, table.form) for name, table in tables))
        return finish({name: table.rows for name, table in tables}, sent.slots, draws)

    def _upload(self, batch: Any, number: int) -> tuple[Any, Any, Any, Any]:
        """Upload a batch, and return its fields, labels, random numbers, and which of its rows are samples.

        If a Resident has the records, the result begins with None and (Resident, RecordBatch).
        """
        if isinstance(batch, tuple) and isinstance(batch[1], RecordBatch):
            return self._upload_rows([batch], number)[0]
        count = len(as_named(batch)[LABEL])
        rows = self.loader.batch_size if self.pads else count
        return *self._put_batch(batch), self._put_draws(number, rows), self._put_is_sample(count)

    def _upload_rows(self, batches: Sequence[Any], number: int) -> list[tuple[Any, Any, Any, Any]]:
        """Send the row numbers of batches, and the records that the devices lack; return what `_upload` returns."""
        resident: Resident = batches[0][0]
        reads = [self._padded_rows(resident, read) for _, read in batches]
        before = resident.uploaded_bytes + resident.row_bytes
        sent = resident.put(reads)
        self.sent_bytes += resident.uploaded_bytes + resident.row_bytes - before
        return [
            (None, (resident, each), self._put_draws(at, len(each.slots)), self._put_is_sample(len(read.slots)))
            for at, (each, (_, read)) in enumerate(zip(sent, batches, strict=True), number)
        ]

    def _padded_rows(self, resident: Resident, read: RecordBatch) -> RecordBatch:
        if not self.pads or resident.slots is None:
            return read
        padding = np.full(self.loader.batch_size - len(read.slots), resident.slots.rows, read.slots.dtype)
        return read._replace(slots=np.concatenate([read.slots, padding]))  # a slot after all rows gives zeros

    def _put_batch(self, batch: Any) -> tuple[dict[str, Any], Any]:
        """Send a batch, and return its fields by name and its labels, with JAX's dtypes; images have channels last."""
        sent = {}
        for name, value in as_named(batch).items():
            # Channels are last in memory: this view is contiguous, and the host transposes nothing.
            array = to_jax_dtype(name, channels_last(name, np.asarray(value)))
            if self.pads and (missing := self.loader.batch_size - len(array)):
                array = np.concatenate([array, np.zeros((missing, *array.shape[1:]), array.dtype)])
            sent[name] = self._put(array)
        return sent, sent.pop(LABEL)

    def _put_is_sample(self, count: int) -> jax.Array | None:
        if not self.pads:
            return None
        return self._put(np.repeat(np.arange(self.loader.batch_size) < count, self._views))

    def _put_draws(self, number: int, rows: int) -> jax.Array | None:
        if self._draws is None:
            return None
        drawn = draw(self._draws, self.seed, number, rows * self.loader.world_size, self._size)
        return self._put(drawn[rows * self.loader.rank :][:rows])

    def _put(self, array: Array) -> jax.Array:
        self.sent_bytes += array.nbytes
        # JAX keeps the array, and so the pooled buffer, until it has copied it.
        uploaded: jax.Array = jax.make_array_from_process_local_data(self.sharding, array)
        return uploaded


def _to_batch(fields: Mapping[str, Any], labels: Any, is_sample: Any) -> Batch:
    batch = {**fields, LABEL: labels} | ({} if is_sample is None else {IS_SAMPLE: is_sample})
    return tuple(batch.values()) if fields.keys() == {IMAGE} else batch


def _check(loader: CachedLoader, sharding: jax.sharding.Sharding, pad_last: bool) -> None:
    if not isinstance(loader, BatchLoader):
        raise UsageError(f"feed takes a CachedLoader, not {type(loader).__name__}")
    needed = process_slice(sharding)
    if needed != {"rank": loader.rank, "world_size": loader.world_size}:
        raise UsageError(
            f"the sharding divides a batch into {needed['world_size']} slice(s), and process {jax.process_index()} "
            f"needs slice number {needed['rank']}, but the loader has rank={loader.rank}, "
            f"world_size={loader.world_size}: give the loader **process_slice(sharding)"
        )
    if pad_last and loader.drop_last:
        raise UsageError(
            "pad_last keeps the last samples, and the loader's drop_last leaves them out: give only one of them"
        )
    if pad_last and IS_SAMPLE in loader.dataset.names:
        raise UsageError(
            f"pad_last says in {IS_SAMPLE!r} which rows are samples, and the cache has a field of that name: leave "
            "pad_last out"
        )
    whole = loader.batch_size * loader.world_size
    sizes = [whole] if loader.drop_last or pad_last else [whole, loader.samples % whole]
    for size in sizes:
        try:
            sharding.shard_shape((size,))
        except ValueError as error:
            raise UsageError(
                f"a batch of {size} samples cannot be divided evenly over {len(sharding.device_set)} devices: "
                "choose another batch_size, drop_last=True to train, or feed(..., pad_last=True) to evaluate"
            ) from error


@functools.lru_cache(maxsize=16)
def make_finish(
    image: Field | None,
    is_packed: bool,
    augment: AugmentSettings | None,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    classes: int,
    dtype: _Dtype,
    forms: tuple[tuple[str, TableForm], ...] = (),
) -> Finish:
    """Return a jitted function, described by `Finish`, that finishes a batch.

    Images are (batch, height, width, channels), or packed, uint8 (batch, n): the function decodes packed images. With
    `augment`, it returns images as `dtype` (batch, height, width, channels), normalised by each channel's `mean` and
    `std`. mixup and cutmix turn class numbers into vectors of length `classes`.

    With `forms`, the function first gathers the batch from tables on the devices: it takes the rows of each table as
    the fields, and row numbers as the labels.
    """
    decoder = field_decoder(image) if image is not None and is_packed else None
    change = None
    if image is not None and augment is not None:
        height, width, _ = image.shape
        change = BatchAugment(augment, mean, std, height, width, _JAX, image.dtype)

    def finish(fields: Mapping[str, Any], labels: Any, draws: Any) -> tuple[dict[str, Any], Any]:
        changed = dict(fields)
        if forms:
            changed = {name: form.taken(fields[name], labels) for name, form in forms}
            labels = changed.pop(LABEL)
        if decoder is not None:
            images = decoder.decode(_JAX, changed[IMAGE], decoder.constants)
            changed[IMAGE] = jnp.moveaxis(images, 1, 3)
        if change is not None:
            changed = change.fields(changed, draws)
            labels = labels if draws is None else change.views(labels)
            if change.settings.mixes:
                targets = labels if labels.ndim > 1 else jax.nn.one_hot(labels, classes)
                changed[IMAGE], labels = change.mix(changed[IMAGE], targets, draws)
            changed[IMAGE] = jnp.moveaxis(changed[IMAGE], 1, 3).astype(dtype)
        return changed, labels

    # On a TPU, matrix multiplication rounds operands to bfloat16; the decoder splits its operands to allow for that.
    jitted: Finish = jax.jit(finish)
    return jitted
