"""The manifest: a JSON file that describes a cache's contents. It is validated when read, and written atomically.

Its file is not trusted. The annotations of the dataclasses say which values each key may have; `_check_whole` checks
whether the values fit together.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np

from tpucache.errors import DamageError, FormatError, NotACacheError, UnknownCodecError
from tpucache.store import format as fmt
from tpucache.store.fields import Field, RecordLayout, check_field
from tpucache.store.files import read_file, refuse_too_many_files, refuse_url, write_atomically
from tpucache.text import (
    DISTINCT,
    GIVEN,
    LARGEST,
    Stored,
    at_most,
    between,
    matching,
    parse_object,
    read_as,
)

Number = Annotated[float, between(-LARGEST, LARGEST)]
Sha256 = Annotated[str, matching("[0-9a-f]{64}", "a SHA-256")]
_Bytes = Annotated[int, between(0, 1 << 62)]
_Count = Annotated[int, between(0, fmt.MAX_SAMPLES)]
_Sum = Annotated[int, between(-(1 << 700), 1 << 700)]  # sums of floats in units of 2^-149, of squares in 2^-298
_Square = Annotated[int, between(0, 1 << 700)]

#: The key of the line that has the SHA-256 of all other lines.
_DIGEST: Final = "digest"
#: Keys that are written only if they have a value.
_OPTIONAL: Final = ("deleted", "history", "value_names", "mask_names")
_DIGEST_LINE: Final = re.compile(rb'^ "digest": "([0-9a-f]{64})",\n', re.MULTILINE)
_VERSIONS: Final = (fmt.VERSION, fmt.DELETED_VERSION)
_TABLES: Final = (fmt.INDEX_NAME, fmt.SAMPLES_NAME)
_MAX_BYTES_A_RECORD: Final = fmt.MAX_RECORD_BYTES + (1 << 20)  # in a shard, including the pages for its key


@dataclass(frozen=True)
class FileEntry:
    """A file of a cache, other than its manifest: the name, the size in bytes and the SHA-256."""

    name: str
    bytes: _Bytes
    sha256: Sha256


@dataclass(frozen=True)
class ShardEntry(FileEntry):
    """A shard: the `records` records of one `block` of samples in one `variant`.

    `first` is the position of the block's first sample in the cache. The file also has the records of deleted samples,
    whose numbers are in `deleted` and which `records` does not count. `records_sha256` is the SHA-256 of the numbers,
    lengths and bytes of all records; unlike the file's, it does not depend on LMDB's page size.
    """

    variant: Annotated[int, between(0, fmt.MAX_VARIANTS)]
    block: Annotated[int, between(0, fmt.MAX_SHARDS)]
    first: _Count
    records: _Count
    records_sha256: Sha256
    deleted: tuple[_Count, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "deleted" or value}


@dataclass(frozen=True)
class Skipped:
    """A sample that could not be used: its number, its path in the source, and the reason."""

    number: _Count
    path: str
    reason: str


@dataclass(frozen=True)
class Deleted:
    """A deleted sample: its number and its path in the source. Its records stay in their shards."""

    number: _Count
    path: str


@dataclass(frozen=True)
class History:
    """How a version of a cache came about: its number, the command that made it, and the versions before it.

    `parents` has the identities of all earlier versions, starting with version 1.
    """

    number: Annotated[int, between(2, fmt.MAX_VERSIONS)]
    command: str
    parents: Annotated[tuple[Sha256, ...], DISTINCT]


@dataclass(frozen=True)
class Statistics:
    """Mean and standard deviation of each channel of the clean variant, and samples per class.

    `sums` and `squares` are the exact sums from which these are computed, so that samples can be added later. For float
    images they are integers in units of 2^-149 and 2^-298, of which every float32 and its square are multiples.
    """

    mean: Annotated[tuple[Number, ...], Stored.ALWAYS] = ()
    std: Annotated[tuple[Number, ...], Stored.ALWAYS] = ()
    class_counts: Annotated[tuple[_Count, ...], Stored.ALWAYS] = ()
    sums: Annotated[tuple[_Sum, ...], Stored.ALWAYS] = ()
    squares: Annotated[tuple[_Square, ...], Stored.ALWAYS] = ()


def mean_and_std(
    sums: Sequence[int], squares: Sequence[int], pixels: int, dtype: str
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    scale = pixels << (fmt.FLOAT_BITS if np.dtype(dtype).kind == "f" else 0)
    variances = [
        (square * pixels - total * total) / (scale * scale) for total, square in zip(sums, squares, strict=True)
    ]
    return tuple(total / scale for total in sums), tuple(variance**0.5 for variance in variances)


@dataclass(frozen=True)
class Manifest:
    """The contents of a cache, its source, and the tools that made it.

    `variants` are the numbers of the variants, 0 (clean) first. The index has `samples` rows for each variant, in this
    order. `recipe`, `source` and `created_by` are for warmup and for people: readers do not interpret them.

    `version` is that of the format; only `changed` updates it. `deleted` are the deleted samples whose records are
    still in shards. `history` is None in the first version. `value_names` are the columns of labels that are values, if
    there are several and the source names them, `mask_names` the classes 1, 2, … of masks, if a table names them.
    """

    samples: _Count
    variants: tuple[Annotated[int, between(0, fmt.MAX_VARIANTS)], ...]
    fields: Annotated[tuple[Field, ...], at_most(fmt.MAX_FIELDS)]
    classes: Annotated[tuple[str, ...], DISTINCT]
    shards: Annotated[tuple[ShardEntry, ...], at_most(fmt.MAX_SHARDS)]
    tables: Annotated[tuple[FileEntry, ...], at_most(len(_TABLES))]
    skipped: Annotated[tuple[Skipped, ...], at_most(fmt.MAX_SAMPLES)]
    statistics: Statistics
    fingerprint: Sha256
    recipe: Mapping[str, Any]
    source: Mapping[str, Any]
    created_by: Mapping[str, Any]
    version: int = fmt.VERSION
    deleted: Annotated[tuple[Deleted, ...], at_most(fmt.MAX_SAMPLES)] = ()
    history: Annotated[History | None, GIVEN] = None
    value_names: Annotated[tuple[str, ...], DISTINCT] = ()
    mask_names: Annotated[tuple[str, ...], DISTINCT] = ()

    @property
    def identity(self) -> str:
        """SHA-256 of the whole manifest, in hexadecimal: equal for two caches only if all their bytes are equal.

        `fingerprint` covers only the recipe and the clean records.
        """
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @property
    def number(self) -> int:
        """The number of this version of the cache, from 1."""
        return self.history.number if self.history else 1

    @property
    def parents(self) -> tuple[str, ...]:
        """The identities of the earlier versions, starting with version 1."""
        return self.history.parents if self.history else ()

    @property
    def layout(self) -> RecordLayout:
        """How the fields of a sample lie in its record."""
        return RecordLayout(self.fields)

    @property
    def index(self) -> FileEntry:
        """The file with the index."""
        return next(entry for entry in self.tables if entry.name.startswith("index"))

    @property
    def table(self) -> FileEntry:
        """The file with the samples table."""
        return next(entry for entry in self.tables if entry.name.startswith("samples"))

    @property
    def generation(self) -> int:
        """How often the tables were rewritten because samples, variants or labels were added, changed or deleted."""
        return int((fmt.TABLE_NAME.fullmatch(self.index.name) or [0, 0, 0])[2] or 0)

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """All files of the cache except the manifest."""
        return (*self.tables, *self.shards)

    @property
    def records(self) -> int:
        """The number of records in all shards. Each sample has one record per variant."""
        return self.samples * len(self.variants)

    @property
    def total_bytes(self) -> int:
        """Bytes of all shards and tables on disk."""
        return sum(entry.bytes for entry in self.files)

    @property
    def augmented(self) -> int:
        """The number of augmented variants: the K of `--variants K`."""
        return sum(variant > 0 for variant in self.variants)

    def changed(self, **changes: Any) -> Manifest:
        """Return a copy in which the attributes named in `changes` have new values, and `version` follows from them."""
        return dataclasses.replace(self, **{**changes, "version": version_of(changes.get("deleted", self.deleted))})

    def to_json(self) -> str:
        """Return the manifest as indented JSON text with sorted keys, without its digest."""
        return self._to_text({})

    @property
    def text(self) -> str:
        """The text of the manifest's file: that of `to_json` and one more line, "digest", with the identity."""
        return self._to_text({_DIGEST: self.identity})

    def _to_text(self, more: Mapping[str, Any]) -> str:
        content = {**more, "format": fmt.FORMAT, **dataclasses.asdict(self)}
        content["fields"] = [field.to_dict() for field in self.fields]
        content["shards"] = [entry.to_dict() for entry in self.shards]
        for name in _OPTIONAL:
            if not content[name]:
                del content[name]
        return json.dumps(content, indent=1, sort_keys=True) + "\n"

    def save(self, directory: str | Path, aside: Path | None = None) -> None:
        """Write the manifest atomically: the folder is then a finished cache. `aside` is that of `write_atomically`."""
        write_atomically(Path(directory) / fmt.MANIFEST_NAME, self.text.encode(), aside)

    @classmethod
    def load(cls, directory: str | Path) -> Manifest:
        """Read and validate the manifest of the cache in a folder.

        Raises NotACacheError when there is no manifest or a URL is given, FormatError when it is not valid, DamageError
        when its file cannot be read, StoreError when too many files are open.
        """
        path = Path(directory) / fmt.MANIFEST_NAME
        refuse_url(directory)
        try:
            text = read_file(path, fmt.MAX_MANIFEST_BYTES)
        except (FileNotFoundError, NotADirectoryError) as error:
            is_there = path.parent.exists()
            what = f"is not a finished cache: it holds no {fmt.MANIFEST_NAME}" if is_there else "does not exist"
            again = ", or run warmup again to finish it" if is_there else ""
            raise NotACacheError(f"{directory} {what}. Give the folder that `tpucache warmup` wrote{again}.") from error
        except OSError as error:
            refuse_too_many_files(error)
            raise DamageError(f"{path} cannot be read: {error}. Copy the cache again") from error
        try:
            return cls.from_json(text)
        except FormatError as error:
            advice = "" if isinstance(error, UnknownCodecError) else ". Copy the cache again, or build it again"
            raise type(error)(f"{path}: {error}{advice}") from error

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Parse and validate the text of a manifest's file. Raises FormatError for any other text."""
        manifest = _read_manifest(parse_object(text, "manifest"))
        data = text.encode() if isinstance(text, str) else text
        line = _DIGEST_LINE.search(data)
        if line is None or hashlib.sha256(data[: line.start()] + data[line.end() :]).hexdigest() != line[1].decode():
            raise FormatError("it was changed after it was written: it has no digest, or that of another text")
        return manifest


def differ_in_values(names: Sequence[str], others: Sequence[str]) -> bool:
    """Return whether labels of two caches are values of other columns, or of the same columns in another order."""
    return bool(names and others) and tuple(names) != tuple(others)


def mask_difference(first: Manifest, other: Manifest) -> str:
    """Return how the classes of two caches' masks differ, with what to do; "" if they are alike or not known."""
    if difference := mask_name_difference(first.mask_names, other.mask_names):
        return difference
    colours = [manifest.recipe.get("mask_colours") for manifest in (first, other)]
    if all(colours) and colours[0] != colours[1]:
        return "they were made with other --mask-colours: warm up with the same file"
    return ""


def mask_name_difference(names: Sequence[str], others: Sequence[str]) -> str:
    for number, (one, other) in enumerate(zip(names, others, strict=False), 1):
        if one != other:
            return f"class {number} is {other!r}, not {one!r}: write the numbers of the classes, from 1, in the table"
    return ""


def label_options(names: Sequence[str]) -> str:
    return " ".join(f"--label-col {shlex.quote(name)}" for name in names)


def version_of(deleted: Sequence[Deleted]) -> int:
    return fmt.DELETED_VERSION if deleted else fmt.VERSION


def _read_manifest(content: Mapping[str, Any]) -> Manifest:
    if content.get("format") != fmt.FORMAT:
        raise FormatError("this is not a tpucache manifest")
    version = content.get("version")
    if version == fmt.BANDED_VERSION or '"bands"' in json.dumps(content.get("fields")):
        raise FormatError("its images are stored in frequency bands, which are no longer read: build the cache again")
    if type(version) is not int or version not in _VERSIONS:
        raise FormatError(
            f"its format version is {version!r}, but this tpucache reads versions {fmt.VERSION} to "
            f"{fmt.DELETED_VERSION}: install the tpucache that wrote the cache, or build the cache again"
        )
    manifest = read_as(Manifest, content, "manifest")
    checks: Mapping[str, Callable[[Any], None]] = {
        "fields": check_field,
        "tables": _check_table,
        "shards": _check_shard,
    }
    for name, check in checks.items():
        for number, entry in enumerate(getattr(manifest, name)):
            try:
                check(entry)
            except FormatError as error:
                raise type(error)(f"{name}[{number}]: {error}") from error
    if manifest.history and len(manifest.parents) != manifest.number - 1:
        raise FormatError(
            f"version {manifest.number} lists {len(manifest.parents)} earlier versions, not {manifest.number - 1}"
        )
    _check_whole(manifest)
    return manifest


def _check_table(entry: FileEntry) -> None:
    found = fmt.TABLE_NAME.fullmatch(entry.name)
    if not found or entry.name != fmt.table_name(f"{found[1]}.{found[3]}", int(found[2] or 0)):
        raise FormatError(f"a table cannot have the name {entry.name!r}")


def _check_shard(entry: ShardEntry) -> None:
    if not fmt.SHARD_NAME.fullmatch(entry.name):
        raise FormatError(f"a shard cannot have the name {entry.name!r}")
    if entry.name != fmt.shard_name(entry.variant, entry.block):
        raise FormatError(f"the name {entry.name} does not match variant {entry.variant} and block {entry.block}")
    records = entry.records + len(entry.deleted)
    if entry.bytes > (records + 1) * _MAX_BYTES_A_RECORD:
        raise FormatError(f"{entry.name} has {entry.bytes:,} bytes, more than {records:,} records take")


def _check_whole(manifest: Manifest) -> None:
    if list(manifest.variants) != sorted(set(manifest.variants)) or not manifest.variants:
        raise FormatError(f"variants {manifest.variants} are not ascending")
    names = [field.name for field in manifest.fields]
    if len(set(names)) != len(names) or not names:
        raise FormatError("there are no fields, or two fields have the same name")
    if manifest.layout.nbytes > fmt.MAX_RECORD_BYTES:
        raise FormatError(f"a record of {manifest.layout.nbytes:,} bytes is too large")
    tables = sorted(entry.name for entry in manifest.tables)
    generations = [re.sub(r"\D", "", name) or "0" for name in tables]
    if len(set(generations)) != 1 or tables != [fmt.table_name(name, int(generations[0])) for name in _TABLES]:
        raise FormatError(
            f"the tables are not {' and '.join(_TABLES)}, or index-N.npy and samples-N.npz with the same N"
        )
    if len({entry.name for entry in manifest.shards}) != len(manifest.shards):
        raise FormatError("a shard is listed twice")
    expected = version_of(manifest.deleted)
    if manifest.version != expected:
        raise FormatError(
            f"its format version is {manifest.version}, but it should be {expected}: {fmt.DELETED_VERSION} is for "
            "deleted samples"
        )
    _check_deleted(manifest)
    position = dict.fromkeys(manifest.variants, 0)
    for entry in sorted(manifest.shards, key=lambda entry: entry.block):
        if entry.variant not in position:
            raise FormatError(f"{entry.name} belongs to a variant that is not listed")
        if entry.first != position[entry.variant]:
            raise FormatError(f"{entry.name} starts at sample {entry.first}, not {position[entry.variant]}")
        position[entry.variant] += entry.records
    for variant, records in position.items():
        if records != manifest.samples:
            raise FormatError(f"variant {variant} has {records} records, not {manifest.samples}")
    _check_statistics(manifest)


def _check_deleted(manifest: Manifest) -> None:
    numbers = [each.number for each in manifest.deleted]
    if numbers != sorted(set(numbers)):
        raise FormatError("the numbers of the deleted samples are not ascending")
    listed = set(numbers)
    for entry in manifest.shards:
        if entry.deleted and (list(entry.deleted) != sorted(set(entry.deleted)) or not listed >= set(entry.deleted)):
            raise FormatError(
                f"the deleted samples of {entry.name} are not ascending, or not all in the list of deleted samples"
            )


def _check_statistics(manifest: Manifest) -> None:
    channels = len(manifest.statistics.mean)
    if len(manifest.statistics.std) != channels:
        raise FormatError(f"{channels} channels have a mean, but {len(manifest.statistics.std)} a standard deviation")
    counts = manifest.statistics.class_counts
    if len(counts) not in (0, len(manifest.classes)):
        raise FormatError(f"there are {len(counts)} class counts for {len(manifest.classes)} classes")
