"""A cache behind nginx: what a real web server answers to ranges, versions and many connections."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import PATIENCE

from tpucache import CachedDataset, CachedLoader, StoreError

_PROGRAM = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin:/opt/homebrew/bin")
_REQUEST = re.compile(r"(\d+) (\S+) (\S+)")

pytestmark = pytest.mark.skipif(_PROGRAM is None, reason="nginx is not installed on this machine")

CONFIGURATION = """
daemon off;
{user}
worker_processes 2;
pid "{folder}/pid";
error_log stderr;
events {{ worker_connections 256; }}
http {{
    log_format plain "$status $uri $http_range-";
    access_log "{folder}/log" plain;
    client_body_temp_path "{folder}/1"; proxy_temp_path "{folder}/2"; fastcgi_temp_path "{folder}/3";
    uwsgi_temp_path "{folder}/4"; scgi_temp_path "{folder}/5";
    gzip on; gzip_types *; gzip_min_length 1;
    server {{
        listen 127.0.0.1:{port};
        root "{root}";
        location /moved/ {{ rewrite ^/moved/(.*)$ /$1 redirect; }}
    }}
}}
"""


class Nginx:
    """A running nginx: its URL, the folder that it serves, and what it was asked for."""

    def __init__(self, url: str, folder: Path, log: Path) -> None:
        self.url, self.folder, self._log = url, folder, log

    def requests(self) -> Counter[tuple[int, str]]:
        """Return how often each file was asked for with which status."""
        found = _REQUEST.findall(self._log.read_text())
        return Counter((int(status), path.rpartition("/")[2]) for status, path, _ in found)


@pytest.fixture
def nginx(cache: Path, tmp_path: Path) -> Iterator[Nginx]:
    """The cache, copied, behind nginx with compression switched on, as hosts often have it."""
    root, folder = tmp_path / "served", tmp_path / "nginx"
    shutil.copytree(cache, root)
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    user = "" if os.geteuid() else "user root;"
    text = CONFIGURATION.format(user=user, folder=folder, port=port, root=root)
    (folder / "nginx.conf").write_text(text)
    command = [str(_PROGRAM), "-p", str(folder), "-c", str(folder / "nginx.conf")]
    errors = folder / "errors"
    with errors.open("w") as file, subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file) as process:
        try:
            until = time.monotonic() + PATIENCE
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=5).close()
                    break
                except OSError:
                    assert time.monotonic() < until, errors.read_text()
                    time.sleep(0.02)
            yield Nginx(f"http://127.0.0.1:{port}", root, folder / "log")
        finally:
            process.terminate()  # the workers end with it


def batches(dataset: CachedDataset) -> list[object]:
    return [(images.tolist(), labels.tolist()) for images, labels in CachedLoader(dataset, 16, shuffle="block")]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("place", ["", "/moved"])
def test_what_nginx_sends_is_what_a_local_copy_gives(nginx: Nginx, cache: Path, tmp_path: Path, place: str) -> None:
    dataset = CachedDataset(nginx.url + place, cache_dir=tmp_path / "kept", in_memory=False)
    expected = batches(CachedDataset(cache))
    assert batches(dataset) == expected
    asked = nginx.requests()
    assert {name: asked[200, name] for name in ("manifest.json", "index.npy", "samples.npz")} == {
        "manifest.json": 1,
        "index.npy": 1,
        "samples.npz": 1,
    }
    assert {status for status, name in asked if name.endswith(".lmdb")} <= {206, 302}
    parts = sum(nginx.requests().values())
    assert batches(dataset) == expected
    assert sum(nginx.requests().values()) == parts
    dataset.close()


@pytest.mark.usefixtures("small_pieces")
def test_a_shard_that_is_replaced_behind_nginx_is_refused(nginx: Nginx, tmp_path: Path) -> None:
    dataset = CachedDataset(nginx.url, cache_dir=tmp_path / "kept", in_memory=False)
    dataset[0]
    shard = nginx.folder / "v00-00000.lmdb"
    new = shard.with_name("new")
    new.write_bytes(shard.read_bytes()[:-1] + b"x")
    os.utime(new, (0, 0))  # nginx makes ETags of seconds and sizes
    new.rename(shard)
    with pytest.raises(StoreError, match=r"was replaced on the server while it was read.*open its URL again"):
        batches(dataset)
    assert nginx.requests()[412, shard.name]
    dataset.close()
