"""How a cache is read: the options of all commands that read one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from tpucache.options import option
from tpucache.system import usable_cores

#: Threads that read, unless another number is given: half of the cores, at least two and at most eight. Eight copy more
#: from memory than any accelerator takes, and the other cores have uploads and the loop to run.
THREADS: Final = min(8, max(2, usable_cores() // 2))


def threads_option() -> Any:
    """Return the field `threads` of a dataclass of options: the number of threads that read."""
    return option(THREADS, "threads that read the cache", metavar="N", minimum=1)


@dataclass(frozen=True)
class ReadingOptions:
    """How a cache is read, by number of threads."""

    threads: int = threads_option()
