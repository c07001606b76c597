"""Where notebooks mount data, and the caches in there."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tpucache.errors import TpucacheError
from tpucache.machine import Space, measure_space
from tpucache.store.manifest import Manifest

USUAL: Final = ("/kaggle/input", "/kaggle/working", "/content")

# /kaggle/input/datasets/OWNER/SLUG/FOLDER is the deepest that is usual; folders of photographs lie there, too.
_DEPTH: Final = 5
_ENTRIES: Final = 20_000


@dataclass(frozen=True)
class Mount:
    """A folder: its file system, whether it can be written to, and the caches in it as (path, samples)."""

    space: Space
    writable: bool
    caches: tuple[tuple[str, int], ...]


def look_into(folder: Path) -> Mount | None:
    """Look for caches in a folder, five deep and through 20,000 names at most; None where there is no such folder."""
    space = measure_space(folder)
    if space is None:
        return None
    return Mount(space, os.access(folder, os.W_OK), tuple(_caches(folder)))


def _caches(root: Path) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    waiting = deque([(root, 0)])
    left = _ENTRIES
    while waiting and left > 0:
        folder, depth = waiting.popleft()
        try:
            found.append((str(folder), Manifest.load(folder).samples))
            continue
        except TpucacheError:  # no cache, or a file of another kind called like its manifest
            pass
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    left -= 1
                    if left <= 0:
                        break
                    if depth < _DEPTH and not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                        waiting.append((Path(entry.path), depth + 1))
        except OSError:  # not for us to read
            continue
    return sorted(found)
