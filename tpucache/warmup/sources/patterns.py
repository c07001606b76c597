"""A path or a pattern with wildcards -> the files that it matches."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from tpucache.errors import SourceError

_WILDCARD: Final = re.compile(r"[*?[]")


def has_wildcard(text: str) -> bool:
    """Return whether a text is a pattern: it has one of the wildcards `*`, `**`, `?` and `[…]`."""
    return _WILDCARD.search(text) is not None


def split_pattern(pattern: str | Path) -> tuple[Path, str]:
    """Return the folder above the first wildcard, or above the file, and the rest of the pattern.

    Names of files relative to that folder do not change when files are added.
    """
    path = Path(pattern).absolute()
    wild = [number for number, part in enumerate(path.parts) if has_wildcard(part)]
    first = wild[0] if wild and not path.is_file() else len(path.parts) - 1
    return Path(*path.parts[:first]), os.path.join(*path.parts[first:])


def find_files(root: Path, pattern: str) -> list[Path]:
    """Return the files below a root that match, without hidden ones, in the order of their names' bytes.

    Their paths are relative to the root. Raises SourceError when there are none.
    """
    path = root / pattern
    found = [path] if path.is_file() else root.glob(pattern)
    names = [file.relative_to(root) for file in found if file.is_file() and not file.name.startswith(".")]
    if not names:
        raise SourceError(f"{path} matches no file")
    return sorted(names, key=lambda name: [os.fsencode(part) for part in name.parts])
