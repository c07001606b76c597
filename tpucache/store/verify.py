"""Every byte of a cache against its manifest: sizes, SHA-256, every record's place, key and CRC."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import DamageError, FormatError
from tpucache.store.files import pages
from tpucache.store.files.reading import refuse_too_many_files, sha256_file
from tpucache.store.format import encode_key
from tpucache.store.manifest import FileEntry, Manifest, ShardEntry
from tpucache.store.reader import open_index
from tpucache.store.samples import open_samples

_THREADS: Final = 2
_NAMED_RECORDS: Final = 5

Rows = npt.NDArray[Any]


@dataclass(frozen=True)
class Damage:
    """One file that is not what the manifest says, and how it differs; `samples` are the damaged sample numbers."""

    name: str
    reason: str
    samples: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the damage as JSON values."""
        return asdict(self)


def verify_cache(directory: str | Path, progress: Callable[[ShardEntry], None] = lambda entry: None) -> list[Damage]:
    """Return all damage found in a cache, tables first, then shards in the manifest's order; empty when all is well.

    `progress` is called after each shard. Raises NotACacheError or FormatError when there is no manifest to go by.
    """
    directory = Path(directory)
    manifest = Manifest.load(directory)
    damages = [damage for entry in manifest.tables for damage in _check_file(directory, entry, {})]
    index, numbers = _read_tables(directory, manifest, damages)
    others = {entry.sha256: entry.name for entry in manifest.shards}
    rows_before = {variant: at * manifest.samples for at, variant in enumerate(manifest.variants)}

    def check(position: int) -> list[Damage]:
        entry = manifest.shards[position]
        found = list(_check_file(directory, entry, others))
        missing_bytes = bool(found) and "SHA-256" not in found[0].reason
        if index is not None and numbers is not None and not missing_bytes:
            start = rows_before[entry.variant] + entry.first
            rows = index[start : start + entry.records]
            keys = numbers[entry.first : entry.first + entry.records]
            found += _check_records(directory / entry.name, position, rows, keys)
        progress(entry)
        return found

    with ThreadPoolExecutor(_THREADS) as threads:
        for found in threads.map(check, range(len(manifest.shards))):
            damages += found
    return damages


def is_whole(directory: Path, entry: FileEntry) -> bool:
    """Tell whether a file of a cache has the size and the SHA-256 that the manifest says."""
    return not any(_check_file(directory, entry, {}))


def _read_tables(directory: Path, manifest: Manifest, damages: list[Damage]) -> tuple[Rows | None, Rows | None]:
    """Return the index and the sample numbers, or None for one that is damaged, which `damages` then tells."""
    index: Rows | None = None
    numbers: Rows | None = None
    named = {damage.name for damage in damages}
    try:
        if manifest.index.name not in named:
            index = open_index(directory, manifest)
    except (DamageError, FormatError) as error:
        damages.append(Damage(manifest.index.name, str(error)))
    try:
        if manifest.table.name not in named:
            numbers = open_samples(directory, manifest.samples, manifest.table.name).numbers
    except (DamageError, FormatError) as error:
        damages.append(Damage(manifest.table.name, str(error)))
    return index, numbers


def _check_file(directory: Path, entry: FileEntry, others: dict[str, str]) -> Iterator[Damage]:
    path = directory / entry.name
    try:
        size = path.stat().st_size
        if size != entry.bytes:
            yield Damage(entry.name, f"is {size:,} bytes, the manifest says {entry.bytes:,}")
            return
        digest = sha256_file(path)
    except FileNotFoundError:
        yield Damage(entry.name, "is missing")
    except OSError as error:
        refuse_too_many_files(error)
        yield Damage(entry.name, f"cannot be read: {error.strerror}")
    else:
        if digest != entry.sha256:
            other = others.get(digest)
            held = f", it holds {other}" if other else ""
            yield Damage(entry.name, f"has another SHA-256 than the manifest says{held}")


def _check_records(path: Path, shard: int, rows: Rows, keys: Rows) -> Iterator[Damage]:
    """Compare each record's bytes with its CRC, and the file's own pages with the index."""
    try:
        with path.open("rb") as file:
            extents = list(pages.walk(file))
            found = [(extent.key, extent.offset, extent.length) for extent in extents]
            told = [
                (encode_key(int(key)), int(row["offset"]), int(row["length"]))
                for key, row in zip(keys, rows, strict=True)
            ]
            if found != told or np.any(rows["shard"] != shard):
                yield Damage(path.name, "holds other records than the index and the samples table say")
                return
            broken = []
            for key, row in zip(keys, rows, strict=True):
                file.seek(int(row["offset"]))
                if zlib.crc32(file.read(int(row["length"]))) != int(row["crc32"]):
                    broken.append(int(key))
    except (OSError, FormatError) as error:
        refuse_too_many_files(error)
        yield Damage(path.name, f"is no readable shard: {error}")
        return
    if broken:
        named = ", ".join(map(str, broken[:_NAMED_RECORDS]))
        more = f" and {len(broken) - _NAMED_RECORDS} more" if len(broken) > _NAMED_RECORDS else ""
        yield Damage(path.name, f"has damaged records: sample {named}{more}", tuple(broken))
