"""List a folder of pictures as torchvision's ImageFolder does, and make a digest that shows when a file changes."""

from __future__ import annotations

import functools
import hashlib
import os
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from tpucache.errors import SourceError
from tpucache.machine import FOLDER, READ
from tpucache.native import file_system
from tpucache.store.ahead import map_ahead
from tpucache.store.fields import IMAGE
from tpucache.store.remote.local import LOCAL_FILE_SYSTEMS
from tpucache.warmup.listing import name_some
from tpucache.warmup.sources.folder import read_sample
from tpucache.warmup.sources.source import Item, Listing, Sample

#: The suffixes of pictures in torchvision: `torchvision.datasets.folder.IMG_EXTENSIONS`.
EXTENSIONS: Final = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")

#: If a file is written twice within one tick of its file system's clock, both writes give it the same time. Linux's own
#: file systems tick at least every 10 ms. Others tick every second or two: then all times are whole seconds.
_TICK_NS: Final = 20_000_000
_LONG_TICK_NS: Final = 2_000_000_000
_SECOND_NS: Final = 1_000_000_000
_MOST_LISTINGS: Final = 5


class PictureFile(NamedTuple):
    """A picture file: its `path` relative to the root, and its `label`, the number of its class.

    The other values show when the file changes. `bytes` is its size; `written` and `changed` are its mtime and ctime in
    ns; `inode` is its inode, or 0 if the file system may number inodes anew with each mount; `linked` is the ctime in
    ns of the newest link in its path, or 0 without a link.
    """

    path: str
    label: int
    bytes: int
    written: int
    changed: int
    inode: int
    linked: int


@dataclass(frozen=True)
class PictureFolder:
    """The class names and picture files of a folder, in torchvision's order."""

    classes: tuple[str, ...]
    files: tuple[PictureFile, ...]

    @functools.cached_property
    def state(self) -> str:
        """A digest of 32 hexadecimal digits. It changes whenever a picture is added, removed or changed."""
        digest = hashlib.sha256(repr(self.classes).encode())
        for file in self.files:
            digest.update(repr(tuple(file)).encode())
        return digest.hexdigest()[:32]

    def difference(self, now: PictureFolder) -> str:
        """Return a text that says how `now`, a later listing of the same folder, differs from this listing."""
        before, after = ({file.path: file for file in folder.files} for folder in (self, now))
        texts = [
            f"{len(paths):,} {what}: {name_some(paths)}"
            for what, paths in (
                ("gone", [path for path in before if path not in after]),
                ("new", [path for path in after if path not in before]),
                ("changed", [path for path, file in after.items() if before.get(path, file) != file]),
            )
            if paths
        ]
        return "; ".join(texts) or "its classes have changed"


def list_pictures(root: str, *, allow_empty: bool = False) -> PictureFolder:
    """Return the pictures of a folder in the order of torchvision's ImageFolder.

    Each folder in the root is a class; classes are numbered in the order of their names. The pictures of a class are
    all files in its folder, at any depth, with a suffix in `EXTENSIONS`. Links are followed, except a link to a folder
    above. The size and times of each file are read, but no file is opened. With `allow_empty`, a folder without
    pictures is a class, too.

    Raises SourceError if there are no class folders, or if a class folder has no pictures or cannot be read.
    """
    keeps_inodes = _keeps_inodes(root)
    try:
        with os.scandir(root) as entries:
            classes = tuple(sorted(entry.name for entry in entries if entry.is_dir()))
        files = [
            PictureFile(path, label, found.st_size, found.st_mtime_ns, found.st_ctime_ns, inode, linked)
            for label, path, found, linked in _pictures(root, classes)
            for inode in (found.st_ino if keeps_inodes else 0,)
        ]
    except OSError as error:
        raise SourceError(
            f"{error.filename}: {error.strerror}: give a folder that has one subfolder for each class"
        ) from error
    if not classes:
        raise SourceError(f"{root} has no folders: put the pictures of each class into a folder of its name")
    used = {file.label for file in files}
    empty = [name for label, name in enumerate(classes) if label not in used]
    if empty and not allow_empty:
        raise SourceError(
            f"{root} has folders without a picture: {name_some(empty)}. Pictures are {' '.join(EXTENSIONS)}; remove "
            "the folders, or give allow_empty=True to keep them as classes without samples"
        )
    return PictureFolder(classes, tuple(files))


def list_at_rest(root: str, *, allow_empty: bool = False) -> PictureFolder:
    """Return `list_pictures(root)`, made so late that any later change of a picture changes the listing's `state`.

    If a picture was written just now, this waits up to 20 ms, or up to two seconds if the file system's clock counts
    whole seconds, and lists the folder again.
    """
    for _ in range(_MOST_LISTINGS):
        asked, folder = time.time_ns(), list_pictures(root, allow_empty=allow_empty)
        if not wait_a_tick([max(file.changed, file.linked) for file in folder.files], asked):
            break
    return folder


def check_unchanged(root: str, folder: PictureFolder, *, allow_empty: bool = False) -> None:
    """Raise SourceError if the pictures in the folder `root` have changed since `folder`, its listing, was made."""
    now = list_pictures(os.path.realpath(root), allow_empty=allow_empty)
    if now.state != folder.state:
        raise SourceError(
            f"{root} was changed while its cache was made: {folder.difference(now)}. Run this again when no other "
            "program writes there"
        )


def wait_a_tick(changed: Sequence[int], asked: int) -> bool:
    """Wait until the file system's clock has moved on, so that a file that changes from now on gets a new time.

    Return whether this had to wait: then files may have changed meanwhile. `changed` has the times of the files' last
    changes, and `asked` is the time at which these times were read, all in ns. Times far in the future are ignored.
    """
    tick = _TICK_NS if any(each % _SECOND_NS for each in changed) else _LONG_TICK_NS
    left = max(changed, default=0) + tick - asked
    if not 0 < left <= _LONG_TICK_NS:  # never wait long: the clock of a file server may be ahead of this machine's
        return False
    time.sleep(left / 1e9)
    return True


def _pictures(root: str, classes: Sequence[str]) -> list[tuple[int, str, os.stat_result, int]]:
    """Return the pictures of all classes in torchvision's order.

    A picture is the number of its class, its path relative to `root`, its status, and the ctime of the newest link in
    its path (0: no link).
    """
    found = [
        (folder.label, folder.path, entry.name, status, linked)
        for folder, entry, status, linked in _files(root, classes)
        if entry.name.lower().endswith(EXTENSIONS)
    ]
    # torchvision sorts by the folder's path as text, so that `a-b` comes before `a/b`, and then by the file's name.
    found.sort(key=lambda each: each[:3])
    return [(label, f"{folder}/{name}", status, linked) for label, folder, name, status, linked in found]


class _Folder(NamedTuple):
    """A folder to list: the number of its class, its path relative to the root, and what is known of the path.

    `linked` is the ctime in ns of the newest link in the path, 0 without a link. `above` has the device and inode of
    each folder above, so that a link to a folder above is not followed.
    """

    label: int
    path: str
    linked: int
    above: tuple[tuple[int, int], ...]


def _files(root: str, classes: Sequence[str]) -> Iterator[tuple[_Folder, os.DirEntry[str], os.stat_result, int]]:
    """Yield each file in the class folders, at any depth, as a tuple (folder, entry, status, time of the newest link).

    The last value is the ctime in ns of the newest link in the file's path, 0 without a link. The folders of one depth
    are listed before those below them, so that storage that answers late can be asked for many of them at once.
    """
    top = os.stat(root)
    times = map_ahead(functools.partial(_link_time, root), classes)
    identity = (top.st_dev, top.st_ino)
    level = [
        _Folder(label, name, linked, (identity,))
        for label, (name, linked) in enumerate(zip(classes, times, strict=True))
    ]
    while level:
        entries = (
            (folder, entry) for folder, found in map_ahead(functools.partial(_scan, root), level) for entry in found
        )
        level = []
        for folder, entry, status, linked in map_ahead(_with_status, entries):
            if stat.S_ISDIR(status.st_mode):
                level.append(_Folder(folder.label, f"{folder.path}/{entry.name}", linked, folder.above))
            else:
                yield folder, entry, status, linked


def _scan(root: str, folder: _Folder) -> tuple[_Folder, list[os.DirEntry[str]]]:
    """Return a folder and its entries; the folder is added to its folders above. A link to one of them has no entries.

    Raises OSError.
    """
    path = os.path.join(root, folder.path)
    status = os.stat(path)
    identity = (status.st_dev, status.st_ino)
    if identity in folder.above:
        return folder, []
    with os.scandir(path) as scanned:
        return folder._replace(above=(*folder.above, identity)), list(scanned)


def _with_status(
    found: tuple[_Folder, os.DirEntry[str]],
) -> tuple[_Folder, os.DirEntry[str], os.stat_result, int]:
    """Return a folder, an entry of it, its status, and the time of the newest link in its path. Raises OSError."""
    folder, entry = found
    linked = folder.linked
    if entry.is_symlink():
        linked = max(linked, entry.stat(follow_symlinks=False).st_ctime_ns)
    try:
        return folder, entry, entry.stat(), linked
    except OSError:  # for a broken link, reading the picture raises the error
        return folder, entry, entry.stat(follow_symlinks=False), linked


def _link_time(root: str, name: str) -> int:
    """Return the ctime in ns of `name` in `root` if it is a link, or 0 if it is not."""
    status = os.lstat(os.path.join(root, name))
    return status.st_ctime_ns if stat.S_ISLNK(status.st_mode) else 0


def _keeps_inodes(root: str) -> bool:
    try:
        number = os.open(root, READ if FOLDER is None else FOLDER)
    except OSError:  # the caller lists the folder next, which raises the error
        return False
    try:
        return file_system(number) in LOCAL_FILE_SYSTEMS
    finally:
        os.close(number)


class PictureFolderSource:
    """A source for warmup: the pictures of a folder in torchvision's order, each labelled with its class number."""

    loads_in_threads = True

    def __init__(self, root: str, folder: PictureFolder) -> None:
        self._root = root
        self._folder: PictureFolder | None = folder

    def __repr__(self) -> str:
        return self._root

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_folder": None}  # workers only load, and the listing is large

    def list(self) -> Listing:
        """Return all pictures as samples, and the names of the classes."""
        folder = self._folder or PictureFolder((), ())
        samples = [Sample(number, file.path, file.label, file.bytes) for number, file in enumerate(folder.files)]
        return Listing(samples, folder.classes)

    def load(self, sample: Sample) -> Item:
        """Return an item with the bytes of a picture's file. Raises SampleError when the file cannot be read."""
        return Item({IMAGE: read_sample(os.path.join(self._root, sample.path), sample.path)})
