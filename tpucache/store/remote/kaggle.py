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
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

from tpucache.errors import BuildError, DependencyError, PublishError, UnfinishedError, redact
from tpucache.store.files import name_aside, read_file, rename_durably
from tpucache.store.format import MANIFEST_NAME, MAX_MANIFEST_BYTES
from tpucache.store.manifest import FileEntry
from tpucache.text import parse_json, url_secrets

T = TypeVar("T")

_log: Final = logging.getLogger("tpucache")
_TRIES: Final = 8
_FIRST_PAUSE: Final = 0.5
_LONGEST_PAUSE: Final = 60.0
_SECONDS: Final = (30.0, 600.0)  # timeouts for connecting, and without a byte; 600 is kagglehub's value
_PAGE: Final = 100
_MAX_PAGES: Final = 100
_MOST_TEXT: Final = 500
_CHUNK: Final = 8 << 20
_INCOMPLETE: Final = 308
_GONE: Final = (404, 410)  # the upload session has expired or does not exist
_HIDDEN: Final = (403, 404)  # the dataset does not exist, or Kaggle does not show it yet
_RANGE: Final = re.compile(r"bytes=0-(\d+)")
_USER, _KEY, _TOKEN = "KAGGLE_USERNAME", "KAGGLE_KEY", "KAGGLE_API_TOKEN"


class RefusedError(PublishError):
    """Kaggle refused a request. `status` is the HTTP status; it is 200 if only the answer's text says so."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class NoAnswerError(PublishError):
    """No answer arrived, so it is unknown whether Kaggle carried out the request."""


class ExpiredError(PublishError):
    """Kaggle no longer keeps an uploaded file, which must be uploaded again."""


@dataclass(frozen=True)
class Blob:
    """An upload at Kaggle: the file's token, and the URL to which its bytes are sent.

    Until the two expire, they allow writing this one file, and nothing else of the account.
    """

    token: str
    url: str


class KaggleDataset:
    """A dataset of a Kaggle account, accessed by kagglesdk."""

    def __init__(self, dataset_id: str) -> None:
        """Make the client; no connection is opened yet. `dataset_id` is owner/slug."""
        try:
            from kagglesdk import KaggleClient
        except ImportError as error:
            raise DependencyError("sending to Kaggle needs its library: `pip install kagglesdk`") from error
        self.dataset_id = dataset_id
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

    def close(self) -> None:
        self._client.__exit__(None, None, None)

    @property
    def page(self) -> str:
        return f"https://www.kaggle.com/datasets/{self.dataset_id}"

    def start(self, name: str, size: int, modified: int) -> Blob:
        """Begin the upload of a file with `size` bytes. `modified` is in seconds since 1970."""
        from kagglesdk.blobs.types.blob_api_service import ApiBlobType, ApiStartBlobUploadRequest

        request = ApiStartBlobUploadRequest()
        request.type, request.name = ApiBlobType.DATASET, name
        request.content_length, request.last_modified_epoch_seconds = size, modified
        answer = self._ask(
            f"the upload of {name}", lambda: self._client.blobs.blob_api_client.start_blob_upload(request)
        )
        if not answer.token or not answer.create_url.startswith(("https://", "http://")):
            raise PublishError(f"Kaggle gave no token or no URL to upload {name}: run the same command again")
        return Blob(answer.token, answer.create_url)

    def send(self, blob: Blob, name: str, file: BinaryIO, size: int, advance: Callable[[int], None]) -> None:
        """Upload the bytes of a file that Kaggle does not have yet, and resume after connection errors."""
        failures, reached = 0, -1
        while True:
            there = self.arrived(blob, name, size)
            if there is None:
                raise ExpiredError(f"the upload of {name} has expired at Kaggle")
            advance(there)
            if there == size:
                return
            failures = 0 if there > reached >= 0 else failures + 1
            reached = there
            if failures > _TRIES:
                raise PublishError(
                    f"{name} does not arrive at Kaggle: {there:,} of {size:,} bytes. Run the same command again later"
                )
            if failures > 1:
                time.sleep(_pause(failures - 1))
            self._put(blob, name, file, there, size)

    def arrived(self, blob: Blob, name: str, size: int) -> int | None:
        """Return how many bytes of a file arrived at Kaggle; None if the upload has expired."""
        answer = self._ask(f"what has arrived of {name}", lambda: self._request(blob, f"bytes */{size}", b""))
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

    def _put(self, blob: Blob, name: str, file: BinaryIO, start: int, size: int) -> None:
        """Send a file from `start` to its end, once. A broken connection is only logged."""
        file.seek(start)
        try:
            answer = self._request(blob, f"bytes {start}-{size - 1}/{size}", file)
        except Exception as error:  # noqa: BLE001  # what arrived is asked for next
            _log.warning("%s: the connection broke: %s", name, self._clean(error))
            return
        if answer.status_code in (200, 201) and (stated := _stated_md5(answer.headers.get("X-Goog-Hash", ""))):
            file.seek(0)
            if _md5(file) != stated:
                raise PublishError(f"{name} arrived with other bytes at Kaggle: run the same command again")

    def _request(self, blob: Blob, content_range: str, data: BinaryIO | bytes) -> Any:
        """Make one request of a resumable upload, without the account's key."""
        import requests

        self._secrets = list(dict.fromkeys([*url_secrets(blob.url), *self._secrets]))
        headers = {"Content-Range": content_range, "Content-Type": "application/octet-stream"}
        # Without `auth`, requests would look for a password in ~/.netrc.
        with closing(
            requests.put(blob.url, data=data, headers=headers, timeout=_SECONDS, auth=lambda each: each)
        ) as answer:
            if answer.status_code == 429 or answer.status_code >= 500:
                answer.raise_for_status()
            return answer

    def version(self) -> int | None:
        """Return the number of the dataset's current version; None if there is no dataset."""
        from kagglesdk.datasets.types.dataset_api_service import ApiGetDatasetRequest

        request = self._naming(ApiGetDatasetRequest())
        found = self._find("the dataset", lambda: self._client.datasets.dataset_api_client.get_dataset(request))
        return None if found is None else int(found.current_version_number or 1)

    def status(self) -> str:
        """Return the newest version's status, such as "READY"."""
        from kagglesdk.datasets.types.dataset_api_service import ApiGetDatasetStatusRequest

        request = self._naming(ApiGetDatasetStatusRequest())
        answer = self._find(
            "the dataset's status", lambda: self._client.datasets.dataset_api_client.get_dataset_status(request)
        )
        return "" if answer is None else str(answer.status.name)

    def files(self) -> dict[str, int]:
        """Return the sizes of the current version's files by name; {} if there is no dataset."""
        from kagglesdk.datasets.types.dataset_api_service import ApiListDatasetFilesRequest

        request = self._naming(ApiListDatasetFilesRequest())
        request.page_size = _PAGE
        listed: dict[str, int] = {}
        for _ in range(_MAX_PAGES):
            page = self._find("its files", lambda: self._client.datasets.dataset_api_client.list_dataset_files(request))
            if page is None:
                return {}
            listed |= {file.name: int(file.total_bytes or 0) for file in page.dataset_files or ()}
            if not page.next_page_token:
                return listed
            request.page_token = page.next_page_token
        raise PublishError(f"{self.dataset_id} has more than {_MAX_PAGES * _PAGE:,} files")

    def read(self, name: str, limit: int) -> bytes | None:
        """Return the bytes of a file of the current version; None if there is none, or it is larger than `limit`."""
        from kagglesdk.datasets.types.dataset_api_service import ApiDownloadDatasetRequest

        request = self._naming(ApiDownloadDatasetRequest())
        request.file_name = name

        def download() -> bytes | None:
            data = bytearray()
            with closing(self._client.datasets.dataset_api_client.download_dataset(request)) as answer:
                for chunk in answer.iter_content(_CHUNK):
                    data += chunk
                    if len(data) > limit:
                        return None
            return bytes(data)

        return self._find(name, download)

    def create(
        self,
        title: str,
        description: str,
        tokens: Iterable[str],
        license_name: str | None = None,
        *,
        is_private: bool = True,
    ) -> None:
        """Make a new dataset from uploaded files. Without a `license_name`, the dataset states no licence."""
        from kagglesdk.datasets.types.dataset_api_service import ApiCreateDatasetRequest

        request = ApiCreateDatasetRequest()
        request.owner_slug, request.slug, request.title = self._owner, self._slug, title
        request.description, request.is_private = description, is_private
        request.license_name = license_name
        request.files = _new_files(tokens)
        self._commit(lambda: self._client.datasets.dataset_api_client.create_dataset(request))

    def create_version(self, notes: str, tokens: Iterable[str]) -> None:
        from kagglesdk.datasets.types.dataset_api_service import (
            ApiCreateDatasetVersionRequest,
            ApiCreateDatasetVersionRequestBody,
        )

        body = ApiCreateDatasetVersionRequestBody()
        body.version_notes, body.files = notes, _new_files(tokens)
        request = self._naming(ApiCreateDatasetVersionRequest())
        request.body = body
        self._commit(lambda: self._client.datasets.dataset_api_client.create_dataset_version(request))

    def _commit(self, call: Callable[[], Any]) -> None:
        answer = self._ask("a version", call, is_repeatable=False)
        if answer.error or "error" in answer.status.lower():
            text = self._clean(answer.error or answer.status)
            raise RefusedError(f"Kaggle made no version of {self.dataset_id}: {text}", 200)

    def _naming(self, request: Any) -> Any:
        request.owner_slug, request.dataset_slug = self._owner, self._slug
        return request

    def _find(self, what: str, call: Callable[[], T]) -> T | None:
        """Make a call. Returns None if there is no such dataset or file, or the account may not see it."""
        try:
            return self._ask(what, call)
        except RefusedError as error:
            if error.status in _HIDDEN:
                return None
            raise

    def _ask(self, what: str, call: Callable[[], T], *, is_repeatable: bool = True) -> T:
        """Make a call, and try again if Kaggle is busy or does not answer."""
        failures = 0
        while True:
            try:
                return call()
            except PublishError:
                raise
            except Exception as error:  # noqa: BLE001  # requests, urllib3 and kagglesdk raise whatever they raise
                failure, failures = error, failures + 1
                if (answer := getattr(error, "response", None)) is not None:
                    answer.close()  # kagglesdk does not, so the connection would stay open
            status, after = _status(failure), None
            text = f"{self.dataset_id}: {what}: {self._clean(failure)}"
            if status == 401:
                raise RefusedError(
                    f"{text}. Kaggle does not know the account: set {_TOKEN}, or {_USER} and {_KEY}", status
                ) from None
            if status is not None and status < 500 and status != 429:
                raise RefusedError(text, status) from None
            if status == 429:  # too many requests: it was not carried out
                after = _retry_after(failure)
            elif not is_repeatable:
                raise NoAnswerError(text) from None
            if failures > _TRIES:
                raise NoAnswerError(f"{text}. Run the same command again later") from None
            pause = min(_LONGEST_PAUSE, _pause(failures) if after is None else after)
            _log.warning("%s; trying again in %.1f s", text, pause)
            time.sleep(pause)

    def _clean(self, error: object) -> str:
        text = " ".join(redact(str(error), self._secrets).split())[:_MOST_TEXT]
        return text or type(error).__name__


def _new_files(tokens: Iterable[str]) -> list[Any]:
    from kagglesdk.datasets.types.dataset_api_service import ApiDatasetNewFile

    files = []
    for token in tokens:
        file = ApiDatasetNewFile()
        file.token = token
        files.append(file)
    return files


def _status(error: Exception) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _retry_after(error: Exception) -> float | None:
    """Return the seconds to wait that an answer's header Retry-After states; None if it states no number."""
    text = getattr(error, "response").headers.get("Retry-After", "")  # noqa: B009  # only errors of requests have it
    return float(text) if re.fullmatch(r"\d{1,6}", text) else None


def _pause(failures: int) -> float:
    return min(_LONGEST_PAUSE, _FIRST_PAUSE * float(2 ** (failures - 1)))


def _stated_md5(header: str) -> str | None:
    """Return the MD5, in base64, in Google Cloud Storage's header X-Goog-Hash; None if it has none."""
    parts = (part.strip().partition("=") for part in header.split(","))
    return next((value for kind, _, value in parts if kind == "md5"), None)


def _md5(file: BinaryIO) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    return b64encode(digest.digest()).decode()


JOURNAL_NAME: Final = "kaggle.json"
#: Kaggle may show a change this long after it was made.
_GRACE_SECONDS: Final = 60.0
_FIRST_POLL: Final = 0.25
_LONGEST_POLL: Final = 10.0
_FORMAT: Final = 1
_NAMED: Final = 10
_FORBIDDEN: Final = 403


@dataclass(frozen=True)
class SentFile:
    """A file of a draft, its `token` and upload `url` at Kaggle, and whether it was uploaded completely."""

    bytes: int
    sha256: str
    token: str
    url: str
    is_whole: bool

    @property
    def blob(self) -> Blob:
        return Blob(self.token, self.url)


@dataclass(frozen=True)
class Content:
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

        `title`, `license_name` and `is_private` are for a new dataset; `text` is its description, or the notes of a
        further version. `patience` is in seconds. If this call was killed, calling it again finds the version that was
        made.
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
            content: Any = parse_json(read_file(self._journal, MAX_MANIFEST_BYTES))
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
    """Yield the seconds to wait before each next attempt, until `patience` seconds are over. Then yield None."""
    began, pause = time.monotonic(), _FIRST_POLL
    while time.monotonic() + pause < began + patience:
        yield pause
        pause = min(_LONGEST_POLL, 1.5 * pause)
    yield None
