"""Where samples come from: each source yields them in a stable order and loads one at a time."""

from __future__ import annotations

from pathlib import Path

from tpucache.errors import SourceError
from tpucache.warmup.sources.base import Sample, Source
from tpucache.warmup.sources.folder import FolderSource

__all__ = ["FolderSource", "Sample", "Source", "open_source"]


def open_source(source: str | Path) -> Source:
    """Return the source that a path or name stands for. Raises SourceError when it stands for none."""
    path = Path(source)
    if path.is_dir():
        return FolderSource(path)
    if path.exists():
        raise SourceError(f"{path} is a file: give a folder of images, with one subfolder a class or none")
    raise SourceError(f"{path} does not exist: give a folder of images")
