"""The folder that is uploaded: a cache's files, its card, and tpucache itself."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tpucache.errors import PublishError, StoreError
from tpucache.kaggle import COMPANIONS
from tpucache.publish import rules
from tpucache.publish.card import CARD_NAME, SHEET_NAME, write_card
from tpucache.publish.options import Metadata
from tpucache.publish.owned import check_bundle, claim_bundle, metadata_text, sign_metadata
from tpucache.publish.packages import PackageWheel, download_wheels, needed_packages
from tpucache.publish.wheel import wheel_bytes, wheel_name
from tpucache.report.preview import contact_sheet
from tpucache.store.copying import (
    CLAIM_NAME,
    check_apart,
    check_room,
    claim_folder,
    copy_file,
    folder_path,
    hold_folder,
    remove_claim,
)
from tpucache.store.files import write_atomically
from tpucache.store.format import MANIFEST_NAME
from tpucache.store.manifest import FileEntry, Manifest

_log: Final = logging.getLogger("tpucache")


@dataclass(frozen=True)
class Bundle:
    """A folder that is ready to be uploaded, and the files that will be: names and bytes.

    `wheels` are those of other packages among them.
    """

    folder: Path
    metadata: Metadata
    files: dict[str, int]
    wheels: tuple[PackageWheel, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())


def make_bundle(
    cache: str | Path, metadata: Metadata, out: str | Path | None = None, wheels: str | None = None
) -> Bundle:
    """Make the folder to upload, `CACHE.publish` beside the cache if not given, out of a cache that is sound.

    `wheels` is the tag of a Python, such as "cp312", for which the packages that the cache's codecs need are added.

    The cache's files are hard links, or verified copies where the file system has none. A folder that an earlier call
    made of the same cache, or of it before more was added, is brought up to date. Raises UsageError for a folder that
    holds anything else, or is the cache, inside of it or around it; PublishError for a cache that Kaggle does not take
    or wheels that cannot be had; StoreError when the folder cannot be written.
    """
    source = folder_path(cache)
    manifest = Manifest.load(source)
    if len(manifest.shards) > rules.MAX_SHARDS:
        raise PublishError(
            f"{source} has {len(manifest.shards)} shards, and a published cache at most {rules.MAX_SHARDS}: "
            "warm it up with --target kaggle, or a larger --shard-mb"
        )
    real = source.resolve()
    folder = real.with_name(f"{real.name}.publish") if out is None else folder_path(out)
    check_apart(source, folder)
    packages = _packages(source, manifest, wheels) if wheels else ()
    written = _written(source, manifest, metadata, packages)
    claim = claim_bundle(manifest, written)
    try:
        with hold_folder(folder, "publishing from"):
            for path in check_bundle(folder, source, claim):
                # What differs goes before its claim does; the metadata keep theirs until they are replaced.
                if path.name in written.keys() - {rules.METADATA_NAME} or path.name not in {CLAIM_NAME, *claim.files}:
                    path.unlink()
            claim_folder(folder, claim)
            _link(source, folder, manifest)
            signed = sign_metadata(written.pop(rules.METADATA_NAME), claim)
            for name, data in {**written, rules.METADATA_NAME: signed}.items():
                write_atomically(folder / name, data)
            remove_claim(folder)
    except OSError as error:
        raise StoreError(f"{folder} cannot be written: {error}. Give a place that can be written by --out") from error
    found = rules.breaches(folder)
    if found:
        raise PublishError(f"{folder} breaks Kaggle's rules: {'; '.join(found)}")
    uploaded = sorted(path for path in folder.iterdir() if path.name != rules.METADATA_NAME)
    return Bundle(folder, metadata, {path.name: path.stat().st_size for path in uploaded}, packages)


def _packages(cache: Path, manifest: Manifest, tag: str) -> tuple[PackageWheel, ...]:
    """Return the wheels of the packages that a cache's codecs need. Raises PublishError where no file may be added."""
    packages = needed_packages(manifest)
    files = len(manifest.shards) + COMPANIONS + len(packages)
    if files > rules.MAX_FILES:
        raise PublishError(
            f"with the wheels of {', '.join(packages)} there would be {files} files, and a published cache has at most "
            f"{rules.MAX_FILES}: leave --wheels out, or warm it up with --target kaggle"
        )
    if not packages:
        _log.warning("no wheel is added: reading %s needs no optional package", cache)
    return tuple(download_wheels(packages, tag))


def _written(
    cache: Path, manifest: Manifest, metadata: Metadata, packages: tuple[PackageWheel, ...]
) -> dict[str, bytes]:
    """Return what is written beside the cache's files: manifest, wheels, card, a sheet where possible, metadata."""
    has_room = len(manifest.shards) + COMPANIONS + len(packages) < rules.MAX_FILES
    sheet = contact_sheet(cache) if has_room else None
    if not has_room:
        _log.warning("%s has so many files that there is no room for a sheet of samples", cache)
    given = (manifest, metadata.title, metadata.dataset_id, metadata.license_name)
    return {
        MANIFEST_NAME: (cache / MANIFEST_NAME).read_bytes(),
        wheel_name(): wheel_bytes(),
        **{wheel.name: wheel.data for wheel in packages},
        CARD_NAME: write_card(*given, packages, sheet=bool(sheet)).encode(),
        **({SHEET_NAME: sheet} if sheet else {}),
        rules.METADATA_NAME: metadata_text(metadata.to_dict(write_card(*given, packages, sheet=False))),
    }


def _link(cache: Path, folder: Path, manifest: Manifest) -> None:
    """Have each of the cache's files in the folder, linked or copied."""
    copied: list[FileEntry] = []
    for entry in manifest.files:
        target, ours = folder / entry.name, (cache / entry.name).resolve()
        if target.exists() and target.samefile(ours):
            continue
        try:
            target.unlink(missing_ok=True)
            target.hardlink_to(ours)
        except OSError:  # another file system, or one that has no links
            copied.append(entry)
    if copied:
        needed = sum(entry.bytes for entry in copied)
        _log.warning("%s cannot link to %s: copying %.1f MB", folder, cache, needed / 1e6)
        check_room(folder, needed)
    for entry in copied:
        copy_file(cache, folder, entry)
