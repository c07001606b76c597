"""Draws with Pillow: a record with its mask, boxes and keypoints over its image, and contact sheets of many records."""

from __future__ import annotations

import base64
import bisect
import functools
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import DependencyError, UsageError, calling
from tpucache.native import Array
from tpucache.report.page import (
    SAMPLES,
    VARIANTS,
    Picture,
    Records,
    Shown,
    class_name,
    describe_label,
    variant_name,
    write_file,
)
from tpucache.store.fields import BOXES, IMAGE, KEYPOINTS, LABEL, MASK
from tpucache.text import printable

try:
    from PIL import Image, ImageDraw, ImageFont
except ImportError as error:
    raise DependencyError(f"pictures are drawn by Pillow: {error}. `pip install 'pillow>=10.1'`") from error

if TYPE_CHECKING:
    from tpucache.loading.dataset import CachedDataset
    from tpucache.ondevice.settings import AugmentSettings

Colour = tuple[int, int, int]
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

#: Colours of mask values, box classes and keypoints, in turn. They differ from one another, and from skin, leaves, sky.
PALETTE: Final[tuple[Colour, ...]] = (
    (255, 77, 46),
    (0, 196, 180),
    (255, 196, 0),
    (104, 92, 255),
    (236, 72, 196),
    (124, 214, 40),
    (0, 164, 255),
    (255, 136, 164),
)
_OVERLAY: Final = 0.4  # the opacity of a mask's colour
_PIXELATED: Final = 3.0  # from this scale on, pixels are shown as squares
_PERCENTILES: Final = (1, 99)  # not the extremes: a few extreme pixels would turn all others black
_FONT: Final = "DejaVuSans.ttf"
_INK: Final = (20, 20, 22)
_WHITE: Final = (255, 255, 255)
_LETTERS: Final = 11  # the size of texts over a picture

#: Colours and distances of a sheet, in pixels.
_PAPER: Final = (250, 250, 250)
_DIM: Final = (108, 113, 121)
_MARGIN: Final = 36
_GAP: Final = 4  # between the pictures of a sample
_GUTTER: Final = 32  # between samples
_SMALL_TEXT: Final = 12
_MIN_WIDTH: Final = 380  # room for the heading
_WIDTH: Final = 1200  # samples are placed side by side up to this width

#: Pictures in pages. Screens with small pixels show this many of a picture's pixels for each one of the page.
_DENSE: Final = 2
_PLAIN_SIDE: Final = 128 * _DENSE
_DRAWN_SIDE: Final = 176 * _DENSE  # larger, so that text drawn over the picture can be read
_SMALL: Final = 64  # images with sides up to this many pixels are shown as squares
_QUALITY: Final = 85


@functools.cache
def _font(size: int) -> Font:
    """Return the system's DejaVu Sans, or else Pillow's own font, which has fewer characters."""
    try:
        return ImageFont.truetype(_FONT, size)
    except OSError:
        return ImageFont.load_default(size)


def _cut(text: str, font: Font, width: float) -> str:
    """Return a text on one line, without its middle if it is wider than `width`."""
    text = printable(text)

    def part(removed: int) -> str:
        kept = len(text) - removed
        return f"{text[: kept - kept // 2]}\u2026{text[len(text) - kept // 2 :]}"

    if font.getlength(text) <= width:
        return text
    return part(bisect.bisect_left(range(len(text)), -width, key=lambda removed: -font.getlength(part(removed))))


def _displayable(pixels: Array) -> npt.NDArray[np.uint8]:
    """Return an image (height, width, channels) of any dtype as uint8 (height, width, 1 or 3).

    Of two channels the first is shown, and of more than three the first three. Values other than 8 bits are scaled: the
    1st percentile becomes black, and the 99th white.
    """
    shown = pixels[..., : 3 if pixels.shape[2] >= 3 else 1]
    if shown.dtype == np.uint8:
        return shown
    low, high = np.percentile(shown, _PERCENTILES)
    scaled = (shown.astype(np.float64) - low) / max(float(high - low), np.finfo(np.float64).tiny)
    return np.asarray(np.rint(scaled.clip(0, 1) * 255), np.uint8)


@calling("Pillow")
def draw_record(fields: Mapping[str, Array], classes: Sequence[str], side: int, dense: int = 1) -> Image.Image:
    """Return a record's image with its mask, boxes and keypoints drawn over it; its longer side has `side` pixels.

    Lines and letters are `dense` times as large, for pictures that are shown smaller by this factor. `boxes` (n, 5) are
    left, top, right, bottom, class, and `keypoints` (n, 3) x, y, visible. Fields of other shapes are not drawn: data
    sets may use these names for other data.
    """
    pixels = _displayable(fields[IMAGE])
    height, width, channels = pixels.shape
    scale = side / max(height, width)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    image = Image.fromarray(pixels[..., 0] if channels == 1 else pixels).convert("RGB")
    image = image.resize(size, Image.Resampling.NEAREST if scale >= _PIXELATED else Image.Resampling.LANCZOS)
    mask = fields.get(MASK)
    if mask is not None and mask.shape == (height, width, 1) and mask.dtype.kind == "u":
        image = _with_mask(image, mask[..., 0])
    draw, ratio = ImageDraw.Draw(image), np.array([size[0] / width, size[1] / height])
    for _, box in _rows(fields, BOXES, 5):
        begin, end, number = box[:2] * ratio, box[2:4] * ratio - 1, int(box[4])
        if (box[2:4] > box[:2]).all():
            corners = *begin.round().tolist(), *np.maximum(begin, end).round().tolist()
            draw.rectangle(corners, outline=PALETTE[number % len(PALETTE)], width=2 * dense)
            has_room = begin[1] > 1.5 * _LETTERS * dense
            _write_over(image, begin.tolist(), class_name(number, classes), "ls" if has_room else "lt", dense)
    radius = 3 * dense
    for number, point in _rows(fields, KEYPOINTS, 3):
        if point[2] > 0:
            x, y = (point[:2] * ratio).tolist()
            draw.circle((x, y), radius, PALETTE[number % len(PALETTE)], _WHITE)
            _write_over(image, (x + radius + 2, y), str(number), "lm", dense)
    return image


def _rows(fields: Mapping[str, Array], name: str, columns: int) -> list[tuple[int, Array]]:
    found = fields.get(name)
    if found is None or found.dtype.kind != "f" or found.shape[1:] != (columns,):
        return []
    return [(number, row) for number, row in enumerate(found) if np.isfinite(row).all()]


def _with_mask(image: Image.Image, mask: Array) -> Image.Image:
    large = np.asarray(Image.fromarray(mask).resize(image.size, Image.Resampling.NEAREST)).astype(np.int64)
    colours = np.array(PALETTE, np.float32)[(large - 1) % len(PALETTE)]
    is_edge = np.any([np.roll(large, by, axis) != large for by in (1, -1) for axis in (0, 1)], axis=0)
    cover = (np.where(is_edge, 1.0, _OVERLAY) * (large > 0))[..., None]
    mixed = np.asarray(image, np.float32) * (1 - cover) + colours * cover
    return Image.fromarray(mixed.round().astype(np.uint8))


def _write_over(image: Image.Image, at: Sequence[float], text: str, anchor: str, dense: int) -> None:
    """Write a text so that it can be read over any picture; it begins further left if it would reach beyond it."""
    font = _font(_LETTERS * dense)
    text = _cut(text, font, image.width - 2)
    place = max(1, min(at[0], image.width - 1 - font.getlength(text))), at[1]
    ImageDraw.Draw(image).text(place, text, _WHITE, font, anchor, stroke_width=dense, stroke_fill=_INK)


@calling("Pillow")
def make_picture(fields: Mapping[str, Array], classes: Sequence[str], text: str, head: str = "") -> Picture:
    """Return a picture for a page: a record's image with its other fields drawn over it."""
    longest = max(fields[IMAGE].shape[:2])
    is_small = len(fields) == 1 and longest <= _SMALL
    side = longest if is_small else _PLAIN_SIDE if len(fields) == 1 else _DRAWN_SIDE
    kind, options = ("png", {}) if is_small else ("jpeg", {"quality": _QUALITY})
    drawn = draw_record(fields, classes, side, _DENSE)
    data = base64.b64encode(_encoded(drawn, kind, **options)).decode()
    return Picture(f"data:image/{kind};base64,{data}", drawn.width, drawn.height, text, head, is_small)


@calling("Pillow")
def draw_sheet(title: str, line: str, samples: Sequence[Shown], classes: Sequence[str], side: int) -> Image.Image:
    """Return a sheet of samples, the records of each side by side under its label and path."""
    tiles = []
    for sample in samples:
        strip = _side_by_side([draw_record(fields, classes, side) for fields in sample.records], _GAP)
        tiles.append(_below(sample.label, sample.path, strip, 15))
    fitting = (_WIDTH + _GUTTER) // (tiles[0].width + _GUTTER)
    even = max(3, math.ceil(math.sqrt(len(tiles)))) if len(samples[0].records) == 1 else len(tiles)
    return _below(title, line, _side_by_side(tiles, _GUTTER, max(1, min(fitting, even))), 26, _MARGIN)


def _side_by_side(images: Sequence[Image.Image], gap: int, columns: int = 1 << 20) -> Image.Image:
    width, height = (side + gap for side in images[0].size)
    columns = min(columns, len(images))
    laid = Image.new("RGB", (columns * width - gap, math.ceil(len(images) / columns) * height - gap), _PAPER)
    for number, image in enumerate(images):
        laid.paste(image, (number % columns * width, number // columns * height))
    return laid


def _below(title: str, line: str, image: Image.Image, size: int, margin: int = 0) -> Image.Image:
    top = margin + size + 2 * _SMALL_TEXT + margin // 2
    width = max(image.width, _MIN_WIDTH if margin else 0)
    whole = Image.new("RGB", (width + 2 * margin, top + image.height + margin), _PAPER)
    for text, letters, place, colour in (
        (title, size, margin + size, _INK),
        (line, _SMALL_TEXT, margin + size + 3 * _SMALL_TEXT // 2, _DIM),
    ):
        font = _font(letters)
        ImageDraw.Draw(whole).text((margin, place), _cut(text, font, width), colour, font, "ls")
    whole.paste(image, (margin, top))
    return whole


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
    image, manifest = records.need_image(), records.manifest
    chosen = records.choose(samples, seed, class_name)
    if not chosen:
        raise UsageError(f"no sample of {records.directory} is chosen: ask for at least one sample, or another class")
    shown = manifest.variants[: max(1, variants)]
    parts = [f"{manifest.samples:,} samples"]
    if manifest.classes:
        parts.append(f"{len(manifest.classes):,} classes")
    parts.append(f"{image.shape[1]}x{image.shape[0]}, {image.codec}")
    if len(manifest.variants) > 1:
        parts.append(f"{len(shown)} of {len(manifest.variants):,} variants: {', '.join(map(variant_name, shown))}")
    sampled = [records.show(position, shown) for position in chosen]
    return draw_sheet(records.name, "  \u00b7  ".join(parts), sampled, manifest.classes, side)


def contact_sheet(cache: str | Path) -> bytes | None:
    return None if Records(cache).image is None else _encoded(preview_cache(cache, side=128), "png")


def save_picture(picture: Image.Image, path: str | Path) -> Path:
    """Write a picture in the format that the suffix of `path` names. Raises UsageError or TpucacheError."""
    path = Path(path)
    try:
        data = _encoded(picture, Image.registered_extensions()[path.suffix.lower()])
    except KeyError as error:
        raise UsageError(
            f"the ending of {path.name!r} is that of no picture format: use .png, .jpg or .webp"
        ) from error
    write_file(path, data)
    return path


@calling("Pillow")
def _encoded(picture: Image.Image, kind: str, **options: int) -> bytes:
    target = io.BytesIO()
    picture.save(target, kind, **options)
    return target.getvalue()


# A batch as the model receives it in training: augmented on the device, with mixed labels.


def preview_batch(
    cache: str | Path | CachedDataset,
    augment: AugmentSettings | None = None,
    samples: int = SAMPLES,
    *,
    seed: int = 0,
    side: int = 192,
) -> Image.Image:
    """Return a sheet with the images of the first batch that training with the seed `seed` reads.

    Its images are augmented as on the device, and shown without normalisation, under the labels after augmentation. If
    `cache` is a path, and the cache has augmented variants, the batch shows these. Raises UsageError when there is
    nothing to show, and for augmentations that a CachedLoader refuses for this cache.
    """
    from tpucache.loading.dataset import CachedDataset
    from tpucache.loading.order import full_order
    from tpucache.ondevice.settings import AugmentSettings

    if isinstance(cache, (str, Path)):
        cache = CachedDataset(cache)
        cache = cache.in_variant("epoch") if cache.manifest.augmented else cache
    records, settings = Records(cache), augment or AugmentSettings()
    records.need_image()
    batch = cache[full_order(len(cache), seed, 0)[:samples]]
    if not len(batch):
        raise UsageError(f"no sample of {cache.directory} is chosen: ask for at least one sample")
    fields, labels = augmented_batch(batch, settings, seed)
    shown = [
        Shown(
            describe_label(None if labels is None else labels[row], cache.classes),
            path,
            [{name: array[row] for name, array in fields.items()}],
        )
        for row, path in enumerate(path for path in batch.paths for _ in range(settings.views))
    ]
    chosen = [f"{name} {value:g}" for name, value in vars(settings).items() if value != getattr(AugmentSettings, name)]
    line = f"a batch of {len(batch)}, {', '.join(chosen) if chosen else 'not augmented'}"
    return draw_sheet(records.name, line, shown, cache.classes, side)


def augmented_batch(
    batch: CachedDataset, settings: AugmentSettings, seed: int
) -> tuple[dict[str, Array], Array | None]:
    """Return a batch's augmented fields by name, and its labels, rows of shares if images are mixed; None without.

    Images are (batch, height, width, channels), in their dtype.
    """
    from tpucache.loading.loader import CachedLoader

    given = next(iter(CachedLoader(batch, len(batch), seed=seed, augment=settings)))
    named: Any = given if isinstance(given, Mapping) else dict(zip((IMAGE, LABEL), given, strict=True))
    fields: dict[str, Array] = {name: tensor.numpy() for name, tensor in named.items()}
    labels, statistics = fields.pop(LABEL), batch.manifest.statistics
    dtype = np.dtype(batch.manifest.fields[batch.names.index(IMAGE)].dtype)
    pixels = fields[IMAGE].transpose(0, 2, 3, 1) * [each or 1.0 for each in statistics.std] + statistics.mean
    if dtype.kind != "f":
        pixels = np.rint(pixels).clip(np.iinfo(dtype).min, np.iinfo(dtype).max).astype(dtype)
    return {**fields, IMAGE: pixels}, None if batch.table.labels is None else labels
