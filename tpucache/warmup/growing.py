"""The main function of a process that builds a cache while another process, which has threads, reads it.

It ends with the reading process. Records that are finished by then are kept.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import multiprocessing
import os
import pickle
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from tpucache.errors import BuildError, TpucacheError
from tpucache.store.format import WORK_NAME
from tpucache.store.growing import FAILURE_NAME, Prospect
from tpucache.store.manifest import Manifest
from tpucache.warmup.run.folder import HeldError

if TYPE_CHECKING:
    pass

#: The Python code of the new process. Its arguments are the folders of modules, `sys.path`.
COMMAND: Final = "import sys; sys.path[:] = sys.argv[1:]; from tpucache.warmup.growing import main; main()"


@dataclass(frozen=True)
class Request:
    """Arguments of `build_for_readers`: `source`, the folder `cache`, and a dict of all other arguments, `others`.

    If `source` is a `functools.partial`, the new process calls it to make the source.
    """

    source: Any
    cache: str
    others: Mapping[str, Any]


@dataclass(frozen=True)
class Finished:
    """The last answer of a build that succeeded: the cache is finished."""


def send_request(target: BinaryIO, request: Request, is_large: bool) -> None:
    """Write a request to `target`, the standard input of a process that runs `main`."""
    from tpucache.warmup.run.executors import Executor, to_pickle

    try:
        data = to_pickle(request)
    except Exception as error:  # the user's own code raises anything
        raise BuildError(
            f"the source cannot be sent to the process that builds: {error}. Keep paths in a source, not open files or "
            "locks, or build the cache first, with build_cache"
        ) from error
    workers = Executor(jobs=request.others.get("jobs")).workers if is_large and sys.platform == "linux" else 1
    pickle.dump(workers, target)
    pickle.dump(data, target)
    target.flush()


def main() -> None:
    """Read a request from standard input, build the cache, and write pickled answers to standard output."""
    from tpucache.warmup.run.executors import ForkedWorkers

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries that print must not write between the answers
    is_over = threading.Event()
    engine = None
    try:
        workers = pickle.load(sys.stdin.buffer)  # noqa: S301  # from the process that has started this one
        if workers > 1:  # before this process has threads, and with the modules that workers need
            importlib.import_module("tpucache.warmup.run.tasks")
            engine = ForkedWorkers(workers, answers.close)
        data = pickle.load(sys.stdin.buffer)  # noqa: S301  # all of it, before the thread reads the same pipe
        threading.Thread(target=_end_with_parent, args=(is_over,), name="watch-parent", daemon=True).start()
        request = pickle.loads(data)  # noqa: S301
        source = request.source() if isinstance(request.source, functools.partial) else request.source
        others = {**request.others, "engine": engine}
        build_for_readers(source, request.cache, lambda known: _answer(answers, known), **others)
        is_over.set()
        _answer(answers, Finished())
    except BaseException as error:  # noqa: BLE001  # the reading process raises it
        is_over.set()
        known = error if isinstance(error, TpucacheError) else BuildError(f"{type(error).__name__}: {error}")
        _answer(answers, known)
        _end_workers()
        if engine is not None:
            engine.wait_for_end()
        raise SystemExit(1) from None


def build_for_readers(
    source: Any,
    cache: str | Path,
    tell: Callable[[Prospect], None],
    *,
    done: Callable[[], None] = lambda: None,
    **others: Any,
) -> Manifest:
    """Build a cache while other processes read it, and return its manifest."""
    from tpucache.warmup.build import build_cache

    prospects: list[Prospect] = []

    def tell_once(prospect: Prospect) -> None:
        if not prospects:
            prospects.append(prospect)
            tell(prospect)

    while True:
        try:
            manifest = build_cache(source, cache, on_prospect=tell_once, **others)
        except HeldError:  # the other process has finished the cache, or has ended early
            continue
        except TpucacheError as error:
            with contextlib.suppress(OSError):  # there is no work folder, or the disk is full
                (Path(cache) / WORK_NAME / FAILURE_NAME).write_text(str(error), encoding="utf-8")
            raise
        done()
        return manifest


def _answer(answers: BinaryIO, message: object) -> None:
    with contextlib.suppress(BrokenPipeError):  # the reading process has ended
        pickle.dump(message, answers)
        answers.flush()


def _end_workers() -> None:
    """Kill the workers."""
    for worker in multiprocessing.active_children():
        worker.kill()


def _end_with_parent(is_over: threading.Event) -> None:
    while os.read(0, 1):
        pass
    if not is_over.is_set():
        _end_workers()
        os._exit(1)  # as after a kill
