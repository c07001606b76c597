"""Draft: files that were uploaded to Kaggle and will become one version of a dataset.

A journal, a file on this machine, has the token of each uploaded file. When a later run continues the upload, it asks
Kaggle which of these files Kaggle still keeps. The journal does not contain the account's key.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final

from tpucache.errors import BuildError, PublishError, UnfinishedError
from tpucache.store.files import name_aside, read_file, rename_durably
from tpucache.store.format import MANIFEST_NAME
from tpucache.store.manifest import FileEntry
from tpucache.store.remote.kaggle import Blob, ExpiredError, KaggleDataset, NoAnswerError, RefusedError
from tpucache.text import parse_json

JOURNAL_NAME: Final = "kaggle.json"
#: Kaggle may show a change this long after it was made.
_GRACE_SECONDS: Final = 60.0
_FIRST_POLL: Final = 0.25
_LONGEST_POLL: Final = 10.0
_FORMAT: Final = 1
_NAMED: Final = 10
_FORBIDDEN: Final = 403

_log: Final = logging.getLogger("tpucache")


@dataclass(frozen=True)
class SentFile:
    """A file of a draft: its size in `bytes` and its `sha256`, and `is_whole`: whether it was uploaded completely.

    `token` names the file at Kaggle, and `url` is the URL to which its bytes are sent.
    """

    bytes: int
    sha256: str
    token: str
    url: str
    is_whole: bool

    @property
    def blob(self) -> Blob:
        """The file's token and upload URL at Kaggle."""
        return Blob(self.token, self.url)


@dataclass(frozen=True)
class Content:
    """A file to upload: its size in bytes, its SHA-256, and a function that opens it."""

    bytes: int
    sha256: str
    open: Callable[[], BinaryIO]


class Draft:
    """The files that were uploaded for the next version of a dataset, and the state of that version."""

    def __init__(self, dataset: KaggleDataset, journal: Path) -> None:
        self.dataset, self._journal = dataset, journal
        self._files: dict[str, SentFile] = {}
        #: After a version was requested: the number of the version before it. None if no version was requested yet.
        self.asked_after: int | None = None
        #: Whether this draft has made a version before, so that the dataset is known to be ours.
        self.has_version = False
        if journal.exists():
            self._load()

    def sent(self, name: str, sha256: str) -> bool:
        """Return whether the journal says that the file `name`, with this SHA-256, was uploaded completely."""
        file = self._files.get(name)
        return file is not None and file.is_whole and file.sha256 == sha256

    def as_asked_for(self, name: str, content: Content) -> Content:
        """Return `content` with the size and SHA-256 that the file had when Kaggle was asked to make a version."""
        file = self._files.get(name)
        if self.asked_after is None or file is None:
            return content
        return dataclasses.replace(content, bytes=file.bytes, sha256=file.sha256)

    @property
    def bytes(self) -> int:
        """The total size in bytes of the files that were uploaded completely."""
        return sum(file.bytes for file in self._files.values() if file.is_whole)

    def forget_expired(self) -> list[str]:
        """Remove from the journal files that Kaggle no longer keeps, and return their names."""
        expired = [name for name, file in sorted(self._files.items()) if self._has_expired(name, file)]
        self.forget(expired)
        return expired

    def _has_expired(self, name: str, file: SentFile) -> bool:
        arrived = self.dataset.arrived(file.blob, name, file.bytes)
        return arrived is None or (file.is_whole and arrived < file.bytes)

    def forget(self, names: Iterable[str]) -> None:
        """Remove files from the journal, so that they are uploaded again."""
        if gone := [name for name in names if self._files.pop(name, None) is not None]:
            _log.info("%s: these files are uploaded again: %s", self.dataset.dataset_id, ", ".join(gone))
            self._save()

    def send(self, name: str, content: Content, advance: Callable[[int], None] = lambda done: None) -> None:
        """Upload a file, or the rest of it, and record it in the journal."""
        if self.sent(name, content.sha256):
            return
        with content.open() as file:
            for _ in range(2):  # an upload that an earlier run began may have expired
                begun = self._files.get(name)
                if begun is None or begun.sha256 != content.sha256:
                    blob = self.dataset.start(name, content.bytes, int(time.time()))
                    begun = SentFile(content.bytes, content.sha256, blob.token, blob.url, is_whole=False)
                    self._note(name, begun)
                try:
                    self.dataset.send(begun.blob, name, file, content.bytes, advance)
                except ExpiredError:
                    self.forget([name])
                    continue
                self._note(name, dataclasses.replace(begun, is_whole=True))
                return
        raise PublishError(f"{name}: a new upload expires at Kaggle immediately. Run the same command again later")

    def commit(
        self,
        contents: Mapping[str, Content],
        title: str,
        text: str,
        patience: float,
        license_name: str | None = None,
        *,
        is_private: bool = True,
    ) -> None:
        """Make one version of the uploaded files in `contents`, and wait until Kaggle lists exactly these files.

        `title` is the title of a new dataset, and `text` its description, or the notes of a further version.
        `license_name` and `is_private` apply to a new dataset only. `patience` is the time to wait in seconds. If this
        call was killed, calling it again finds the version that was made.
        """
        if missing := [name for name, content in contents.items() if not self.sent(name, content.sha256)]:
            raise PublishError(
                f"no version can be made, because files were not sent: {_some(missing)}. Run the same command again"
            )
        now = self.dataset.version()
        if self.asked_after is not None:
            if not self._differences(contents):
                return
            # A new dataset cannot be made twice, so it may be requested again without waiting.
            now = self._await_number(self.asked_after, _GRACE_SECONDS if self.asked_after else 0.0)
            if (now or 0) > self.asked_after:
                self._await_files(contents, patience)
                return
            self.asked_after = None
            self._save()
        if expired := self.forget_expired():
            raise _expired(self.dataset.dataset_id, expired)
        tokens = [self._files[name].token for name in sorted(contents)]
        self.asked_after = now or 0
        self._save()
        try:
            if now is None:
                self._create(partial(self.dataset.create, title, text, tokens, license_name, is_private=is_private))
            else:
                self._create_version(text, tokens, patience)
        except NoAnswerError as error:
            _log.warning("%s. Kaggle is asked whether it made the version", error)
        except RefusedError as error:
            self.asked_after = None
            self._save()
            if expired := self.forget_expired():
                raise _expired(self.dataset.dataset_id, expired) from error
            raise
        self.has_version = True
        self._save()
        self._await_files(contents, patience)

    def _create(self, create: Callable[[], None]) -> None:
        try:
            create()
        except RefusedError as error:
            # An earlier request, whose answer was lost, may have made the dataset. The caller compares its files next.
            if "already in use" not in str(error) or self._await_number(0, _GRACE_SECONDS) is None:
                raise

    def _create_version(self, notes: str, tokens: list[str], patience: float) -> None:
        """Make the next version. Try again while Kaggle forbids this, because it still processes the first one."""
        for pause in _pauses(patience):
            try:
                self.dataset.create_version(notes, tokens)
            except RefusedError as error:
                if error.status != _FORBIDDEN or pause is None:
                    raise
                _log.warning("%s; trying again in %.1f s", error, pause)
                time.sleep(pause)
            else:
                return

    def _await_number(self, before: int, patience: float) -> int | None:
        """Wait until the current version's number is above `before`, at most `patience` seconds."""
        for pause in _pauses(patience):
            now = self.dataset.version()
            if (now or 0) > before or pause is None:
                return now
            time.sleep(pause)
        return None

    def _await_files(self, contents: Mapping[str, Content], patience: float) -> None:
        number, found, ready = self.asked_after or 0, list[str](), 0.0
        for pause in _pauses(patience):
            now, status = self.dataset.version(), self.dataset.status()
            if status == "FAILED":
                self.asked_after = None
                self._save()
                raise PublishError(
                    f"Kaggle could not make {self.dataset.dataset_id} from the files. Its page ({self.dataset.page}) "
                    "says why; often the account's storage is full. Make room, remove the dataset, and run the same "
                    "command again"
                )
            if (now or 0) > number and status == "READY":
                found, ready = self._differences(contents), ready or time.monotonic()
                if not found:
                    return
            if pause is None or (ready and time.monotonic() > ready + _GRACE_SECONDS):
                break
            time.sleep(pause)
        if not found:
            raise UnfinishedError(
                f"Kaggle does not show the version of {self.dataset.dataset_id} yet ({status or 'no such dataset'}): "
                "all files were sent. Run the same command again to see whether it arrived"
            )
        lacking = [name for name in contents if any(line.startswith(f"{name} ") for line in found)]
        self.asked_after = None
        self.forget(lacking)
        self._save()
        raise PublishError(
            f"{self.dataset.dataset_id} is not what was sent: {_some(found)}. Run the same command again, which sends "
            f"these files and makes another version, or look at {self.dataset.page}"
        )

    def _differences(self, contents: Mapping[str, Content]) -> list[str]:
        """Return how the current version differs from these files in names, sizes, or the manifest's bytes."""
        found = differences(contents, self.dataset.files())
        with contents[MANIFEST_NAME].open() as file:
            wanted = file.read()
        if not found and self.dataset.read(MANIFEST_NAME, len(wanted)) != wanted:
            found = [f"{MANIFEST_NAME} has other bytes at Kaggle"]
        return found

    def _note(self, name: str, file: SentFile) -> None:
        self._files[name] = file
        self._save()

    def _load(self) -> None:
        try:
            content: Any = parse_json(read_file(self._journal))
            if content["format"] != _FORMAT:
                raise ValueError(f"its format {content['format']!r} is unknown")
            if content["dataset"] != self.dataset.dataset_id:
                raise BuildError(
                    f"{self._journal} is for the dataset {content['dataset']!r}, not for {self.dataset.dataset_id}: "
                    f"give another folder, or the dataset {content['dataset']!r}"
                )
            self._files = {name: SentFile(**file) for name, file in content["files"].items()}
            self.asked_after, self.has_version = content["asked_after"], content["has_version"]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise BuildError(
                f"{self._journal} cannot be read: {error}. Remove this file: then all files are uploaded again"
            ) from error

    def _save(self) -> None:
        """Write the journal atomically, readable by this user only."""
        content = {
            "format": _FORMAT,
            "dataset": self.dataset.dataset_id,
            "asked_after": self.asked_after,
            "has_version": self.has_version,
            "files": {name: dataclasses.asdict(file) for name, file in self._files.items()},
        }
        aside = name_aside(self._journal)
        try:
            with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                json.dump(content, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            rename_durably(aside, self._journal)
        finally:
            aside.unlink(missing_ok=True)


def of_file(folder: Path, entry: FileEntry) -> Content:
    return Content(entry.bytes, entry.sha256, partial(_open, folder / entry.name))


def _open(path: Path) -> BinaryIO:
    return path.open("rb")


def in_memory(data: bytes) -> Content:
    """Return the Content for a file with these bytes, which is never on the disk."""

    def opened() -> BinaryIO:
        return io.BytesIO(data)

    return Content(len(data), hashlib.sha256(data).hexdigest(), opened)


def differences(contents: Mapping[str, Content], listed: Mapping[str, int]) -> list[str]:
    """Return one line for each difference between the files that should be at Kaggle and those that Kaggle lists."""
    found = [f"{name} is missing" for name in contents if name not in listed]
    found += [
        f"{name} has {listed[name]:,} bytes at Kaggle and {content.bytes:,} here"
        for name, content in contents.items()
        if name in listed and listed[name] != content.bytes
    ]
    return found + [f"{name} is at Kaggle, but was not sent" for name in listed if name not in contents]


def _expired(dataset_id: str, names: list[str]) -> UnfinishedError:
    return UnfinishedError(
        f"{len(names):,} files that were sent for {dataset_id} have expired at Kaggle ({_some(names)}): no version was "
        "made. Run the same command again: it sends only these files again"
    )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return "; ".join(names[:_NAMED]) + more


def _pauses(patience: float) -> Iterable[float | None]:
    """Yield the seconds to wait before the next attempt, until `patience` seconds are over. Then yield None."""
    began, pause = time.monotonic(), _FIRST_POLL
    while time.monotonic() + pause < began + patience:
        yield pause
        pause = min(_LONGEST_POLL, 1.5 * pause)
    yield None
