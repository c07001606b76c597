"""The process that builds a cache while another one reads it: what it is asked for, and what it says.

It is a process of its own because that which reads has threads, and must not be forked. It ends with the process that
has started it: what is made by then is kept, as after any other kill.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from tpucache.errors import BuildError, TpucacheError
from tpucache.store.growing import Prospect
from tpucache.store.manifest import Manifest
from tpucache.warmup.run.folder import HeldError

#: What the process is started with.
COMMAND: Final = "from tpucache.warmup.growing import main; main()"


@dataclass(frozen=True)
class Request:
    """Arguments of `build_cache`: the source, the folder, and all others by their names."""

    source: Any
    cache: str
    others: Mapping[str, Any]


@dataclass(frozen=True)
class Finished:
    """The cache is finished."""


def send_request(target: BinaryIO, request: Request) -> None:
    """Write a request for `main` to read. Raises BuildError for a source that cannot be sent, OSError."""
    from tpucache.warmup.run.executors import to_pickle

    try:
        data = to_pickle(request)
    except Exception as error:  # of whatever the source refers to
        raise BuildError(
            f"the source cannot be sent to the process that builds: {error}. Keep paths in it, not open files or "
            "locks, or build the cache first, with build_cache"
        ) from error
    pickle.dump(sys.path, target)
    pickle.dump(data, target)
    target.flush()


def main() -> None:
    """Build what standard input asks for, and write to standard output what is known of it, and how it ends.

    That is a Prospect, where the cache can be read while it is built, and then a Finished or an exception, pickled.
    """
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    sys.path[:] = pickle.load(sys.stdin.buffer)  # noqa: S301  # of the process that has started this one
    request = pickle.loads(pickle.load(sys.stdin.buffer))  # noqa: S301
    is_over = threading.Event()
    threading.Thread(target=_end_with_parent, args=(is_over,), name="watch-parent", daemon=True).start()
    try:
        build_for_readers(request.source, request.cache, lambda known: _answer(answers, known), **request.others)
        is_over.set()
        _answer(answers, Finished())
    except BaseException as error:  # noqa: BLE001  # whoever reads raises it
        is_over.set()
        known = error if isinstance(error, TpucacheError) else BuildError(f"{type(error).__name__}: {error}")
        _answer(answers, known)
        raise SystemExit(1) from None


def build_for_readers(source: Any, cache: str | Path, tell: Callable[[Prospect], None], **others: Any) -> Manifest:
    """Build a cache that others read meanwhile, or wait while another process does, and take over where that ends.

    `tell` is given what is known of the cache, once. The arguments and errors are those of `build_cache`.
    """
    from tpucache.warmup.build import build_cache

    prospects: list[Prospect] = []

    def tell_once(prospect: Prospect) -> None:
        if not prospects:
            prospects.append(prospect)
            tell(prospect)

    while True:
        with contextlib.suppress(HeldError):  # another process has built it, or has ended before it was done
            return build_cache(source, cache, on_prospect=tell_once, **others)


def _answer(answers: BinaryIO, message: object) -> None:
    pickle.dump(message, answers)
    answers.flush()


def _end_with_parent(is_over: threading.Event) -> None:
    """End this process when the one that has started it ends, or needs it no more."""
    while os.read(0, 1):
        pass
    if not is_over.is_set():
        os._exit(1)  # workers notice, as after a kill
