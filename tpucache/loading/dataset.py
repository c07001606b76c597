"""CachedDataset: the samples of a cache as a map-style PyTorch dataset."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import operator
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import numpy.typing as npt

from tpucache.errors import FormatError, UsageError
from tpucache.loading.find import open_cache
from tpucache.loading.reading.memory import Buffer, BufferPools
from tpucache.loading.reading.record_reader import (
    Divide,
    InMemory,
    ReadingPlan,
    RecordReader,
    UseRecords,
    WaysRead,
    undivided,
)
from tpucache.loading.reading.views import in_resolution
from tpucache.loading.selection import Selection, Variant, Windows, to_variant
from tpucache.loading.tensors import (
    Dataset,
    SharedNumber,
    integer_positions,
    is_single,
    overrides,
    to_array,
    to_integer,
    to_positions,
    to_tensor,
)
from tpucache.native import Array
from tpucache.store.cache import Cache, field_batches
from tpucache.store.fields import IMAGE, LABEL, SOFT_LABEL, SOFT_WEIGHT, Field, usual_bytes
from tpucache.store.index import Numbers
from tpucache.store.manifest import Manifest
from tpucache.store.samples import NO_LABEL, SampleTable

if TYPE_CHECKING:
    import torch

    from tpucache.store.reader import NetworkUse

Item = Any  # (image, label), or a dict of tensors if a record has more fields than an image

#: The key of the columns in a batch.
COLUMNS: Final = "columns"
_BATCH_BYTES: Final = 4 << 20
_UNCOUNTED: Final = -1

_log: Final = logging.getLogger("tpucache")


class CachedDataset(Dataset[Item]):
    """The samples of a cache: `image, label = dataset[0]`.

    The image is a tensor (channels, height, width), channels last in memory, uint8 unless the warmup kept another
    dtype. The label is an int64 scalar, a float32 scalar or vector, or -1 if the cache has no labels. If records have
    more fields than an image, a sample is a dict of tensors, with the label under "label". Without torch, the tensors
    are numpy arrays of the same shapes.

    `dataset[2:5]`, `dataset[[4, 0, -1]]` and `dataset[mask]` are datasets of the chosen samples (see `select`), which
    share files and records in memory.

    The dataset works with DataLoader (any kind of worker), Subset and everything else that takes a map-style dataset.
    Its pickle is small, and files are opened in the process that reads them. `close`, or leaving a `with` block, closes
    the files and frees the records in memory.
    """

    def __init__(
        self,
        cache: str | Path | Cache,
        variant: Variant = 0,
        indices: Sequence[int] | Array | None = None,
        *,
        in_memory: InMemory = "auto",
        cache_dir: str | Path | None = None,
        cache_bytes: int | None = None,
        resolution: int | tuple[int, int] | None = None,
        frequencies: int | None = None,
        version: int | None = None,
        max_age: float = 30.0,
    ) -> None:
        """Open a cache. A shard is opened when it is first read.

        `cache` is a folder; or "kaggle:slug", which is searched where such datasets are mounted (see `find_cache`); or
        a URL such as "gs://bucket/cache": see `RemoteCache.open_url` for `cache_dir`, `cache_bytes`, `max_age`.

        `variant` 0 gives the clean images, 1 to K one augmented variant. "epoch" gives each sample another augmented
        variant in each epoch, all K in K epochs; a cache without augmented variants then gives clean images, with a
        warning. A CachedLoader counts epochs itself; with a DataLoader, call `set_epoch` before each epoch.

        `version` is the number of a version of the cache, by default the newest. "cache@2" names version 2 of "cache",
        too. An open dataset does not change when newer versions are made.

        `indices` selects samples: positions from 0, whose order is kept, or a mask with one bool per sample. Negative
        positions are refused here, because many tables use -1 for "not found".

        `in_memory` "auto" lets CachedLoader decide: it maps shards that no other program can truncate, and otherwise
        keeps records in memory after the first read, in at most half of the free memory. True keeps every record that
        is read, False keeps none.

        `resolution` gives images of the codecs dct-zstd and dct-lz4 at another size, (height, width) in pixels or one
        number for both, from 8 to twice the stored size, and moves boxes, keypoints and masks. Of the 8 frequencies per
        direction of each 8x8 block, decoding uses, and a device gets, the lowest `frequencies`, by default as many as
        the size needs.

        Raises NotACacheError, FormatError or DamageError for the cache, UsageError for wrong arguments or if there is
        too little memory.
        """
        most = None if cache_bytes is None else to_integer("cache_bytes", cache_bytes, 0)
        opened = cache if isinstance(cache, Cache) else open_cache(cache, cache_dir, most, version, max_age)
        self.place: str = opened.place
        self.directory: Path = opened.directory
        self._resolution = resolution, frequencies
        self.manifest: Manifest = in_resolution(opened.manifest, resolution, frequencies)
        opened.open_tables()  # now, so that a damaged index is found early
        self.table: SampleTable = opened.samples
        chosen = None if indices is None else to_positions(indices, self.manifest.samples, from_end=False)
        self._selection = Selection(self.manifest, to_variant(variant, opened), chosen)
        self._digest: str | None = None
        self._columns: Array | None = None  # float32 (samples of the cache, width)
        self._targets: Array | None = None  # float32 (samples of the cache, classes)
        self._scale: tuple[Array, Array] | None = None  # mean and deviation of the labels, float64 (m,)
        self._epoch = SharedNumber(is_shared=self.variant == "epoch")  # otherwise workers do not need the epoch
        # The number of samples that were read before the epoch was set; -1 once it is set, or the user was warned.
        self._unset_reads = SharedNumber(is_shared=self.variant == "epoch")
        self._reader: RecordReader | None = RecordReader(
            opened, self._selection.records, in_memory, shown=self.manifest.fields
        )

    def __len__(self) -> int:
        return len(self._selection)

    def __getitem__(self, index: Any) -> Item:
        """Return one sample for an integer, and the dataset that `select` returns for any other index.

        Raises IndexError for an index out of range, UsageError for a value that is not an index.
        """
        if not is_single(index):
            return self.select(index)
        if overrides(self, CachedDataset, "__getitem__"):
            return self._items([index])[0]
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Item]:
        """Return the samples at `indices` as a list. DataLoader calls this for a whole batch.

        Raises IndexError for an index out of range, UsageError for a value that is not an index, and DamageError for a
        record that cannot be read.
        """
        if overrides(self, CachedDataset, "__getitem__") and not overrides(self, CachedDataset, "__getitems__"):
            return [self[index] for index in indices]  # a subclass's own __getitem__ also applies to batches
        return self._items(indices)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()  # a copy, because other threads may set attributes meanwhile

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.variant == "epoch":
            self._epoch.share()
            self._unset_reads.share()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files and free the records in memory. Reading raises UsageError afterwards.

        Datasets from which this one was selected, or that were selected from it, stay open.
        """
        self._reader = None

    def __repr__(self) -> str:
        shown = self.manifest.fingerprint[:12]
        return f"CachedDataset(samples={len(self)}, variant={self.variant!r}, fingerprint={shown!r})"

    @property
    def epoch(self) -> int:
        """The epoch whose variants are read with variant="epoch"."""
        return self._epoch.get()

    @property
    def cache(self) -> Cache:
        """The open cache."""
        return self._open_reader.cache

    @property
    def is_finished(self) -> bool:
        """Whether the whole cache is built. That of `open_or_build` may not be finished yet."""
        return self._open_reader.cache.is_finished

    @property
    def resolution(self) -> int | tuple[int, int] | None:
        """The size of the images, as given to the constructor; None for the stored size."""
        return self._resolution[0]

    @property
    def frequencies(self) -> int | None:
        """The number of frequencies per block, as given to the constructor; None: as many as the resolution needs."""
        return self._resolution[1]

    @property
    def names(self) -> list[str]:
        """The names of a record's fields, in order."""
        return list(map(operator.attrgetter("name"), self.manifest.fields))  # fast, because every batch needs them

    @property
    def record_fields(self) -> tuple[Field, ...]:
        """The fields of a record, with the dtype and shape that each has when it is read."""
        return self._open_reader.fields

    @property
    def reading(self) -> ReadingPlan:
        """How a CachedLoader will probably read the records, and how much memory it plans to use."""
        is_whole = self._open_reader.cache.reader.arriving is None  # shards that are still arriving are not mapped
        return self._open_reader.plan(self._selection.records, self._selection.shards if is_whole else ())

    @property
    def in_memory(self) -> bool:
        """Whether a CachedLoader keeps each record in memory after the first read."""
        return self._reader is not None and self.reading.way == "keep"

    @property
    def maps(self) -> Mapping[str, int]:
        """The number of shards that this process mapped, by method, and of those that it could not map, by reason."""
        return {} if self._reader is None else self._reader.maps

    @property
    def network(self) -> NetworkUse | None:
        """This process's network traffic for a cache at a URL so far; None for a cache in a folder."""
        return None if self._reader is None else self._reader.network

    @property
    def networks(self) -> list[NetworkUse]:
        """A list with this process's network traffic for a cache at a URL; an empty list for a cache in a folder."""
        return [use for use in [self.network] if use is not None]

    @property
    def mean_record_bytes(self) -> int:
        """The mean size of a record on disk in bytes, over the variants in use."""
        return self._selection.mean_record_bytes

    @property
    def usual_record_bytes(self) -> int:
        """How many bytes a record with these fields usually has on disk, estimated by codec."""
        return usual_bytes(self.manifest.fields)

    @property
    def digest(self) -> str:
        """SHA-256, in hexadecimal, of everything that decides the samples: records, labels, columns, selection, order.

        Only the variants in use are covered. Loaders and runs resume only with an equal digest.
        """
        if self._digest is None:
            self._digest = self.digest_without_columns
            for each in (self._columns, self._targets):
                if each is not None:
                    values = np.ascontiguousarray(each[self.positions])
                    self._digest = hashlib.sha256(self._digest.encode() + values.tobytes()).hexdigest()
        return self._digest

    @property
    def digest_without_columns(self) -> str:
        """The digest of the same samples without the columns of `with_columns` and without soft labels."""
        return self._selection.digest(self.table.labels)

    @property
    def column_width(self) -> int:
        """The number of values per sample in the columns of `with_columns`; 0 without columns."""
        return 0 if self._columns is None else int(self._columns.shape[1])

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names. A label is a position in this tuple."""
        return self.manifest.classes

    @property
    def paths(self) -> list[str]:
        """The path of each sample in the source."""
        return list(map(self.table.paths.__getitem__, self.positions.tolist()))

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """The position of each sample in the cache: int64 (n,)."""
        return self._selection.positions

    @property
    def numbers(self) -> npt.NDArray[np.uint64]:
        """The number of each sample, which is its key in the shards: uint64 (n,)."""
        return self.table.numbers[self.positions]

    @property
    def variant(self) -> Variant:
        """The variant that is read: a number or "epoch"."""
        return self._selection.variant

    @property
    def labels(self) -> torch.Tensor:
        """The labels of all samples: int64 (n,), or float32 (n,) or (n, m); -1 if the cache has no labels."""
        return self.labels_of(np.arange(len(self)))

    def select(self, indices: Sequence[int] | Array | slice) -> CachedDataset:
        """Return a dataset of the samples at `indices`, in the order of `indices`. Nothing is read.

        `indices` are positions (negative ones count from the end), a mask with one bool per sample, or a slice. A
        sample may be chosen more than once. The new dataset begins with the epoch of this one, and later has its own.
        Raises OutOfRangeError, which is also an IndexError, for positions out of range, and UsageError for any other
        `indices`.
        """
        return self._derive(self._selection.select(indices), self._open_reader)

    def in_variant(self, variant: Variant) -> CachedDataset:
        """Return a dataset of all samples of the cache in the variant `variant`, a number or "epoch"."""
        reader = self._open_reader
        return CachedDataset(
            reader.cache, variant, in_memory=reader.in_memory, resolution=self.resolution, frequencies=self.frequencies
        )

    def in_resolution(self, resolution: int | tuple[int, int] | None) -> CachedDataset:
        """Return a dataset of the same samples with images of another size: see `resolution` of the constructor.

        Raises UsageError for a size that cannot be made from the stored images.
        """
        if resolution == self.resolution:
            return self
        reader = self._open_reader
        shown = CachedDataset(reader.cache, self.variant, in_memory=reader.in_memory, resolution=resolution)
        derived = self._derive(dataclasses.replace(self._selection, manifest=shown.manifest), shown._open_reader)
        derived.manifest, derived._resolution = shown.manifest, shown._resolution
        return derived

    def where(self, condition: str) -> CachedDataset:
        """Return a dataset of the samples that meet a condition on their columns, such as "age > 60 and site == 'A'".

        `tpucache.store.filter.matching` explains conditions, which run no code. Raises UsageError for an invalid one.
        """
        from tpucache.store.filter import matching

        return self.select(matching(condition, self.table, self.positions, self.classes))

    def with_columns(self, values: Array) -> CachedDataset:
        """Return a dataset whose items are dicts that also have "columns": a row of `values`, float32 (n, width).

        Raises UsageError unless `values` has a row for each sample, with the same values where a sample was selected
        several times, and if records have a field with that name.
        """
        if COLUMNS in self.names:
            raise UsageError(
                f"the records have a field {COLUMNS!r} already, so columns cannot be inputs as well: leave the columns "
                "out, or rename the field"
            )
        values = to_array("columns", values)
        if values.ndim != 2 or len(values) != len(self):
            raise UsageError(
                f"columns have shape {values.shape}, and the dataset has {len(self):,} samples: give an array (n, "
                "width) with a row for each sample"
            )
        positions, values = self.positions, values.astype(np.float32)
        whole = np.full((self.manifest.samples, values.shape[1]), np.nan, np.float32)
        whole[positions] = values
        # A sample that was selected several times has one row in `whole`.
        differs = ~np.isclose(whole[positions], values, rtol=0, atol=0, equal_nan=True).all(1)
        if differs.any():
            raise UsageError(
                f"the sample {self.paths[int(differs.argmax())]!r} was selected several times, and its rows of columns "
                "differ: give it the same values each time"
            )
        derived = self._derive(self._selection, self._open_reader)
        derived._columns = whole
        return derived

    def with_soft_labels(self) -> CachedDataset:
        """Return a dataset whose batches have soft labels, which `relabel` wrote, instead of labels.

        They are float32 (n, classes): class probabilities times the sample's weight. If the cache has none, the result
        is the dataset itself. The attribute `labels` does not change. Raises FormatError for invalid soft labels.
        """
        if SOFT_LABEL not in self.table or SOFT_WEIGHT not in self.table:
            return self
        soft, weights = np.asarray(self.table[SOFT_LABEL]), np.asarray(self.table[SOFT_WEIGHT])
        shape = (self.manifest.samples, len(self.classes))
        if soft.shape != shape or weights.shape != shape[:1] or {soft.dtype.kind, weights.dtype.kind} != {"f"}:
            raise FormatError(f"{self.directory}: soft labels do not fit the samples and classes: relabel the cache")
        if not (np.isfinite(soft).all() and np.isfinite(weights).all() and soft.min() >= 0 and weights.min() >= 0):
            raise FormatError(f"{self.directory}: soft labels or weights are negative or not finite: relabel the cache")
        derived = self._derive(self._selection, self._open_reader)
        derived._targets = (soft * weights[:, None]).astype(np.float32)
        return derived

    @property
    def label_form(self) -> str:
        """How batches show labels, as text: as they are stored, as soft labels, or standardised by which numbers."""
        if self._targets is not None:
            return "soft labels"
        if self._scale is None:
            return "they are stored"
        mean, std = (each.tolist() for each in self._scale)
        return f"numbers standardised by the mean {mean} and the deviation {std}"

    @property
    def label_scale(self) -> tuple[Array, Array] | None:
        """The means and deviations that labels are standardised by in batches; None if they are as stored."""
        return self._scale

    def with_standardised_labels(self, mean: Sequence[float], std: Sequence[float]) -> CachedDataset:
        """Return a dataset whose batches have the labels (label - mean) / std, for each column: float32 (n, m).

        The attribute `labels` does not change. Raises UsageError unless labels are float values in `len(mean)` columns,
        and `std` has as many numbers as `mean`.
        """
        labels = self.table.labels
        if len(mean) != len(std):
            raise UsageError(
                f"mean has {len(mean)} numbers and std has {len(std)}: give both one number for each column of labels"
            )
        if labels is None or labels.dtype.kind != "f" or labels.shape[1:] != (len(mean),):
            raise UsageError(
                f"mean has {len(mean)} numbers, but the labels are not float values in as many columns: give one "
                "number for each column of labels, and leave class labels as they are"
            )
        means, deviations = np.array(mean, np.float64), np.array(std, np.float64)
        if not (np.isfinite(means) & np.isfinite(deviations) & (deviations > 0)).all():
            raise UsageError(f"mean has finite numbers, and std finite ones above 0, not {list(mean)} and {list(std)}")
        derived = self._derive(self._selection, self._open_reader)
        derived._scale = means, deviations
        return derived

    def packed(self) -> CachedDataset:
        """Return a dataset of the same samples whose fields stay in their codecs' packed form, for a device to decode.

        An image whose codec has one is then uint8 (n,), the input of `tpucache.ondevice.decoder`; other fields do not
        change.
        """
        reader = self._open_reader.packing()
        return self if reader.fields == self.record_fields else self._derive(self._selection, reader)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, an integer from 0. All worker processes of a DataLoader see it, also persistent ones."""
        self._epoch.set(to_integer("epoch", epoch, 0))
        self._unset_reads.set(_UNCOUNTED)

    def read_into(
        self, buffer: Buffer, indices: Array, epoch: int, chunk: int = 1, divide: Divide = undivided
    ) -> WaysRead:
        """Read samples into the first rows of a buffer; `chunk` consecutive samples have the same variant="epoch"."""
        return self._open_reader.read_into(buffer, self._rows(indices, epoch, chunk), keep=True, divide=divide)

    @property
    def records(self) -> int:
        """The number of different records that all epochs together read. They are numbered from 0."""
        return self._selection.records

    def record_numbers(self, indices: Array, epoch: int, chunk: int = 1) -> npt.NDArray[np.int64]:
        """Return the numbers of the records of these samples in an epoch: int64 (n,)."""
        return self._selection.record_numbers(indices, epoch, chunk)

    def record_indices(self, numbers: Array) -> npt.NDArray[np.int64]:
        """Return, for each record number, the index of a sample with this record: int64 (n,)."""
        return self._selection.record_indices(numbers)

    def read_records(self, buffer: Buffer, numbers: Array, divide: Divide = undivided) -> WaysRead:
        """Read records by their numbers into the first rows of a buffer."""
        rows = self._selection.rows_of_records(self._open_reader.cache, numbers)
        return self._open_reader.read_into(buffer, rows, divide=divide)

    @property
    def can_visit(self) -> bool:
        """Whether records are just the bytes of their fields, so that `visit` can be used."""
        return self._open_reader.is_plain

    def visit(
        self, indices: Array, epoch: int, chunk: int, use: UseRecords, parts: Numbers, divide: Divide = undivided
    ) -> WaysRead:
        """Call `use` with the addresses of the samples' records, without a copy: see `RecordReader.visit`."""
        return self._open_reader.visit(self._rows(indices, epoch, chunk), use, parts, divide=divide)

    def field_batches(self, name: str) -> Iterator[Array]:
        """Iterate over one field of all samples, in order, in batches (n, *shape) of at most 4 MB or of one sample."""
        rows = self._rows(np.arange(len(self)), self.epoch)
        shown = {field.name: at for at, field in enumerate(self.manifest.fields) if field.view is not None}
        if name not in shown:
            return field_batches(self._open_reader.cache, rows, name)
        return self._shown_batches(rows, shown[name])

    def _shown_batches(self, rows: Numbers, field: int) -> Iterator[Array]:
        count = max(1, _BATCH_BYTES // max(1, self.record_fields[field].nbytes))
        for first in range(0, len(rows), count):
            some = rows[first : first + count]
            buffer = Buffer(self.record_fields, len(some))
            self._open_reader.read_into(buffer, some)
            yield buffer.arrays[field]

    def prepare(self, threads: int) -> None:
        """Map shards, or read the first records into memory, for a loader with this many threads, in at most 0.5 s."""
        if self._open_reader.cache.reader.arriving is not None:
            return
        first = self._rows(np.arange(min(len(self), self._open_reader.most_to_prepare)), self.epoch)
        self._open_reader.prepare(self._selection.records, self._selection.shards, first, threads)

    @property
    def is_late(self) -> bool:
        """Whether the cache's storage takes long to answer, as a network mount does."""
        return self._open_reader.cache.reader.is_late

    def expect(self, owner: object, windows: Windows) -> None:
        """Announce the samples that `owner` will read, in order, so that their records are fetched or built in time."""
        reader = self._open_reader
        arriving = reader.cache.reader.arriving
        if arriving is None:
            return

        def numbers() -> Iterator[Numbers]:
            return (reader.not_in_memory(self._rows(*window)) for window in windows())

        arriving.expect(owner, self._selection.variants, numbers)

    def hint(self, indices: Array, epoch: int, chunk: int = 1) -> None:
        """Ask the kernel to read these samples' records from the disk ahead."""
        self._open_reader.hint(self._rows(indices, epoch, chunk))

    @property
    def buffer_pools(self) -> BufferPools:
        """The batch buffers, which all loaders of this dataset share."""
        return self._open_reader.pools

    def labels_of(self, indices: Array) -> torch.Tensor:
        """Return the labels of samples: int64 (n,), or float32 (n,) or (n, m); -1 if the cache has no labels."""
        labels, positions = self.table.labels, self._selection.positions_of(indices)
        if labels is None:
            return to_tensor(np.full(len(positions), NO_LABEL))
        return to_tensor(labels[positions].astype(np.float32 if labels.dtype.kind == "f" else np.int64))

    def values_of(self, indices: Array) -> dict[str, torch.Tensor]:
        """Return what a batch has besides the fields of its records: the labels, and the columns if there are any."""
        columns, positions = {}, self._selection.positions_of(indices)
        if self._columns is not None:
            columns[COLUMNS] = to_tensor(self._columns[positions])
        if self._targets is not None:
            return {**columns, LABEL: to_tensor(self._targets[positions])}
        if self._scale is not None and self.table.labels is not None:
            mean, std = self._scale
            standardised = (self.table.labels[positions].astype(np.float64) - mean) / std
            return {**columns, LABEL: to_tensor(standardised.astype(np.float32))}
        return {**columns, LABEL: self.labels_of(indices)}

    def to_batch(self, arrays: Sequence[Array], indices: Array) -> Item:
        """Make the batch that users get: the fields in `arrays` with the labels, and any columns, of these samples."""
        return self.join(arrays, self.values_of(indices))

    def join(self, arrays: Sequence[Array], values: Mapping[str, torch.Tensor]) -> Item:
        """Make a batch, (images, labels) or a dict of tensors, from fields in `arrays` and a result of `values_of`."""
        fields = [self.as_tensor(name, array) for name, array in zip(self.names, arrays, strict=True)]
        if self.names == [IMAGE] and [*values] == [LABEL]:
            return fields[0], values[LABEL]
        return {**dict(zip(self.names, fields, strict=True)), **values}

    @staticmethod
    def as_tensor(name: str, array: Array) -> torch.Tensor:
        """Return an array (batch, …) as a tensor over the same memory. Decoded images become (batch, C, H, W)."""
        return to_tensor(array.transpose(0, 3, 1, 2) if name == IMAGE and array.ndim == 4 else array)

    def _derive(self, selection: Selection, reader: RecordReader) -> CachedDataset:
        derived = object.__new__(type(self))
        derived.__dict__.update(self.__getstate__())
        derived._selection, derived._digest, derived._reader = selection, None, reader
        derived._epoch = SharedNumber(self.epoch, is_shared=self.variant == "epoch")
        derived._unset_reads = SharedNumber(is_shared=self.variant == "epoch")
        return derived

    def _items(self, indices: Sequence[int]) -> list[Item]:
        positions = integer_positions(indices, len(self))
        if not len(positions):
            return []
        buffer = Buffer(self.record_fields, len(positions))
        self._open_reader.read_into(buffer, self._rows(positions, self.epoch))
        if self.variant == "epoch":
            self._warn_of_one_variant(len(positions))
        batch = self.to_batch(buffer.arrays, positions)
        if isinstance(batch, tuple):
            return list(zip(*batch, strict=True))
        return [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]

    def _warn_of_one_variant(self, read: int) -> None:
        before = self._unset_reads.get()
        if before == _UNCOUNTED:
            return
        is_over = before + read > len(self)
        self._unset_reads.set(_UNCOUNTED if is_over else before + read)
        if is_over:
            _log.warning(
                'variant="epoch" of %s shows each sample in the same variant again: call dataset.set_epoch(epoch) '
                "before each epoch of a DataLoader, or use CachedLoader, which counts epochs itself",
                self.place,
            )

    @property
    def _open_reader(self) -> RecordReader:
        if self._reader is None:
            raise UsageError(f"this dataset of {self.directory} is closed: open another CachedDataset")
        return self._reader

    def _rows(self, indices: Array, epoch: int, chunk: int = 1) -> Numbers:
        return self._selection.rows(self._open_reader.cache, indices, epoch, chunk)
