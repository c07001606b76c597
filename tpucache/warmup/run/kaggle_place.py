"""KagglePlace: sends a cache to Kaggle while it is built. At the end, the files become one version of a dataset.

Kaggle does not show the files before they are a version. So this machine keeps the files that the next run needs in the
work folder: the plan, the receipts of the shards, and a journal of the sent files. If an upload has expired at Kaggle,
its shard is built again.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from tpucache.errors import BuildError, DamageError, FormatError, PublishError, UnfinishedError, UsageError
from tpucache.kaggle import MAX_FILES, check_id
from tpucache.store.cache import Cache
from tpucache.store.files import KAGGLE
from tpucache.store.format import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    WORK_NAME,
    most_index_bytes,
    most_table_bytes,
)
from tpucache.store.lock import hold
from tpucache.store.manifest import FileEntry, Manifest, ShardEntry
from tpucache.store.remote.draft import JOURNAL_NAME, Content, Draft, in_memory, of_file
from tpucache.store.remote.kaggle import KaggleDataset
from tpucache.store.verify import is_whole
from tpucache.warmup.run.chunks import RECEIPT_NAME, load_receipt, sent_path, sent_shards
from tpucache.warmup.run.plan_file import has_plan

_LOCK_NAME: Final = "kaggle.lock"
_PATIENCE_SECONDS: Final = 600.0  # for Kaggle to make a version
_MOST_NAMED: Final = 5


class KagglePlace:
    """The Kaggle dataset to which a build sends its cache."""

    needs_work = True
    takes_several = False

    def __init__(
        self, place: str, folder: Path, companions: Callable[[Manifest], Mapping[str, bytes]] | None = None
    ) -> None:
        self.shown, self._folder, self._work = place, folder, folder / WORK_NAME
        self.dataset_id = check_id(place.removeprefix(KAGGLE), "the dataset")
        self.adds_not = (
            "a dataset's version has to be sent as a whole. Give another name, or build in a folder and send the "
            "new version by `tpucache publish --version-notes`"
        )
        self._dataset = KaggleDataset(self.dataset_id)
        self._companions = companions or (lambda manifest: {})
        self._exits = ExitStack()
        self._draft: Draft | None = None

    @property
    def sent_bytes(self) -> int:
        return self._draft.bytes if self._draft else 0

    def resume(self) -> Cache | None:
        """Find out which of the sent files Kaggle still keeps."""
        draft = self._open_draft()
        if draft.asked_after is None:  # otherwise an earlier run has asked for a version, which may have the files
            draft.forget_expired()
        for block, variant in sent_shards(self._work):
            shard = load_receipt(self._folder, self._work, block, variant)
            if shard is None or not draft.sent(shard.entry.name, shard.entry.sha256):
                sent_path(self._work, block, variant).unlink(missing_ok=True)
        for path in self._work.glob("shard-*.npz"):  # the run may have been killed before it marked a shard as sent
            found = RECEIPT_NAME.fullmatch(path.name)
            shard = load_receipt(self._folder, self._work, int(found[1]), int(found[2])) if found else None
            if shard is not None and draft.sent(shard.entry.name, shard.entry.sha256):
                sent_path(self._work, shard.entry.block, shard.entry.variant).touch()
        if draft.asked_after is None:
            self._reopen()
        if draft.asked_after is not None or draft.has_version or self._dataset.version() is None:
            return None
        return self._cache_there()

    def start(self) -> None:
        """Do nothing: Kaggle cannot store the plan."""

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
        contents |= {name: draft.as_asked_for(name, in_memory(data)) for name, data in others.items()}
        if len(contents) > MAX_FILES:
            raise PublishError(
                f"{self.shown} would have {len(contents)} files, and a dataset has at most {MAX_FILES}: build the "
                "cache anew with a larger --shard-mb, which makes fewer shards"
            )
        try:
            if draft.asked_after is None:
                self._send_left(manifest, {name: contents[name] for name in others})
            notes = f"{manifest.samples:,} samples, {manifest.records:,} records, {manifest.fingerprint[:12]}"
            draft.commit(contents, self.dataset_id.partition("/")[2], notes, _PATIENCE_SECONDS)
        except (UnfinishedError, PublishError):
            if draft.asked_after is None:
                self._reopen()
            raise

    def close(self) -> None:
        """Release the lock of the work folder, and close connections."""
        self._dataset.close()
        self._exits.close()
        with contextlib.suppress(OSError):  # the folder is not empty
            self._work.rmdir()

    def _open_draft(self) -> Draft:
        if self._draft is None:
            self._work.mkdir(parents=True, exist_ok=True)
            self._exits.enter_context(hold(self._work / _LOCK_NAME, self._refusal))
            self._draft = Draft(self._dataset, self._work / JOURNAL_NAME)
        return self._draft

    def _refusal(self, holder: str) -> BuildError:
        return BuildError(f"another process sends {self._folder} to {self.shown} ({holder}): wait for it or stop it")

    def _send_left(self, manifest: Manifest, others: Mapping[str, Content]) -> None:
        lacking = [entry for entry in manifest.files if not self._open_draft().sent(entry.name, entry.sha256)]
        if gone := [entry.name for entry in lacking if not (self._folder / entry.name).exists()]:
            raise UnfinishedError(
                f"{', '.join(gone[:_MOST_NAMED])}: neither on this machine nor at Kaggle any more. Run the same "
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
                f"{self.shown} has the manifest of this cache, and lacks {', '.join(missing[:_MOST_NAMED])}: remove "
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
