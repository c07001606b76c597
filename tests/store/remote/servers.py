"""A web server of a folder, with ranges and ETags, whose answers a test can spoil, and which counts them."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from patience import PATIENCE

#: Given a file's name and the number of the request for it, from 1: what is done instead of answering, or nothing.
Fault = Callable[[str, int], str | None]

STALL_SECONDS = 5.0
_COUNTER = itertools.count()


class Server(ThreadingHTTPServer):
    """Serves the files of a folder at `url`.

    `fault` returns "cut", "503", "403", "404", "stall", "flip" (a byte of the answer), "whole" (status 200) or None.
    `ranges` are the names and spans that were asked for. Longer ones of
    shards than `longest` wait for `gate`. With `is_weak` each answer has another ETag, a weak one.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.fault: Fault = lambda name, number: None
        self.delay = 0.0
        self.longest, self.gate = 1 << 40, threading.Event()
        self.is_weak = False
        self.requests: Counter[str] = Counter()
        self.counting = threading.Lock()
        self.ranges: list[tuple[str, int, int]] = []
        self.is_down = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    @property
    def sent(self) -> int:
        """Bytes of the parts that were asked for."""
        return sum(stop - start for _, start, stop in self.ranges)

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of clients that are gone."""

    def close(self) -> None:
        self.is_down.set()
        self.shutdown()
        self.server_close()
        self._thread.join(PATIENCE)


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer waits 40 ms between its head and its body

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        server = self.server
        name = self.path.lstrip("/").partition("?")[0]
        with server.counting:
            server.requests[name] += 1
            number = server.requests[name]
        time.sleep(server.delay)
        fault = server.fault(name, number)
        path = server.folder / name
        if fault == "404" or not path.is_file():
            self._end(404)
            return
        if fault in ("503", "403"):
            self._end(int(fault))
            return
        data = path.read_bytes()
        tag = f'W/"{next(_COUNTER)}"' if server.is_weak else f'"{hashlib.sha256(data).hexdigest()[:16]}"'
        if self.headers.get("If-Match", tag) != tag:  # a weak one never matches
            self._end(412)
            return
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        start, stop = (int(found[1]), min(int(found[2]) + 1, len(data))) if found else (0, len(data))
        part = bytearray(data[start:stop])
        if found:
            server.ranges.append((name, start, stop))
            if name.endswith(".lmdb") and stop - start > server.longest:
                server.gate.wait(PATIENCE)
        if fault == "flip":
            part[0] ^= 1  # of a record: others may lie between two
        self.send_response(206 if found and fault != "whole" else 200)
        self.send_header("ETag", tag)
        self.send_header("Content-Length", str(len(part)))
        if found:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        self.end_headers()
        with contextlib.suppress(OSError):
            if fault == "stall":
                self.wfile.write(part[: len(part) // 2])
                self.wfile.flush()
                server.is_down.wait(STALL_SECONDS)
                self.close_connection = True
                return
            if fault == "cut":
                self.wfile.write(part[: len(part) // 2])
                self.close_connection = True
                return
            self.wfile.write(part)

    def _end(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()
