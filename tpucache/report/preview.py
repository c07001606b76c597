"""Draws with Pillow: a record with its mask, boxes and keypoints over its image, and contact sheets of many records."""

from __future__ import annotations

import base64
import bisect
import functools
import io
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
    Shown,
    choose,
    class_name,
    describe_label,
    image_field,
    name_of,
    show,
    to_dataset,
    variant_name,
    write_file,
)
from tpucache.store.fields import BOXES, IMAGE, KEYPOINTS, LABEL, MASK
from tpucache.text import printable

try:
    from PIL import Image, ImageColor, ImageDraw, ImageFilter, ImageFont
except ImportError as error:
    raise DependencyError(f"pictures are drawn by Pillow: {error}. `pip install 'pillow>=10.1'`") from error

if TYPE_CHECKING:
    from tpucache.loading.dataset import CachedDataset
    from tpucache.ondevice.settings import AugmentSettings

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont

#: Colours of mask values, box classes and keypoints, in turn. They differ from one another, and from skin, leaves, sky.
PALETTE: Final = ("#ff4d2e", "#00c4b4", "#ffc400", "#685cff", "#ec48c4", "#7cd628", "#00a4ff", "#ff88a4")
_OVERLAY: Final = 102  # the opacity of a mask's colour, of 255
_PIXELATED: Final = 3.0  # from this scale on, pixels are shown as squares
_INK: Final = "#141416"
_WHITE: Final = "#ffffff"
_LETTERS: Final = 11  # the least size of texts over a picture
_QUALITY: Final = 85

#: Colours and distances of a sheet, in pixels.
_PAPER: Final = "#fafafa"
_DIM: Final = "#6c7179"
_MARGIN: Final = 36  # that on the right is a gap and a gutter
_GAP: Final = 4  # after each picture of a sample
_GUTTER: Final = 32  # after each sample
_SMALL_TEXT: Final = 12
_TOP: Final = 104  # the height of the sheet's heading, with its margin
_HEADING: Final = 39  # the height of a sample's heading
_MIN_WIDTH: Final = 380  # room for the heading
_WIDTH: Final = 1200  # samples are placed side by side up to this width

#: Pictures in pages, which show them at about half this size: screens with small pixels show more of them.
_PLAIN_SIDE: Final = 256
_DRAWN_SIDE: Final = 352  # larger, so that text drawn over the picture can be read


@functools.cache
def _font(size: int) -> Font:
    """Return the system's DejaVu Sans, or else Pillow's own font, which has fewer characters."""
    try:
        return ImageFont.truetype("DejaVuSans.ttf", size)
    except OSError:
        return ImageFont.load_default(size)


def _cut(text: str, font: Font, width: float) -> str:
    """Return a text on one line, without its middle if it is wider than `width`."""
    text = printable(text)

    def part(kept: int) -> str:
        return text if kept == len(text) else f"{text[: kept - kept // 2]}\u2026{text[len(text) - kept // 2 :]}"

    return part(bisect.bisect(range(len(text) + 1), width, key=lambda kept: font.getlength(part(kept))) - 1)


def _displayable(pixels: Array) -> npt.NDArray[np.uint8]:
    """Return an image (height, width, channels) of any dtype as uint8 (height, width, 3).

    Of two channels the first is shown, and of more than three the first three. Values other than 8 bits are scaled: the
    1st percentile becomes black, and the 99th white.
    """
    shown = pixels[..., [0, 1, 2] if pixels.shape[2] >= 3 else [0, 0, 0]]
    if shown.dtype != np.uint8:
        # Not from the extremes: a few extreme pixels would turn all others black.
        shown = np.interp(shown, np.percentile(shown, (1, 99)), (0, 255)).round()
    return shown.astype(np.uint8)


@calling("Pillow")
def draw_record(fields: Mapping[str, Array], classes: Sequence[str], side: int) -> Image.Image:
    """Return a record's image with its mask, boxes and keypoints drawn over it; its longer side has `side` pixels.

    `boxes` (n, 5) are left, top, right, bottom, class, and `keypoints` (n, 3) x, y, visible. Fields of other shapes are
    not drawn: data sets may use these names for other data.
    """
    height, width = fields[IMAGE].shape[:2]
    scale = side / max(height, width)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    way = Image.Resampling.NEAREST if scale >= _PIXELATED else Image.Resampling.LANCZOS
    image = Image.fromarray(_displayable(fields[IMAGE])).resize(size, way)
    mask = fields.get(MASK)
    if mask is not None and mask.shape == (height, width, 1) and mask.dtype == np.uint8:
        _paint_mask(image, mask[..., 0])
    draw, ratio, letters = ImageDraw.Draw(image), (size[0] / width, size[1] / height), max(_LETTERS, side // 16)
    write = functools.partial(_write, image, size=letters, colour=_WHITE, width=size[0] - 2, stroke=letters // _LETTERS)
    for left, top, right, bottom, number in _rows(fields, BOXES, [*ratio, *ratio, 1]):
        if right > left and bottom > top:
            corners = [round(at) for at in (left, top, max(left, right - 1), max(top, bottom - 1))]
            draw.rectangle(corners, outline=PALETTE[int(number) % len(PALETTE)], width=letters // 5)
            write(left, top, class_name(int(number), classes))
    for number, (x, y, visible) in enumerate(_rows(fields, KEYPOINTS, [*ratio, 1])):
        if visible > 0:
            draw.circle((x, y), letters // 3, PALETTE[number % len(PALETTE)], _WHITE)
            write(x + letters // 2, y, str(number))
    return image


def _rows(fields: Mapping[str, Array], name: str, scales: Sequence[float]) -> list[list[float]]:
    """Return a field's rows, scaled; those with values that are not finite are zeros."""
    rows = fields.get(name, np.empty(0))
    if rows.dtype.kind != "f" or rows.shape[1:] != (len(scales),):
        return []
    scaled: list[list[float]] = np.where(np.isfinite(rows).all(1, keepdims=True), rows * scales, 0).tolist()
    return scaled


def _paint_mask(image: Image.Image, mask: Array) -> None:
    large = Image.fromarray(mask).resize(image.size, Image.Resampling.NEAREST)
    values, edges = np.asarray(large), np.asarray(large.filter(ImageFilter.FIND_EDGES))
    opacity = np.where(edges > 0, 255, _OVERLAY) * (values > 0)
    colours = np.array([ImageColor.getrgb(colour) for colour in PALETTE], np.uint8)
    painted = Image.fromarray(colours[(values - 1) % len(PALETTE)])
    image.paste(painted, mask=Image.fromarray(opacity.astype(np.uint8)))


def _write(
    image: Image.Image, x: float, y: float, text: str, size: int, colour: str, width: float, stroke: int = 0
) -> None:
    """Write a text above y, without its middle if it is too wide; it is moved if it would reach beyond the image."""
    font = _font(size)
    text = _cut(text, font, width)
    place = max(1, min(x, image.width - 1 - font.getlength(text))), max(y, size + 2)
    ImageDraw.Draw(image).text(place, text, colour, font, "ls", stroke_width=stroke, stroke_fill=_INK)


@calling("Pillow")
def make_picture(fields: Mapping[str, Array], classes: Sequence[str], text: str, head: str = "") -> Picture:
    """Return a picture for a page: a record's image with its other fields drawn over it."""
    drawn = draw_record(fields, classes, _PLAIN_SIDE if len(fields) == 1 else _DRAWN_SIDE)
    data = base64.b64encode(_encoded(drawn, "jpeg")).decode()
    return Picture(f"data:image/jpeg;base64,{data}", drawn.width, drawn.height, text, head)


@calling("Pillow")
def draw_sheet(title: str, line: str, samples: Sequence[Shown], classes: Sequence[str], side: int) -> Image.Image:
    """Return a sheet of samples, the records of each side by side under its label and path."""
    if not samples:
        raise UsageError(f"no sample of {title} is chosen: ask for at least one sample, or another class")
    strips = [[draw_record(fields, classes, side) for fields in sample.records] for sample in samples]
    width, height = strips[0][0].size
    across, down = len(strips[0]) * (width + _GAP) + _GUTTER, _HEADING + height + _GUTTER
    columns = min(len(samples), max(1, _WIDTH // across))
    size = _MARGIN + max(_MIN_WIDTH, columns * across), _TOP + -(-len(samples) // columns) * down
    sheet = Image.new("RGB", size, _PAPER)
    _write(sheet, _MARGIN, 62, title, 26, _INK, size[0] - 2 * _MARGIN)
    _write(sheet, _MARGIN, 80, line, _SMALL_TEXT, _DIM, size[0] - 2 * _MARGIN)
    for number, (sample, strip) in enumerate(zip(samples, strips, strict=True)):
        x, y = _MARGIN + number % columns * across, _TOP + number // columns * down
        _write(sheet, x, y + 15, sample.label, 15, _INK, across - _MARGIN)
        _write(sheet, x, y + 33, sample.path, _SMALL_TEXT, _DIM, across - _MARGIN)
        for at, picture in enumerate(strip):
            sheet.paste(picture, (x + at * (width + _GAP), y + _HEADING))
    return sheet


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
    dataset = to_dataset(cache)
    image, manifest = image_field(dataset), dataset.manifest
    shown = manifest.variants[: max(1, variants)]
    line = (
        f"{manifest.samples:,} samples  \u00b7  {len(manifest.classes):,} classes  \u00b7  {image.shape[1]}x"
        f"{image.shape[0]}, {image.codec}  \u00b7  {len(shown)} of {len(manifest.variants):,} variants: "
        f"{', '.join(map(variant_name, shown))}"
    )
    chosen = [show(dataset, position, shown) for position in choose(dataset, samples, seed, class_name)]
    return draw_sheet(name_of(dataset), line, chosen, manifest.classes, side)


def contact_sheet(cache: str | Path) -> bytes | None:
    dataset = to_dataset(cache)
    return _encoded(preview_cache(dataset, side=128), "png") if IMAGE in dataset.names else None


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
def _encoded(picture: Image.Image, kind: str) -> bytes:
    target = io.BytesIO()
    picture.save(target, kind, quality=_QUALITY)
    return target.getvalue()


# A batch as the model receives it in training: augmented on the device, with mixed labels.


def preview_batch(
    dataset: CachedDataset, settings: AugmentSettings, samples: int = SAMPLES, *, seed: int = 0, side: int = 192
) -> Image.Image:
    """Return a sheet with the images of the first batch that training with the seed `seed` reads.

    Its images are augmented as on the device, and shown without normalisation, under the labels after augmentation.
    Raises UsageError when there is nothing to show, and for augmentations that a CachedLoader refuses for this cache.
    """
    from tpucache.loading.order import full_order

    image_field(dataset)
    batch = dataset[full_order(len(dataset), seed, 0)[:samples]]
    fields = augmented_batch(batch, settings, seed)
    labels = fields.pop(LABEL)
    paths = np.repeat(batch.paths, settings.views)
    shown = [
        Shown(
            describe_label(labels[row], dataset.classes), path, [{name: array[row] for name, array in fields.items()}]
        )
        for row, path in enumerate(paths.tolist())
    ]
    chosen = [f"{name} {value:g}" for name, value in vars(settings).items() if value != getattr(type(settings), name)]
    line = f"a batch of {len(batch)}, {', '.join(chosen) if chosen else 'not augmented'}"
    return draw_sheet(name_of(dataset), line, shown, dataset.classes, side)


def augmented_batch(batch: CachedDataset, settings: AugmentSettings, seed: int) -> dict[str, Array]:
    """Return a batch's augmented fields and labels by name. Labels are rows of shares if images are mixed.

    Images are (batch, height, width, channels), uint8 or else floats.
    """
    from tpucache.loading.loader import CachedLoader
    from tpucache.ondevice.augment import scale_and_shift

    given = next(iter(CachedLoader(batch, len(batch), seed=seed, augment=settings)))
    named: Any = given if isinstance(given, Mapping) else dict(zip((IMAGE, LABEL), given, strict=True))
    fields: dict[str, Array] = {name: tensor.numpy() for name, tensor in named.items()}
    scale, shift = scale_and_shift(batch.manifest.statistics.mean, batch.manifest.statistics.std)
    fields[IMAGE] = (fields[IMAGE].transpose(0, 2, 3, 1) - shift) / scale
    if image_field(batch).dtype == "|u1":
        fields[IMAGE] = np.rint(fields[IMAGE]).clip(0, 255).astype(np.uint8)
    return fields
