"""Files that are complete or absent: written under another name, synced, renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hashlib import _Hash


def write_atomically(path: Path, data: bytes, aside: Path | None = None) -> None:
    """Write `data` to `path` so that the path holds either what it held before or all of `data`.

    `aside` is where the bytes are gathered first (default: beside `path`); it must be on the same filesystem.
    Raises OSError.
    """
    aside = aside or path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        rename_durably(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def rename_durably(source: Path, target: Path) -> None:
    """Rename a synced file and sync the directory that now names it."""
    source.replace(target)
    sync_directory(target.parent)


def link_or_copy(source: Path, target: Path, aside: Path) -> bool:
    """Give a file a second name in place of what has that name; return whether it is a hard link, and not a copy.

    A copy, where the filesystem has no links, is gathered in `aside` on the same filesystem. Raises OSError.
    """
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        try:
            shutil.copyfile(source, aside)
            sync_file(aside)
            rename_durably(aside, target)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        return False
    return True


def sync_file(path: Path) -> None:
    """Make what any process has written to a file survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_chunks(path: Path, chunks: Iterable[bytes], digest: _Hash) -> None:
    """Write bytes to the end of a file and into a digest, and sync the file; what came before an error stays."""
    with path.open("ab") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
        file.flush()
        os.fsync(file.fileno())
