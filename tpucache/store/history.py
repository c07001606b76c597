"""The versions of a cache: which version a user means, how its manifest is verified, and which files belong to it.

`manifest.json` is the manifest of the newest version, and lists the identities of all earlier ones; `version-3.json` is
that of version 3. Each names its own tables and shards, and versions share shards. So opening an earlier version reads
two manifests.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tpucache.errors import DamageError, FormatError, StoreError, UsageError
from tpucache.store.files import KAGGLE, is_url, read_file, refuse_too_many_files, write_atomically
from tpucache.store.format import MANIFEST_NAME, MAX_MANIFEST_BYTES, MAX_VERSIONS, TIMES_NAME, version_name
from tpucache.store.manifest import FileEntry, Manifest
from tpucache.text import parse_json

_AT_VERSION: Final = re.compile(r"(?P<place>.*[^/\\])@(?P<number>[1-9]\d{0,5})", re.DOTALL)
_TIMES_FORMAT: Final = "tpucache times"
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


def split_version(place: str | Path) -> tuple[str, int | None]:
    text = os.fspath(place)
    found = _AT_VERSION.fullmatch(text)
    if found is None or (not is_url(text) and not text.startswith(KAGGLE) and os.path.lexists(text)):
        return text, None
    return found["place"], int(found["number"])


def refuse_version(place: str | Path) -> None:
    """Raise UsageError if a place to write to names a version of a cache, such as "cache@2"."""
    cache, number = split_version(place)
    if number is not None and (is_url(cache) or (Path(cache) / MANIFEST_NAME).exists()):
        raise UsageError(
            f"{place} is version {number} of {cache}, and versions cannot be changed: give {cache}, or another place"
        )


def one_version(given: int | None, named: int | None, where: str) -> int | None:
    """Return the version that a user wants: `given` by an option, or `named` after the "@" of the place."""
    if given is not None and (type(given) is not int or not 1 <= given <= MAX_VERSIONS):
        raise UsageError(f"a version is a whole number from 1 to {MAX_VERSIONS:,}, not {given!r}")
    if None not in (given, named) and given != named:
        raise UsageError(f"{where} names version {named}, and version {given} is asked for: give only one of the two")
    return named if given is None else given


def load_version(directory: str | Path, number: int | None = None) -> Manifest:
    manifest = Manifest.load(directory)
    return manifest if number is None else load_earlier(directory, manifest, number)


def load_earlier(directory: str | Path, manifest: Manifest, number: int) -> Manifest:
    return earlier_version(manifest, number, str(directory), _reading(Path(directory)))


def earlier_version(manifest: Manifest, number: int, where: str, read: Callable[[str], bytes | None]) -> Manifest:
    if number == manifest.number:
        return manifest
    if not 1 <= number < manifest.number:
        has = "versions 1 to " + str(manifest.number) if manifest.parents else "one version"
        raise UsageError(f"{where} has {has}, and no version {number}")
    name = version_name(number)
    data = read(name)
    if data is None:
        raise DamageError(f"{where}/{name} is missing, so version {number} cannot be read: copy the cache again")
    try:
        found = Manifest.from_json(data)
    except FormatError as error:
        raise FormatError(f"{where}/{name}: {error}. Copy the cache again") from error
    if found.identity != manifest.parents[number - 1]:
        raise DamageError(
            f"{where}/{name} is not version {number} of this cache: it was changed, or is another cache's. Copy the "
            "cache again"
        )
    return found


def _reading(directory: Path) -> Callable[[str], bytes | None]:
    """Return a function that reads a small file in the folder by its name, and returns None if there is none."""

    def read(name: str) -> bytes | None:
        path = directory / name
        try:
            return read_file(path, MAX_MANIFEST_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            refuse_too_many_files(error)
            raise DamageError(f"{path} cannot be read: {error}. Copy the cache again") from error

    return read


def versions_before(directory: str | Path, manifest: Manifest) -> Iterator[Manifest]:
    for number in range(1, manifest.number):
        yield load_earlier(directory, manifest, number)


def version_files(directory: str | Path, manifest: Manifest) -> tuple[FileEntry, ...]:
    return joined_files(manifest, list(versions_before(directory, manifest)))


def joined_files(manifest: Manifest, before: Sequence[Manifest]) -> tuple[FileEntry, ...]:
    """Return the files of a version and of its earlier versions, each once, but not the version's own manifest."""
    files = {entry.name: FileEntry(entry.name, entry.bytes, entry.sha256) for entry in manifest.files}
    for each in before:
        for entry in each.files:
            there = files.setdefault(entry.name, FileEntry(entry.name, entry.bytes, entry.sha256))
            if there.sha256 != entry.sha256:
                raise FormatError(
                    f"{version_name(each.number)} lists a file {entry.name} with another SHA-256 than a later version: "
                    "copy the cache again"
                )
        data = each.text.encode()
        name = version_name(each.number)
        files[name] = FileEntry(name, len(data), hashlib.sha256(data).hexdigest())
    return tuple(files.values())


def known_files(directory: Path, manifest: Manifest) -> tuple[FileEntry, ...]:
    """Return the files that `version_files` returns, but skip earlier versions that are missing or damaged."""
    before = []
    for number in range(1, manifest.number):
        with contextlib.suppress(DamageError, FormatError):
            before.append(load_earlier(directory, manifest, number))
    try:
        return joined_files(manifest, before)
    except FormatError:
        return manifest.files


def read_times(directory: str | Path) -> dict[str, str]:
    """Return when versions of a cache were created, as {identity of its manifest: time in UTC}.

    A file of times that cannot be read counts as empty.
    """
    with contextlib.suppress(StoreError):
        return parse_times(_reading(Path(directory))(TIMES_NAME))
    return {}


def check_times(directory: Path) -> None:
    data = _reading(directory)(TIMES_NAME)
    if data is not None and data != to_times(parse_times(data)):
        raise DamageError("it was changed after it was written, or tpucache did not write it")


def parse_times(data: bytes | None) -> dict[str, str]:
    try:
        content = parse_json(data or b"{}")
    except ValueError:
        return {}
    times = content.get("times") if isinstance(content, dict) and content.get("format") == _TIMES_FORMAT else None
    pairs = times.items() if isinstance(times, dict) else ()
    found = {name: text for name, text in pairs if isinstance(text, str) and _TIME.fullmatch(text)}
    return found if data == to_times(found) else {}


def to_times(times: Mapping[str, str]) -> bytes:
    text = _times_text({"times": times})
    return _times_text({"times": times, "digest": hashlib.sha256(text).hexdigest()})


def _times_text(content: Mapping[str, Any]) -> bytes:
    return (json.dumps({**content, "format": _TIMES_FORMAT}, indent=1, sort_keys=True) + "\n").encode()


def note_time(directory: Path, manifest: Manifest, aside: Path | None = None) -> None:
    """Store the present time as the creation time of this version; only times of it and of earlier versions are
    kept.
    """
    times = read_times(directory)
    kept = {name: times[name] for name in manifest.parents if name in times}
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    write_atomically(directory / TIMES_NAME, to_times({**kept, manifest.identity: now}), aside)


def _state(directory: Path) -> tuple[int, ...] | None:
    """Return what identifies the file `manifest.json`, to notice when another file replaces it."""
    try:
        found = (directory / MANIFEST_NAME).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


class OpenVersion:
    """An open version of a cache. `check` raises StoreError if a file was replaced after the manifest was read.

    After a cache was compacted or rebuilt, other files have the same names, and perhaps the same sizes.
    """

    def __init__(self, directory: Path, number: int | None) -> None:
        self._directory = directory
        self._state = _state(directory)  # taken before reading the manifest, which may be replaced meanwhile
        self.manifest = load_version(directory, number)
        self._identity: str | None = None

    def check(self, entry: FileEntry) -> None:
        """Raise StoreError if the folder now holds another cache, and `entry` is not one of that cache's files.

        A later version is not another cache. Open the file before this call: an open file cannot be replaced
        afterwards.
        """
        now = _state(self._directory)
        if now == self._state:
            return
        current = Manifest.load(self._directory)
        self._identity = self._identity or self.manifest.identity
        is_kept = self._identity in (current.identity, *current.parents)
        if not is_kept and not any((each.name, each.sha256) == (entry.name, entry.sha256) for each in current.files):
            raise StoreError(
                f"the cache {self._directory} was compacted or built again since it was opened here, and {entry.name} "
                "is another file now: open the cache again"
            )
        self._state = now
