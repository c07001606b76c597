"""The end of a command's process."""

from __future__ import annotations

import contextlib
import gc
import io
from typing import Final

_FILES: Final = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


def end_soon() -> None:
    """Let Python end without looking for cycles in all that there is, which takes seconds once torch is imported.

    What is still in open files is written, as it would be if they were found to be part of a cycle. To be called last.
    """
    for each in gc.get_objects():
        if type(each) in _FILES:
            with contextlib.suppress(OSError, ValueError):  # read-only, or closed
                each.flush()
    gc.freeze()
