"""Upload: sends each finished shard of a build to a URL or to Kaggle while the next ones are built."""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from tpucache.errors import BuildError, UnfinishedError
from tpucache.store.cache import Cache
from tpucache.store.files import as_url, is_kaggle
from tpucache.store.format import MANIFEST_NAME, WORK_NAME
from tpucache.store.manifest import Manifest
from tpucache.warmup.run.folder import finished_cache, remove_folder
from tpucache.warmup.run.spool import BuiltShard

if TYPE_CHECKING:  # most builds send nothing
    from tpucache.warmup.run.places import Place

#: A function that returns further files, by their names, to send to Kaggle with a cache, such as the dataset's card.
Companions = Callable[[Manifest], Mapping[str, bytes]]

_MOST_WAITING: Final = 2  # shards that wait to be sent; the build waits when the queue is full
_BUILDS: Final = "builds"
_POLL_SECONDS: Final = 0.5


def local_folder(url: str) -> Path:
    """Return the default local folder in which a cache for a URL is built."""
    from tpucache.store.remote.cache import cache_directory, check_own

    below = cache_directory()
    if os.path.lexists(below / _BUILDS):
        check_own(below / _BUILDS, below)
    return below / _BUILDS / hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:32]


def open_place(url: str, folder: Path, companions: Companions | None = None) -> Place:
    """Return the Place at `url`, a URL or kaggle:owner/slug, for the cache that is built in `folder`."""
    from tpucache.warmup.run.places import KagglePlace, UrlPlace

    if is_kaggle(url):
        return KagglePlace(url, folder, companions)
    return UrlPlace(as_url(url), folder)


class CacheUpload:
    """Sends a cache from the folder in which it is built to a place. From `start` on, a thread sends shards."""

    def __init__(self, place: Place, folder: Path, *, keeps_local: bool = True) -> None:
        self.place, self.folder, self.keeps_local = place, folder, keeps_local
        # Without `keeps_local`, the cache may be larger than the disk, so fewer shards may wait.
        self._waiting: queue.Queue[BuiltShard | None] = queue.Queue(_MOST_WAITING if keeps_local else 1)
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end(is_whole=kind is None or issubclass(kind, UnfinishedError))
        self.place.close()

    def start(self) -> None:
        """Begin to send the build whose plan is in the work folder."""
        self.place.start()
        self._thread = threading.Thread(target=self._send_all, name="tpucache-upload", daemon=True)
        self._thread.start()

    def add(self, shard: BuiltShard) -> None:
        if self.place.has(shard.entry):
            if not self.keeps_local:  # a killed run may not have removed it
                (self.folder / shard.entry.name).unlink(missing_ok=True)
            return
        while True:
            if self._error is not None:
                raise self._error
            with contextlib.suppress(queue.Full):
                self._waiting.put(shard, timeout=_POLL_SECONDS)
                return

    def existing(self) -> Cache | None:
        """Return the finished cache in the local folder or at the place, or None if there is none."""
        there = self.place.resume()
        if not (self.folder / MANIFEST_NAME).exists():
            return there
        return finished_cache(self.folder) if self.keeps_local else Cache.open(self.folder)

    def check_addition(self, existing: Cache) -> None:
        """Raise BuildError if the place does not allow adding to a finished cache."""
        if self.place.adds_not:
            raise BuildError(
                f"{self.place.shown} has a finished cache of {existing.manifest.samples:,} samples, and nothing can be "
                f"added to it: {self.place.adds_not}"
            )

    def finish(self, manifest: Manifest) -> None:
        self._end(is_whole=True)
        if self._error is not None:
            raise self._error
        self.place.finish(manifest)
        if not self.keeps_local:
            # The manifest is removed first and the work folder last, so that after a kill the rest is not a cache.
            (self.folder / MANIFEST_NAME).unlink(missing_ok=True)
            for path in self.folder.glob("*"):
                if path.name != WORK_NAME and path.is_file():
                    path.unlink(missing_ok=True)
            remove_folder(self.folder)

    def _send_all(self) -> None:
        try:
            while True:
                shards = [self._waiting.get()]
                with contextlib.suppress(queue.Empty):
                    while shards[-1] is not None and self.place.takes_several:
                        shards.append(self._waiting.get_nowait())
                entries = [shard.entry for shard in shards if shard is not None]
                self.place.send(entries)
                if not self.keeps_local:
                    for entry in entries:
                        (self.folder / entry.name).unlink(missing_ok=True)
                if shards[-1] is None:
                    return
        except BaseException as error:  # noqa: BLE001  # the build raises it
            self._error = error

    def _end(self, *, is_whole: bool = False) -> None:
        """If `is_whole`, waiting shards are sent first; otherwise they are dropped."""
        if self._thread is None:
            return
        while not is_whole:
            try:
                self._waiting.get_nowait()
            except queue.Empty:
                break
        while self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._waiting.put(None, timeout=_POLL_SECONDS)
                break
        self._thread.join()
        self._thread = None
