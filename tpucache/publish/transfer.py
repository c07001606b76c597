"""Copy a cache from a URL, or to a URL. All bytes are checked. An interrupted copy can be continued."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Final

from tpucache.errors import DamageError, FormatError, StoreError, UsageError
from tpucache.plugins import call
from tpucache.store.cache import Cache
from tpucache.store.copying import (
    CLAIM_NAME,
    FINISHED,
    MAX_CLAIM_BYTES,
    PART_SUFFIX,
    Claim,
    OnProgress,
    check_ours,
    check_room,
    claim_folder,
    copy_missing,
    find_missing,
    folder_path,
    hold_folder,
    parse_claim,
    read_claims,
    remove_claim,
)
from tpucache.store.files import append_chunks, check_apart, read_chunks, rename_durably, sha256_of, write_atomically
from tpucache.store.format import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    TIMES_NAME,
    most_index_bytes,
    most_table_bytes,
    version_name,
)
from tpucache.store.hashes import hashes_file, hashes_name, most_hashes_bytes
from tpucache.store.history import (
    earlier_version,
    joined_files,
    load_earlier,
    parse_times,
    read_times,
    refuse_version,
    split_version,
    to_times,
    versions_before,
)
from tpucache.store.manifest import FileEntry, Manifest
from tpucache.store.remote.url import OF_REPOSITORIES, Remote
from tpucache.store.verify import is_whole

_log: Final = logging.getLogger("tpucache")


def fetch_cache(
    url: str,
    directory: str | Path,
    on_progress: OnProgress = lambda done, total: None,
) -> Manifest:
    """Copy the cache at a URL into a folder that is new, empty, or an earlier copy of it, and return its manifest.

    A file whose SHA-256 differs from the manifest is fetched a second time. After an interrupted call the next one
    continues, even in the middle of a file. Earlier versions are copied as well; "URL@2" has version 2 and those before
    it. `on_progress` is called with the number of bytes done and the number of all bytes.

    Raises NotACacheError or FormatError if there is no cache at the URL, DamageError for a file that differs twice,
    StoreError when the URL cannot be read or the disk has no room, and UsageError if the folder holds other files.
    """
    target = folder_path(directory)
    url, number = split_version(url)
    with closing(Remote(url)) as remote:
        if remote.local is not None:
            check_apart(remote.local, target)
        manifest, text = remote.manifest()
        if number is not None:
            manifest = earlier_version(manifest, number, remote.shown, remote.small_file)
            text = manifest.text.encode()
        _check_tables(remote, manifest)
        before = _before(remote, manifest, target)
        files = joined_files(manifest, before)
        claim = Claim.of("fetch", manifest, files)
        try:
            with hold_folder(target, "fetching into"):
                check_ours(str(target), [path.name for path in target.iterdir()], read_claims(target), claim)
                _fetch_files(remote, claim, target, on_progress, before, files)
                hashed = target / hashes_name(manifest)  # no manifest lists it, so whoever reads it checks it
                if not hashed.exists() and (
                    data := _optional(remote, hashed.name, most_hashes_bytes(manifest.samples))
                ):
                    write_atomically(hashed, data)
                _fetch_times(remote, manifest, target)
                write_atomically(target / MANIFEST_NAME, text)
                remove_claim(target)
        except OSError as error:
            raise StoreError(f"{target} cannot be written: {error}. Check the folder and its disk") from error
    return manifest


def push_cache(
    cache: str | Path,
    url: str,
    on_progress: OnProgress = lambda done, total: None,
    *,
    hashes: bool = False,
) -> Manifest:
    """Copy a cache to a URL that is empty or has an earlier copy of the cache, and return the cache's manifest.

    Each file is checked before it is sent. Files that an earlier call sent are read back, and not sent again if they
    are right. Earlier versions are sent as well; "cache@2" sends version 2 and those before it. With `hashes`, the
    hashes of all pictures are sent, too, and computed first if the cache has none.

    Raises DamageError when the cache is damaged, StoreError when the URL cannot be written, and UsageError if the URL
    is a web server or holds other files.
    """
    opened = Cache.open(folder_path(cache))
    source, manifest = opened.directory, opened.manifest
    refuse_version(url)
    remote = Remote(url)
    if remote.is_http:
        raise UsageError(f"{remote.shown} is read-only: push to gs://, s3://, hf:// or a folder")
    hashed = hashes_file(opened, partial(call, "hashes")) if hashes else None
    before = list(versions_before(source, manifest))
    files = joined_files(manifest, before)
    claim = Claim.of("push", manifest, files)
    try:
        with ExitStack() as held:
            if remote.local is not None:
                check_apart(source, remote.local)
                held.enter_context(hold_folder(remote.local, "pushing into"))
            finished = _check_place(remote, manifest, before, claim)
            _push_files(remote, source, manifest, on_progress, files, claim, finished=finished)
            if hashed is not None:
                remote.write(*hashed)
    except OSError as error:
        raise StoreError(f"{remote.shown} cannot be written: {error}. Check that folder and its free space") from error
    return manifest


def _check_tables(remote: Remote, manifest: Manifest) -> None:
    """Raise FormatError if a manifest lists tables too large for its number of samples: they could fill the disk."""
    if manifest.index.bytes > most_index_bytes(manifest.records) or manifest.table.bytes > most_table_bytes(
        manifest.samples
    ):
        raise FormatError(
            f"{remote.shown}/{MANIFEST_NAME} lists tables that are larger than {manifest.samples:,} samples can need: "
            "push or publish the cache again"
        )


def _before(remote: Remote, manifest: Manifest, target: Path) -> list[Manifest]:
    """Return the manifests of a cache's earlier versions: from the target folder if it has them, else from the URL."""
    found = []
    for number in range(1, manifest.number):
        try:
            each = load_earlier(target, manifest, number)
        except (DamageError, FormatError):
            each = earlier_version(manifest, number, remote.shown, remote.small_file)
        _check_tables(remote, each)
        found.append(each)
    return found


def _fetch_files(
    remote: Remote,
    claim: Claim,
    target: Path,
    on_progress: OnProgress,
    before: Sequence[Manifest],
    files: Sequence[FileEntry],
) -> None:
    """Claim the folder `target`, then write the manifests of `before` and fetch the other files that it lacks."""
    made = {version_name(each.number): each.text.encode() for each in before}
    missing = find_missing(files, lambda entry: is_whole(target, entry), on_progress)
    check_room(target, sum(entry.bytes - _begun(_part(target, entry)) for entry in missing))
    claim_folder(target, claim)

    def fetch(entry: FileEntry, advance: Callable[[int], None]) -> None:
        if entry.name in made:
            write_atomically(target / entry.name, made[entry.name])
        else:
            _fetch_file(remote, target, entry, advance)

    copy_missing(files, missing, fetch, on_progress)


def _fetch_times(remote: Remote, manifest: Manifest, target: Path) -> None:
    """Add the times of versions that the URL states, if any, to those in `target`."""
    if not manifest.parents:
        return
    found = parse_times(_optional(remote, TIMES_NAME))
    if kept := _times_of(manifest, {**read_times(target), **found}):
        write_atomically(target / TIMES_NAME, to_times(kept))


def _optional(remote: Remote, name: str, most: int = MAX_MANIFEST_BYTES) -> bytes | None:
    try:
        return remote.small_file(name, most)
    except StoreError as error:
        _log.info("%s was not fetched: %s", name, error)
        return None


def _times_of(manifest: Manifest, times: Mapping[str, str]) -> dict[str, str]:
    """Return the times of a cache's version and of those before it."""
    return {name: times[name] for name in (*manifest.parents, manifest.identity) if name in times}


def _check_place(remote: Remote, manifest: Manifest, before: Sequence[Manifest], claim: Claim) -> bool:
    """Return whether a URL already holds this manifest. Raises UsageError if the URL holds other files or caches.

    `before` are the manifests of the cache's earlier versions.
    """
    names = remote.names() - OF_REPOSITORIES.get(remote.scheme, set())
    claims, existing = [], None
    if CLAIM_NAME in names:
        claims.append(_read_claim(remote))
    if MANIFEST_NAME in names:
        existing = remote.manifest()[0]
        _check_tables(remote, existing)
        # Of another cache, only the newest version's files are known.
        is_before = existing.identity in (*manifest.parents, manifest.identity)
        claims.append(Claim.of(FINISHED, existing, joined_files(existing, before) if is_before else None))
    check_ours(remote.shown, names, claims, claim)
    return existing is not None and existing.identity == manifest.identity


def _push_files(
    remote: Remote,
    source: Path,
    manifest: Manifest,
    on_progress: OnProgress,
    files: Sequence[FileEntry],
    claim: Claim,
    *,
    finished: bool,
) -> None:
    """Send the files that the URL lacks, then the manifest; nothing if the URL has the whole cache already.

    A claim, a file that tells other processes which cache arrives here, is sent first and removed at the end.
    `finished` says that the URL has this manifest, perhaps without all files.
    """
    missing = find_missing(
        files,
        lambda entry: (
            remote.size(entry.name) == entry.bytes
            and sha256_of(remote.chunks(entry.name, 0, entry.bytes)) == entry.sha256
        ),
        on_progress,
    )
    if finished and not missing:
        return
    remote.make_folder()
    remote.write(CLAIM_NAME, claim.to_json().encode())
    copy_missing(files, missing, lambda entry, advance: _push_file(remote, source, entry, advance), on_progress)
    if _read_claim(remote).identity != claim.identity:
        raise StoreError(
            f"{remote.shown} was claimed by another push meanwhile, and may hold files of two caches: remove all files "
            "there, then push one cache only"
        )
    now = Manifest.load(source)
    if claim.identity not in (now.identity, *now.parents):
        raise StoreError(f"the cache {source} was changed while it was pushed: push it again")
    if times := read_times(source):
        remote.write(TIMES_NAME, to_times(_times_of(manifest, times)))
    if claim.identity == now.identity:
        remote.write(MANIFEST_NAME, source / MANIFEST_NAME, lambda part: None)
    else:  # another version was made meanwhile, or the caller asked for an earlier one
        remote.write(MANIFEST_NAME, manifest.text.encode())
    try:
        remote.remove(CLAIM_NAME)
    except StoreError as error:  # a store may accept files and refuse to remove them
        _log.warning("%s. The cache is complete: the file %s at the URL can be removed", error, CLAIM_NAME)


def _read_claim(remote: Remote) -> Claim:
    return parse_claim(remote.read(CLAIM_NAME, MAX_CLAIM_BYTES), f"{remote.shown}/{CLAIM_NAME}")


def _fetch_file(remote: Remote, target: Path, entry: FileEntry, advance: Callable[[int], None]) -> None:
    """Fetch a file under a temporary name, or continue it, and rename it once its SHA-256 is right."""
    part = _part(target, entry)
    if _begun(part) > entry.bytes:
        part.unlink()
    for first in (True, False):
        digest, have = hashlib.sha256(), _begun(part)
        if have:
            for chunk in read_chunks(part):
                digest.update(chunk)
        append_chunks(part, _counted(remote.chunks(entry.name, have, entry.bytes), have, advance), digest)
        if digest.hexdigest() == entry.sha256:
            rename_durably(part, target / entry.name)
            return
        part.unlink()
        if first:
            _log.warning("%s/%s differs from the manifest: fetching it once more", remote.shown, entry.name)
    raise DamageError(
        f"{remote.shown}/{entry.name} arrived twice with another SHA-256 than the manifest's: the file is damaged at "
        "the URL. Push or publish the cache again"
    )


def _push_file(remote: Remote, source: Path, entry: FileEntry, advance: Callable[[int], None]) -> None:
    path = source / entry.name
    if not is_whole(source, entry):
        raise DamageError(f"{path} has another size or SHA-256 than the manifest says: run `tpucache verify {source}`")
    remote.write(entry.name, path, advance)
    size = remote.size(entry.name)
    if size != entry.bytes:
        raise StoreError(f"{remote.shown}/{entry.name} has {size} bytes after writing {entry.bytes:,}: push again")


def _begun(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _part(target: Path, entry: FileEntry) -> Path:
    return target / f".{entry.name}{PART_SUFFIX}"


def _counted(chunks: Generator[bytes, None, None], done: int, advance: Callable[[int], None]) -> Iterator[bytes]:
    with closing(chunks):  # closes the connection when `advance` raises
        for chunk in chunks:
            yield chunk
            done += len(chunk)
            advance(done)
