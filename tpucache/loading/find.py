"""Finds a cache by its name where notebooks mount published data, and joins versions of several mounted datasets."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from tpucache.errors import DamageError, FormatError, NotACacheError, StoreError, UsageError
from tpucache.store.cache import Cache
from tpucache.store.files import KAGGLE, as_url, is_url, read_file, refuse_url
from tpucache.store.format import MANIFEST_NAME, MAX_MANIFEST_BYTES, TIMES_NAME, version_name
from tpucache.store.history import load_earlier, split_version
from tpucache.store.manifest import Manifest
from tpucache.text import parse_json

#: The environment variable with the folders to search instead of the usual mounts, separated as in PATH.
PATH_VARIABLE: Final = "TPUCACHE_PATH"

# /kaggle/input/datasets/OWNER/SLUG and kagglehub's datasets/OWNER/SLUG/versions/N are four and five levels deep, and a
# cache may be one or two levels further down. The search may also meet large folders of photographs, so only the first
# entries of each folder are read.
_MAX_DEPTH: Final = 7
_MAX_FOLDERS: Final = 20_000
_MAX_ENTRIES: Final = 2_000
_MAX_SECONDS: Final = 30.0  # per root: a mounted drive lists about twenty folders per second
_NAMED: Final = 10
_VERSIONS: Final = "versions"

_log: Final = logging.getLogger("tpucache")


def locate(cache: str | Path) -> Path:
    """Return the folder of a cache. "kaggle:slug" and "kaggle:owner/slug" are searched for; other texts are paths."""
    text = os.fspath(cache)
    if text.startswith(KAGGLE):
        name, version = split_version(text)
        return find_cache(name) if version is None else find_version(name, version)
    refuse_url(text)
    return Path(text)


def open_cache(
    cache: str | Path,
    cache_dir: str | Path | None = None,
    cache_bytes: int | None = None,
    version: int | None = None,
) -> Cache:
    """Open a cache, given as a folder, "kaggle:slug" or a URL. In a folder, only the manifest is read.

    `version` is the number of the version to open, by default the newest; "cache@2" also names version 2 of "cache".
    """
    is_remote = is_url(cache) and not os.fspath(cache).startswith(KAGGLE)
    if is_remote or cache_dir is not None:
        from tpucache.store.remote.cache import RemoteCache

        place = as_url(cache) if is_remote else os.fspath(locate(cache).absolute())
        return RemoteCache.open_url(place, cache_dir, cache_bytes, version=version)
    return Cache.open(locate(cache).absolute(), version)  # absolute, because the working folder may change


def find_cache(name: str, roots: Sequence[str | Path] | None = None) -> Path:
    """Return the folder of the only cache with this name: "name", "kaggle:slug" or "kaggle:owner/slug".

    A cache has a name if its folder, or one above it up to the root of the search, is called so; "a/b" means b in a.
    The search covers `roots`, or the folders in TPUCACHE_PATH, or else those where Kaggle and Colab mount datasets and
    kagglehub keeps them, of whose versions the latest is used. Copies of a cache count once. A warning is logged if a
    folder with the name cannot be used, or the search was cut short.

    Raises UsageError for an invalid name, or if several caches have the name; NotACacheError if none has it.
    """
    wanted = _wanted(name)
    search = Search([Path(root) for root in roots] if roots is not None else usual_roots(), _MAX_SECONDS)
    named = [found for found in search.caches() if any(_holds(found.parts, parts) for parts in wanted)]
    refused: list[str] = []
    caches: dict[Path, Manifest] = {}
    for found in _latest(named):
        try:
            caches[found.path] = Manifest.load(found.path)
        except StoreError as error:  # other programs also write files called manifest.json
            refused.append(str(error))
    distinct = {manifest.to_json(): path for path, manifest in reversed(caches.items())}
    if len(distinct) > 1:
        places = ", ".join(sorted(map(str, distinct.values())))
        raise UsageError(f"{len(distinct)} caches are called {name!r}: {places}. Give the path of the cache you want")
    if not distinct:
        raise NotACacheError(search.explain(name, refused))
    for reason in refused:
        _log.warning("another folder is called %r, too, but cannot be used: %s", name, reason)
    if search.cut:
        roots = ", ".join(map(str, search.cut))
        _log.warning("%s was not searched to its end: it may hold another cache that is called %r", roots, name)
    return next(iter(distinct.values()))


def find_version(name: str, version: int, roots: Sequence[str | Path] | None = None) -> Path:
    wanted = _wanted(name)
    search = Search([Path(root) for root in roots] if roots is not None else usual_roots(), _MAX_SECONDS)
    found = [
        each for each in search.caches() if any(_holds(_of_dataset(each.parts, parts[-1]), parts) for parts in wanted)
    ]
    if not found:
        raise NotACacheError(search.explain(f"{name}@{version}", []))
    return join_version(name, version, [each.path for each in _latest(found)])


def _of_dataset(parts: Sequence[str], slug: str) -> list[str]:
    """Return the parts of a path, with the names of the dataset's add-ons, such as slug-v2, replaced by `slug`."""
    return [slug if is_of_dataset(part, slug) else part for part in parts]


def usual_roots() -> list[Path]:
    if folders := os.environ.get(PATH_VARIABLE):
        return [Path(root) for root in folders.split(os.pathsep) if root]
    # Where there is no home folder, this leaves the "~", and so names no folder.
    kagglehub = os.environ.get("KAGGLEHUB_CACHE") or os.path.expanduser("~/.cache/kagglehub")  # noqa: PTH111
    return [Path("/kaggle/input"), Path("/kaggle/working"), Path(kagglehub), Path("/content")]


@dataclass(frozen=True)
class Found:
    """A folder with a manifest: its `path`, and the `parts` of its path below the root of the search."""

    path: Path
    parts: tuple[str, ...]


@dataclass
class Search:
    """A breadth-first search below `roots` for folders with a manifest; depth, folders and time are limited."""

    roots: list[Path]
    seconds: float  # the limit per root
    folders: int = 0  # the number of folders that were visited
    others: list[Path] = field(default_factory=list)  # the folders that have a manifest
    cut: list[Path] = field(default_factory=list)  # the roots whose search reached a limit

    def caches(self) -> Iterator[Found]:
        seen: set[Path] = set()
        for root in self.roots:
            waiting = deque([Found(root, ())])
            limit, until = self.folders + _MAX_FOLDERS, time.monotonic() + self.seconds
            while waiting:
                if self.folders == limit or time.monotonic() > until:
                    self.cut.append(root)
                    break
                folder = waiting.popleft()
                self.folders += 1
                if (folder.path / MANIFEST_NAME).is_file():
                    real = folder.path.resolve()
                    if real not in seen:
                        seen.add(real)
                        self.others.append(folder.path)
                        yield folder
                elif len(folder.parts) < _MAX_DEPTH:
                    waiting.extend(Found(folder.path / name, (*folder.parts, name)) for name in _folders(folder.path))

    def explain(self, name: str, refused: Sequence[str]) -> str:
        roots = ", ".join(f"{root}{'' if root.is_dir() else ' (not there)'}" for root in self.roots) or "nowhere"
        lines = [
            f"no cache is called {name!r}. Looked at {self.folders:,} folders, {_MAX_DEPTH} deep at most, in {roots}"
        ]
        if self.cut:
            bounds = f"{_MAX_FOLDERS:,} folders or {self.seconds:.0f} s"
            lines.append(f"more folders are in {', '.join(map(str, self.cut))}: the search there ended after {bounds}")
        if refused:
            lines.append("not usable: " + "; ".join(refused[:_NAMED]))
        elif self.others:
            more = f" and {len(self.others) - _NAMED:,} more" if len(self.others) > _NAMED else ""
            lines.append(f"manifests are in {', '.join(map(str, self.others[:_NAMED]))}{more}")
        lines.append(
            f"Add the dataset to the notebook, give the folder itself, or set {PATH_VARIABLE} to the folders to search"
        )
        return ". ".join(lines)


def _wanted(name: str) -> list[tuple[str, ...]]:
    text = name.removeprefix(KAGGLE)
    parts = tuple(text.split("/"))
    is_kaggle = text != name
    if any(part in ("", ".", "..") for part in parts) or (is_kaggle and len(parts) > 2):
        raise UsageError(f'a cache is looked for as "name", "kaggle:slug" or "kaggle:owner/slug", not {name!r}')
    # Kaggle's older mounts, /kaggle/input/SLUG, do not contain the owner.
    return [parts, ("", parts[1])] if is_kaggle and len(parts) == 2 else [parts]


def _holds(parts: Sequence[str], wanted: Sequence[str]) -> bool:
    names = ("", *parts)
    return any(tuple(names[at : at + len(wanted)]) == tuple(wanted) for at in range(len(names)))


def _latest(found: Sequence[Found]) -> list[Found]:
    """Return `found` without outdated folders: if kagglehub has several versions of a dataset, the latest stays."""
    best: dict[tuple[Path, tuple[str, ...]], tuple[int, Found]] = {}
    for one in found:
        at = one.parts.index(_VERSIONS) + 1 if _VERSIONS in one.parts[:-1] else 0
        version = int(one.parts[at]) if at and one.parts[at].isdecimal() else -1
        same = one.parts[:at] + one.parts[at + 1 :] if version >= 0 else one.parts
        root = one.path.parents[len(one.parts) - 1] if one.parts else one.path
        best[root, same] = max(best.get((root, same), (version, one)), (version, one), key=lambda pair: pair[0])
    return [one for _, one in best.values()]


def _folders(directory: Path) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            few = [entry for entry, _ in zip(entries, range(_MAX_ENTRIES), strict=False)]
            return sorted(entry.name for entry in few if not entry.name.startswith(".") and entry.is_dir())
    except OSError:
        return []


#: The file in an add-on that names the datasets with the version's other files.
PARENTS_NAME: Final = "parents.json"
_FORMAT: Final = "tpucache parents"
_ADDED: Final = re.compile(r"-v[1-9]\d{0,5}")
_JOINED: Final = "joined"
_NAMED_FILES: Final = 3


class Mounted(NamedTuple):
    folder: Path
    manifest: Manifest


def is_of_dataset(part: str, slug: str) -> bool:
    """Return whether a folder's name `part` is that of the dataset `slug` or of one of its add-ons, such as slug-v2."""
    return part == slug or (part.startswith(slug) and _ADDED.fullmatch(part[len(slug) :]) is not None)


def join_version(name: str, number: int, folders: Sequence[Path]) -> Path:
    """Return a folder with all files of one version of a cache. The files may be spread over these folders."""
    mounted, refused = [], []
    for folder in folders:
        try:
            mounted.append(Mounted(folder, Manifest.load(folder)))
        except StoreError as error:
            refused.append(str(error))
    version, place = _find_version(name, number, mounted, refused)
    history = {version.identity, *version.parents}
    ours = [each for each in mounted if each.manifest.identity in history or version.identity in each.manifest.parents]
    others = [
        f"{each.folder} has a manifest that is no version of this cache, so its files are not used"
        for each in mounted
        if each not in ours
    ]
    order = sorted((each.folder for each in ours), key=lambda folder: folder != place)
    found = _find_files(version, order)
    if missing := [entry.name for entry in version.files if entry.name not in found]:
        raise NotACacheError(_what_to_attach(name, version, missing, [each.folder for each in ours], refused + others))
    if all(path.parent == place for path in found.values()):
        return place if Manifest.load(place).number == number else place.with_name(f"{place.name}@{number}")
    others = [TIMES_NAME, *(version_name(before) for before in range(1, number))]
    found |= {name: folder / name for name in others for folder in reversed(order) if (folder / name).is_file()}
    for before in range(1, number):  # the files of earlier versions, if they are mounted
        if path := found.get(version_name(before)):
            found = {**_find_files(load_earlier(path.parent, version, before), order), **found}
    try:
        return _link(version, found)
    except OSError as error:
        raise StoreError(
            f"the files of {name}@{number} cannot be joined: {error}. Set TPUCACHE_DIR to a folder that can be written"
        ) from error


def _find_version(name: str, number: int, mounted: Sequence[Mounted], refused: Sequence[str]) -> tuple[Manifest, Path]:
    versions: dict[str, tuple[Manifest, Path]] = {}
    for folder, manifest in mounted:
        with contextlib.suppress(DamageError, UsageError):  # an add-on may lack the manifests of earlier versions
            version = load_earlier(folder, manifest, number)
            versions.setdefault(version.identity, (version, folder))
    if len(versions) > 1:
        places = ", ".join(str(folder) for _, folder in versions.values())
        raise UsageError(
            f"{name}@{number}: several folders have a version {number}, and these versions differ: {places}. Detach "
            "the datasets of other caches"
        )
    if not versions:
        seen = ", ".join(f"version {each.manifest.number} in {each.folder}" for each in mounted) or "nothing"
        why = f". Not usable: {'; '.join(refused)}" if refused else ""
        raise NotACacheError(
            f"{name}@{number} is not mounted: there is {seen}{why}. Attach the dataset {_dataset(name)}-v{number}, or "
            f"a release of {_dataset(name)} that has this version"
        )
    return next(iter(versions.values()))


def _find_files(version: Manifest, folders: Sequence[Path]) -> dict[str, Path]:
    """Return the path of each file of a version that one of `folders` has in full size, the first of them."""
    return {
        entry.name: folder / entry.name
        for entry in version.files
        for folder in reversed(folders)
        if _has(folder / entry.name, entry.bytes)
    }


def _dataset(name: str) -> str:
    return name.partition(":")[2]


def _has(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def _what_to_attach(
    name: str, version: Manifest, missing: Sequence[str], folders: Sequence[Path], faults: Sequence[str]
) -> str:
    where: dict[str, str] = {}
    for folder in folders:
        where |= read_parents(folder)
    datasets = sorted({where[file] for file in missing if file in where})
    attach = " and ".join(datasets) if datasets else f"{_dataset(name)}, and its other add-ons"
    more = f" and {len(missing) - _NAMED_FILES:,} more" if len(missing) > _NAMED_FILES else ""
    why = f" ({'; '.join(faults)})" if faults else ""
    return (
        f"{name}@{version.number} is not whole here: {', '.join(missing[:_NAMED_FILES])}{more} are in no mounted "
        f"folder, or have another size{why}. Attach {attach}"
    )


def to_parents(where: Mapping[str, str]) -> dict[str, Any]:
    """Return the content of the file PARENTS_NAME. `where` has, by file name, the dataset that contains the file."""
    return {"format": _FORMAT, "files": dict(sorted(where.items()))}


def read_parents(folder: Path) -> dict[str, str]:
    """Return which dataset has each file that an add-on lacks, by file name; {} if the add-on does not say.

    The names of the datasets come from outside: use them in messages only.
    """
    with contextlib.suppress(OSError, ValueError):
        content = parse_json(read_file(folder / PARENTS_NAME, MAX_MANIFEST_BYTES))
        files = content.get("files") if isinstance(content, dict) and content.get("format") == _FORMAT else None
        pairs = files.items() if isinstance(files, dict) else ()
        return {name: text for name, text in pairs if isinstance(text, str) and text.isprintable()}
    return {}


def _link(version: Manifest, found: Mapping[str, Path]) -> Path:
    from tpucache.store.remote.cache import cache_directory, own_folder

    below = cache_directory()
    place = own_folder(below / _JOINED, below) / version.identity[:32]
    wanted = {name: os.path.realpath(path) for name, path in found.items()}
    if _links(place) != wanted or not _has(place / MANIFEST_NAME, len(version.text.encode())):
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{place.name}.") as aside:
            made, old = Path(aside, "made"), Path(aside, "old")
            made.mkdir()
            for name, path in wanted.items():
                (made / name).symlink_to(path)
            (made / MANIFEST_NAME).write_bytes(version.text.encode())
            with contextlib.suppress(FileNotFoundError):
                place.rename(old)
            with contextlib.suppress(OSError):  # another process has made it meanwhile
                made.rename(place)
        if _links(place) != wanted:
            raise FormatError(f"{place} is being changed by another process: run the command again")
    return place


def _links(place: Path) -> dict[str, str] | None:
    try:
        return {entry.name: str(Path(entry).readlink()) for entry in os.scandir(place) if entry.is_symlink()}
    except FileNotFoundError:
        return None
