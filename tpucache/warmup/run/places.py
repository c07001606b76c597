"""The places to which a build sends its cache: a URL, and a Kaggle dataset.

Until the manifest is sent, last, a URL also has what another machine needs to continue the build: the plan, the listing
of the source, and a receipt for each shard. Kaggle shows no files before they are a version of a dataset, so this
machine keeps them in the work folder. If an upload has expired at Kaggle, its shard is built again.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final

from tpucache.errors import BuildError, DamageError, FormatError, PublishError, StoreError, UnfinishedError, UsageError
from tpucache.kaggle import MAX_FILES, check_id
from tpucache.store.cache import Cache
from tpucache.store.copying import CLAIM_NAME, MAX_CLAIM_BYTES, Claim, parse_claim
from tpucache.store.files import KAGGLE, read_file, write_atomically
from tpucache.store.format import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    TIMES_NAME,
    WORK_NAME,
    most_index_bytes,
    most_table_bytes,
    version_name,
)
from tpucache.store.history import load_earlier, read_times, refuse_version, to_times
from tpucache.store.lock import hold
from tpucache.store.manifest import FileEntry, Manifest, ShardEntry
from tpucache.store.remote.cache import RemoteCache
from tpucache.store.remote.kaggle import JOURNAL_NAME, Content, Draft, KaggleDataset, in_memory, of_file, version_notes
from tpucache.store.remote.url import OF_REPOSITORIES, Remote
from tpucache.store.verify import is_whole
from tpucache.text import named, shown
from tpucache.warmup.run.folder import PLAN_FILES, build_identity, has_plan
from tpucache.warmup.run.spool import RECEIPT_NAME, receipt_path, receipts, sent_path

_COMMAND: Final = "warmup"
_PREFIX: Final = "unfinished-"  # begins the names of files of the work folder at the URL
_MOST_PLAN_BYTES: Final = 4 << 30


class Place(ABC):
    """Where a cache is sent while it is built. Its name in messages is `shown`."""

    shown: str
    #: Whether the work folder is needed until all files are sent, not only until the cache is built.
    needs_work = False
    #: Whether all waiting shards are sent in one request, or one shard at a time.
    takes_several = False
    #: Why samples and variants cannot be added to a finished cache there; "" if they can.
    adds_not = ""

    @property
    def sent_bytes(self) -> int:
        """The number of bytes that were sent, if the place limits the size of a cache, else 0."""
        return 0

    @abstractmethod
    def resume(self) -> Cache | None:
        """Find the files that an earlier run sent."""

    @abstractmethod
    def start(self) -> None:
        """Begin to send the build whose plan is in the work folder."""

    @abstractmethod
    def has(self, entry: ShardEntry) -> bool:
        """Return whether a shard was sent."""

    @abstractmethod
    def send(self, entries: Sequence[ShardEntry]) -> None: ...

    @abstractmethod
    def finish(self, manifest: Manifest) -> None:
        """Send the files of a finished cache that this place does not have yet."""

    @abstractmethod
    def close(self) -> None: ...


class UrlPlace(Place):
    """A URL. After each request, another run can continue from the files there."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url, self._folder, self._work = url, folder, folder / WORK_NAME
        self.shown = shown(url)
        refuse_version(url)
        self._remote = Remote(url)
        self.takes_several = self._remote.is_atomic
        if self._remote.is_http:
            raise UsageError(f"{self.shown} cannot be written: build into gs://, s3://, hf:// or a folder")
        self._names: set[str] = set()
        self._claim, self._is_taken = Claim(_COMMAND, secrets.token_hex(16), {}), False
        self._versions: dict[str, tuple[int | None, str | None]] = {}  # size and tag of each file that was sent
        self._sent: dict[str, str] = {}  # the SHA-256 of each shard at the URL, by name

    def resume(self) -> Cache | None:
        self._names = self._remote.names() - OF_REPOSITORIES.get(self._remote.scheme, set())
        if not self._names:
            return None
        has_claim = CLAIM_NAME in self._names
        is_ours = self._read_claim().command == _COMMAND if has_claim else MANIFEST_NAME in self._names
        if not is_ours:
            raise UsageError(f"{self.shown} holds files that no warmup left there: give another URL")
        if CLAIM_NAME in self._names and not has_plan(self._work) and not (self._folder / MANIFEST_NAME).exists():
            self._fetch_work()
        for mark, entry in receipts(self._folder, self._work, build_identity(self._work)):
            if mark.exists():
                if entry is None or entry.name not in self._names:  # somebody has removed it from the URL
                    mark.unlink()
                else:
                    self._sent[entry.name] = entry.sha256
        return RemoteCache.open_url(self._url, max_age=0.0) if MANIFEST_NAME in self._names else None

    def start(self) -> None:
        self._take()
        self._remote.send({f"{_PREFIX}{name}": read_file(self._work / name) for name in PLAN_FILES})

    def has(self, entry: ShardEntry) -> bool:
        return self._sent.get(entry.name) == entry.sha256

    def send(self, entries: Sequence[ShardEntry]) -> None:
        self._check_taken()
        receipts: dict[str, bytes] = {}
        for entry in entries:
            receipt = receipt_path(self._work, entry.block, entry.variant)
            with contextlib.suppress(FileNotFoundError):  # in `follow_build`, the build may have removed it at its end
                receipts[f"{_PREFIX}{receipt.name}"] = read_file(receipt)
        self._send_files(entries, receipts)
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                sent_path(self._work, entry.block, entry.variant).touch()
            self._sent[entry.name] = entry.sha256

    def finish(self, manifest: Manifest) -> None:
        names = self._remote.names()
        known = dict(self._sent)
        if MANIFEST_NAME in names:
            there = self._remote.manifest()[0]
            if there.identity == manifest.identity and CLAIM_NAME not in names:
                return
            known |= {entry.name: entry.sha256 for entry in there.files}
            if there.identity not in (manifest.identity, *manifest.parents):
                raise StoreError(
                    f"{self.shown} has another version now than when this run began: run the same command again"
                )
        self._names = names
        self._take()
        self._check_taken()
        self._send_files(
            [entry for entry in manifest.files if entry.name not in names or known.get(entry.name) != entry.sha256]
        )
        self._send_versions(manifest, names)
        for name, version in self._versions.items():
            if self._remote.version(name) != version:
                raise StoreError(
                    f"{self.shown}/{name} was replaced after it was sent: another process writes there. Give another "
                    "URL, or end that process and run the same command again"
                )
        self._check_taken()
        unfinished = sorted(name for name in names if name.startswith(_PREFIX))
        self._remote.send({MANIFEST_NAME: manifest.text.encode()}, remove=[*unfinished, CLAIM_NAME])

    def close(self) -> None:
        self._remote.close()

    def _take(self) -> None:
        if self._is_taken:
            return
        self._remote.make_folder()
        claim = self._claim.to_json().encode()
        if CLAIM_NAME in self._names:
            self._remote.write(CLAIM_NAME, claim)
        elif not self._remote.create(CLAIM_NAME, claim):
            raise self._lost()
        self._is_taken = True

    def _check_taken(self) -> None:
        names = self._remote.names()
        if CLAIM_NAME not in names or self._read_claim().identity != self._claim.identity:
            raise self._lost()

    def _read_claim(self) -> Claim:
        return parse_claim(self._remote.read(CLAIM_NAME, MAX_CLAIM_BYTES), f"{self.shown}/{CLAIM_NAME}")

    def _lost(self) -> BuildError:
        return BuildError(
            f"another process builds into {self.shown}: this process has stopped, and has not written its manifest "
            "there. Wait until the other process has ended and run the same command again, or give another URL"
        )

    def _send_versions(self, manifest: Manifest, names: set[str]) -> None:
        others: dict[str, bytes] = {}
        entries: list[FileEntry] = []
        for number in range(1, manifest.number):
            name = version_name(number)
            if (self._folder / name).exists():
                before = load_earlier(self._folder, manifest, number)
                for entry in before.files:
                    if entry.name not in names and (self._folder / entry.name).exists():
                        entries.append(entry)
                        names.add(entry.name)
                others[name] = before.text.encode()
        if times := read_times(self._folder):
            others[TIMES_NAME] = to_times(times)
        self._send_files(entries, others)

    def _fetch_work(self) -> None:
        names = sorted(name.removeprefix(_PREFIX) for name in self._names if name.startswith(_PREFIX))
        self._work.mkdir(parents=True, exist_ok=True)
        for name in [name for name in names if name in PLAN_FILES or RECEIPT_NAME.fullmatch(name)]:
            write_atomically(self._work / name, self._remote.read(f"{_PREFIX}{name}", _MOST_PLAN_BYTES))
        for name in names:
            if found := RECEIPT_NAME.fullmatch(name):
                sent_path(self._work, int(found[1]), int(found[2])).touch()

    def _send_files(self, entries: Sequence[FileEntry], others: dict[str, bytes] | None = None) -> None:
        files = {entry.name: self._folder / entry.name for entry in entries}
        together = others or {}
        if self._remote.is_atomic:
            self._remote.send({**files, **together})
            together = {}
        else:
            self._remote.send(files)
        for entry in entries:
            size, tag = self._remote.version(entry.name)
            if size != entry.bytes:
                raise StoreError(
                    f"{self.shown}/{entry.name} has {size} bytes after writing {entry.bytes:,}: run the "
                    "same command again"
                )
            self._versions[entry.name] = size, tag
        self._remote.send(together)


_LOCK_NAME: Final = "kaggle.lock"
_PATIENCE_SECONDS: Final = 600.0  # for Kaggle to make a version


class KagglePlace(Place):
    """A dataset at Kaggle."""

    needs_work = True

    def __init__(
        self, place: str, folder: Path, companions: Callable[[Manifest], Mapping[str, bytes]] | None = None
    ) -> None:
        self.shown, self._folder, self._work = place, folder, folder / WORK_NAME
        self.dataset_id = check_id(place.removeprefix(KAGGLE), "the dataset")
        self.adds_not = (
            "a dataset's version has to be sent as a whole. Give another name, or build in a folder and send the "
            "new version by `tpucache publish`"
        )
        self._dataset = KaggleDataset(self.dataset_id)
        self._companions = companions or (lambda manifest: {})
        self._exits = ExitStack()
        self._draft: Draft | None = None

    @property
    def sent_bytes(self) -> int:
        return self._draft.bytes if self._draft else 0

    def resume(self) -> Cache | None:
        draft = self._open_draft()
        for mark, entry in receipts(self._folder, self._work, build_identity(self._work)):
            if entry is not None and draft.sent(entry.name, entry.sha256):
                mark.touch()  # the run may have been killed before it did that
            else:
                mark.unlink(missing_ok=True)
        if draft.asked_after is None:
            self._reopen()
        if draft.asked_after is not None or draft.has_version or self._dataset.version() is None:
            return None
        return self._cache_there()

    def start(self) -> None:
        pass  # Kaggle cannot store the plan

    def has(self, entry: ShardEntry) -> bool:
        return self._open_draft().sent(entry.name, entry.sha256)

    def send(self, entries: Sequence[ShardEntry]) -> None:
        for entry in entries:
            self._send_entry(entry)
            sent_path(self._work, entry.block, entry.variant).touch()

    def finish(self, manifest: Manifest) -> None:
        draft, text = self._open_draft(), manifest.text.encode()
        if draft.asked_after is None and not draft.has_version and self._dataset.read(MANIFEST_NAME, len(text)) == text:
            self._check_listed(manifest)
            return
        others = {MANIFEST_NAME: text, **self._companions(Manifest.from_json(text))}
        contents = {entry.name: self._content(entry) for entry in manifest.files}
        contents |= {name: in_memory(data) for name, data in others.items()}
        if len(contents) > MAX_FILES:
            raise PublishError(
                f"{self.shown} would have {len(contents)} files, and a dataset has at most {MAX_FILES}: build the "
                "cache anew with a larger --shard-mb, which makes fewer shards"
            )
        try:
            self._send_left(manifest, {name: contents[name] for name in others})
            notes = version_notes(manifest)
            create = partial(self._dataset.create, title=self.dataset_id.partition("/")[2], description=notes)
            draft.commit(contents, create, notes, _PATIENCE_SECONDS)
        except (UnfinishedError, PublishError):
            if draft.asked_after is None:
                self._reopen()
            raise

    def close(self) -> None:
        self._dataset.close()
        self._exits.close()
        with contextlib.suppress(OSError):  # the folder is not empty
            self._work.rmdir()

    def _open_draft(self) -> Draft:
        if self._draft is None:
            self._work.mkdir(parents=True, exist_ok=True)
            self._exits.enter_context(
                hold(
                    self._work / _LOCK_NAME,
                    lambda holder: BuildError(
                        f"another process sends {self._folder} to {self.shown} ({holder}): wait for it or stop it"
                    ),
                )
            )
            self._draft = Draft(self._dataset, self._work / JOURNAL_NAME)
        return self._draft

    def _send_left(self, manifest: Manifest, others: Mapping[str, Content]) -> None:
        lacking = [entry for entry in manifest.files if not self._open_draft().sent(entry.name, entry.sha256)]
        if gone := [entry.name for entry in lacking if not (self._folder / entry.name).exists()]:
            raise UnfinishedError(
                f"{named(gone)}: neither on this machine nor at Kaggle any more. Run the same "
                "command again to build these files again"
            )
        for entry in lacking:
            self._send_entry(entry)
        for name, content in others.items():
            self._open_draft().send(name, content)

    def _send_entry(self, entry: FileEntry) -> None:
        if not is_whole(self._folder, entry):
            raise DamageError(
                f"{self._folder / entry.name} has changed since it was built: remove it, and run the same command again"
            )
        self._open_draft().send(entry.name, self._content(entry))

    def _content(self, entry: FileEntry) -> Content:
        return of_file(self._folder, entry)

    def _reopen(self) -> None:
        """Remove the manifest if a shard is neither at Kaggle nor on this machine: then the next run builds it."""
        if (self._folder / MANIFEST_NAME).exists() and has_plan(self._work):
            shards = Manifest.load(self._folder).shards
            if not all(self.has(entry) or (self._folder / entry.name).exists() for entry in shards):
                (self._folder / MANIFEST_NAME).unlink()

    def _check_listed(self, manifest: Manifest) -> None:
        listed = self._dataset.files()
        if missing := [entry.name for entry in manifest.files if listed.get(entry.name) != entry.bytes]:
            raise PublishError(
                f"{self.shown} has the manifest of this cache, and lacks {named(missing)}: remove "
                f"the dataset there ({self._dataset.page}), or give another name for the dataset"
            )

    def _cache_there(self) -> Cache:
        data = self._dataset.read(MANIFEST_NAME, MAX_MANIFEST_BYTES)
        try:
            if data is None:
                raise FormatError(f"there is no {MANIFEST_NAME}")
            manifest = Manifest.from_json(data)
        except FormatError as error:
            raise UsageError(
                f"{self.shown} is a dataset that no warmup made ({error}): give another name for the dataset"
            ) from error
        folder = Path(self._exits.enter_context(tempfile.TemporaryDirectory(prefix="tpucache-")))
        most = {manifest.index.name: most_index_bytes(manifest.records)}
        for entry in manifest.tables:
            limit = min(entry.bytes, most.get(entry.name, most_table_bytes(manifest.samples)))
            table = self._dataset.read(entry.name, limit)
            if table is None or hashlib.sha256(table).hexdigest() != entry.sha256:
                raise PublishError(
                    f"{self.shown}/{entry.name} differs from the manifest there: give another name for the dataset"
                )
            (folder / entry.name).write_bytes(table)
        return Cache(folder, manifest)
