"""Samples in TFRecord files, one a record: a serialised `tf.train.Example`. TensorFlow is not needed."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import DependencyError, SampleError, SourceError
from tpucache.progress import Progress
from tpucache.store.files import open_file
from tpucache.warmup.sources.base import Item, Listing, Sample, SourceKind
from tpucache.warmup.sources.patterns import find_files, has_wildcard, split_pattern
from tpucache.warmup.sources.table import TableOptions
from tpucache.warmup.sources.tfrecords.example import are_marks, read_example

#: What a TFRecord file is called; `-00000-of-00010` may follow.
_NAMES: Final = re.compile(r"(\.(tfrec|tfrecord|tfrecords)(-\d+-of-\d+)?|-\d{5}-of-\d{5})$", re.IGNORECASE)

# A record is its length (u64), the length's checksum (u32), its data, and the data's checksum (u32), little-endian.
_HEADER: Final = 12
_FRAME: Final = 16

_MOST_WALKED: Final = 64
#: The bounds of files by path, size and time of change, the latest last.
_walked: dict[tuple[Path, int, int], npt.NDArray[np.int64]] = {}
_lock: Final = threading.Lock()  # a Dask worker has several threads


class TFRecordSource:
    """The records of TFRecord files, file by file in the order of their names' bytes; compressed files are not read."""

    def __init__(self, pattern: str | Path, options: TableOptions | None = None) -> None:
        """Take a file, or a pattern with the wildcards `*`, `**`, `?` and `[…]`, and what features mean."""
        self._options = options or TableOptions()
        self._root, self._pattern = split_pattern(pattern)

    def __repr__(self) -> str:
        return str(self._root / self._pattern)

    def list(self) -> Listing:
        """Return all records as samples, called `file#record`.

        Several label features are classes of their names where the first record has a whole number, 0 or 1, in each.

        Raises SourceError naming file and offset for a file that is broken or cut off, DependencyError.
        """
        samples: list[Sample] = []
        with Progress(None, "list", "records", is_brief=True) as progress:
            for name in _find(self._root, self._pattern):
                bounds = _bounds_of(self._root / name, progress.advance).tolist()
                samples += [
                    Sample(len(samples) + record, f"{name}#{record}", None, end - start - _FRAME)
                    for record, (start, end) in enumerate(itertools.pairwise(bounds))
                ]
        if not samples:
            raise SourceError(f"{self._root / self._pattern} holds no records")
        return Listing(samples, self._classes(samples))

    def load(self, sample: Sample) -> Item:
        """Return a record's content.

        Raises SampleError when its data is damaged, is no Example, or has features that cannot be kept.
        """
        return read_example(self._data(sample.path), sample.path, self._options)

    def _classes(self, samples: Sequence[Sample]) -> tuple[str, ...]:
        if len(self._options.label_cols) < 2:
            return ()
        for sample in samples:
            with contextlib.suppress(SampleError):
                marks = are_marks(self._data(sample.path), sample.path, self._options.label_cols)
                return self._options.label_cols if marks else ()
        return ()

    def _data(self, name: str) -> bytes:
        """Return the data of the record of that name, verified. Raises SampleError."""
        file_name, _, record = name.rpartition("#")
        path, number = self._root / file_name, int(record)
        try:
            bounds = _bounds_of(path)[number : number + 2].tolist()
            with open_file(path) as file:
                file.seek(bounds[0])
                frame = file.read(bounds[1] - bounds[0])
        except IndexError as error:
            raise SampleError(name, "is no longer in its file, which holds fewer records now") from error
        except (OSError, SourceError) as error:
            raise SampleError(name, f"cannot be read any more: {error}") from error
        data = frame[_HEADER:-4]
        if not _intact(data, frame[-4:]):
            raise SampleError(name, "is damaged: its data does not match its checksum")
        return data


def _find(root: Path, pattern: str) -> list[str]:
    """Return the names, relative to the root, of the files that a pattern matches, in order. Raises SourceError."""
    names = find_files(root, pattern)
    for name in names:
        if not _NAMES.search(name.name):
            raise SourceError(
                f"{root / name} is not called .tfrec, .tfrecord or .tfrecords: "
                "give a pattern of such files alone, decompressed where they were compressed"
            )
    return [name.as_posix() for name in names]


def _bounds_of(path: Path, advance: Callable[[int], object] = lambda records: None) -> npt.NDArray[np.int64]:
    """Return where each record of a file begins, and where the last ends: int64 (records + 1,). Raises SourceError.

    A file is walked through once a process, as long as it does not change; `advance` is called with each record then.
    """
    try:
        status = path.stat()
        key = (path, status.st_size, status.st_mtime_ns)
        with _lock:
            if key not in _walked:
                _walked[key] = _walk(path, status.st_size, advance)
                while len(_walked) > _MOST_WALKED:
                    del _walked[next(iter(_walked))]
            return _walked[key]
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror}") from error


def _walk(path: Path, size: int, advance: Callable[[int], object]) -> npt.NDArray[np.int64]:
    """Walk through a file from length to length."""
    bounds = [0]
    with open_file(path) as file:
        while (start := bounds[-1]) < size:
            file.seek(start)
            header = file.read(_HEADER)
            end = start + _FRAME + int.from_bytes(header[:8], "little")
            if len(header) == _HEADER and not _intact(header[:8], header[8:]):
                raise SourceError(f"{path}, offset {start}: {_what_else(start, header)}")
            if len(header) < _HEADER or end > size:
                raise SourceError(f"{path}, offset {start}: the record is cut off: bring the whole file of it")
            bounds.append(end)
            advance(1)
    return np.array(bounds, np.int64)


def _what_else(start: int, header: bytes) -> str:
    """Return what is wrong with a header that does not match its checksum."""
    gzip = header[:2] == b"\x1f\x8b"
    zlib = header[0] == 0x78 and int.from_bytes(header[:2], "big") % 31 == 0
    if start == 0 and (gzip or zlib):
        return f"the file is compressed ({'gzip' if gzip else 'zlib'}), which is not read: decompress it first"
    return "no record begins here, or its length is damaged: bring an undamaged TFRecord file"


def _intact(data: bytes, stored: bytes) -> bool:
    """Return whether data has the masked CRC-32C that is stored with it."""
    crc = _crc32c().value(data)
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    return bool(masked == int.from_bytes(stored, "little"))


@functools.cache
def _crc32c() -> Any:
    try:
        import google_crc32c
    except ImportError as error:
        raise DependencyError("TFRecord files need google-crc32c: `pip install google-crc32c`") from error
    return google_crc32c


def _is_tfrecord(source: str | Path) -> bool:
    path = Path(source)
    if path.exists():
        return path.is_file() and _NAMES.search(path.name.removesuffix(".gz")) is not None
    return has_wildcard(str(source))


KIND: Final = SourceKind(
    "TFRecord files (one, or a pattern such as 'train-*.tfrec')",
    _is_tfrecord,
    TFRecordSource,
    frozenset(("label_cols", "keep", "drop")),
)
