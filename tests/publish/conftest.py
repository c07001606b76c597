"""Places to send a cache to: a stand-in for Kaggle, a web server, and fsspec's memory."""

from __future__ import annotations

import gzip
import http.server
import re
import shutil
import threading
import time
from functools import partial
from pathlib import Path

import fsspec
import pytest

from scripts.kaggle_server import KaggleServer


@pytest.fixture(scope="session")
def running():
    with KaggleServer(page=4).running() as server:
        yield server


@pytest.fixture
def kaggle(running, monkeypatch, tmp_path):
    """A stand-in for Kaggle, signed in and faultless."""
    for name, value in {**running.environment, "HOME": str(tmp_path), "TPUCACHE_DIR": str(tmp_path / "kept")}.items():
        monkeypatch.setenv(name, value)
    running.reset()
    return running


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    """No waiting between attempts."""
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(min(seconds, 0.001)))


@pytest.fixture
def stored(cache: Path, tmp_path: Path) -> Path:
    """A copy of the session's cache, in a folder where other folders may be made."""
    return Path(shutil.copytree(cache, tmp_path / "stored"))


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves a folder; `ranges` honours Range, `break_after` cuts answers off, `short` of them with a wrong length.

    Files in `hostile` come packed by gzip, or followed by 64 MB more, which `sent` counts, or are refused.
    """

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def __init__(self, server_state, *arguments):
        self.state = server_state
        super().__init__(*arguments)

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        self.state.requests.append((self.path, self.headers.get("Range")))
        path = self.state.folder / self.path.partition("?")[0].rpartition("/")[2]
        status = 403 if self.state.hostile.get(path.name) == "refused" else self.state.status
        if status or not path.is_file():
            self.send_error(status or 404)
            return
        data = path.read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked and self.state.ranges:
            first, last = int(asked[1]), min(int(asked[2]), len(data) - 1)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
            data = data[first : last + 1]
        else:
            self.send_response(200)
        way = self.state.hostile.get(path.name)
        if way == "gzip":
            data = gzip.compress(data)
            self.send_header("Content-Encoding", "gzip")
        if way == "endless":
            self.end_headers()
            self.close_connection = True
            for block in (data, *[bytes(1 << 20)] * 64):
                self.wfile.write(block)
                self.state.sent += len(block)
            return
        if self.state.short:
            data = data[: self.state.short.pop(0)]  # None: all
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        sent = self.state.break_after.pop(0) if self.state.break_after else None
        self.wfile.write(data[:sent])
        self.close_connection = sent is not None


class Server:
    def __init__(self, folder):
        self.folder, self.ranges, self.status = folder, True, 0
        self.break_after, self.short, self.requests = [], [], []
        self.hostile, self.sent = {}, 0


@pytest.fixture
def served(cache, tmp_path):
    """A local web server of a copy of the cache, and its URL."""
    state = Server(shutil.copytree(cache, tmp_path / "served"))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, state))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}/caches/served"
    yield state
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def memory():
    """A URL in memory that nothing else uses."""
    yield "memory://transfer/cache"
    fsspec.filesystem("memory").rm("/transfer", recursive=True)
