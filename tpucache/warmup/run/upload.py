"""Upload: sends the shards of a build to a URL, each while the next ones are built, and the manifest last.

Until the cache is whole, the URL also holds what another machine needs to go on with the build: the plan, what the
source is like, and a receipt for each shard that is there. So a notebook that was killed, and its disk with it,
continues where it was.
"""

from __future__ import annotations

import contextlib
import hashlib
import queue
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, TypeVar

from tpucache.errors import BuildError, NotACacheError, StoreError, UnfinishedError, UsageError
from tpucache.redact import shown
from tpucache.store.cache import Cache
from tpucache.store.copying import CLAIM_NAME, FINISHED, MAX_CLAIM_BYTES, Claim, check_ours, folder_path, parse_claim
from tpucache.store.files import as_url, read_file, write_atomically
from tpucache.store.format import MANIFEST_NAME, TIMES_NAME, WORK_NAME, Part, version_name
from tpucache.store.history import load_earlier, read_times, to_times
from tpucache.store.manifest import FileEntry, Manifest, ShardEntry
from tpucache.store.remote.cache import RemoteCache, default_directory
from tpucache.store.remote.folder import Remote
from tpucache.warmup.run.chunks import RECEIPT_NAME, BuiltShard, load_receipt, receipt_path, sent_path, sent_shards
from tpucache.warmup.run.folder import finished_cache, is_worked_on, remove_folder
from tpucache.warmup.run.plan_file import PLAN_FILES, has_plan

Self = TypeVar("Self", bound="Upload")

_COMMAND: Final = "warmup"
_PREFIX: Final = "unfinished-"  # of the names, at the URL, of the files of the work folder
_WAITING: Final = 2  # shards that are finished and not sent; the build waits where there are more
_BUILDS: Final = "builds"
_MOST_PLAN_BYTES: Final = 4 << 30
_POLL_SECONDS: Final = 0.5
_CLEANING_SECONDS: Final = 10.0  # in which a build that has ended removes its work folder


def local_folder(url: str) -> Path:
    """Return the folder of this machine in which a cache is built that goes to a URL, unless the user names one."""
    return default_directory() / _BUILDS / hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:32]


class Upload:
    """The URL that a cache goes to, and the folder in which it is built. One thread sends, from `start` to the end."""

    def __init__(self, url: str, folder: Path, *, keeps_local: bool = True) -> None:
        """Open no connection yet. Raises UsageError for what cannot be written to, DependencyError."""
        self.url, self.folder, self.keeps_local = as_url(url), folder, keeps_local
        self.shown = shown(self.url)
        self._remote = Remote(self.url)
        if self._remote.is_http:
            raise UsageError(f"{self.shown} can be read only: build into gs://, s3://, hf:// or a folder")
        self._work = folder / WORK_NAME
        self._names: set[str] = set()
        self._claim, self._is_taken = Claim(_COMMAND, secrets.token_hex(16), {}), False
        self._versions: dict[str, tuple[int | None, str | None]] = {}  # of the files that this process has sent
        self._sent: dict[str, str] = {}  # the SHA-256 of each shard that is at the URL
        self._waiting: queue.Queue[BuiltShard | None] = queue.Queue(_WAITING)
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the thread. After an error, unless the time is up, what waits is left to the next run."""
        self._end(is_whole=kind is None or issubclass(kind, UnfinishedError))
        self._remote.close()

    def resume(self) -> Cache | None:
        """Look what the URL holds; copy what an earlier run left there for the next one to the work folder.

        Returns the finished cache that is there, None where there is none. Raises UsageError for anything else that the
        URL holds, StoreError.
        """
        self._names = self._remote.names()
        if not self._names:
            return None
        has_claim = CLAIM_NAME in self._names
        is_ours = self._read_claim().command == _COMMAND if has_claim else MANIFEST_NAME in self._names
        if not is_ours:
            raise UsageError(f"{self.shown} holds files that no warmup left there: give another place")
        if CLAIM_NAME in self._names and not has_plan(self._work) and not (self.folder / MANIFEST_NAME).exists():
            self._fetch_work()
        for block, part in sent_shards(self._work):
            shard = load_receipt(self.folder, self._work, block, part)
            if shard is None or shard.entry.name not in self._names:  # somebody removed it from the URL
                sent_path(self._work, block, part).unlink()
            else:
                self._sent[shard.entry.name] = shard.entry.sha256
        return RemoteCache.open_url(self.url, max_age=0.0) if MANIFEST_NAME in self._names else None

    def start(self) -> None:
        """Claim the URL for the build whose plan is in the work folder, and begin to send."""
        self._take()
        for name in PLAN_FILES:
            self._remote.put(f"{_PREFIX}{name}", read_file(self._work / name))
        self._thread = threading.Thread(target=self._send_all, name="tpucache-upload", daemon=True)
        self._thread.start()

    def _take(self) -> None:
        """Claim the URL for this process. What a build that was stopped has claimed is taken over from it.

        Raises BuildError where another process claims it at the same time, StoreError.
        """
        if self._is_taken:
            return
        self._remote.make_folder()
        claim = self._claim.to_json().encode()
        if CLAIM_NAME in self._names:
            self._remote.put(CLAIM_NAME, claim)
        elif not self._remote.create(CLAIM_NAME, claim):
            raise self._lost()
        self._is_taken = True

    def _check_taken(self) -> None:
        """Raise BuildError where another process has claimed the URL since, or has finished there; StoreError."""
        names = self._remote.names()
        if CLAIM_NAME not in names or self._read_claim().identity != self._claim.identity:
            raise self._lost()

    def _read_claim(self) -> Claim:
        return parse_claim(self._remote.read(CLAIM_NAME, MAX_CLAIM_BYTES), f"{self.shown}/{CLAIM_NAME}")

    def _lost(self) -> BuildError:
        return BuildError(
            f"another process builds into {self.shown}, and has claimed it: this one has stopped, and has not written "
            "its manifest there. Wait until the other has ended and run this again, or give another place"
        )

    def add(self, shard: BuiltShard) -> None:
        """Have a finished shard sent; wait where others wait already. Raises what could not be sent."""
        if self._sent.get(shard.entry.name) == shard.entry.sha256:
            return
        while True:
            if self._error is not None:
                raise self._error
            with contextlib.suppress(queue.Full):
                self._waiting.put(shard, timeout=_POLL_SECONDS)
                return

    def existing(self) -> Cache | None:
        """Return the finished cache, of this machine or at the URL, to which samples may be added; None for neither.

        Raises what `resume` and `finished_cache` do.
        """
        there = self.resume()
        if not (self.folder / MANIFEST_NAME).exists():
            return there
        return finished_cache(self.folder) if self.keeps_local else Cache.open(self.folder)

    def finish(self, manifest: Manifest) -> None:
        """Send what is left of a finished cache, its manifest last. Raises StoreError, UsageError for another cache."""
        self._end(is_whole=True)
        if self._error is not None:
            raise self._error
        names = self._remote.names()
        known = dict(self._sent)
        if MANIFEST_NAME in names:
            there = self._remote.manifest()[0]
            if there.identity == manifest.identity and CLAIM_NAME not in names:
                self._clear()
                return
            check_ours(self.shown, [MANIFEST_NAME], [Claim.of(FINISHED, there)], Claim.of(_COMMAND, manifest))
            known |= {entry.name: entry.sha256 for entry in there.files}
            if manifest.history and there.identity not in (manifest.identity, *manifest.parents):
                raise StoreError(f"{self.shown} holds another version than the one that was added to: run it again")
        self._names = names
        self._take()
        self._check_taken()
        for entry in manifest.files:
            if entry.name not in names or known.get(entry.name) != entry.sha256:
                self._send_file(entry)
        self._send_versions(manifest, names)
        self._check_sent()
        self._check_taken()
        self._remote.put(MANIFEST_NAME, manifest.text.encode())
        for name in sorted(names):
            if name.startswith(_PREFIX):
                self._remote.remove(name)
        if CLAIM_NAME in self._remote.names():
            self._remote.remove(CLAIM_NAME)
        self._clear()

    def _send_versions(self, manifest: Manifest, names: set[str]) -> None:
        """Send the manifests of the versions before, and what they alone have, where this machine has them."""
        for number in range(1, manifest.number):
            name = version_name(number)
            if (self.folder / name).exists():
                before = load_earlier(self.folder, manifest, number)
                for entry in before.files:
                    if entry.name not in names and (self.folder / entry.name).exists():
                        self._send_file(entry)
                        names.add(entry.name)
                self._remote.put(name, before.text.encode())
        if times := read_times(self.folder):
            self._remote.put(TIMES_NAME, to_times(times))

    def _check_sent(self) -> None:
        """Raise StoreError where a file that was sent is another one at the URL by now."""
        for name, version in self._versions.items():
            if self._remote.version(name) != version:
                raise StoreError(
                    f"{self.shown}/{name} was replaced after it was sent: another process writes there. Give another "
                    "place, or end the other and run this again"
                )

    def _clear(self) -> None:
        """Remove what is here of a cache that is at the URL, unless it is to be kept."""
        if not self.keeps_local:
            remove_folder(self.folder)

    def _fetch_work(self) -> None:
        """Copy the plan, and the receipts of the shards that are at the URL, to the work folder."""
        names = sorted(name.removeprefix(_PREFIX) for name in self._names if name.startswith(_PREFIX))
        self._work.mkdir(parents=True, exist_ok=True)
        for name in [name for name in names if name in PLAN_FILES or RECEIPT_NAME.fullmatch(name)]:
            write_atomically(self._work / name, self._remote.read(f"{_PREFIX}{name}", _MOST_PLAN_BYTES))
        for name in names:
            if found := RECEIPT_NAME.fullmatch(name):
                sent_path(self._work, int(found[1]), Part.parse(found[2])).touch()

    def _send_all(self) -> None:
        try:
            while (shard := self._waiting.get()) is not None:
                self._send(shard.entry)
        except BaseException as error:  # noqa: BLE001  # the build raises it
            self._error = error

    def _send(self, entry: ShardEntry) -> None:
        """Send a shard, then its receipt; only then may the local copy go. Raises BuildError, StoreError."""
        self._check_taken()
        self._send_file(entry)
        receipt = receipt_path(self._work, entry.block, entry.part)
        with contextlib.suppress(FileNotFoundError):  # the build that is followed has ended, and removed it
            self._remote.put(f"{_PREFIX}{receipt.name}", read_file(receipt))
            sent_path(self._work, entry.block, entry.part).touch()
        self._sent[entry.name] = entry.sha256
        if not self.keeps_local:
            (self.folder / entry.name).unlink(missing_ok=True)

    def _send_file(self, entry: FileEntry) -> None:
        self._remote.write(entry.name, self.folder / entry.name, lambda done: None)
        size, tag = self._remote.version(entry.name)
        if size != entry.bytes:
            raise StoreError(f"{self.shown}/{entry.name} has {size} bytes after writing {entry.bytes:,}: run it again")
        self._versions[entry.name] = size, tag

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
    with Upload(url, folder) as upload:
        upload.resume()
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
