"""Kaggle's calls for a dataset: files are uploaded one by one, and then a version is made from a list of them.

Kaggle's own clients upload a whole folder and cannot resume it later. So this module calls kagglesdk, the library that
these clients use. kagglesdk starts an upload, makes a version from a list of tokens, and lists files. It does not send
the bytes of a file: this module sends them by a resumable upload of Google Cloud Storage, in byte ranges, to the URL in
Kaggle's answer.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from base64 import b64encode
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, BinaryIO, Final, TypeVar

from tpucache.errors import DependencyError, PublishError
from tpucache.text import redact, url_secrets

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

    Until the two expire, they allow writing this one file; they give no other access to the account.
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
        """Close the connections. The next call opens new ones."""
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

        request = ApiGetDatasetRequest()
        request.owner_slug, request.dataset_slug = self._owner, self._slug
        try:
            found = self._ask("the dataset", lambda: self._client.datasets.dataset_api_client.get_dataset(request))
        except RefusedError as error:
            if error.status in _HIDDEN:
                return None
            raise
        return int(found.current_version_number or 1)

    def status(self) -> str:
        """Return the newest version's status, such as "READY"."""
        from kagglesdk.datasets.types.dataset_api_service import ApiGetDatasetStatusRequest

        request = ApiGetDatasetStatusRequest()
        request.owner_slug, request.dataset_slug = self._owner, self._slug
        try:
            answer = self._ask(
                "the dataset's status", lambda: self._client.datasets.dataset_api_client.get_dataset_status(request)
            )
        except RefusedError as error:
            if error.status in _HIDDEN:
                return ""
            raise
        return str(answer.status.name)

    def files(self) -> dict[str, int]:
        """Return the sizes of the current version's files by name; {} if there is no dataset."""
        from kagglesdk.datasets.types.dataset_api_service import ApiListDatasetFilesRequest

        request = ApiListDatasetFilesRequest()
        request.owner_slug, request.dataset_slug, request.page_size = self._owner, self._slug, _PAGE
        listed: dict[str, int] = {}
        for _ in range(_MAX_PAGES):
            try:
                page = self._ask(
                    "its files", lambda: self._client.datasets.dataset_api_client.list_dataset_files(request)
                )
            except RefusedError as error:
                if error.status in _HIDDEN:
                    return {}
                raise
            listed |= {file.name: int(file.total_bytes or 0) for file in page.dataset_files or ()}
            if not page.next_page_token:
                return listed
            request.page_token = page.next_page_token
        raise PublishError(f"{self.dataset_id} has more than {_MAX_PAGES * _PAGE:,} files")

    def read(self, name: str, limit: int) -> bytes | None:
        """Return the bytes of a file of the current version; None if there is none, or it is larger than `limit`."""
        from kagglesdk.datasets.types.dataset_api_service import ApiDownloadDatasetRequest

        request = ApiDownloadDatasetRequest()
        request.owner_slug, request.dataset_slug, request.file_name = self._owner, self._slug, name

        def download() -> bytes | None:
            data = bytearray()
            with closing(self._client.datasets.dataset_api_client.download_dataset(request)) as answer:
                for chunk in answer.iter_content(_CHUNK):
                    data += chunk
                    if len(data) > limit:
                        return None
            return bytes(data)

        try:
            return self._ask(name, download)
        except RefusedError as error:
            if error.status in _HIDDEN:
                return None
            raise

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
        """Make the next version of the dataset from these uploaded files alone."""
        from kagglesdk.datasets.types.dataset_api_service import (
            ApiCreateDatasetVersionRequest,
            ApiCreateDatasetVersionRequestBody,
        )

        body = ApiCreateDatasetVersionRequestBody()
        body.version_notes, body.files = notes, _new_files(tokens)
        request = ApiCreateDatasetVersionRequest()
        request.owner_slug, request.dataset_slug, request.body = self._owner, self._slug, body
        self._commit(lambda: self._client.datasets.dataset_api_client.create_dataset_version(request))

    def _commit(self, call: Callable[[], Any]) -> None:
        answer = self._ask("a version", call, is_repeatable=False)
        if answer.error or "error" in answer.status.lower():
            text = self._clean(answer.error or answer.status)
            raise RefusedError(f"Kaggle made no version of {self.dataset_id}: {text}", 200)

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
    """Return the seconds to wait that the header Retry-After of an answer states; None if it states no number."""
    text = getattr(error, "response").headers.get("Retry-After", "")  # noqa: B009  # only errors of requests have it
    return float(text) if re.fullmatch(r"\d{1,6}", text) else None


def _pause(failures: int) -> float:
    return min(_LONGEST_PAUSE, _FIRST_PAUSE * float(2 ** (failures - 1)))


def _stated_md5(header: str) -> str | None:
    """Return the MD5, in base64, in Google Cloud Storage's header X-Goog-Hash; None if the header has no MD5."""
    parts = (part.strip().partition("=") for part in header.split(","))
    return next((value for kind, _, value in parts if kind == "md5"), None)


def _md5(file: BinaryIO) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    return b64encode(digest.digest()).decode()
