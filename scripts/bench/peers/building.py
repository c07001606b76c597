"""What the contenders of the warmup benchmark share. Needs the standard library alone.

The setting has `folder` to write into, `size`, `jobs` and `variants`. There are two commands, where LIST is a JSON
file, a list of photographs: `go LIST` works through them and answers with how many there were and the seconds they
took, `check LIST` answers with those it refuses.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.bench.peers.protocol import Commands, Setting, serve

Work = Callable[[Path], None]

_CHUNK = 4  # files a process fetches at once: few, so that no process ends much later than another


def run(start: Callable[[Setting], Work], refuses: Callable[[str], bool] = lambda file: False) -> None:
    """Be a contender: `start(setting)` prepares what users pay for once, and returns what works through a list."""

    def begin(setting: Setting) -> Commands:
        work, folder = start(setting), Path(setting["folder"])

        def go(listed: str) -> dict[str, Any]:
            path = Path(listed)
            return {"images": len(read_list(path)), "seconds": _seconds(work, path, folder)}

        return {"go": go, "check": lambda listed: {"refused": list(filter(refuses, read_list(Path(listed))))}}

    serve(begin)


def read_list(listed: Path) -> list[str]:
    """Return the photographs of a list, in order; one may be there several times."""
    return list(json.loads(listed.read_bytes()))


def _seconds(work: Work, listed: Path, folder: Path) -> float:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.sync()  # what another one wrote is not written on our time
    began = time.perf_counter()
    work(listed)
    seconds = time.perf_counter() - began
    shutil.rmtree(folder)
    return seconds


def bare_loop(each: Callable[[str], int], jobs: int) -> Work:
    """Return what calls `each` on every photograph, in processes that stay from list to list."""
    pool = multiprocessing.get_context("fork").Pool(jobs)

    def work(listed: Path) -> None:
        for _ in pool.imap_unordered(each, read_list(listed), _CHUNK):
            pass

    return work
