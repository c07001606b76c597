"""A sheet of pictures: samples side by side and down, each with its label and path over its pictures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from PIL import Image, ImageDraw

from tpucache.report.draw import Colour, draw_text

_PAPER: Final = (250, 250, 250)
_INK: Final = (22, 24, 28)
_DIM: Final = (108, 113, 121)
_RULE: Final = (218, 221, 226)

_MARGIN: Final = 36
_GAP: Final = 4  # between the pictures of a sample
_GUTTER: Final = 32  # between samples
_CAPTION: Final = 46
_MIN_WIDTH: Final = 380  # so that the heading has room
_WIDTH: Final = 1200  # samples are placed side by side up to it


class Cell(NamedTuple):
    """One sample of a sheet: its label, its path, and its pictures, all of one size."""

    label: str
    path: str
    pictures: Sequence[Image.Image]


@dataclass(frozen=True)
class Layout:
    """Where everything lies on a sheet of `cells` samples with `across` pictures of `size` (width, height) each."""

    cells: int
    across: int
    size: tuple[int, int]

    @property
    def strip(self) -> int:
        """The width of a sample."""
        return self.across * (self.size[0] + _GAP) - _GAP

    @property
    def columns(self) -> int:
        """How many samples lie side by side."""
        fitting = (_WIDTH + _GUTTER) // (self.strip + _GUTTER)
        even = math.ceil(math.sqrt(self.cells)) if self.across == 1 else self.cells
        return max(1, min(fitting, self.cells, max(even, 3)))

    @property
    def top(self) -> int:
        """Where the samples begin."""
        return 96 if self.across == 1 else 122

    @property
    def inner(self) -> int:
        """The width within the margins."""
        return max(_MIN_WIDTH, self.columns * (self.strip + _GUTTER) - _GUTTER)

    @property
    def height(self) -> int:
        """The height of the sheet."""
        down = math.ceil(self.cells / self.columns)
        return self.top + down * (_CAPTION + self.size[1] + _GUTTER) - _GUTTER + _MARGIN

    def place(self, number: int) -> tuple[int, int]:
        """Return the left top corner of a sample."""
        row, column = divmod(number, self.columns)
        return _MARGIN + column * (self.strip + _GUTTER), self.top + row * (_CAPTION + self.size[1] + _GUTTER)


def fitted_size(shape: Sequence[int], side: int) -> tuple[int, int]:
    """Return the (width, height) of an image (height, width, …) whose longer side is `side` pixels."""
    scale = side / max(shape[:2])
    return max(1, round(shape[1] * scale)), max(1, round(shape[0] * scale))


def draw_sheet(layout: Layout, title: str, line: str, cells: Iterable[Cell], heads: Sequence[str] = ()) -> Image.Image:
    """Return a sheet of cells under a title and a line; `heads` name the pictures of a sample."""
    sheet = Image.new("RGB", (layout.inner + 2 * _MARGIN, layout.height), _PAPER)
    draw = ImageDraw.Draw(sheet)
    _write(draw, (_MARGIN, 52), title, 26, _INK, layout.inner)
    _write(draw, (_MARGIN, 76), line, 13, _DIM, layout.inner)
    step = layout.size[0] + _GAP
    for column in range(layout.columns if heads else 0):
        left = _MARGIN + column * (layout.strip + _GUTTER)
        for turn, head in enumerate(heads):
            _write(draw, (left + turn * step, 114), head, 12, _DIM, layout.size[0])
        draw.line((left, 122, left + layout.strip - 1, 122), _RULE)
    for number, cell in enumerate(cells):
        left, top = layout.place(number)
        _write(draw, (left, top + 24), cell.label, 15, _INK, layout.strip)
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
    """Write a line on its base line."""
    draw_text(draw, at, text, size, fill, width, keep_end=keep_end, anchor="ls")
