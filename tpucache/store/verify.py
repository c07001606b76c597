"""Compare every byte of a cache with its manifest: sizes, SHA-256, and each record's offset, key and CRC.

The digest of the manifest itself is checked whenever a manifest is read.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from tpucache.errors import DamageError, FormatError, StoreError
from tpucache.store import pages
from tpucache.store.ahead import FilesAhead, Lateness, Threads, WholeFile
from tpucache.store.cache import Cache
from tpucache.store.files import CHUNK, open_file, refuse_too_many_files, sha256_of
from tpucache.store.format import RECORD_HEAD, TIMES_NAME, encode_key, version_name
from tpucache.store.history import check_times, load_earlier
from tpucache.store.manifest import FileEntry, Manifest, ShardEntry
from tpucache.text import named

_THREADS: Final = 2
#: Larger shards are read twice. It is more than the default size of a shard.
_MOST_HELD: Final = 144 << 20


@dataclass(frozen=True)
class Damage:
    """A damaged file. `name` is its name, and `reason` says how the file differs from what was written.

    If single records in a shard are damaged, `samples` has the numbers of their samples.
    """

    name: str
    reason: str
    samples: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the damage as JSON values."""
        return asdict(self)


def verify_cache(directory: str | Path, on_progress: Callable[[ShardEntry], None] = lambda entry: None) -> list[Damage]:
    """Return all damage in a cache; an empty list for an undamaged cache.

    Damage in tables comes first, then in shards, in the manifest's order, then in files of earlier versions, then in
    the files of times and of perceptual hashes, which no manifest lists. "cache@2" means version 2 of "cache" and those
    before it. `on_progress` is called after each shard. Raises what `Cache.open` raises.
    """
    cache = Cache.open(directory)
    directory, manifest = cache.directory, cache.manifest
    others, lateness = {entry.sha256: entry.name for entry in manifest.shards}, Lateness(cache.latency)

    def check(position: int, file: WholeFile, files: FilesAhead) -> list[Damage]:
        entry = manifest.shards[position]
        held = io.BytesIO()
        chunks = files.chunks(file)
        if file.size <= _MOST_HELD:
            chunks = _kept(chunks, held)
        found = list(_compare(file, entry, chunks, others))
        missing_bytes = bool(found) and "SHA-256" not in found[0].reason
        if not (index.result() or samples.result() or missing_bytes):
            whole = held if held.tell() else None
            found += _check_records(file.path, whole, position, cache)
        on_progress(entry)
        return found

    def check_share(first: int) -> list[list[Damage]]:
        share = range(first, len(manifest.shards), _THREADS)
        shards = [WholeFile(directory / manifest.shards[at].name, manifest.shards[at].bytes) for at in share]
        with FilesAhead(shards, lateness) as files:
            return [check(at, file, files) for at, file in zip(share, shards, strict=True)]

    with Threads(4 + _THREADS, "tpucache-verify") as threads:
        index = threads.submit(_check_own, cache, manifest.index, lateness)
        samples = threads.submit(_check_own, cache, manifest.table, lateness)
        times, hashes = threads.submit(_check_times, directory), threads.submit(_check_hashes, cache)
        shares = list(threads.map(check_share, range(_THREADS)))
    damages = index.result() + samples.result()
    for position in range(len(manifest.shards)):
        damages += shares[position % _THREADS][position // _THREADS]
    damages += _check_before(directory, manifest)
    damages += times.result()
    damages += [] if samples.result() else hashes.result()
    return damages


def _check_times(directory: Path) -> list[Damage]:
    try:
        check_times(directory)
    except (DamageError, FormatError) as error:
        return [Damage(TIMES_NAME, f"is damaged: {error}. Remove it: a cache needs no times")]
    return []


def _check_hashes(cache: Cache) -> list[Damage]:
    """Return the damage in the file of hashes. The samples table must be undamaged."""
    from tpucache.store.hashes import check_hashes, hashes_name  # a warmup needs neither

    try:
        check_hashes(cache)
    except StoreError as error:
        refuse_too_many_files(error.__cause__ or error)
        name = hashes_name(cache.manifest)
        return [Damage(name, f"is damaged: {error}. Remove it: hashes are computed again when they are needed")]
    return []


def _check_before(directory: Path, manifest: Manifest) -> Iterator[Damage]:
    known = {(entry.name, entry.sha256) for entry in manifest.files}
    for number in range(1, manifest.number):
        try:
            before = load_earlier(directory, manifest, number)
        except (DamageError, FormatError) as error:
            yield Damage(version_name(number), f"cannot be used: {error}")
            continue
        for entry in before.files:
            if (entry.name, entry.sha256) not in known:
                yield from _check_own(Cache(directory, before), entry, Lateness())
        known |= {(entry.name, entry.sha256) for entry in before.files}


def is_whole(directory: Path, entry: FileEntry) -> bool:
    return not any(_check_file(directory, entry, Lateness()))


def _check_own(cache: Cache, entry: FileEntry, lateness: Lateness) -> list[Damage]:
    """Return the damage of a file of a cache, also that of a table's content."""
    damages = _check_file(cache.directory, entry, lateness)
    try:
        if not damages and entry == cache.manifest.index:
            cache.index.read_all()
        elif not damages and entry == cache.manifest.table:
            _ = cache.samples.numbers, cache.samples.labels
    except (DamageError, FormatError) as error:
        damages = [Damage(entry.name, str(error))]
    return damages


def _kept(chunks: Iterator[bytes], held: io.BytesIO) -> Iterator[bytes]:
    for chunk in chunks:
        held.write(chunk)
        yield chunk


def _check_file(directory: Path, entry: FileEntry, lateness: Lateness) -> list[Damage]:
    """Return the damage of a file: missing, unreadable, or with another size or SHA-256 than `entry`; [] for none."""
    file = WholeFile(directory / entry.name, entry.bytes)
    with FilesAhead([file], lateness) as files:
        return list(_compare(file, entry, files.chunks(file), {}))


def _compare(file: WholeFile, entry: FileEntry, chunks: Iterator[bytes], others: dict[str, str]) -> Iterator[Damage]:
    try:
        digest = sha256_of(chunks)
        if file.found is not None and file.found != entry.bytes:
            yield Damage(entry.name, f"is {file.found:,} bytes, the manifest says {entry.bytes:,}")
            return
    except FileNotFoundError:
        yield Damage(entry.name, "is missing")
    except OSError as error:
        refuse_too_many_files(error)
        yield Damage(entry.name, f"cannot be read: {error.strerror}")
    else:
        if digest != entry.sha256:
            other = others.get(digest)
            swapped = f", it holds the bytes of {other}" if other else ""
            yield Damage(entry.name, f"has another SHA-256 than the manifest says{swapped}")


def _check_records(path: Path, whole: BinaryIO | None, shard: int, cache: Cache) -> Iterator[Damage]:
    entry = cache.manifest.shards[shard]
    rows, numbers = cache.index_of(entry), np.asarray(cache.samples["number"])
    keys = numbers[entry.first : entry.first + entry.records]
    deleted = np.array(entry.deleted, keys.dtype)
    every = np.union1d(keys, deleted)
    is_kept = ~np.isin(every, deleted)
    places = zip(map(encode_key, keys.tolist()), rows["offset"].tolist(), rows["length"].tolist(), strict=True)
    try:
        with whole or open_file(path, CHUNK) as file:  # a large buffer, because the records are read in order
            extents = list(pages.walk(file))
            has_keys = [extent.key for extent in extents] == [*map(encode_key, every.tolist())]
            if not has_keys or [*itertools.compress(extents, is_kept)] != [*places] or np.any(rows["shard"] != shard):
                yield Damage(path.name, "holds other records than the index and the samples table say")
                return
            broken, digest = [], hashlib.sha256()
            checksums = iter(rows["crc32"].tolist())
            for key, extent, has_row in zip(every.tolist(), extents, is_kept.tolist(), strict=True):
                file.seek(extent.offset)
                record = file.read(extent.length)
                if has_row and zlib.crc32(record) != next(checksums):
                    broken.append(key)
                digest.update(RECORD_HEAD.pack(key, len(record)))
                digest.update(record)
    except (OSError, FormatError) as error:
        refuse_too_many_files(error)
        yield Damage(path.name, f"is not a readable shard: {error}")
        return
    if broken:
        yield Damage(path.name, f"has damaged records: sample {named(broken)}", tuple(broken))
    elif digest.hexdigest() != entry.records_sha256:
        yield Damage(path.name, "has records of another SHA-256 than the manifest says")
