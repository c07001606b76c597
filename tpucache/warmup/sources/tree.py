"""Samples in a folder, in archives or at a URL: images in class folders, or files grouped by keys, as in WebDataset.

A key is a file's path up to the first dot of its name: `0001.jpg`, `0001.cls` and `0001.json` are one sample. The text
after the dot decides the file's meaning. With a usual suffix of images, it is an image, or a mask if the text begins
with mask or seg. `cls` is the number or name of a class; `json` an object of columns, and the label if there is no
`cls`; `txt` a text; `npy` an array. Other files are left out, and nothing is ever unpickled.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import NoneType
from typing import Any, Final

from tpucache.errors import SampleError, SourceError, UsageError
from tpucache.native import Array
from tpucache.progress import Progress
from tpucache.store.ahead import map_ahead
from tpucache.store.fields import IMAGE, MASK
from tpucache.store.format import MANIFEST_NAME, WORK_NAME
from tpucache.text import parse_json
from tpucache.warmup.sources.archives import find_archive
from tpucache.warmup.sources.columns import PLAIN, TableOptions, find_roles, numbers_of_texts, to_listing, to_number
from tpucache.warmup.sources.folder import (
    NO_SUFFIX,
    SUFFIXES,
    DiskFiles,
    folders_of,
    is_ignored,
    list_images,
    shared_folders,
)
from tpucache.warmup.sources.source import (
    Files,
    Item,
    Listing,
    Member,
    Sample,
    Source,
    SourceKind,
    expand_braces,
    field_names,
    has_wildcard,
    load_npy,
    path_key,
    split_pattern,
)
from tpucache.warmup.sources.table import OPTIONS, TableSource

#: Reads a member; the text names the sample in errors.
Read = Callable[[Member, str], bytes]

_TABLE: Final = ".csv"
_CLASS, _JSON, _TEXT, _ARRAY = "cls", "json", "txt", "npy"
_MASKS: Final = ("mask", "seg")
_OF_GROUPS: Final = ("label_cols", "label_sep", "fold_col", "keep", "drop")  # options
#: How the texts of a JPEG and of a PNG in base64 begin.
_BASE64: Final = ("/9j/", "iVBORw0KGgo")

_log: Final = logging.getLogger("tpucache")


class TreeSource:
    """The samples in a tree of files: in a folder, in one archive or several, or at a URL.

    If any image has a `.cls` file, or if options name labels, files with the same key (the path up to the first dot of
    the name) are one sample, as in WebDataset. If there are no folders that could be classes, a `.json` or `.txt` file
    of any image is enough. Otherwise images are listed by `list_images`.
    """

    loads_in_threads = True

    def __init__(self, files: Files, options: TableOptions | None = None, where: str = "") -> None:
        """Take the files, options that name labels among the keys of their JSON, and the tree's name in messages."""
        self._files = files
        self._options = options or TableOptions()
        self._where = where or str(files)
        self._has_groups = False  # `list` decides it, before workers get the source

    def __repr__(self) -> str:
        return str(self._files)

    def list(self) -> Listing:
        """Return all samples."""
        entries, where = self._files.entries(), self._where
        places = {
            name: name.removeprefix(f"{member.archive}/") if self._files.is_several else name
            for name, member in entries.items()
        }
        files = {
            name: member
            for name, member in entries.items()
            if not name.endswith("/") and not any(map(is_ignored, name.split("/")))
        }
        shared = len(shared_folders([folders_of(places[name]) for name in files])) if files else 0
        paths = ["/".join(places[name].split("/")[shared:]) for name in files]
        self._has_groups = are_groups(paths, bool(self._options.label_cols))
        self._options.check_used(_OF_GROUPS if self._has_groups else (), f"{where} is a source without a table")
        if self._has_groups:
            return list_groups(files, self._files.read, self._options, where)
        _check_dots(paths, where)
        archives = "".join({member.archive for member in entries.values()})
        are_named = self._files.is_several and not any(map(str.isdigit, archives))
        if are_named and not any("/" in place for place in places.values()):  # an archive for each class
            places = {name: f"{PurePosixPath(entries[name].archive).stem}/{place}" for name, place in places.items()}
        own = "" if self._files.inside else _own_folder([*places.values()])
        top = f"{where.rstrip('/')}/{own.rstrip('/')}" if own else where
        entries = {name: member for name, member in entries.items() if places[name] != own}
        return list_images(top, entries, lambda name: places[name].removeprefix(own))

    def load(self, sample: Sample) -> Item:
        """Return its content."""
        if sample.fault:
            raise SampleError(sample.path, sample.fault)
        if self._has_groups:
            return read_group(sample, self._files.read)
        member = sample.members[0] if sample.members else Member("", sample.path)
        return Item({IMAGE: self._files.read(member, sample.path)})


class ArchiveSource(TreeSource):
    """The samples in one archive or several."""


class FolderSource(TreeSource):
    """The images in the folder `root`, at any depth or those that match a pattern."""

    def __init__(self, root: str | Path, pattern: str = "", options: TableOptions | None = None) -> None:
        folder = Path(root).absolute()
        super().__init__(DiskFiles(folder, pattern), options, str(folder))


def _own_folder(places: Sequence[str]) -> str:
    """Return the folder, with a slash, that all files and folders are in, or "": the archive was made from it."""
    tops = {place.partition("/")[0] for place in places if not is_ignored(place.partition("/")[0])}
    is_loose = any("/" not in place for place in places if not is_ignored(place))
    return "" if len(tops) != 1 or is_loose else f"{tops.pop()}/"


def _open_archive(source: str | Path, options: TableOptions | None) -> Source:
    files = find_archive(source)
    if files is None or files.inside.lower().endswith(_TABLE):
        return TableSource(source, options)
    if (options or TableOptions()) == TableOptions() or files.is_several:
        return ArchiveSource(files, options)
    tables = [name for name in files.list() if name.lower().endswith(_TABLE)]
    if len(tables) > 1:
        raise UsageError(f"{files} holds {', '.join(tables)}: name one, such as {Path(source) / tables[0]}")
    return TableSource(Path(source) / tables[0], options) if tables else ArchiveSource(files, options)


ARCHIVE: Final = SourceKind(
    "a .zip or .tar of images, or a pattern of such files", find_archive, _open_archive, OPTIONS
)


def _is_pattern(source: str | Path) -> bool:
    if not has_wildcard(str(source)) or Path(source).exists():
        return False
    return {Path(each).suffix.lower() for each in expand_braces(str(source))} <= SUFFIXES


def _open_folder(source: str | Path, options: TableOptions | None) -> TreeSource:
    folder = Path(source)
    if (folder / WORK_NAME).is_dir() or ((folder / MANIFEST_NAME).is_file() and any(folder.glob("*.lmdb"))):
        raise SourceError(
            f"{source} is a finished cache: train, bench and CachedDataset read it directly, and "
            "`tpucache relabel` changes its labels. For another size or codec give the images that it was made of, and "
            "another folder for the new cache"
        )
    return FolderSource(folder, options=options)


FOLDER: Final = SourceKind(
    "a folder of images",
    lambda source: Path(source).is_dir() and next(Path(source).glob("*.parquet"), None) is None,
    _open_folder,
    frozenset(_OF_GROUPS),
)
IMAGES: Final = SourceKind(
    "a pattern of images such as 'photos/*.jpg'", _is_pattern, lambda source, _: FolderSource(*split_pattern(source))
)


def are_groups(names: Sequence[str], has_labels: bool = False) -> bool:
    """Return whether files with the same key are one sample, as in WebDataset; `names` are their paths.

    This is so if an image and a `.cls` file have the same key. If no file is in a folder, so that no folder can be a
    class, an image and a `.json` or `.txt` file are enough; with `has_labels`, any such file is.
    """
    kinds: dict[str, set[str]] = {}
    for name in names:
        key, ending = _split(name)
        kinds.setdefault(key, set()).add(_kind(ending))
    wanted = {_CLASS} if any("/" in name for name in names) and not has_labels else {_CLASS, _JSON, _TEXT}
    return any((IMAGE in found or has_labels) and found & wanted for found in kinds.values())


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
    """Return one sample for each group of files with the same key, in the order of an archive, or else of the names.

    `read` reads a file. `options` name the labels: keys of the samples' .json files, or `cls` or `txt`.
    """
    groups: dict[str, dict[str, str]] = {}
    left_out: Counter[str] = Counter()
    for name in sorted(files, key=lambda name: [] if files[name].archive else path_key(name)):
        key, ending = _split(name)
        if not _kind(ending):
            left_out[f".{ending}" if ending else NO_SUFFIX] += 1
        elif (other := groups.setdefault(key, {}).setdefault(ending, name)) != name:
            raise SourceError(
                f"{where}: {other!r} and {name!r} are the same file of a sample, as WebDataset does not tell large "
                "from small letters in suffixes: give each file a name of its own before the first dot"
            )
    for key in [key for key, group in groups.items() if {*map(_kind, group)} <= {_JSON, _TEXT}]:  # of no sample
        left_out.update(f".{ending}" for ending in groups.pop(key))
    if not groups:
        raise SourceError(f"{where} holds no samples")
    samples, found = list[Sample](), list[dict[str, Any]]()
    told = map_ahead(lambda group: _metadata(group, files, read), groups.values())
    with Progress(len(groups), "list", "samples", is_brief=True) as progress:
        for number, (group, (metadata, fault)) in enumerate(zip(groups.values(), told, strict=True)):
            members = tuple(files[name] for name in group.values())
            named = next((name for ending, name in group.items() if _kind(ending) == IMAGE), next(iter(group.values())))
            written = max(member.written_ns for member in members)
            size = sum(member.bytes for member in members)
            samples.append(Sample(number, named, None, size, members, fault, written))
            found.append(metadata)
            progress.advance(1)
    columns: dict[str, Sequence[Any]] = {
        name: [metadata.get(name) for metadata in found] for name in dict.fromkeys(n for m in found for n in m)
    }
    if any(_kind(ending) == _CLASS for group in groups.values() for ending in group):
        texts = columns.get(_CLASS, [None] * len(samples))
        if all(isinstance(text, (str, NoneType)) for text in texts):
            columns[_CLASS] = numbers_of_texts([text or "" for text in texts])
    texts = [text for text in columns.get(_TEXT, ()) if text]
    if texts and all(map(_are_boxes, texts)):
        _log.warning(
            "%s: boxes in .txt files, as of YOLO, are kept as text: --boxes reads them from COCO's JSON", where
        )
    kinds = {name: PLAIN if all(map(_is_plain, values)) else "" for name, values in columns.items()}
    likely = list(dict.fromkeys(options.likely_labels(columns, _CLASS)))
    roles = find_roles(kinds, options, where, likely=likely)
    return to_listing(samples, columns, where, options, roles, left_out=dict(sorted(left_out.items())))


def _metadata(group: Mapping[str, str], files: Mapping[str, Member], read: Read) -> tuple[dict[str, Any], str]:
    """Return the label, columns and text of a sample's files, and why one of them cannot be used, or ""."""
    known: dict[str, Any] = {}
    fault = ""
    for kind in (_JSON, _CLASS, _TEXT):  # other files win over keys of a .json
        try:
            if kind not in group:
                continue
            text = read(files[group[kind]], "").decode("utf-8-sig")  # Windows begins texts with a byte order mark
            content = parse_json(text) if kind == _JSON else {kind: text.strip() if kind == _CLASS else text}
            if not isinstance(content, dict):
                raise ValueError(f"it is a {type(content).__name__}: give an object")
            known |= content
        except ValueError as error:
            fault = f"its .{kind} cannot be read: {error}"
        except SampleError as error:
            fault = error.reason
    return known, fault


def _are_boxes(text: str) -> bool:
    """Return whether all lines are a class, and the middle, width and height of a box, or an outline, as of YOLO."""
    lines = map(str.split, text.splitlines())
    return all(len(parts) > 4 and None not in map(to_number, parts) for parts in lines)


def _is_plain(value: Any) -> bool:
    """Return whether a value of JSON is a number or a text that is no image in base64."""
    return isinstance(value, (int, float, NoneType)) or (isinstance(value, str) and not value.startswith(_BASE64))


def read_group(sample: Sample, read: Read) -> Item:
    """Read the files of one sample by `read`, and return its image, mask and arrays."""
    fields: dict[str, bytes | Array] = {}
    arrays: dict[str, Array] = {}
    for member in sample.members:
        ending = _split(member.name)[1]
        kind = _kind(ending)
        if kind in fields:
            raise SampleError(
                sample.path, f"has more than one {kind}: give each file a name of its own before the first dot"
            )
        if kind in (IMAGE, MASK):
            fields[kind] = read(member, sample.path)
        elif kind == _ARRAY:
            data = read(member, sample.path)
            arrays[ending.removesuffix(_ARRAY).rstrip(".") or "array"] = _array(data, sample.path)
    safe = field_names(arrays)
    fields |= {safe[name]: array for name, array in arrays.items()}
    if not fields:
        raise SampleError(sample.path, "has no image and no .npy array among its files")
    return Item(fields)


def _array(data: bytes, path: str) -> Array:
    try:
        return load_npy(data)
    except ValueError as error:
        raise SampleError(path, f"its .npy cannot be read: {error}") from error


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
