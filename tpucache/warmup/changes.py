"""The one rule for a source that changed: compares its samples with those that a cache was made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from tpucache.errors import SourceError
from tpucache.text import named
from tpucache.warmup.sources.columns import to_number

#: The value of a sample that has no label, or no such column.
NOTHING: Final = "(none)"


@dataclass(frozen=True)
class Changes:
    """How the samples of a source differ from those that a cache was made of.

    `gone`, `new` and `changed` have a text for each such sample, by path. `changed` are those of which `what`, such as
    the size, differs.
    """

    what: str
    gone: Mapping[str, str]
    new: Mapping[str, str]
    changed: Mapping[str, str]

    @property
    def answer(self) -> Literal["same", "more", "fewer", "changed"]:
        """Whether it still is the source of the cache. It is "fewer" also if other samples are new."""
        if self.changed:
            return "changed"
        if self.gone:
            return "fewer"
        return "more" if self.new else "same"

    def __str__(self) -> str:
        """Return what differs, such as `1 gone: 'a.png'`; "" for the same source."""
        kinds = {"gone": self.gone, "new": self.new, f"samples have another {self.what}": self.changed}
        return "; ".join(f"{len(each):,} {kind}: {named(each.values())}" for kind, each in kinds.items() if each)

    def refuse(self, cache: Path) -> None:
        """Raise SourceError unless the source is the same, or only has more samples."""
        if self.answer in ("fewer", "changed"):
            raise SourceError(
                f"the source is not that of {cache} any more: {self}. Give the same options and the source as it was, "
                "or another folder to build anew. `tpucache relabel` changes labels, folds and other columns of a "
                f"cache, and `tpucache delete {cache} --paths FILE` deletes samples"
            )


def compare(what: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> Changes:
    """Compare values of samples, by path: those with which a cache was made, and those now. None is not known."""
    return Changes(
        what,
        gone={path: repr(path) for path in before if path not in now},
        new={path: repr(path) for path in now if path not in before},
        changed={
            path: f"{path!r}: {old!s:.80} before and {now[path]!s:.80} now"
            for path, old in before.items()
            if path in now and not _is_same(old, now[path])
        },
    )


def _is_same(old: Any, new: Any) -> bool:
    if old is None or new is None or old == new or str(old) == str(new):
        return True
    number, are_texts = to_number(str(old)), isinstance(old, str) and isinstance(new, str)
    return not are_texts and number is not None and number == to_number(str(new))


def label_text(label: Any, classes: Sequence[str]) -> str:
    """Return a text that is the same for equal labels, with the names of their classes."""
    if label is None:
        return NOTHING
    if isinstance(label, int):
        return classes[label] if label < len(classes) else str(label)  # classes without names are named by number
    if isinstance(label, str) or any(isinstance(part, str) for part in label):
        return str(label)
    values = np.asarray(label, np.float32).tolist()
    if len(classes) == len(values):
        return str(sorted(pair for pair in zip(classes, values, strict=True) if pair[1]))
    return str(values)
