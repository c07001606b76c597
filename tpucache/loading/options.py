"""The options of every command that reads a cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from tpucache.machine import usable_cores
from tpucache.options import option

#: The default number of reading threads: half of the cores, from two to eight. Eight threads copy faster than any
#: accelerator needs; the other cores are left for uploads and the training loop.
THREADS: Final = min(8, max(2, usable_cores() // 2))


def threads_option() -> Any:
    """Return the dataclass field for the option `threads`: how many threads read the cache."""
    return option(THREADS, "threads that read the cache", metavar="N", minimum=1)


@dataclass(frozen=True)
class ReadingOptions:
    """The options for reading a cache."""

    threads: int = threads_option()
