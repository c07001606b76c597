"""Draws pictures with Pillow: an image with its mask, boxes and keypoints over it, and sheets of many images."""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tpucache.errors import DependencyError, calling
from tpucache.redact import printable
from tpucache.report.text import class_name, cut
from tpucache.store.fields import BOXES, IMAGE, KEYPOINTS, MASK
from tpucache.types import Array

try:
    from PIL import Image, ImageDraw, ImageFont
except ImportError as error:
    raise DependencyError(f"pictures are drawn by Pillow: {error}. `pip install 'pillow>=10.1'`") from error

Colour = tuple[int, int, int]

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
_SHARPER: Final = 2  # keypoints are drawn larger by this factor, then shrunk, which smooths their edges
_PERCENTILES: Final = (1, 99)  # not the extremes: a few extreme pixels would turn all others black
_MORE: Final = "DejaVuSans.ttf"
_NO_CHARACTER: Final = "\uffff"
_INK: Final = (20, 20, 22)
_WHITE: Final = (255, 255, 255)

#: Colours and distances of a sheet, in pixels.
_PAPER: Final = (250, 250, 250)
_SHEET_INK: Final = (22, 24, 28)
_DIM: Final = (108, 113, 121)
_RULE: Final = (218, 221, 226)

_MARGIN: Final = 36
_GAP: Final = 4  # between the pictures of a sample
_GUTTER: Final = 32  # between samples
_CAPTION: Final = 46
_MIN_WIDTH: Final = 380  # room for the heading
_WIDTH: Final = 1200  # samples are placed side by side up to this width


@functools.cache
def _fonts(size: int) -> tuple[ImageFont.FreeTypeFont, ...]:
    """Return Pillow's own outline font, Aileron, and, if the machine has it, DejaVu Sans with far more characters."""
    built_in = ImageFont.load_default(size)
    if not isinstance(built_in, ImageFont.FreeTypeFont):
        raise DependencyError("this Pillow was built without FreeType: install Pillow from its wheel")
    plots = importlib.util.find_spec("matplotlib")  # matplotlib contains the font; it is only found, not imported
    folder = Path(plots.origin).parent / "mpl-data/fonts/ttf" if plots and plots.origin else Path()
    for place in (_MORE, str(folder / _MORE)):
        try:
            return built_in, ImageFont.truetype(place, size)
        except OSError:
            continue
    return (built_in,)


def font_for(text: str, size: int) -> ImageFont.FreeTypeFont:
    """Return the first of `_fonts` that has all characters of a text, or the last if none has; `size` is in pixels."""
    fonts = _fonts(size)
    return next((font for font in fonts if not any(_is_missing(font, one) for one in set(text))), fonts[-1])


@functools.lru_cache(maxsize=4096)
def _is_missing(font: ImageFont.FreeTypeFont, character: str) -> bool:
    """Return whether a font lacks a character: it then draws the character as an empty box."""
    return bytes(font.getmask(character)) == bytes(font.getmask(_NO_CHARACTER))


def displayable(pixels: Array) -> npt.NDArray[np.uint8]:
    """Return an image (height, width, channels) of any dtype as uint8 (height, width, 1 or 3).

    Grey and RGB images of 8 bits are not changed. Of images with two channels only the first is shown, and of images
    with more than three the first three, as red, green and blue. Values of other dtypes are scaled: the image's 1st
    percentile becomes black, and its 99th percentile white.
    """
    shown = pixels[..., : 3 if pixels.shape[2] >= 3 else 1]
    if shown.dtype == np.uint8:
        return shown
    low, high = np.percentile(shown, _PERCENTILES)
    scaled = (shown.astype(np.float64) - low) / max(float(high - low), np.finfo(np.float64).tiny)
    return np.asarray(np.rint(scaled.clip(0, 1) * 255), np.uint8)


def draw_text(
    draw: ImageDraw.ImageDraw, at: tuple[float, float], text: str, size: int, fill: Colour, width: float, **options: Any
) -> None:
    """Draw one line of text at `at`, cut with an ellipsis if it is wider than `width` pixels.

    `size` is the height of the letters in pixels, and `fill` their colour. `options` are those of ImageDraw.text, and
    `keep_end`, with which the beginning of the text is cut instead of its end.
    """
    keep_end = options.pop("keep_end", False)
    plain = printable(text)
    font = font_for(plain, size)
    fitted = cut(plain, lambda part: font.getlength(part) <= width, keep_end=keep_end)
    draw.text(at, fitted, fill, font, **options)


@calling("Pillow")
def draw_record(fields: Mapping[str, Array], classes: Sequence[str], side: int, dense: int = 1) -> Image.Image:
    """Return a record's image with its other fields drawn over it; the image's longer side has `side` pixels.

    Lines and letters are `dense` times as large, for pictures that are shown smaller by this factor. `classes` are the
    names of the boxes' classes.

    `fields` are a record's fields by name: `image` (height, width, channels), as `displayable` shows it; `mask` uint8
    (height, width, 1), where 0 is not coloured; `boxes` (n, 5) of left, top, right, bottom, class, where empty boxes
    are not drawn; `keypoints` (n, 3) of x, y, visible. Other fields are not drawn.
    """
    pixels = displayable(fields[IMAGE])
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
        image = _with_keypoints(image, fields[KEYPOINTS], ratio, dense)
    return image


def _has(fields: Mapping[str, Array], name: str, kind: str, shape: tuple[int | None, ...]) -> bool:
    found = fields.get(name)
    if found is None or found.dtype.kind != kind or found.ndim != len(shape):
        return False
    return all(expected in (None, size) for expected, size in zip(shape, found.shape, strict=True))


def _with_mask(image: Image.Image, mask: Array) -> Image.Image:
    """Return the image under a translucent colour for each value of the mask but 0, with outlines around the areas."""
    large = np.asarray(Image.fromarray(mask).resize(image.size, Image.Resampling.NEAREST)).astype(np.int64)
    colours = np.array(PALETTE, np.float32)[(large - 1) % len(PALETTE)]
    padded = np.pad(large, 1, mode="edge")
    around = (padded[:-2, 1:-1], padded[2:, 1:-1], padded[1:-1, :-2], padded[1:-1, 2:])
    edge = functools.reduce(np.logical_or, [neighbour != large for neighbour in around])
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
        _draw_plate(draw, (left, top), class_name(number, classes), colour, text_size)


def _draw_plate(draw: ImageDraw.ImageDraw, corner: tuple[float, float], name: str, colour: Colour, size: int) -> None:
    """Draw a name on a coloured rectangle above the corner of its box, or inside the box if there is no room above."""
    left, top = corner
    width = draw.im.size[0]  # the picture's
    plain = printable(name)
    font = font_for(plain, size)
    fitted = cut(plain, lambda part: font.getlength(part) + 6 <= width)
    long, high = font.getlength(fitted) + 6, size + 4
    left = max(0, min(left, width - long))
    top = top - high if top >= high else top
    draw.rectangle((left, top, left + long, top + high), fill=colour)
    draw.text((left + 3, top + high / 2), fitted, _ink_on(colour), font, anchor="lm")


def _with_keypoints(image: Image.Image, points: Array, ratio: Array, dense: int) -> Image.Image:
    """Return the image with a dot for each keypoint that is visible, and the keypoint's number next to it.

    `points` are x, y, visible (n, 3), `ratio` is what x and y are multiplied by to get pixels of `image`, and `dense`
    is the factor by which dots and numbers are larger.
    """
    shown = np.flatnonzero(np.isfinite(points).all(axis=1) & (points[:, 2] > 0)).tolist()
    # Pillow's circles have rough edges, so they are drawn larger and shrunk.
    layer = Image.new("RGBA", (image.width * _SHARPER, image.height * _SHARPER))
    draw = ImageDraw.Draw(layer)
    font = font_for("0", 10 * dense * _SHARPER)
    radius = 3 * dense * _SHARPER
    for number in shown:
        x, y = (points[number, :2] * ratio * _SHARPER).tolist()
        box = (x - radius, y - radius, x + radius, y + radius)
        draw.ellipse(box, PALETTE[number % len(PALETTE)], _WHITE, _SHARPER)
        at = (x + radius + 2, y)
        draw.text(at, str(number), _WHITE, font, anchor="lm", stroke_width=_SHARPER, stroke_fill=_INK)
    smooth = layer.resize(image.size, Image.Resampling.BOX)
    return Image.alpha_composite(image.convert("RGBA"), smooth).convert("RGB")


def _ink_on(colour: Colour) -> Colour:
    """Return black or white, whichever can be read better on a colour (by its luma of ITU-R BT.601)."""
    luma = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2]
    return _INK if luma > 140 else _WHITE


class Cell(NamedTuple):
    """One sample of a sheet: its label, its path, and its pictures, all of one size."""

    label: str
    path: str
    pictures: Sequence[Image.Image]


@dataclass(frozen=True)
class Layout:
    """The positions of samples on a sheet: `cells` samples, each with `across` pictures of `size` (width, height).

    All coordinates and sizes are in pixels.
    """

    cells: int
    across: int
    size: tuple[int, int]

    @property
    def strip(self) -> int:
        """The width of a sample's pictures with the gaps between them."""
        return self.across * (self.size[0] + _GAP) - _GAP

    @property
    def columns(self) -> int:
        """The number of samples side by side."""
        fitting = (_WIDTH + _GUTTER) // (self.strip + _GUTTER)
        even = math.ceil(math.sqrt(self.cells)) if self.across == 1 else self.cells
        return max(1, min(fitting, self.cells, max(even, 3)))

    @property
    def top(self) -> int:
        """The y coordinate of the first row of samples."""
        return 96 if self.across == 1 else 122

    @property
    def inner(self) -> int:
        """The width of the sheet without its margins."""
        return max(_MIN_WIDTH, self.columns * (self.strip + _GUTTER) - _GUTTER)

    @property
    def height(self) -> int:
        """The height of the sheet with its margins."""
        down = math.ceil(self.cells / self.columns)
        return self.top + down * (_CAPTION + self.size[1] + _GUTTER) - _GUTTER + _MARGIN

    def place(self, number: int) -> tuple[int, int]:
        """Return the (x, y) of the top left corner of sample `number`."""
        row, column = divmod(number, self.columns)
        return _MARGIN + column * (self.strip + _GUTTER), self.top + row * (_CAPTION + self.size[1] + _GUTTER)


def fitted_size(shape: Sequence[int], side: int) -> tuple[int, int]:
    """Return the (width, height) of an image (height, width, …) after scaling its longer side to `side` pixels."""
    scale = side / max(shape[:2])
    return max(1, round(shape[1] * scale)), max(1, round(shape[0] * scale))


@calling("Pillow")
def draw_sheet(layout: Layout, title: str, line: str, cells: Iterable[Cell], heads: Sequence[str] = ()) -> Image.Image:
    """Return a sheet of cells under a title and a line of text; `heads` are the headings of a sample's pictures."""
    sheet = Image.new("RGB", (layout.inner + 2 * _MARGIN, layout.height), _PAPER)
    draw = ImageDraw.Draw(sheet)
    _write(draw, (_MARGIN, 52), title, 26, _SHEET_INK, layout.inner)
    _write(draw, (_MARGIN, 76), line, 13, _DIM, layout.inner)
    step = layout.size[0] + _GAP
    for column in range(layout.columns if heads else 0):
        left = _MARGIN + column * (layout.strip + _GUTTER)
        for turn, head in enumerate(heads):
            _write(draw, (left + turn * step, 114), head, 12, _DIM, layout.size[0])
        draw.line((left, 122, left + layout.strip - 1, 122), _RULE)
    for number, cell in enumerate(cells):
        left, top = layout.place(number)
        _write(draw, (left, top + 24), cell.label, 15, _SHEET_INK, layout.strip)
        _write(draw, (left, top + 40), cell.path, 11, _DIM, layout.strip, keep_end=True)
        for turn, picture in enumerate(cell.pictures):
            sheet.paste(picture, (left + turn * step, top + _CAPTION))
    return sheet


def _write(
    draw: ImageDraw.ImageDraw,
    at: tuple[float, float],
    text: str,
    size: int,
    fill: Colour,
    width: float,
    keep_end: bool = False,
) -> None:
    """Write a line of text whose base line begins at `at`; `draw_text` explains the other arguments."""
    draw_text(draw, at, text, size, fill, width, keep_end=keep_end, anchor="ls")
