"""Serve a folder over HTTP as if behind a link of a given bandwidth and latency, for `scripts.bench stream`.

It knows what web servers and S3 clients ask for: GET and HEAD, ranges, ETags and If-Match. All answers share the
bandwidth; each one is delayed by the latency. `GET /.counts` returns the bytes so far, not counted itself.
"""

from __future__ import annotations

import contextlib
import email.utils
import json
import os
import re
import socket
import threading
import time
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from scripts.commands import make_parser

COUNTS: Final = "/.counts"

_PART: Final = 128 << 10  # bytes sent at once
_BURST: Final = 0.004  # seconds for which an idle link's bandwidth is kept
_RANGE: Final = re.compile(r"bytes=(\d+)-(\d*)")


class Link:
    """A bandwidth in bytes a second that all connections share."""

    def __init__(self, rate: float) -> None:
        self._rate, self._lock = rate, threading.Lock()
        self._free = time.monotonic()
        self.bytes = 0

    def wait(self, size: int) -> None:
        """Wait until this many bytes may be sent."""
        with self._lock:
            now = time.monotonic()
            self._free = max(self._free, now - _BURST) + size / self._rate
            self.bytes += size
            pause = self._free - now
        if pause > 0:
            time.sleep(pause)


def main() -> None:
    """Serve until the process is ended; the first line that is printed is the port."""
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rate", type=float, default=150.0, help="MB/s (%(default)s)")
    parser.add_argument("--latency", type=float, default=20.0, help="ms an answer (%(default)s)")
    parser.add_argument("--port", type=int, default=0, help="default: any that is free")
    options = parser.parse_args()
    link = Link(options.rate * 1e6)
    with socket.create_server(("127.0.0.1", options.port), backlog=256) as server:
        print(server.getsockname()[1], flush=True)
        while True:
            connection, _ = server.accept()
            threading.Thread(
                target=_serve, args=(connection, options.folder, link, options.latency / 1000), daemon=True
            ).start()


def _serve(connection: socket.socket, folder: Path, link: Link, latency: float) -> None:
    """Answer one request after the other until the client is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(ConnectionError), connection, connection.makefile("rb") as lines:
        while words := lines.readline().split():
            fields = {}
            while line := lines.readline().strip():
                name, _, value = line.decode("latin-1").partition(":")
                fields[name.lower()] = value.strip()
            path = unquote(urlsplit(words[1].decode()).path)
            if path == COUNTS:
                counts = json.dumps({"bytes": link.bytes}).encode()
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(counts), counts))
                continue
            time.sleep(latency)
            _answer(connection, words[0].decode(), folder / path.lstrip("/"), fields, link)


def _answer(connection: socket.socket, method: str, path: Path, fields: dict[str, str], link: Link) -> None:
    try:
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        status = os.fstat(number)
    except OSError:
        connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        return
    try:
        tag = f'"{status.st_size:x}-{status.st_mtime_ns:x}"'
        if fields.get("if-match", tag) != tag:
            connection.sendall(b"HTTP/1.1 412 Precondition Failed\r\nContent-Length: 0\r\n\r\n")
            return
        found = _RANGE.fullmatch(fields.get("range", ""))
        start = int(found[1]) if found else 0
        stop = min(status.st_size, int(found[2]) + 1) if found and found[2] else status.st_size
        head = [
            "HTTP/1.1 206 Partial Content" if found else "HTTP/1.1 200 OK",
            f"Content-Length: {stop - start}",
            "Content-Type: application/octet-stream",
            "Accept-Ranges: bytes",
            f"ETag: {tag}",
            f"Last-Modified: {email.utils.formatdate(status.st_mtime, usegmt=True)}",
        ]
        head += [f"Content-Range: bytes {start}-{stop - 1}/{status.st_size}"] if found else []
        connection.sendall("\r\n".join([*head, "", ""]).encode())
        if method == "HEAD":
            return
        while start < stop:
            part = min(_PART, stop - start)
            link.wait(part)
            while part and (sent := os.sendfile(connection.fileno(), number, start, part)):
                start, part = start + sent, part - sent
    finally:
        os.close(number)
