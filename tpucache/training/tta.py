"""Test-time augmentation: each image is predicted in several views, and the predictions are averaged."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import torch
from torch.nn import functional

from tpucache.geometry import lanczos
from tpucache.ondevice.resample import split
from tpucache.training.predict_options import CROP_SHARE, PredictOptions

Sides = tuple[int, int]


class ImageViews:
    """Makes the views of a batch's images, and moves maps that were predicted from views back to their position."""

    def __init__(self, options: PredictOptions, learned: Sides, given: Sides, device: torch.device) -> None:
        """Take `learned`, the height and width that the model was evaluated on, and `given`, those of the images."""
        self._given = given
        sizes = [_scaled(learned, size) for size in options.sizes] or [learned]
        parts = [(0, 0, *given)] if options.crops == "none" else _five(given)
        flips = [False, True] if options.flip_tta else [False]
        self._views = [_ImageView(*view, given, device) for view in itertools.product(parts, sizes, flips)]

    def mean(self, images: torch.Tensor, predict: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return the predictions for `images` (batch, height, width, channels), averaged over their views.

        `predict` returns values (batch, outputs), or maps (batch, outputs, height, width). Each pixel of a mean map is
        the mean over the views that contain it.
        """
        total: torch.Tensor | None = None
        shown: torch.Tensor | None = None
        for view in self._views:
            found = predict(view.of(images))
            ones = torch.ones_like(found[:1, :1])
            if found.dim() == 4:
                found, ones = view.put_back(found, self._given), view.put_back(ones, self._given)
            total, shown = (found, ones) if total is None or shown is None else (total + found, shown + ones)
        if total is None or shown is None:
            raise RuntimeError("there is always a view")
        return total / shown


class _ImageView:
    """A part (top, left, height, width) of the image, resized to `size`, and mirrored left to right if `flip`."""

    def __init__(
        self, part: tuple[int, int, int, int], size: Sides, flip: bool, given: Sides, device: torch.device
    ) -> None:
        top, left, height, width = self._part = part
        self._flip, self._size = flip, size
        self._weights = None
        if size != (height, width):
            rows, columns = (
                torch.from_numpy(lanczos(side, first, first + count, pixels).astype(np.float32)).to(device)
                for side, first, count, pixels in ((given[0], top, height, size[0]), (given[1], left, width, size[1]))
            )
            self._weights = rows, columns

    def of(self, images: torch.Tensor) -> torch.Tensor:
        """Return the part of each image that this view shows, resized and mirrored as the view needs.

        `images` are (batch, height, width, channels). A resized view is float32, any other has the images' dtype.
        """
        top, left, height, width = self._part
        if self._weights is None:
            view = images[:, top : top + height, left : left + width]
        else:
            rows, columns = self._weights
            with torch.autocast(images.device.type, enabled=False):
                pixels = _product(_product(rows, images.permute(0, 3, 1, 2).float()), columns.T)
            if images.dtype == torch.uint8:
                pixels = pixels.clamp(0, 255)
            view = pixels.permute(0, 2, 3, 1)
        return view.flip(2) if self._flip else view

    def put_back(self, maps: torch.Tensor, given: Sides) -> torch.Tensor:
        """Return a view's maps (batch, outputs, height, width) at their position in the image, with zeros around them.

        `given` is the height and width of the image.
        """
        top, left, height, width = self._part
        maps = maps.flip(3) if self._flip else maps
        if maps.shape[2:] != (height, width):
            maps = functional.interpolate(maps, (height, width), mode="bilinear", align_corners=False)
        around = (left, given[1] - left - width, top, given[0] - top - height)
        return functional.pad(maps, around)


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the matrix product of `left` and `right`, each split into two bfloat16 parts.

    A TPU rounds the operands of a product to bfloat16: the second part has what this would cut off.
    """
    first: torch.Tensor = sum(a @ b for a in split(left, 2) for b in split(right, 2))
    return first


def _five(given: Sides) -> list[tuple[int, int, int, int]]:
    """Return the crops (top, left, height, width) in the four corners and the middle of an image.

    `given` is the height and width of the image. Each crop is 7/8 as high and as wide.
    """
    height, width = (max(1, round(side * CROP_SHARE)) for side in given)
    down, right = given[0] - height, given[1] - width
    corners = [(top, left) for top in (0, down) for left in (0, right)]
    return [(top, left, height, width) for top, left in [*corners, (down // 2, right // 2)]]


def _scaled(sides: Sides, shorter: int) -> Sides:
    height, width = sides
    return round(height * shorter / min(sides)), round(width * shorter / min(sides))
