"""Images in a folder: one subfolder for each class, or a flat folder without labels."""

from __future__ import annotations

import itertools
import logging
import os
import re
import shlex
import stat
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Final, NamedTuple

from tpucache.errors import SampleError, SourceError
from tpucache.progress import Progress
from tpucache.store import files
from tpucache.store.ahead import map_ahead
from tpucache.store.fields import IMAGE
from tpucache.store.format import MANIFEST_NAME, WORK_NAME
from tpucache.warmup.sources.source import (
    Item,
    Listing,
    Member,
    Sample,
    SourceKind,
    expand_braces,
    find_files,
    has_wildcard,
    left_out_text,
    split_pattern,
)

#: Suffixes of images; other files are not samples. Whether a file really is an image shows when it is decoded.
_NAMES: Final = (
    "jpg jpeg jpe jfif mpo png gif bmp dib webp tif tiff ppm pgm pbm pnm jp2 avif ico tga heic heif hif dcm dicom"
)
SUFFIXES: Final = frozenset(f".{name}" for name in _NAMES.split())
#: Files with this suffix are samples only if there are no images: next to images, they rarely are samples.
_ARRAY_SUFFIX: Final = ".npy"
#: Files without a suffix that are left out are counted under this name.
NO_SUFFIX: Final = "(no suffix)"
_LONGEST_SUFFIX: Final = 10
#: Names of files and folders that operating systems, NAS and tools add, besides hidden ones. They are ignored.
JUNK: Final = frozenset(
    (
        *("thumbs.db", "ehthumbs.db", "desktop.ini", "$recycle.bin", "recycler", "system volume information"),
        *("__macosx", "lost+found", "@eadir", "@tmp", "#recycle", "#snapshot", "@recycle", "@recently-snapshot"),
        *("__pycache__", "icon\r"),
    )
)
#: Words in the names of the parts of a data set. Folders are parts if one is for training and another one is held out,
#: and their names have the same other words, such as train_images and test_images.
_TRAIN: Final = frozenset(("train", "training", "trainset"))
_HELD_OUT: Final = frozenset(("val", "valid", "validation", "test", "testing", "dev", "eval", "valset", "testset"))
_WORD: Final = re.compile(r"[^\W\d_]+|\d+")
#: Words in the names of folders with images, and of those with their masks. In a pair of such folders, the other words
#: are the same, as in train and train_masks.
_IMAGES: Final = frozenset(("images", "image", "imgs", "img", "jpegimages", "input", "inputs", "leftimg", "bit"))
_MASKS: Final = frozenset(
    (
        *("masks", "mask", "labels", "label", "annotations", "segmentationclass", "segmentations", "segmentation"),
        *("groundtruth", "ground", "truth", "gt", "gtfine", "gtcoarse"),
    )
)
_NAMED: Final = 5

_log: Final = logging.getLogger("tpucache")

_MOST_DIGITS: Final = 20


class FoundFile(NamedTuple):
    """A file that may be a sample: its `name` in the source, and its size, `bytes`.

    `place` is the part of the file's path whose folders may be classes. If the file is in an archive, `members` has the
    file's Member.
    """

    name: PurePath
    place: PurePath
    bytes: int
    members: tuple[Member, ...] = ()


class FolderSource:
    """The images in a folder, at any depth or those that match a pattern, sorted by the bytes of their paths.

    Links are followed, except those to a folder above them.
    """

    loads_in_threads = True

    def __init__(self, root: str | Path, pattern: str = "") -> None:
        """Take a folder, and a pattern for the files in it. This reads nothing yet."""
        self._root, self._pattern = Path(root).absolute(), pattern

    def __repr__(self) -> str:
        return str(self._root / self._pattern)

    def list(self) -> Listing:
        """Return all samples. Each subfolder of the root is a class, with all its images at any depth.

        Files of other types are counted as left out, except hidden files and those that systems add to folders.

        Raises SourceError when there are no images, or when images are both in class folders and next to them.
        """
        if self._pattern:
            paths = find_files(self._root, self._pattern)
            chosen = [path for path in paths if not any(map(is_ignored, path.parts))]
            sizes = map_ahead(lambda path: (self._root / path).stat().st_size, chosen)
            return list_images(self, [FoundFile(*found) for found in zip(chosen, chosen, sizes, strict=True)])
        found = []
        walked = _Walk()
        with Progress(None, "list", "files", is_brief=True) as progress:
            for path, size in _files(self._root, walked):
                found.append(FoundFile(path, path, size))
                progress.advance(1)
        tell_of_ignored(self._root, walked.ignored)
        return list_images(self._root, found, walked.empty)

    def load(self, sample: Sample) -> Item:
        """Return the bytes of a sample's file. Raises SampleError when the file cannot be read."""
        return Item({IMAGE: read_file(os.path.join(self._root, sample.path), sample.path)})


def list_images(where: object, files: Sequence[FoundFile], empty: Iterable[PurePath] = ()) -> Listing:
    """Return the images among files, in the order of the bytes of their names; see `FolderSource.list`.

    If one folder contains all images, its subfolders are the classes instead. `empty` are folders without files, which
    are classes without samples if other folders are classes. If the classes look like parts of a data set, such as
    train and test, the listing has a `doubt`. Raises SourceError. `where` names the place of the files in messages.
    """
    suffix_of = [file.name.suffix.lower() for file in files]
    suffixes = SUFFIXES if not SUFFIXES.isdisjoint(suffix_of) else {_ARRAY_SUFFIX}
    images = sorted(
        (file for file, suffix in zip(files, suffix_of, strict=True) if suffix in suffixes),
        key=lambda file: [os.fsencode(part) for part in file.name.parts],
    )
    others = Counter(_type(file.name) for file, suffix in zip(files, suffix_of, strict=True) if suffix not in suffixes)
    left_out = dict(sorted(others.items()))
    if not images:
        found = f", found {left_out_text(left_out)}" if left_out else ""
        looked_for = " ".join(sorted({*SUFFIXES, _ARRAY_SUFFIX}))
        raise SourceError(f"{where} holds no images: looked for {looked_for}{found}")
    folders = {file.place.parts[:-1] for file in images}
    above = _passed_over({*folders, *(place.parts for place in empty)} if folders != {()} else folders)
    depth = len(above)
    named = {parts[depth] for parts in folders if len(parts) > depth}
    without = {place.parts[depth] for place in empty if len(place.parts) > depth} - named if named else set[str]()
    classes = tuple(sorted(named | without))
    loose = [file.name for file in images if len(file.place.parts) == depth + 1]
    if loose and classes:
        raise SourceError(
            f"{where} holds images such as {str(loose[0])!r} next to folders such as {classes[0]!r}: "
            "put every image into the folder of its class, or all into one folder"
        )
    if above and classes:
        _log.warning("%s: all images are in %s, whose folders are the classes", where, "/".join(above))
    if without:
        _log.warning(
            "%s: empty folders are classes without a sample, which keep their numbers: %s", where, _some(without)
        )
    unused = {file.place.parts[depth] for file in files if len(file.place.parts) > depth + 1} - {*classes}
    if classes and unused:
        _log.warning("%s: folders without an image are not classes: %s", where, _some(unused))
    numbers = {name: number for number, name in enumerate(classes)}
    return Listing(
        [
            Sample(
                number,
                file.name.as_posix(),
                numbers.get(file.place.parts[depth]) if classes else None,
                file.bytes,
                file.members,
            )
            for number, file in enumerate(images)
        ],
        classes,
        left_out=left_out,
        doubt=_doubt("/".join((str(where).rstrip("/"), *above)), classes, {parts[depth:] for parts in folders}),
    )


def _passed_over(folders: set[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the path of the folder that holds the class folders, as names; () if the source itself holds them.

    `folders` are the paths of the folders with images and of the empty folders. The result is the longest path with
    which they all begin; if this path is itself one of `folders`, it is a class, and the result is the folder above it.
    """
    shared = shared_folders(folders)
    return shared[:-1] if shared in folders else shared


def shared_folders(paths: Collection[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the folders with which all of these paths begin. There must be at least one path."""
    pairs = zip(min(paths), max(paths), strict=False)  # all paths between these two begin with their common part
    return tuple(first for first, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _doubt(where: str, classes: Sequence[str], folders: Collection[tuple[str, ...]]) -> str:
    """Return why folders are probably parts of a data set and not classes, judged by their names, or "".

    `folders` are the paths of the folders with images, below `where`.
    """
    train, held_out = find_parts(classes)
    if not train or not held_out:
        if images_and_masks := _find_masks(classes):
            return _masks_are_no_classes(where, *images_and_masks)
        return _doubt_below(where, folders)
    first, *others = (shlex.quote(f"{where}/{name}") for name in (*train, *held_out))
    commands = [f"`warmup {first} CACHE/{train[0]} …`"]
    names = (*train[1:], *held_out)
    commands += [
        f"`warmup {other} CACHE/{name} --like CACHE/{train[0]}`" for other, name in zip(others, names, strict=True)
    ]
    return (
        f"{where} holds the folders {', '.join((*train, *held_out))}, which are parts of a data set, not classes: "
        f"warm up each of them, {' and '.join(commands)}. If they are classes, give --classes FILE with their names"
    )


def _doubt_below(where: str, folders: Collection[tuple[str, ...]]) -> str:
    """Return why the folders in class folders are probably no parts of their classes, judged by their names, or ""."""
    inner: dict[tuple[str, ...], set[str]] = {}
    for parts in folders:
        for depth in range(1, len(parts)):
            inner.setdefault(parts[:depth], set()).add(parts[depth])
    for parts, found in sorted(inner.items()):
        names = sorted(found)
        place = "/".join((where, *parts))
        if images_and_masks := _find_masks(names):
            return _masks_are_no_classes(place, *images_and_masks)
        train, held_out = find_parts(names)
        if train and held_out:
            return (
                f"{place} holds the folders {', '.join((*train, *held_out))}, which are parts of a data set: class "
                f"{parts[0]} would have the images of all of them. Give --classes FILE with the names of the folders "
                f"in {where}, and --include {shlex.quote(f'*/{train[0]}/*')} for the images of one part"
            )
    return ""


def _masks_are_no_classes(where: str, images: str, masks: str) -> str:
    return (
        f"{where} holds the folders {images} and {masks}, which are images and their masks, not classes: "
        "name both files of each sample in a .csv, and give its column of masks as --mask-col. If they are "
        "classes, give --classes FILE with their names"
    )


def _find_masks(names: Sequence[str]) -> tuple[str, str] | None:
    """Return the name of a folder of images and of that of their masks, or None without such names."""
    words = {name: frozenset(word for word in _WORD.findall(name.lower()) if word.isalpha()) for name in names}
    masks = {found - _MASKS: name for name, found in words.items() if found & _MASKS}
    for name, found in words.items():
        is_images = found & (_IMAGES | _TRAIN | _HELD_OUT) and not found & _MASKS
        if is_images and found - _IMAGES in masks:
            return name, masks[found - _IMAGES]
    return None


def find_parts(classes: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the names of parts for training and those that are held out; both are empty without such names.

    In each of the two there is a name for each name of the other with the same words besides those of `_TRAIN` and
    `_HELD_OUT`, so that bullet_train and test_tube are no parts.
    """
    words = {name: frozenset(_WORD.findall(name.lower())) - {"set"} for name in classes}
    train, held_out = (
        {name: found - part for name, found in words.items() if found & part} for part in (_TRAIN, _HELD_OUT)
    )
    both = {*train.values()} & {*held_out.values()}
    return [name for name in train if train[name] in both], [name for name in held_out if held_out[name] in both]


def _some(names: Iterable[str]) -> str:
    shown = sorted(names)
    return ", ".join(map(repr, shown[:_NAMED])) + (f" and {len(shown) - _NAMED:,} more" if len(shown) > _NAMED else "")


def is_ignored(name: str) -> bool:
    """Return whether a file or folder with this name is hidden, or is one that systems add to folders."""
    return name.startswith(".") or name.lower() in JUNK


def tell_of_ignored(where: object, names: Iterable[str]) -> None:
    """Warn that the folders and files `names` are ignored; the warning begins with `where`."""
    if shown := {*names}:
        _log.warning("%s: ignored, because hidden or made by systems: %s", where, _some(shown))


def without_ignored(where: object, names: Iterable[str]) -> list[str]:
    """Return the paths, written with slashes, that are not ignored. Warn of ignored ones, except hidden files."""
    kept, ignored = [], set[str]()
    for name in names:
        *folders, last = name.split("/")
        part = next((folder for folder in folders if is_ignored(folder)), "")
        if part or is_ignored(last):
            ignored |= {part or last} if part or last.lower() in JUNK else set()
        else:
            kept.append(name)
    tell_of_ignored(where, ignored)
    return kept


def read_file(path: str | Path, name: str) -> bytes:
    """Return the bytes of the file of the sample called `name`. Raises SampleError when the file cannot be read."""
    try:
        return files.read_file(path)
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        reason = error.strerror if isinstance(error, OSError) else str(error)
        advice = _advice(Path(path)) if isinstance(error, FileNotFoundError) else ""
        raise SampleError(name, f"cannot be read: {reason}{advice}", str(path)) from error


def _advice(path: Path) -> str:
    """Return advice about a missing file if a file with a similar name exists, else "".

    The similar name has another suffix, slashes instead of backslashes, or a number with leading zeros.
    """
    if "\\" in str(path) and (found := Path(str(path).replace("\\", "/"))).is_file():
        return f", but {found} is there: write / instead of \\ in the table, `sed -i 's|\\\\|/|g' TABLE`"
    if (padded := _padded(path)) is not None:
        return (
            f", but {padded.name} is there: a program read the names as numbers and cut their zeros. Write names with "
            f"{len(padded.stem)} digits, in pandas `table[column].astype(str).str.zfill({len(padded.stem)})`"
        )
    suffixes = sorted(SUFFIXES)
    for stem, has_suffix in ((path, False), (path.with_suffix(""), True)):
        for suffix in (*suffixes, *map(str.upper, suffixes)):
            if (found := Path(f"{stem}{suffix}")).is_file():
                how = "correct the paths" if has_suffix else f"give --suffix {suffix}"
                return f", but {found.name} is there: did you mean that? Then {how}"
    return ""


def _padded(path: Path) -> Path | None:
    """Return the file that is named like the missing file `path`, with leading zeros added, or None.

    If `path` has no suffix, the file may have any suffix of images.
    """
    if not path.stem.isdecimal():
        return None
    endings = [path.suffix] if path.suffix else [each for known in sorted(SUFFIXES) for each in (known, known.upper())]
    names = (
        path.stem.zfill(digits) + ending for digits in range(len(path.stem) + 1, _MOST_DIGITS) for ending in endings
    )
    return next((found for name in names if (found := path.with_name(name)).is_file()), None)


def find_below(root: Path, name: str) -> str | None:
    """Return the path of the file `name` below the absolute path `root`, or None if it would be outside of it.

    A table from somebody else must not name such files. Links are followed, also those that lead out of `root`.
    """
    top = os.path.normpath(root)
    path = os.path.normpath(os.path.join(top, name))
    return path if os.path.commonpath([top, path]) == top else None


def read_below(root: Path, name: str, sample: str) -> bytes:
    """Return the bytes of the file that a table names for a sample.

    Raises SampleError when the file cannot be read, or is not inside `root`.
    """
    path = find_below(root, name)
    if path is None:
        raise SampleError(
            sample, f"is outside of {root}: give --root, a folder that all paths are in, such as --root /"
        )
    return read_file(path, sample)


def _type(path: PurePath) -> str:
    """Return a file's suffix, or `NO_SUFFIX` if the suffix is too long or a number, as in many names of DICOM files."""
    name = path.suffix[1:].lower()
    named = len(name) <= _LONGEST_SUFFIX and name.isascii() and name.isalnum() and not name.isdecimal()
    return f".{name}" if named else NO_SUFFIX


@dataclass
class _Walk:
    empty: list[PurePath] = field(default_factory=list)
    ignored: set[str] = field(default_factory=set)


class _Folder(NamedTuple):
    """A folder to list: its path, the same relative to the root, and the device and inode of each folder above."""

    path: str
    below: str
    above: tuple[tuple[int, int], ...]


def _files(root: Path, walked: _Walk) -> Iterator[tuple[PurePath, int]]:
    """Yield the path, relative to `root`, and the size of each file at any depth below `root`.

    Ignored names and links to folders above are left out. A broken link is listed; loading it raises the error.
    `walked` gets the empty folders and the ignored names. The folders of one depth are listed before those below them,
    so that storage that answers late can be asked for many of them at once.
    """
    level = [_Folder(os.fspath(root), "", ())]
    try:
        while level:
            entries, level = _entries(level, walked), []
            for folder, entry, status in map_ahead(_with_status, entries):
                path = folder.below + entry.name
                if stat.S_ISDIR(status.st_mode):
                    level.append(_Folder(entry.path, f"{path}/", folder.above))
                else:
                    yield PurePath(path), status.st_size
    except OSError as error:
        raise SourceError(f"{error.filename}: {error.strerror}") from error


def _entries(level: Sequence[_Folder], walked: _Walk) -> Iterator[tuple[_Folder, os.DirEntry[str]]]:
    """Yield the entries of folders, with their folder, except ignored ones."""
    for folder, found in map_ahead(_scan, level):
        entries = [entry for entry in found if not is_ignored(entry.name)]
        walked.ignored.update(
            entry.name for entry in found if entry.name.lower() in JUNK or (is_ignored(entry.name) and entry.is_dir())
        )
        if folder.below and not entries and folder.above:
            walked.empty.append(PurePath(folder.below))
        yield from zip(itertools.repeat(folder), entries)


def _scan(folder: _Folder) -> tuple[_Folder, list[os.DirEntry[str]]]:
    """Return a folder and its entries; the folder is added to its folders above.

    A link to a folder above has no entries, and then no folders above either. Raises OSError.
    """
    status = os.stat(folder.path)
    identity = (status.st_dev, status.st_ino)
    if identity in folder.above:
        return folder._replace(above=()), []
    with os.scandir(folder.path) as scanned:
        return folder._replace(above=(*folder.above, identity)), list(scanned)


def _with_status(found: tuple[_Folder, os.DirEntry[str]]) -> tuple[_Folder, os.DirEntry[str], os.stat_result]:
    folder, entry = found
    try:
        return folder, entry, entry.stat()
    except OSError:
        return folder, entry, entry.stat(follow_symlinks=False)


def _is_folder(source: str | Path) -> bool:
    return Path(source).is_dir() and next(Path(source).glob("*.parquet"), None) is None


def _is_pattern(source: str | Path) -> bool:
    if not has_wildcard(str(source)) or Path(source).exists():
        return False
    return {Path(each).suffix.lower() for each in expand_braces(str(source))} <= SUFFIXES


def _open(source: str | Path, _: object) -> FolderSource:
    folder = Path(source)
    if (folder / WORK_NAME).is_dir() or ((folder / MANIFEST_NAME).is_file() and any(folder.glob("*.lmdb"))):
        raise SourceError(
            f"{source} is a finished cache: train, bench and CachedDataset read it directly, and "
            "`tpucache relabel` changes its labels. For another size or codec give the images that it was made of, and "
            "another folder for the new cache"
        )
    return FolderSource(folder)


KIND: Final = SourceKind("a folder of images", _is_folder, _open)
PATTERN: Final = SourceKind(
    "a pattern of images such as 'photos/*.jpg'", _is_pattern, lambda source, _: FolderSource(*split_pattern(source))
)
