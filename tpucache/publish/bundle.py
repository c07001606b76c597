"""The folder to upload: a cache's files, its card, wheels, and the metadata that Kaggle asks for.

A claim lists the SHA-256 of the files. It proves that `publish` made a folder, and that its files have not been changed
since. Kaggle's client would upload a separate file, so dataset-metadata.json holds the claim; the client reads that
file but does not upload it. While the folder is being made, the claim is a separate file, which is written first.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from tpucache.errors import PublishError, StoreError, UsageError
from tpucache.kaggle import COMPANIONS, MAX_FILES, MAX_SHARDS
from tpucache.plugins import call
from tpucache.publish.card import CARD_NAME, SHEET_NAME, make_card
from tpucache.publish.rules import METADATA_NAME, Metadata, breaches
from tpucache.publish.wheels import PackageWheel, download_wheels, needed_packages, wheel_bytes, wheel_name
from tpucache.report.inspect import describe_versions
from tpucache.report.preview import contact_sheet
from tpucache.store.cache import Cache
from tpucache.store.copying import (
    CLAIM_NAME,
    Claim,
    check_descends,
    check_room,
    claim_folder,
    copy_file,
    folder_path,
    hold_folder,
    is_claim_aside,
    named,
    parse_claim,
    remove_claim,
)
from tpucache.store.files import check_apart, read_file, sha256_file, write_atomically
from tpucache.store.format import MANIFEST_NAME, TIMES_NAME, is_cache_file, name_behind
from tpucache.store.hashes import hashes_file
from tpucache.store.history import version_files
from tpucache.store.manifest import FileEntry, Manifest
from tpucache.text import parse_json

_log: Final = logging.getLogger("tpucache")
_COMMAND: Final = "publish"
_KEY: Final = "tpucache"
_WHEEL: Final = re.compile(r"[\w.]+-.*\.whl")
_UPLOADED: Final = (CARD_NAME, SHEET_NAME, METADATA_NAME, CLAIM_NAME)


@dataclass(frozen=True)
class Bundle:
    """A folder that is ready to upload. `files` has the sizes in bytes of the files that will be uploaded, by name.

    `wheels` are the wheels of other packages, not tpucache's own wheel.
    """

    folder: Path
    metadata: Metadata
    files: dict[str, int]
    wheels: tuple[PackageWheel, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes of all files that will be uploaded."""
        return sum(self.files.values())


def make_bundle(
    cache: str | Path,
    metadata: Metadata,
    out: str | Path | None = None,
    wheels: str | None = None,
    *,
    hashes: bool = False,
) -> Bundle:
    """Make the folder to upload for a verified cache: `out`, or `CACHE.publish` next to the cache.

    `wheels` is the tag of a Python version, such as "cp312": add the wheels that the cache's codecs need with this
    version. With `hashes`, add the hashes of all pictures; missing ones are computed.

    The folder gets hard links to the cache's files, or verified copies where the file system has no links. If an
    earlier call made the folder from this cache, or from an earlier version of it, the folder is updated.

    Raises UsageError if the folder holds other files or overlaps with the cache's folder; PublishError if Kaggle does
    not accept the cache, or pip cannot find a wheel; StoreError when the folder cannot be written.
    """
    opened = Cache.open(folder_path(cache))
    source, manifest = opened.directory, opened.manifest
    if len(manifest.shards) > MAX_SHARDS:
        raise PublishError(
            f"{source} has {len(manifest.shards)} shards, and a published cache at most {MAX_SHARDS}: "
            "build the cache again with --target kaggle, or a larger --shard-mb"
        )
    real = source.resolve()
    folder = real.with_name(f"{real.name}.publish") if out is None else folder_path(out)
    check_apart(source, folder)
    packages = _packages(source, manifest, wheels) if wheels else ()
    others = {wheel.name: wheel.data for wheel in packages}
    if hashes:
        files = len(manifest.shards) + COMPANIONS + len(others) + 1
        if files > MAX_FILES:
            raise PublishError(
                f"with the hashes there would be {files} files, and a published cache has at most {MAX_FILES}: leave "
                "--hashes out, or build the cache again with --target kaggle"
            )
        others.update([hashes_file(opened, partial(call, "hashes"))])
    entries = version_files(source, manifest)
    others |= _times(source)
    earlier = len(entries) - len(manifest.files) + len(_times(source))
    if earlier and len(manifest.shards) + COMPANIONS + earlier > MAX_FILES:
        raise PublishError(
            f"{source} has {manifest.number} versions, and with the {earlier} files of earlier versions it has more "
            f"than the {MAX_FILES} files that a published cache may have: `tpucache compact {source}` keeps only the "
            "newest version"
        )
    written = {**_written(opened, metadata, packages, MAX_FILES - len(others) - earlier), **others}
    claim = _claim_bundle(manifest, entries, written)
    try:
        with hold_folder(folder, "publishing from"):
            for path in _check_bundle(folder, opened, claim):
                # The old claim in the metadata stays until the new metadata replace it.
                if path.name in written.keys() - {METADATA_NAME} or path.name not in {CLAIM_NAME, *claim.files}:
                    path.unlink()
            claim_folder(folder, claim)
            _link(source, folder, entries)
            signed = _sign_metadata(written.pop(METADATA_NAME), claim)
            for name, data in {**written, METADATA_NAME: signed}.items():
                write_atomically(folder / name, data)
            remove_claim(folder)
    except OSError as error:
        raise StoreError(f"{folder} cannot be written: {error}. Give another folder by --out") from error
    found = breaches(folder)
    if found:
        raise PublishError(f"{folder} breaks Kaggle's rules: {'; '.join(found)}")
    uploaded = sorted(path for path in folder.iterdir() if path.name != METADATA_NAME)
    return Bundle(folder, metadata, {path.name: path.stat().st_size for path in uploaded}, packages)


def companions(dataset_id: str, manifest: Manifest) -> dict[str, bytes]:
    """Return the bytes, by file name, of the card (without a licence) and of tpucache's wheel.

    They are added to a cache that is built directly at Kaggle.
    """
    card = make_card(manifest, dataset_id.partition("/")[2], dataset_id, None, sheet=False)
    return {CARD_NAME: card.encode(), wheel_name(): wheel_bytes()}


def _packages(source: Path, manifest: Manifest, tag: str) -> tuple[PackageWheel, ...]:
    packages = needed_packages(manifest)
    files = len(manifest.shards) + COMPANIONS + len(packages)
    if files > MAX_FILES:
        raise PublishError(
            f"with the wheels of {', '.join(packages)} there would be {files} files, and a published cache has at most "
            f"{MAX_FILES}: leave --wheels out, or build the cache again with --target kaggle"
        )
    if not packages:
        _log.warning("no wheel is added: reading %s needs no optional package", source)
    return tuple(download_wheels(packages, tag))


def _written(cache: Cache, metadata: Metadata, packages: tuple[PackageWheel, ...], room: int) -> dict[str, bytes]:
    """Return the bytes by name, with a sheet of samples if the shards and these files are fewer than `room`."""
    manifest = cache.manifest
    has_room = len(manifest.shards) + COMPANIONS < room
    sheet = contact_sheet(cache.place) if has_room else None
    if not has_room:
        _log.warning("%s has too many files to add a sheet of samples", cache.place)
    given = (manifest, metadata.title, metadata.dataset_id, metadata.license_name)
    history = describe_versions(*cache.versions())
    card = partial(make_card, *given, packages, history=history)
    return {
        MANIFEST_NAME: manifest.text.encode(),
        wheel_name(): wheel_bytes(),
        CARD_NAME: card(sheet=bool(sheet)).encode(),
        **({SHEET_NAME: sheet} if sheet else {}),
        METADATA_NAME: _metadata_text(metadata.to_dict(card(sheet=False))),
    }


def _times(source: Path) -> dict[str, bytes]:
    return {TIMES_NAME: read_file(source / TIMES_NAME)} if (source / TIMES_NAME).exists() else {}


def _link(source: Path, folder: Path, files: Sequence[FileEntry]) -> None:
    copied: list[FileEntry] = []
    for entry in files:
        target, ours = folder / entry.name, (source / entry.name).resolve()
        if target.exists() and target.samefile(ours):
            continue
        try:
            target.unlink(missing_ok=True)
            target.hardlink_to(ours)
        except OSError:  # on another file system, or on one without links
            copied.append(entry)
    if copied:
        needed = sum(entry.bytes for entry in copied)
        _log.warning("%s cannot link to %s: copying %.1f MB", folder, source, needed / 1e6)
        check_room(folder, needed)
    for entry in copied:
        copy_file(source, folder, entry)


def _claim_bundle(manifest: Manifest, files: Sequence[FileEntry], written: Mapping[str, bytes]) -> Claim:
    claim = Claim.of(_COMMAND, manifest, files)
    return dataclasses.replace(claim, files={**claim.files, **{name: _digest(data) for name, data in written.items()}})


def _sign_metadata(metadata: bytes, claim: Claim) -> bytes:
    """Add the claim to dataset-metadata.json, under a key that Kaggle's client ignores."""
    content = json.loads(claim.to_json())
    del content["note"]  # says that the folder is unfinished, which Kaggle's readers need not see
    return (json.dumps({**json.loads(metadata), _KEY: content}, indent=1) + "\n").encode()


def _check_bundle(folder: Path, cache: Cache, claim: Claim) -> list[Path]:
    """Return the files in `folder`. The caller may replace or remove them, because `publish` wrote all of them.

    Raises UsageError unless the folder is empty, or `publish` made it, completely or in part, from this cache or an
    earlier version of it. A file that was changed since then raises UsageError, too. `claim` lists the files that this
    call will write, with their digests.
    """
    entries = {path.name: path for path in folder.iterdir() if not is_claim_aside(path.name)}
    foreign = {name for name, path in entries.items() if not path.is_file() or not _may_be_uploaded(name)}
    if foreign:
        raise UsageError(f"{folder} holds {named(foreign)}, which would be uploaded: give another --out")
    claims = _read_claims(folder)
    unknown = {name for name in entries if not any(_covers(each, name) for each in claims)}
    if unknown:
        raise UsageError(f"{folder} holds {named(unknown)}, which publish did not write: give another --out")
    if not all(each.precedes(claim) for each in claims):
        raise UsageError(
            f"{folder} was made of another cache: remove this folder if you do not need it, or give another --out"
        )
    changed = {name for name, path in entries.items() if not _is_as_written(path, cache.directory, [*claims, claim])}
    if changed:
        raise UsageError(f"{folder} holds {named(changed)}, changed since publish wrote it: give another --out")
    if MANIFEST_NAME in entries:
        check_descends(Cache.open(folder), cache, str(folder))
    return list(entries.values())


def _may_be_uploaded(name: str) -> bool:
    """Return whether `publish` writes files with such a name. The file may still come from another program."""
    return is_cache_file(name) or name_behind(name) in _UPLOADED or bool(_WHEEL.fullmatch(name_behind(name)))


def _read_claims(folder: Path) -> list[Claim]:
    """Return up to two claims that `publish` wrote into a folder: in a file of its own, and in the metadata."""
    claims: list[Claim | None] = []
    if (folder / CLAIM_NAME).exists():
        claims.append(parse_claim(read_file(folder / CLAIM_NAME), str(folder / CLAIM_NAME)))
    content = _metadata(folder)
    if content is not None:
        claims.append(Claim.from_json(json.dumps(content.get(_KEY))))
    return [claim for claim in claims if claim is not None and claim.command == _COMMAND]


def _metadata(folder: Path) -> dict[str, Any] | None:
    try:
        content = parse_json(read_file(folder / METADATA_NAME))
    except (FileNotFoundError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _covers(claim: Claim, name: str) -> bool:
    return name in claim.files or name == CLAIM_NAME or claim.wrote_aside(name)


def _is_as_written(path: Path, source: Path, claims: list[Claim]) -> bool:
    """Return whether a file has the SHA-256 that a claim states, or is a hard link to the cache's file.

    Returns True for a file that no claim lists: such a file is unfinished, or holds the claim itself.
    """
    written = {claim.files.get(path.name) for claim in claims}
    if written == {None}:
        return True  # the claim itself, or an unfinished file
    if path.name == METADATA_NAME:
        content = _metadata(path.parent) or {}
        content.pop(_KEY, None)
        return _digest(_metadata_text(content)) in written
    ours = source / path.name
    return (ours.exists() and path.samefile(ours)) or sha256_file(path) in written


def _metadata_text(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
