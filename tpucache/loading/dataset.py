"""CachedDataset: a finished cache as a plain map-style PyTorch dataset."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from tpucache.errors import FormatError, UsageError
from tpucache.loading.find import locate
from tpucache.loading.held import Held
from tpucache.loading.pool import Buffer
from tpucache.loading.sampler import epoch_variants
from tpucache.machine import available_memory
from tpucache.store.codec import decode_into
from tpucache.store.manifest import Manifest
from tpucache.store.reader import ShardReader, open_index
from tpucache.store.samples import SampleTable, open_samples

Array = npt.NDArray[Any]
Item = Any  # (image, label), or a dict of tensors where a record has more fields than an image
InMemory = bool | Literal["auto"]

IMAGE: Final = "image"
NO_LABEL: Final = -1
_SHARE: Final = 3  # "auto" takes a third of the free memory at most: there may be a second dataset, to validate on


class CachedDataset(Dataset[Item]):
    """The samples of a cache: `image, label = dataset[0]`.

    The image is a uint8 tensor (channels, height, width), channels last in memory; the label an int64 scalar, a
    float32 vector, or -1 where the cache has no labels. A cache with fields beside the image gives a dict of tensors
    instead, the label under "label".

    It works under DataLoader with any kind of worker, Subset and everything else that takes a dataset. It pickles
    small and opens files in the process that reads them.
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
        variant each epoch (see `set_epoch`), all K in K epochs. `indices` keeps only these samples, in this order.

        `in_memory` keeps each record, decoded, once it is read; "auto" does where all of them take at most a third of
        the memory that is free. Each process that reads keeps its own: it is meant for CachedLoader's threads.

        Raises NotACacheError, FormatError or DamageError for the cache, UsageError for the other arguments.
        """
        self.directory = locate(cache)
        self.manifest = Manifest.load(self.directory)
        self.table: SampleTable = open_samples(self.directory, self.manifest.samples, self.manifest.table.name)
        self._variant: int | Literal["epoch"] = variant
        self._check_variant()
        self._epoch = torch.tensor(0)
        self._share_epoch()
        self._positions: npt.NDArray[np.int64] | None = None
        if indices is not None:
            self._positions = _check_positions(indices, self.manifest.samples)
        self._layout = self.manifest.layout
        self._reader = ShardReader(self.directory, self.manifest.shards)
        self._in_memory = in_memory
        self._held = self._hold()
        self._index  # opened here, so that a damaged cache is told of at once  # noqa: B018

    def __len__(self) -> int:
        return self.manifest.samples if self._positions is None else len(self._positions)

    def __getitem__(self, index: int) -> Item:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Item]:
        """Return several samples, as torch's fetcher asks for a whole batch. Raises IndexError."""
        positions = np.array(indices, np.int64)
        positions[positions < 0] += len(self)
        if len(positions) and not (positions.min() >= 0 and positions.max() < len(self)):
            raise IndexError(f"indices {indices} of {len(self)} samples")
        buffer = Buffer(self._layout.fields, len(positions))
        self.read_into(buffer, positions, self.epoch)
        tensors = [self.as_tensor(name, array) for name, array in zip(self.names, buffer.arrays, strict=True)]
        columns = [*tensors, self.labels_of(positions)]
        return [self.pack(row) for row in zip(*columns, strict=True)]

    def __getstate__(self) -> dict[str, Any]:
        derived = ("_index", "_labels", "_scratch", "digest")
        return {key: value for key, value in self.__dict__.items() if key not in derived}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._share_epoch()

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
        return self._held is not None

    @property
    def mean_record_bytes(self) -> int:
        """Bytes a record takes on disk, on average."""
        shards = self.manifest.shards
        return max(1, sum(entry.bytes for entry in shards) // max(1, self.manifest.records))

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256, in hexadecimal, of all that decides the samples: records, labels, selection and its order.

        Only the variants in use count, so adding variants to a cache leaves the digest of variant 0 as it is. Loaders
        and runs are resumed only where it is the same.
        """
        used = [v for v in self.manifest.variants if v == self._variant or (self._variant == "epoch" and v)]
        shards = sorted((entry for entry in self.manifest.shards if entry.variant in used), key=lambda e: e.name)
        facts = {
            "variant": self._variant,
            "fields": [dataclasses.asdict(field) for field in self.manifest.fields],
            "classes": self.manifest.classes,
            "shards": [(entry.name, entry.first, entry.records, entry.records_sha256) for entry in shards],
        }
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
        labels = self._labels if self._labels is not None else np.empty(0)
        for array in (labels, np.empty(0) if self._positions is None else self._positions):
            digest.update(f"{array.dtype.str} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names; a label is a position among them."""
        return self.manifest.classes

    @property
    def paths(self) -> list[str]:
        """Where each sample came from."""
        paths = self.table.paths
        return [paths[int(position)] for position in self._cache_positions(np.arange(len(self)))]

    @property
    def numbers(self) -> npt.NDArray[np.uint64]:
        """The samples' numbers, which are their keys in the shards: uint64 (n,)."""
        return self.table.numbers[self._cache_positions(np.arange(len(self)))]

    @property
    def variant(self) -> int | Literal["epoch"]:
        """Which variant is shown."""
        return self._variant

    @property
    def labels(self) -> torch.Tensor:
        """All labels: int64 (n,), or float32 (n, m)."""
        return self.labels_of(np.arange(len(self)))

    def select(self, indices: Sequence[int] | Array) -> CachedDataset:
        """Return a dataset of these samples of this one, in this order. Raises UsageError."""
        chosen = self._cache_positions(_check_positions(indices, len(self)))
        selected = CachedDataset(self.directory, self._variant, chosen, in_memory=self._in_memory)
        selected.set_epoch(self.epoch)
        return selected

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch it is, for variant="epoch". Workers of a DataLoader see it, too, also those that persist."""
        self._epoch.fill_(epoch)

    def read_into(self, buffer: Buffer, indices: Array, epoch: int) -> None:
        """Read samples into the first rows of a buffer. Threads may call this at once, with a buffer each.

        Raises DamageError naming the shard when the cache's bytes are not what the manifest says.
        """
        if self._held is None:
            self._read(self._rows(indices, epoch), buffer, np.arange(len(indices)))
            return
        slots = self._slots(indices, epoch)
        missing = self._held.missing(slots)
        if len(missing):
            self._read(self._rows(indices[missing], epoch), self._held, slots[missing])
            self._held.fill(slots[missing])
        self._held.gather(slots, buffer.arrays)

    def hint(self, indices: Array, epoch: int) -> None:
        """Ask the kernel to have these samples in memory when they are read."""
        if self._held is not None:
            indices = indices[self._held.missing(self._slots(indices, epoch))]
        self._reader.hint(self._rows(indices, epoch))

    def labels_of(self, indices: Array) -> torch.Tensor:
        """Return the labels of samples: int64 (n,), or float32 (n, m)."""
        if self._labels is None:
            return torch.full((len(indices),), NO_LABEL)
        labels = self._labels[self._cache_positions(indices)]
        return torch.from_numpy(labels.astype(np.float32 if labels.dtype.kind == "f" else np.int64))

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

    def _share_epoch(self) -> None:
        """Keep the epoch where worker processes see it change; only a turning variant needs that."""
        if self._variant == "epoch":
            self._epoch.share_memory_()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    @functools.cached_property
    def _index(self) -> Array:
        return open_index(self.directory, self.manifest)

    @functools.cached_property
    def _labels(self) -> Array | None:
        return self.table.labels

    @functools.cached_property
    def _scratch(self) -> _Scratch:
        return _Scratch()

    @functools.cached_property
    def _distinct(self) -> tuple[int, npt.NDArray[np.int64] | None]:
        """How many samples there are when each counts once, and which of them each position is; None: as they are."""
        if self._positions is None:
            return self.manifest.samples, None
        distinct, which = np.unique(self._positions, return_inverse=True)
        return len(distinct), which.reshape(-1)

    def _read(self, rows: Array, target: Buffer | Held, places: npt.NDArray[np.int64]) -> None:
        """Read the record of each index row into its place."""
        if self._layout.fixed:
            self._reader.scatter(rows, target.views(places))
            return
        records = self._scratch.slices(rows["length"].tolist())
        self._reader.scatter(rows, [[record] for record in records])
        for place, record in zip(places.tolist(), records, strict=True):
            parts = self._layout.split(record)
            for field, part, array in zip(self._layout.fields, parts, target.arrays, strict=True):
                decode_into(field, part, array[place])

    def _slots(self, indices: Array, epoch: int) -> npt.NDArray[np.int64]:
        """Return where the records that an epoch shows are kept in memory: variant after variant."""
        samples, which = self._distinct
        slots: npt.NDArray[np.int64] = indices if which is None else which[indices]
        if self._variant != "epoch":
            return slots
        return slots + (epoch_variants(self._cache_positions(indices), epoch, self.manifest.augmented) - 1) * samples

    def _hold(self) -> Held | None:
        """Return the memory to keep records in, or None where they stay in their files. Raises UsageError."""
        if not self._in_memory:
            return None
        records = self._distinct[0] * (self.manifest.augmented if self._variant == "epoch" else 1)
        needs, free = records * self._layout.nbytes, available_memory()
        if self._in_memory == "auto" and needs * _SHARE > free:
            return None
        if needs > free:
            raise UsageError(
                f"{records:,} records in memory take {needs / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB are free: "
                'leave in_memory out, or say "auto"'
            )
        return Held(self._layout.fields, records)

    def _rows(self, indices: Array, epoch: int) -> Array:
        positions = self._cache_positions(indices)
        rows: Array = self._index[self._run_starts(positions, epoch) + positions]
        return rows

    def _cache_positions(self, indices: Array) -> npt.NDArray[np.int64]:
        return indices if self._positions is None else self._positions[indices]

    def _run_starts(self, positions: Array, epoch: int) -> Any:
        """Return where in the index the run of each sample's variant starts."""
        if self._variant != "epoch":
            return self.manifest.variants.index(self._variant) * self.manifest.samples
        clean = len(self.manifest.variants) - self.manifest.augmented
        chosen = epoch_variants(positions, epoch, self.manifest.augmented)
        return (chosen - 1 + clean) * self.manifest.samples

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


class _Scratch(threading.local):
    """Memory for the encoded records of a batch, kept from one to the next: new memory is cleared before it is read."""

    def __init__(self) -> None:
        self._block = memoryview(b"")

    def slices(self, lengths: Sequence[int]) -> list[memoryview]:
        """Return memory of these lengths, side by side; the next call of the same thread takes it back."""
        ends = list(itertools.accumulate(lengths))
        if ends and ends[-1] > len(self._block):
            self._block = np.empty(ends[-1] + ends[-1] // 4, np.uint8).data
        return [self._block[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def _check_positions(indices: Sequence[int] | Array, samples: int) -> npt.NDArray[np.int64]:
    positions = np.array(indices, np.int64).reshape(-1)
    if len(positions) and not (positions.min() >= 0 and positions.max() < samples):
        raise UsageError(f"indices reach from {positions.min()} to {positions.max()}, of {samples} samples")
    return positions
