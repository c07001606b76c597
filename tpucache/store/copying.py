"""Copies of a cache: which folder a command may write into, and how a cache is staged on faster storage.

A command writes only into a folder that is empty or certainly holds a copy of the same cache, and never into the cache
that it reads. Equal names, sizes and counts prove nothing; a manifest does, which has an identity, and so does a claim:
a small file, written before all others, that names the command and the cache's identity. A command

1. checks that source and target are different folders: `check_apart`,
2. locks the target: `hold_folder`,
3. checks that it is empty or has a copy of the same cache, finished or not: `read_claims`, `check_ours`,
4. writes the claim: `claim_folder`,
5. writes each file under another name and renames it, the manifest last, then removes the claim: `remove_claim`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from tpucache.errors import DamageError, StoreError, UsageError
from tpucache.store.ahead import FilesAhead, Lateness, WholeFile
from tpucache.store.cache import Cache
from tpucache.store.files import (
    append_chunks,
    as_url,
    check_apart,
    is_same_folder,
    is_url,
    name_aside,
    read_chunks,
    read_file,
    rename_durably,
    write_atomically,
)
from tpucache.store.format import MANIFEST_NAME, TIMES_NAME, WORK_NAME, name_behind
from tpucache.store.history import known_files, refuse_version
from tpucache.store.lock import flock
from tpucache.store.manifest import FileEntry, Manifest
from tpucache.store.verify import is_whole
from tpucache.text import named, parse_json, shown

_log: Final = logging.getLogger("tpucache")

#: Called with the number of bytes that are done and the total number of bytes.
OnProgress = Callable[[int, int], None]

CLAIM_NAME: Final = "tpucache-unfinished.json"
FINISHED: Final = "finished"
PART_SUFFIX: Final = ".part"
MAX_CLAIM_BYTES: Final = 256 << 20
_FORMAT: Final = "tpucache claim"
_NOTE: Final = "tpucache is filling this folder, or was stopped: run the same command again, or remove the folder"


def folder_path(place: str | Path) -> Path:
    """Return the path of a local folder, given as a path or a file:// URL, which may have been made into a `Path`."""
    text = os.fspath(place)
    if not text.strip() or "\0" in text:
        raise UsageError(f"{text!r} names no folder: give the path of a folder")
    if isinstance(place, Path) and is_url(place):
        text = as_url(place)
    scheme, separator, rest = text.partition("://")
    if not separator or "/" in scheme:
        return Path(place)
    if scheme != "file":
        raise UsageError(f"a folder of this machine is needed, not a {scheme}:// URL: give the path of a folder")
    path = unquote(rest.removeprefix("localhost"))
    if not path.startswith("/"):
        raise UsageError(f"{shown(text)} names a folder of another machine: give the path of a folder of this one")
    return Path(path)


def check_no_cache_file(path: Path) -> None:
    place = path.resolve()
    try:
        manifest = Manifest.load(place.parent)
    except StoreError:
        return
    if place.name in (MANIFEST_NAME, TIMES_NAME, *(entry.name for entry in known_files(place.parent, manifest))):
        raise UsageError(f"{path} is a file of the cache in {place.parent}: give another path to write to")


@contextmanager
def hold_folder(folder: Path, doing: str, *, waits: bool = False) -> Iterator[None]:
    """Make a folder and lock it until the block or this process ends.

    `doing` says in messages what the process does, such as "staging a cache into". If another process has locked the
    folder, this waits if `waits`, and otherwise raises StoreError.
    """
    refuse_version(folder)
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not flock(descriptor):
            if not waits:
                raise StoreError(f"another process is {doing} {folder}: wait for it or stop it")
            _log.warning("another process is %s %s: waiting for it", doing, folder)
            flock(descriptor, patience=math.inf)
        yield
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Claim:
    """Which cache a folder holds (`command` is FINISHED), or which command fills it with a copy of a cache.

    `files` has the SHA-256 of each of the cache's files by name. `parents`, the identities of the cache's earlier
    versions, are not written into the file.
    """

    command: str
    identity: str
    files: Mapping[str, str]
    parents: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, command: str, manifest: Manifest, files: Sequence[FileEntry] | None = None) -> Claim:
        entries = manifest.files if files is None else files
        return cls(command, manifest.identity, {entry.name: entry.sha256 for entry in entries}, manifest.parents)

    @classmethod
    def from_json(cls, text: str | bytes) -> Claim | None:
        """Parse the text of a claim. Returns None for a text that tpucache did not write."""
        try:
            content = parse_json(text)
            claim = cls(content["command"], content["identity"], dict(content["files"]))
        except (ValueError, TypeError, KeyError):
            return None
        texts = (claim.command, claim.identity, *claim.files, *claim.files.values())
        is_ours = content.get("format") == _FORMAT and all(isinstance(text, str) for text in texts)
        return claim if is_ours else None

    def to_json(self) -> str:
        content = {"command": self.command, "identity": self.identity, "files": self.files}
        return json.dumps({"format": _FORMAT, "note": _NOTE, **content}, indent=1) + "\n"

    @property
    def names(self) -> set[str]:
        """The names that belong to this claim: its files, and the partial files of an unfinished copy."""
        begun = set() if self.command == FINISHED else {f".{name}{PART_SUFFIX}" for name in self.files}
        return begun | set(self.files)

    def wrote_aside(self, name: str) -> bool:
        return name_behind(name) != name and name_behind(name) in {CLAIM_NAME, MANIFEST_NAME, *self.files}

    def precedes(self, other: Claim) -> bool:
        return self.identity in (other.identity, *other.parents)


def check_ours(where: str, names: Collection[str], claims: Sequence[Claim], wanted: Claim) -> None:
    """Raise UsageError unless a folder is empty, or holds the wanted cache or an earlier state of that cache.

    `names` are all files in the folder, and `claims` what `read_claims` returned for it. A file that the command with
    the claim `wanted` would replace must be listed in a claim.
    """
    there = set(names) - {name for name in names if is_claim_aside(name)}
    if not there:
        return
    if WORK_NAME in there:
        raise UsageError(f"{where} holds an unfinished warmup: run it again to finish it, or use another folder")
    if not claims:
        raise UsageError(
            f"{where} holds {named(sorted(there))} and no cache that could be continued, so nothing is written: remove "
            "these files if you do not need them, or use another folder"
        )
    if not all(claim.precedes(wanted) for claim in claims):
        raise UsageError(f"{where} holds another cache: remove that cache first, or use another place")
    foreign = there & wanted.names - {name for claim in claims for name in claim.names}
    if foreign:
        raise UsageError(
            f"{where} holds files that do not belong to its cache and would be replaced ({named(sorted(foreign))}): "
            "move them away, or use another folder"
        )


def is_claim_aside(name: str) -> bool:
    return name != CLAIM_NAME and name_behind(name) == CLAIM_NAME


def read_claims(folder: Path) -> list[Claim]:
    """Return up to two claims of a folder: one from the claim file of an unfinished copy, one from the manifest."""
    claims = []
    path = folder / CLAIM_NAME
    if path.exists():
        try:
            text = read_file(path, MAX_CLAIM_BYTES)
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}. Move it away, or use another folder") from error
        claims.append(parse_claim(text, str(path)))
    if (folder / MANIFEST_NAME).exists():
        manifest = Manifest.load(folder)
        claims.append(Claim.of(FINISHED, manifest, known_files(folder, manifest)))
    return claims


def parse_claim(text: bytes, where: str) -> Claim:
    claim = Claim.from_json(text)
    if claim is None:
        raise UsageError(f"{where} is not a file that tpucache wrote: move it away, or use another folder")
    return claim


def claim_folder(folder: Path, claim: Claim) -> None:
    write_atomically(folder / CLAIM_NAME, claim.to_json().encode())


def remove_claim(folder: Path) -> None:
    (folder / CLAIM_NAME).unlink(missing_ok=True)


def earlier_tables(manifest: Manifest) -> tuple[str, ...]:
    """Return the SHA-256 that the samples table had before each relabelling, the oldest first."""
    found = manifest.source.get("relabelled")
    return tuple(digest for digest in found if isinstance(digest, str)) if isinstance(found, list) else ()


def stage_cache(
    cache: str | Path,
    place: str | Path,
    on_progress: OnProgress = lambda done, total: None,
) -> Path:
    """Copy a cache into a folder of its own below `place` (/dev/shm, a local disk), and return that folder.

    The folder's name contains the cache's identity; a process that copies the same cache into it is waited for. Every
    file's SHA-256 is checked, also of earlier copies: an interrupted copy continues, and a changed file is copied
    again. The copy has one version, the newest, or version 2 of "cache@2". `on_progress` gets the bytes done and the
    total.

    Raises StoreError when the disk is full, DamageError when the cache differs from its manifest, UsageError when
    `place` is a URL, inside the cache, or the folder holds other files, and what `Cache.open` raises.
    """
    source, below = Path(cache), folder_path(place)
    opened = Cache.open(source)
    source, manifest = opened.directory, opened.manifest
    if manifest.history:
        manifest = manifest.changed(history=None)  # the copy has no files of earlier versions
    target = below / f"tpucache-{manifest.identity[:16]}"
    if is_same_folder(source, target):
        return target
    check_apart(source, target)
    try:
        with hold_folder(target, "staging a cache into", waits=True):
            _copy_cache(source, manifest, target, on_progress, Lateness(opened.latency))
    except OSError as error:
        raise StoreError(f"{source} cannot be copied to {target}: {error}. Check both folders and the disk") from error
    return target


def _copy_cache(
    source: Path,
    manifest: Manifest,
    target: Path,
    on_progress: OnProgress,
    lateness: Lateness,
) -> None:
    target.mkdir(parents=True, exist_ok=True)
    claim = Claim.of("stage", manifest)
    check_ours(str(target), [path.name for path in target.iterdir()], read_claims(target), claim)
    for path in target.iterdir():
        if claim.wrote_aside(path.name):  # left by a process that was killed
            path.unlink()
    missing = find_missing(manifest.files, lambda entry: is_whole(target, entry), on_progress)
    if missing or not (target / MANIFEST_NAME).exists():
        needed = sum(entry.bytes for entry in missing)
        check_room(target, needed)
        on_progress(manifest.total_bytes - needed, manifest.total_bytes)
        claim_folder(target, claim)

        files = {entry.name: WholeFile(source / entry.name, entry.bytes) for entry in missing}
        with FilesAhead(files.values(), lateness) as ahead:

            def copy(entry: FileEntry, _: Callable[[int], None]) -> None:
                copy_file(source, target, entry, ahead.chunks(files[entry.name]))

            copy_missing(manifest.files, missing, copy, on_progress)
        write_atomically(target / MANIFEST_NAME, manifest.text.encode())
    remove_claim(target)


def find_missing(
    files: Sequence[FileEntry], is_there: Callable[[FileEntry], bool], on_progress: OnProgress
) -> list[FileEntry]:
    done, total, missing = 0, sum(entry.bytes for entry in files), []
    for entry in files:
        if is_there(entry):
            done += entry.bytes
            on_progress(done, total)
        else:
            missing.append(entry)
    return missing


def copy_missing(
    files: Sequence[FileEntry],
    missing: Sequence[FileEntry],
    copy: Callable[[FileEntry, Callable[[int], None]], None],
    on_progress: OnProgress,
) -> None:
    total = sum(entry.bytes for entry in files)
    before = total - sum(entry.bytes for entry in missing)

    def advance(done: int) -> None:
        on_progress(before + done, total)

    for entry in missing:
        copy(entry, advance)
        advance(entry.bytes)
        before += entry.bytes


def check_room(target: Path, needed: int) -> None:
    free = shutil.disk_usage(target).free
    if needed > free:
        raise StoreError(
            f"{target} has {free / 1e6:,.0f} MB free, the cache needs {needed / 1e6:,.0f} MB: make room, use another "
            "place, or read the cache from where it is"
        )


def copy_file(source: Path, target: Path, entry: FileEntry, chunks: Iterable[bytes] | None = None) -> None:
    aside = name_aside(target / entry.name)
    digest = hashlib.sha256()
    try:
        append_chunks(aside, read_chunks(source / entry.name) if chunks is None else chunks, digest)
        if digest.hexdigest() != entry.sha256:
            raise DamageError(
                f"{source / entry.name} has another SHA-256 than the manifest says: run `tpucache verify {source}`"
            )
        rename_durably(aside, target / entry.name)
    finally:
        aside.unlink(missing_ok=True)
