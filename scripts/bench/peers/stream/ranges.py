"""The link itself: eight connections that ask for parts of one file and throw them away."""

from __future__ import annotations

import http.client
import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from scripts.bench.peers.streaming import Epoch, run

_PART = 8 << 20
_CONNECTIONS = 8


def open_url(url: str, _folder: Path, bytes: int) -> Callable[[], Epoch]:
    parts = urlsplit(url)

    def read(starts: Iterator[int]) -> int:
        connection = http.client.HTTPConnection(parts.netloc)
        buffer = memoryview(bytearray(1 << 20))
        done = 0
        for start in starts:
            connection.request("GET", parts.path, headers={"Range": f"bytes={start}-{min(start + _PART, bytes) - 1}"})
            with connection.getresponse() as answer:
                while count := answer.readinto(buffer):
                    done += count
        connection.close()
        return done

    def epoch() -> Iterator[int]:
        starts = iter(range(0, bytes, _PART))
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            yield sum(pool.map(read, itertools.repeat(starts, _CONNECTIONS)))

    return epoch


if __name__ == "__main__":
    os.environ["no_proxy"] = "*"
    run(open_url)
