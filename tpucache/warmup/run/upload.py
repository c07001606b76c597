"""Upload: sends the shards of a build to where the cache goes, each while the next ones are built.

A place is a URL, whose manifest is written last (`url_place`), or a Kaggle dataset, of which one version is made in the
end (`kaggle_place`). A notebook that was killed continues where it was.
"""

from __future__ import annotations

import contextlib
import hashlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, TypeVar

from tpucache.errors import BuildError, NotACacheError, UnfinishedError
from tpucache.store.cache import Cache
from tpucache.store.copying import folder_path
from tpucache.store.files import as_url, is_kaggle
from tpucache.store.format import MANIFEST_NAME, WORK_NAME, Part
from tpucache.store.manifest import Manifest, ShardEntry
from tpucache.store.remote.cache import default_directory
from tpucache.warmup.run.chunks import RECEIPT_NAME, BuiltShard, load_receipt
from tpucache.warmup.run.folder import finished_cache, is_worked_on, remove_folder
from tpucache.warmup.run.kaggle_place import KagglePlace
from tpucache.warmup.run.plan_file import has_plan
from tpucache.warmup.run.url_place import UrlPlace

Self = TypeVar("Self", bound="Upload")
#: Returns files that go to Kaggle with a cache, by their names, such as its card.
Companions = Callable[[Manifest], Mapping[str, bytes]]

_WAITING: Final = 2  # shards that are finished and not sent; the build waits where there are more
_BUILDS: Final = "builds"
_POLL_SECONDS: Final = 0.5
_CLEANING_SECONDS: Final = 10.0  # in which a build that has ended removes its work folder


class Place(Protocol):
    """Where a cache goes while it is built."""

    #: How it is called in messages.
    shown: str
    #: Whether the work folder is needed until all is sent, and not only until the cache is built.
    needs_work: bool
    #: Whether one request takes all shards that wait, or one after the other is sent.
    takes_several: bool
    #: Why samples and variants cannot be added to a finished cache there; empty where they can.
    adds_not: str

    @property
    def sent_bytes(self) -> int:
        """The bytes that are there, where a limit depends on it."""

    def resume(self) -> Cache | None:
        """Look what an earlier run sent; return the finished cache that is there, None where there is none."""

    def start(self) -> None:
        """Begin to send the build whose plan is in the work folder."""

    def has(self, entry: ShardEntry) -> bool:
        """Return whether a shard is there."""

    def send(self, entries: Sequence[ShardEntry]) -> None:
        """Send shards. After that, they may be removed here."""

    def finish(self, manifest: Manifest) -> None:
        """Send what is left of a finished cache, so that it is one there. Nothing is sent where it is already."""

    def close(self) -> None:
        """Close what is open."""


def local_folder(url: str) -> Path:
    """Return the folder of this machine in which a cache for a URL is built, unless the user names one."""
    return default_directory() / _BUILDS / hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:32]


def open_place(url: str, folder: Path, companions: Companions | None = None) -> Place:
    """Return the place at a URL, or at kaggle:owner/slug, of a cache that is built in a folder.

    No connection is opened yet. Raises UsageError for what cannot be written to, DependencyError.
    """
    if is_kaggle(url):
        return KagglePlace(url, folder, companions)
    return UrlPlace(as_url(url), folder)


class Upload:
    """A place that a cache goes to, and the folder in which it is built. One thread sends, from `start` to the end."""

    def __init__(self, place: Place, folder: Path, *, keeps_local: bool = True) -> None:
        """Take a place, which is closed at the end."""
        self.place, self.folder, self.keeps_local = place, folder, keeps_local
        # A cache that is larger than the disk has as few shards on it as keep both sides at work.
        self._waiting: queue.Queue[BuiltShard | None] = queue.Queue(_WAITING if keeps_local else 1)
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the thread. After an error, unless the time is up, what waits is left to the next run."""
        self._end(is_whole=kind is None or issubclass(kind, UnfinishedError))
        self.place.close()

    def start(self) -> None:
        """Begin to send the build whose plan is in the work folder."""
        self.place.start()
        self._thread = threading.Thread(target=self._send_all, name="tpucache-upload", daemon=True)
        self._thread.start()

    def add(self, shard: BuiltShard) -> None:
        """Have a finished shard sent; wait where others wait already. Raises what could not be sent."""
        if self.place.has(shard.entry):
            if not self.keeps_local:  # a kill may have come before it was removed
                (self.folder / shard.entry.name).unlink(missing_ok=True)
            return
        while True:
            if self._error is not None:
                raise self._error
            with contextlib.suppress(queue.Full):
                self._waiting.put(shard, timeout=_POLL_SECONDS)
                return

    def existing(self) -> Cache | None:
        """Return the finished cache, of this machine or at the place, to which samples may be added; None for neither.

        Raises what the place's `resume` and `finished_cache` do.
        """
        there = self.place.resume()
        if not (self.folder / MANIFEST_NAME).exists():
            return there
        return finished_cache(self.folder) if self.keeps_local else Cache.open(self.folder)

    def check_addition(self, existing: Cache) -> None:
        """Raise BuildError where nothing can be added to a finished cache at the place."""
        if self.place.adds_not:
            raise BuildError(
                f"{self.place.shown}: a cache of {existing.manifest.samples:,} samples is finished, and more would be "
                f"added to it: {self.place.adds_not}"
            )

    def finish(self, manifest: Manifest) -> None:
        """Send what is left of a finished cache; remove it here, unless it is to be kept.

        Raises what could not be sent, and what the place's `finish` does.
        """
        self._end(is_whole=True)
        if self._error is not None:
            raise self._error
        self.place.finish(manifest)
        if not self.keeps_local:
            # The manifest goes first and the work folder last: what a kill leaves is never taken for a cache.
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
        """Wait for the thread, until all is sent if it `is_whole`, else until what is being sent is."""
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


def follow_build(cache: str | Path, url: str, on_shard: Callable[[str], None] = lambda name: None) -> Manifest:
    """Send the shards of a build that another process runs, as they are finished, and the manifest last; return it.

    `on_shard` is called with the name of each one that is handed over to be sent. A build that has ended is sent as it
    is. Raises NotACacheError where there is no build and no cache, BuildError for a build that was stopped, UsageError
    and StoreError for the URL.
    """
    folder = folder_path(cache)
    work, followed = folder / WORK_NAME, set[str]()
    if not has_plan(work) and not (folder / MANIFEST_NAME).exists():
        raise NotACacheError(f"{folder} holds no cache, and none is being built there: begin the warmup first")
    with Upload(UrlPlace(as_url(url), folder), folder) as upload:
        upload.place.resume()
        is_started, seen = False, time.monotonic()
        while has_plan(work):
            if not is_started:
                upload.start()
                is_started = True
            if is_worked_on(work):
                seen = time.monotonic()
            for path in sorted(work.glob("*.npz")):
                found = RECEIPT_NAME.fullmatch(path.name)
                shard = load_receipt(folder, work, int(found[1]), Part.parse(found[2])) if found else None
                if shard is not None and shard.entry.name not in followed:
                    upload.add(shard)
                    followed.add(shard.entry.name)
                    on_shard(shard.entry.name)
            if time.monotonic() - seen > _CLEANING_SECONDS and has_plan(work):
                raise BuildError(f"the warmup into {folder} was stopped: run it again, and follow it again")
            time.sleep(_POLL_SECONDS)
        manifest = Manifest.load(folder)
        upload.finish(manifest)
    return manifest
