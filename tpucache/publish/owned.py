"""Checks that `publish` made the folder to be uploaded and that nobody has changed it since.

Kaggle's client leaves hidden files out and sends all others. So a finished folder keeps its claim in the one file that
is not uploaded: the metadata. Until then the claim is a separate file, written before anything else.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tpucache.errors import UsageError
from tpucache.publish.card import CARD_NAME, SHEET_NAME
from tpucache.publish.packages import PACKAGES
from tpucache.publish.rules import METADATA_NAME
from tpucache.store.cache import Cache
from tpucache.store.copying import CLAIM_NAME, Claim, check_descends, is_claim_aside, named, parse_claim
from tpucache.store.files import read_file, sha256_file
from tpucache.store.format import MANIFEST_NAME, SHARD_NAME, TABLE_NAME
from tpucache.store.manifest import Manifest
from tpucache.strict_json import parse_json

COMMAND: Final = "publish"
_KEY: Final = "tpucache"
_WHEEL: Final = re.compile(rf"({'|'.join(('tpucache', *PACKAGES))})-.*\.whl")
_UPLOADED: Final = (MANIFEST_NAME, CARD_NAME, SHEET_NAME, METADATA_NAME, CLAIM_NAME)


def claim_bundle(manifest: Manifest, written: Mapping[str, bytes]) -> Claim:
    """Return the claim of a folder: the cache's files, and what is written beside them."""
    files = Claim.of(COMMAND, manifest).files
    return Claim(COMMAND, manifest.identity, {**files, **{name: _digest(data) for name, data in written.items()}})


def sign_metadata(metadata: bytes, claim: Claim) -> bytes:
    """Return dataset-metadata.json with a folder's claim in it, under a key that Kaggle's client does not read."""
    return (json.dumps({**json.loads(metadata), _KEY: json.loads(claim.to_json())}, indent=1) + "\n").encode()


def check_bundle(folder: Path, cache: Path, claim: Claim) -> list[Path]:
    """Return the files of a folder that may be replaced or removed: all of them, as `publish` wrote each.

    Raises UsageError, and changes nothing, unless the folder is empty or was made, whole or in part, of this cache or
    of one that it continues.
    """
    entries = {path.name: path for path in folder.iterdir() if not is_claim_aside(path.name)}
    foreign = {name for name, path in entries.items() if not path.is_file() or not _may_be_uploaded(name)}
    if foreign:
        raise UsageError(f"{folder} holds {named(foreign)}, which would be uploaded: give another --out")
    claims = _read_claims(folder)
    unknown = {name for name in entries if not any(_is_of(each, name) for each in claims)}
    if unknown:
        raise UsageError(f"{folder} holds {named(unknown)}, which publish did not write: give another --out")
    if not all(each.precedes(claim) for each in claims):
        raise UsageError(f"{folder} was made of another cache: remove it if nobody needs it, or give another --out")
    changed = {name for name, path in entries.items() if not _is_as_written(path, cache, [*claims, claim])}
    if changed:
        raise UsageError(f"{folder} holds {named(changed)}, changed since publish wrote it: give another --out")
    if MANIFEST_NAME in entries:
        check_descends(Cache.open(folder), Cache.open(cache), str(folder))
    return list(entries.values())


def _may_be_uploaded(name: str) -> bool:
    """Return whether `publish` uses a name; that alone does not show that it wrote the file."""
    of_cache = SHARD_NAME.fullmatch(name) or TABLE_NAME.fullmatch(name) or name.endswith(".tmp")
    return bool(of_cache) or name in _UPLOADED or bool(_WHEEL.fullmatch(name))


def _read_claims(folder: Path) -> list[Claim]:
    """Return the claims of a folder that `publish` made or began to make; none where it is anything else."""
    claims: list[Claim | None] = []
    if (folder / CLAIM_NAME).exists():
        claims.append(parse_claim(read_file(folder / CLAIM_NAME), str(folder / CLAIM_NAME)))
    content = _metadata(folder)
    if content is not None:
        claims.append(Claim.from_json(json.dumps(content.get(_KEY))))
    return [claim for claim in claims if claim is not None and claim.command == COMMAND]


def _metadata(folder: Path) -> dict[str, Any] | None:
    try:
        content = parse_json(read_file(folder / METADATA_NAME))
    except (FileNotFoundError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _is_of(claim: Claim, name: str) -> bool:
    return name in claim.files or name == CLAIM_NAME or claim.wrote_aside(name)


def _is_as_written(path: Path, cache: Path, claims: list[Claim]) -> bool:
    """Return whether a file has the digest of a claim, or is a link to the cache's file, which was verified."""
    written = {claim.files.get(path.name) for claim in claims}
    if written == {None}:
        return True  # the claim itself, or what was begun
    if path.name == METADATA_NAME:
        content = _metadata(path.parent) or {}
        content.pop(_KEY, None)
        return _digest(metadata_text(content)) in written
    ours = cache / path.name
    return (ours.exists() and path.samefile(ours)) or sha256_file(path) in written


def metadata_text(content: Mapping[str, Any]) -> bytes:
    """Return the text of dataset-metadata.json before it is signed."""
    return (json.dumps(content, indent=1) + "\n").encode()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
