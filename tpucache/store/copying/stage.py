"""A cache copied to a faster place: complete and verified, or not at all."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from tpucache.errors import DamageError, StoreError
from tpucache.store.copying.claims import Claim, check_ours, claim_folder, read_claims, remove_claim
from tpucache.store.copying.folders import check_apart, folder_path, is_same_folder
from tpucache.store.files.atomic import append_chunks, rename_durably, write_atomically
from tpucache.store.files.reading import read_chunks
from tpucache.store.format import MANIFEST_NAME
from tpucache.store.manifest import FileEntry, Manifest
from tpucache.store.verify import is_whole


def stage_cache(
    cache: str | Path, place: str | Path, report: Callable[[int, int], None] = lambda done, total: None
) -> Path:
    """Copy a cache into a folder of its own below `place` (/dev/shm, a local disk), and return that folder.

    The folder's name holds the cache's identity. Every file's SHA-256 is checked while it is copied, and that of a file
    which an earlier call copied is checked again, so an interrupted copy continues and a changed file is copied again.
    `report` is called with the bytes done and all bytes. Raises StoreError when there is no room, DamageError when the
    cache differs from its manifest, UsageError when the folder holds anything else, and what `Manifest.load` raises.
    """
    source, below = Path(cache), folder_path(place)
    manifest = Manifest.load(source)
    target = below / _folder_name(manifest)
    if is_same_folder(source, target):
        return target
    check_apart(source, target)
    try:
        _copy_cache(source, manifest, target, report)
    except OSError as error:
        raise StoreError(f"{source} cannot be copied to {target}: {error}") from error
    return target


def _folder_name(manifest: Manifest) -> str:
    return f"tpucache-{manifest.identity[:16]}"


def _copy_cache(source: Path, manifest: Manifest, target: Path, report: Callable[[int, int], None]) -> None:
    target.mkdir(parents=True, exist_ok=True)
    claim = Claim.of("stage", manifest)
    check_ours(str(target), [path.name for path in target.iterdir()], read_claims(target), claim)
    done, missing = 0, []
    for entry in manifest.files:
        if is_whole(target, entry):
            done += entry.bytes
            report(done, manifest.total_bytes)
        else:
            missing.append(entry)
    if missing or not (target / MANIFEST_NAME).exists():
        check_room(target, sum(entry.bytes for entry in missing))
        report(done, manifest.total_bytes)
        claim_folder(target, claim)
        for entry in missing:
            copy_file(source, target, entry)
            done += entry.bytes
            report(done, manifest.total_bytes)
        write_atomically(target / MANIFEST_NAME, manifest.to_json().encode())
    remove_claim(target)


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
