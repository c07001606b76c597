"""What the contenders of the warmup benchmark share. Needs the standard library alone.

The setting has `folder` to write into, `size`, `jobs` and `variants`. `go PHOTOGRAPHS`, a folder of them, works
through it and answers with how many there were and the seconds they took.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.bench.peers.protocol import Commands, Role, Setting

Work = Callable[[Path], None]

_CHUNK = 4  # files a process fetches at once: few, so that no process ends much later than another


def builder(start: Callable[[Setting], Work]) -> Role:
    """Return the role of `start(setting)`, which prepares what is paid for once, and returns what works on a folder."""

    def begin(setting: Setting) -> Commands:
        work, folder = start(setting), Path(setting["folder"])

        def go(photographs: str) -> dict[str, Any]:
            return {"images": len(files(photographs)), "seconds": _seconds(work, Path(photographs), folder)}

        return {"go": go}

    return begin


def files(photographs: str | Path) -> list[str]:
    """Return the files of a folder, in order."""
    return sorted(str(path) for path in Path(photographs).iterdir())


def _seconds(work: Work, photographs: Path, folder: Path) -> float:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.sync()  # what another one wrote is not written on our time
    began = time.perf_counter()
    work(photographs)
    seconds = time.perf_counter() - began
    shutil.rmtree(folder)
    return seconds


def bare_loop(each: Callable[[str], int], jobs: int) -> Work:
    """Return what calls `each` on every photograph, in processes that stay from list to list."""
    pool = multiprocessing.get_context("fork").Pool(jobs)

    def work(photographs: Path) -> None:
        for _ in pool.imap_unordered(each, files(photographs), _CHUNK):
            pass

    return work
