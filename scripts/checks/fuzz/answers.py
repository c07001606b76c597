"""Answers of a web server to fetch: status lines, headers, lengths and bodies of any kind, from this machine."""

from __future__ import annotations

import contextlib
import gzip
import random
import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from scripts.checks.fuzz.mutate import mutate_bytes, mutate_text, odd_integer
from scripts.checks.fuzz.tables import prepare as prepare_cache
from scripts.checks.fuzz.target import Target
from tpucache import verify_cache
from tpucache.publish.transfer import fetch_cache
from tpucache.store.remote import http, retry, url

_MOST: Final = 32 << 20  # bytes of an answer without an end
_STATUS: Final = (100, 101, 200, 204, 206, 301, 302, 304, 307, 400, 401, 404, 416, 429, 500, 503, 999)
_HEADERS: Final = (
    "Content-Encoding: gzip",
    "Content-Encoding: identity",
    "Transfer-Encoding: chunked",
    "Transfer-Encoding: gzip",
    "Content-Length: {odd}",
    "Content-Range: bytes {odd}-{odd}/{odd}",
    "Content-Range: bytes */{odd}",
    "Location: /again",
    "Location: file:///etc/passwd",
    "Location: http://[",
    "Location: {text}",
    "Connection: close",
    "{text}",
    "X: {long}",
    " folded",
)

Server = Callable[[str], tuple[bytes, ...]]


class _State(NamedTuple):
    """The files of a cache, and the server's port and how it answers, which each input replaces."""

    files: dict[str, bytes]
    port: int
    way: list[Server]


def prepare(folder: Path) -> _State:
    """Start a server in a thread. Nothing waits long, or is tried often."""
    files = prepare_cache(folder)
    http._SILENCE_SECONDS = 0.3  # type: ignore[misc]
    retry._FIRST_PAUSE = 0.0  # type: ignore[misc]
    retry._RETRIES = 2  # type: ignore[misc]
    url._CHUNK = 3000  # type: ignore[misc]
    listening = socket.create_server(("127.0.0.1", 0))
    state = _State(files, listening.getsockname()[1], [])
    threading.Thread(target=_serve, args=(listening, state), daemon=True).start()
    return state


def _serve(listening: socket.socket, state: _State) -> None:
    while True:
        connection, _ = listening.accept()
        connection.settimeout(2)
        with connection, contextlib.suppress(OSError):
            request = b""
            while not request.endswith(b"\r\n\r\n") and (more := connection.recv(65536)):
                request += more
            for part in state.way[-1](request.decode("latin-1")):
                connection.sendall(part)


def answer(files: dict[str, bytes], request: str) -> tuple[list[str], bytes]:
    """Return the lines of the head, and the body, of a right answer."""
    name = request.split(" ")[1].rpartition("/")[2]
    data = files.get(name)
    if data is None:
        return ["HTTP/1.1 404 Not Found", "Content-Length: 0"], b""
    asked = re.search(r"Range: bytes=(\d+)-(\d+)", request)
    if asked is None:
        return ["HTTP/1.1 200 OK", f"Content-Length: {len(data)}"], data
    first, last = int(asked[1]), min(int(asked[2]), len(data) - 1)
    head = ["HTTP/1.1 206 Partial Content", f"Content-Range: bytes {first}-{last}/{len(data)}"]
    return [*head, f"Content-Length: {last + 1 - first}"], data[first : last + 1]


def spoilt(head: list[str], body: bytes, draws: random.Random) -> tuple[bytes, ...]:
    """Return an answer with some of its lines and its body changed."""
    for _ in range(draws.choice((1, 1, 2, 3))):
        way = draws.randrange(10)
        if way == 0:
            head[0] = f"HTTP/1.1 {draws.choice(_STATUS)} Any"
        elif way == 1:
            head[draws.randrange(len(head))] = _header(draws)
        elif way == 2:
            head.insert(draws.randrange(1, len(head) + 1), _header(draws))
        elif way == 3 and len(head) > 1:
            del head[draws.randrange(1, len(head))]
        elif way == 4:
            at = draws.randrange(len(head))
            head[at] = mutate_text(head[at], draws)
        elif way == 5 and body:
            body = mutate_bytes(body, draws)
        elif way == 6:
            body = gzip.compress(body)
        elif way == 7:
            body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body) + draws.choice((0, 0, 1, -1)) & 0xFFFF, body)
            head = [line for line in head if not line.startswith("Content-Length")] + ["Transfer-Encoding: chunked"]
        elif way == 8:
            body = body[: draws.randrange(len(body) + 1)]
        else:
            head = [line for line in head if not line.startswith("Content-Length")]
            return _bytes_of(head), body, *[bytes(1 << 20)] * draws.choice((1, _MOST >> 20))
    whole = _bytes_of(head) + body
    return (mutate_bytes(whole[:2000], draws) + whole[2000:],) if draws.random() < 0.1 else (whole,)


def _bytes_of(head: list[str]) -> bytes:
    return "\r\n".join([*head, "", ""]).encode("utf-8", "backslashreplace")


def _header(draws: random.Random) -> str:
    words = {
        "odd": str(odd_integer(draws)),
        "text": mutate_text("X-Y: z", draws),
        "long": "x" * draws.choice((9, 70_000)),
    }
    return draws.choice(_HEADERS).format(**words)


def attempt(state: _State, draws: random.Random, place: Path) -> None:
    """Fetch a cache of which some answers are spoilt; what is fetched is the cache, to the bit."""
    chance = draws.choice((0.05, 0.3, 1.0))

    def way(request: str) -> tuple[bytes, ...]:
        head, body = answer(state.files, request)
        if draws.random() < chance:
            return spoilt(head, body, draws)
        return _bytes_of(head), body

    state.way[:] = [way]
    fetch_cache(f"http://ann:secret@127.0.0.1:{state.port}/x", place / "fetched")
    if verify_cache(place / "fetched"):
        raise AssertionError("what was fetched is damaged")
    found = {path.name: path.read_bytes() for path in (place / "fetched").iterdir()}
    changed = sorted(name for name in state.files if found.get(name) != state.files[name])
    # A manifest has no hash of its own: one that came changed is another cache's, or the same in other words.
    if set(changed) - {"manifest.json"} or set(found) != set(state.files):
        raise AssertionError(f"{changed} were fetched with other bytes, and the files are {sorted(found)}")


TARGETS: Final = (Target("answers", prepare, attempt, 2.0),)
