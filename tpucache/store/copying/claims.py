"""Claims: what an unfinished copy of a cache is, so that only the command that began it writes into its folder.

The rule: a command writes only into a folder that is empty or certainly its own, and never into what it reads. Names,
sizes and counts prove nothing. Two things do: a manifest, which has an identity, and a claim, a small file that is
written before anything else and names the command and the cache that a folder is being filled with. A command

1. checks that source and target are different folders: `check_apart`,
2. locks the target, so that no other process writes into it: `hold_folder`,
3. checks that it is empty, or a copy of the same cache, finished or not: `check_ours` of `read_claims`,
4. claims it: `claim_folder`,
5. writes each file under another name and renames it, the manifest last, then removes the claim: `remove_claim`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from tpucache.errors import UsageError
from tpucache.store.files.atomic import write_atomically
from tpucache.store.files.reading import read_file
from tpucache.store.format import MANIFEST_NAME, SHARD_NAME, TABLE_NAME, WORK_NAME
from tpucache.store.manifest import Manifest
from tpucache.strict_json import parse_json

CLAIM_NAME: Final = "tpucache-unfinished.json"
FINISHED: Final = "finished"
PART_SUFFIX: Final = ".part"
MAX_CLAIM_BYTES: Final = 256 << 20
_ASIDE: Final = re.compile(r"\.(.+)\.\d+\.tmp")  # what `write_atomically` writes first
_FORMAT: Final = "tpucache claim"
_NOTE: Final = "tpucache is filling this folder, or was stopped: run the same command again, or remove the folder"
_NAMED: Final = 5


@dataclass(frozen=True)
class Claim:
    """What a folder is filled with: by which command, the cache's identity, and the SHA-256 of each file by name.

    A claim is read from its file, or made of the manifest of a cache; the command of that is FINISHED.
    """

    command: str
    identity: str
    files: Mapping[str, str]

    @classmethod
    def of(cls, command: str, manifest: Manifest) -> Claim:
        """Return the claim of a command that copies a cache."""
        return cls(command, manifest.identity, {entry.name: entry.sha256 for entry in manifest.files})

    @classmethod
    def from_json(cls, text: str | bytes) -> Claim | None:
        """Return the claim that a text holds, None for a text that no tpucache wrote."""
        try:
            content = parse_json(text)
            claim = cls(content["command"], content["identity"], dict(content["files"]))
        except (ValueError, TypeError, KeyError):
            return None
        texts = (claim.command, claim.identity, *claim.files, *claim.files.values())
        is_ours = content.get("format") == _FORMAT and all(isinstance(text, str) for text in texts)
        return claim if is_ours else None

    def to_json(self) -> str:
        """Return the claim as JSON text, with a note for people."""
        return json.dumps({"format": _FORMAT, "note": _NOTE, **asdict(self)}, indent=1) + "\n"

    @property
    def names(self) -> set[str]:
        """The names that are this claim's: its files, and of a copy that is not finished what is begun of them."""
        begun = set() if self.command == FINISHED else {f".{name}{PART_SUFFIX}" for name in self.files}
        return begun | set(self.files)

    def wrote_aside(self, name: str) -> bool:
        """Return whether a name is that of one of these files while it is written."""
        aside = _ASIDE.fullmatch(name)
        return aside is not None and aside[1] in {CLAIM_NAME, MANIFEST_NAME, *self.files}

    def precedes(self, other: Claim) -> bool:
        """Return whether this is the other's cache, or one to which shards were added to make the other."""
        if self.identity == other.identity:
            return True
        shards = {name: digest for name, digest in self.files.items() if SHARD_NAME.fullmatch(name)}
        tables = {name: digest for name, digest in self.files.items() if TABLE_NAME.fullmatch(name)}
        kept = all(other.files.get(name, digest) == digest for name, digest in tables.items())
        return bool(shards) and kept and all(other.files.get(name) == digest for name, digest in shards.items())


def check_ours(where: str, names: Collection[str], claims: Sequence[Claim], wanted: Claim) -> None:
    """Raise UsageError unless a place is empty, or holds the wanted cache or one it was made of by adding to it.

    `names` are all that is there, `claims` what it says of itself: of its unfinished copy, its manifest, or both.
    """
    there = set(names) - {name for name in names if is_claim_aside(name)}
    if not there:
        return
    if WORK_NAME in there:
        raise UsageError(f"{where} holds an unfinished warmup: finish it, or use another folder")
    if not claims:
        raise UsageError(
            f"{where} holds {named(there)} and no cache that could be continued, so nothing is written: remove what is "
            "there if nobody needs it, or use another folder"
        )
    if not all(claim.precedes(wanted) for claim in claims):
        raise UsageError(f"{where} holds another cache: remove that one first, or use another place")
    foreign = there & wanted.names - {name for claim in claims for name in claim.names}
    if foreign:
        raise UsageError(f"{where} holds {named(foreign)} of another origin: move that away, or use another folder")


def is_claim_aside(name: str) -> bool:
    """Return whether a name is that of a claim while it is written, in a folder that was empty before."""
    aside = _ASIDE.fullmatch(name)
    return aside is not None and aside[1] == CLAIM_NAME


def read_claims(folder: Path) -> list[Claim]:
    """Return what a folder says of itself: its unfinished copy's claim, its manifest's, both or neither.

    Raises UsageError for a file called as a claim that is none, and what `Manifest.load` raises but NotACacheError.
    """
    claims = []
    path = folder / CLAIM_NAME
    if path.exists():
        try:
            text = read_file(path)
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}. Move it away, or use another folder") from error
        claims.append(parse_claim(text, str(path)))
    if (folder / MANIFEST_NAME).exists():
        claims.append(Claim.of(FINISHED, Manifest.load(folder)))
    return claims


def parse_claim(text: bytes, where: str) -> Claim:
    """Return the claim that a file holds. Raises UsageError."""
    claim = Claim.from_json(text)
    if claim is None:
        raise UsageError(f"{where} is not a file that tpucache wrote: move it away, or use another folder")
    return claim


def claim_folder(folder: Path, claim: Claim) -> None:
    """Claim a folder that `check_ours` let pass. Raises OSError."""
    write_atomically(folder / CLAIM_NAME, claim.to_json().encode())


def remove_claim(folder: Path) -> None:
    """End the claim of a folder whose manifest is written. Raises OSError."""
    (folder / CLAIM_NAME).unlink(missing_ok=True)


def named(names: Collection[str]) -> str:
    """Name the first few of many names."""
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return ", ".join(sorted(names)[:_NAMED]) + more
