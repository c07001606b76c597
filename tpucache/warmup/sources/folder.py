"""What a tree of files means: `list_images` decides it from names alone, for folders, archives and buckets alike.

DiskFiles are the files of such a tree on the disk.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import posixpath
import re
import shlex
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tpucache.errors import SampleError, SourceError
from tpucache.progress import Progress
from tpucache.store.ahead import map_ahead
from tpucache.store.files import read_file
from tpucache.warmup.sources.source import (
    Listing,
    Member,
    Sample,
    find_files,
    left_out_text,
    name_some,
    path_key,
)

#: Suffixes of images; other files are not samples. Whether a file really is an image shows when it is decoded.
_NAMES: Final = (
    "jpg jpeg jpe jfif mpo png gif bmp dib webp tif tiff ppm pgm pbm pnm jp2 avif ico tga heic heif hif dcm dicom"
)
SUFFIXES: Final = frozenset(f".{name}" for name in _NAMES.split())
_ENDINGS: Final = tuple(ending for suffix in sorted(SUFFIXES) for ending in (suffix, suffix.upper()))
#: Files with this suffix are samples only if there are no images: next to images, they rarely are samples.
_ARRAY_SUFFIX: Final = ".npy"
#: Suffixes of files of samples.
_DATA: Final = (".parquet", ".tfrec", ".tfrecord", ".tar", ".zip")
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
#: `train-00000-of-00002.parquet`: Hugging Face's name for a part of a split.
_SPLIT: Final = re.compile(r"(.+)-\d{5}-of-\d{5}(-\w+)?\.parquet")
_WORD: Final = re.compile(r"[^\W\d_]+|\d+")
_CAMEL: Final = re.compile(r"(?<=[a-z])(?=[A-Z])")
#: Words in the names of folders with images, and of those with their masks. In a pair of such folders, the other words
#: are the same, as in train and train_masks.
_IMAGES: Final = frozenset(("images", "image", "imgs", "img", "jpegimages", "input", "inputs", "leftimg", "bit"))
_MASKS: Final = frozenset(
    (
        *("masks", "mask", "labels", "label", "annotations", "segmentationclass", "segmentations", "segmentation"),
        *("groundtruth", "ground", "truth", "gt", "gtfine", "gtcoarse"),
    )
)
#: Where an ending of a file's name, such as _mask, may begin.
_BREAK: Final = re.compile(r"[_\-. ]")
#: Words in the names of numbered folders that are pieces of one.
_PIECES: Final = frozenset(("part", "batch", "chunk", "piece", "shard", "fold", "subset"))
_NUMBER: Final = re.compile(r"\d+")
#: As many folders may have the same pictures in other forms, such as sizes, or colour and grey.
_MOST_FORMS: Final = 4
_MOST_DIGITS: Final = 20

#: The folders in a path, from the root of a tree.
Folders = tuple[str, ...]


_log: Final = logging.getLogger("tpucache")


def list_images(where: object, entries: Mapping[str, Member], place_of: Callable[[str], str] = str) -> Listing:
    """Return the images in a tree, in the order of the bytes of their names. `where` names the tree in messages.

    `entries` are its files and folders by name; the names of folders end with a slash. `place_of` returns the part of a
    name whose folders may be classes. Each folder at the top is a class, with all its images at any depth; if one
    folder contains all images, its folders are the classes. An empty folder beside class folders is a class without
    samples. Hidden files and those that systems add are ignored, and files of other types are counted as left out. If
    the classes look like parts of a data set, such as train and test, the listing has a `doubt`.
    """
    places, empty = _visible(where, {name: place_of(name) for name in entries})
    suffix_of = {name: posixpath.splitext(name)[1].lower() for name in places}
    suffixes = {_ARRAY_SUFFIX} if SUFFIXES.isdisjoint(suffix_of.values()) else SUFFIXES
    images = sorted((name for name, suffix in suffix_of.items() if suffix in suffixes), key=path_key)
    left_out = dict(sorted(Counter(_type(each) for each in suffix_of.values() if each not in suffixes).items()))
    if not images:
        raise _no_images(where, places, left_out)
    if tables := [name for name in places if name.lower().endswith((".csv", ".tsv", ".jsonl"))]:
        _log.warning(
            "%s: if there are labels of these images in %s, give this table as the source (from an archive: copy it "
            "out, and give the archive as --root; from a URL: give the URL of the table)", where, name_some(tables),
        )  # fmt: skip
    folder_of = {name: folders_of(places[name]) for name in images}
    above, classes = _find_classes(where, folder_of, empty)
    depth = len(above)
    others = {parts[depth] for place in places.values() if len(parts := folders_of(place)) > depth}
    if classes and (unused := sorted(others - {*classes})):
        _log.warning("%s: folders without an image are not classes: %s", where, name_some(unused))
    numbers = {name: number for number, name in enumerate(classes)}
    samples = [
        Sample(
            number,
            name,
            numbers[folder_of[name][depth]] if classes else None,
            entries[name].bytes,
            (entries[name],) if entries[name].archive else (),
            written_ns=entries[name].written_ns,
        )
        for number, name in enumerate(images)
    ]
    place = "/".join((str(where).rstrip("/"), *above))
    inside = ["/".join(places[name].split("/")[depth:]) for name in images]
    doubt = _doubt(where, place, inside, classes) or _pair_doubt(where, place, inside, classes)
    if ending := _ending_of_pairs({posixpath.splitext(each)[0] for each in inside}):
        _log.warning(
            "%s: half of the images are called as the other half, with %r added. If they are the masks of the others, "
            "name both files of each sample in a .csv, and give its column of masks as --mask-col; --exclude '*%s*' "
            "leaves them out", where, ending, ending,
        )  # fmt: skip
    return Listing(samples, classes, left_out=left_out, doubt=doubt)


def _visible(where: object, places: Mapping[str, str]) -> tuple[dict[str, str], set[Folders]]:
    """Return the files that are not ignored, and the folders in which there is nothing else. Warn of ignored ones."""
    kept, folders, ignored = dict[str, str](), set[Folders](), set[str]()
    for name, place in places.items():
        parts = place.split("/")
        hidden = next(filter(is_ignored, parts), "")
        if parts[-1] and not hidden:
            kept[name] = place
        else:
            folders.add(tuple(parts[: parts.index(hidden)]))  # the name of a folder ends with a slash
        if hidden and (hidden != parts[-1] or hidden.lower() in JUNK):
            ignored.add(hidden)
    if ignored:
        _log.warning("%s: ignored, because hidden or made by systems: %s", where, name_some(sorted(ignored)))
    used = {folders_of(place) for place in kept.values()}
    return kept, folders - used - _above(used) - _above(folders)


def _above(folders: Iterable[Folders]) -> set[Folders]:
    return {parts[:depth] for parts in folders for depth in range(len(parts))}


def _no_images(where: object, places: Iterable[str], left_out: Mapping[str, int]) -> SourceError:
    others = f", found {left_out_text(left_out)}" if left_out else ""
    if data := next((name for name in places if name.lower().endswith(_DATA)), ""):
        others += f": give those with samples as a pattern, such as '{where}/**/*{Path(data).suffix}'"
    looked_for = " ".join(sorted({*SUFFIXES, _ARRAY_SUFFIX}))
    return SourceError(f"{where} holds no images: looked for {looked_for}{others}")


def folders_of(place: str) -> Folders:
    """Return the folders in the path of a file."""
    return tuple(place.split("/")[:-1])


def shared_folders(paths: Collection[Folders]) -> Folders:
    """Return the folders with which all of these paths begin. There must be at least one path."""
    pairs = zip(min(paths), max(paths), strict=False)  # all paths between these two begin with their common part
    return tuple(first for first, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _find_classes(
    where: object, folder_of: Mapping[str, Folders], empty: Collection[Folders]
) -> tuple[Folders, tuple[str, ...]]:
    """Return the folder that holds the class folders, () for the source itself, and the names of the classes.

    The folder is the longest path with which the folders of all images, and empty ones, begin; if this path is itself
    one of them, it is a class, and the result is the folder above it.
    """
    folders = {*folder_of.values()}
    known = {*folders, *empty} if folders != {()} else folders
    shared = shared_folders(known)
    above = shared[:-1] if shared in known else shared
    depth = len(above)
    named = {parts[depth] for parts in folders if len(parts) > depth}
    without = {parts[depth] for parts in empty if len(parts) > depth} - named if named else set[str]()
    classes = tuple(sorted(named | without))
    loose = next((name for name, parts in folder_of.items() if len(parts) == depth), "")
    if loose and classes:
        raise SourceError(
            f"{where} holds images such as {loose!r} next to folders such as {classes[0]!r}: put every image into the "
            "folder of its class, or all into one folder"
        )
    if above and classes:
        _log.warning("%s: all images are in %s, whose folders are the classes", where, "/".join(above))
    if without:
        _log.warning(
            "%s: empty folders are classes without a sample, which keep their numbers: %s",
            where,
            name_some(sorted(without)),
        )
    return above, classes


def _doubt(where: object, place: str, images: Sequence[str], classes: Sequence[str]) -> str:
    """Return why folders are probably parts of a data set, forms of it, or images and masks, judged by names, or "".

    Warn of folders that are in each class.
    """
    inner: dict[Folders, set[str]] = {(): {*classes}}
    folders = set(map(folders_of, images))
    for parts in folders:
        for depth in range(1, len(parts)):
            inner.setdefault(parts[:depth], set()).add(parts[depth])
    for parts, found in sorted(inner.items()):
        names = sorted(found)
        train, held_out = find_parts(names)
        if train and held_out:
            return _parts_text(place, parts, [*train, *held_out])
        if images_and_masks := _find_masks(names):
            return _masks_text("/".join((place, *parts)), *images_and_masks)
    below = [inner.get(parts, set()) for parts in {parts[:1] for parts in folders}]
    shared = sorted(set.intersection(*below))
    if len(below) < 2 or len(shared) < 2:
        return ""
    text = f"the folders {name_some(classes)} have the folders {name_some(shared)} each"
    if all(found == {*shared} for found in below) and all(len(parts) > 1 for parts in folders):
        return (
            f"{place}: {text}: if those are the classes, warm up one of these, `warmup "
            f"{shlex.quote(f'{place}/{classes[0]}')} CACHE …`. If {classes[0]} is a class, give --classes FILE with "
            f"the names of the folders in {place}"
        )
    _log.warning("%s: %s: if those are the classes, give one of these as the source", where, text)
    return ""


def _masks_text(place: str, images: str, masks: str) -> str:
    return (
        f"{place} holds the folders {images} and {masks}, which are images and their masks, not classes: name both "
        "files of each sample in a .csv, and give its column of masks as --mask-col. If they are classes, give "
        "--classes FILE with their names"
    )


def _pair_doubt(where: object, place: str, images: Sequence[str], classes: Sequence[str]) -> str:
    """Return why two folders are probably images and masks, or "": their files pair up, and one is of another kind.

    Warn of folders whose files are called alike, and of a folder that was cut into numbered ones.
    """
    numbered = {_NUMBER.sub("", name) for name in classes}
    if len(classes) > 1 and len(numbered) == 1 and _words(*numbered) & _PIECES:
        _log.warning(
            "%s: the folders %s become classes: if they are pieces of one folder, name their files in a .csv",
            where,
            name_some(classes),
        )
    if not 1 < len(classes) <= _MOST_FORMS:
        return ""
    types: dict[str, dict[str, str]] = {name: {} for name in classes}
    for image in images:
        stem, suffix = posixpath.splitext(posixpath.basename(image))
        types[image.partition("/")[0]][stem] = suffix
    first, *others = types.values()
    if len(first) < 2 or any(each.keys() != first.keys() for each in others):
        return ""
    masks = [name for name in classes if _words(name) & _MASKS]
    masks = masks or [name for name in classes if {*types[name].values()} == {".png"}]
    if len(classes) == 2 and len(masks) == 1:
        (images_of,) = {*classes} - {*masks}
        return _masks_text(place, images_of, masks[0])
    _log.warning(
        "%s: the folders %s become classes, and their files have the same names: if these are the same pictures in "
        "several forms, give one of the folders as the source", where, name_some(classes),
    )  # fmt: skip
    return ""


def _ending_of_pairs(stems: Collection[str]) -> str:
    """Return the ending or beginning by which half of some paths, without types, differ from the other half, or ""."""
    added: Counter[str] = Counter()
    for stem in stems:
        folder, slash, name = stem.rpartition("/")
        for at in _BREAK.finditer(name):
            added[name[at.start() :]] += f"{folder}{slash}{name[: at.start()]}" in stems
            added[name[: at.end()]] += f"{folder}{slash}{name[at.end() :]}" in stems
    text, count = added.most_common(1)[0] if added else ("", 0)
    return text if count > 1 and 2 * count == len(stems) else ""


def _parts_text(where: str, above: Folders, names: Sequence[str]) -> str:
    place = "/".join((where, *above))
    text = f"{place} holds the folders {', '.join(names)}, which are parts of a data set"
    if above:
        return (
            f"{text}: class {above[0]} would have the images of all of them. Give --classes FILE with the names of the "
            f"folders in {where}, and --include {shlex.quote(f'*/{names[0]}/*')} for the images of one part"
        )
    first, *others = (f"`warmup {shlex.quote(f'{place}/{name}')} CACHE/{name}" for name in names)
    commands = [f"{first} …`", *(f"{other} --like CACHE/{names[0]}`" for other in others)]
    return (
        f"{text}, not classes: warm up each of them, {' and '.join(commands)}. If they are classes, give --classes "
        "FILE with their names"
    )


def _find_masks(names: Sequence[str]) -> tuple[str, str] | None:
    """Return the name of a folder of images and of that of their masks, or None without such names."""
    words = {name: _words(name) for name in names}
    masks = {found - _MASKS: name for name, found in words.items() if found & _MASKS}
    for name, found in words.items():
        is_images = found & (_IMAGES | _TRAIN | _HELD_OUT) and not found & _MASKS
        if is_images and found - _IMAGES in masks:
            return name, masks[found - _IMAGES]
    return None


def find_parts(classes: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the names of parts for training and those that are held out; both are empty without such names.

    In each of the two there is a name for each name of the other with the same words besides those of `_TRAIN` and
    `_HELD_OUT`, so that bullet_train and test_tube are no parts. If all names have such words, and one for training has
    no other, all are parts.
    """
    words = {name: _words(_CAMEL.sub(" ", name)) - {"set"} for name in classes}
    train, held_out = (
        {name: found - part for name, found in words.items() if found & part} for part in (_TRAIN, _HELD_OUT)
    )
    if held_out and frozenset() in train.values() and {*train, *held_out} == {*classes}:
        return [*train], [*held_out]
    both = {*train.values()} & {*held_out.values()}
    return [name for name in train if train[name] in both], [name for name in held_out if held_out[name] in both]


def find_shards(root: Path, pattern: str) -> list[Path]:
    """Return what `find_files` does. Raises SourceError for files of several parts of a data set without braces."""
    names = find_files(root, pattern)
    parts = {found[1] for name in names if (found := _SPLIT.fullmatch(name.name))}
    if len(parts) < 2:
        words = {word for name in names for word in (name.stem.rstrip("0123456789-_."), *name.parts[:-1])}
        parts = set().union(*find_parts(sorted(words)))
    if len(parts) > 1 and "{" not in pattern:
        raise SourceError(
            f"{root} holds files of parts of a data set, {', '.join(sorted(parts))}: give a pattern for one of them, "
            f"such as '{root}/{max(parts)}*', or name all in braces, '{root}/{{a,b}}*'"
        )
    return names


def _words(name: str) -> frozenset[str]:
    return frozenset(word for word in _WORD.findall(name.lower()) if word.isalpha())


def is_ignored(name: str) -> bool:
    """Return whether a file or folder with this name is hidden, or is one that systems add to folders."""
    return name.startswith(".") or name.lower() in JUNK


def _type(suffix: str) -> str:
    """Return a file's suffix, or `NO_SUFFIX` if the suffix is too long or a number, as in many names of DICOM files."""
    name = suffix[1:]
    is_type = len(name) <= _LONGEST_SUFFIX and name.isascii() and name.isalnum() and not name.isdecimal()
    return suffix if is_type else NO_SUFFIX


def read_sample(path: str | Path, name: str) -> bytes:
    """Return the bytes of the file of the sample called `name`."""
    try:
        return read_file(path)
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        reason = error.strerror if isinstance(error, OSError) else str(error)
        advice = _advice(Path(path)) if isinstance(error, FileNotFoundError) else ""
        raise SampleError(name, f"cannot be read: {reason}{advice}", str(path)) from error


def _advice(path: Path) -> str:
    """Return advice about a missing file if there is one with slashes, leading zeros or another suffix, else ""."""
    if "\\" in str(path) and (found := Path(str(path).replace("\\", "/"))).is_file():
        return f", but {found} is there: write / instead of \\ in the table, `sed -i 's|\\\\|/|g' TABLE`"
    if advice := zeros_advice(path.name, lambda name: path.with_name(name).is_file()):
        return advice
    names = (f"{stem}{suffix}" for stem in (path.name, path.stem) for suffix in _ENDINGS)
    name = next((name for name in names if path.with_name(name).is_file()), "")
    how = f"give --suffix {Path(name).suffix}" if name.startswith(f"{path.name}.") else "correct the paths"
    return f", but {name} is there: did you mean that? Then {how}" if name else ""


def zeros_advice(name: str, is_there: Callable[[str], bool]) -> str:
    """Return advice about a name of digits that `is_there` with leading zeros, else ""."""
    stem, suffix = posixpath.splitext(name)
    for count in range(len(stem) + 1, _MOST_DIGITS if stem.isdecimal() else 0):
        for ending in [suffix] if suffix else ["", *_ENDINGS]:
            if is_there(found := f"{stem.zfill(count)}{ending}"):
                return (
                    f"; {found} is there: a program read the names as numbers and cut their zeros. Write names "
                    f"with {count} digits, in pandas `table[column].astype(str).str.zfill({count})`"
                )
    return ""


def read_below(root: Path, name: str, sample: str) -> bytes:
    """Return the bytes of the file that a table names for a sample. Links are followed, also out of `root`."""
    top = os.path.normpath(root)
    path = os.path.normpath(os.path.join(top, name))
    if os.path.commonpath([top, path]) != top:  # a table from somebody else must not name files elsewhere
        raise SampleError(
            sample, f"is outside of {root}: give --root, a folder that all paths are in, such as --root /"
        )
    return read_sample(path, sample)


class DiskFiles:
    """The files in a folder on the disk, at any depth or those that match a pattern.

    Links are followed, except those to a folder above them.
    """

    is_several = False
    inside = "."

    def __init__(self, root: Path, pattern: str = "") -> None:
        self._root, self._pattern = root, pattern

    def __str__(self) -> str:
        return str(self._root / self._pattern)

    def entries(self, names: Iterable[str] | None = None) -> dict[str, Member]:
        """Return all files and folders by name, without what is hidden, or the files that have these `names`."""
        if names is None and not self._pattern:
            with Progress(None, "list", "files", is_brief=True) as progress:
                found = dict[str, Member]()
                for name, status in walk(self._root, is_ignored):
                    found[name] = _member(name, status)
                    progress.advance(not name.endswith("/"))
            return found
        chosen = [path.as_posix() for path in find_files(self._root, self._pattern)] if names is None else [*names]
        return {posixpath.normpath(each.name): each for each in map_ahead(self._look, chosen)}

    def read(self, member: Member, path: str) -> bytes:
        """Return a file's content."""
        return read_sample(os.path.join(self._root, member.name), path)

    def _look(self, name: str) -> Member:
        with contextlib.suppress(OSError, ValueError):  # ValueError: a name with a zero byte
            return _member(name, os.stat(os.path.join(self._root, name)))
        return Member("", name)  # reading it raises the error


def written_ns(status: os.stat_result) -> int:
    """Return when a file was last written, replaced or moved, in nanoseconds."""
    return max(status.st_mtime_ns, status.st_ctime_ns)


def _member(name: str, status: os.stat_result) -> Member:
    return Member("", name, bytes=status.st_size, written_ns=written_ns(status))


def walk(root: str | Path, is_left: Callable[[str], bool] = lambda _: False) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the path, relative to `root`, and the status of all files and folders, whose paths end with a slash.

    Links to folders above are left out, and folders for whose name `is_left` is true are not entered. A broken link is
    a file. The folders of one depth are listed before those below them, so that storage that answers late can be asked
    for many of them at once.
    """

    def scan(folder: tuple[str, Any]) -> list[tuple[str, Any, os.DirEntry[str]]]:
        below, above = folder  # its path, and the device and inode of each folder above
        status = os.stat(os.path.join(root, below))
        with os.scandir(os.path.join(root, below)) as found:
            return [(below, (*above, (status.st_dev, status.st_ino)), entry) for entry in found]

    def status_of(found: tuple[str, Any, os.DirEntry[str]]) -> os.stat_result:
        try:
            return found[2].stat()
        except OSError:
            return found[2].stat(follow_symlinks=False)

    level: list[tuple[str, Any]] = [("", ())]
    try:
        while level:
            entries = [entry for found in map_ahead(scan, level) for entry in found]
            level = []
            for (below, above, entry), status in zip(entries, map_ahead(status_of, entries), strict=True):
                path, is_folder = below + entry.name, stat.S_ISDIR(status.st_mode)
                if is_folder and (status.st_dev, status.st_ino) in above:
                    continue
                if is_folder and not is_left(entry.name):
                    level.append((f"{path}/", above))
                yield f"{path}/" if is_folder else path, status
    except OSError as error:
        raise SourceError(f"{str(error.filename).rstrip('/')}: {error.strerror}") from error
