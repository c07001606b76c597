"""ShardWriter: records in key order into one LMDB file, which is synced, verified, then renamed into place."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import struct
import zlib
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple

import lmdb
import numpy as np
import numpy.typing as npt

from tpucache.errors import BuildError, UsageError
from tpucache.store.files import pages
from tpucache.store.files.atomic import rename_durably
from tpucache.store.files.reading import sha256_file
from tpucache.store.format import INDEX_DTYPE, MAX_NUMBER, MAX_RECORD_BYTES, encode_key

_BATCH_BYTES: Final = 8 << 20  # of records in one transaction
_MAP_STEP: Final = 64 << 20
_RECORD_HEAD: Final = struct.Struct("<QI")

# py-lmdb 3 bundles two engines whose files do not understand each other; every client reads those of 0.9.
_ENGINE: Final[dict[str, Any]] = {"lib_version": 0} if int(lmdb.__version__.split(".")[0]) >= 3 else {}


class ShardInfo(NamedTuple):
    """A finished shard: what the manifest and the index say about it. Its rows have shard 0: the index numbers them."""

    bytes: int
    sha256: str
    records_sha256: str
    rows: npt.NDArray[Any]


class ShardWriter:
    """Writes one shard into a temporary file; `seal` verifies it and gives it its name.

    The same records in the same order make the same bytes: the map size and the transactions follow from the records
    alone, and unused bytes are zero. Leaving the context without `seal` removes what was written.
    """

    def __init__(self, aside: Path) -> None:
        """Begin a shard in the temporary file `aside`, replacing what an interrupted run left. Raises BuildError."""
        self._path = aside
        self._batch: list[tuple[bytes, bytes]] = []
        self._batch_bytes = 0
        self._last_number = -1
        self._lengths: list[int] = []
        self._crcs: list[int] = []
        self._records = hashlib.sha256()
        self._env: lmdb.Environment | None = None
        try:
            aside.unlink(missing_ok=True)
            self._env = lmdb.open(
                str(aside),
                subdir=False,
                lock=False,
                map_size=_MAP_STEP,
                meminit=True,
                sync=False,  # seal() syncs once, before the rename that makes the file count
                max_dbs=0,
                **_ENGINE,
            )
        except (lmdb.Error, OSError) as error:
            raise self._failure(error) from error

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.discard()

    def append(self, number: int, record: bytes, crc32: int | None = None) -> None:
        """Add the record of a sample whose number is above all before it. Raises UsageError, BuildError.

        `crc32` is the record's checksum from when it was made, where that is known: `seal` compares the file with it.
        """
        self._open_env()
        if not number <= MAX_NUMBER:
            raise UsageError(f"{number} is not a sample number: they go up to {MAX_NUMBER}")
        if number <= self._last_number:
            raise UsageError(f"sample {number} comes after sample {self._last_number}: keys must ascend")
        if len(record) > MAX_RECORD_BYTES:
            raise UsageError(f"sample {number}: a record of {len(record):,} bytes; 2 GiB is the limit")
        self._last_number = number
        self._lengths.append(len(record))
        self._crcs.append(zlib.crc32(record) if crc32 is None else crc32)
        self._records.update(_RECORD_HEAD.pack(number, len(record)))
        self._records.update(record)
        self._batch.append((encode_key(number), record))
        self._batch_bytes += len(record)
        if self._batch_bytes >= _BATCH_BYTES:
            self._commit()

    def seal(self, target: Path) -> ShardInfo:
        """Sync the file, compare every offset with LMDB's own read, hash it, and rename it to `target`."""
        try:
            self._commit()
            env = self._open_env()
            env.sync(True)
            env.close()
            self._env = None
            rows = self._verify()
            sealed = ShardInfo(
                bytes=self._path.stat().st_size,
                sha256=sha256_file(self._path),
                records_sha256=self._records.hexdigest(),
                rows=rows,
            )
            rename_durably(self._path, target)
        except (lmdb.Error, OSError) as error:
            raise self._failure(error) from error
        return sealed

    def discard(self) -> None:
        """Close and remove what was written but not sealed."""
        if self._env is not None:
            self._env.close()
            self._env = None
        self._path.unlink(missing_ok=True)

    def _open_env(self) -> lmdb.Environment:
        if self._env is None:
            raise UsageError(f"{self._path}: the shard is sealed or discarded already")
        return self._env

    def _commit(self) -> None:
        env = self._open_env()
        page_size = env.stat()["psize"]
        # Each record's overflow pages, plus a page for its share of leaves and branches, bounds what this needs.
        need = sum(2 * page_size + pages.PAGE_HEADER_BYTES + len(record) for _, record in self._batch)
        used = (env.info()["last_pgno"] + 1) * page_size
        map_size = -(-(used + need + 16 * page_size) // _MAP_STEP) * _MAP_STEP
        try:
            if map_size > env.info()["map_size"]:
                env.set_mapsize(map_size)
            with env.begin(write=True) as transaction:
                for key, record in self._batch:
                    if not transaction.put(key, record, append=True):
                        raise BuildError(f"{self._path}: LMDB refused key {key.hex()} as out of order")
        except lmdb.Error as error:
            raise self._failure(error) from error
        self._batch.clear()
        self._batch_bytes = 0

    def _verify(self) -> npt.NDArray[Any]:
        """Return the index rows, each found in the pages and equal to what LMDB itself returns."""
        rows = np.zeros(len(self._lengths), INDEX_DTYPE)
        env = lmdb.open(str(self._path), subdir=False, lock=False, readonly=True, create=False, max_dbs=0, **_ENGINE)
        try:
            with self._path.open("rb") as file, env.begin(buffers=True) as transaction:
                layout = pages.read_layout(file)
                extents = list(pages.walk(file, layout))
                file_bytes = self._path.stat().st_size
                if len(extents) != len(rows) or layout.file_bytes != file_bytes:
                    raise BuildError(
                        f"{self._path}: {len(extents)} records in {file_bytes:,} bytes were found in the pages, "
                        f"{len(rows)} in {layout.file_bytes:,} were written"
                    )
                for position, (extent, (key, value)) in enumerate(zip(extents, transaction.cursor(), strict=True)):
                    file.seek(extent.offset)
                    data = file.read(extent.length)
                    crc = zlib.crc32(data)
                    # As bytes: memory views are compared value by value, which takes longer than all else here.
                    if extent.key != bytes(key) or data != bytes(value) or crc != self._crcs[position]:
                        raise BuildError(
                            f"{self._path}: record {position} is not where its pages say. "
                            "The disk or LMDB failed: run warmup again."
                        )
                    rows[position] = (extent.offset, extent.length, crc, 0)
        finally:
            env.close()
        return rows

    def _failure(self, error: Exception) -> BuildError:
        # LMDB calls it an input/output error when a full disk takes a part of what it writes.
        room = ""
        with contextlib.suppress(OSError):
            room = f" ({shutil.disk_usage(self._path.parent).free / 1e6:,.1f} MB are free)"
        return BuildError(
            f"{self._path}: the shard cannot be written: {error}{room}. Shards already finished are kept; "
            "make room or repair the disk, then run the same command again to continue."
        )
