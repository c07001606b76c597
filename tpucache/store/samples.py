"""The samples table, `samples.npz`: one row per sample. A column is read when it is first used."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, overload

import numpy as np
import numpy.typing as npt

from tpucache.errors import DamageError, FormatError
from tpucache.native import Array
from tpucache.store.fields import LABEL
from tpucache.store.files import MOST_ASKED, ask_for, open_file, parse_npy, refuse_too_many_files
from tpucache.store.format import most_table_bytes

#: The class number of a sample without a label.
NO_LABEL: Final = -1

# Columns that warmup adds for each image: the source's width and height as displayed, the file's real type ("jpeg",
# "png", "array", ...), whether EXIF rotates it (0 or 1), and mean and standard deviation of the clean record's values.
WIDTH: Final = "image_width"
HEIGHT: Final = "image_height"
TYPE: Final = "image_type"
TURNED: Final = "image_turned"
MEAN: Final = "image_mean"
STD: Final = "image_std"
IMAGE_COLUMNS: Final = (WIDTH, HEIGHT, TYPE, TURNED, MEAN, STD)

_CHUNK_BYTES: Final = 1 << 20

# The exceptions that zipfile raises for damaged archives: a flipped bit may claim encryption or a later version.
_BROKEN: Final = (OSError, zipfile.BadZipFile, RuntimeError, NotImplementedError, KeyError, EOFError, ValueError)


class Strings(Sequence[str]):
    """Many strings: `data` has their UTF-8 bytes end to end, `ends` the offset of the end of each.

    File names may contain bytes that are not UTF-8: these are kept as surrogate escapes (PEP 383).
    """

    def __init__(self, data: npt.NDArray[np.uint8], ends: npt.NDArray[np.int64]) -> None:
        self.data = data
        self.ends = ends

    @classmethod
    def pack(cls, items: Sequence[str]) -> Strings:
        encoded = [item.encode("utf-8", "surrogateescape") for item in items]
        ends = np.cumsum([len(item) for item in encoded], dtype=np.int64)
        return cls(np.frombuffer(b"".join(encoded), np.uint8), ends)

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        start = self.ends[position - 1] if position else 0
        return self.data[start : self.ends[position]].tobytes().decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        data, ends = self.data.tobytes(), self.ends.tolist()
        bounds = zip([0, *ends], ends, strict=False)
        if data.isascii():
            text = data.decode()
            return (text[start:end] for start, end in bounds)
        return (data[start:end].decode("utf-8", "surrogateescape") for start, end in bounds)


Column = Array | Strings


class SampleTable(Mapping[str, Column]):
    """The columns of a cache's samples by name, loaded on first use.

    Every table has `number` (uint64: the sample's key in the shards) and `path` (in the source), and, if there are
    labels, `label`: integer class numbers or float vectors. Warmup adds `source_bytes` and, for images, IMAGE_COLUMNS.
    Other columns come from the source unchanged.
    """

    def __init__(self, path: str | Path, samples: int, sha256: str | None = None, classes: int = 0) -> None:
        """Open the table of a cache with this many samples.

        The file is compared with `sha256`, if given, before a column is read. Integer labels must be below `classes`,
        the number of classes, unless that is 0.
        """
        self._path = Path(path)
        self._samples = samples
        self._classes = classes
        self._sha256 = sha256
        self._proven: tuple[int, ...] = ()  # the file's status when its SHA-256 was last compared
        self._loaded: dict[str, Column] = {}
        #: The bytes and the status of a small file: storage may take long to open it again for each column.
        self._whole: tuple[bytes, os.stat_result] | None = None
        with self._archive() as (*_, archive):
            members = archive.infolist()
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise FormatError(f"{path} holds compressed columns, which tpucache does not write: copy the cache again")
        names = [member.filename.removesuffix(".npy") for member in members]
        wrong = next((name for name in names if not name.isprintable()), None)
        if wrong is not None:
            raise FormatError(
                f"{path} holds a column called {wrong!r:.100}, which tpucache does not write: copy the cache again"
            )
        if len(set(names)) < len(names) or any(member.file_size != member.compress_size for member in members):
            raise FormatError(f"{path} holds a column twice, or states a wrong size for one: copy the cache again")
        self._names = [name.removesuffix(".ends") for name in names if not name.endswith(".bytes")]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> Column:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaded": {}, "_proven": (), "_whole": None}

    @property
    def paths(self) -> Strings:
        column = self._required("path")
        if not isinstance(column, Strings):
            raise FormatError(f"{self._path}: the paths are not strings: copy the cache again")
        return column

    @property
    def numbers(self) -> Array:
        """Each sample's number, which is its key in the shards: uint64 (n,), ascending in each block."""
        numbers = self._array("number")
        if numbers.dtype != np.dtype("<u8") or numbers.ndim != 1 or len(np.unique(numbers)) < len(numbers):
            raise FormatError(f"{self._path}: the numbers of the samples are not unique uint64: copy the cache again")
        return numbers

    @property
    def labels(self) -> Array | None:
        """The labels: class numbers (n,) of an integer dtype, or float vectors (n, m); None if there are no labels."""
        return self._array(LABEL) if LABEL in self else None

    def _array(self, name: str) -> Array:
        column = self._required(name)
        if isinstance(column, Strings):
            raise FormatError(f"{self._path}: column {name!r} should be numbers, not strings: copy the cache again")
        return column

    def _required(self, name: str) -> Column:
        if name not in self:
            raise FormatError(f"{self._path} lacks the column {name!r}: copy the cache again")
        return self[name]

    @contextlib.contextmanager
    def _archive(self, what: str = "") -> Iterator[tuple[BinaryIO, os.stat_result, zipfile.ZipFile]]:
        try:
            file, status = self._open()
            with file, zipfile.ZipFile(file) as archive:
                yield file, status, archive
        except FileNotFoundError as error:
            raise DamageError(
                f"{self._path} is missing: if the cache was relabelled or extended since it was opened, open it again; "
                "otherwise copy the cache again, or build it again"
            ) from error
        except _BROKEN as error:
            refuse_too_many_files(error)
            raise DamageError(f"{self._path}{what} cannot be read: {error!s:.300}. Copy the cache again") from error

    def _open(self) -> tuple[BinaryIO, os.stat_result]:
        if self._whole is not None:
            return io.BytesIO(self._whole[0]), self._whole[1]
        file = open_file(self._path)
        status = os.fstat(file.fileno())
        if status.st_size > most_table_bytes(self._samples):
            file.close()
            raise FormatError(
                f"{self._path} has {status.st_size:,} bytes, more than a table of {self._samples:,} samples has: copy "
                "the cache again"
            )
        ask_for(file.fileno(), 0, status.st_size)
        if status.st_size > _CHUNK_BYTES:
            return file, status
        with file:
            self._whole = file.read(), status
        return self._open()

    def _load(self, name: str) -> Column:
        try:
            with self._archive(f": column {name!r}") as (file, status, archive):
                self._prove(file, status)
                if f"{name}.ends.npy" in archive.namelist():
                    ends = parse_npy(archive.read(f"{name}.ends.npy"))
                    column: Column = _to_strings(parse_npy(archive.read(f"{name}.bytes.npy")), ends)
                else:
                    column = parse_npy(archive.read(f"{name}.npy"))
        except FormatError as error:
            raise FormatError(f"{self._path}: column {name!r}: {error}. Copy the cache again") from error
        if isinstance(column, np.ndarray) and (column.dtype.kind not in "biuf" or not column.ndim):
            raise FormatError(f"{self._path}: column {name!r} does not hold plain numbers: copy the cache again")
        if len(column) != self._samples:
            raise FormatError(
                f"{self._path}: column {name!r} has {len(column)} rows, not {self._samples}: copy the cache again"
            )
        if name == LABEL and isinstance(column, np.ndarray):
            try:
                check_labels(column, self._classes)
            except FormatError as error:
                raise FormatError(f"{self._path}: {error}. Copy the cache again, or build it again") from error
        return column

    def _prove(self, file: BinaryIO, status: os.stat_result) -> None:
        state = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
        if self._sha256 is None or state == self._proven:
            return
        file.seek(0)
        digest = hashlib.sha256()
        while chunk := file.read(_CHUNK_BYTES):
            if status.st_size > MOST_ASKED:
                ask_for(file.fileno(), file.tell() - _CHUNK_BYTES + MOST_ASKED, _CHUNK_BYTES)
            digest.update(chunk)
        if digest.hexdigest() != self._sha256:
            raise DamageError(f"{self._path} is not the file that the manifest lists: copy the whole cache again")
        self._proven = state


def _to_strings(data: Array, ends: Array) -> Strings:
    plain = data.dtype == np.uint8 and ends.dtype == np.dtype("<i8") and data.ndim == ends.ndim == 1
    if not plain or np.any(np.diff(ends, prepend=0) < 0) or (ends[-1] if len(ends) else 0) != len(data):
        raise FormatError(
            "it does not hold strings: the offsets where they end must be int64 in ascending order, and the last one "
            "the number of bytes"
        )
    return Strings(data, ends)


def check_labels(labels: Array, classes: int) -> None:
    """Raise FormatError for class numbers out of range, and for values that int64 or float32 cannot hold."""
    if labels.dtype.kind == "b" or labels.dtype == np.float16:
        raise FormatError(f"labels are {labels.dtype}, not whole numbers, float32 or float64")
    if not labels.size:
        return
    if labels.dtype.kind == "f":
        with np.errstate(over="ignore"):
            is_lost = np.isfinite(labels) & ~np.isfinite(labels.astype(np.float32))
        if is_lost.any():
            raise FormatError(f"{int(is_lost.sum())} labels are beyond float32's range, such as {labels[is_lost][0]}")
        return
    low, high = int(labels.min()), int(labels.max())
    if high > np.iinfo(np.int64).max:
        raise FormatError(f"labels reach to {high}, beyond int64's range")
    if classes and labels.ndim == 1 and (low < NO_LABEL or high >= classes):
        raise FormatError(f"labels reach from {low} to {high}, but the cache has {classes} classes")


def encode_columns(columns: Mapping[str, Column]) -> bytes:
    """Return the bytes of an .npz file, without pickles, with these columns. Equal columns give equal bytes."""
    arrays: dict[str, Array] = {}
    for name, column in columns.items():
        if isinstance(column, Strings):
            arrays |= {f"{name}.bytes": column.data, f"{name}.ends": column.ends}
        else:
            arrays[name] = column
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            member = io.BytesIO()
            np.lib.format.write_array(member, np.ascontiguousarray(array), (1, 0), allow_pickle=False)
            # ZipInfo's default date, 1980-01-01, makes equal tables equal byte by byte; so does Unix as the system.
            info = zipfile.ZipInfo(f"{name}.npy")
            info.create_system = 3
            archive.writestr(info, member.getvalue())
    return target.getvalue()
