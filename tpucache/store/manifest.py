"""The manifest: what a cache holds, JSON in and out, validated and saved atomically."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tpucache.errors import DamageError, FormatError, NotACacheError
from tpucache.store import format as fmt
from tpucache.store.codecs import CODECS
from tpucache.store.codecs.pictures import check_image
from tpucache.store.fields import DTYPES, IMAGE, Field, RecordLayout
from tpucache.store.files.atomic import write_atomically
from tpucache.store.files.reading import refuse_too_many_files, refuse_url

_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_FIELD_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,63}")
_MAX_NESTING: Final = 33  # objects and lists inside each other, the manifest itself the first
_TABLES: Final = (fmt.INDEX_NAME, fmt.SAMPLES_NAME)
_MAX_SUM: Final = 1 << 100


@dataclass(frozen=True)
class FileEntry:
    """A file beside the manifest: its size in bytes and the SHA-256 of all of them."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class ShardEntry(FileEntry):
    """A shard: one variant of the kept samples of one block.

    `first` is the position, among all kept samples, of its first one. `records_sha256` is a hash of the keys and
    values alone, which does not depend on LMDB's page size.
    """

    variant: int
    block: int
    first: int
    records: int
    records_sha256: str


@dataclass(frozen=True)
class Skipped:
    """A sample that was found but could not be used, with the reason."""

    number: int
    path: str
    reason: str


@dataclass(frozen=True)
class Statistics:
    """Over the clean variant's image: per channel mean and standard deviation in 0..255, and samples per class.

    `sums` and `squares` are what the first two follow from, exactly, so that samples can be added.
    """

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    class_counts: tuple[int, ...] = ()
    sums: tuple[int, ...] = ()
    squares: tuple[int, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """What one cache holds, from what and by what it was made.

    `variants` are the variant numbers present, 0 (clean) first; the index has one run of `samples` rows for each, in
    this order. `recipe`, `source` and `created_by` are for warmup and for people: readers do not interpret them.
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

    @property
    def identity(self) -> str:
        """SHA-256, in hexadecimal, of the whole manifest: two caches share it only when all their bytes are the same.

        `fingerprint` compares recipes and clean records only; this also covers labels, variants and skipped samples.
        """
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @property
    def layout(self) -> RecordLayout:
        """How the fields lie in a record."""
        return RecordLayout(self.fields)

    @property
    def index(self) -> FileEntry:
        """The table of where each record lies."""
        return self._table("index")

    @property
    def table(self) -> FileEntry:
        """The table of the samples."""
        return self._table("samples")

    @property
    def generation(self) -> int:
        """How often samples or variants were added."""
        return int((fmt.TABLE_NAME.fullmatch(self.index.name) or [0, 0, 0])[2] or 0)

    def _table(self, stem: str) -> FileEntry:
        (entry,) = (entry for entry in self.tables if entry.name.startswith(stem))
        return entry

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """All files beside the manifest."""
        return (*self.tables, *self.shards)

    @property
    def records(self) -> int:
        """Records in all shards."""
        return self.samples * len(self.variants)

    @property
    def total_bytes(self) -> int:
        """Bytes of all shards and tables on disk."""
        return sum(entry.bytes for entry in self.files)

    @property
    def augmented(self) -> int:
        """Augmented variants: the K of `--variants K`."""
        return sum(variant > 0 for variant in self.variants)

    def to_json(self) -> str:
        """Return the manifest as indented JSON text with sorted keys."""
        content = {"format": fmt.FORMAT, "version": fmt.VERSION, **dataclasses.asdict(self)}
        return json.dumps(content, indent=1, sort_keys=True) + "\n"

    def save(self, directory: str | Path, aside: Path | None = None) -> None:
        """Write the manifest, whole or not at all; a directory with one is a finished cache. See write_atomically."""
        write_atomically(Path(directory) / fmt.MANIFEST_NAME, self.to_json().encode(), aside)

    @classmethod
    def load(cls, directory: str | Path) -> Manifest:
        """Read and validate a cache's manifest.

        Raises NotACacheError when there is none, FormatError when it says what no writer of this format says.
        """
        path = Path(directory) / fmt.MANIFEST_NAME
        refuse_url(directory)
        try:
            size = path.stat().st_size
            if size > fmt.MAX_MANIFEST_BYTES:
                raise FormatError(f"{path} has {size:,} bytes: no manifest is that large")
            text = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotACacheError(
                f"{directory} is not a finished cache: it holds no {fmt.MANIFEST_NAME}. "
                "Give the folder that `tpucache warmup` wrote, or run warmup again to finish it."
            ) from error
        except OSError as error:
            refuse_too_many_files(error)
            raise DamageError(f"{path} cannot be read: {error}") from error
        try:
            return cls.from_json(text)
        except FormatError as error:
            raise FormatError(f"{path}: {error}") from error

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Validate a manifest's JSON text; everything in it is taken as hostile. Raises FormatError."""
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"not JSON: {error}") from error
        _check_nesting(content)
        return _Reader(content, "manifest").manifest()


class _Reader:
    """One JSON object being read: every getter checks type and range and names the place it complains about."""

    def __init__(self, content: object, where: str) -> None:
        if not isinstance(content, dict):
            raise FormatError(f"{where} is no object")
        self.content: dict[str, Any] = content
        self.where = where

    def manifest(self) -> Manifest:
        if self.content.get("format") != fmt.FORMAT:
            raise FormatError("this is no tpucache manifest")
        version = self.content.get("version")
        if type(version) is not int or version != fmt.VERSION:
            raise FormatError(
                f"format version {version!r}, but this tpucache reads version {fmt.VERSION} only: "
                "install the tpucache that wrote it, or build the cache again"
            )
        manifest = Manifest(
            samples=self.integer("samples", 0, fmt.MAX_SAMPLES),
            variants=self.integers("variants", fmt.MAX_VARIANTS),
            fields=tuple(item.field() for item in self.objects("fields", fmt.MAX_FIELDS)),
            classes=self.strings("classes"),
            shards=tuple(item.shard() for item in self.objects("shards", fmt.MAX_SHARDS)),
            tables=tuple(item.file() for item in self.objects("tables", len(_TABLES))),
            skipped=tuple(item.skipped() for item in self.objects("skipped", fmt.MAX_SAMPLES)),
            statistics=self.object("statistics").statistics(),
            fingerprint=self.sha256("fingerprint"),
            recipe=self.object("recipe").content,
            source=self.object("source").content,
            created_by=self.object("created_by").content,
        )
        _check_whole(manifest)
        return manifest

    def field(self) -> Field:
        name = self.string("name")
        codec, dtype = self.string("codec"), self.string("dtype")
        shape = self.integers("shape", fmt.MAX_RECORD_BYTES)
        if not _FIELD_NAME.fullmatch(name) or codec not in CODECS or dtype not in DTYPES:
            raise FormatError(f"{self.where}: no field is {name!r} {codec!r} {dtype!r}")
        field = Field(name, codec, dtype, shape)
        if len(shape) > fmt.MAX_DIMENSIONS or field.nbytes > fmt.MAX_RECORD_BYTES:
            raise FormatError(f"{self.where}: no field has shape {shape}")
        try:
            CODECS[codec].check(field)
            if name == IMAGE:
                check_image(field)
        except FormatError as error:
            raise FormatError(f"{self.where}: {error}") from error
        return field

    def file(self) -> FileEntry:
        name = self.string("name")
        found = fmt.TABLE_NAME.fullmatch(name)
        if not found or name != fmt.table_name(f"{found[1]}.{found[3]}", int(found[2] or 0)):
            raise FormatError(f"{self.where}: no table is called {name!r}")
        return FileEntry(name, self.integer("bytes", 0, 1 << 62), self.sha256("sha256"))

    def shard(self) -> ShardEntry:
        name = self.string("name")
        if not fmt.SHARD_NAME.fullmatch(name):
            raise FormatError(f"{self.where}: no shard is called {name!r}")
        entry = ShardEntry(
            name=name,
            bytes=self.integer("bytes", 0, 1 << 62),
            sha256=self.sha256("sha256"),
            variant=self.integer("variant", 0, fmt.MAX_VARIANTS),
            block=self.integer("block", 0, fmt.MAX_SHARDS),
            first=self.integer("first", 0, fmt.MAX_SAMPLES),
            records=self.integer("records", 0, fmt.MAX_SAMPLES),
            records_sha256=self.sha256("records_sha256"),
        )
        if name != fmt.shard_name(entry.variant, entry.block):
            raise FormatError(f"{self.where}: {name} is not variant {entry.variant}, block {entry.block}")
        return entry

    def skipped(self) -> Skipped:
        number = self.integer("number", 0, fmt.MAX_SAMPLES)
        return Skipped(number, self.string("path"), self.string("reason"))

    def statistics(self) -> Statistics:
        return Statistics(
            self.floats("mean"),
            self.floats("std"),
            self.integers("class_counts", fmt.MAX_SAMPLES),
            self.integers("sums", _MAX_SUM),
            self.integers("squares", _MAX_SUM),
        )

    def get(self, key: str, kind: type | tuple[type, ...]) -> Any:
        value = self.content.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise FormatError(f"{self.where}: {key!r} is missing or of the wrong type")
        return value

    def integer(self, key: str, low: int, high: int) -> int:
        return _integer(self.get(key, int), low, high, f"{self.where}: {key!r}")

    def integers(self, key: str, high: int) -> tuple[int, ...]:
        where = f"{self.where}: an item of {key!r}"
        return tuple(_integer(item, 0, high, where) for item in self.get(key, list))

    def floats(self, key: str) -> tuple[float, ...]:
        values = self.get(key, list)
        if not all(type(value) in (int, float) and abs(value) < 1e9 for value in values):
            raise FormatError(f"{self.where}: {key!r} holds something other than numbers")
        return tuple(float(value) for value in values)

    def string(self, key: str) -> str:
        return str(self.get(key, str))

    def strings(self, key: str) -> tuple[str, ...]:
        values = self.get(key, list)
        if not all(isinstance(value, str) for value in values) or len(set(values)) != len(values):
            raise FormatError(f"{self.where}: {key!r} holds something other than distinct strings")
        return tuple(values)

    def sha256(self, key: str) -> str:
        value = self.string(key)
        if not _SHA256.fullmatch(value):
            raise FormatError(f"{self.where}: {key!r} is no SHA-256")
        return value

    def object(self, key: str) -> _Reader:
        return _Reader(self.content.get(key), f"{self.where}.{key}")

    def objects(self, key: str, limit: int) -> Sequence[_Reader]:
        items = self.get(key, list)
        if len(items) > limit:
            raise FormatError(f"{self.where}: {len(items)} {key} are more than the limit of {limit}")
        return [_Reader(item, f"{key}[{number}]") for number, item in enumerate(items)]


def _check_nesting(content: object) -> None:
    """Refuse what nests deeper than any manifest that is written.

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


def _check_whole(manifest: Manifest) -> None:
    """Refuse parts that are each valid but do not make one cache."""
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
    counts = manifest.statistics.class_counts
    if len(counts) not in (0, len(manifest.classes)):
        raise FormatError(f"{len(counts)} class counts for {len(manifest.classes)} classes")


def cache_fingerprint(recipe_fingerprint: str, shards: Sequence[ShardEntry]) -> str:
    """Return a hash of the recipe and the clean records: the same for equal contents wherever they were built."""
    digest = hashlib.sha256(recipe_fingerprint.encode())
    for entry in sorted(shards, key=lambda entry: entry.block):
        if entry.variant == 0:
            digest.update(bytes.fromhex(entry.records_sha256))
    return digest.hexdigest()
