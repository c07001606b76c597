"""Places to send a cache to: a stand-in for Kaggle's client on PATH, a web server, and fsspec's memory."""

from __future__ import annotations

import gzip
import http.server
import os
import re
import shlex
import shutil
import sys
import threading
from functools import partial
from pathlib import Path

import fsspec
import pytest

# It speaks as version 2.2.5 does: status 0 for some errors, sizes in bytes, and a token for the next page.
STAND_IN = """
import json, os, pathlib, shutil, sys

place = pathlib.Path(os.environ["STAND_IN"])
mode = os.environ.get("STAND_IN_MODE", "")
words = sys.argv[1:]
with (place / "calls").open("a") as calls:
    calls.write(json.dumps(words) + chr(10))


def option(name):
    return words[words.index(name) + 1] if name in words else None


if mode == "signed-out":
    print("Authentication required to call the Kaggle API.")
    print("    export KAGGLE_API_TOKEN=xxxxxxxxxxxxxx")
    sys.exit(1)
kind, action = words[:2]
there = place / "dataset"
if mode == "offline":
    print("HTTPSConnectionPool(host='www.kaggle.com', port=443): Max retries exceeded with url: /api", file=sys.stderr)
    sys.exit(1)
if action == "status":
    if not there.exists():
        print(f"404 Client Error: Not Found for url: https://www.kaggle.com/status/{words[2]}", file=sys.stderr)
        sys.exit(1)
    waits = place / "waits"
    left = int(waits.read_text()) if waits.exists() else 0
    waits.write_text(str(max(0, left - 1)))
    print(f'{words[2]} has status "{"pending" if left else "ready"}"')
elif action in ("create", "version"):
    folder = pathlib.Path(option("-p"))
    if mode == "fails":
        print("500 Server Error", file=sys.stderr)
        sys.exit(1)
    if mode == "refuses":
        print("Dataset creation error: The title is already in use by a dataset.")
        sys.exit(0)
    shutil.rmtree(there, ignore_errors=True)
    there.mkdir()
    names = sorted(path.name for path in folder.iterdir() if path.name != "dataset-metadata.json")
    for name in names:
        if mode == "partial" and name == names[-1]:
            continue
        data = (folder / name).read_bytes()
        (there / name).write_bytes(data[:-1] if mode == "short" and name == names[-1] else data)
        print("Upload successful: " + name)
    print("Your private Dataset is being created.")
elif action == "files":
    names = sorted(path.name for path in there.iterdir())
    start = int(option("--page-token") or 0)
    if start + 4 < len(names):
        print("Warning: looks like you're using an outdated API Version")
        print("Next Page Token = " + str(start + 4))
    print("name,size,creationDate")
    for name in names[start : start + 4]:
        size = (there / name).stat().st_size
        print(f"{name},{'1MB' if mode == 'rounds' else size},2026-01-01 00:00:00")
"""


class StandIn:
    """The stand-in, its modes and what it was asked."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place = place
        self._monkeypatch = monkeypatch

    def mode(self, name: str) -> None:
        """Have it go wrong in one way."""
        self._monkeypatch.setenv("STAND_IN_MODE", name)

    def wait(self, times: int) -> None:
        """Have a dataset be pending this many times before it is ready."""
        (self.place / "waits").write_text(str(times))

    @property
    def calls(self) -> list[str]:
        """What it was asked, the words joined."""
        calls = self.place / "calls"
        return [line.replace('"', "").strip("[]") for line in calls.read_text().splitlines()] if calls.exists() else []

    @property
    def uploaded(self) -> dict[str, bytes]:
        """The files that it has."""
        return {path.name: path.read_bytes() for path in (self.place / "dataset").iterdir()}


@pytest.fixture
def kaggle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """A stand-in on PATH, signed in and faultless."""
    place = tmp_path / "stand-in"
    place.mkdir()
    program = place / "kaggle"
    (place / "kaggle.py").write_text(STAND_IN)
    # The first line of a script cannot name an interpreter whose path has a space, or is long.
    words = shlex.join([sys.executable, str(place / "kaggle.py")])
    program.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{place}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("STAND_IN", str(place))
    monkeypatch.setattr("tpucache.publish.publish._INTERVAL", 0.01)
    for name in ("_NEW_DATASET_SECONDS", "_NEW_VERSION_SECONDS"):
        monkeypatch.setattr(f"tpucache.publish.publish.{name}", 0.0)
    return StandIn(place, monkeypatch)


@pytest.fixture
def stored(cache: Path, tmp_path: Path) -> Path:
    """A copy of the session's cache, in a folder where other folders may be made."""
    return Path(shutil.copytree(cache, tmp_path / "stored"))


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves a folder; `ranges` honours Range, `break_after` cuts answers off, `short` of them with a wrong length.

    Files in `hostile` come packed by gzip, or followed by 64 MB more: `sent` counts those.
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
        if self.state.status or not path.is_file():
            self.send_error(self.state.status or 404)
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
