"""Finds a cache by its name where notebooks mount published data."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tpucache.errors import NotACacheError, StoreError, UsageError
from tpucache.store.cache import Cache
from tpucache.store.files import KAGGLE, as_url, is_url, refuse_url
from tpucache.store.format import MANIFEST_NAME
from tpucache.store.history import split_version
from tpucache.store.manifest import Manifest
from tpucache.text import named

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
        return Path(f"{find_cache(name)}{'' if version is None else f'@{version}'}")
    refuse_url(text)
    return Path(text)


def open_cache(
    cache: str | Path,
    cache_dir: str | Path | None = None,
    cache_bytes: int | None = None,
    version: int | None = None,
    max_age: float = 30.0,
) -> Cache:
    """Open a cache, given as a folder, "kaggle:slug" or a URL. In a folder, only the manifest is read.

    `version` is the number of the version to open, by default the newest; "cache@2" also names version 2 of "cache".
    """
    is_remote = is_url(cache)
    if is_remote or cache_dir is not None:
        from tpucache.store.remote.cache import RemoteCache

        place = as_url(cache) if is_remote else str(locate(cache).absolute())
        return RemoteCache.open_url(place, cache_dir, cache_bytes, max_age, version)
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
            lines.append(f"manifests are in {named(self.others, _NAMED)}")
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
