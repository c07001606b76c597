"""ShardWriter: writes records in key order into one LMDB file, verifies and syncs it, then renames it into place."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import zlib
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import lmdb
import numpy as np
import numpy.typing as npt

from tpucache import machine
from tpucache.errors import BuildError, UsageError
from tpucache.store import pages
from tpucache.store.files import rename_durably, sync_file
from tpucache.store.format import INDEX_DTYPE, MAX_NUMBER, MAX_RECORD_BYTES, RECORD_HEAD, encode_key

#: Bytes of records per transaction: LMDB copies and writes several times faster while they fit in the CPU's cache.
_BATCH_BYTES: Final = 1 << 20
_MAP_STEP: Final = 64 << 20

# py-lmdb 3 bundles two engines with incompatible files. Every LMDB client reads the files of engine 0.9.
_ENGINE: Final[dict[str, Any]] = {"lib_version": 0} if int(lmdb.__version__.split(".")[0]) >= 3 else {}


class ShardInfo(NamedTuple):
    """A finished shard: its values in the manifest, and the index rows of its records, whose `shard` is set later."""

    bytes: int
    sha256: str
    records_sha256: str
    rows: npt.NDArray[Any]


class ShardWriter:
    """Writes one shard into a temporary file. `finish` verifies the file; `seal` also renames it.

    The same records in the same order give the same file: the map size and the transactions depend only on the records,
    and unused bytes are zero. Leaving the context before `finish` removes the file.
    """

    def __init__(self, aside: Path) -> None:
        """Begin a shard in the temporary file `aside`, which is replaced if it exists."""
        self._path = aside
        self._batch: list[tuple[bytes, bytes]] = []
        self._batch_bytes = 0
        self._last_number = -1
        self._keys: list[bytes] = []
        self._crcs: list[int] = []
        self._records = hashlib.sha256()
        self._env: lmdb.Environment | None = None
        self._is_finished = False
        try:
            aside.unlink(missing_ok=True)
            self._env = lmdb.open(
                str(aside),
                subdir=False,
                lock=False,
                map_size=_MAP_STEP,
                meminit=True,
                sync=False,  # the file is synced once, before it is renamed
                max_dbs=0,
                **_ENGINE,
            )
        except Exception as error:  # lmdb also raises TypeError for invalid names and sizes
            raise self._failure(error) from error

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    def append(self, number: int, record: bytes, crc32: int | None = None) -> None:
        """Add the record of the sample `number`.

        `crc32` is the record's CRC-32 if the caller has computed it already; `finish` compares the file with it.
        """
        self._open_env()
        if not number <= MAX_NUMBER:
            raise UsageError(f"{number} is not a sample number: sample numbers go up to {MAX_NUMBER}")
        if number <= self._last_number:
            raise UsageError(f"sample {number} comes after sample {self._last_number}: keys must ascend")
        if len(record) > MAX_RECORD_BYTES:
            raise UsageError(f"sample {number}: a record has at most {MAX_RECORD_BYTES:,} bytes, not {len(record):,}")
        self._last_number = number
        self._crcs.append(zlib.crc32(record) if crc32 is None else crc32)
        self._records.update(RECORD_HEAD.pack(number, len(record)))
        self._records.update(record)
        self._keys.append(encode_key(number))
        self._batch.append((self._keys[-1], record))
        self._batch_bytes += len(record)
        if self._batch_bytes >= _BATCH_BYTES:
            self._commit()

    def finish(self) -> ShardInfo:
        """Check that the pages have every record, and return the file's hashes and index rows."""
        try:
            self._commit()
            self._open_env().close()
            self._env = None
            size = self._path.stat().st_size
            rows, sha256 = self._verify(size)
        except (lmdb.Error, OSError) as error:
            raise self._failure(error) from error
        self._is_finished = True
        return ShardInfo(size, sha256, self._records.hexdigest(), rows)

    def seal(self, target: Path) -> ShardInfo:
        sealed = self.finish()
        try:
            place_shard(self._path, target)
        except OSError as error:
            raise self._failure(error) from error
        return sealed

    def discard(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None
        if not self._is_finished:
            self._path.unlink(missing_ok=True)

    def _open_env(self) -> lmdb.Environment:
        if self._env is None:
            raise UsageError(f"{self._path}: the shard is sealed or discarded already")
        return self._env

    def _commit(self) -> None:
        env = self._open_env()
        page_size = env.stat()["psize"]
        # An upper bound: each record's overflow pages, plus one page per record for leaves and branches.
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

    def _verify(self, size: int) -> tuple[npt.NDArray[Any], str]:
        with self._path.open("rb") as file:
            machine.begin_writing(file.fileno())  # so that the disk works while the file is hashed
            layout = pages.read_layout(file)
            extents = list(pages.walk(file, layout))
            if [extent.key for extent in extents] != self._keys or layout.file_bytes != size:
                raise BuildError(
                    f"{self._path}: its pages have other records than were written. The disk or LMDB failed: run "
                    "warmup again."
                )
            return self._read_through(file, extents)

    def _read_through(self, file: BinaryIO, extents: list[pages.Extent]) -> tuple[npt.NDArray[Any], str]:
        """Read the file once, check each record's checksum, and return the index rows and the file's SHA-256."""
        rows = np.zeros(len(extents), INDEX_DTYPE)
        buffer = memoryview(bytearray(max((extent.length for extent in extents), default=0)))
        digest, at = hashlib.sha256(), file.seek(0)
        for position in sorted(range(len(extents)), key=lambda position: extents[position].offset):
            _, offset, length = extents[position]
            record = buffer[:length]
            between = file.read(max(0, offset - at))  # pages of the tree
            if at + len(between) != offset or file.readinto(record) != length:  # type: ignore[attr-defined]
                raise self._misplaced(position)
            if zlib.crc32(record) != self._crcs[position]:
                raise self._misplaced(position)
            digest.update(between)
            digest.update(record)
            at = offset + length
            rows[position] = offset, length, self._crcs[position], 0
        digest.update(file.read())
        return rows, digest.hexdigest()

    def _misplaced(self, position: int) -> BuildError:
        return BuildError(
            f"{self._path}: record {position} is not where its pages say. The disk or LMDB failed: run warmup again."
        )

    def _failure(self, error: Exception) -> BuildError:
        room = ""  # if the disk is full, LMDB may report only an input/output error
        with contextlib.suppress(OSError):
            room = f" ({shutil.disk_usage(self._path.parent).free / 1e6:,.1f} MB are free)"
        return BuildError(
            f"{self._path}: the shard cannot be written: {error}{room}. Shards already finished are kept; "
            "make room or repair the disk, then run the same command again to continue."
        )


def place_shard(aside: Path, target: Path) -> None:
    try:
        sync_file(aside)
        rename_durably(aside, target)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
