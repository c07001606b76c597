"""Samples in archives: images in folders, as on disk, or files grouped by keys, as in WebDataset's shards.

A key is a file's path up to the first dot of its name: `0001.jpg`, `0001.cls` and `0001.json` are one sample. The text
after the dot decides the file's meaning. With a usual suffix of images, it is an image, or a mask if the text begins
with mask or seg. `cls` is the number or name of a class; `json` an object of columns, and the label if there is no
`cls`; `txt` a text; `npy` an array. Other files are left out, and nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import NoneType
from typing import Any, Final, Protocol

import numpy as np

from tpucache.errors import SampleError, SourceError, UsageError
from tpucache.native import Array
from tpucache.progress import Progress
from tpucache.store.fields import IMAGE, MASK
from tpucache.text import parse_json
from tpucache.warmup.sources.archives import find_archive, without_folders
from tpucache.warmup.sources.cells import are_names, to_number
from tpucache.warmup.sources.folder import SUFFIXES, FoundFile, is_ignored, list_images, shared_folders, without_ignored
from tpucache.warmup.sources.labels import (
    LABEL_NAMES,
    check_any,
    columns_of_values,
    labels_of_columns,
    labels_of_values,
    tell_of_others,
)
from tpucache.warmup.sources.source import (
    Item,
    Label,
    Listing,
    Member,
    Sample,
    Source,
    SourceKind,
    field_names,
    spellings,
)
from tpucache.warmup.sources.table import OPTIONS, TableOptions, TableSource

_TABLE: Final = ".csv"

#: Reads a member; the text names the sample in errors.
Read = Callable[[Member, str], bytes]

_CLASS, _JSON, _TEXT, _ARRAY = "cls", "json", "txt", "npy"
_MASKS: Final = ("mask", "seg")


class MemberFiles(Protocol):
    """The files of archives, which are on a disk (ArchiveFiles) or at a URL (CloudZip)."""

    @property
    def is_several(self) -> bool:
        """Whether the names of files begin with the path of their archive."""
        ...

    @property
    def inside(self) -> str:
        """The folder of the archives to which names are relative; "" for the whole archive."""
        ...

    def list(self) -> dict[str, Member]:
        """Return all files by name."""
        ...

    def entries(self) -> dict[str, Member]:
        """Return all files and folders by name; the name of a folder ends with a slash."""
        ...

    def read(self, member: Member, path: str) -> bytes:
        """Return a file's content."""
        ...


class ArchiveSource:
    """The samples in one archive or several.

    If any image has a `.cls` file, or if options name labels, files with the same key (the path up to the first dot of
    the name) are one sample, as in WebDataset. If there are no folders that could be classes, a `.json` or `.txt` file
    of any image is enough. Otherwise images are listed as in `FolderSource`; a folder that contains all images is no
    class.
    """

    loads_in_threads = True

    def __init__(self, files: MemberFiles, options: TableOptions | None = None) -> None:
        """Take the files of archives, and options that name labels among the keys of their JSON. Reads nothing yet."""
        self._files = files
        self._options = options or TableOptions()

    def __repr__(self) -> str:
        return str(self._files)

    def list(self) -> Listing:
        """Return all samples. Raises SourceError for broken archives, and if there are no samples."""
        entries = self._files.entries()
        visible = {name: entries[name] for name in without_ignored(self._files, entries)}
        files = without_folders(visible)
        places = _places(visible, self._files.is_several)
        names = _without_shared([places[name] for name in files])
        paths = [name.as_posix() for name in names]
        if self._options.label_cols or are_groups(paths):
            return list_groups(files, self._files.read, self._options, str(self._files))
        _check_dots(paths, str(self._files))
        own = "" if self._files.inside else _own_folder(places)
        hollow = _hollow_folders(_places(entries, self._files.is_several), visible)
        if own:  # the archive was made from that folder
            places = {name: place.relative_to(own) for name, place in places.items() if place != PurePosixPath(own)}
            hollow = {place.relative_to(own) for place in hollow if PurePosixPath(own) in place.parents}
        found = [FoundFile(PurePosixPath(name), places[name], files[name].bytes, (files[name],)) for name in files]
        used = {above for name in files for above in places[name].parents}
        folders = {place for name, place in places.items() if name.endswith("/")}
        empty = sorted((folders | hollow) - used)
        leaves = [place for place in empty if not any(place in other.parents for other in empty)]
        where = f"{str(self._files).rstrip('/')}/{own}" if own else self._files
        return list_images(where, found, leaves)

    def load(self, sample: Sample) -> Item:
        """Return a sample's fields. Raises SampleError when one of its files cannot be read."""
        return read_group(sample, self._files.read)


def _places(entries: Mapping[str, Member], is_several: bool) -> dict[str, PurePosixPath]:
    places = {name: PurePosixPath(name) for name in entries}
    return {name: place.relative_to(entries[name].archive) for name, place in places.items()} if is_several else places


def _without_shared(places: Sequence[PurePosixPath]) -> list[PurePosixPath]:
    """Return paths without the folders that contain all of them."""
    shared = len(shared_folders([place.parts[:-1] for place in places])) if places else 0
    return [PurePosixPath(*place.parts[shared:]) for place in places]


def _own_folder(places: Mapping[str, PurePosixPath]) -> str:
    """Return the one folder that contains all files and folders, or "" if there is none."""
    tops = {place.parts[0] for place in places.values()}
    files = (place for name, place in places.items() if not name.endswith("/"))
    return "" if len(tops) != 1 or any(len(place.parts) == 1 for place in files) else tops.pop()


def _hollow_folders(places: Mapping[str, PurePosixPath], visible: Collection[str]) -> set[PurePosixPath]:
    """Return the folders that hold ignored files or folders; an archive need not list them as entries."""
    ignored = (place.parts for name, place in places.items() if name not in visible)
    above = (tuple(itertools.takewhile(lambda part: not is_ignored(part), parts)) for parts in ignored)
    return {PurePosixPath(*parts) for parts in above if parts}


def _is_archive(source: str | Path) -> bool:
    return find_archive(source) is not None


def _open(source: str | Path, options: TableOptions | None) -> Source:
    files = find_archive(source)
    if files is None or files.inside.lower().endswith(_TABLE):
        return TableSource(source, options)
    wanted = options or TableOptions()
    if wanted == TableOptions() or files.is_several:
        return ArchiveSource(files, options)
    tables = [name for name in files.list() if name.lower().endswith(_TABLE)]
    if len(tables) > 1:
        raise UsageError(f"{files} holds {', '.join(tables)}: name one, such as {Path(source) / tables[0]}")
    if tables:
        return TableSource(Path(source) / tables[0], options)
    return ArchiveSource(files, options)


KIND: Final = SourceKind("a .zip or .tar of images, or a pattern of such files", _is_archive, _open, OPTIONS)


def are_groups(names: Sequence[str]) -> bool:
    """Return whether files with the same key are one sample, as in WebDataset; `names` are their paths.

    This is so if an image and a `.cls` file have the same key. If no file is in a folder, so that no folder can be a
    class, an image and a `.json` or `.txt` file are enough.
    """
    kinds: dict[str, set[str]] = {}
    for name in names:
        key, ending = _split(name)
        kinds.setdefault(key, set()).add(_kind(ending))
    wanted = {_CLASS} if any("/" in name for name in names) else {_CLASS, _JSON, _TEXT}
    return any(IMAGE in found and found & wanted for found in kinds.values())


def _check_dots(names: Sequence[str], where: str) -> None:
    """Raise SourceError if an image and a `.cls` file have a name with a dot: WebDataset's key would end at the dot."""
    images = {name.rpartition(".")[0]: name for name in names if _kind(_split(name)[1]) == IMAGE}
    for name in names:
        stem, _, suffix = name.rpartition(".")
        if suffix.lower() == _CLASS and stem in images and stem != _split(name)[0]:
            raise SourceError(
                f"{where}: {name!r} is not the label of {images[stem]!r}: in WebDataset, the name of a sample ends at "
                f"the first dot, here {_split(name)[0]!r}. Rename the files so that they have no dot before the suffix"
            )


def list_groups(files: Mapping[str, Member], read: Read, options: TableOptions, where: str) -> Listing:
    """Return one sample for each group of files, in the order of the files.

    As in WebDataset, files belong to one group if their paths are equal up to the first dot of the name: the group's
    key. `read` reads a file. `options` name the labels: keys of the samples' .json files, or `cls` or `txt`. `where`
    names the source in errors. Raises SourceError if there are no samples, if there is no such label, or if labels have
    types that are not read.
    """
    groups: dict[str, dict[str, str]] = {}
    left_out: Counter[str] = Counter()
    for name in files:
        key, ending = _split(name)
        if _kind(ending):
            if (other := groups.setdefault(key, {}).setdefault(ending, name)) != name:
                raise SourceError(
                    f"{where}: {other!r} and {name!r} are the same file of a sample, as WebDataset does not tell large "
                    "from small letters in suffixes: give each file a name of its own before the first dot"
                )
        else:
            left_out[f".{ending}" if ending else "(no suffix)"] += 1
    if not groups:
        raise SourceError(f"{where} holds no samples")
    samples = [_sample(number, group, files) for number, group in enumerate(groups.values())]
    found = []
    with Progress(len(samples), "list", "samples", is_brief=True) as progress:
        for sample in samples:
            found.append(_listed_metadata(sample, read))
            progress.advance(1)
    names = list(dict.fromkeys(name for metadata in found for name in metadata))
    columns: dict[str, Sequence[Any]] = {name: [metadata.get(name) for metadata in found] for name in names}
    kinds = {_kind(_split(member.name)[1]) for sample in samples for member in sample.members}
    if _CLASS in kinds and _CLASS in columns:
        columns[_CLASS] = _class_column(columns[_CLASS])
    labels, classes, used = _labels(columns, options.label_cols, where)
    check_any(labels, options.label_cols, where)
    kept = {
        name: values
        for name, values in columns.items()
        if name not in used
        and options.is_kept(name)
        and all(isinstance(value, (str, int, float, NoneType)) for value in values)
    }
    if labels:
        samples = [dataclasses.replace(sample, label=label) for sample, label in zip(samples, labels, strict=True)]
    return Listing(
        samples,
        classes,
        columns_of_values(kept),
        dict(sorted(left_out.items())),
        value_names=used,
        spellings=spellings(kept),
    )


def read_group(sample: Sample, read: Read) -> Item:
    """Read the files of one sample by `read`, and return its image, mask and arrays.

    Raises SampleError if a file cannot be read or its content is not what its suffix says, if there are two images or
    two masks, and if there is neither an image nor an array.
    """
    fields: dict[str, bytes | Array] = {}
    arrays: dict[str, Array] = {}
    for member in sample.members:
        ending = _split(member.name)[1]
        kind = _kind(ending)
        if kind in (IMAGE, MASK):
            if kind in fields:
                raise SampleError(
                    sample.path, f"has more than one {kind}: give each file a name of its own before the first dot"
                )
            fields[kind] = read(member, sample.path)
        elif kind == _ARRAY:
            arrays[ending.removesuffix(_ARRAY).rstrip(".") or "array"] = _array(read(member, sample.path), sample.path)
        else:
            _metadata(kind, read(member, sample.path), sample.path)  # a broken file is an error here
    safe = field_names(arrays)
    fields |= {safe[name]: array for name, array in arrays.items()}
    if not fields:
        raise SampleError(sample.path, "has no image and no .npy array among its files")
    return Item(fields)


def _sample(number: int, group: Mapping[str, str], files: Mapping[str, Member]) -> Sample:
    members = tuple(files[name] for name in group.values())
    named = next((name for ending, name in group.items() if _kind(ending) == IMAGE), next(iter(group.values())))
    return Sample(number, named, None, sum(member.bytes for member in members), members)


def _listed_metadata(sample: Sample, read: Read) -> dict[str, Any]:
    """Return a sample's label, columns and text. Unreadable metadata are ignored here: loading raises the error."""
    known: dict[str, Any] = {}
    kinds = [(_kind(_split(member.name)[1]), member) for member in sample.members]
    for kind, member in sorted(kinds, key=lambda each: each[0] != _JSON):  # other files win over keys of a .json
        if kind in (_CLASS, _JSON, _TEXT):
            with contextlib.suppress(SampleError):
                known |= _metadata(kind, read(member, sample.path), sample.path)
    return known


def _metadata(kind: str, data: bytes, path: str) -> dict[str, Any]:
    try:
        text = data.decode("utf-8-sig")  # Windows begins texts with a byte order mark
        if kind == _JSON:
            content = parse_json(text)
            if not isinstance(content, dict):
                raise SampleError(path, f"its JSON is a {type(content).__name__}: give an object")
            return content
    except ValueError as error:
        raise SampleError(path, f"its .{kind} cannot be read: {error}") from error
    if kind == _CLASS:
        return {_CLASS: text.strip()}
    return {_TEXT: text}


def _class_column(texts: Sequence[Any]) -> Sequence[Any]:
    """Return the contents of .cls files as numbers, or as texts if one of them is a name; None for an empty file."""
    texts = [text or None if isinstance(text, str) else text for text in texts]
    known = {text for text in texts if isinstance(text, str)}
    if are_names(known) or not all(isinstance(to_number(text), int) for text in known):
        return texts
    return [to_number(text) if isinstance(text, str) else text for text in texts]


def _labels(
    columns: Mapping[str, Sequence[Any]], label_names: Sequence[str], where: str
) -> tuple[Sequence[Label], tuple[str, ...], tuple[str, ...]]:
    """Return labels, classes, and the names of the columns from which the labels come."""
    missing = [name for name in label_names if name not in columns]
    if missing:
        raise SourceError(f"{where} has no {missing[0]!r} in its JSON: its keys are {', '.join(map(repr, columns))}")
    found = [name for name in dict.fromkeys((_CLASS, *LABEL_NAMES)) if name in columns]
    used = tuple(label_names or found[:1])
    if not label_names and found:
        tell_of_others(where, found[0], found[1:])
    if len(used) > 1:
        return *labels_of_columns({name: columns[name] for name in used}, where), used
    if used:
        return *labels_of_values(columns[used[0]], where), used
    return (), (), ()


def _array(data: bytes, path: str) -> Array:
    try:
        array: Array = np.load(io.BytesIO(data), allow_pickle=False)
    except (OSError, ValueError, EOFError, SyntaxError, MemoryError, TypeError, OverflowError) as error:
        raise SampleError(path, f"its .npy cannot be read: {error}") from error
    return array


def _split(name: str) -> tuple[str, str]:
    """Return a file's key, and the text after the first dot of its name, in lower case."""
    folder, slash, base = name.rpartition("/")
    stem, _, ending = base.partition(".")
    return folder + slash + stem, ending.lower()


def _kind(ending: str) -> str:
    """Return the meaning of a file's ending: image, mask, cls, json, txt or npy; "" for a file that is not read."""
    if f".{ending.rpartition('.')[2]}" in SUFFIXES:
        return MASK if ending.startswith(_MASKS) else IMAGE
    if ending == _ARRAY or ending.endswith(f".{_ARRAY}"):
        return _ARRAY
    return ending if ending in (_CLASS, _JSON, _TEXT) else ""
