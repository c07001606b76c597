"""The contender's end of bench_warmup.py: works through a list of photographs on command.

Run as `warmup_NAME.py SETTING`, with the setting as JSON: `folder` to write into, `size`, `jobs` and `variants`. It
answers each line on stdin by a line of JSON on stdout, where LIST is a JSON file, a list of photographs: to `go LIST`
with how many there were and the seconds they took, to `check LIST` with those it refuses. Needs the standard library
alone, so that it runs anywhere.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Setting = dict[str, Any]
Work = Callable[[Path], None]

_CHUNK = 4  # files a process fetches at once: few, so that no process ends much later than another


def serve(start: Callable[[Setting], Work], refuses: Callable[[str], bool] = lambda file: False) -> None:
    """Be a contender: `start(setting)` readies what users pay for once, and returns what works through a list."""
    setting = json.loads(sys.argv[1])
    folder = Path(setting["folder"])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is no answer
    work = start(setting)
    for line in sys.stdin:
        command, _, path = line.rstrip("\n").partition(" ")
        listed = Path(path)
        if command == "check":
            answer = {"refused": [file for file in read_list(listed) if refuses(file)]}
        else:
            answer = {"images": len(read_list(listed)), "seconds": _seconds(work, listed, folder)}
        print(json.dumps(answer), file=answers)


def read_list(listed: Path) -> list[str]:
    """Return the photographs of a list, in order; one may stand there several times."""
    return json.loads(listed.read_bytes())


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
