"""Joins a version of a cache from several mounted datasets, by a folder of links to their files.

`publish --version-notes` publishes only the new files, as an add-on dataset `owner/slug-v2` of `owner/slug`. A folder
belongs to the same cache if its manifest is that of the version, of an earlier version, or of a later version that was
made from this one. Manifests are compared by `Manifest.identity`.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from tpucache.errors import DamageError, FormatError, NotACacheError, StoreError, UsageError
from tpucache.store.files import read_file
from tpucache.store.format import MANIFEST_NAME, MAX_MANIFEST_BYTES, TIMES_NAME, version_name
from tpucache.store.history import load_earlier
from tpucache.store.manifest import Manifest
from tpucache.text import parse_json

#: The file in an add-on that names the datasets with the version's other files.
PARENTS_NAME: Final = "parents.json"
_FORMAT: Final = "tpucache parents"
_ADDED: Final = re.compile(r"-v[1-9]\d{0,5}")
_JOINED: Final = "joined"
_NAMED: Final = 3


class Mounted(NamedTuple):
    """A mounted folder with a manifest."""

    folder: Path
    manifest: Manifest


def is_of_dataset(part: str, slug: str) -> bool:
    """Return whether a folder's name `part` is that of the dataset `slug` or of one of its add-ons, such as slug-v2."""
    return part == slug or (part.startswith(slug) and _ADDED.fullmatch(part[len(slug) :]) is not None)


def join_version(name: str, number: int, folders: Sequence[Path]) -> Path:
    """Return a folder with all files of one version of a cache. The files may be spread over these folders.

    A folder that has all files is returned itself. Otherwise a folder of links is made in the user's cache folder.
    `name` is the cache's name for messages.

    Raises NotACacheError, which says what to attach, if no folder has the version or some files are missing;
    DamageError for a damaged manifest; UsageError if the folders have different caches with such a version; StoreError
    if the links cannot be written.
    """
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
    """Return the path of each file of a version, by file name: in the first of `folders` with this file in full size.

    Files that no folder has are left out.
    """
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
    """Return an error message that says which datasets to attach, because files of a version are in no mounted folder.

    `missing` are the names of these files, `folders` the mounted folders of the cache, and `faults` the reasons why
    other folders cannot be used.
    """
    where: dict[str, str] = {}
    for folder in folders:
        where |= read_parents(folder)
    datasets = sorted({where[file] for file in missing if file in where})
    attach = " and ".join(datasets) if datasets else f"{_dataset(name)}, and its other add-ons"
    more = f" and {len(missing) - _NAMED:,} more" if len(missing) > _NAMED else ""
    why = f" ({'; '.join(faults)})" if faults else ""
    return (
        f"{name}@{version.number} is not whole here: {', '.join(missing[:_NAMED])}{more} are in no mounted folder, "
        f"or have another size{why}. Attach {attach}"
    )


def to_parents(where: Mapping[str, str]) -> dict[str, Any]:
    """Return the content of the file PARENTS_NAME. `where` has, by file name, the dataset that contains the file."""
    return {"format": _FORMAT, "files": dict(sorted(where.items()))}


def read_parents(folder: Path) -> dict[str, str]:
    """Return which dataset has each file that an add-on lacks, by file name; {} if the add-on does not say.

    The names of the datasets come from outside: use them in messages only.
    """
    with contextlib.suppress(OSError, ValueError):
        if (folder / PARENTS_NAME).stat().st_size <= MAX_MANIFEST_BYTES:
            content = parse_json(read_file(folder / PARENTS_NAME))
            files = content.get("files") if isinstance(content, dict) and content.get("format") == _FORMAT else None
            pairs = files.items() if isinstance(files, dict) else ()
            return {name: text for name, text in pairs if isinstance(text, str) and text.isprintable()}
    return {}


def _link(version: Manifest, found: Mapping[str, Path]) -> Path:
    """Return a folder with a version's manifest and links to its files. If a file has moved, make the folder again."""
    from tpucache.store.remote.cache import default_directory, own_folder

    below = default_directory()
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
