"""CachedDataset: a finished cache as a plain map-style PyTorch dataset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from tpucache.errors import FormatError, UsageError
from tpucache.loading.arguments import to_integer
from tpucache.loading.digest import digest_of
from tpucache.loading.find import locate
from tpucache.loading.indices import integer_positions, is_single, to_positions
from tpucache.loading.labels import check_labels, to_tensor
from tpucache.loading.memory import RecordMemory
from tpucache.loading.pool import Buffer
from tpucache.loading.sampler import epoch_variants
from tpucache.loading.scratch import Scratch
from tpucache.machine import available_memory
from tpucache.store.cache import Cache
from tpucache.store.codecs import decode_into
from tpucache.store.field_reader import read_field
from tpucache.store.index import Numbers
from tpucache.store.manifest import Manifest, ShardEntry
from tpucache.store.samples import SampleTable

Array = npt.NDArray[Any]
Item = Any  # (image, label), or a dict of tensors where a record has more fields than an image
InMemory = bool | Literal["auto"]
Self = TypeVar("Self", bound="CachedDataset")

IMAGE: Final = "image"
_SHARE: Final = 3  # "auto" takes a third of the free memory at most: there may be a second dataset, to validate on
_FIELD_BATCH_BYTES: Final = 4 << 20


@dataclass(frozen=True)
class _Opened:
    """What all datasets selected from one another share; its files close when the last of them is closed or gone."""

    cache: Cache
    memory: RecordMemory


class CachedDataset(Dataset[Item]):
    """The samples of a cache: `image, label = dataset[0]`.

    The image is a uint8 tensor (channels, height, width), channels last in memory; the label an int64 scalar, a
    float32 vector, or -1 where the cache has no labels. A cache with fields beside the image gives a dict of tensors
    instead, the label under "label".

    `dataset[2:5]`, `dataset[[4, 0, -1]]` and `dataset[mask]` are datasets of these samples, as slices, lists and masks
    of a numpy array are arrays; nothing is read for that (see `select`).

    It works under DataLoader with any kind of worker, Subset and everything else that takes a dataset. It pickles
    small and opens files in the process that reads them. `close`, or leaving a `with` block, lets go of its files and
    of its records in memory; all that was selected from one dataset shares them.
    """

    def __init__(
        self,
        cache: str | Path,
        variant: int | Literal["epoch"] = 0,
        indices: Sequence[int] | Array | None = None,
        *,
        in_memory: InMemory = False,
    ) -> None:
        """Open a cache; no shard is opened before it is read.

        `cache` is its folder, or "kaggle:slug", which is looked for where such datasets are mounted (see `find_cache`).

        `variant` 0 is the clean image, 1 to K the augmented ones; "epoch" shows every sample another augmented
        variant each epoch (see `set_epoch`), all K in K epochs.

        `indices` keeps only these samples, in this order: positions from 0, or a mask of one bool a sample. Negative
        ones are refused here, because -1 is how many tables say "not found".

        `in_memory` keeps each record, decoded, once it is read; "auto" does where all of them take at most a third of
        the memory that is free. Each process that reads keeps its own: it is meant for CachedLoader's threads.

        Raises NotACacheError, FormatError or DamageError for the cache, UsageError for the other arguments.
        """
        opened = Cache.open(locate(cache).absolute())  # files are opened later, perhaps from another working folder
        self.directory: Path = opened.directory
        self.manifest: Manifest = opened.manifest
        self.table: SampleTable = opened.samples
        self._variant: int | Literal["epoch"] = variant
        self._check_variant()
        self._has_checked_labels = False
        self._digest: str | None = None
        self._epoch = torch.tensor(0)
        self._share_epoch()
        self._positions: npt.NDArray[np.int64] | None = None
        if indices is not None:
            self._positions = to_positions(indices, self.manifest.samples, from_end=False)
        self._layout = self.manifest.layout
        self._scratch = Scratch()
        self._in_memory = in_memory
        shown = len(self._variants) * self.manifest.samples
        opened.index  # one that is damaged is refused now  # noqa: B018
        self._opened: _Opened | None = _Opened(opened, RecordMemory(self._layout.fields, self.manifest.records, shown))
        self._memory = self._claim_memory()

    def __len__(self) -> int:
        return self.manifest.samples if self._positions is None else len(self._positions)

    def __getitem__(self, index: Any) -> Item:
        """Return one sample for a whole number, and for anything else the dataset that `select` gives.

        Raises IndexError outside of the samples, UsageError for what is no index.
        """
        if not is_single(index):
            return self.select(index)
        if overrides(self, "__getitem__"):
            return self._items([index])[0]
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Item]:
        """Return several samples, as torch's fetcher asks for a whole batch. Raises IndexError and UsageError."""
        if overrides(self, "__getitem__") and not overrides(self, "__getitems__"):
            return [self[index] for index in indices]  # what a subclass does to a sample, it does to a batch's
        return self._items(indices)

    def __getstate__(self) -> dict[str, Any]:
        # A copy, because another thread may read meanwhile, and set what is set on first use.
        return {key: value for key, value in self.__dict__.copy().items() if key != "_scratch"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._scratch = Scratch()
        self._share_epoch()
        if self._memory is not None and not self._memory.claim(list(self._rows_in_use()), available_memory()):
            self._memory = None  # this process may take less: records are read from their files

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files and the records in memory; reading raises UsageError from then on.

        What was selected from this dataset, or this one from, stays open. Closing again does nothing.
        """
        self._opened = self._memory = None
        self._scratch = Scratch()

    def __repr__(self) -> str:
        return (
            f"CachedDataset(samples={len(self)}, variant={self._variant!r}, "
            f"fingerprint={self.manifest.fingerprint[:12]!r})"
        )

    @property
    def epoch(self) -> int:
        """Which epoch it is, for variant="epoch"."""
        return int(self._epoch)

    @property
    def names(self) -> list[str]:
        """The names of a record's fields, in order."""
        return [field.name for field in self.manifest.fields]

    @property
    def in_memory(self) -> bool:
        """Whether each record is kept in memory once it is read."""
        return self._memory is not None

    @property
    def mean_record_bytes(self) -> int:
        """Bytes a record takes on disk, on average over the variants in use."""
        shards = self._shards
        return max(1, sum(entry.bytes for entry in shards) // max(1, sum(entry.records for entry in shards)))

    @property
    def digest(self) -> str:
        """SHA-256, in hexadecimal, of all that decides the samples: records, labels, selection and its order.

        Only the variants in use count, so adding variants to a cache leaves the digest of variant 0 as it is. Loaders
        and runs are resumed only where it is the same.
        """
        if self._digest is None:
            self._digest = digest_of(self.manifest, self._variant, self._shards, self._labels, self.positions)
        return self._digest

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names; a label is a position among them."""
        return self.manifest.classes

    @property
    def paths(self) -> list[str]:
        """Where each sample came from."""
        paths = self.table.paths
        return [paths[int(position)] for position in self.positions]

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """Where in the cache each sample is: int64 (n,)."""
        return self._cache_positions(np.arange(len(self)))

    @property
    def numbers(self) -> npt.NDArray[np.uint64]:
        """The samples' numbers, which are their keys in the shards: uint64 (n,)."""
        return self.table.numbers[self.positions]

    @property
    def variant(self) -> int | Literal["epoch"]:
        """Which variant is shown."""
        return self._variant

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
        chosen = self._cache_positions(to_positions(indices, len(self)))
        self._files  # a closed dataset is refused  # noqa: B018
        selected = object.__new__(type(self))
        selected.__dict__.update(self.__getstate__())
        selected._positions, selected._digest = chosen, None
        selected._scratch = Scratch()
        selected._epoch = self._epoch.clone()
        selected._share_epoch()
        selected._memory = selected._claim_memory()
        return selected

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, for variant="epoch". Workers of a DataLoader see it, too, also those that persist.

        Raises UsageError unless it is a whole number from 0.
        """
        self._epoch.fill_(to_integer("epoch", epoch, 0))

    def read_into(self, buffer: Buffer, indices: Array, epoch: int) -> None:
        """Read samples into the first rows of a buffer. Threads may call this at once, with a buffer each.

        Raises DamageError naming the shard when the cache's bytes are not what the manifest says.
        """
        cache, memory = self._files.cache, self._memory
        rows = self._rows(indices, epoch)
        if memory is None:
            self._read(cache, rows, buffer, np.arange(len(indices)))
            return
        slots = memory.slots(rows)
        missing = memory.missing(slots)
        if len(missing):
            self._read(cache, rows[missing], memory, slots[missing])
            memory.fill(slots[missing])
        memory.gather(slots, buffer.arrays)

    def field_batches(self, name: str) -> Iterator[Array]:
        """Yield one field of all samples, in their order, in batches (n, *shape) of at most 4 MB, or one sample.

        Of the records' other fields nothing is read. Raises UsageError where there is no such field, and DamageError.
        """
        field_bytes = max([field.nbytes for field in self._layout.fields if field.name == name], default=1)
        count = max(1, _FIELD_BATCH_BYTES // max(1, field_bytes))
        for start in range(0, len(self), count):
            indices = np.arange(start, min(start + count, len(self)))
            yield read_field(self._files.cache, self._rows(indices, self.epoch), name)

    def hint(self, indices: Array, epoch: int) -> None:
        """Ask the kernel to have these samples in memory when they are read."""
        cache, memory = self._files.cache, self._memory
        rows = self._rows(indices, epoch)
        if memory is not None:
            rows = rows[memory.missing(memory.slots(rows))]
        cache.reader.hint(cache.index[rows])

    def labels_of(self, indices: Array) -> torch.Tensor:
        """Return the labels of samples: int64 (n,), or float32 (n,) or (n, m). Raises FormatError."""
        return to_tensor(self._labels, self._cache_positions(indices))

    def pack(self, parts: Sequence[torch.Tensor]) -> Item:
        """Return a sample's or a batch's fields and label in the shape that users see."""
        if self.names == [IMAGE]:
            return tuple(parts)
        return dict(zip([*self.names, "label"], parts, strict=True))

    @staticmethod
    def as_tensor(name: str, array: Array) -> torch.Tensor:
        """Return an array (batch, …) as a tensor over the same memory; images become (batch, C, H, W)."""
        tensor = torch.from_numpy(array)
        return tensor.permute(0, 3, 1, 2) if name == IMAGE else tensor

    def _items(self, indices: Sequence[int]) -> list[Item]:
        """Read samples and return each in the shape that users see."""
        positions = integer_positions(indices, len(self))
        if not len(positions):
            return []
        buffer = Buffer(self._layout.fields, len(positions))
        self.read_into(buffer, positions, self.epoch)
        tensors = [self.as_tensor(name, array) for name, array in zip(self.names, buffer.arrays, strict=True)]
        columns = [*tensors, self.labels_of(positions)]
        return [self.pack(row) for row in zip(*columns, strict=True)]

    def _share_epoch(self) -> None:
        """Keep the epoch where worker processes see it change; only a turning variant needs that."""
        if self._variant == "epoch":
            self._epoch.share_memory_()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    # Plain properties: cached ones hold a lock in Python 3.10 and 3.11, which a process forked meanwhile gets locked.
    @property
    def _labels(self) -> Array | None:
        labels = self.table.labels
        if not self._has_checked_labels:
            check_labels(labels, self.manifest.classes)
            self._has_checked_labels = True
        return labels

    @property
    def _shards(self) -> list[ShardEntry]:
        """The shards of the variants in use, in the order of their names."""
        used = self._variants
        return sorted((entry for entry in self.manifest.shards if entry.variant in used), key=lambda entry: entry.name)

    @property
    def _variants(self) -> tuple[int, ...]:
        """The variants in use, ascending."""
        if self._variant == "epoch":
            return tuple(variant for variant in self.manifest.variants if variant)
        return (self._variant,)

    @property
    def _files(self) -> _Opened:
        if self._opened is None:
            raise UsageError(f"this dataset of {self.directory} is closed: open another CachedDataset")
        return self._opened

    def _read(self, cache: Cache, rows: Numbers, target: Buffer | RecordMemory, places: npt.NDArray[np.int64]) -> None:
        """Read the records of rows of the index into their places."""
        found = cache.index[rows]
        if self._layout.is_plain:
            cache.reader.scatter(found, target.views(places))
            return
        records = self._scratch.slices(found["length"].tolist())
        cache.reader.scatter(found, [[record] for record in records])
        for place, record in zip(places.tolist(), records, strict=True):
            parts = self._layout.split(record)
            for field, part, array in zip(self._layout.fields, parts, target.arrays, strict=True):
                decode_into(field, part, array[place])

    def _claim_memory(self) -> RecordMemory | None:
        """Return the memory to keep records in, or None where they stay in their files. Raises UsageError."""
        if not self._in_memory:
            return None
        memory, runs = self._files.memory, list(self._rows_in_use())
        needed, free = memory.bytes_of(runs), available_memory() - memory.unfilled_bytes
        if self._in_memory == "auto" and needed * _SHARE > free:
            return None
        if needed <= free and memory.claim(runs, free):
            return memory
        if self._in_memory == "auto":
            return None
        raise UsageError(
            f"{sum(map(len, runs)):,} records in memory take {needed / 1e9:,.1f} GB, and {max(0, free) / 1e9:,.1f} GB "
            'are free: leave in_memory out, or say "auto"'
        )

    def _rows_in_use(self) -> Iterator[Numbers]:
        """Yield the index's rows of all records that may be shown, each once, variant by variant."""
        cache = self._files.cache
        positions = np.arange(self.manifest.samples) if self._positions is None else np.unique(self._positions)
        for variant in self._variants:
            yield cache.rows(variant, positions)

    def _rows(self, indices: Array, epoch: int) -> Numbers:
        """Return the index's rows of the records that an epoch shows of these samples."""
        cache, positions = self._files.cache, self._cache_positions(indices)
        if self._variant != "epoch":
            return cache.rows(self._variant, positions)
        variants = np.array(self._variants)
        return cache.rows(variants[epoch_variants(positions, epoch, len(variants)) - 1], positions)

    def _cache_positions(self, indices: Array) -> npt.NDArray[np.int64]:
        return indices if self._positions is None else self._positions[indices]

    def _check_variant(self) -> None:
        has = self.manifest.variants
        if self._variant == "epoch":
            if not self.manifest.augmented:
                raise UsageError(
                    f'variant="epoch" needs augmented variants, {self.directory} has only the clean one: '
                    "warm it up with --variants 1 or more"
                )
        elif self._variant not in has or isinstance(self._variant, bool):
            raise UsageError(f'{self.directory} has variants {has} and "epoch", not {self._variant!r}')
        if any(not field.shape and field.codec == "bytes" for field in self.manifest.fields):
            raise FormatError(f"{self.directory} holds a field of bytes, whose length varies: it has no tensor")


def overrides(dataset: CachedDataset, method: str) -> bool:
    """Return whether the dataset is of a subclass with a method of its own of this name."""
    return getattr(type(dataset), method) is not getattr(CachedDataset, method)
