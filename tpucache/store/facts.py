"""Findings: images and classes that a person should look at before training, found in the samples table alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.store.cache import Cache
from tpucache.store.fields import IMAGE
from tpucache.store.samples import HEIGHT, MEAN, NO_LABEL, STD, TURNED, TYPE, WIDTH, Strings
from tpucache.text import named, printable

Positions = npt.NDArray[np.int64]

#: The usual number of folds: a class with fewer samples cannot be in every fold.
USUAL_FOLDS: Final = 5
_BLANK_STD: Final = 2.0  # below this standard deviation of the pixels (0 to 255), an image is called blank
_LONG: Final = 4.0  # from this ratio of the longer to the shorter side, an image is called long
_UNEQUAL: Final = 10.0  # from this ratio of the largest to the smallest class, classes are called unequal
_NAMED: Final = 5

#: The file types that each suffix allows.
_TYPES: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys((".jpg", ".jpeg", ".jpe", ".jfif"), ("jpeg", "mpo")),
    ".png": ("png",),
    ".webp": ("webp",),
    ".gif": ("gif",),
    ".bmp": ("bmp", "dib"),
    **dict.fromkeys((".tif", ".tiff"), ("tiff",)),
    **dict.fromkeys((".heic", ".heif", ".hif"), ("heif", "avif")),
    ".avif": ("avif", "heif"),
    ".dcm": ("dicom",),
}
#: What is unusual about the images of each finding.
IMAGE_TEXTS: Final[Mapping[str, str]] = {
    "blank": "with next to no contrast",
    "tiny": "whose shorter side is shorter than in the cache",
    "long": f"at least {_LONG:.0f} times as long as wide",
    "suffix": "of another file type than the suffix says",
    "turned": "that EXIF turns",
}


@dataclass(frozen=True)
class Findings:
    """Images and classes of a cache that a person should look at before training.

    `images` has the positions of samples (int64) by the name of the finding: `blank` (almost no contrast), `tiny` (the
    source's shorter side is below that of the stored images), `long` (one side is at least 4 times the other), `suffix`
    (another file type than the suffix says) and `turned` (by EXIF); one is left out if its columns are missing.
    `extremes` has at most five positions each of the `darkest`, `brightest` and `faintest` samples, `classes` lines of
    text, and `paths` the path of every sample.
    """

    images: Mapping[str, Positions]
    extremes: Mapping[str, Positions]
    classes: Sequence[str]
    paths: Strings

    def to_dict(self) -> dict[str, Any]:
        """Return the findings as JSON values, with the paths of the first five samples of each finding."""
        return {
            "images": {name: {"samples": len(at), "paths": self._some(at)} for name, at in self.images.items()},
            "extremes": {name: self._some(at) for name, at in self.extremes.items()},
            "classes": list(self.classes),
        }

    def lines(self) -> list[str]:
        """Return the findings as lines of text."""
        found = {name: at for name, at in self.images.items() if len(at)}
        texts = [f"{len(at):,} images {IMAGE_TEXTS[name]}, such as {self._some(at)[0]!r}" for name, at in found.items()]
        return [*texts, *self.classes]

    def _some(self, positions: Positions) -> list[str]:
        return [self.paths[at] for at in positions[:_NAMED].tolist()]


def findings(cache: Cache) -> Findings:
    table, image = cache.samples, cache.manifest.fields[0]
    width, height, turned, mean, std = (_numbers(cache, name) for name in (WIDTH, HEIGHT, TURNED, MEAN, STD))
    images: dict[str, Positions] = {}
    if std is not None and image.dtype == "|u1":
        images["blank"] = np.flatnonzero(std < _BLANK_STD)
    if width is not None and height is not None and image.name == IMAGE:
        shorter, longer = np.minimum(width, height), np.maximum(width, height)
        images["tiny"] = np.flatnonzero(shorter < min(image.shape[:2]))
        images["long"] = np.flatnonzero(longer >= _LONG * shorter)
    types = table.get(TYPE)
    if isinstance(types, Strings):
        is_wrong = [_contradicts_suffix(path, kind) for path, kind in zip(table.paths, types, strict=True)]
        images["suffix"] = np.flatnonzero(is_wrong)
    if turned is not None:
        images["turned"] = np.flatnonzero(turned > 0)
    extremes: dict[str, Positions] = {}
    if mean is not None and std is not None:
        for name, values in (("darkest", mean), ("brightest", -mean), ("faintest", std)):
            present = np.flatnonzero(~np.isnan(values))
            extremes[name] = present[np.argsort(values[present], kind="stable")][:_NAMED]
    return Findings(images, extremes, _class_findings(cache), table.paths)


def _numbers(cache: Cache, name: str) -> npt.NDArray[np.float64] | None:
    """Return a column as float64 (samples,), with NaN for missing values."""
    column = cache.samples.get(name)
    if not isinstance(column, np.ndarray) or column.ndim != 1:
        return None
    return column.astype(np.float64)


def _contradicts_suffix(path: str, kind: str) -> bool:
    expected = _TYPES.get(PurePosixPath(path.partition("#")[0]).suffix.lower())
    return kind not in ("", "array") and expected is not None and kind not in expected


def _class_findings(cache: Cache) -> list[str]:
    labels, classes = cache.samples.labels, cache.manifest.classes
    if labels is None or not classes:
        return []
    counts = (labels > 0).sum(0) if labels.ndim > 1 else np.bincount(labels[labels > NO_LABEL], minlength=len(classes))
    lines = []
    few = np.flatnonzero(counts < USUAL_FOLDS)
    if len(few):
        texts = named(f"{printable(classes[at])} {counts[at]:,}" for at in few.tolist())
        lines.append(f"{len(few):,} classes with fewer samples than {USUAL_FOLDS} folds: {texts}")
    most, least = int(counts.argmax()), int(np.where(counts > 0, counts, counts.max()).argmin())
    if counts[most] >= _UNEQUAL * max(1, counts[least]):
        lines.append(
            f"unequal classes: {printable(classes[most])} has {counts[most]:,} samples, {printable(classes[least])} "
            f"{counts[least]:,} (`train --balance` shows each class equally often)"
        )
    without = int((labels == NO_LABEL).sum()) if labels.ndim == 1 else int((~(labels > 0).any(1)).sum())
    if without:
        lines.append(f"{without:,} samples without a {'label' if labels.ndim == 1 else 'class'}")
    return lines
