"""A stand-in for Kaggle's API of datasets, on 127.0.0.1: the calls that sending a dataset takes, and how they go wrong.

    python -m scripts.kaggle_server --port 7777

Then, in another terminal, `KAGGLE_API_ENVIRONMENT=TEST KAGGLE_USERNAME=ann KAGGLE_KEY=the-key-of-ann tpucache warmup
…`: "TEST" is kagglesdk's own name for http://localhost:7777. With another port, HTTP_PROXY leads there (see
`environment`). Each account has such a key, and writes to its own datasets alone.

Nobody has compared it with Kaggle. What it does, and from where that is known:

- A call is POST /api/v1/SERVICE/METHOD with JSON in camelCase, under HTTP's basic authentication or a bearer token
  (kagglesdk 0.1.38, kaggle_http_client.py). An error is {"code", "message"} with its status. 401 without a key.
- blobs.BlobApiService/StartBlobUpload: {type, name, contentLength, lastModifiedEpochSeconds} -> {token, createUrl}
  (kagglesdk, blobs/types/blob_api_service.py). A token names a file that is received, whole or not.
- createUrl is a resumable upload of Google Cloud Storage: PUT with Content-Range `bytes A-B/N` continues at A,
  `bytes */N` asks; 308 with Range `bytes=0-K` for what arrived, without Range for nothing; 200 once all has; 404 or
  410 when it has expired (kaggle 2.2.5, `_resume_upload`; kagglehub 1.0.3, `_check_uploaded_size`; Google's
  "Performing resumable uploads"). It keeps multiples of 256 KiB of what a cut left. It lives for a week (kaggle
  counts six days).
  The answer states the MD5 in X-Goog-Hash. No account's key goes there.
- datasets.DatasetApiService/CreateDataset: {ownerSlug, slug, title, isPrivate, licenseName, files: [{token}]} ->
  {ref, url, status, error}. A refusal is a text in `error` under status 200 (kaggle 2.2.5, `dataset_create_new_cli`). A
  slug in use: "The requested slug … is already in use by a dataset" (there; kaggle-cli#243). Slug and title have 6 to
  50 characters (kaggle 2.2.5). kagglehub sends no licence.
- CreateDatasetVersion: {ownerSlug, datasetSlug, body: {versionNotes, files}}. The version has the named files and no
  others (kaggle-cli#189, #206, #890). 403 while the first version is worked on (kagglehub#181, #182).
- Tokens of no upload, of one that is not whole, or that have expired are refused by both. That they are, and the words,
  are a guess: "Failed to resolve the necessary information from the request" (kaggle-cli#373).
- GetDataset -> {currentVersionNumber, …}, GetDatasetStatus -> {status}, ListDatasetFiles -> {datasetFiles: [{name,
  totalBytes}], nextPageToken} (kagglesdk, datasets/types). For some requests after a version was made, a new dataset
  is 403 or 404, and another shows the version before (kaggle-cli#890; kagglehub#182).
- No room in the account: the version is made, and its status becomes FAILED; the page says "The size of your files is …
  bytes, it exceeds the maximum of …" (kaggle-cli#424, #284).
- DownloadDataset: {ownerSlug, datasetSlug, fileName} -> a redirect to the bytes (kagglesdk, `download_dataset`).
- 429 with Retry-After in seconds when asked too often (kaggle-cli#938, #940); 500 now and then (kaggle-cli#424).
- A dataset has at most 50 files at its top, as the form on Kaggle's site says; the API's own limit is not known.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from scripts.commands import make_parser

PIECE = 256 << 10  # of which an upload that was cut keeps multiples
MAX_FILES = 50
LENGTHS = range(6, 51)


@dataclass
class Blob:
    """A file that is received: its name, what has arrived of it, and how long it has to be."""

    name: str
    size: int
    data: bytearray = field(default_factory=bytearray)
    has_expired: bool = False

    @property
    def is_whole(self) -> bool:
        return len(self.data) == self.size


@dataclass
class Version:
    """A version of a dataset: its files, notes, and what became of it."""

    files: dict[str, bytes]
    notes: str
    status: str = "READY"


@dataclass
class Dataset:
    """A dataset: its versions, title, and for how many more requests the newest one is not to be seen."""

    title: str
    is_private: bool
    versions: list[Version] = field(default_factory=list)
    hidden_for: int = 0


@dataclass
class Faults:
    """What goes wrong: how many requests, by kind, are still to be answered wrongly."""

    lag: int = 0  # requests for which a new version is not to be seen
    cuts: list[int] = field(default_factory=list)  # bytes after which the next uploads' connections end
    busy: int = 0  # 429
    broken: int = 0  # 500
    lost: int = 0  # versions that are made, and no answer comes
    left_out: int = 0  # files that are left out of the next version, without a word
    is_forbidden: bool = False  # 403 for everything, as with a key that may not write
    quota: int | None = None  # bytes that the account may have


class Refusal(Exception):
    """An answer with an error's status."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers


class QuietServer(ThreadingHTTPServer):
    """Says nothing of clients that were killed."""

    def handle_error(self, *words: object) -> None:
        pass


class KaggleServer:
    """The server's state. Tests set its faults, look what it was asked and what it has, and let uploads expire."""

    def __init__(self, port: int = 0, page: int = 20) -> None:
        self.page = page
        self.reset()
        self.lock = threading.RLock()
        self.server = QuietServer(("127.0.0.1", port), type("Bound", (Handler,), {"state": self}))
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def reset(self) -> None:
        """Forget all uploads and datasets, and let nothing go wrong."""
        self.blobs: dict[str, Blob] = {}
        self.datasets: dict[str, Dataset] = {}
        self.faults = Faults()
        self.calls: Counter[str] = Counter()
        self.received = 0  # bytes of files
        #: Called for each request with the name of its call, and with "asked", then "done" before the answer.
        self.watch: Callable[[str, str], None] = lambda call, moment: None

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which kagglesdk, and all that goes by HTTP, comes here."""
        proxies = dict.fromkeys(("HTTP_PROXY", "http_proxy"), self.url) | dict.fromkeys(("NO_PROXY", "no_proxy"), "")
        return {"KAGGLE_API_ENVIRONMENT": "TEST", "KAGGLE_USERNAME": "ann", "KAGGLE_KEY": KEY, **proxies}

    @contextlib.contextmanager
    def running(self) -> Iterator[KaggleServer]:
        """Answer in a thread."""
        thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield self
        finally:
            self.server.shutdown()
            self.server.server_close()
            thread.join()

    def expire(self, *names: str) -> None:
        """Let the uploads of these files expire, or of all."""
        for blob in self.blobs.values():
            if not names or blob.name in names:
                blob.has_expired = True

    def files(self, dataset_id: str) -> dict[str, bytes]:
        """Return the files of the newest version."""
        return self.datasets[dataset_id].versions[-1].files


KEY_OF = "the-key-of-"  # before the name of an account
KEY = f"{KEY_OF}ann"
JSON = {"Content_Type": "application/json"}


class Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    state: KaggleServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # an answer is written in two parts
    timeout = 60

    def log_message(self, *words: object) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        found = re.fullmatch(r"/api/v1/\w+\.\w+/(\w+)", urlsplit(self.path).path)
        name = found[1] if found else "unknown"
        self.state.watch(name, "asked")
        with self.state.lock:
            self.state.calls[name] += 1
            try:
                self.check_request()
                method = getattr(self, f"call_{name}", None)
                if method is None:
                    raise Refusal(404, f"no such call: {name}")
                answer = method(json.loads(body))
            except Refusal as refusal:
                content = {"code": refusal.status, "message": str(refusal)}
                self.answer(refusal.status, json.dumps(content).encode(), **refusal.headers, **JSON)
                return
        self.state.watch(name, "done")
        if answer is None:
            self.close_connection = True  # without an answer
        elif isinstance(answer, str):
            self.answer(302, b"", Location=answer)
        else:
            self.answer(200, json.dumps(answer).encode(), **JSON)

    def check_request(self) -> None:
        faults = self.state.faults
        kind, _, given = self.headers.get("Authorization", "").partition(" ")
        basic = base64.b64decode(given).decode() if kind == "Basic" else f"{given.removeprefix(KEY_OF)}:{given}"
        self.account, _, key = basic.partition(":")
        if kind not in ("Basic", "Bearer") or key != f"{KEY_OF}{self.account}":
            raise Refusal(401, "Unauthorized")
        if faults.is_forbidden:
            raise Refusal(403, "Permission 'datasets.create' was denied")
        if faults.busy:
            faults.busy -= 1
            raise Refusal(429, "Too many requests", Retry_After="0")
        if faults.broken:
            faults.broken -= 1
            raise Refusal(500, "An internal server error occurred")

    def answer(self, status: int, data: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def call_StartBlobUpload(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["type"] != "DATASET" or not request["name"] or not request["lastModifiedEpochSeconds"]:
            raise Refusal(400, "Bad Request")
        token = secrets.token_hex(16)
        self.state.blobs[token] = Blob(request["name"], request["contentLength"])
        return {"token": token, "createUrl": f"{self.state.url}/upload?name={request['name']}&upload_id={token[::-1]}"}

    def call_CreateDataset(self, request: dict[str, Any]) -> dict[str, Any] | None:
        dataset_id, title = f"{request['ownerSlug']}/{request['slug']}", request["title"]
        if request["ownerSlug"] != self.account:
            return {"status": "error", "error": "You are not allowed to create a dataset as this owner."}
        if len(request["slug"]) not in LENGTHS or len(title) not in LENGTHS:
            raise Refusal(400, "Bad Request")
        if dataset_id in self.state.datasets:
            return {
                "status": "error",
                "error": f'The requested slug "{request["slug"]}" is already in use by a dataset.',
            }
        if any(each.title == title for each in self.state.datasets.values()):
            return {"status": "error", "error": f'The requested title "{title}" is already in use by a dataset.'}
        dataset = Dataset(title, request.get("isPrivate", False))
        return self.add_version(dataset_id, dataset, request.get("files", []), request.get("description") or "")

    def call_CreateDatasetVersion(self, request: dict[str, Any]) -> dict[str, Any] | None:
        dataset_id = f"{request['ownerSlug']}/{request['datasetSlug']}"
        dataset = self.state.datasets.get(dataset_id)
        if dataset is None or (dataset.hidden_for and len(dataset.versions) == 1):
            if dataset is not None:
                dataset.hidden_for -= 1
            raise Refusal(403, "Permission 'datasets.update' was denied")
        return self.add_version(dataset_id, dataset, request["body"].get("files", []), request["body"]["versionNotes"])

    def add_version(
        self, dataset_id: str, dataset: Dataset, files: list[dict[str, Any]], notes: str
    ) -> dict[str, Any] | None:
        faults, blobs = self.state.faults, [self.state.blobs.get(each["token"]) for each in files]
        whole = [blob for blob in blobs if blob is not None and blob.is_whole and not blob.has_expired]
        names = {blob.name for blob in whole}
        if len(whole) < len(blobs) or not blobs or len(names) < len(blobs) or len(blobs) > MAX_FILES:
            return {"status": "error", "error": "Failed to resolve the necessary information from the request."}
        content = {blob.name: bytes(blob.data) for blob in whole[faults.left_out :]}
        faults.left_out = 0
        is_over = faults.quota is not None and sum(map(len, content.values())) > faults.quota
        dataset.versions.append(Version(content, notes, "FAILED" if is_over else "READY"))
        dataset.hidden_for = faults.lag
        self.state.datasets[dataset_id] = dataset
        if faults.lost:
            faults.lost -= 1
            return None
        return {"status": "ok", "error": "", "ref": f"/{dataset_id}", "url": f"https://kaggle.invalid/{dataset_id}"}

    def seen(self, request: dict[str, Any]) -> tuple[Dataset, int]:
        """Return a dataset and the number of the version that is shown of it."""
        dataset = self.state.datasets.get(f"{request['ownerSlug']}/{request['datasetSlug']}")
        if dataset is None:
            raise Refusal(404, "Not Found")
        number = len(dataset.versions)
        if dataset.hidden_for:
            dataset.hidden_for -= 1
            number -= 1
        if not number:
            raise Refusal(403 if dataset.hidden_for % 2 else 404, "Forbidden or Not Found")
        return dataset, number

    def call_GetDataset(self, request: dict[str, Any]) -> dict[str, Any]:
        dataset, number = self.seen(request)
        return {"ref": request["datasetSlug"], "title": dataset.title, "currentVersionNumber": number}

    def call_GetDatasetStatus(self, request: dict[str, Any]) -> dict[str, Any]:
        dataset, number = self.seen(request)
        return {"status": dataset.versions[number - 1].status}

    def call_ListDatasetFiles(self, request: dict[str, Any]) -> dict[str, Any]:
        dataset, number = self.seen(request)
        names = sorted(dataset.versions[number - 1].files)
        start, size = int(request.get("pageToken") or 0), min(self.state.page, request.get("pageSize") or 20)
        shown = names[start : start + size]
        files = [{"name": name, "totalBytes": len(dataset.versions[number - 1].files[name])} for name in shown]
        return {"datasetFiles": files, "nextPageToken": str(start + size) if start + size < len(names) else ""}

    def call_DownloadDataset(self, request: dict[str, Any]) -> str:
        dataset, number = self.seen(request)
        if request["fileName"] not in dataset.versions[number - 1].files:
            raise Refusal(404, "Not Found")
        place = f"{request['ownerSlug']}/{request['datasetSlug']}/{number}/{request['fileName']}"
        return f"{self.state.url}/file/{place}"

    def do_GET(self) -> None:
        owner, slug, number, name = urlsplit(self.path).path.removeprefix("/file/").split("/")
        self.answer(200, self.state.datasets[f"{owner}/{slug}"].versions[int(number) - 1].files[name])

    def do_PUT(self) -> None:
        self.state.calls["PUT"] += 1
        token = parse_qs(urlsplit(self.path).query)["upload_id"][0][::-1]
        length = int(self.headers.get("Content-Length") or 0)
        blob = self.state.blobs.get(token)
        call = "PUT" if length else "PUT of nothing"
        self.state.watch(call, "asked")
        found = re.fullmatch(r"bytes (?:\*|(\d+)-(\d+))/(\d+)", self.headers["Content-Range"])
        if blob is None or blob.has_expired or found is None or int(found[3]) != blob.size or self.is_signed():
            self.rfile.read(length)
            self.answer(410 if blob is not None and blob.has_expired else 404)
            return
        cut = self.state.faults.cuts.pop(0) if length and self.state.faults.cuts else None
        data = self.rfile.read(length if cut is None else min(cut, length))
        if length and int(found[1]) == len(blob.data):
            self.state.received += len(data)
            blob.data += data if len(data) == length else data[: len(data) // PIECE * PIECE]
        self.state.watch(call, "done")
        if cut is not None and cut < length:
            self.close_connection = True
        elif blob.is_whole:
            digest = base64.b64encode(hashlib.md5(blob.data).digest()).decode()
            self.answer(200, X_Goog_Hash=f"crc32c=AAAAAA==,md5={digest}")
        elif blob.data:
            self.answer(308, Range=f"bytes=0-{len(blob.data) - 1}")
        else:
            self.answer(308)

    def is_signed(self) -> bool:
        """Return whether an account's key came with an upload, which goes to another company's storage."""
        return "Authorization" in self.headers


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--port", type=int, default=7777)
    state = KaggleServer(parser.parse_args().port)
    print(f"{state.url} stands in for Kaggle until Ctrl-C", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        state.server.serve_forever()
    return 0


if __name__ == "__main__":
    main()
