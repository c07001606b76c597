"""Draws with Pillow: a record with its mask, boxes and keypoints over its image, and contact sheets of many records."""

from __future__ import annotations

import bisect
import functools
import importlib.util
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tpucache.errors import DependencyError, TpucacheError, UsageError, calling
from tpucache.native import Array
from tpucache.report.records import SAMPLES, VARIANTS, Records, class_name, describe_label, variant_name
from tpucache.store.copying import check_no_cache_file
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

#: Colours and distances of a sheet, in pixels.
_PAPER: Final = (250, 250, 250)
_DIM: Final = (108, 113, 121)
_MARGIN: Final = 36
_GAP: Final = 4  # between the pictures of a sample
_GUTTER: Final = 32  # between samples
_TOP: Final = 122
_CAPTION: Final = 46
_MIN_WIDTH: Final = 380  # room for the heading
_WIDTH: Final = 1200  # samples are placed side by side up to this width


@functools.cache
def _font(size: int) -> Font:
    """Return DejaVu Sans, the system's or matplotlib's, or else Pillow's own font, which has fewer characters."""
    plots = importlib.util.find_spec("matplotlib")  # it is only found, not imported
    folder = Path(plots.origin).parent / "mpl-data/fonts/ttf" if plots and plots.origin else Path()
    for place in (_FONT, str(folder / _FONT)):
        try:
            return ImageFont.truetype(place, size)
        except OSError:
            continue
    return ImageFont.load_default(size)


def _cut(text: str, font: Font, width: float, *, keep_end: bool = False) -> str:
    """Return a text on one line, without its end (or beginning) if it is wider than `width`."""
    text = printable(text)
    if font.getlength(text) <= width:
        return text

    def part(length: int) -> str:
        return f"\u2026{text[len(text) - length :]}" if keep_end else f"{text[:length].rstrip()}\u2026"

    fitting = bisect.bisect_right(range(len(text)), width, key=lambda length: font.getlength(part(length)))
    return part(max(0, fitting - 1))


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
    left, top, right, bottom, class, and `keypoints` (n, 3) x, y, visible.
    """
    pixels = _displayable(fields[IMAGE])
    height, width = pixels.shape[:2]
    scale = side / max(height, width)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).convert("RGB")
    image = image.resize(size, Image.Resampling.NEAREST if scale >= _PIXELATED else Image.Resampling.LANCZOS)
    if _has(fields, MASK, "u", (height, width, 1)):
        image = _with_mask(image, fields[MASK][..., 0])
    ratio = np.array([size[0] / width, size[1] / height])
    if _has(fields, BOXES, "f", (None, 5)):
        _draw_boxes(image, fields[BOXES], ratio, classes, dense)
    if _has(fields, KEYPOINTS, "f", (None, 3)):
        _draw_keypoints(image, fields[KEYPOINTS], ratio, dense)
    return image


def _has(fields: Mapping[str, Array], name: str, kind: str, shape: tuple[int | None, ...]) -> bool:
    """Return whether a field is as tpucache's own sources make it; data sets may use its name for other data."""
    found = fields.get(name)
    if found is None or found.dtype.kind != kind or found.ndim != len(shape):
        return False
    return all(expected in (None, size) for expected, size in zip(shape, found.shape, strict=True))


def _with_mask(image: Image.Image, mask: Array) -> Image.Image:
    """Return the image under a translucent colour for each value of the mask but 0, with outlines."""
    large = np.asarray(Image.fromarray(mask).resize(image.size, Image.Resampling.NEAREST)).astype(np.int64)
    colours = np.array(PALETTE, np.float32)[(large - 1) % len(PALETTE)]
    padded = np.pad(large, 1, mode="edge")
    around = (padded[:-2, 1:-1], padded[2:, 1:-1], padded[1:-1, :-2], padded[1:-1, 2:])
    edge = np.any([neighbour != large for neighbour in around], axis=0)
    cover = np.where(edge, 1.0, _OVERLAY) * (large > 0)
    mixed = np.asarray(image, np.float32) * (1 - cover[..., None]) + colours * cover[..., None]
    return Image.fromarray(mixed.round().astype(np.uint8))


def _draw_boxes(image: Image.Image, boxes: Array, ratio: Array, classes: Sequence[str], dense: int) -> None:
    draw = ImageDraw.Draw(image)
    text_size = dense * (12 if image.width >= dense * 160 else 10)
    real = boxes[np.isfinite(boxes).all(axis=1)]
    real = real[(real[:, 2] > real[:, 0]) & (real[:, 3] > real[:, 1])]
    numbers = real[:, 4].astype(np.int64).tolist()
    colours = [PALETTE[number % len(PALETTE)] for number in numbers]
    begins = (real[:, :2] * ratio).round().tolist()
    ends = (real[:, 2:4] * ratio - 1).round().tolist()
    for (left, top), (right, bottom), colour in zip(begins, ends, colours, strict=True):
        draw.rectangle((left, top, max(left, right), max(top, bottom)), outline=colour, width=2 * dense)
    for (left, top), number, colour in zip(begins, numbers, colours, strict=True):  # over all boxes
        _draw_plate(draw, image.width, (left, top), class_name(number, classes), colour, text_size)


def _draw_plate(
    draw: ImageDraw.ImageDraw, width: int, corner: tuple[float, float], name: str, colour: Colour, size: int
) -> None:
    """Draw a name above the corner of its box, or inside the box if there is no room above."""
    font = _font(size)
    text = _cut(name, font, width - 6)
    long, high = font.getlength(text) + 6, size + 4
    left = max(0, min(corner[0], width - long))
    top = corner[1] - high if corner[1] >= high else corner[1]
    draw.rectangle((left, top, left + long, top + high), fill=colour)
    luma = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2]  # ITU-R BT.601
    draw.text((left + 3, top + high / 2), text, _INK if luma > 140 else _WHITE, font, anchor="lm")


def _draw_keypoints(image: Image.Image, points: Array, ratio: Array, dense: int) -> None:
    draw, radius = ImageDraw.Draw(image), 3 * dense
    for number in np.flatnonzero(np.isfinite(points).all(axis=1) & (points[:, 2] > 0)).tolist():
        x, y = (points[number, :2] * ratio).tolist()
        draw.circle((x, y), radius, PALETTE[number % len(PALETTE)], _WHITE)
        at = (x + radius + 2, y)
        draw.text(at, str(number), _WHITE, _font(10 * dense), anchor="lm", stroke_width=1, stroke_fill=_INK)


class Cell(NamedTuple):
    """One sample of a sheet; the pictures of all samples have one size."""

    label: str
    path: str
    pictures: Sequence[Image.Image]


@calling("Pillow")
def draw_sheet(title: str, line: str, cells: Sequence[Cell], heads: Sequence[str] = ()) -> Image.Image:
    """Return a sheet of cells; `heads` are the headings of a sample's pictures."""
    width, height = cells[0].pictures[0].size
    across = len(cells[0].pictures)
    strip = across * (width + _GAP) - _GAP
    even = max(3, math.ceil(math.sqrt(len(cells)))) if across == 1 else len(cells)
    columns = max(1, min((_WIDTH + _GUTTER) // (strip + _GUTTER), len(cells), even))
    inner = max(_MIN_WIDTH, columns * (strip + _GUTTER) - _GUTTER)
    down = math.ceil(len(cells) / columns) * (_CAPTION + height + _GUTTER) - _GUTTER
    sheet = Image.new("RGB", (inner + 2 * _MARGIN, _TOP + down + _MARGIN), _PAPER)
    _write(sheet, (_MARGIN, 52), title, 26, inner)
    _write(sheet, (_MARGIN, 76), line, 13, inner, _DIM)
    for number, cell in enumerate(cells):
        left = _MARGIN + number % columns * (strip + _GUTTER)
        top = _TOP + number // columns * (_CAPTION + height + _GUTTER)
        if number < columns:
            for turn, head in enumerate(heads):
                _write(sheet, (left + turn * (width + _GAP), 114), head, 12, width, _DIM)
        _write(sheet, (left, top + 24), cell.label, 15, strip)
        _write(sheet, (left, top + 40), cell.path, 11, strip, _DIM, keep_end=True)
        for turn, picture in enumerate(cell.pictures):
            sheet.paste(picture, (left + turn * (width + _GAP), top + _CAPTION))
    return sheet


def _write(
    sheet: Image.Image,
    at: tuple[int, int],
    text: str,
    size: int,
    width: int,
    colour: Colour = _INK,
    *,
    keep_end: bool = False,
) -> None:
    """Write a line of text whose base line begins at `at`."""
    font = _font(size)
    ImageDraw.Draw(sheet).text(at, _cut(text, font, width, keep_end=keep_end), colour, font, anchor="ls")


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
    classes = records.manifest.classes
    cells = [
        Cell(
            describe_label(records.label(position), classes),
            records.table.paths[position],
            [draw_record(records.read(position, variant), classes, side) for variant in shown],
        )
        for position in chosen
    ]
    heads = [variant_name(variant) for variant in shown] if len(shown) > 1 else []
    return draw_sheet(records.name, _headline(records, len(shown)), cells, heads)


def contact_sheet(cache: str | Path) -> bytes | None:
    """Return a contact sheet of a cache as a PNG; None without images."""
    if Records(cache).image is None:
        return None
    target = io.BytesIO()
    preview_cache(cache, side=128).save(target, "PNG")
    return target.getvalue()


@calling("Pillow")
def save_picture(picture: Image.Image, path: str | Path) -> Path:
    """Write a picture in the format that the suffix of `path` names. Raises UsageError or TpucacheError."""
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


def _headline(records: Records, shown: int) -> str:
    manifest, image = records.manifest, records.image
    several = len(manifest.variants)
    parts = [f"{manifest.samples:,} samples"]
    if manifest.classes:
        parts.append(f"{len(manifest.classes):,} classes")
    if several > 1:
        parts.append(f"{shown} of {several} variants" if shown < several else f"{several} variants")
    if image is not None:
        parts.append(f"{image.shape[1]}x{image.shape[0]}, {image.codec}")
    return "  \u00b7  ".join(parts)


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

    Its images are augmented as on the device, and shown without normalisation, under the labels after augmentation.
    Masks move with their image; boxes and keypoints are drawn only if nothing moves. If `cache` is a path, and the
    cache has augmented variants, the batch shows these. Raises UsageError when there is nothing to show.
    """
    from tpucache.loading.dataset import CachedDataset
    from tpucache.loading.order import full_order
    from tpucache.ondevice.settings import AugmentSettings

    if isinstance(cache, (str, Path)):
        cache = CachedDataset(cache)
        cache = cache.in_variant("epoch") if cache.manifest.augmented else cache
    if IMAGE not in cache.names or not len(cache):
        raise UsageError(f"{cache.directory} holds no image to show: give a cache with at least one image")
    settings = augment or AugmentSettings()
    batch = cache[full_order(len(cache), seed, 0)[:samples]]
    paths = [path for path in batch.paths for _ in range(settings.views)]
    shown, targets = augmented_batch(batch, settings, seed)
    cells = [
        Cell(
            describe_label(None if targets is None else targets[row], cache.classes),
            path,
            [draw_record({name: array[row] for name, array in shown.items()}, cache.classes, side)],
        )
        for row, path in enumerate(paths)
    ]
    chosen = [f"{name} {value:g}" for name, value in vars(settings).items() if value != getattr(AugmentSettings, name)]
    line = f"a batch of {len(batch)}, {', '.join(chosen) if chosen else 'not augmented'}"
    return draw_sheet(Path(cache.place).resolve().name, line, cells)


def augmented_batch(
    batch: CachedDataset, settings: AugmentSettings, seed: int
) -> tuple[dict[str, Array], Array | None]:
    """Return a batch's augmented fields by name, and its labels, rows of shares if images are mixed; None without.

    Images are (batch, height, width, channels), in their dtype.
    """
    import torch

    from tpucache.loading.loader import CachedLoader
    from tpucache.ondevice.draws import draw
    from tpucache.ondevice.modules import Augment

    image, statistics = batch.manifest.fields[batch.names.index(IMAGE)], batch.manifest.statistics
    given = next(iter(CachedLoader(batch, len(batch))))
    fields: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {IMAGE: given[0], LABEL: given[1]}
    labels = fields.pop(LABEL)
    height, width, _ = image.shape
    augment = Augment(settings, statistics.mean, statistics.std, height, width, torch.device("cpu"), image.dtype)
    draws = torch.from_numpy(draw(settings, seed, 0, len(batch), (height, width)))
    moved = augment.fields({**fields, IMAGE: fields[IMAGE].permute(0, 2, 3, 1)}, draws)
    labels = augment.views(labels)
    if settings.mixes:
        is_class = labels.dim() == 1 and not labels.is_floating_point()
        targets = torch.nn.functional.one_hot(labels.clamp(min=0), max(1, len(batch.classes))) if is_class else labels
        moved[IMAGE], labels = augment.mix(moved[IMAGE], targets.float().reshape(len(targets), -1), draws)
    numbers = moved[IMAGE].permute(0, 2, 3, 1).numpy() * [each or 1.0 for each in statistics.std] + statistics.mean
    if (kind := np.dtype(image.dtype)).kind != "f":
        numbers = np.rint(numbers).clip(np.iinfo(kind).min, np.iinfo(kind).max).astype(kind)
    drawn = () if settings.mixes else (MASK,) if settings.moves else (MASK, BOXES, KEYPOINTS)
    shown = {IMAGE: numbers, **{name: moved[name].numpy() for name in drawn if name in moved}}
    return shown, None if batch.table.labels is None else labels.numpy()
