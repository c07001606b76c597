"""Where notebooks mount data, and the caches in there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tpucache.errors import TpucacheError
from tpucache.loading.find import Search
from tpucache.machine import Space, measure_space
from tpucache.store.manifest import Manifest

USUAL: Final = ("/kaggle/input", "/kaggle/working", "/content")

_SECONDS: Final = 5.0  # for each folder: a mounted drive may hold more than anyone waits for


@dataclass(frozen=True)
class Mount:
    """A folder: its file system, whether it can be written to, and the caches in it as (path, samples)."""

    space: Space
    writable: bool
    caches: tuple[tuple[str, int], ...]


def look_into(folder: str | Path) -> Mount | None:
    """Look for caches in a folder, as `find_cache` does but not as long; None where there is no such folder."""
    space = measure_space(folder)
    if space is None:
        return None
    return Mount(space, os.access(folder, os.W_OK), tuple(sorted(_caches(Path(folder)))))


def _caches(root: Path) -> Iterator[tuple[str, int]]:
    for found in Search([root], _SECONDS).caches():
        with contextlib.suppress(TpucacheError):  # others call a file manifest.json, too
            yield str(found.path), Manifest.load(found.path).samples
