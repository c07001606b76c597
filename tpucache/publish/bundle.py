"""The folder to upload: a cache's files, its card, and the metadata that Kaggle asks for.

A claim lists the SHA-256 of the files. It proves that `publish` made a folder, and that its files have not been changed
since. Kaggle's client would upload a separate file, so dataset-metadata.json holds the claim; the client does
not upload that file, and each call writes it anew. While the folder is being made, the claim is a separate file.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from tpucache.errors import FormatError, PublishError, StoreError, UsageError
from tpucache.kaggle import MAX_BYTES, MAX_FILES, MAX_SHARDS
from tpucache.plugins import call
from tpucache.publish.rules import METADATA_NAME, Metadata
from tpucache.report.inspect import describe_versions, facts_of
from tpucache.report.page import fill
from tpucache.report.preview import contact_sheet
from tpucache.store.cache import Cache
from tpucache.store.copying import (
    CLAIM_NAME,
    Claim,
    check_room,
    claim_folder,
    copy_file,
    folder_path,
    hold_folder,
    is_claim_aside,
    parse_claim,
    remove_claim,
)
from tpucache.store.files import check_apart, read_file, sha256_file, write_atomically
from tpucache.store.format import MANIFEST_NAME, TIMES_NAME, name_behind
from tpucache.store.hashes import hashes_file
from tpucache.store.history import version_files
from tpucache.store.manifest import FileEntry, Manifest
from tpucache.store.remote.kaggle import Content, in_memory, of_file
from tpucache.text import named, parse_object

_log: Final = logging.getLogger("tpucache")
_COMMAND: Final = "publish"
_KEY: Final = "tpucache"

CARD_NAME: Final = "README.md"
SHEET_NAME: Final = "sheet.png"
_CLASSES: Final = 200
_SKIPPED: Final = 20
_ESCAPES: Final = {
    **{ord(letter): f"\\{letter}" for letter in "\\`*_[]"},
    **{ord(letter): f"&#{ord(letter)};" for letter in "<>|&"},
}


@dataclass(frozen=True)
class Bundle:
    """A folder that is ready to upload: `contents` are the files by name, and `card` describes the dataset."""

    folder: Path
    metadata: Metadata
    card: str = field(repr=False)
    contents: Mapping[str, Content] = field(repr=False)

    @property
    def files(self) -> dict[str, int]:
        """The sizes of the files in bytes."""
        return {name: content.bytes for name, content in sorted(self.contents.items())}


def make_bundle(
    cache: str | Path, metadata: Metadata, out: str | Path | None = None, *, hashes: bool = False
) -> Bundle:
    """Make the folder to upload for a verified cache: `out`, or `CACHE.publish` next to the cache.

    The folder gets hard links to the cache's files, or verified copies where the file system has no links. A folder
    that an earlier call made from this cache, or from an earlier version of it, is updated.

    Raises UsageError if the folder holds other files or overlaps with the cache's folder; PublishError if Kaggle does
    not accept the cache; StoreError when the folder cannot be written.
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
    entries, card, written = version_files(source, manifest), *_written(opened, metadata)
    if hashes:
        written.update([hashes_file(opened, partial(call, "hashes"))])
    contents = {entry.name: of_file(folder, entry) for entry in entries}
    contents |= {name: in_memory(data) for name, data in written.items()}
    if len(contents) > MAX_FILES:
        raise PublishError(
            f"{source} would be published in {len(contents)} files, and a dataset has at most {MAX_FILES}: leave "
            f"--hashes out, `tpucache compact {source}` keeps only the newest version, or build the cache again with "
            "--target kaggle"
        )
    total = sum(content.bytes for content in contents.values())
    if total > MAX_BYTES:
        raise PublishError(f"{source} has {total:,} bytes to publish, and a dataset at most {MAX_BYTES:,}")
    digests = {name: content.sha256 for name, content in contents.items()}
    claim = Claim(_COMMAND, manifest.identity, digests, manifest.parents)
    try:
        with hold_folder(folder, "publishing from"):
            for path in _check_bundle(folder, opened, claim):
                # The old claim in the metadata stays until the new metadata replace it.
                if path.name in written or path.name not in {CLAIM_NAME, METADATA_NAME, *claim.files}:
                    path.unlink()
            claim_folder(folder, claim)
            _link(source, folder, entries)
            signature = json.loads(claim.to_json())
            del signature["note"]  # says that the folder is unfinished, which Kaggle's readers need not see
            stated = {
                "title": metadata.title,
                "id": metadata.dataset_id,
                "description": card,
                "licenses": [{"name": metadata.license_name}],
                _KEY: signature,
            }
            written[METADATA_NAME] = (json.dumps(stated, indent=1) + "\n").encode()
            for name, data in written.items():
                write_atomically(folder / name, data)
            remove_claim(folder)
    except OSError as error:
        raise StoreError(f"{folder} cannot be written: {error}. Give another folder by --out") from error
    return Bundle(folder, metadata, card, contents)


def companions(dataset_id: str, manifest: Manifest) -> dict[str, bytes]:
    """Return the card (without a licence), by file name, of a cache that is built directly at Kaggle."""
    return {CARD_NAME: make_card(manifest, dataset_id.partition("/")[2], dataset_id, None).encode()}


def _written(cache: Cache, metadata: Metadata) -> tuple[str, dict[str, bytes]]:
    """Return the card without a sheet, and by name the bytes of the uploaded files that are not the cache's own."""
    times, sheet = cache.directory / TIMES_NAME, contact_sheet(cache.place)
    names = metadata.title, metadata.dataset_id, metadata.license_name
    card = partial(make_card, cache.manifest, *names, history=describe_versions(*cache.versions()))
    written = {MANIFEST_NAME: cache.manifest.text.encode(), CARD_NAME: card(sheet=sheet is not None).encode()}
    if sheet is not None:
        written[SHEET_NAME] = sheet
    if times.exists():
        written[TIMES_NAME] = read_file(times)
    return card(), written


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


def _check_bundle(folder: Path, cache: Cache, claim: Claim) -> list[Path]:
    """Return the files in `folder`, all of which `publish` wrote, so that they may be replaced or removed.

    Raises UsageError unless the folder is empty, or `publish` made it, completely or in part, from this cache or an
    earlier version of it, and no file was changed since. `claim` lists the files that this call will write.
    """
    entries = {path.name: path for path in folder.iterdir()}
    claims = _read_claims(folder)
    known = {CLAIM_NAME, METADATA_NAME}.union(*(each.files for each in claims)) if claims else set()
    foreign = [
        name
        for name, path in entries.items()
        if not path.is_file() or not (name_behind(name) in known or is_claim_aside(name))
    ]
    if foreign:
        raise UsageError(f"{folder} holds {named(sorted(foreign))}, which publish did not write: give another --out")
    if not all(each.precedes(claim) for each in claims):
        raise UsageError(
            f"{folder} was made of another cache: remove this folder if you do not need it, or give another --out"
        )
    changed = []
    for name, path in entries.items():
        stated, ours = {each.files.get(name) for each in (*claims, claim)}, cache.directory / name
        # A file that no claim lists is unfinished, or holds the claim itself.
        is_linked = ours.exists() and path.samefile(ours)
        if not is_linked and stated != {None} and sha256_file(path) not in stated:
            changed.append(name)
    if changed:
        raise UsageError(f"{folder} holds {named(sorted(changed))}, changed since publish wrote it: give another --out")
    return list(entries.values())


def _read_claims(folder: Path) -> list[Claim]:
    """Return the claims that `publish` wrote into a folder: in a file of its own, and in the metadata."""
    claims: list[Claim | None] = []
    if (folder / CLAIM_NAME).exists():
        claims.append(parse_claim(read_file(folder / CLAIM_NAME), str(folder / CLAIM_NAME)))
    with contextlib.suppress(FileNotFoundError, FormatError, KeyError):
        stated = parse_object(read_file(folder / METADATA_NAME), METADATA_NAME)[_KEY]
        claims.append(Claim.from_json(json.dumps(stated)))
    return [claim for claim in claims if claim is not None and claim.command == _COMMAND]


# The card: a page in Markdown that says what the cache is, how to read it, and how it was made.


def make_card(
    manifest: Manifest,
    title: str,
    dataset_id: str,
    license_name: str | None,
    *,
    sheet: bool = False,
    history: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Return a cache's card as Markdown text. Raises DependencyError without jinja2."""
    names, skipped = manifest.classes, manifest.skipped
    counts = [f"{count:,}" for count in manifest.statistics.class_counts] or [""] * len(names)
    values = {
        "title": title,
        "manifest": manifest,
        "sheet": SHEET_NAME if sheet else "",
        "dataset_id": dataset_id,
        "variant": '"epoch"' if manifest.augmented else manifest.variants[0],
        "facts": list(facts_of(manifest).items()),
        "classes": list(zip(names, counts, strict=True))[:_CLASSES],
        "more_classes": max(0, len(names) - _CLASSES),
        "license": license_name or "not stated yet",
        "metadata": METADATA_NAME,
        "history": [
            (each["version"], each["time"] or "", f"{each['samples']:,}", each["command"], ", ".join(each["changes"]))
            for each in history
        ],
        "skipped": [(each.path, each.reason) for each in skipped[:_SKIPPED]],
        "more_skipped": max(0, len(skipped) - _SKIPPED),
    }
    return fill("tpucache.publish", "card.md.jinja", values, to_markdown)


def to_markdown(value: object) -> str:
    """Return a value as text that Markdown shows unchanged."""
    text = str(value).encode("utf-8", "backslashreplace").decode()
    text = "".join(letter if letter.isprintable() else f"\\x{ord(letter):02x}" for letter in text)
    return text.translate(_ESCAPES)
