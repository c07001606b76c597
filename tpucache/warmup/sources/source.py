"""The protocol of sources and the objects that they return; what selects some samples and loads them ahead.

Below these are functions that find files and make unique names.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import hashlib
import io
import math
import os
import re
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeVar

import numpy as np

from tpucache.errors import SourceError, TpucacheError, UsageError
from tpucache.native import Array
from tpucache.store.ahead import Lateness, ReadAhead, cached_for_threads, map_ahead
from tpucache.store.fields import BOXES, FIELD_NAME, IMAGE, KEYPOINTS, LABEL, MASK, SOFT_LABEL, SOFT_WEIGHT
from tpucache.store.samples import IMAGE_COLUMNS
from tpucache.text import named

#: The number of a class; one number for each column (several labels, or values to regress); or None.
Label = int | tuple[float, ...] | None
Made = TypeVar("Made")
#: How run lengths of masks count pixels.
RunsOrder = Literal["columns", "rows"]
#: Another column of the samples table: text, or numbers (n,).
Column = Sequence[str] | Array

#: Columns of the samples table that tpucache itself uses.
_RESERVED: Final = frozenset({"number", "path", LABEL, "source_bytes", "fold", SOFT_LABEL, SOFT_WEIGHT, *IMAGE_COLUMNS})
_LONGEST: Final = 56
#: Fields that tpucache itself uses.
_IMAGE_FIELDS: Final = frozenset({IMAGE, MASK, BOXES, KEYPOINTS})

_BRACES: Final = re.compile(r"\{(?:(\d+)\.\.(\d+)|([^{},]*(?:,[^{},]*)+))\}")
_WILDCARD: Final = re.compile(rf"[*?[]|{_BRACES.pattern}")
_MOST_PATTERNS: Final = 100_000
#: The size that is assumed for a sample of unknown size.
_UNKNOWN_BYTES: Final = 2 << 20


class Member(NamedTuple):
    """A file of a source, with everything that is needed to read it.

    `name` is its path in the folder or archive, and `bytes` its size. `written_ns` is its last change (0: unknown). In
    an archive, whose path relative to the source's root is `archive`, its header begins at `offset`; it has `packed`
    bytes when compressed, and `checksum` is the archive's checksum of the content (zip) or the header (tar).
    """

    archive: str
    name: str
    offset: int = 0
    bytes: int = 0
    packed: int = 0
    checksum: int = 0
    written_ns: int = 0


class Files(Protocol):
    """The files of a folder on a disk, of archives, or at a URL. `is_several`: names begin with that of an archive.

    `inside` is the folder in an archive; "" means that the whole archive is read.
    """

    @property
    def is_several(self) -> bool: ...

    @property
    def inside(self) -> str: ...

    def entries(self, names: Iterable[str] | None = None, /) -> dict[str, Member]:
        """Return all files and folders by name, or at least the files that have these `names`.

        The name of a folder ends with a slash.
        """
        ...

    def read(self, member: Member, path: str) -> bytes:
        """Return a file's content; `path` names the sample in errors."""
        ...


@dataclass(frozen=True)
class Sample:
    """One sample of a source.

    `number` identifies its records, and `path` is its unique name. `label` may be raw, as labels.py describes; it is a
    Label once it is read. By `bytes`, the size in the source, and `written_ns`, its last change, later runs notice a
    change (0: unknown). `members` are its files, unless it is the only file, called as the sample, of a folder. `runs`
    are the run lengths of its mask: class numbers and texts; None: it has none. `fault` says why it cannot be used, if
    that is known without loading it; the text completes a sentence that begins with the path.
    """

    number: int
    path: str
    label: Any = None
    bytes: int = 0
    members: tuple[Member, ...] = ()
    fault: str = ""
    written_ns: int = field(default=0, compare=False)
    runs: Sequence[tuple[int, str]] | None = None


@dataclass(frozen=True)
class Listing:
    """All samples of a source, numbered from 0 in a stable order, and everything that is known without loading them.

    `classes` are the names of the class numbers, or of the positions in vectors of 0 and 1 (empty: no names).
    `has_class_lists`: numbers in lists are classes, too. `columns` go into the samples table unchanged, with one item
    for each sample. `left_out` counts files that are not samples, by suffix. `asked` are the user's options as JSON
    values. `doubt` says why the folders are probably not classes; it is ignored if the user names the classes.
    `value_names` are the names of the columns of labels, in the order of a label's numbers (empty: no names), and
    `mask_names` those of the classes 1, 2, … of masks. `spellings` has the name in the source of each column whose name
    differs. `more_labels` are raw labels of samples that are left out, but decide with the others how labels are read.
    `like` is set by `like_source`. Raises SourceError for two classes with the same name.
    """

    samples: Sequence[Sample]
    classes: tuple[str, ...] = ()
    columns: Mapping[str, Column] = field(default_factory=dict)
    left_out: Mapping[str, int] = field(default_factory=dict)
    asked: Mapping[str, Any] = field(default_factory=dict)
    doubt: str = ""
    value_names: tuple[str, ...] = ()
    mask_names: tuple[str, ...] = ()
    spellings: Mapping[str, str] = field(default_factory=dict)
    has_class_lists: bool = False
    more_labels: Sequence[Any] = ()
    like: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if twice := repeated(self.classes):
            raise SourceError(f"two classes are called {twice!r}: give each a name of its own")


@dataclass(frozen=True)
class Item:
    """One sample that has been read.

    `fields` are its fields by name: `image` as encoded bytes, or pixels (height, width), (height, width, channels) or
    (channels, height, width); `mask` of the image, as encoded bytes or uint8 (height, width); `boxes` float (n, 4) of
    left, top, right, bottom in the image's pixels, or (n, 5) with a class number; `keypoints` float (n, 2) of x, y; and
    arrays of any other name, stored unchanged, of one dtype and shape in all samples. Pixel i covers [i, i + 1) of the
    image as displayed or as stored: the recipe's `coordinates` says which.

    `label` and `columns` are known only once the sample is read; a label may also be the name of a class, or a tuple of
    names. `mask_runs` can replace the field `mask`: rows of class, first pixel and length, int64 (n, 3). `runs_order`
    says whether they count pixels down the columns of the image or along its rows; None: probably down the columns.
    `boxes_size` is the (width, height) of the image of the boxes, if the source states it.
    """

    fields: Mapping[str, bytes | Array]
    label: Any = None
    columns: Mapping[str, str | int | float] = field(default_factory=dict)
    mask_runs: Array | None = None
    boxes_size: tuple[int, int] | None = None
    runs_order: RunsOrder | None = None

    def sha256(self, *labels: Label) -> str:
        """Return the hexadecimal SHA-256 of the fields, run lengths, size of the boxes' image, and given labels."""
        digest = hashlib.sha256(repr((labels, self.boxes_size)).encode())
        name_of_runs = "mask runs along rows" if self.runs_order == "rows" else "mask runs"
        runs = [] if self.mask_runs is None else [(name_of_runs, self.mask_runs)]
        for name, value in (*self.fields.items(), *runs):
            kind = "bytes" if isinstance(value, bytes) else f"{value.dtype.str} {value.shape}"
            digest.update(f"\n{name} {kind} {len(value) if isinstance(value, bytes) else value.nbytes}\n".encode())
            digest.update(value if isinstance(value, bytes) else np.ascontiguousarray(value).data)
        return digest.hexdigest()


class Items(Protocol):
    """A map-style dataset of any library."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Any: ...


class Source(Protocol):
    """A source of samples. It is pickled for every worker, so it must be small and safe to copy.

    If its attribute `loads_in_threads` is true, and its storage is slow to answer, threads of a worker load several
    samples at once.
    """

    def list(self) -> Listing:
        """Return all samples. The same source gives the same samples in the same order."""
        ...

    def load(self, sample: Sample) -> Item:
        """Return a sample's content."""
        ...


def loads_in_threads(source: Source) -> bool:
    """Return the attribute `loads_in_threads` of a source as a bool; False if it has none."""
    return bool(getattr(source, "loads_in_threads", False))


def cached_until_changed(most: int) -> Callable[[Callable[..., Made]], Callable[..., Made]]:
    """Return a decorator of functions that read a file. A process keeps `most` results, and reads changed files again.

    The first argument of such a function is the file's path. Raises SourceError if there is no such file.
    """

    def decorate(read: Callable[..., Made]) -> Callable[..., Made]:
        @cached_for_threads(most)
        def kept(_version: tuple[int, ...], path: Path, *given: Any) -> Made:
            return read(path, *given)

        @functools.wraps(read)
        def checked(path: Path, *given: Any) -> Made:
            try:
                status = path.stat()
                return kept((status.st_size, status.st_mtime_ns, status.st_ino), path, *given)
            except OSError as error:
                raise SourceError(f"{path}: {error.strerror}") from error

        return checked

    return decorate


class DerivedSource:
    """Base class of sources that change the samples of another source, `source`, and have its name."""

    source: Source

    @property
    def loads_in_threads(self) -> bool:
        """Whether threads may load several samples of `source` at once."""
        return loads_in_threads(self.source)

    def __repr__(self) -> str:
        return source_name(self.source)

    def load(self, sample: Sample) -> Item:
        """Load a sample from `source`."""
        return self.source.load(sample)


@dataclass(frozen=True, repr=False)
class CheckedSource(DerivedSource):
    """A source in the code of another package or of the user. Errors of this code become SourceErrors that name it.

    Errors of tpucache, which the code may raise itself, stay unchanged.
    """

    source: Source

    def list(self) -> Listing:
        listing = self._call("list", Listing, f"{self!r} cannot be listed")
        if any(sample.number != number for number, sample in enumerate(listing.samples)):
            raise SourceError(f"{self._where('list')} does not number the samples 0, 1, 2, … in their order")
        if twice := repeated(sample.path for sample in listing.samples):
            raise SourceError(f"{self._where('list')} has two samples with the path {twice!r}: give each its own path")
        return listing

    def load(self, sample: Sample) -> Item:
        return self._call("load", Item, sample.path, sample)

    def _call(self, method: str, kind: type[Made], what: str, *given: Any) -> Made:
        try:
            made = getattr(self.source, method)(*given)
        except TpucacheError:
            raise
        except Exception as error:
            raise SourceError(f"{what}: {self._where(method)} raised {error!r}") from error
        if not isinstance(made, kind):
            raise SourceError(f"{what}: {self._where(method)} returned a {type(made).__name__}, not {kind.__name__}")
        return made

    def _where(self, method: str) -> str:
        return f"{type(self.source).__module__}.{type(self.source).__qualname__}.{method}"


def repeated(values: Iterable[Any]) -> Any:
    """Return the first of some values that is there more than once, None without any."""
    return next((value for value, count in Counter(values).items() if count > 1), None)


def name_some(names: Sequence[str]) -> str:
    """Return the first five names as text, and how many more there are."""
    return named(map(repr, names))


def left_out_text(left_out: Mapping[str, int]) -> str:
    """Return the counts of left out files as text, such as `2 .heic, 1 .txt`, the most frequent suffix first."""
    return ", ".join(f"{count:,} {suffix}" for suffix, count in sorted(left_out.items(), key=lambda one: -one[1]))


def source_name(source: Source) -> str:
    """Return how messages name a source: its `repr`, or its class if it has no `__repr__` of its own."""
    return f"the {type(source).__name__}" if type(source).__repr__ is object.__repr__ else repr(source)


def select_source(
    source: Source, *, limit: int | None = None, include: Iterable[str] = (), exclude: Iterable[str] = ()
) -> Source:
    """Return a source with some of the samples of `source`; without options, `source` itself.

    `include` and `exclude` are patterns for paths, in which `*` matches any text, even `/`. `limit` is the most samples
    to keep: they are spread over the whole source, and a larger limit keeps all of them and more. Raises UsageError for
    a limit below 1.
    """
    included, excluded = tuple(include), tuple(exclude)
    if limit is not None and limit < 1:
        raise UsageError(f"limit is at least 1, not {limit}")
    return SelectedSource(source, limit, included, excluded) if limit or included or excluded else source


@dataclass(frozen=True, repr=False)
class SelectedSource(DerivedSource):
    """The samples of another source that `select_source` keeps, numbered again in the same order."""

    source: Source
    limit: int | None
    include: tuple[str, ...]
    exclude: tuple[str, ...]

    def list(self) -> Listing:
        """Return the kept samples. Classes that have no sample because of the patterns are left out."""
        listing = self.source.list()
        paths = [sample.path for sample in listing.samples]
        kept = [
            at
            for at, path in enumerate(paths)
            if (not self.include or any(_is_meant(path, pattern) for pattern in self.include))
            and not any(_is_meant(path, pattern) for pattern in self.exclude)
        ]
        if not paths:
            raise SourceError(f"{source_name(self.source)} has no samples")
        if not kept:
            raise SourceError(
                f"--include and --exclude leave none of the {len(paths):,} samples of {source_name(self.source)}: "
                f"their paths are such as {paths[0]!r}"
            )
        chosen = _few(kept, paths, self.limit)
        given = {"limit": self.limit, "include": [*self.include], "exclude": [*self.exclude]}
        asked = {name: value for name, value in given.items() if value}
        others = [label for at in sorted({*kept} - {*chosen}) if (label := listing.samples[at].label) is not None]
        few = taken(listing, chosen)
        few = dataclasses.replace(few, asked={**listing.asked, **asked}, more_labels=others)
        return _without_unused(few, {listing.samples[at].label for at in kept} if listing.classes else set())


def taken(listing: Listing, places: Sequence[int]) -> Listing:
    """Return a listing with the samples at these positions alone, numbered again, and their columns."""
    samples = [dataclasses.replace(listing.samples[at], number=number) for number, at in enumerate(places)]
    columns = {
        name: column[np.array(places, np.int64)] if isinstance(column, np.ndarray) else [column[at] for at in places]
        for name, column in listing.columns.items()
    }
    return dataclasses.replace(listing, samples=samples, columns=columns)


def _is_meant(path: str, pattern: str) -> bool:
    path, pattern = path.removeprefix("./"), pattern.removeprefix("./")
    return path == pattern or fnmatch.fnmatchcase(path, pattern)


def _few(kept: Sequence[int], paths: Sequence[str], limit: int | None) -> Sequence[int]:
    """Return at most `limit` of `kept`, in order: those whose paths have the lowest SHA-256, a pseudo-random choice."""
    if limit is None or limit >= len(kept):
        return kept
    hashes = {at: hashlib.sha256(os.fsencode(paths[at])).digest() for at in kept}
    return sorted(sorted(kept, key=hashes.__getitem__)[:limit])


def _without_unused(listing: Listing, used: set[object]) -> Listing:
    """Return a listing without the classes that no sample has, if each sample has at most one class."""
    if not listing.classes or not all(isinstance(label, int) for label in used):
        return listing
    left = [number for number in range(len(listing.classes)) if number in used]
    numbers = {old: new for new, old in enumerate(left)}
    samples = [
        dataclasses.replace(sample, label=numbers[sample.label]) if isinstance(sample.label, int) else sample
        for sample in listing.samples
    ]
    more = [numbers.get(label, label) for label in listing.more_labels]
    classes = tuple(listing.classes[number] for number in left)
    return dataclasses.replace(listing, samples=samples, classes=classes, more_labels=more)


@functools.lru_cache(maxsize=1)
def lateness_of(_work: Path, latency: float = 0.0) -> Lateness:
    """Return this process's measurements of how fast the storage answers, for the build with this work folder.

    The first measurement is `latency`, the seconds that the storage took for an earlier answer.
    """
    return Lateness(latency)


class LoadAhead(ReadAhead[Sample, Item]):
    """Loads samples ahead, and returns their items in order; the end of its `with` block ends its threads."""

    def __init__(
        self, load: Callable[[Sample], Item], source: Source, samples: Iterable[Sample], lateness: Lateness
    ) -> None:
        """Prepare to load `samples`, in this order, with the function `load`. This does not read them yet.

        If the storage is slow, and the source allows loading in threads, several threads call the function. Otherwise
        the calling thread does.
        """
        self._may_load_ahead = loads_in_threads(source)
        ahead = samples if self._may_load_ahead else ()
        super().__init__(load, ahead, lambda sample: sample.bytes or _UNKNOWN_BYTES, lateness)

    def follow(self, samples: Iterable[Sample]) -> None:
        """Load `samples` from now on, in this order, instead of the samples that were still to be loaded.

        If `samples` begins with samples that are being read already, these are not read again. Samples with the same
        number are the same.
        """
        if not self._may_load_ahead:
            return
        left, kept = deque(samples), deque[tuple[Sample, Future[Item]]]()
        while self._ahead and (not left or self._ahead[0][0].number != left[0].number):
            self._take().cancel()
        while self._ahead and left and self._ahead[0][0].number == left[0].number:
            kept.append((left.popleft(), self._ahead.popleft()[1]))
        while self._ahead:
            self._take().cancel()
        self._ahead, self._left, self._returned = kept, left, None


class SourceKind(NamedTuple):
    """A kind of source that a user can name by a path, a pattern or a name.

    `description` completes "give …" in errors. `matches` returns whether a user's text names such a source, and `open`
    returns the source. The second argument of `open` is a TableOptions or None; `options` are the names of those of its
    options that the source uses.
    """

    description: str
    matches: Callable[[str | Path], object]
    open: Callable[[str | Path, Any], Source]
    options: frozenset[str] = frozenset()


def column_names(names: Iterable[str]) -> dict[str, str]:
    """Return the name of each column in the samples table, by its name in the source.

    It has only letters, digits, `_` and `-`, is unique, and is not one that tpucache itself uses.
    """
    given: dict[str, str] = {}
    for name in names:
        given[name] = _unused(re.sub(r"[^A-Za-z0-9_-]", "_", name) or "_", {*given.values()} | _RESERVED)
    return given


def spellings(names: Iterable[str]) -> dict[str, str]:
    """Return the name in the source of each column that `column_names` gives another name."""
    return {safe: name for name, safe in column_names(names).items() if safe != name}


def field_names(names: Iterable[str]) -> dict[str, str]:
    """Return the name of each array in a record, by its name in the source.

    A name that no field can have is replaced by a similar, unique one of small letters, digits and `_`, which has no
    meaning of its own, as `image` and `mask` have.
    """
    names = list(names)
    given = {name: name for name in names if FIELD_NAME.fullmatch(name)}
    for name in names:
        if name not in given:
            safe = re.sub(r"[^a-z0-9_]", "_", name.lower())
            safe = (safe if safe[:1].isalpha() else f"f_{safe}")[:_LONGEST]
            given[name] = _unused(safe, {*given.values()} | _IMAGE_FIELDS)
    return given


def _unused(name: str, used: Collection[str]) -> str:
    while name in used:
        name += "_"
    return name


def unique(names: Iterable[str]) -> list[str]:
    """Return unique names: a second equal name gets `#2` appended, and so on."""
    used: Counter[str] = Counter()
    result = []
    for name in names:
        own = name
        while own in used:
            used[name] += 1
            own = f"{name}#{used[name]}"
        used[own] += 1
        result.append(own)
    return result


def has_wildcard(text: str) -> bool:
    """Return whether a text is a pattern: it has wildcards `*`, `**`, `?`, `[…]`, or braces `{00..31}`, `{a,b}`."""
    return _WILDCARD.search(text) is not None


def expand_braces(pattern: str) -> list[str]:
    """Return all patterns that a pattern with braces stands for, in order: `a{08..10}` for a08, a09 and a10."""
    complete = [""]
    start = 0
    for found in _BRACES.finditer(pattern):
        first, last, names = found.groups()
        numbers = range(0) if names else range(int(first), int(last) + 1)
        parts = names.split(",") if names else [f"{number:0{len(first)}}" for number in numbers[:_MOST_PATTERNS]]
        if not 0 < len(complete) * max(len(parts), len(numbers)) <= _MOST_PATTERNS:
            raise SourceError(
                f"{pattern}: {found[0]} counts down, or the pattern stands for more than {_MOST_PATTERNS:,} names: "
                "give a smaller range, from the lower number to the higher"
            )
        complete = [before + pattern[start : found.start()] + part for before in complete for part in parts]
        start = found.end()
    return [before + pattern[start:] for before in complete]


def split_pattern(pattern: str | Path) -> tuple[Path, str]:
    """Split a pattern into the folder above the first wildcard, or above the file, and the rest.

    A part that names an existing file or folder is not a wildcard, whatever it contains. File names relative to that
    folder do not change when files are added.
    """
    path = Path(pattern).absolute()
    last = len(path.parts) - 1
    wild = (at for at, part in enumerate(path.parts) if has_wildcard(part) and not Path(*path.parts[: at + 1]).exists())
    first = min(next(wild, last), last)
    return Path(*path.parts[:first]), os.path.join(*path.parts[first:])


def find_files(root: Path, pattern: str) -> list[Path]:
    """Return the files in a root that match a pattern, without hidden files, sorted by the bytes of their names.

    Paths are relative to the root. If the pattern has braces, each pattern that they stand for must match a file.
    """
    path = root / pattern
    names: set[Path] = set()
    for each in [pattern] if path.is_file() else expand_braces(pattern):
        exact = root / each
        found = [exact] if exact.is_file() else root.glob(each)
        shown = [file for file in found if not file.name.startswith(".")]
        are_files = map_ahead(Path.is_file, shown)
        matched = {file.relative_to(root) for file, is_file in zip(shown, are_files, strict=True) if is_file}
        if not matched:
            raise SourceError(f"{exact} matches no file")
        names |= matched
    return sorted(names, key=lambda name: path_key(name.as_posix()))


def path_key(name: str) -> list[bytes]:
    """Return a key that sorts paths by the bytes of their folders and names."""
    return [os.fsencode(part) for part in name.split("/")]


def load_npy(data: bytes) -> Array:
    """Return the array in the bytes of a .npy file of any program. Raises ValueError if it cannot be read."""
    formats = np.lib.format
    try:
        file = io.BytesIO(data)
        header = formats.read_array_header_1_0 if formats.read_magic(file) == (1, 0) else formats.read_array_header_2_0
        shape, _, dtype = header(file)
        if math.prod(shape) * dtype.itemsize > len(data) - file.tell():
            raise ValueError(f"the file is too short for an array of {dtype} {shape}, which its header describes")
        array: Array = formats.read_array(io.BytesIO(data), allow_pickle=False)
    except Exception as error:  # numpy raises anything for a damaged file
        raise ValueError(" ".join(str(error).split())) from error
    return array
