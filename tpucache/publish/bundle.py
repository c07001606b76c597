"""The folder that is uploaded: a cache's files, its card, and tpucache itself."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tpucache.errors import PublishError, StoreError, UsageError
from tpucache.publish import rules
from tpucache.publish.card import CARD_NAME, SHEET_NAME, write_card
from tpucache.publish.sheet import contact_sheet
from tpucache.publish.wheel import write_wheel
from tpucache.store.files import write_atomically
from tpucache.store.format import MANIFEST_NAME, SHARD_NAME, TABLE_NAME
from tpucache.store.manifest import FileEntry, Manifest
from tpucache.store.stage import check_room, copy_file

_log: Final = logging.getLogger("tpucache")
_OURS: Final = (MANIFEST_NAME, CARD_NAME, SHEET_NAME, rules.METADATA_NAME)
_EXTRAS: Final = (MANIFEST_NAME, CARD_NAME, SHEET_NAME)


@dataclass(frozen=True)
class Metadata:
    """What Kaggle is told of a dataset. Raises UsageError for what it does not take."""

    dataset_id: str
    title: str
    license_name: str

    def __post_init__(self) -> None:
        rules.check_id(self.dataset_id)
        object.__setattr__(self, "title", rules.check_title(self.title))
        rules.check_license(self.license_name)

    def to_json(self, description: str) -> str:
        """Return the text of dataset-metadata.json."""
        told: dict[str, Any] = {"title": self.title, "id": self.dataset_id, "description": description}
        return json.dumps({**told, "licenses": [{"name": self.license_name}]}, indent=1) + "\n"


@dataclass(frozen=True)
class Bundle:
    """A folder that is ready to be uploaded, and what of it will be: names and bytes."""

    folder: Path
    metadata: Metadata
    files: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())


def make_bundle(cache: Path, metadata: Metadata, out: Path | None = None) -> Bundle:
    """Make the folder to upload, `CACHE.publish` beside the cache if not given, out of a cache that is sound.

    The cache's files are hard links, or verified copies where the file system has none. A folder that an earlier call
    made is brought up to date. Raises UsageError for a folder that holds anything else, PublishError for a cache that
    Kaggle does not take, StoreError when the folder cannot be written.
    """
    manifest = Manifest.load(cache)
    if len(manifest.shards) > rules.MAX_SHARDS:
        raise PublishError(
            f"{cache} has {len(manifest.shards)} shards, and a published cache at most {rules.MAX_SHARDS}: "
            "warm it up with --target kaggle, or a larger --shard-mb"
        )
    folder = out or cache.resolve().with_name(f"{cache.resolve().name}.publish")
    if folder.resolve() == cache.resolve():
        raise UsageError(f"{folder} is the cache itself: --out is another folder")
    names = {entry.name for entry in manifest.files}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _clear(folder, names)
        _link(cache, folder, manifest)
        write_atomically(folder / MANIFEST_NAME, (cache / MANIFEST_NAME).read_bytes())
        write_wheel(folder)
        _write_card(cache, folder, manifest, metadata, room=len(names) + len(_EXTRAS) + 1 <= rules.MAX_FILES)
    except OSError as error:
        raise StoreError(f"{folder} cannot be written: {error}. Give a place that can be written by --out") from error
    found = rules.breaches(folder)
    if found:
        raise PublishError(f"{folder} breaks Kaggle's rules: {'; '.join(found)}")
    uploaded = sorted(path for path in folder.iterdir() if path.name != rules.METADATA_NAME)
    return Bundle(folder, metadata, {path.name: path.stat().st_size for path in uploaded})


def _clear(folder: Path, names: set[str]) -> None:
    """Take what an earlier call left out of a folder. Raises UsageError, and takes nothing, if there is more."""
    entries = {path.name: path for path in folder.iterdir()}
    foreign = sorted(name for name, path in entries.items() if not _is_ours(name) or not path.is_file())
    if foreign:
        raise UsageError(f"{folder} holds {', '.join(foreign[:5])}, which would be uploaded: give another --out")
    for name in entries.keys() - names:
        entries[name].unlink()


def _is_ours(name: str) -> bool:
    of_cache = SHARD_NAME.fullmatch(name) or TABLE_NAME.fullmatch(name) or name.endswith(".tmp")
    return bool(of_cache) or name in _OURS or (name.startswith("tpucache-") and name.endswith(".whl"))


def _link(cache: Path, folder: Path, manifest: Manifest) -> None:
    """Have each of the cache's files in the folder, linked or copied."""
    copied: list[FileEntry] = []
    for entry in manifest.files:
        target = folder / entry.name
        target.unlink(missing_ok=True)
        try:
            target.hardlink_to((cache / entry.name).resolve())
        except OSError:  # another file system, or one that has no links
            copied.append(entry)
    if copied:
        needed = sum(entry.bytes for entry in copied)
        _log.warning("%s cannot link to %s: copying %.1f MB", folder, cache, needed / 1e6)
        check_room(folder, needed)
    for entry in copied:
        copy_file(cache, folder, entry)


def _write_card(cache: Path, folder: Path, manifest: Manifest, metadata: Metadata, *, room: bool) -> None:
    """Write the card, the sheet it shows where one is possible, and the metadata with the card as description."""
    sheet = contact_sheet(cache) if room else None
    if not room:
        _log.warning("%s has so many files that there is no room for a sheet of samples", cache)
    if sheet:
        write_atomically(folder / SHEET_NAME, sheet)
    told = (manifest, metadata.title, metadata.dataset_id, metadata.license_name)
    write_atomically(folder / CARD_NAME, write_card(*told, sheet=bool(sheet)).encode())
    description = write_card(*told, sheet=False)
    write_atomically(folder / rules.METADATA_NAME, metadata.to_json(description).encode())
