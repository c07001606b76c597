"""ArchiveFiles: the files in one archive, or in all that a pattern matches."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from tpucache.errors import SampleError, SourceError
from tpucache.progress import Progress
from tpucache.store.files import open_regular
from tpucache.warmup.sources.archives.tars import list_tar, read_tar
from tpucache.warmup.sources.archives.zips import list_zip, read_zip
from tpucache.warmup.sources.base import Member
from tpucache.warmup.sources.patterns import find_files, has_wildcard, split_pattern

_ZIP: Final = ".zip"
#: What an archive is called. Compressed ones are named here so that they are refused by what they are.
_NAMES: Final = re.compile(r"\.(zip|tar|tgz|tbz2|txz|tar\.(gz|bz2|xz|zst))$", re.IGNORECASE)
#: What is read of one file at most. Whatever claims more, such as a zip bomb, is no photograph.
_LARGEST: Final = 1 << 30


@dataclass(frozen=True)
class ArchiveFiles:
    """The files below the folder `inside` ("": all) of the archives that a pattern below `root` matches."""

    root: Path
    pattern: str
    inside: str = ""

    def __str__(self) -> str:
        return str(self.root / self.pattern / self.inside)

    @property
    def is_several(self) -> bool:
        """Whether a pattern may match several archives, so that names begin with their archive's."""
        return has_wildcard(self.pattern) and not (self.root / self.pattern).is_file()

    def list(self) -> dict[str, Member]:
        """Return all files by name: archive by archive, in the order in which each has them.

        Names are relative to `inside`; those from several archives begin with the archive's path. Raises SourceError
        for an archive that is broken, has a name twice or one that leads out of it, or has nothing inside.
        """
        files: dict[str, Member] = {}
        with Progress(None, "list", "files", is_brief=True) as progress:
            for archive in find_files(self.root, self.pattern):
                files |= self._files_of(archive.as_posix(), progress.advance)
        if not files:
            raise SourceError(f"{self} holds no files")
        return files

    def _files_of(self, name: str, advance: Callable[[int], None]) -> dict[str, Member]:
        path = self.root / name
        _check_name(path)
        members = (list_zip if path.suffix.lower() == _ZIP else list_tar)(path, name, advance)
        prefix = f"{name}/" if self.is_several else ""
        plain = [_plain(member.name, path) for member in members]
        twice = [text for text, count in Counter(plain).items() if count > 1]
        if twice:
            raise SourceError(f"{path} has {twice[0]!r} more than once: make the archive anew, with each file once")
        start = f"{self.inside}/" if self.inside else ""
        return {
            prefix + text[len(start) :]: member
            for text, member in zip(plain, members, strict=True)
            if text.startswith(start)
        }

    def read(self, member: Member, path: str) -> bytes:
        """Return a file's content. Raises SampleError, with `path`, when it is not read as it was listed."""
        if member.bytes > _LARGEST:
            raise SampleError(
                path, f"has {member.bytes:,} bytes: of a file in an archive, at most {_LARGEST:,} are read"
            )
        archive = self.root / member.archive
        try:
            descriptor = open_regular(archive)
            try:
                return (read_zip if archive.suffix.lower() == _ZIP else read_tar)(descriptor, member, path)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise SampleError(path, f"cannot be read: {archive}: {error.strerror}") from error


def find_archive(source: str | Path) -> ArchiveFiles | None:
    """Return the archive files that a path means: `a.zip`, `a.zip/folder`, `'part-*.tar'`; None for any other path."""
    path = Path(source)
    for end in (path, *path.parents):
        if _NAMES.search(end.name) and (end.is_file() or (has_wildcard(str(end)) and not end.exists())):
            inside = PurePosixPath(path.relative_to(end)).as_posix()
            return ArchiveFiles(*split_pattern(end), "" if inside == "." else inside)
    return None


def _check_name(path: Path) -> None:
    if not _NAMES.search(path.name):
        raise SourceError(f"{path} is not called .zip or .tar: give a pattern of archives alone")


def _plain(name: str, path: Path) -> str:
    """Return an entry's name without `./` and a first slash. Raises SourceError where it leads out of the archive."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in name or not parts:
        raise SourceError(f"{path}: entry {name!r} leads out of the archive: it is damaged, or made to do harm")
    return "/".join(parts)
