"""Draft: files that were sent to Kaggle already, and become one version of a dataset in the end.

Its journal, a file on this machine, has the token of each file that was sent. A run that continues, also on another
day, asks Kaggle which of the files it still keeps. The journal holds no key of the account.
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
from tpucache.strict_json import parse_json

JOURNAL_NAME: Final = "kaggle.json"
#: Kaggle may show a change so long after it was made.
_GRACE_SECONDS: Final = 60.0
_FIRST_POLL: Final = 0.25
_LONGEST_POLL: Final = 10.0
_FORMAT: Final = 1
_NAMED: Final = 10
_FORBIDDEN: Final = 403

_log: Final = logging.getLogger("tpucache")


@dataclass(frozen=True)
class SentFile:
    """A file of a draft: its bytes and SHA-256, its token and address at Kaggle, and whether all of it has arrived."""

    bytes: int
    sha256: str
    token: str
    url: str
    is_whole: bool

    @property
    def blob(self) -> Blob:
        """Its token and address at Kaggle."""
        return Blob(self.token, self.url)


@dataclass(frozen=True)
class Content:
    """A file for a version: its bytes and SHA-256, and a function that opens it."""

    bytes: int
    sha256: str
    open: Callable[[], BinaryIO]


class Draft:
    """The files that were sent for the next version of a dataset, and how far that version is."""

    def __init__(self, dataset: KaggleDataset, journal: Path) -> None:
        """Read the journal, if there is one. Raises BuildError for a broken one, or one of another dataset."""
        self.dataset, self._journal = dataset, journal
        self._files: dict[str, SentFile] = {}
        #: The number of the version before the requested one; None where no version was requested yet.
        self.asked_after: int | None = None
        #: Whether this draft has made a version before, so that the dataset belongs to it.
        self.has_version = False
        if journal.exists():
            self._load()

    def sent(self, name: str, sha256: str) -> bool:
        """Return whether all of a file with this content was sent, as far as the journal knows."""
        file = self._files.get(name)
        return file is not None and file.is_whole and file.sha256 == sha256

    def as_asked_for(self, name: str, content: Content) -> Content:
        """Return a file as it is in the requested version: a card may differ on another day."""
        file = self._files.get(name)
        if self.asked_after is None or file is None:
            return content
        return dataclasses.replace(content, bytes=file.bytes, sha256=file.sha256)

    @property
    def bytes(self) -> int:
        """The bytes of all files that were sent as a whole."""
        return sum(file.bytes for file in self._files.values() if file.is_whole)

    def forget_expired(self) -> list[str]:
        """Ask Kaggle which files it no longer keeps, remove them from the journal and return their names, sorted.

        Raises PublishError.
        """
        expired = [name for name, file in sorted(self._files.items()) if self._has_expired(name, file)]
        self.forget(expired)
        return expired

    def _has_expired(self, name: str, file: SentFile) -> bool:
        arrived = self.dataset.arrived(file.blob, name, file.bytes)
        return arrived is None or (file.is_whole and arrived < file.bytes)

    def forget(self, names: Iterable[str]) -> None:
        """Remove files from the journal, so that they are sent again."""
        if gone := [name for name in names if self._files.pop(name, None) is not None]:
            _log.info("%s: to be sent again: %s", self.dataset.dataset_id, ", ".join(gone))
            self._save()

    def send(self, name: str, content: Content, advance: Callable[[int], None] = lambda done: None) -> None:
        """Send a file, or what Kaggle lacks of it, and note it in the journal. Raises PublishError, OSError."""
        if self.sent(name, content.sha256):
            return
        with content.open() as file:
            for _ in range(2):  # an upload that was begun on another day may have expired
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
        raise PublishError(f"{name}: Kaggle gives uploads that expire at once. Run the same command again later")

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
        """Make one version of these files, all of which were sent, and wait until Kaggle lists exactly them.

        `text` is the description of a new dataset, and the notes of a version. `license_name` and `is_private` are for
        a new dataset. Called again after a kill, it finds the version that was made.
        Raises UnfinishedError where files have expired, which the draft has forgotten then, or where Kaggle does not
        show the version in time; PublishError where Kaggle refuses, or shows other files.
        """
        if missing := [name for name, content in contents.items() if not self.sent(name, content.sha256)]:
            raise PublishError(f"no version without all files: {_some(missing)} were not sent")
        now = self.dataset.version()
        if self.asked_after is not None:
            if not self._differences(contents):
                return
            # A new dataset cannot be made twice: if it is not there yet, we may ask for it again.
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
            # An earlier request without an answer may have made it: its files are compared next.
            if "already in use" not in str(error) or self._await_number(0, _GRACE_SECONDS) is None:
                raise

    def _create_version(self, notes: str, tokens: list[str], patience: float) -> None:
        """Make the next version. While Kaggle works on the first one, it forbids that."""
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
        """Return the number of the current version, once it is above `before` or the time is over."""
        for pause in _pauses(patience):
            now = self.dataset.version()
            if (now or 0) > before or pause is None:
                return now
            time.sleep(pause)
        return None

    def _await_files(self, contents: Mapping[str, Content], patience: float) -> None:
        """Wait until the listing has exactly these files. Raises UnfinishedError, PublishError."""
        number, found, ready = self.asked_after or 0, list[str](), 0.0
        for pause in _pauses(patience):
            now, status = self.dataset.version(), self.dataset.status()
            if status == "FAILED":
                self.asked_after = None
                self._save()
                raise PublishError(
                    f"Kaggle could not make {self.dataset.dataset_id} of the files: its page says why, often that the "
                    f"account has no room ({self.dataset.page}). Make room, remove the dataset, and run this again"
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
            f"these and makes another version, or look at {self.dataset.page}"
        )

    def _differences(self, contents: Mapping[str, Content]) -> list[str]:
        """Return how the current version differs from these files: by names, sizes, or its manifest's bytes."""
        found = differences(contents, self.dataset.files())
        with contents[MANIFEST_NAME].open() as file:
            wanted = file.read()
        if not found and self.dataset.read(MANIFEST_NAME, len(wanted)) != wanted:
            found = [f"{MANIFEST_NAME} is another one"]
        return found

    def _note(self, name: str, file: SentFile) -> None:
        self._files[name] = file
        self._save()

    def _load(self) -> None:
        try:
            content: Any = parse_json(read_file(self._journal))
            if content["format"] != _FORMAT:
                raise ValueError(f"format {content['format']!r}")
            if content["dataset"] != self.dataset.dataset_id:
                raise BuildError(
                    f"{self._journal} is for {content['dataset']!r}, not for {self.dataset.dataset_id}: give another "
                    "folder, or that dataset"
                )
            self._files = {name: SentFile(**file) for name, file in content["files"].items()}
            self.asked_after, self.has_version = content["asked_after"], content["has_version"]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise BuildError(f"{self._journal} cannot be read: {error}. Remove it to send everything again") from error

    def _save(self) -> None:
        """Write the journal as a whole, so that only this user reads it. Raises OSError."""
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
    """Return a file of a cache in a folder."""
    return Content(entry.bytes, entry.sha256, partial(_open, folder / entry.name))


def _open(path: Path) -> BinaryIO:
    return path.open("rb")


def in_memory(data: bytes) -> Content:
    """Return a file whose bytes are in memory."""

    def opened() -> BinaryIO:
        return io.BytesIO(data)

    return Content(len(data), hashlib.sha256(data).hexdigest(), opened)


def differences(contents: Mapping[str, Content], listed: Mapping[str, int]) -> list[str]:
    """Return, in a few words each, which files a listing lacks, has with another size, or has in addition."""
    found = [f"{name} is missing" for name in contents if name not in listed]
    found += [
        f"{name} has {listed[name]:,} bytes there and {content.bytes:,} here"
        for name, content in contents.items()
        if name in listed and listed[name] != content.bytes
    ]
    return found + [f"{name} is there, too" for name in listed if name not in contents]


def _expired(dataset_id: str, names: list[str]) -> UnfinishedError:
    return UnfinishedError(
        f"{len(names):,} files that were sent for {dataset_id} have expired at Kaggle ({_some(names)}): no version was "
        "made. Run the same command again: only these are made and sent again"
    )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return "; ".join(names[:_NAMED]) + more


def _pauses(patience: float) -> Iterable[float | None]:
    """Yield how long to wait before asking again, so long as patience lasts; None for the last time."""
    began, pause = time.monotonic(), _FIRST_POLL
    while time.monotonic() + pause < began + patience:
        yield pause
        pause = min(_LONGEST_POLL, 1.5 * pause)
    yield None
