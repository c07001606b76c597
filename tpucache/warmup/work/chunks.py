"""The spool: what a chunk's task made, kept beside the cache until the shards of its block are sealed.

A chunk is one file of records a variant and, named last, a note; a chunk that a time limit cut short has its note under
another name, so that nobody takes it for a whole one. Nothing here is synced: a note or records that a
power cut tore are found out (the note is no JSON, the sizes differ, or a record's CRC does when its shard is sealed)
and made again.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpucache.store.manifest import Skipped
from tpucache.warmup.sources.base import Item


@dataclass(frozen=True)
class Note:
    """What is known of a chunk's, or a block's, kept samples beside their records.

    `labels` (None each where the listing has them) and the lists in `columns` (None where a sample has no such column)
    have one item a number. `sums` and `squares` are exact, over the channels of the clean images.
    """

    numbers: list[int] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    labels: list[Any] = field(default_factory=list)
    columns: dict[str, list[Any]] = field(default_factory=dict)
    sums: list[int] = field(default_factory=list)
    squares: list[int] = field(default_factory=list)

    def add(self, number: int, item: Item) -> None:
        """Note a sample that is kept, with what only it tells."""
        for name in {*self.columns, *item.columns}:
            column = self.columns.setdefault(name, [None] * len(self.numbers))
            column.append(item.columns.get(name))
        self.numbers.append(number)
        self.labels.append(item.label)

    def to_dict(self) -> dict[str, Any]:
        """Return the note as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Note:
        """Read what `to_dict` wrote."""
        return cls(**{**content, "skipped": [Skipped(**skipped) for skipped in content["skipped"]]})


@dataclass(frozen=True)
class Spooled:
    """A chunk that stands: its note, and the length and CRC-32 of each record by variant."""

    note: Note
    lengths: dict[int, list[int]]
    crcs: dict[int, list[int]]


def join(notes: Sequence[Note]) -> Note:
    """Return one note for several, in their order."""
    names = sorted({name for note in notes for name in note.columns})
    return Note(
        numbers=[number for note in notes for number in note.numbers],
        skipped=[skipped for note in notes for skipped in note.skipped],
        labels=[label for note in notes for label in note.labels],
        columns={
            name: [v for note in notes for v in note.columns.get(name, [None] * len(note.numbers))] for name in names
        },
        sums=[sum(values) for values in itertools.zip_longest(*(note.sums for note in notes), fillvalue=0)],
        squares=[sum(values) for values in itertools.zip_longest(*(note.squares for note in notes), fillvalue=0)],
    )


def save(
    work: Path, block: int, chunk: int, spooled: Spooled, records: Mapping[int, Sequence[bytes]], whole: bool = True
) -> None:
    """Write a chunk, or the beginning of one, its note last. Raises OSError."""
    aside = work / f"spool.{uuid.uuid4().hex}.tmp"  # a worker orphaned by a kill may be writing the same chunk
    try:
        for variant, parts in records.items():
            with aside.open("wb") as file:
                file.writelines(parts)
            aside.replace(_records_path(work, block, chunk, variant))
        content = {"note": spooled.note.to_dict(), "lengths": spooled.lengths, "crcs": spooled.crcs}
        aside.write_text(json.dumps(content))
        aside.replace(_note_path(work, block, chunk, whole))
    finally:
        aside.unlink(missing_ok=True)


def load(work: Path, block: int, chunk: int, variants: Sequence[int], whole: bool = True) -> Spooled | None:
    """Return a chunk, or the beginning of one, that exists with all these variants, or None."""
    try:
        content = json.loads(_note_path(work, block, chunk, whole).read_bytes())
        lengths = {int(variant): values for variant, values in content["lengths"].items()}
        crcs = {int(variant): values for variant, values in content["crcs"].items()}
        if any(_records_path(work, block, chunk, v).stat().st_size != sum(lengths[v]) for v in variants):
            return None
        return Spooled(Note.from_dict(content["note"]), lengths, crcs)
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # not made, or torn by a power cut
        return None


def read(work: Path, block: int, chunk: int, variant: int, spooled: Spooled) -> Iterator[tuple[int, bytes, int]]:
    """Yield (sample number, record, CRC-32) of a chunk's variant. Raises OSError."""
    with _records_path(work, block, chunk, variant).open("rb") as file:
        for number, length, crc in zip(
            spooled.note.numbers, spooled.lengths[variant], spooled.crcs[variant], strict=True
        ):
            yield number, file.read(length), crc


def size(work: Path) -> int:
    """Return the bytes of all records that are spooled."""
    return sum(path.stat().st_size for path in work.glob("chunk-*.bin"))


def remove(work: Path, block: int) -> None:
    """Remove what is left of a block's chunks."""
    for path in work.glob(f"chunk-{block:05d}-*"):
        path.unlink(missing_ok=True)


def _note_path(work: Path, block: int, chunk: int, whole: bool = True) -> Path:
    return work / f"chunk-{block:05d}-{chunk:06d}{'' if whole else '-begun'}.json"


def _records_path(work: Path, block: int, chunk: int, variant: int) -> Path:
    return work / f"chunk-{block:05d}-{chunk:06d}-v{variant:04d}.bin"
