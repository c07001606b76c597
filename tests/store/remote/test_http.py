"""A web server gets away with nothing: no more bytes, no other bytes and no more time than were asked for."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Sequence

import pytest
from patience import PATIENCE

from tpucache.errors import UsageError
from tpucache.store.remote import http
from tpucache.store.remote.http import HttpError, HttpFolder

DATA = bytes(range(256)) * 40

Answer = Callable[[str], Iterator[bytes]]
Serve = Callable[[Answer], HttpFolder]


class Server:
    """A server that sends what a function yields for the text of a request, then closes the connection."""

    def __init__(self, answer: Answer) -> None:
        self.requests: list[str] = []
        self.sent = 0
        self._answer = answer
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # the socket is closed at the end
            while True:
                connection, _ = self._listening.accept()
                with connection, contextlib.suppress(OSError):
                    self._send(connection)

    def _send(self, connection: socket.socket) -> None:
        text = b""
        while not text.endswith(b"\r\n\r\n") and (more := connection.recv(4096)):
            text += more
        if not text:
            return
        self.requests.append(text.decode())
        for part in self._answer(text.decode()):
            connection.sendall(part)
            self.sent += len(part)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it is closed already
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join(PATIENCE)


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    """The servers that `serve` started, the last one last."""
    started: list[Server] = []
    yield started
    for server in started:
        server.close()


@pytest.fixture
def folder_at() -> Iterator[Callable[[str], HttpFolder]]:
    """The function `folder_at(url)`: a folder that is closed at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda url: stack.enter_context(contextlib.closing(HttpFolder(url)))


@pytest.fixture
def serve(servers: list[Server], folder_at: Callable[[str], HttpFolder]) -> Serve:
    """The function `serve(answer)`: the folder of a server that answers so."""

    def start(answer: Answer) -> HttpFolder:
        servers.append(Server(answer))
        return folder_at(f"http://{servers[-1].address}/folder")

    return start


def head(status: str, *headers: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", *headers, "", ""]).encode()


def partial(start: int, stop: int, *headers: str) -> bytes:
    return head("206 Partial Content", f"Content-Range: bytes {start}-{stop - 1}/{len(DATA)}", *headers)


def fixed(*parts: bytes) -> Answer:
    return lambda request: iter(parts)


def part(folder: HttpFolder, start: int = 100, stop: int = 300) -> bytes:
    return b"".join(folder.part("index.npy", start, stop))


def test_a_part_is_exactly_the_bytes_that_were_asked_for(serve: Serve, servers: list[Server]) -> None:
    folder = serve(fixed(partial(100, 300, "Content-Length: 200"), DATA[100:300]))
    assert part(folder) == DATA[100:300]
    (request,) = servers[0].requests
    assert request.startswith("GET /folder/index.npy HTTP/1.1\r\n")
    assert "Range: bytes=100-299\r\n" in request
    assert "Accept-Encoding: identity\r\n" in request


@pytest.mark.parametrize("ask", [lambda folder: part(folder, 0, 1), lambda folder: folder.read("x", 1000)])
@pytest.mark.parametrize("has_range", [True, False])
def test_of_an_endless_answer_no_more_is_read_than_was_asked_for(
    serve: Serve, servers: list[Server], ask: Callable[[HttpFolder], object], has_range: bool
) -> None:
    def endless(request: str) -> Iterator[bytes]:
        yield partial(0, 1) if has_range else head("200 OK")
        for _ in range(1000):
            yield bytes(1 << 16)

    folder = serve(endless)
    tracemalloc.start()
    try:
        with contextlib.suppress(HttpError):
            assert ask(folder) in (b"\0", None)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()
    servers[0].close()
    assert servers[0].sent < 20 << 20  # what fits into the sockets' buffers


def endless_headers() -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\n"
    for number in itertools.count():
        yield b"X-%d: %s\r\n" % (number, bytes(60_000).replace(b"\0", b"x"))


def endless_promises() -> Iterator[bytes]:
    while True:
        yield head("100 Continue") * 1000


def endless_chunks() -> Iterator[bytes]:
    yield partial(100, 300, "Transfer-Encoding: chunked")
    while True:
        yield b"1;%s\r\nx\r\n" % bytes(60_000).replace(b"\0", b"x")


@pytest.mark.parametrize("answer", [endless_headers, endless_promises, endless_chunks])
def test_endless_headers_and_chunks_are_given_up(
    serve: Serve, servers: list[Server], answer: Callable[[], Iterator[bytes]]
) -> None:
    folder = serve(lambda request: answer())
    with pytest.raises((OSError, http.http.client.HTTPException)):
        part(folder)
    servers[0].close()
    assert servers[0].sent < 20 << 20


@pytest.mark.parametrize("coding", ["gzip", "br", "identity, gzip", "x" * 1000])
@pytest.mark.parametrize("kind", ["Content-Encoding", "Transfer-Encoding"])
def test_a_coding_that_nobody_asked_for_is_refused(serve: Serve, coding: str, kind: str) -> None:
    body = gzip.compress(DATA[100:300])
    folder = serve(fixed(partial(100, 300, f"{kind}: {coding}", f"Content-Length: {len(body)}"), body))
    with pytest.raises(HttpError, match="was not asked for") as caught:
        part(folder)
    assert caught.value.is_final
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("headers", "error"),
    [
        (("Content-Range: bytes 0-199/10240",), HttpError),
        (("Content-Range: bytes 100-300/10240",), HttpError),
        (("Content-Range: bytes 100-99/10240",), HttpError),
        (("Content-Range: bytes */10240",), HttpError),
        (("Content-Range: lines 100-299/10240",), HttpError),
        (("Content-Range: bytes 100-" + "9" * 5000,), HttpError),
        ((), HttpError),
        (("Content-Type: multipart/byteranges; boundary=x",), HttpError),
        (("Content-Range: bytes 100-299/10240", "Content-Length: 201"), HttpError),
        (("Content-Range: bytes 100-299/10240", "Content-Length: -1"), HttpError),
        (("Content-Range: bytes 100-299/10240", "Content-Length: 200", "Content-Length: 300"), HttpError),
        (("Content-Range: bytes 100-298/10240", "Content-Length: 199"), EOFError),
        (("Content-Range: bytes 100-299/10240", "Content-Length: 100"), EOFError),
    ],
)
def test_a_range_that_nobody_asked_for_is_refused(serve: Serve, headers: Sequence[str], error: type[Exception]) -> None:
    folder = serve(fixed(head("206 Partial Content", *headers), DATA))
    with pytest.raises(error) as caught:
        part(folder)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(("status", "is_final"), [(200, False), (204, True), (304, True), (403, True), (503, False)])
def test_a_status_that_is_not_that_of_a_part_is_refused(serve: Serve, status: int, is_final: bool) -> None:
    folder = serve(fixed(head(f"{status} Any", f"Content-Length: {len(DATA)}"), DATA))
    with pytest.raises(HttpError, match="whole file" if status == 200 else f"status {status}") as caught:
        part(folder)
    assert (caught.value.status, caught.value.is_final) == (status, is_final)


@pytest.mark.parametrize("status", [404, 410])
def test_a_file_that_is_not_there_is_file_not_found(serve: Serve, status: int) -> None:
    with pytest.raises(FileNotFoundError):
        serve(fixed(head(f"{status} Any", "Content-Length: 0"))).read("x", 10)


def test_a_server_without_parts_is_known_by_its_status(serve: Serve) -> None:
    assert not serve(fixed(head("200 OK"), DATA)).has_parts("x")
    assert serve(fixed(partial(0, 1, "Content-Length: 1"), b"\0")).has_parts("x")
    assert b"".join(serve(fixed(head("200 OK"), DATA)).beginning("x", 5000)) == DATA[:5000]


@pytest.mark.parametrize("body", [DATA[100:200], b""])
def test_a_connection_that_is_cut_is_an_error_after_what_came(serve: Serve, body: bytes) -> None:
    for headers in (("Content-Length: 200",), ()):
        came = []
        with pytest.raises(EOFError):  # what came before it counts
            came += HttpFolder.part(serve(fixed(partial(100, 300, *headers), body)), "x", 100, 300)
        assert b"".join(came) == body
    with pytest.raises(EOFError):
        serve(fixed(head("200 OK", "Content-Length: 200"), body)).read("x", 1000)


@pytest.mark.slow
@pytest.mark.parametrize("drip", [b"x", b""])
@pytest.mark.parametrize("beginning", [b"", b"HTTP/1.1 200 OK\r\nX: ", partial(100, 300, "Content-Length: 200") + b"x"])
def test_an_answer_that_drips_or_falls_silent_is_given_up(
    serve: Serve, beginning: bytes, drip: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "_SILENCE_SECONDS", 0.1)
    is_given_up = threading.Event()

    def answer(request: str) -> Iterator[bytes]:
        yield beginning
        for _ in range(2000):  # until nobody reads it any more
            yield drip
            if is_given_up.wait(0.05):
                return

    try:
        with pytest.raises(TimeoutError):
            part(serve(answer))
    finally:
        is_given_up.set()


def test_a_redirection_is_followed_and_tells_other_servers_no_password(
    serve: Serve, servers: list[Server], folder_at: Callable[[str], HttpFolder]
) -> None:
    serve(fixed(partial(100, 300, "Content-Length: 200"), DATA[100:300]))
    target = servers[0].address
    serve(fixed(head("302 Found", f"Location: http://eve:pw@{target}/there?signed=1", "Content-Length: 0")))
    folder = folder_at(f"http://ann:pa55word@{servers[1].address}/folder?token=t0ken")
    assert part(folder) == DATA[100:300]
    assert "Authorization: Basic YW5uOnBhNTV3b3Jk\r\n" in servers[1].requests[0]
    assert servers[1].requests[0].startswith("GET /folder/index.npy?token=t0ken ")
    assert servers[0].requests[0].startswith("GET /there?signed=1 ")
    assert "Authorization" not in servers[0].requests[0]
    assert "t0ken" not in servers[0].requests[0]


@pytest.mark.parametrize("place", ["file:///etc/passwd", "ftp://127.0.0.1/x", "http://[", "data:,x", "http:///x", ""])
def test_a_redirection_to_anything_else_is_refused(serve: Serve, place: str) -> None:
    folder = serve(fixed(head("302 Found", f"Location: {place}", "Content-Length: 0")))
    with pytest.raises(HttpError, match="redirects") as caught:
        folder.read("x", 10)
    assert caught.value.is_final
    assert "passwd" not in str(caught.value)


def test_redirections_without_end_are_given_up(serve: Serve, servers: list[Server]) -> None:
    folder = serve(fixed(head("307 Again", "Location: /again", "Content-Length: 0")))
    with pytest.raises(HttpError, match="redirects more than 3 times"):
        folder.read("x", 10)
    assert len(servers[0].requests) == 4


def test_https_is_not_left_for_http() -> None:
    response = type("Response", (), {"status": 301, "headers": {"Location": "http://example.org/x"}})
    with pytest.raises(HttpError, match="from https to http"):
        http._target(http.urlsplit("https://example.org/x"), response)  # type: ignore[arg-type]


@pytest.mark.parametrize("url", ["http://", "http:///x", "http://[", "http://h:99999/x", "file:///x", "https://h:x/"])
def test_what_is_no_url_of_a_web_server_is_wrong_usage(url: str) -> None:
    with pytest.raises(UsageError, match="Give the URL of a folder"):
        HttpFolder(url)


def test_a_connection_is_used_again_and_replaced_when_the_server_closed_it(serve: Serve, servers: list[Server]) -> None:
    folder = serve(fixed(head("200 OK", "Content-Length: 3"), b"abc"))  # and it closes each connection
    assert [folder.read("x", 10) for _ in range(3)] == [b"abc"] * 3
    assert len(servers[0].requests) == 3


def test_names_that_are_not_ascii_are_quoted(
    serve: Serve, servers: list[Server], folder_at: Callable[[str], HttpFolder]
) -> None:
    serve(fixed(head("200 OK", "Content-Length: 0")))
    folder_at(f"http://{servers[0].address}/ä b%20c").read("x", 10)
    assert servers[0].requests[0].startswith("GET /%C3%A4%20b%20c/x HTTP/1.1")
