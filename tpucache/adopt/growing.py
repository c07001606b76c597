"""open_or_build: a cache that another process builds while this one reads it.

Only the last line of `open_or_build` imports torch.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, cast

from tpucache.errors import BuildError
from tpucache.loading.reading.record_reader import InMemory
from tpucache.machine import usable_cores
from tpucache.native import native
from tpucache.recipe import Recipe
from tpucache.store.cache import Cache
from tpucache.store.files import check_is_local
from tpucache.store.format import MANIFEST_NAME
from tpucache.store.growing import GrowingCache, Prospect
from tpucache.warmup.build_options import BuildOptions, options_by_name

if TYPE_CHECKING:
    from tpucache.loading.dataset import CachedDataset
    from tpucache.warmup.sources.source import Items, Source

#: The cache of a data set with fewer samples is built before it is read: that is faster than starting workers.
LEAST_GROWING: Final = 256

_END_SECONDS: Final = 5.0
#: The variables that limit the threads of libraries for arithmetic, as joblib sets them for its workers.
_THREADS: Final = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMBA_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


@dataclass(frozen=True, kw_only=True)
class GrowingOptions(BuildOptions):
    """The options of a build, and the argument `in_memory` of CachedDataset."""

    in_memory: InMemory = "auto"


@options_by_name(GrowingOptions)
def open_or_build(
    source: str | Path | Source | Items, cache: str | Path, recipe: Recipe | None = None, *, options: GrowingOptions
) -> CachedDataset:
    """Open the cache of a source. Records that are missing are built while the cache is read.

    The call returns once the source is listed. Another process builds the cache with `jobs` workers (default: all
    cores), in the order in which loaders read. A reader waits for a record that is not built yet, so batches are the
    same as from a finished cache. In the end the folder has the same files as after `build_cache`. If this process ends
    early, the finished records are kept, and the next call continues. Several processes may open the same cache: one of
    them builds it, and another one continues the build if the first one ends. `in_memory` is that of CachedDataset; all
    other arguments are those of `build_cache`.

    The statistics that normalise images, the digest in a loader's state, and columns that only decoding gives are known
    after the build: reading them waits until the cache is finished. The call itself waits for the whole cache if the
    number of samples or their labels are not known earlier: with `on_error="skip"`, if labels are stored inside the
    samples, and if samples are added to a finished cache.

    Raises the errors of `build_cache`, in this call or in the loader that waits; UsageError for a cache at a URL.
    """
    check_is_local(cache)
    directory = Path(cache).absolute()
    others: dict[str, Any] = {"recipe": recipe, **vars(options)}
    in_memory = others.pop("in_memory")
    started: BuildProcess | None = None
    if (directory / MANIFEST_NAME).exists():
        from tpucache.warmup.build import build_cache

        build_cache(source, directory, **others)
    else:
        started = BuildProcess(source, directory, others)
    # Importing this imports torch, which takes a second or two: the other process builds meanwhile.
    from tpucache.loading.dataset import CachedDataset

    dataset = CachedDataset(directory if started is None else started.open(), in_memory=in_memory)
    dataset.cache.may_be_growing = True
    return dataset


class BuildProcess:
    """A process that builds a cache. The process ends when this object is garbage collected."""

    def __init__(self, source: Any, directory: Path, others: Mapping[str, Any]) -> None:
        """Start the process. `source` and `others` are the arguments of `build_cache`.

        `source` may also be a `functools.partial` that makes this argument.
        """
        from tpucache.warmup.growing import COMMAND, Request, send_request

        self._directory = directory
        self._last: object = None  # the last answer: how the build has ended
        self._owner = os.getpid()
        self._lock = threading.Lock()
        pipe, warnings = subprocess.PIPE, os.environ.get("PYTHONWARNINGS", "")
        # loky's resource tracker warns when it removes the shared memory of a process that was ended on purpose.
        environment = {
            **dict.fromkeys(_THREADS, str(max(1, usable_cores() // (others.get("jobs") or usable_cores())))),
            **os.environ,
            "PYTHONWARNINGS": f"{warnings},ignore:resource_tracker:UserWarning".strip(","),
        }
        # -P: modules are those of this process, and not files of the working folder with the same names.
        # The builder gets a session of its own, so that Ctrl-C reaches only this process, which then ends the builder.
        self._process = subprocess.Popen(  # noqa: S603  # it is this interpreter
            [sys.executable, "-P", "-c", COMMAND, *sys.path],
            stdin=pipe,
            stdout=pipe,
            env=environment,
            start_new_session=os.name == "posix",
        )
        requests, self._answers = cast(BinaryIO, self._process.stdin), cast(BinaryIO, self._process.stdout)
        self._end = weakref.finalize(self, _end, self._process, (requests, self._answers), self._owner)
        try:
            send_request(requests, Request(source, str(directory), others), is_large=_is_large(source))
        except BrokenPipeError:
            pass  # the process has ended: `open` raises its error
        except BaseException:
            self._end()
            raise

    def open(self) -> Cache:
        """Open the cache once it can be read. Raises the errors of `build_cache`."""
        native()  # compile what reading needs while the other process starts; later it would slow the workers down
        answer = self._read()
        if isinstance(answer, Prospect):
            return GrowingCache(self._directory, answer, self.check)
        self._last = answer  # it was finished before, or it cannot be read while it is built
        self._process.wait()
        self.check()
        return Cache.open(self._directory)

    def check(self) -> bool:
        """Return whether the calling process is the one that started the build; a forked copy of it is not."""
        if os.getpid() != self._owner:
            return False
        with self._lock:
            if self._last is None and self._process.poll() is not None:
                self._last = self._read()
        if isinstance(self._last, BaseException):
            raise self._last
        return True

    def _read(self) -> object:
        try:
            return pickle.load(self._answers)  # noqa: S301  # from a process that this one started
        except (EOFError, pickle.UnpicklingError):
            return BuildError(
                f"the process that builds {self._directory} ended with status {self._process.wait()}. The records that "
                "it has finished are kept: run this again to continue"
            )


def _is_large(source: Any) -> bool:
    """Guess, before a source is listed, whether it has more than `LEAST_GROWING` samples.

    A `functools.partial` has, because its caller has counted them.
    """
    if isinstance(source, functools.partial):
        return True
    if isinstance(source, (str, Path)):
        files = (name for _, _, names in os.walk(source) for name in names)
        return next(itertools.islice(files, LEAST_GROWING, None), None) is not None
    return hasattr(source, "__len__") and len(source) > LEAST_GROWING


def _end(process: subprocess.Popen[bytes], streams: tuple[BinaryIO, BinaryIO], owner: int) -> None:
    """End the building process by closing its standard input; kill it if it does not end soon.

    Do nothing in a fork, whose process id is not `owner`: only the process that started the build may end it.
    """
    if os.getpid() != owner:
        return
    for stream in streams:
        with contextlib.suppress(OSError):
            stream.close()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
