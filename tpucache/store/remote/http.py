"""HttpFolder: reads files of a folder on a web server, whole or in ranges, with the standard library alone.

Answers are not trusted. An unexpected status, range, length or encoding is an error, an answer that is longer than what
was requested is not read to its end, and a request that is too slow is stopped.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import io
import re
import socket
import ssl
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Final, NamedTuple
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit

from tpucache.errors import UsageError
from tpucache.store.files import ThreadLock
from tpucache.text import shown
from tpucache.version import __version__

SCHEMES: Final = ("http", "https")

_SILENCE_SECONDS: Final = 60.0  # the longest time without a byte, or for connecting
_LEAST_RATE: Final = 10_000  # bytes per second on average, required after the first _SILENCE_SECONDS
_MOST_REDIRECTS: Final = 3
_MOST_IDLE: Final = 16  # idle connections to keep, per server
#: Bytes that an answer may have in addition to the requested ones: headers, and the lengths of small chunks.
_OVERHEAD: Final = 256 << 10
_BLOCK: Final = 1 << 20
_REDIRECTS: Final = (301, 302, 303, 307, 308)
_MISSING: Final = (404, 410)
_WHOLE, _PART = 200, 206
_CHANGED: Final = (412, 416)  # the file is not the version in If-Match; the range is beyond the end of the file
_LENGTH: Final = re.compile(r"\d{1,18}")
_RANGE: Final = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(?:(\d{1,18})|\*)")
# Characters that are not quoted in a request's address. It may be quoted already, so % is one of them.
_SAFE: Final = "/%:@!$&'()*+,;=~?[]"


class HttpError(OSError):
    """An unexpected answer of a web server. `status` is its HTTP status.

    `is_final` is whether trying again cannot help.
    """

    def __init__(self, message: str, status: int, *, is_final: bool = True) -> None:
        super().__init__(message)
        self.status = status
        self.is_final = is_final


class ChangedError(HttpError):
    """A file on the server was replaced since it was first read."""


class Origin(NamedTuple):
    """A server: its scheme, host and port. A password in the user's URL is sent only to the server in that URL."""

    scheme: str
    host: str
    port: int


class HttpFolder:
    """A folder at `http://` or `https://`. Each request for a file has the user, password and query of the URL.

    Threads may share an HttpFolder. Redirects are followed, also to other servers, which do not get user and password,
    but never from https to http. The errors of requests do not show URLs.
    """

    def __init__(self, url: str, block: int = _BLOCK, silence: float | None = None) -> None:
        """Store the URL; no connection is opened yet. `block` is the number of bytes per read.

        A request fails after `silence` seconds without a byte (None: 60), or if the server sends less than 10 kB/s on
        average.
        """
        self._idle: defaultdict[Origin, list[_Connection]] = defaultdict(list)
        self._lock, self._most_idle = ThreadLock(), _MOST_IDLE
        self._block, self._silence = block, silence or _SILENCE_SECONDS
        self._tags: dict[str, str] = {}  # the ETag of each file at its first partial read
        try:
            self._url = urlsplit(url)
            self._origin = _origin_of(self._url)
        except ValueError as error:
            raise UsageError(f"{shown(url)} is no URL of a web server: {error}. Give the URL of a folder") from None

    def __del__(self) -> None:
        self.close()

    def read(self, name: str, most: int) -> bytes | None:
        with self._answer(name, most + 1) as answer:
            if answer.length is not None and answer.length > most:
                return None
            data = b"".join(answer.blocks(most + 1, answer.length or 0))
        return data if len(data) <= most else None

    def part(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        with self._answer(name, stop - start, (start, stop)) as answer:
            yield from answer.blocks(stop - start, stop - start)

    def read_into(self, name: str, start: int, target: memoryview, size: int) -> None:
        """Fill `target` with a file's bytes from `start` on, by one request. The file must have `size` bytes.

        All parts of a file must come from one version: each request asks for the ETag of the first part. Weak ETags are
        ignored, because they may differ for equal bytes.
        """
        stop = start + len(target)
        with self._answer(name, len(target), (start, stop), self._tags.get(name)) as answer:
            answer.check_version(name, size, self._tags.get(name))
            answer.read_into(target)
            if answer.tag:
                self._tags.setdefault(name, answer.tag)

    def version(self, name: str) -> tuple[int | None, str | None]:
        try:
            with self._answer(name, 1, (0, 1)) as answer:
                b"".join(answer.blocks(1, 1))
                return answer.total, answer.tag if answer.tag and not answer.tag.startswith("W/") else None
        except FileNotFoundError:
            return None, None

    def beginning(self, name: str, stop: int) -> Iterator[bytes]:
        """Yield the first `stop` bytes of a file by one request without a range, for servers that ignore ranges."""
        with self._answer(name, stop) as answer:
            yield from answer.blocks(stop, stop)

    def has_parts(self, name: str) -> bool:
        """Return whether the server supports ranges for this file, which must not be empty."""
        try:
            return len(b"".join(self.part(name, 0, 1))) == 1
        except HttpError as error:
            if error.status == _WHOLE:
                return False
            raise

    def close(self) -> None:
        with self._lock:
            self._most_idle = 0  # a thread may still read, and give its connection back later
            idle = [each for some in self._idle.values() for each in some]  # at exit, module globals may be gone
            self._idle.clear()
        for connection in idle:
            connection.close()

    @contextlib.contextmanager
    def _answer(
        self, name: str, asked: int, span: tuple[int, int] | None = None, tag: str | None = None
    ) -> Iterator[_Answer]:
        """Request a file or its byte range `span`, of `asked` bytes. The context returns the answer with its headers
        read.

        `tag` is the ETag that the file must have. If the `with` block reads the whole answer, the connection is used
        again.
        """
        url = self._url._replace(path=f"{self._url.path.rstrip('/')}/{name}", fragment="")
        headers = {"Accept-Encoding": "identity", "User-Agent": f"tpucache/{__version__}"}
        if span is not None:
            headers["Range"] = f"bytes={span[0]}-{span[1] - 1}"
        if tag and not tag.startswith("W/"):  # If-Match never matches a weak ETag
            headers["If-Match"] = tag
        for _ in range(_MOST_REDIRECTS + 1):
            connection, response = self._ask(url, headers, asked)
            try:
                if response.status not in _REDIRECTS:
                    answer = _Answer(response, self._block)
                    answer.check(name, span)
                    yield answer
                    return
                url = _target(url, response)
                response.read(_OVERHEAD)  # read a short body to the end, so that the connection can be used again
            finally:
                is_whole = response.isclosed() and not response.will_close
                response.close()
                self._give_back(connection, is_whole=is_whole)
        raise HttpError(f"the server redirects more than {_MOST_REDIRECTS} times", response.status)

    def _ask(
        self, url: SplitResult, headers: dict[str, str], asked: int
    ) -> tuple[_Connection, http.client.HTTPResponse]:
        origin = _origin_of(url)
        words = quote(url.path or "/", _SAFE) + (f"?{quote(url.query, _SAFE)}" if url.query else "")
        if origin == self._origin and (user := self._url.username) is not None:
            secret = f"{unquote(user)}:{unquote(self._url.password or '')}".encode()
            headers = {**headers, "Authorization": f"Basic {base64.b64encode(secret).decode()}"}
        while True:
            connection, is_used = self._connection(origin)
            try:
                return connection, connection.ask(words, headers, asked)
            except BaseException as error:
                connection.close()
                # The server may have closed an idle connection: then a new one is tried.
                if not (is_used and isinstance(error, ConnectionError | http.client.BadStatusLine)):
                    raise

    def _connection(self, origin: Origin) -> tuple[_Connection, bool]:
        with self._lock:
            if self._idle[origin]:
                return self._idle[origin].pop(), True
        return _Connection(origin, self._silence), False

    def _give_back(self, connection: _Connection, *, is_whole: bool) -> None:
        with self._lock:
            idle = self._idle[connection.origin]
            if is_whole and len(idle) < self._most_idle:
                idle.append(connection)
                return
        connection.close()


class _Connection:
    def __init__(self, origin: Origin, silence: float) -> None:
        self.origin = origin
        if origin.scheme == "https":
            context = ssl.create_default_context()
            self._http: http.client.HTTPConnection = http.client.HTTPSConnection(
                origin.host, origin.port, timeout=silence, context=context
            )
        else:
            self._http = http.client.HTTPConnection(origin.host, origin.port, timeout=silence)
        self._http.connect()
        self._http.auto_open = 0  # http.client must not reconnect by itself, around the watched socket
        self._socket = _WatchedSocket(self._http.sock, silence)
        self._http.sock = self._socket  # it has all methods that http.client uses

    def ask(self, words: str, headers: dict[str, str], asked: int) -> http.client.HTTPResponse:
        """Send a GET request, and return the answer: its headers are read, its body is not."""
        self._socket.most = 2 * asked + _OVERHEAD
        self._http.request("GET", words, headers=headers)
        return self._http.getresponse()

    def close(self) -> None:
        self._http.close()


class _WatchedSocket:
    """A socket for `http.client`. Reading raises OSError after more than `most` bytes of an answer."""

    def __init__(self, connected: socket.socket, silence: float) -> None:
        self._socket, self._silence = connected, silence
        self.most = 0

    def sendall(self, data: bytes) -> None:
        self._socket.settimeout(self._silence)
        self._socket.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_WatchedFile(self._socket, self.most, self._silence), 64 << 10)

    def close(self) -> None:
        self._socket.close()


class _WatchedFile(io.RawIOBase):
    """The bytes of one answer. Reading raises TimeoutError if they arrive too slowly, OSError if there are too many."""

    def __init__(self, connected: socket.socket, most: int, silence: float) -> None:
        self._socket, self._silence = connected, silence
        self._file: Any = connected.makefile("rb", buffering=0)  # which keeps the socket open
        self._most, self._done = most, 0
        self._began = time.monotonic()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        seconds = time.monotonic() - self._began
        left = self._silence + self._done / _LEAST_RATE - seconds
        if left <= 0:
            raise TimeoutError(f"the answer is too slow: {self._done:,} bytes in {seconds:.0f} s")
        self._socket.settimeout(min(left, self._silence))
        count: int | None = self._file.readinto(buffer)
        self._done += count or 0
        if self._done > self._most:
            raise OSError(f"the answer is longer than what was asked for: more than {self._most:,} bytes")
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


class _Answer:
    def __init__(self, response: http.client.HTTPResponse, block: int) -> None:
        self._response = response
        self._block = block
        #: The size of the body in bytes, if the headers state it.
        self.length: int | None = None

    def check(self, name: str, span: tuple[int, int] | None) -> None:
        """Raise FileNotFoundError, HttpError or EOFError unless the answer matches the request."""
        response, headers = self._response, self._response.headers
        status = response.status
        if status in _MISSING:
            raise FileNotFoundError(f"the server has no {name} (status {status})")
        if status in _CHANGED and span is not None:
            raise ChangedError(f"{name} was replaced on the server while it was read (status {status})", status)
        if status != (_WHOLE if span is None else _PART):
            if status == _WHOLE:
                raise HttpError("the server sends the whole file instead of a part", status, is_final=False)
            # 408 means "request timeout", 429 "too many requests".
            raise HttpError(
                f"the server answers with status {status}", status, is_final=status < 500 and status not in (408, 429)
            )
        coding = ", ".join(headers.get_all("Content-Encoding", [])).strip().lower()
        if coding not in ("", "identity"):
            raise HttpError(f"the server sends the file in the coding {coding!r:.100}, which was not asked for", status)
        transfer = ", ".join(headers.get_all("Transfer-Encoding", [])).strip().lower()
        if transfer not in ("", "chunked"):
            raise HttpError(
                f"the server sends the file with the transfer coding {transfer!r:.100}, which was not asked for", status
            )
        lengths = set(headers.get_all("Content-Length", [])) if not transfer else set()
        if len(lengths) > 1 or not all(_LENGTH.fullmatch(length) for length in lengths):
            raise HttpError(f"the server states an impossible length: {', '.join(sorted(lengths))!r:.100}", status)
        self.length = int(lengths.pop()) if lengths else None
        if span is not None:
            _check_range(headers.get("Content-Range", ""), self.length, span)

    @property
    def total(self) -> int | None:
        """The size of the whole file in bytes, if a partial answer states it; otherwise None."""
        found = _RANGE.fullmatch(self._response.headers.get("Content-Range", "").strip())
        return int(found[3]) if found and found[3] else None

    @property
    def tag(self) -> str:
        return str(self._response.headers.get("ETag", "")).strip()

    def check_version(self, name: str, size: int, tag: str | None) -> None:
        if self.total not in (None, size):
            raise ChangedError(f"{name} is {self.total:,} bytes on the server, the manifest says {size:,}", _PART)
        # Equal bytes may have different weak ETags, for example from two servers behind one address.
        is_strong = not any(each.startswith("W/") for each in (tag or "", self.tag))
        if is_strong and tag and self.tag and tag != self.tag:
            raise ChangedError(f"{name} was replaced on the server while it was read", _PART)

    def read_into(self, target: memoryview) -> None:
        done = 0
        while done < len(target):
            count = self._response.readinto(target[done:])
            if not count:
                raise EOFError(f"{done:,} bytes came instead of {len(target):,}")
            done += count

    def blocks(self, most: int, least: int) -> Iterator[bytes]:
        done = 0
        while done < most and (block := self._response.read(min(self._block, most - done))):
            done += len(block)
            yield block
        if done < least:
            raise EOFError(f"{done:,} bytes came instead of {least:,}")


def _check_range(text: str, length: int | None, span: tuple[int, int]) -> None:
    """Raise EOFError if an answer ends before the requested range does, HttpError if it has another range or length."""
    found = _RANGE.fullmatch(text.strip())
    start, stop = span
    if not found or int(found[1]) != start or int(found[2]) >= stop or int(found[2]) < start:
        raise HttpError(f"the server sends the range {text!r:.100}, not the bytes {start} to {stop - 1}", _PART)
    came = int(found[2]) + 1 - start
    if length is not None:
        came = min(came, length)
    if came < stop - start:
        raise EOFError(f"{came:,} bytes came instead of {stop - start:,}")
    if length is not None and length != came:
        raise HttpError(f"the server states {length:,} bytes for a range of {came:,}", _PART)


def _target(url: SplitResult, response: http.client.HTTPResponse) -> SplitResult:
    place = response.headers.get("Location", "")
    try:
        target = urlsplit(urljoin(url.geturl(), place))
        _origin_of(target)
    except ValueError:
        raise HttpError("the server redirects to an address that is not a web server's", response.status) from None
    if url.scheme == "https" and target.scheme != "https":
        raise HttpError("the server redirects from https to http, where others could change the file", response.status)
    return target


def _origin_of(url: SplitResult) -> Origin:
    scheme = url.scheme.lower()
    if scheme not in SCHEMES or not url.hostname:
        raise ValueError("it has no server")
    return Origin(scheme, url.hostname, url.port or (443 if scheme == "https" else 80))
