"""A cache copied to a faster place, whole and proven, or not at all."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from tpucache.errors import DamageError, StoreError
from tpucache.store.files import append_chunks, read_chunks, rename_durably, write_atomically
from tpucache.store.format import MANIFEST_NAME
from tpucache.store.manifest import FileEntry, Manifest


def stage_cache(
    cache: str | Path, place: str | Path, report: Callable[[int, int], None] = lambda done, total: None
) -> Path:
    """Copy a cache into a folder of its own below `place` (/dev/shm, a local disk), and return that folder.

    Every file's SHA-256 is checked while it is copied; what an earlier call copied is used as it stands, so an
    interrupted copy goes on. `report` is called with the bytes done and all bytes. Raises StoreError when there is no
    room, DamageError when the copy differs from the manifest, and what `Manifest.load` raises.
    """
    source = Path(cache)
    manifest = Manifest.load(source)
    target = Path(place) / f"tpucache-{manifest.fingerprint[:16]}-{len(manifest.variants)}"
    try:
        if (target / MANIFEST_NAME).exists() and Manifest.load(target) == manifest:
            report(manifest.total_bytes, manifest.total_bytes)
            return target
        target.mkdir(parents=True, exist_ok=True)
        missing = [entry for entry in manifest.files if not _stands(target, entry)]
        check_room(target, sum(entry.bytes for entry in missing))
        done = manifest.total_bytes - sum(entry.bytes for entry in missing)
        report(done, manifest.total_bytes)
        for entry in missing:
            copy_file(source, target, entry)
            done += entry.bytes
            report(done, manifest.total_bytes)
        write_atomically(target / MANIFEST_NAME, (source / MANIFEST_NAME).read_bytes())
    except OSError as error:
        raise StoreError(f"{source} cannot be copied to {target}: {error}") from error
    return target


def _stands(target: Path, entry: FileEntry) -> bool:
    """Tell whether a file was copied before: only a copy whose hash was right has its name."""
    path = target / entry.name
    return path.exists() and path.stat().st_size == entry.bytes


def check_room(target: Path, needed: int) -> None:
    """Raise StoreError when the disk of a folder has fewer bytes free than are needed."""
    free = shutil.disk_usage(target).free
    if needed > free:
        raise StoreError(
            f"{target} has {free / 1e6:,.0f} MB free, the cache needs {needed / 1e6:,.0f} MB: make room, use another "
            "place, or read the cache from where it is"
        )


def copy_file(source: Path, target: Path, entry: FileEntry) -> None:
    """Copy a file of a cache from folder to folder, checking its SHA-256. Raises DamageError, OSError."""
    aside = target / f".{entry.name}.{os.getpid()}.tmp"
    aside.unlink(missing_ok=True)  # a killed process of this number may have left one
    digest = hashlib.sha256()
    try:
        append_chunks(aside, read_chunks(source / entry.name), digest)
        if digest.hexdigest() != entry.sha256:
            raise DamageError(
                f"{source / entry.name} is not what the manifest says: run `python -m tpucache verify {source}`"
            )
        rename_durably(aside, target / entry.name)
    finally:
        aside.unlink(missing_ok=True)
