"""The manifest: what a cache holds, JSON in and out, validated and saved atomically.

Nothing in a manifest that is read is trusted: `JsonObject` checks the type and range of each value, and names the place
of what is wrong.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from tpucache.errors import DamageError, FormatError, NotACacheError, UnknownCodecError
from tpucache.store import format as fmt
from tpucache.store.fields import Field, RecordLayout, check_field, part_layouts
from tpucache.store.files import read_file, refuse_too_many_files, refuse_url, write_atomically
from tpucache.strict_json import LARGEST, parse_json

_SHA256: Final = re.compile(r"[0-9a-f]{64}")
#: The line of a manifest that has the SHA-256 of all its others.
_DIGEST: Final = "digest"
#: Keys that caches of one version of which nothing was deleted do not have.
_LATER: Final = ("deleted", "history")
_DIGEST_LINE: Final = re.compile(rb'^ "digest": "([0-9a-f]{64})",\n', re.MULTILINE)
_MAX_NESTING: Final = 33  # objects and lists inside each other, the manifest itself the first

_VERSIONS: Final = (fmt.VERSION, fmt.BANDED_VERSION, fmt.DELETED_VERSION)
_BEFORE_0_2: Final = (2, 3, 4, 5)
_TABLES: Final = (fmt.INDEX_NAME, fmt.SAMPLES_NAME)
_MAX_BYTES_A_RECORD: Final = fmt.MAX_RECORD_BYTES + (1 << 20)  # in a shard, with the pages that its key takes
_MAX_SUM: Final = 1 << 700  # of squares of floats, in units of 2^-298


class JsonObject:
    """A JSON object that is being read. Each getter raises FormatError for a value that is missing or does not fit."""

    def __init__(self, content: object, where: str) -> None:
        """Take a parsed value; `where` is its place, for messages. Raises FormatError when it is not an object."""
        if not isinstance(content, dict):
            raise FormatError(f"{where} is not an object")
        self.content: dict[str, Any] = content
        self.where = where

    def get(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """Return the value of a key, which has one of these types; no bool is a number."""
        value = self.content.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise FormatError(f"{self.where}: {key!r} is missing or of the wrong type")
        return value

    def integer(self, key: str, low: int, high: int) -> int:
        """Return a whole number from `low` to `high`."""
        return _integer(self.get(key, int), low, high, f"{self.where}: {key!r}")

    def integers(self, key: str, high: int, low: int = 0) -> tuple[int, ...]:
        """Return a list of whole numbers from `low` to `high`."""
        where = f"{self.where}: an item of {key!r}"
        return tuple(_integer(item, low, high, where) for item in self.get(key, list))

    def floats(self, key: str) -> tuple[float, ...]:
        """Return a list of numbers."""
        values = self.get(key, list)
        if not all(type(value) in (int, float) and abs(value) <= LARGEST for value in values):
            raise FormatError(f"{self.where}: {key!r} holds something other than numbers")
        return tuple(float(value) for value in values)

    def string(self, key: str) -> str:
        """Return a string."""
        return str(self.get(key, str))

    def strings(self, key: str) -> tuple[str, ...]:
        """Return a list of distinct strings."""
        values = self.get(key, list)
        if not all(isinstance(value, str) for value in values) or len(set(values)) != len(values):
            raise FormatError(f"{self.where}: {key!r} holds something other than distinct strings")
        return tuple(values)

    def sha256(self, key: str) -> str:
        """Return a SHA-256 in hexadecimal."""
        value = self.string(key)
        if not _SHA256.fullmatch(value):
            raise FormatError(f"{self.where}: {key!r} is not a SHA-256")
        return value

    def object(self, key: str) -> JsonObject:
        """Return an object."""
        return JsonObject(self.content.get(key), f"{self.where}.{key}")

    def objects(self, key: str, limit: int) -> Sequence[JsonObject]:
        """Return a list of at most `limit` objects."""
        items = self.get(key, list)
        if len(items) > limit:
            raise FormatError(f"{self.where}: {len(items)} {key} are more than the limit of {limit}")
        return [JsonObject(item, f"{key}[{number}]") for number, item in enumerate(items)]


def read_object(text: str | bytes, where: str) -> JsonObject:
    """Parse a JSON text whose whole is an object. Raises FormatError."""
    try:
        content = parse_json(text)
    except ValueError as error:
        raise FormatError(f"not JSON: {error}") from error
    _check_nesting(content)
    return JsonObject(content, where)


def _check_nesting(content: object) -> None:
    """Raise FormatError for what nests deeper than any manifest that is written.

    How deep json reads depends on the interpreter, and what handles the content afterwards may recurse, if only to
    print it.
    """
    level = [content]
    for _ in range(_MAX_NESTING):
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, (dict, list))]
        level = [value for items in inner for value in items if isinstance(value, (dict, list))]
    if level:
        raise FormatError(f"not JSON of a manifest: it nests deeper than {_MAX_NESTING} levels")


def _integer(value: object, low: int, high: int, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise FormatError(f"{where} should be a whole number from {low} to {high}, not {value!r:.40}")
    return value


@dataclass(frozen=True)
class FileEntry:
    """A file beside the manifest: its size in bytes and the SHA-256 of all of them."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class ShardEntry(FileEntry):
    """A shard: one variant of the kept samples of one block, or one band of it.

    `first` is the position, among all kept samples, of its first one, and `records` counts their records. The file
    also has records of the samples with the numbers `deleted`, which belong to no sample any more. `records_sha256` is
    a hash of the keys and values of all of them alone, which does not depend on LMDB's page size.
    """

    variant: int
    block: int
    first: int
    records: int
    records_sha256: str
    band: int = 0
    deleted: tuple[int, ...] = ()

    @property
    def part(self) -> fmt.Part:
        """Which part of its block it holds."""
        return fmt.Part(self.variant, self.band)

    def to_dict(self) -> dict[str, Any]:
        """Return the shard as plain values; the first band is not named, nor are no deleted samples."""
        return {name: value for name, value in vars(self).items() if name not in ("band", "deleted") or value}


@dataclass(frozen=True)
class Skipped:
    """A sample that was found but could not be used, with the reason."""

    number: int
    path: str
    reason: str


@dataclass(frozen=True)
class Deleted:
    """A sample that was deleted: its number, and where it came from. Its records stay in their shards."""

    number: int
    path: str


@dataclass(frozen=True)
class History:
    """Which version of a cache it is, the command that made it, and the identities of all versions before, in order."""

    number: int
    command: str
    parents: tuple[str, ...]


@dataclass(frozen=True)
class FrequencyStatistics:
    """What the lowest K frequencies of each block are worth for images of K/8 of the stored size, by a few samples.

    `psnr` is in dB, against the same size made of all frequencies. `std` is each channel's standard deviation over that
    of the stored size.
    """

    psnr: float
    std: tuple[float, ...]


@dataclass(frozen=True)
class Statistics:
    """Statistics of the clean variant: each channel's mean and standard deviation, samples of each class.

    `sums` and `squares` are the exact sums that the first two are computed from, so that samples can be added. Those of
    float images count multiples of 2^-149 and 2^-298, which all of their numbers and squares are. `frequencies` has
    those of K = 1 to 8 in a cache with bands, and nothing in others.
    """

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    class_counts: tuple[int, ...] = ()
    sums: tuple[int, ...] = ()
    squares: tuple[int, ...] = ()
    frequencies: tuple[FrequencyStatistics, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the statistics as plain values; those of frequencies only where there are any."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "frequencies" or value}


def mean_and_std(
    sums: Sequence[int], squares: Sequence[int], pixels: int, dtype: str
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return each channel's mean and standard deviation over so many pixels, from the exact sums of `Statistics`."""
    scale = pixels << (fmt.FLOAT_BITS if np.dtype(dtype).kind == "f" else 0)
    variances = [
        (square * pixels - total * total) / (scale * scale) for total, square in zip(sums, squares, strict=True)
    ]
    return tuple(total / scale for total in sums), tuple(variance**0.5 for variance in variances)


@dataclass(frozen=True)
class Manifest:
    """What one cache holds, from what and by what it was made.

    `variants` are the variant numbers present, 0 (clean) first; the index has one run of `samples` rows for each, in
    this order, and as many runs again for each further band of frequencies. `recipe`, `source` and `created_by` are for
    warmup and for people: readers do not interpret them.
    `version` is that of the format: a manifest keeps the one that it was read with until it is `changed`. `deleted` are
    the samples that were deleted and of which records are still in shards. `history` is None in the first version.
    """

    samples: int
    variants: tuple[int, ...]
    fields: tuple[Field, ...]
    classes: tuple[str, ...]
    shards: tuple[ShardEntry, ...]
    tables: tuple[FileEntry, ...]
    skipped: tuple[Skipped, ...]
    statistics: Statistics
    fingerprint: str
    recipe: Mapping[str, Any]
    source: Mapping[str, Any]
    created_by: Mapping[str, Any]
    version: int = fmt.VERSION
    deleted: tuple[Deleted, ...] = ()
    history: History | None = None

    @property
    def identity(self) -> str:
        """SHA-256, in hexadecimal, of the whole manifest: two caches share it only when all their bytes are the same.

        `fingerprint` compares recipes and clean records only; this also covers labels, variants and skipped samples.
        """
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @property
    def number(self) -> int:
        """Which version of its cache it is, from 1."""
        return self.history.number if self.history else 1

    @property
    def parents(self) -> tuple[str, ...]:
        """The identities of the versions before, the first one first."""
        return self.history.parents if self.history else ()

    @property
    def layouts(self) -> tuple[RecordLayout, ...]:
        """How the fields lie in the records of each band; in all records alike where there is one."""
        return part_layouts(self.fields)

    @property
    def layout(self) -> RecordLayout:
        """How the fields lie in a record of the first band, which has all of them."""
        return self.layouts[0]

    @property
    def index(self) -> FileEntry:
        """The table of where each record lies."""
        return next(entry for entry in self.tables if entry.name.startswith("index"))

    @property
    def table(self) -> FileEntry:
        """The table of the samples."""
        return next(entry for entry in self.tables if entry.name.startswith("samples"))

    @property
    def generation(self) -> int:
        """How often samples or variants were added, labels were changed, or skipped samples became sound."""
        return int((fmt.TABLE_NAME.fullmatch(self.index.name) or [0, 0, 0])[2] or 0)

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """All files beside the manifest."""
        return (*self.tables, *self.shards)

    @property
    def value_bytes(self) -> int:
        """Of the records that a value of a shard holds together, 0 where each is a value of its own."""
        return value_bytes_of(self.fields)

    @property
    def records(self) -> int:
        """Records in all shards: each band has one of its own."""
        return self.samples * len(self.variants) * len(self.layouts)

    @property
    def total_bytes(self) -> int:
        """Bytes of all shards and tables on disk."""
        return sum(entry.bytes for entry in self.files)

    @property
    def augmented(self) -> int:
        """Augmented variants: the K of `--variants K`."""
        return sum(variant > 0 for variant in self.variants)

    def changed(self, **changes: Any) -> Manifest:
        """Return the manifest with other values, in this version of the format."""
        fields, deleted = changes.get("fields", self.fields), changes.get("deleted", self.deleted)
        return dataclasses.replace(self, **{**changes, "version": version_of(fields, deleted)})

    def to_json(self) -> str:
        """Return the manifest as indented JSON text with sorted keys, without its digest."""
        return self._to_text({})

    @property
    def text(self) -> str:
        """The text of its file: `to_json`, and a line with the SHA-256 of that, which is its identity."""
        return self._to_text({_DIGEST: self.identity})

    def _to_text(self, more: Mapping[str, Any]) -> str:
        content = {**more, "format": fmt.FORMAT, **dataclasses.asdict(self)}
        content["fields"] = [field.to_dict() for field in self.fields]
        content["statistics"] = self.statistics.to_dict()
        content["shards"] = [entry.to_dict() for entry in self.shards]
        for name in _LATER:
            if not content[name]:
                del content[name]
        return json.dumps(content, indent=1, sort_keys=True) + "\n"

    def save(self, directory: str | Path, aside: Path | None = None) -> None:
        """Write the manifest, whole or not at all; a directory with one is a finished cache. See write_atomically."""
        write_atomically(Path(directory) / fmt.MANIFEST_NAME, self.text.encode(), aside)

    @classmethod
    def load(cls, directory: str | Path) -> Manifest:
        """Read and validate a cache's manifest.

        Raises NotACacheError when there is none, FormatError when it holds what no writer of this format writes.
        """
        path = Path(directory) / fmt.MANIFEST_NAME
        refuse_url(directory)
        try:
            size = path.stat().st_size
            if size > fmt.MAX_MANIFEST_BYTES:
                raise FormatError(f"{path} has {size:,} bytes: no manifest is that large")
            text = read_file(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            is_there = path.parent.exists()
            what = f"is not a finished cache: it holds no {fmt.MANIFEST_NAME}" if is_there else "does not exist"
            again = ", or run warmup again to finish it" if is_there else ""
            raise NotACacheError(f"{directory} {what}. Give the folder that `tpucache warmup` wrote{again}.") from error
        except OSError as error:
            refuse_too_many_files(error)
            raise DamageError(f"{path} cannot be read: {error}") from error
        try:
            return cls.from_json(text)
        except FormatError as error:
            advice = "" if isinstance(error, UnknownCodecError) else ". Copy the cache again, or build it again"
            raise type(error)(f"{path}: {error}{advice}") from error

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Validate a manifest's JSON text; nothing in it is trusted. Raises FormatError.

        So does a text that is not the one that its digest was written for; a manifest of before 0.3 may have none.
        """
        item = read_object(text, "manifest")
        manifest = _read_manifest(item)
        if _DIGEST in item.content:
            _check_digest(text.encode() if isinstance(text, str) else text)
        return manifest


def _check_digest(text: bytes) -> None:
    """Raise FormatError unless a manifest's text has, in a line of its own, the SHA-256 of all its other lines."""
    found = _DIGEST_LINE.search(text)
    if found is None or hashlib.sha256(text[: found.start()] + text[found.end() :]).hexdigest() != found[1].decode():
        raise FormatError("it is not as it was written: its digest is that of another text")


def unknown_keys(text: bytes) -> list[str]:
    """Return the keys of a manifest without a digest that no version which wrote none has. Raises FormatError."""
    content = read_object(text, "manifest").content
    known = {"format", *(field.name for field in dataclasses.fields(Manifest))}
    return [] if _DIGEST in content else sorted(content.keys() - known)


def version_of(fields: Sequence[Field], deleted: Sequence[Deleted] = ()) -> int:
    """Return the version of the format of a cache with records of these fields, of which these samples were deleted."""
    if deleted:
        return fmt.DELETED_VERSION
    return fmt.BANDED_VERSION if _has_bands(fields) else fmt.VERSION


def value_bytes_of(fields: Sequence[Field]) -> int:
    """Return how many bytes of records a value of a shard holds together: 0 where each record is one of its own."""
    return fmt.VALUE_BYTES if _has_bands(fields) else 0


def _has_bands(fields: Sequence[Field]) -> bool:
    return any(field.bands is not None for field in fields)


def _read_manifest(item: JsonObject) -> Manifest:
    if item.content.get("format") != fmt.FORMAT:
        raise FormatError("this is not a tpucache manifest")
    version = item.content.get("version")
    if type(version) is not int or version not in _VERSIONS:
        convert = ", or have tpucache 0.2 convert it by Manifest.load(cache).changed().save(cache)"
        raise FormatError(
            f"format version {version!r}, but this tpucache reads versions {fmt.VERSION} to {fmt.DELETED_VERSION}: "
            f"install the tpucache that wrote it, or build the cache again{convert if version in _BEFORE_0_2 else ''}"
        )
    manifest = Manifest(
        samples=item.integer("samples", 0, fmt.MAX_SAMPLES),
        variants=item.integers("variants", fmt.MAX_VARIANTS),
        fields=tuple(read_field(each) for each in item.objects("fields", fmt.MAX_FIELDS)),
        classes=item.strings("classes"),
        shards=tuple(_read_shard(each) for each in item.objects("shards", fmt.MAX_SHARDS)),
        tables=tuple(_read_file(each) for each in item.objects("tables", len(_TABLES))),
        skipped=tuple(_read_skipped(each) for each in item.objects("skipped", fmt.MAX_SAMPLES)),
        statistics=_read_statistics(item.object("statistics")),
        fingerprint=item.sha256("fingerprint"),
        recipe=item.object("recipe").content,
        source=item.object("source").content,
        created_by=item.object("created_by").content,
        version=version,
        deleted=tuple(map(_read_deleted, _optional(item, "deleted"))),
        history=_read_history(item.object("history")) if "history" in item.content else None,
    )
    _check_whole(manifest)
    return manifest


def read_field(item: JsonObject) -> Field:
    """Return the field that an untrusted object describes. Raises FormatError."""
    shape = item.integers("shape", fmt.MAX_RECORD_BYTES)
    quality = item.integer("quality", 0, 100) if "quality" in item.content else None
    chroma, packing = (item.string(key) if key in item.content else None for key in ("chroma", "packing"))
    bands = item.integers("bands", fmt.MAX_BANDS, 1) if "bands" in item.content else None
    names = item.string("name"), item.string("codec"), item.string("dtype")
    field = Field(*names, shape, quality, chroma, packing, bands)
    try:
        check_field(field)
    except FormatError as error:
        raise type(error)(f"{item.where}: {error}") from error
    return field


def _read_file(item: JsonObject) -> FileEntry:
    name = item.string("name")
    found = fmt.TABLE_NAME.fullmatch(name)
    if not found or name != fmt.table_name(f"{found[1]}.{found[3]}", int(found[2] or 0)):
        raise FormatError(f"{item.where}: no table is called {name!r}")
    return FileEntry(name, item.integer("bytes", 0, 1 << 62), item.sha256("sha256"))


def _read_shard(item: JsonObject) -> ShardEntry:
    name = item.string("name")
    if not fmt.SHARD_NAME.fullmatch(name):
        raise FormatError(f"{item.where}: no shard is called {name!r}")
    entry = ShardEntry(
        name=name,
        bytes=item.integer("bytes", 0, 1 << 62),
        sha256=item.sha256("sha256"),
        variant=item.integer("variant", 0, fmt.MAX_VARIANTS),
        block=item.integer("block", 0, fmt.MAX_SHARDS),
        first=item.integer("first", 0, fmt.MAX_SAMPLES),
        records=item.integer("records", 0, fmt.MAX_SAMPLES),
        records_sha256=item.sha256("records_sha256"),
        band=item.integer("band", 1, fmt.MAX_BANDS - 1) if "band" in item.content else 0,
        deleted=item.integers("deleted", fmt.MAX_SAMPLES) if "deleted" in item.content else (),
    )
    if name != fmt.shard_name(entry.part, entry.block):
        raise FormatError(f"{item.where}: {name} is not block {entry.block}, {entry.part}")
    records = entry.records + len(entry.deleted)
    if entry.bytes > (records + 1) * _MAX_BYTES_A_RECORD:
        raise FormatError(f"{item.where}: {name} has {entry.bytes:,} bytes, more than {records:,} records take")
    return entry


def _read_skipped(item: JsonObject) -> Skipped:
    return Skipped(item.integer("number", 0, fmt.MAX_SAMPLES), item.string("path"), item.string("reason"))


def _optional(item: JsonObject, key: str) -> Sequence[JsonObject]:
    return item.objects(key, fmt.MAX_SAMPLES) if key in item.content else ()


def _read_deleted(item: JsonObject) -> Deleted:
    return Deleted(item.integer("number", 0, fmt.MAX_SAMPLES), item.string("path"))


def _read_history(item: JsonObject) -> History:
    parents = item.strings("parents")
    if wrong := next((each for each in parents if not _SHA256.fullmatch(each)), None):
        raise FormatError(f"{item.where}: {wrong!r:.80} is no SHA-256")
    history = History(item.integer("number", 2, fmt.MAX_VERSIONS), item.string("command"), parents)
    if len(parents) != history.number - 1:
        raise FormatError(f"{item.where}: version {history.number} has {len(parents)} versions before it")
    return history


def _read_statistics(item: JsonObject) -> Statistics:
    return Statistics(
        item.floats("mean"),
        item.floats("std"),
        item.integers("class_counts", fmt.MAX_SAMPLES),
        item.integers("sums", _MAX_SUM, -_MAX_SUM),
        item.integers("squares", _MAX_SUM),
        tuple(map(_read_frequencies, item.objects("frequencies", 8))) if "frequencies" in item.content else (),
    )


def _read_frequencies(item: JsonObject) -> FrequencyStatistics:
    (psnr,) = JsonObject({"psnr": [item.content.get("psnr")]}, item.where).floats("psnr")
    return FrequencyStatistics(psnr, item.floats("std"))


def _check_whole(manifest: Manifest) -> None:
    """Raise FormatError for parts that are each valid but do not fit together."""
    if list(manifest.variants) != sorted(set(manifest.variants)) or not manifest.variants:
        raise FormatError(f"variants {manifest.variants} are not ascending")
    names = [field.name for field in manifest.fields]
    if len(set(names)) != len(names) or not names:
        raise FormatError("there are no fields, or two of one name")
    if manifest.layout.nbytes > fmt.MAX_RECORD_BYTES:
        raise FormatError(f"a record of {manifest.layout.nbytes:,} bytes is larger than any that is written")
    tables = sorted(entry.name for entry in manifest.tables)
    generations = [re.sub(r"\D", "", name) or "0" for name in tables]
    if len(set(generations)) != 1 or tables != [fmt.table_name(name, int(generations[0])) for name in _TABLES]:
        raise FormatError(f"the tables are not {' and '.join(_TABLES)}, or a later generation of them")
    if len({entry.name for entry in manifest.shards}) != len(manifest.shards):
        raise FormatError("a shard is listed twice")
    expected = version_of(manifest.fields, manifest.deleted)
    if manifest.version != expected:
        raise FormatError(
            f"version {fmt.BANDED_VERSION} is that of images in bands, {fmt.DELETED_VERSION} that of deleted samples, "
            f"and this is version {manifest.version}"
        )
    _check_deleted(manifest)
    bands = range(len(manifest.layouts))
    position = {fmt.Part(variant, band): 0 for band in bands for variant in manifest.variants}
    for entry in sorted(manifest.shards, key=lambda entry: entry.block):
        if entry.part not in position:
            raise FormatError(f"{entry.name} belongs to a variant that is not listed, or to a band that there is not")
        if entry.first != position[entry.part]:
            raise FormatError(f"{entry.name} starts at sample {entry.first}, not {position[entry.part]}")
        position[entry.part] += entry.records
    for part, records in position.items():
        if records != manifest.samples:
            of_band = f", band {part.band}," if part.band else ""
            raise FormatError(f"variant {part.variant}{of_band} has {records} records, not {manifest.samples}")
    _check_statistics(manifest)


def _check_deleted(manifest: Manifest) -> None:
    numbers = [each.number for each in manifest.deleted]
    if numbers != sorted(set(numbers)):
        raise FormatError("the numbers of the deleted samples are not ascending")
    known = set(numbers)
    for entry in manifest.shards:
        if entry.deleted and (list(entry.deleted) != sorted(set(entry.deleted)) or not known.issuperset(entry.deleted)):
            raise FormatError(f"{entry.name} has records of deleted samples that are not listed in order")


def _check_statistics(manifest: Manifest) -> None:
    channels = len(manifest.statistics.mean)
    if any({len(each.std), len(manifest.statistics.std)} != {channels} for each in manifest.statistics.frequencies):
        raise FormatError(f"the statistics of frequencies are not of {channels} channels")
    counts = manifest.statistics.class_counts
    if len(counts) not in (0, len(manifest.classes)):
        raise FormatError(f"{len(counts)} class counts for {len(manifest.classes)} classes")
