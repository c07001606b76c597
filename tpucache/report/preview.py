"""A contact sheet: samples down, variants across, each under its label and path."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tpucache.errors import TpucacheError, UsageError
from tpucache.report.draw import Colour, draw_record, draw_text
from tpucache.report.records import Records
from tpucache.report.text import describe_label
from tpucache.store.copying.folders import check_no_cache_file

if TYPE_CHECKING:
    from PIL import Image, ImageDraw

    from tpucache.loading.dataset import CachedDataset

SAMPLES: Final = 12
VARIANTS: Final = 6  # across, at most

_PAPER: Final = (250, 250, 250)
_INK: Final = (22, 24, 28)
_DIM: Final = (108, 113, 121)
_RULE: Final = (218, 221, 226)

_MARGIN: Final = 36
_GAP: Final = 4  # between the variants of a sample
_GUTTER: Final = 32  # between samples
_CAPTION: Final = 46
_MIN_WIDTH: Final = 380  # so that the heading has room
_WIDTH: Final = 1200  # samples are placed side by side up to it


def preview_cache(
    cache: str | Path | CachedDataset,
    samples: int = SAMPLES,
    *,
    seed: int = 0,
    class_name: str | None = None,
    variants: int = VARIANTS,
    side: int = 192,
) -> Image.Image:
    """Return a contact sheet of a cache's samples, drawn at random from each class in turn: the same for a seed.

    At most `samples` are shown, those of the class `class_name` alone if one is given, in at most `variants` of their
    variants, each `side` pixels on its longer side; masks, boxes and keypoints are drawn over them. A notebook shows
    the returned image by itself.

    Raises UsageError when there is nothing to show, NotACacheError, FormatError or DamageError for the cache,
    DependencyError without Pillow or the records' decoder.
    """
    records = Records(cache)
    chosen = records.choose(samples, seed, class_name)
    if records.image is None:
        names = ", ".join(field.name for field in records.manifest.fields)
        raise UsageError(f"{records.directory} holds no image to show, only the fields {names}")
    if not chosen:
        raise UsageError(f"{records.directory} holds no such samples: there is nothing to show")
    shown = records.manifest.variants[: max(1, variants)]
    return _Sheet(records, chosen, shown, side).draw()


def contact_sheet(cache: str | Path) -> bytes | None:
    """Return some samples of a cache, variants across, as a PNG; None where records hold no images.

    Raises DependencyError without Pillow, and what `preview_cache` raises for a damaged cache.
    """
    if Records(cache).image is None:
        return None
    target = io.BytesIO()
    preview_cache(cache, side=128).save(target, "PNG")
    return target.getvalue()


def save_picture(picture: Image.Image, path: str | Path) -> Path:
    """Write a picture in the format of its path's ending, and return the path.

    Raises UsageError for an ending that names no kind of picture and for a file of a cache, TpucacheError when it
    cannot be written.
    """
    path = Path(path)
    check_no_cache_file(path)
    try:
        picture.save(path)
    except ValueError as error:
        raise UsageError(f"{path.name!r} does not end as a picture does: try .png, .jpg or .webp") from error
    except OSError as error:
        raise TpucacheError(f"the picture cannot be written: {error}. Give another path") from error
    return path


def variant_name(variant: int) -> str:
    """Return what a variant is called: `clean`, or its number."""
    return f"variant {variant}" if variant else "clean"


def headline(records: Records, shown: Sequence[int]) -> str:
    """Return what a cache is in one line, and how many of its variants are shown."""
    manifest, image = records.manifest, records.image
    parts = [f"{manifest.samples:,} samples"]
    if manifest.classes:
        parts.append(f"{len(manifest.classes):,} classes")
    several = len(manifest.variants)
    parts.append(f"{len(shown)} of {several} variants" if len(shown) < several else f"{several} variants")
    if several == 1:
        parts.pop()
    if image is not None:
        parts.append(f"{image.shape[1]}x{image.shape[0]}, {image.codec}")
    return "  \u00b7  ".join(parts)


class _Sheet:
    """The layout of a contact sheet, in pixels, and its drawing."""

    def __init__(self, records: Records, chosen: Sequence[int], variants: Sequence[int], side: int) -> None:
        if records.image is None:
            raise UsageError(f"{records.directory} holds no image to show")
        height, width = records.image.shape[:2]
        scale = side / max(height, width)
        self.records, self.chosen, self.variants, self.side = records, chosen, variants, side
        self.cell = (max(1, round(width * scale)), max(1, round(height * scale)))
        self.strip = len(variants) * (self.cell[0] + _GAP) - _GAP
        fitting = (_WIDTH + _GUTTER) // (self.strip + _GUTTER)
        even = math.ceil(math.sqrt(len(chosen))) if len(variants) == 1 else len(chosen)
        self.across = max(1, min(fitting, len(chosen), max(even, 3)))
        self.down = math.ceil(len(chosen) / self.across)
        self.top = 96 if len(variants) == 1 else 122

    def draw(self) -> Image.Image:
        """Return the whole sheet."""
        from PIL import Image, ImageDraw

        inner = max(_MIN_WIDTH, self.across * (self.strip + _GUTTER) - _GUTTER)
        height = self.top + self.down * (_CAPTION + self.cell[1] + _GUTTER) - _GUTTER + _MARGIN
        sheet = Image.new("RGB", (inner + 2 * _MARGIN, height), _PAPER)
        draw = ImageDraw.Draw(sheet)
        _write(draw, (_MARGIN, 52), self.records.name, 26, _INK, inner)
        _write(draw, (_MARGIN, 76), headline(self.records, self.variants), 13, _DIM, inner)
        for column in range(self.across if len(self.variants) > 1 else 0):
            self._head(draw, _MARGIN + column * (self.strip + _GUTTER))
        for turn, position in enumerate(self.chosen):
            row, column = divmod(turn, self.across)
            left = _MARGIN + column * (self.strip + _GUTTER)
            self._sample(sheet, draw, position, (left, self.top + row * (_CAPTION + self.cell[1] + _GUTTER)))
        return sheet

    def _head(self, draw: ImageDraw.ImageDraw, left: int) -> None:
        for turn, variant in enumerate(self.variants):
            _write(draw, (left + turn * (self.cell[0] + _GAP), 114), variant_name(variant), 12, _DIM, self.cell[0])
        draw.line((left, 122, left + self.strip - 1, 122), _RULE)

    def _sample(self, sheet: Image.Image, draw: ImageDraw.ImageDraw, position: int, at: tuple[int, int]) -> None:
        left, top = at
        classes = self.records.manifest.classes
        label = describe_label(self.records.label(position), classes)
        _write(draw, (left, top + 24), label, 15, _INK, self.strip)
        _write(draw, (left, top + 40), self.records.table.paths[position], 11, _DIM, self.strip, keep_end=True)
        for turn, variant in enumerate(self.variants):
            picture = draw_record(self.records.read(position, variant), classes, self.side)
            sheet.paste(picture, (left + turn * (self.cell[0] + _GAP), top + _CAPTION))


def _write(
    draw: ImageDraw.ImageDraw,
    at: tuple[float, float],
    text: str,
    size: int,
    fill: Colour,
    width: float,
    keep_end: bool = False,
) -> None:
    """Write a line on its base line."""
    draw_text(draw, at, text, size, fill, width, keep_end=keep_end, anchor="ls")
