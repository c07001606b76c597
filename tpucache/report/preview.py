"""Contact sheets: a row for each sample and a column for each variant, each sample under its label and path."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tpucache.errors import TpucacheError, UsageError, calling
from tpucache.report.draw import Cell, Layout, draw_record, draw_sheet, fitted_size
from tpucache.report.records import Records
from tpucache.report.text import describe_label
from tpucache.store.copying import check_no_cache_file

if TYPE_CHECKING:
    from PIL import Image

    from tpucache.loading.dataset import CachedDataset

SAMPLES: Final = 12
VARIANTS: Final = 6  # across, at most


def preview_cache(
    cache: str | Path | CachedDataset,
    samples: int = SAMPLES,
    *,
    seed: int = 0,
    class_name: str | None = None,
    variants: int = VARIANTS,
    side: int = 192,
) -> Image.Image:
    """Return a contact sheet of a cache's samples, drawn at random from each class in turn; `seed` fixes the choice.

    The sheet shows at most `samples` samples, only of the class `class_name` if that is given, and at most `variants`
    variants of each sample. The longer side of each picture has `side` pixels; masks, boxes and keypoints are drawn
    over it. A notebook shows the returned image by itself.

    Raises UsageError when there is nothing to show, NotACacheError, FormatError or DamageError for the cache, and
    DependencyError without Pillow or the records' decoder.
    """
    records = Records(cache)
    chosen = records.choose(samples, seed, class_name)
    if records.image is None:
        names = ", ".join(field.name for field in records.manifest.fields)
        raise UsageError(f"{records.directory} holds no image to show, only the fields {names}: give a cache of images")
    if not chosen:
        raise UsageError(f"no sample of {records.directory} is chosen: ask for at least one sample, or another class")
    shown = records.manifest.variants[: max(1, variants)]
    classes, size = records.manifest.classes, fitted_size(records.image.shape, side)
    heads = [variant_name(variant) for variant in shown] if len(shown) > 1 else []
    cells = (
        Cell(
            describe_label(records.label(position), classes),
            records.table.paths[position],
            [draw_record(records.read(position, variant), classes, side) for variant in shown],
        )
        for position in chosen
    )
    return draw_sheet(Layout(len(chosen), len(shown), size), records.name, headline(records, shown), cells, heads)


def contact_sheet(cache: str | Path) -> bytes | None:
    """Return a contact sheet of a cache as a PNG; None if its records have no images.

    Raises DependencyError without Pillow, and the errors of `preview_cache` for a damaged cache.
    """
    if Records(cache).image is None:
        return None
    target = io.BytesIO()
    sheet = preview_cache(cache, side=128)
    with calling("Pillow"):
        sheet.save(target, "PNG")
    return target.getvalue()


@calling("Pillow")
def save_picture(picture: Image.Image, path: str | Path) -> Path:
    """Write a picture in the format that the suffix of `path` names, and return the path.

    Raises UsageError if no picture format has this suffix or the file belongs to a cache, and TpucacheError when the
    picture cannot be written.
    """
    path = Path(path)
    check_no_cache_file(path)
    try:
        picture.save(path)
    except ValueError as error:
        raise UsageError(
            f"the ending of {path.name!r} is that of no picture format: use .png, .jpg or .webp"
        ) from error
    except OSError as error:
        raise TpucacheError(f"the picture cannot be written: {error}. Give another path") from error
    return path


def variant_name(variant: int) -> str:
    """Return the name of a variant for people: `clean` for variant 0, else `variant` and its number."""
    return f"variant {variant}" if variant else "clean"


def headline(records: Records, shown: Sequence[int]) -> str:
    """Return one line about a cache: its samples, classes, variants, image size and codec.

    `shown` are the variants that are shown, which may be fewer than the cache has.
    """
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
