"""CachedDataset: a finished cache as a plain map-style PyTorch dataset."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import operator
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from tpucache.errors import FormatError, UsageError
from tpucache.loading.find import open_cache
from tpucache.loading.indices import integer_positions, is_single, overrides, to_integer, to_positions
from tpucache.loading.reading.buffers import Buffer, BufferPools
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
from tpucache.loading.samples import Selection, Variant, Windows, to_variant
from tpucache.loading.tensors import Dataset, SharedNumber, to_tensor
from tpucache.store.cache import Cache, field_batches
from tpucache.store.codecs import CODECS
from tpucache.store.fields import IMAGE, LABEL, SOFT_LABEL, SOFT_WEIGHT, Field
from tpucache.store.index import Numbers
from tpucache.store.manifest import Manifest
from tpucache.store.samples import NO_LABEL, SampleTable
from tpucache.types import Array

if TYPE_CHECKING:
    import torch

    from tpucache.store.arriving import NetworkUse

Item = Any  # (image, label), or a dict of tensors where a record has more fields than an image

#: The name of the columns in a batch.
COLUMNS: Final = "columns"
_BATCH_BYTES: Final = 4 << 20
_UNCOUNTED: Final = -1

_log: Final = logging.getLogger("tpucache")

Self = TypeVar("Self", bound="CachedDataset")


class CachedDataset(Dataset[Item]):
    """The samples of a cache: `image, label = dataset[0]`.

    The image is a tensor (channels, height, width), uint8 unless its own depth was kept, channels last in memory; the
    label an int64 scalar, a float32 vector, or -1 where the cache has no labels. A cache with fields besides the image
    gives a dict of tensors instead, the label under "label". Without torch, all are numpy arrays of the same shapes.

    `dataset[2:5]`, `dataset[[4, 0, -1]]` and `dataset[mask]` are datasets of these samples, as slices, lists and masks
    of a numpy array are arrays; nothing is read for that (see `select`).

    It works under DataLoader with any kind of worker, Subset and everything else that takes a dataset. It pickles
    small and opens files in the process that reads them. `close`, or leaving a `with` block, closes its files and
    frees its records in memory; all that was selected from one dataset shares them.
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
    ) -> None:
        """Open a cache; no shard is opened before it is read.

        `cache` is its folder, or "kaggle:slug", which is looked for where such datasets are mounted (see `find_cache`),
        or a URL, such as "gs://bucket/cache": see `RemoteCache.open_url` for `cache_dir` and `cache_bytes`.
        `variant` 0 is the clean image, 1 to K the augmented ones; "epoch" shows every sample another augmented
        variant each epoch, all K in K epochs; in a cache without any the clean image, with a warning in the log. A
        CachedLoader counts epochs itself; for a DataLoader call `set_epoch`. A warning in the log says where more
        samples than the dataset has were read without that.

        `version` is one of the cache's versions, from 1; if not given, the newest. "cache@2" names one, too. A dataset
        keeps its version while others are made.

        `indices` keeps only these samples, in this order: positions from 0, or a mask of one bool a sample. Negative
        ones are refused here, because -1 is how many tables say "not found".

        `in_memory` "auto" lets CachedLoader decide: it maps shards where nobody can cut them short, else keeps records
        once they are read, as far as half of the free memory allows. True keeps whatever is read, False nothing.

        `resolution` shows images of the codecs dct-zstd and dct-lz4 in another size, (height, width) in pixels or one
        number for both, from 8 to twice the stored one. Boxes, keypoints and masks are those of that size. Of each
        block's 8 frequencies as many are used as the size can show, or `frequencies` of them: a device is given these.

        Raises NotACacheError, FormatError or DamageError for the cache, UsageError for the rest, or for want of memory.
        """
        opened = cache if isinstance(cache, Cache) else open_cache(cache, cache_dir, cache_bytes, version)
        self.place: str = opened.place
        self.directory: Path = opened.directory
        self._resolution = resolution, frequencies
        self.manifest: Manifest = in_resolution(opened.manifest, resolution, frequencies)
        self.table: SampleTable = opened.samples
        chosen = None if indices is None else to_positions(indices, self.manifest.samples, from_end=False)
        self._selection = Selection(self.manifest, to_variant(variant, opened), chosen)
        self._digest: str | None = None
        self._columns: Array | None = None  # float32 (samples of the cache, width)
        self._targets: Array | None = None  # float32 (samples of the cache, classes)
        self._scale: tuple[Array, Array] | None = None  # mean and deviation of the labels, float64 (m,)
        self._epoch = SharedNumber(is_shared=self.variant == "epoch")  # only then do workers need to see it
        # How many samples were read before the epoch was set; -1 once it was set, or the user was warned.
        self._unset_reads = SharedNumber(is_shared=self.variant == "epoch")
        opened.index  # a damaged one is refused here  # noqa: B018
        self._reader: RecordReader | None = RecordReader(
            opened, self._selection.records, in_memory, shown=self.manifest.fields
        )

    def __len__(self) -> int:
        return len(self._selection)

    def __getitem__(self, index: Any) -> Item:
        """Return one sample for a whole number, and for anything else the dataset that `select` gives.

        Raises IndexError outside of the samples, UsageError for what is not an index.
        """
        if not is_single(index):
            return self.select(index)
        if overrides(self, CachedDataset, "__getitem__"):
            return self._items([index])[0]
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Item]:
        """Return several samples, as torch's fetcher asks for a whole batch. Raises IndexError and UsageError."""
        if overrides(self, CachedDataset, "__getitem__") and not overrides(self, CachedDataset, "__getitems__"):
            return [self[index] for index in indices]  # a subclass changes the samples of a batch, too
        return self._items(indices)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()  # another thread may read meanwhile, and set attributes on first use

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.variant == "epoch":
            self._epoch.share()
            self._unset_reads.share()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files and free the records in memory; reading raises UsageError from then on.

        The datasets that it was selected from, or that were selected from it, stay open. Closing again does nothing.
        """
        self._reader = None

    def __repr__(self) -> str:
        shown = self.manifest.fingerprint[:12]
        return f"CachedDataset(samples={len(self)}, variant={self.variant!r}, fingerprint={shown!r})"

    @property
    def epoch(self) -> int:
        """Which epoch it is, for variant="epoch"."""
        return self._epoch.get()

    @property
    def cache(self) -> Cache:
        """The opened cache of the samples."""
        return self._open_reader.cache

    @property
    def is_finished(self) -> bool:
        """Whether the whole cache is built; `open_or_build` gives one that may not be."""
        return self._open_reader.cache.is_finished

    @property
    def resolution(self) -> int | tuple[int, int] | None:
        """The size that images are shown in, None for the stored one."""
        return self._resolution[0]

    @property
    def frequencies(self) -> int | None:
        """How many of each block's frequencies were asked for, None for those that the resolution needs."""
        return self._resolution[1]

    @property
    def names(self) -> list[str]:
        """The names of a record's fields, in order."""
        return list(map(operator.attrgetter("name"), self.manifest.fields))  # each batch asks for them

    @property
    def record_fields(self) -> tuple[Field, ...]:
        """The fields of a record as they are read: dtype and shape of each array of a sample."""
        return self._open_reader.fields

    @property
    def reading(self) -> ReadingPlan:
        """How a CachedLoader will read the records, and the memory that it plans to take, as far as is known now."""
        is_whole = self._open_reader.cache.reader.arriving is None  # else no shard is mapped
        return self._open_reader.plan(self._selection.records, self._selection.shards if is_whole else ())

    @property
    def in_memory(self) -> bool:
        """Whether a CachedLoader keeps each record in memory once it is read."""
        return self._reader is not None and self.reading.way == "keep"

    @property
    def maps(self) -> Mapping[str, int]:
        """How many shards this process has mapped, by the way, and how many it has not, by the reason.

        Shards of which nothing was read do not count. The ways are "lease" and "read_only". Reasons are "other_owner",
        "open_for_writing", "not_local", "too_many_files", "no_leases", "given_back", "no_maps" and "being_fetched": see
        `tpucache.loading.reading.maps.TEXTS`.
        """
        return {} if self._reader is None else self._reader.maps

    @property
    def network(self) -> NetworkUse | None:
        """What this process has read of a cache at a URL so far; None for a cache in a folder."""
        return None if self._reader is None else self._reader.network

    @property
    def networks(self) -> list[NetworkUse]:
        """What this process has read of a cache at a URL, as a list of one; none for a cache in a folder."""
        return [use for use in [self.network] if use is not None]

    @property
    def mean_record_bytes(self) -> int:
        """Bytes a record takes on disk, on average over the variants in use."""
        return self._selection.mean_record_bytes

    @property
    def usual_record_bytes(self) -> int:
        """Bytes that a record with these fields usually takes: exact for codecs of a fixed length."""
        return max(1, round(sum(field.nbytes * CODECS[field.codec].typical_ratio for field in self.manifest.fields)))

    @property
    def digest(self) -> str:
        """SHA-256, in hexadecimal, of all that decides the samples: records, labels, columns, selection and its order.

        Only the variants in use count, so adding variants to a cache leaves the digest of variant 0 as it is. Loaders
        and runs are resumed only where it is the same.
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
        """The digest of the same samples without columns."""
        return self._selection.digest(self.table.labels)

    @property
    def column_width(self) -> int:
        """How many values a sample has in its columns: 0 where it has none."""
        return 0 if self._columns is None else int(self._columns.shape[1])

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names; a label is a position among them."""
        return self.manifest.classes

    @property
    def paths(self) -> list[str]:
        """Where each sample came from."""
        return list(map(self.table.paths.__getitem__, self.positions.tolist()))

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """Where in the cache each sample is: int64 (n,)."""
        return self._selection.positions

    @property
    def numbers(self) -> npt.NDArray[np.uint64]:
        """The samples' numbers, which are their keys in the shards: uint64 (n,)."""
        return self.table.numbers[self.positions]

    @property
    def variant(self) -> Variant:
        """Which variant is shown."""
        return self._selection.variant

    @property
    def labels(self) -> torch.Tensor:
        """All labels: int64 (n,), or float32 (n, m)."""
        return self.labels_of(np.arange(len(self)))

    def select(self, indices: Sequence[int] | Array | slice) -> CachedDataset:
        """Return a dataset of these samples of this one, in this order; nothing is read.

        `indices` are positions (negative ones count from the end), a mask of one bool a sample, or a slice; a sample
        may be chosen more than once. The dataset has an epoch of its own, which begins as this one's.
        Raises UsageError; OutOfRangeError, which is also an IndexError, for positions outside of the samples.
        """
        return self._derive(self._selection.select(indices), self._open_reader)

    def in_variant(self, variant: Variant) -> CachedDataset:
        """Return all samples of the cache in another variant. Both share files, and what was fetched from a URL."""
        reader = self._open_reader
        resolution, frequencies = self._resolution
        return CachedDataset(
            reader.cache, variant, in_memory=reader.in_memory, resolution=resolution, frequencies=frequencies
        )

    def in_resolution(self, resolution: int | tuple[int, int] | None) -> CachedDataset:
        """Return the same samples with images of another size, as `resolution` of the constructor has it.

        Files are shared; it is the dataset itself where that is its size. Raises UsageError for a size that cannot be
        made of the images.
        """
        if resolution == self.resolution:
            return self
        reader = self._open_reader
        shown = CachedDataset(reader.cache, self.variant, in_memory=reader.in_memory, resolution=resolution)
        derived = self._derive(dataclasses.replace(self._selection, manifest=shown.manifest), shown._open_reader)
        derived.manifest, derived._resolution = shown.manifest, shown._resolution
        return derived

    def where(self, condition: str) -> CachedDataset:
        """Return the samples that meet a condition such as "age > 60 and site == 'A'", as `matching` reads it.

        No code is run, and a missing value never matches. Raises UsageError.
        """
        from tpucache.store.filter import matching

        return self.select(matching(condition, self.table, self.positions, self.classes))

    def with_columns(self, values: Array) -> CachedDataset:
        """Return these samples with values of their own, float32 (n, width), under "columns": all items are dicts then.

        Raises UsageError where records have a field of that name.
        """
        if COLUMNS in self.names:
            raise UsageError(f"the records have a field {COLUMNS!r} already: columns cannot be inputs as well")
        whole = np.full((self.manifest.samples, values.shape[1]), np.nan, np.float32)
        whole[self.positions] = values
        derived = self._derive(self._selection, self._open_reader)
        derived._columns = whole
        return derived

    def with_soft_labels(self) -> CachedDataset:
        """Return these samples so that batches have, in place of labels, what `relabel` gave them as soft labels.

        That is float32 (n, classes): the probabilities times the sample's weight. It is the dataset itself where the
        cache has none. `labels` stay as they are. Raises FormatError for columns that are no soft labels.
        """
        if SOFT_LABEL not in self.table or SOFT_WEIGHT not in self.table:
            return self
        soft, weights = np.asarray(self.table[SOFT_LABEL]), np.asarray(self.table[SOFT_WEIGHT])
        shape = (self.manifest.samples, len(self.classes))
        if soft.shape != shape or weights.shape != shape[:1] or {soft.dtype.kind, weights.dtype.kind} != {"f"}:
            raise FormatError(f"{self.directory}: the soft labels do not fit its samples and classes: relabel it again")
        if not (np.isfinite(soft).all() and np.isfinite(weights).all() and soft.min() >= 0 and weights.min() >= 0):
            raise FormatError(f"{self.directory}: the soft labels are not all numbers from 0: relabel it again")
        derived = self._derive(self._selection, self._open_reader)
        derived._targets = (soft * weights[:, None]).astype(np.float32)
        return derived

    def with_standardised_labels(self, mean: Sequence[float], std: Sequence[float]) -> CachedDataset:
        """Return these samples so that batches have labels less `mean` and divided by `std`, a number for each column.

        That is float32 (n, m), and only the result is rounded: the samples table has float64. `labels` stay as they
        are. Raises UsageError unless labels are as many columns of values.
        """
        labels = self.table.labels
        if labels is None or labels.dtype.kind != "f" or labels.shape[1:] != (len(mean),) or len(mean) != len(std):
            raise UsageError(f"labels to standardise by {len(mean)} means are values in as many columns")
        derived = self._derive(self._selection, self._open_reader)
        derived._scale = np.array(mean, np.float64), np.array(std, np.float64)
        return derived

    def packed(self) -> CachedDataset:
        """Return the same samples with fields as their codecs pack them, for a device to finish.

        An image is then uint8 (n,), for `tpucache.ondevice.decoder`, where its codec has such a form, else as here.
        """
        reader = self._open_reader.packing()
        return self if reader.fields == self.record_fields else self._derive(self._selection, reader)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, a whole number from 0. Workers of a DataLoader see it, too, also those that persist."""
        self._epoch.set(to_integer("epoch", epoch, 0))
        self._unset_reads.set(_UNCOUNTED)

    def read_into(
        self, buffer: Buffer, indices: Array, epoch: int, chunk: int = 1, divide: Divide = undivided
    ) -> WaysRead:
        """Read samples into the first rows of a buffer, for a loader. Threads may call this, with a buffer each.

        `chunk` consecutive samples share a variant of an epoch; `divide` may let several threads do the work. Returns
        where the records were. Raises DamageError naming the shard when the cache's bytes are not what the manifest
        says.
        """
        return self._open_reader.read_into(buffer, self._rows(indices, epoch, chunk), keep=True, divide=divide)

    @property
    def records(self) -> int:
        """How many different records may be shown, in all epochs: they are numbered from 0."""
        return self._selection.records

    def record_numbers(self, indices: Array, epoch: int, chunk: int = 1) -> npt.NDArray[np.int64]:
        """Return the numbers of the records that an epoch shows of samples; nothing is read. `chunk` as in `read_into`.

        A record is one variant of one sample, which may have several indices.
        """
        return self._selection.record_numbers(indices, epoch, chunk)

    def record_indices(self, numbers: Array) -> npt.NDArray[np.int64]:
        """Return for each record the index of a sample that shows it."""
        return self._selection.record_indices(numbers)

    def read_records(self, buffer: Buffer, numbers: Array, divide: Divide = undivided) -> WaysRead:
        """Read records, given by their numbers, into the first rows of a buffer, as `read_into` reads samples.

        They are not kept in the host's memory: the caller keeps them elsewhere.
        """
        rows = self._selection.rows_of_records(self._open_reader.cache, numbers)
        return self._open_reader.read_into(buffer, rows, divide=divide)

    @property
    def can_visit(self) -> bool:
        """Whether records are the bytes of their fields, so that `visit` may use them where they are."""
        return self._open_reader.can_visit

    def visit(
        self, indices: Array, epoch: int, chunk: int, use: UseRecords, parts: Numbers, divide: Divide = undivided
    ) -> WaysRead:
        """Call `use` with the records of samples where they are; only `parts` of them are needed: see RecordReader.

        The other arguments, and what is returned and raised, are those of `read_into`.
        """
        return self._open_reader.visit(self._rows(indices, epoch, chunk), use, parts, divide=divide)

    def field_batches(self, name: str) -> Iterator[Array]:
        """Iterate over one field of all samples, in their order, in batches (n, *shape) of at most 4 MB, or one sample.

        Of the records' other fields nothing is read. Raises UsageError where there is no such field, and DamageError.
        """
        rows = self._rows(np.arange(len(self)), self.epoch)
        shown = {field.name: at for at, field in enumerate(self.manifest.fields) if field.view is not None}
        if name not in shown:
            return field_batches(self._open_reader.cache, rows, name)
        return self._shown_batches(rows, shown[name])

    def _shown_batches(self, rows: Numbers, field: int) -> Iterator[Array]:
        """Yield a field whose stored size is not the one that is shown."""
        count = max(1, _BATCH_BYTES // max(1, self.record_fields[field].nbytes))
        for first in range(0, len(rows), count):
            some = rows[first : first + count]
            buffer = Buffer(self.record_fields, len(some))
            self._open_reader.read_into(buffer, some)
            yield buffer.arrays[field]

    def prepare(self, threads: int) -> None:
        """Prepare for a loader that reads with this number of threads; what would take long is done while it reads."""
        if self._open_reader.cache.reader.arriving is not None:
            return
        first = self._rows(np.arange(min(len(self), self._open_reader.most_to_prepare)), self.epoch)
        self._open_reader.prepare(self._selection.records, self._selection.shards, first, threads)

    def expect(self, owner: object, windows: Windows, further: Windows | None = None) -> None:
        """Say what an owner will read, far ahead and in its order: it is fetched from a URL, or built, beforehand.

        `further` gives the same again and later epochs: of a cache that is larger than the disk, it decides what of it
        is kept there. Where all is here already, nothing is done.
        """
        reader = self._open_reader
        arriving = reader.cache.reader.arriving
        if arriving is None:
            return
        bands = len(self.manifest.layouts)

        def numbers(asked: Windows) -> Iterator[Numbers]:
            needed = (reader.not_in_memory(self._rows(*window)) for window in asked())
            return (reader.in_all_bands(each) for each in needed)

        further_numbers = None if further is None else functools.partial(numbers, further)
        arriving.expect(owner, self._selection.variants, bands, functools.partial(numbers, windows), further_numbers)

    def hint(self, indices: Array, epoch: int, chunk: int = 1) -> None:
        """Ask the kernel to have these samples in memory when they are read."""
        self._open_reader.hint(self._rows(indices, epoch, chunk))

    @property
    def buffer_pools(self) -> BufferPools:
        """The buffers of batches, which all loaders of this dataset share."""
        return self._open_reader.pools

    def labels_of(self, indices: Array) -> torch.Tensor:
        """Return the labels of samples: int64 (n,), or float32 (n,) or (n, m); -1 where the cache has none.

        Raises FormatError.
        """
        labels, positions = self.table.labels, self._selection.positions_of(indices)
        if labels is None:
            return to_tensor(np.full(len(positions), NO_LABEL))
        return to_tensor(labels[positions].astype(np.float32 if labels.dtype.kind == "f" else np.int64))

    def values_of(self, indices: Array) -> dict[str, torch.Tensor]:
        """Return what samples have besides their records: the columns, if there are any, and the label."""
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
        """Return the batch of these samples, whose fields were read into `arrays`, in the shape that users see."""
        return self.join(arrays, self.values_of(indices))

    def join(self, arrays: Sequence[Array], values: Mapping[str, torch.Tensor]) -> Item:
        """Return fields and the values of `values_of` as one batch: (images, labels), or a dict of tensors."""
        fields = [self.as_tensor(name, array) for name, array in zip(self.names, arrays, strict=True)]
        if self.names == [IMAGE] and [*values] == [LABEL]:
            return fields[0], values[LABEL]
        return {**dict(zip(self.names, fields, strict=True)), **values}

    @staticmethod
    def as_tensor(name: str, array: Array) -> torch.Tensor:
        """Return an array (batch, …) as a tensor over the same memory; images that are not packed: (batch, C, H, W)."""
        return to_tensor(array.transpose(0, 3, 1, 2) if name == IMAGE and array.ndim == 4 else array)

    def _derive(self, selection: Selection, reader: RecordReader) -> CachedDataset:
        """Return a dataset of a selection, with an epoch of its own; everything else is as here."""
        derived = object.__new__(type(self))
        derived.__dict__.update(self.__getstate__())
        derived._selection, derived._digest, derived._reader = selection, None, reader
        derived._epoch = SharedNumber(self.epoch, is_shared=self.variant == "epoch")
        derived._unset_reads = SharedNumber(is_shared=self.variant == "epoch")
        return derived

    def _items(self, indices: Sequence[int]) -> list[Item]:
        """Read samples and return each in the shape that users see."""
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
        """Warn once if all workers together have read more than an epoch's samples, and the epoch was never set."""
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
