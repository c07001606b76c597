"""Changes a finished cache: locks it against other writers, and keeps its previous state as an earlier version."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tpucache.errors import BuildError, StoreError
from tpucache.store.cache import Cache
from tpucache.store.files import link_or_copy, write_atomically
from tpucache.store.format import MANIFEST_NAME, TIMES_NAME, WORK_NAME, table_name, version_name
from tpucache.store.history import note_time, refuse_version
from tpucache.store.manifest import FileEntry, History, Manifest
from tpucache.warmup.run.folder import finished_cache, hold, remove_folder, remove_old_files
from tpucache.warmup.run.plan_file import is_adding_to


@contextlib.contextmanager
def changing(cache: Path, doing: str) -> Iterator[Cache]:
    """Lock a finished cache against other writers, and yield its newest version."""
    refuse_version(cache)
    manifest = Manifest.load(cache)
    finished_cache(cache)  # raises an error if files are missing
    work = cache / WORK_NAME
    try:
        if work.exists() and is_adding_to(work, manifest):
            raise BuildError(
                f"a warmup is adding to {cache} and is not finished: run that warmup again to its end, or remove "
                f"{work} to give it up, then {doing}"
            )
        work.mkdir(exist_ok=True)
        with hold(work):
            try:
                yield Cache.open(cache)
            finally:
                with contextlib.suppress(StoreError):  # a damaged cache is not cleaned up
                    remove_old_files(cache, Manifest.load(cache), is_thorough=False)
                remove_folder(work)
    except OSError as error:
        raise BuildError(
            f"{cache} cannot be written: {error}. The cache is intact: it has either the whole change or none of it. "
            "Make room, or copy the cache to a folder that can be written, then run the same command again"
        ) from error


def next_history(folder: Path, before: Manifest, command: str) -> History:
    """Save the manifest `before` as the file of an earlier version, and return the history of the next version."""
    name = version_name(before.number)
    write_atomically(folder / name, before.text.encode(), folder / WORK_NAME / f"{name}.tmp")
    return History(before.number + 1, command, (*before.parents, before.identity))


def save_manifest(folder: Path, manifest: Manifest) -> Manifest:
    work = folder / WORK_NAME
    if manifest.history is not None:
        note_time(folder, manifest, work / f"{TIMES_NAME}.tmp")
    manifest.save(folder, work / f"{MANIFEST_NAME}.tmp")
    return manifest


def keep_table(folder: Path, entry: FileEntry, first: str, generation: int) -> FileEntry:
    """Give an unchanged table a name in the next version, as a link or a copy of its file."""
    name = table_name(first, generation)
    link_or_copy(folder / entry.name, folder / name, folder / WORK_NAME / f"{name}.tmp")
    return FileEntry(name, entry.bytes, entry.sha256)
