"""Converts values to text for people. Names of files and classes may contain any character."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.units import duration_text

ELLIPSIS: Final = "\u2026"

_NAMED: Final = 4  # classes of a mask that a text names, at most


def cut(text: str, fits: Callable[[str], bool], *, keep_end: bool = False) -> str:
    """Return the longest beginning of a text (or end, with `keep_end`) that fits, with an ellipsis for the rest.

    `fits` says whether a text fits. If `fits` is True for a text, it must be True for every shorter text. If not even
    one character fits, only the ellipsis is left.
    """
    if fits(text):
        return text
    low, high = 0, len(text) - 1  # this many characters fit; at most that many can
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(_part(text, middle, keep_end)) else (low, middle - 1)
    return _part(text, low, keep_end)


def describe_label(label: npt.NDArray[Any] | None, classes: Sequence[str]) -> str:
    """Return a sample's label as text: its class, its classes with their weights, or its values.

    The text is "unlabelled" if `label` is None.
    """
    if label is None:
        return "unlabelled"
    if not label.ndim and label.dtype.kind != "f":
        return class_name(int(label), classes)
    values = [float(value) for value in label.reshape(-1)]
    if len(classes) != len(values):
        return ", ".join(f"{value:.4g}" for value in values)
    marked = [(name, value) for name, value in zip(classes, values, strict=True) if value > 0]
    return ", ".join(name if value == 1 else f"{name} {value:.2g}" for name, value in marked) or "none of the classes"


def describe_mask(mask: npt.NDArray[Any], classes: Sequence[str]) -> str:
    """Return the classes of a mask other than 0, the largest first, with their shares of the pixels, as text.

    At most four classes are named, and then the number of the others.
    """
    counts = np.bincount(mask.reshape(-1))
    found = [number for number in np.argsort(-counts, kind="stable").tolist() if number and counts[number]]
    parts = [f"{mask_class(number, classes)} {counts[number] / mask.size:.1%}" for number in found[:_NAMED]]
    rest = f" and {len(found) - _NAMED:,} more" if len(found) > _NAMED else ""
    return f"{', '.join(parts)}{rest}" if found else "nothing"


def mask_class(number: int, classes: Sequence[str]) -> str:
    """Return the name of a class of masks; `class` and its number if the class has no name."""
    return classes[number] if 0 <= number < len(classes) else f"class {number}"


def class_name(number: int, classes: Sequence[str]) -> str:
    """Return the name of a class; its number as text if the class has no name."""
    return classes[number] if 0 <= number < len(classes) else str(number)


def outline(value: Any, depth: int = 0) -> list[str]:
    """Return a JSON value as lines of text, with nested values indented. A list of plain values is one line.

    `depth` is the number of levels by which the first line is indented.
    """
    indent = "  " * depth
    if isinstance(value, Mapping) and value:
        items = [(f"{name}:", item) for name, item in value.items()]
    elif isinstance(value, list) and any(isinstance(item, (Mapping, list)) for item in value):
        items = [("-", item) for item in value]
    else:
        return [indent + json.dumps(value, ensure_ascii=False)]
    lines = []
    for head, item in items:
        below = outline(item, depth + 1)
        lines += [f"{indent}{head} {below[0].strip()}"] if len(below) == 1 else [f"{indent}{head}", *below]
    return lines


def count_text(count: int, noun: str) -> str:
    """Return a number with a noun, such as `1 shard` or `1,200 shards`; `noun` is in the singular."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def seconds_text(seconds: float) -> str:
    """Return a duration as text in suitable precision, such as `0.4 s`, `25 s` or `3 min 20 s`."""
    return f"{seconds:.1f} s" if seconds < 10 else duration_text(seconds)


def _part(text: str, length: int, keep_end: bool) -> str:
    if keep_end:
        return ELLIPSIS + text[len(text) - length :]
    return text[:length].rstrip() + ELLIPSIS
