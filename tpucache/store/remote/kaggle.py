"""A dataset of Kaggle: its calls, and Draft: the files that were uploaded and will become its next version.

Kaggle's own clients upload a whole folder and cannot resume it. So this module calls kagglesdk, which they use: it
starts an upload, makes a version from a list of tokens, and lists files. The bytes of a file are sent here, in ranges,
by a resumable upload of Google Cloud Storage, to the URL in Kaggle's answer.

A journal, a file on this machine, has the token of each uploaded file, and not the account's key. A later run continues
with those files that Kaggle still keeps.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import logging
import os
import re
import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from tpucache.errors import BuildError, DependencyError, FormatError, PublishError, UnfinishedError, redact
from tpucache.store.files import read_file, write_atomically
from tpucache.store.format import MANIFEST_NAME, MAX_MANIFEST_BYTES
from tpucache.store.manifest import FileEntry, Manifest
from tpucache.text import named, parse_object, read_as, url_secrets

T = TypeVar("T")

_log: Final = logging.getLogger("tpucache")
_PAUSES: Final = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)  # seconds before each further attempt
_SECONDS: Final = (30.0, 600.0)  # timeouts for connecting, and without a byte; 600 is kagglehub's value
_PAGE: Final = 100
_MAX_PAGES: Final = 100
_MOST_TEXT: Final = 500
_CHUNK: Final = 8 << 20
_INCOMPLETE: Final = 308
_GONE: Final = (404, 410)  # the upload session has expired or does not exist
_HIDDEN: Final = (403, 404)  # the dataset does not exist, or Kaggle does not show it yet
_BUSY: Final = 429
_RANGE: Final = re.compile(r"bytes=0-(\d+)")
_MD5: Final = re.compile(r"(?:^|,)\s*md5=([^,\s]+)")
_USER, _KEY, _TOKEN = "KAGGLE_USERNAME", "KAGGLE_KEY", "KAGGLE_API_TOKEN"


class RefusedError(PublishError):
    """Kaggle refused a request. `status` is the HTTP status; it is 200 if only the answer's text says so."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class NoAnswerError(PublishError):
    """No answer arrived, so it is unknown whether Kaggle carried out the request."""


class KaggleDataset:
    """A dataset of a Kaggle account, accessed by kagglesdk."""

    def __init__(self, dataset_id: str) -> None:
        """Make the client; no connection is opened yet. `dataset_id` is owner/slug."""
        try:
            from kagglesdk import KaggleClient
            from kagglesdk.datasets.types import dataset_api_service
        except ImportError as error:
            raise DependencyError("sending to Kaggle needs its library: `pip install kagglesdk`") from error
        self.dataset_id = dataset_id
        self.page = f"https://www.kaggle.com/datasets/{dataset_id}"
        self._owner, _, self._slug = dataset_id.partition("/")
        user, key = os.environ.get(_USER), os.environ.get(_KEY)
        self._secrets = [secret for secret in (key, os.environ.get(_TOKEN)) if secret]
        try:
            # kagglesdk itself finds a token, and ~/.kaggle/kaggle.json.
            self._client = KaggleClient(username=user, password=key) if user and key else KaggleClient()
        except Exception as error:  # noqa: BLE001  # kagglesdk reads whatever files it finds
            raise PublishError(
                f"kagglesdk cannot start: {type(error).__name__}: {self._clean(error)}. Repair the files in ~/.kaggle, "
                f"or set {_TOKEN}, or {_USER} and {_KEY}"
            ) from None
        self._api: Any = self._client.datasets.dataset_api_client
        self._types: Any = dataset_api_service

    def close(self) -> None:
        self._client.__exit__(None, None, None)

    def start(self, name: str, size: int, modified: int) -> tuple[str, str]:
        """Begin the upload of a file with `size` bytes, and return its token and the URL to which its bytes are sent.

        Until the two expire, they allow writing this one file, and nothing else of the account. `modified` is in
        seconds since 1970.
        """
        from kagglesdk.blobs.types.blob_api_service import ApiBlobType, ApiStartBlobUploadRequest

        request = _filled(
            ApiStartBlobUploadRequest(),
            type=ApiBlobType.DATASET,
            name=name,
            content_length=size,
            last_modified_epoch_seconds=modified,
        )
        answer = self._ask(f"the upload of {name}", self._client.blobs.blob_api_client.start_blob_upload, request)
        if not answer.token or not answer.create_url.startswith(("https://", "http://")):
            raise PublishError(f"Kaggle gave no token or no URL to upload {name}: run the same command again")
        return answer.token, answer.create_url

    def send(self, url: str, name: str, file: io.BufferedIOBase, size: int, advance: Callable[[int], None]) -> bool:
        """Upload the bytes of a file that Kaggle does not have yet, and resume after connection errors.

        Return False if the upload has expired.
        """
        pauses, reached = iter(_PAUSES), -1
        while (there := self.arrived(url, name, size)) is not None:
            advance(there)
            if there == size:
                return True
            if there > reached:
                pauses, reached = iter(_PAUSES), there
            elif pause := next(pauses, None):
                time.sleep(pause)
            else:
                raise PublishError(
                    f"{name} does not arrive at Kaggle: {there:,} of {size:,} bytes. Run the same command again later"
                )
            self._put(url, name, file, there, size)
        return False

    def arrived(self, url: str, name: str, size: int) -> int | None:
        """Return how many bytes of a file arrived at Kaggle; None if the upload has expired."""
        answer = self._ask(f"what has arrived of {name}", self._request, url, f"bytes */{size}", b"")
        if answer.status_code in _GONE:
            return None
        if answer.status_code == _INCOMPLETE:
            found = _RANGE.fullmatch(answer.headers.get("Range", ""))
            return min(int(found[1]) + 1, size) if found else 0
        if answer.status_code not in (200, 201):
            raise RefusedError(
                f"Kaggle answers {answer.status_code} for the upload of {name}: run the same command again later",
                answer.status_code,
            )
        return size

    def _put(self, url: str, name: str, file: io.BufferedIOBase, start: int, size: int) -> None:
        """Send a file from `start` to its end, once. A broken connection is only logged."""
        file.seek(start)
        try:
            answer = self._request(url, f"bytes {start}-{size - 1}/{size}", file)
        except Exception as error:  # noqa: BLE001  # what arrived is asked for next
            _log.warning("%s: the connection broke: %s", name, self._clean(error))
            return
        if answer.status_code in (200, 201) and (stated := _MD5.search(answer.headers.get("X-Goog-Hash", ""))):
            file.seek(0)
            digest = hashlib.file_digest(file, partial(hashlib.md5, usedforsecurity=False)).digest()
            if b64encode(digest).decode() != stated[1]:
                raise PublishError(f"{name} arrived with other bytes at Kaggle: run the same command again")

    def _request(self, url: str, content_range: str, data: io.BufferedIOBase | bytes) -> Any:
        """Make one request of a resumable upload, without the account's key."""
        import requests

        self._secrets = list(dict.fromkeys([*url_secrets(url), *self._secrets]))
        headers = {"Content-Range": content_range, "Content-Type": "application/octet-stream"}
        # Without `auth`, requests would look for a password in ~/.netrc.
        with closing(requests.put(url, data=data, headers=headers, timeout=_SECONDS, auth=lambda each: each)) as answer:
            if answer.status_code == _BUSY or answer.status_code >= 500:
                answer.raise_for_status()
            return answer

    def version(self) -> int | None:
        """Return the number of the dataset's current version; None if there is no dataset."""
        found = self._find("the dataset", self._api.get_dataset, self._naming("ApiGetDatasetRequest"))
        return None if found is None else int(found.current_version_number or 1)

    def status(self) -> str:
        """Return the newest version's status, such as "READY"."""
        request = self._naming("ApiGetDatasetStatusRequest")
        answer = self._find("the dataset's status", self._api.get_dataset_status, request)
        return "" if answer is None else str(answer.status.name)

    def files(self) -> dict[str, int]:
        """Return the sizes of the current version's files by name; {} if there is no dataset."""
        request = self._naming("ApiListDatasetFilesRequest", page_size=_PAGE)
        listed: dict[str, int] = {}
        for _ in range(_MAX_PAGES):
            page = self._find("its files", self._api.list_dataset_files, request)
            if page is None:
                return {}
            listed |= {file.name: int(file.total_bytes or 0) for file in page.dataset_files or ()}
            if not page.next_page_token:
                return listed
            request.page_token = page.next_page_token
        raise PublishError(f"{self.dataset_id} has more than {_MAX_PAGES * _PAGE:,} files")

    def read(self, name: str, limit: int) -> bytes | None:
        """Return the bytes of a file of the current version; None if there is none, or it is larger than `limit`."""

        def download(request: Any) -> bytes | None:
            data = bytearray()
            with closing(self._api.download_dataset(request)) as answer:
                for chunk in answer.iter_content(_CHUNK):
                    data += chunk
                    if len(data) > limit:
                        return None
            return bytes(data)

        return self._find(name, download, self._naming("ApiDownloadDatasetRequest", file_name=name))

    def create(
        self,
        tokens: Iterable[str],
        title: str,
        description: str,
        license_name: str | None = None,
        *,
        is_private: bool = True,
    ) -> None:
        """Make a new dataset from uploaded files. Without a `license_name`, the dataset states no licence."""
        request = _filled(
            self._types.ApiCreateDatasetRequest(),
            owner_slug=self._owner,
            slug=self._slug,
            title=title,
            description=description,
            is_private=is_private,
            license_name=license_name,
            files=self._new_files(tokens),
        )
        self._commit(self._api.create_dataset, request)

    def create_version(self, tokens: Iterable[str], notes: str) -> None:
        body = _filled(
            self._types.ApiCreateDatasetVersionRequestBody(), version_notes=notes, files=self._new_files(tokens)
        )
        self._commit(self._api.create_dataset_version, self._naming("ApiCreateDatasetVersionRequest", body=body))

    def _commit(self, call: Callable[[Any], Any], request: Any) -> None:
        answer = self._ask("a version", call, request, is_repeatable=False)
        if answer.error or "error" in answer.status.lower():
            text = self._clean(answer.error or answer.status)
            raise RefusedError(f"Kaggle made no version of {self.dataset_id}: {text}", 200)

    def _naming(self, kind: str, **values: Any) -> Any:
        return _filled(getattr(self._types, kind)(), owner_slug=self._owner, dataset_slug=self._slug, **values)

    def _new_files(self, tokens: Iterable[str]) -> list[Any]:
        return [_filled(self._types.ApiDatasetNewFile(), token=token) for token in tokens]

    def _find(self, what: str, call: Callable[[Any], T], request: Any) -> T | None:
        """Make a call. Returns None if there is no such dataset or file, or the account may not see it."""
        try:
            return self._ask(what, call, request)
        except RefusedError as error:
            if error.status in _HIDDEN:
                return None
            raise

    def _ask(self, what: str, call: Callable[..., T], *arguments: Any, is_repeatable: bool = True) -> T:
        """Make a call, and try again if Kaggle is busy or does not answer."""
        pauses = iter(_PAUSES)
        while True:
            try:
                return call(*arguments)
            except PublishError:
                raise
            except Exception as error:  # noqa: BLE001  # requests, urllib3 and kagglesdk raise whatever they raise
                failure, answer = error, getattr(error, "response", None)
            text, status, after = f"{self.dataset_id}: {what}: {self._clean(failure)}", 0, ""
            if answer is not None:
                answer.close()  # kagglesdk does not, so the connection would stay open
                status, after = answer.status_code, answer.headers.get("Retry-After", "")
            if 0 < status < 500 and status != _BUSY:
                if status == 401:
                    text += f". Kaggle does not know the account: set {_TOKEN}, or {_USER} and {_KEY}"
                raise RefusedError(text, status) from None
            if not is_repeatable and status != _BUSY:  # if it is busy, it has not carried out the request
                raise NoAnswerError(text) from None
            if (pause := next(pauses, None)) is None:
                raise NoAnswerError(f"{text}. Run the same command again later") from None
            if status == _BUSY and re.fullmatch(r"\d{1,6}", after):
                pause = min(_PAUSES[-1], float(after))
            _log.warning("%s; trying again in %.1f s", text, pause)
            time.sleep(pause)

    def _clean(self, error: object) -> str:
        text = " ".join(redact(str(error), self._secrets).split())[:_MOST_TEXT]
        return text or type(error).__name__


def _filled(request: T, **values: Any) -> T:
    for name, value in values.items():
        setattr(request, name, value)
    return request


JOURNAL_NAME: Final = "kaggle.json"
#: Kaggle may show a change this long after it was made.
_GRACE_SECONDS: Final = 60.0
_FIRST_POLL: Final = 0.25
_LONGEST_POLL: Final = 10.0
_FORBIDDEN: Final = 403


@dataclass(frozen=True)
class SentFile:
    """A file of a draft, its `token` and upload `url` at Kaggle, and whether it was uploaded completely."""

    bytes: int
    sha256: str
    token: str
    url: str
    is_whole: bool


@dataclass(frozen=True)
class _Journal:
    format: Literal[1]
    dataset: str
    asked_after: int | None
    has_version: bool
    files: dict[str, SentFile]


@dataclass(frozen=True)
class Content:
    bytes: int
    sha256: str
    open: Callable[[], io.BufferedIOBase]


class Draft:
    """The files that were uploaded for the next version of a dataset, and the state of that version.

    Uploads that have expired at Kaggle are forgotten, unless a version was requested.
    """

    def __init__(self, dataset: KaggleDataset, journal: Path) -> None:
        self.dataset, self._journal = dataset, journal
        self._files: dict[str, SentFile] = {}
        #: After a version was requested: the number of the version before it. None if no version was requested yet.
        self.asked_after: int | None = None
        #: Whether this draft has made a version before, so that the dataset is known to be ours.
        self.has_version = False
        if journal.exists():
            self._load()
        if self.asked_after is None:
            self._forget_expired()

    def sent(self, name: str, sha256: str) -> bool:
        """Return whether the journal says that the file `name`, with this SHA-256, was uploaded completely."""
        file = self._files.get(name)
        return file is not None and file.is_whole and file.sha256 == sha256

    @property
    def bytes(self) -> int:
        """The total size in bytes of the files that were uploaded completely."""
        return sum(file.bytes for file in self._files.values() if file.is_whole)

    def _forget_expired(self) -> list[str]:
        """Remove from the journal files that Kaggle no longer keeps, and return their names."""
        expired = []
        for name, file in sorted(self._files.items()):
            arrived = self.dataset.arrived(file.url, name, file.bytes)
            if arrived is None or (file.is_whole and arrived < file.bytes):
                expired.append(name)
        self._forget(expired)
        return expired

    def _forget(self, names: Iterable[str]) -> None:
        """Remove files from the journal, so that they are uploaded again."""
        if gone := [name for name in names if self._files.pop(name, None) is not None]:
            _log.info("%s: these files are uploaded again: %s", self.dataset.dataset_id, ", ".join(gone))
            self._save()

    def _refuse_expired(self) -> None:
        if expired := self._forget_expired():
            raise UnfinishedError(
                f"{len(expired):,} files that were sent for {self.dataset.dataset_id} have expired at Kaggle "
                f"({named(expired)}): no version was made. Run the same command again: it sends only these files again"
            )

    def send(self, name: str, content: Content, advance: Callable[[int], None] = lambda done: None) -> None:
        """Upload a file, or the rest of it, and record it in the journal.

        After a version was requested, the file is the one that the version was requested with.
        """
        if self.sent(name, self._as_asked_for(name, content).sha256):
            return
        with content.open() as file:
            for _ in range(2):  # an upload that an earlier run began may have expired
                begun = self._files.get(name)
                if begun is None or begun.sha256 != content.sha256:
                    upload = self.dataset.start(name, content.bytes, int(time.time()))
                    begun = SentFile(content.bytes, content.sha256, *upload, is_whole=False)
                    self._note(name, begun)
                if self.dataset.send(begun.url, name, file, content.bytes, advance):
                    self._note(name, dataclasses.replace(begun, is_whole=True))
                    return
                self._forget([name])
        raise PublishError(f"{name}: a new upload expires at Kaggle immediately. Run the same command again later")

    def commit(
        self, contents: Mapping[str, Content], create: Callable[[list[str]], None], notes: str, patience: float
    ) -> None:
        """Make one version of the uploaded files in `contents`, and wait until Kaggle lists exactly these files.

        `create` makes a new dataset of the tokens of files, and `notes` are those of a further version. `patience` is
        in seconds. If this call was killed, calling it again finds the version that was made.
        """
        contents = {name: self._as_asked_for(name, content) for name, content in contents.items()}
        if missing := [name for name, content in contents.items() if not self.sent(name, content.sha256)]:
            raise PublishError(
                f"no version can be made, because files were not sent: {named(missing)}. Run the same command again"
            )
        if self.asked_after is None:
            now = self.dataset.version()
        else:
            if not self._differences(contents):
                return
            # A new dataset cannot be made twice, so it may be requested again without waiting.
            now = self._await_number(self.asked_after, _GRACE_SECONDS if self.asked_after else 0.0)
            if (now or 0) > self.asked_after:
                self._await_files(contents, patience)
                return
            self._note_asked(None)
        self._refuse_expired()
        tokens = [self._files[name].token for name in sorted(contents)]
        self._note_asked(now or 0)
        try:
            if now is None:
                self._create(partial(create, tokens))
            else:
                self._create_version(partial(self.dataset.create_version, tokens, notes), patience)
        except NoAnswerError as error:
            _log.warning("%s. Kaggle is asked whether it made the version", error)
        except RefusedError:
            self._note_asked(None)
            self._refuse_expired()
            raise
        self.has_version = True
        self._save()
        self._await_files(contents, patience)

    def _as_asked_for(self, name: str, content: Content) -> Content:
        """Return `content` with the size and SHA-256 that the file had when Kaggle was asked to make a version."""
        file = self._files.get(name)
        if self.asked_after is None or file is None:
            return content
        return dataclasses.replace(content, bytes=file.bytes, sha256=file.sha256)

    def _create(self, create: Callable[[], None]) -> None:
        try:
            create()
        except RefusedError as error:
            # An earlier request, whose answer was lost, may have made the dataset. The caller compares its files next.
            if "already in use" not in str(error) or self._await_number(0, _GRACE_SECONDS) is None:
                raise

    def _create_version(self, create: Callable[[], None], patience: float) -> None:
        """Make the next version. Try again while Kaggle forbids this, because it still processes the first one."""
        for is_last in _attempts(patience):
            try:
                create()
            except RefusedError as error:
                if error.status != _FORBIDDEN or is_last:
                    raise
                _log.warning("%s; trying again", error)
            else:
                return

    def _await_number(self, before: int, patience: float) -> int | None:
        """Wait until the current version's number is above `before`, at most `patience` seconds."""
        now = None
        for _ in _attempts(patience):
            now = self.dataset.version()
            if (now or 0) > before:
                break
        return now

    def _await_files(self, contents: Mapping[str, Content], patience: float) -> None:
        number, found, ready = self.asked_after or 0, list[str](), 0.0
        for _ in _attempts(patience):
            now, status = self.dataset.version(), self.dataset.status()
            if status == "FAILED":
                self._note_asked(None)
                raise PublishError(
                    f"Kaggle could not make {self.dataset.dataset_id} from the files. Its page ({self.dataset.page}) "
                    "says why; often the account's storage is full. Make room, remove the dataset, and run the same "
                    "command again"
                )
            if (now or 0) > number and status == "READY":
                found, ready = self._differences(contents), ready or time.monotonic()
                if not found:
                    return
            if ready and time.monotonic() > ready + _GRACE_SECONDS:
                break
        if not found:
            raise UnfinishedError(
                f"Kaggle does not show the version of {self.dataset.dataset_id} yet ({status or 'no such dataset'}): "
                "all files were sent. Run the same command again to see whether it arrived"
            )
        self._note_asked(None)
        self._forget([name for name in contents if any(line.startswith(f"{name} ") for line in found)])
        raise PublishError(
            f"{self.dataset.dataset_id} is not what was sent: {named(found)}. Run the same command again, which sends "
            f"these files and makes another version, or look at {self.dataset.page}"
        )

    def _differences(self, contents: Mapping[str, Content]) -> list[str]:
        """Return how the current version differs from these files in names, sizes, or the manifest's bytes."""
        listed = self.dataset.files()
        found = [f"{name} is at Kaggle, but was not sent" for name in listed if name not in contents]
        for name, content in contents.items():
            if name not in listed:
                found.append(f"{name} is missing")
            elif listed[name] != content.bytes:
                found.append(f"{name} has {listed[name]:,} bytes at Kaggle and {content.bytes:,} here")
        with contents[MANIFEST_NAME].open() as file:
            wanted = file.read()
        if not found and self.dataset.read(MANIFEST_NAME, len(wanted)) != wanted:
            found = [f"{MANIFEST_NAME} has other bytes at Kaggle"]
        return found

    def _note(self, name: str, file: SentFile) -> None:
        self._files[name] = file
        self._save()

    def _note_asked(self, after: int | None) -> None:
        self.asked_after = after
        self._save()

    def _load(self) -> None:
        try:
            content = read_as(_Journal, parse_object(read_file(self._journal, MAX_MANIFEST_BYTES), "it"), "its content")
        except FormatError as error:
            raise BuildError(
                f"{self._journal} cannot be read: {error}. Remove this file: then all files are uploaded again"
            ) from error
        if content.dataset != self.dataset.dataset_id:
            raise BuildError(
                f"{self._journal} is for the dataset {content.dataset!r}, not for {self.dataset.dataset_id}: "
                f"give another folder, or the dataset {content.dataset!r}"
            )
        self._files, self.asked_after, self.has_version = content.files, content.asked_after, content.has_version

    def _save(self) -> None:
        """Write the journal, readable by this user only."""
        content = _Journal(1, self.dataset.dataset_id, self.asked_after, self.has_version, self._files)
        text = json.dumps(dataclasses.asdict(content), indent=1)
        write_atomically(self._journal, text.encode(), mode=0o600)


def of_file(folder: Path, entry: FileEntry) -> Content:
    return Content(entry.bytes, entry.sha256, lambda: (folder / entry.name).open("rb"))


def in_memory(data: bytes) -> Content:
    return Content(len(data), hashlib.sha256(data).hexdigest(), lambda: io.BytesIO(data))


def version_notes(manifest: Manifest) -> str:
    return f"{manifest.samples:,} samples, {manifest.records:,} records, {manifest.fingerprint[:12]}"


def _attempts(patience: float) -> Iterator[bool]:
    """Yield, for each attempt, whether it is the last; pause between them. `patience` is in seconds."""
    until, pause = time.monotonic() + patience, _FIRST_POLL
    while time.monotonic() + pause < until:
        yield False
        time.sleep(pause)
        pause = min(_LONGEST_POLL, 1.5 * pause)
    yield True
