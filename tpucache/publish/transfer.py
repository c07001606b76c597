"""A whole cache fetched from a URL or pushed to one: every byte proven, the manifest last, cut off and gone on with."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from tpucache.errors import DamageError, NotACacheError, StoreError, UsageError
from tpucache.publish.remote import Remote
from tpucache.store.files import append_chunks, read_chunks, rename_durably, sha256_file, write_atomically
from tpucache.store.format import MANIFEST_NAME, WORK_NAME
from tpucache.store.manifest import FileEntry, Manifest
from tpucache.store.stage import check_room

Report = Callable[[int, int], None]

_log: Final = logging.getLogger("tpucache")


def fetch_cache(url: str, directory: str | Path, report: Report = lambda done, total: None) -> Manifest:
    """Copy the cache at a URL into a folder, and return its manifest.

    Each file's SHA-256 is held against the manifest; one that differs is fetched a second time. A call that was cut off
    is gone on with by the next one, in the middle of a file. `report` is called with the bytes done and all bytes.

    Raises NotACacheError or FormatError for what is no cache, DamageError for a file that differs twice, StoreError
    when the URL cannot be read or the disk has no room, UsageError for a folder that holds another cache,
    DependencyError without fsspec or the store's own library.
    """
    target = Path(directory)
    remote = Remote(url)
    manifest, told = remote.manifest()
    try:
        target.mkdir(parents=True, exist_ok=True)
        with _alone(target):
            _check_replaces(_standing(target), manifest, str(target))
            done = 0
            missing: list[FileEntry] = []
            for entry in manifest.files:
                if _stands(target, entry):
                    done += entry.bytes
                    report(done, manifest.total_bytes)
                else:
                    missing.append(entry)
            check_room(target, sum(entry.bytes - _begun(target, entry) for entry in missing))
            for entry in missing:
                _fetch_file(remote, target, entry, _after(done, manifest, report))
                done += entry.bytes
                report(done, manifest.total_bytes)
            write_atomically(target / MANIFEST_NAME, told)
    except OSError as error:
        raise StoreError(f"{target} cannot be written: {error}") from error
    return manifest


def push_cache(cache: str | Path, url: str, report: Report = lambda done, total: None) -> Manifest:
    """Copy a cache to a URL, and return its manifest.

    Each file is held against its SHA-256 before it goes out. What an earlier call sent is read back and, where it is
    right, not sent again. `report` is called with the bytes done and all bytes. Raises DamageError when the cache is
    damaged, StoreError when the URL cannot be written, UsageError where it holds another cache, DependencyError without
    fsspec or the store's own library, and what `Manifest.load` raises.
    """
    source = Path(cache)
    manifest = Manifest.load(source)
    remote = Remote(url)
    if remote.is_http:
        raise UsageError(f"{remote.shown} can be read only: push to gs://, s3://, hf:// or a folder")
    remote.make_folder()
    with suppress(NotACacheError):
        _check_replaces(remote.manifest()[0], manifest, remote.shown)
    done = 0
    for entry in manifest.files:
        if not _arrived(remote, entry):
            _push_file(remote, source, entry, _after(done, manifest, report))
        done += entry.bytes
        report(done, manifest.total_bytes)
    remote.write(MANIFEST_NAME, source / MANIFEST_NAME, lambda part: None)
    return manifest


def _fetch_file(remote: Remote, target: Path, entry: FileEntry, tell: Callable[[int], None]) -> None:
    """Fetch one file beside its place, going on with what is there, and put it in place once it is right."""
    part = _part(target, entry)
    if _begun(target, entry) > entry.bytes:
        part.unlink()
    for first in (True, False):
        digest = hashlib.sha256()
        have = 0
        if part.exists():
            for chunk in read_chunks(part):
                digest.update(chunk)
                have += len(chunk)
        append_chunks(part, _told(remote.chunks(entry.name, have, entry.bytes), have, tell), digest)
        if digest.hexdigest() == entry.sha256:
            rename_durably(part, target / entry.name)
            return
        part.unlink()
        if first:
            _log.warning("%s/%s is not what the manifest says: fetching it once more", remote.shown, entry.name)
    raise DamageError(
        f"{remote.shown}/{entry.name} came twice with another SHA-256 than the manifest says: it is damaged there. "
        "Push or publish the cache again"
    )


def _push_file(remote: Remote, source: Path, entry: FileEntry, tell: Callable[[int], None]) -> None:
    path = source / entry.name
    if not _stands(source, entry):
        raise DamageError(f"{path} is not what the manifest says: run `python -m tpucache verify {source}`")
    remote.write(entry.name, path, tell)
    size = remote.size(entry.name)
    if size != entry.bytes:
        raise StoreError(f"{remote.shown}/{entry.name} has {size} bytes after writing {entry.bytes:,}: push again")


def _stands(directory: Path, entry: FileEntry) -> bool:
    path = directory / entry.name
    return path.is_file() and path.stat().st_size == entry.bytes and sha256_file(path) == entry.sha256


def _arrived(remote: Remote, entry: FileEntry) -> bool:
    """Tell whether a file is there, by its bytes: files of raw images are as long as each other."""
    if remote.size(entry.name) != entry.bytes:
        return False
    digest = hashlib.sha256()
    for chunk in remote.chunks(entry.name, 0, entry.bytes):
        digest.update(chunk)
    return digest.hexdigest() == entry.sha256


def _standing(directory: Path) -> Manifest | None:
    """Return the manifest a folder has already. Raises UsageError for a cache that is not finished."""
    if (directory / WORK_NAME).exists():
        raise UsageError(f"{directory} holds an unfinished warmup: finish it, or fetch into another folder")
    return Manifest.load(directory) if (directory / MANIFEST_NAME).exists() else None


def _check_replaces(standing: Manifest | None, manifest: Manifest, where: str) -> None:
    """Raise UsageError unless a cache leaves all files as they are that the one standing there lists."""
    hashes = {entry.name: entry.sha256 for entry in manifest.files}
    if standing and any(hashes.get(entry.name, entry.sha256) != entry.sha256 for entry in standing.files):
        raise UsageError(f"{where} holds another cache: remove that one first, or use another place")


def _begun(target: Path, entry: FileEntry) -> int:
    part = _part(target, entry)
    return part.stat().st_size if part.exists() else 0


def _part(target: Path, entry: FileEntry) -> Path:
    return target / f".{entry.name}.part"


def _told(chunks: Iterator[bytes], done: int, tell: Callable[[int], None]) -> Iterator[bytes]:
    for chunk in chunks:
        yield chunk
        done += len(chunk)
        tell(done)


def _after(done: int, manifest: Manifest, report: Report) -> Callable[[int], None]:
    """Return what reports a file's bytes on top of those that were done before it."""
    return lambda part: report(done + part, manifest.total_bytes)


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Hold a folder for this process; the kernel lets go of it in whatever way the process ends."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(f"another process is fetching into {directory}: wait for it or stop it") from None
        yield
    finally:
        os.close(descriptor)
