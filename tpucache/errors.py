"""The errors that tpucache raises on purpose, as a tree.

TpucacheError
├── UsageError              an argument's value, or a call at this time, is not allowed (also a ValueError)
│   └── OutOfRangeError     an index outside of the samples (also an IndexError)
├── DependencyError         an optional library is missing or unfit (also an ImportError)
├── RecipeError             a recipe or an augmentation cannot be used, or differs from that of the unfinished cache
├── SourceError             a source of samples cannot be listed or read
│   └── SampleError         one sample of a source cannot be used: names the sample and the reason
├── StoreError              a cache cannot be read or written
│   ├── NotACacheError      a folder has no manifest
│   ├── FormatError         a file of a cache has content that no version of tpucache writes
│   │   └── UnknownCodecError   a codec that neither tpucache nor an installed package has
│   └── DamageError         bytes differ from what the manifest states
├── BuildError              warmup could not finish; the finished part is kept
│   └── NoRoomError         the disk is full
├── TrainingError           training or evaluation could not continue
├── PublishError            a cache could not be published, or did not arrive whole
└── UnfinishedError         a time limit was reached: run the same command again to continue

Every message says what happened, where, and what to do about it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Final

HIDDEN: Final = "***"
# `Path` collapses the slashes of a URL, so that only one may be left.
_SCHEME: Final = r"\b([A-Za-z][A-Za-z0-9+.-]*:/{1,3})"
# The part before an @: up to the first slash, or beyond it if a password contains one (a port never does).
USER: Final = re.compile(_SCHEME + r"(?P<user>[^\s/?#]*@|[^\s/:@]*:(?!:|\d+(?:/|$))[^\s@]*@)")
_QUERY: Final = re.compile(_SCHEME + r"([^\s?#'\"<>]*)[?#][^\s'\"<>]+")


def redact(text: str, secrets: Sequence[str] = ()) -> str:
    """Return a text without the user, password and query of URLs, and with `***` in place of each of the secrets."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return _QUERY.sub(rf"\1\2?{HIDDEN}", USER.sub(r"\1", text))


class TpucacheError(Exception):
    """The root of every error that tpucache raises on purpose. Its text shows no secret of a URL."""

    def __str__(self) -> str:
        return redact(super().__str__())


class UsageError(TpucacheError, ValueError):
    """The value of an argument, or a call at this time, is not allowed."""


class OutOfRangeError(UsageError, IndexError):
    """An index is outside of the samples. It is also an IndexError, which ends Python's iteration over a sequence."""


class DependencyError(TpucacheError, ImportError):
    """An optional library is missing, or its version cannot be used."""


class RecipeError(TpucacheError):
    """A recipe has a value that cannot be used, or differs from the recipe with which the cache was begun."""


class SourceError(TpucacheError):
    """A source of samples cannot be listed or read."""


class SampleError(SourceError):
    """One sample cannot be used: `path` names the sample, and `reason` says why.

    `file` is the path on this machine where the sample's file was looked for. It is not part of `reason`, because
    caches store the reasons of skipped samples.
    """

    def __init__(self, path: str, reason: str, file: str = "") -> None:
        reason = " ".join(reason.split("\n")).strip()  # errors of libraries may have several lines
        super().__init__(path, reason, file)
        self.path = path
        self.reason = reason
        self.file = file

    def __str__(self) -> str:
        return redact(f"{self.path!r}: {self.reason}" + (f" (looked for {self.file})" if self.file else ""))


class StoreError(TpucacheError):
    """A cache cannot be read or written."""


class NotACacheError(StoreError):
    """A folder has no manifest, so it is not a cache, or the cache is not finished."""


class FormatError(StoreError):
    """A file of a cache has content that no version of tpucache writes."""


class UnknownCodecError(FormatError):
    """A field is stored in a codec that neither tpucache nor an installed package has."""


class DamageError(StoreError):
    """Bytes on disk differ from what the manifest or the index states."""


class BuildError(TpucacheError):
    """Warmup could not finish."""


class NoRoomError(BuildError):
    """The disk is full."""


class TrainingError(TpucacheError):
    """Training or evaluation could not continue."""


class PublishError(TpucacheError):
    """A cache could not be published, or did not arrive as it was sent."""


class UnfinishedError(TpucacheError):
    """Warmup or training stopped at its time limit. The finished part is kept, and the next run continues."""


@contextlib.contextmanager
def calling(
    library: str, kind: type[TpucacheError] = DependencyError, advice: str = "Install another version of this library"
) -> Iterator[None]:
    """Return a context that replaces an exception of the `with` block by an error of the class `kind`.

    The error's message is one line: the name `library`, the exception's type and text, and `advice`, which says what to
    do. Errors of tpucache and MemoryError are raised unchanged.
    """
    try:
        yield
    except (TpucacheError, MemoryError):
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        raise kind(f"{library} raised {type(error).__name__}{': ' if text else ''}{text}. {advice}") from error
