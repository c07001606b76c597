"""Everything tpucache raises on purpose, in one tree.

TpucacheError
├── UsageError              an argument with a value that is not allowed (also a ValueError)
│   └── OutOfRangeError     an index outside of the samples (also an IndexError)
├── DependencyError         an optional library is missing or unfit (also an ImportError)
├── RecipeError             a recipe or an augmentation that cannot be built, or one that changed
├── SourceError             a source that cannot be read as asked
│   └── SampleError         one sample of it that cannot be used: names the sample and the reason
├── StoreError              a cache that cannot be read or written
│   ├── NotACacheError      there is no manifest
│   ├── FormatError         a file of a cache holds what no version of tpucache writes
│   │   └── UnknownCodecError   a codec that neither tpucache nor an installed package has
│   └── DamageError         bytes differ from what the manifest states
├── BuildError              warmup could not finish; what is finished stays usable
│   └── NoRoomError         the disk has no room for what it writes
├── TrainingError           training or evaluation could not continue
├── PublishError            a cache could not be published, or did not arrive whole
└── UnfinishedError         a time limit was reached: run the same command again to continue

Every message says what happened, where, and what to do about it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class TpucacheError(Exception):
    """The root: catch it to catch everything tpucache raises on purpose."""


class UsageError(TpucacheError, ValueError):
    """An argument has a value that is not allowed."""


class OutOfRangeError(UsageError, IndexError):
    """An index lies outside of the samples; also an IndexError, which ends Python's iteration over a sequence."""


class DependencyError(TpucacheError, ImportError):
    """An optional library is missing, or is not one that can be used."""


class RecipeError(TpucacheError):
    """A recipe cannot be built, or is not the one the cache was begun with."""


class SourceError(TpucacheError):
    """A source of samples cannot be read as asked."""


class SampleError(SourceError):
    """One sample cannot be used; `path` names it and `reason` says why.

    `file` is where its file was looked for on this machine, which is no part of the reason: caches keep reasons.
    """

    def __init__(self, path: str, reason: str, file: str = "") -> None:
        reason = " ".join(reason.split("\n")).strip()  # of libraries' errors, some have several lines
        super().__init__(path, reason, file)
        self.path = path
        self.reason = reason
        self.file = file

    def __str__(self) -> str:
        return f"{self.path!r}: {self.reason}" + (f" (looked for {self.file})" if self.file else "")


class StoreError(TpucacheError):
    """A cache cannot be read or written."""


class NotACacheError(StoreError):
    """A directory holds no manifest, so it is not a (finished) cache."""


class FormatError(StoreError):
    """A file of a cache holds something that no version of tpucache writes."""


class UnknownCodecError(FormatError):
    """A field is stored in a codec that neither tpucache nor an installed package has."""


class DamageError(StoreError):
    """Bytes on disk differ from what the manifest or the index states."""


class BuildError(TpucacheError):
    """Warmup could not finish."""


class NoRoomError(BuildError):
    """The disk has no room for what a warmup writes."""


class TrainingError(TpucacheError):
    """Training or evaluation could not continue."""


class PublishError(TpucacheError):
    """A cache could not be published, or did not arrive as it was sent."""


class UnfinishedError(TpucacheError):
    """Warmup or training stopped at its time limit, with all it did kept; the next run continues."""


@contextlib.contextmanager
def calling(library: str, kind: type[TpucacheError], advice: str) -> Iterator[None]:
    """Raise an error of `kind`, in one line, for whatever a library raises within: each has ways of its own to fail.

    Errors of tpucache's own and a lack of memory pass.
    """
    try:
        yield
    except (TpucacheError, MemoryError):
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        raise kind(f"{library} raised {type(error).__name__}{': ' if text else ''}{text}. {advice}") from error
