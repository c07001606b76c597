"""RandAugment and TrivialAugment of whole batches of bytes: each image gets its own operations, in one graph.

A shear consists of shifts by fixed lengths, a translation is a shear without slope, and a rotation is three shears
(resample.py). Brightness, colour, contrast and sharpness mix an image with a second image. Equalize needs a histogram
and a table of 256 numbers. A TPU has no fast gather or scatter. So both are computed by matrix multiplications with
16 + 16 rows of ones and zeros: one row for each value of a pixel's high 4 bits, and one for each value of its low 4
bits. Their operands are exact in bfloat16, and their sums in float32. At most one of eight neighbouring images is
equalized, so that these rows are made for an eighth of the images.

An operation is a row of numbers, which are drawn on the host; each number that it does not use has a value that changes
nothing. So one graph does all operations, and the device never chooses between them. Operations and magnitudes are
those of torchvision's `RandAugment` (arXiv:1909.13719) and `TrivialAugmentWide` (arXiv:2103.10158).
"""

from __future__ import annotations

import functools
import math
from typing import Any, Final

import numpy as np

from tpucache.errors import UsageError
from tpucache.ondevice.arrays import LUMA, Array, ArrayLibrary, flag, number
from tpucache.ondevice.resample import bordered, sheared_bytes
from tpucache.ondevice.settings import MOST_MAGNITUDE, AugmentSettings

# The columns of the numbers that describe one operation.
TRANSPOSED, ROWS_REVERSED, COLUMNS_REVERSED = range(3)
ROW_SLOPE, ROW_START = 3, 4  # row y is read ROW_START + ROW_SLOPE * (y - centre) columns to the right
COLUMN_SLOPE, COLUMN_START = 5, 6  # then each column in the same way, downwards
LAST_SLOPE: Final = 7  # then the rows again
KEPT: Final = 8  # the weight of the image, which is mixed with black, or with one of the next three:
GREY, MEAN, SMOOTH = 9, 10, 11
QUANTUM: Final = 12  # for posterize: pixels become multiples of this value
THRESHOLD: Final = 13  # for solarize: pixels from this value on are inverted
STRETCHED, EQUALIZED = 14, 15
COLUMNS: Final = 16

OPERATIONS: Final = (
    "Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Color", "Contrast",
    "Sharpness", "Posterize", "Solarize", "AutoContrast", "Equalize",
)  # fmt: skip
_SIGNED: Final = OPERATIONS[1:10]
_LAST: Final = OPERATIONS.index("Equalize")
#: Of this many neighbouring images, at most one is equalized.
GROUP: Final = 8
_NEUTRAL: Final = {KEPT: 1, QUANTUM: 1, THRESHOLD: 256}
#: An image that turns by more than this angle is first turned by a right angle.
_MOST_TILT: Final = 45.0


def magnitudes(settings: AugmentSettings, size: tuple[int, int]) -> dict[str, Array]:
    """Return torchvision's 31 magnitudes of each operation, at the strengths 0 to MOST_MAGNITUDE.

    Shears are slopes, translations pixels, rotations degrees. Blends are how far an image changes: 1 would be
    completely. Posterize keeps so many of 8 bits, and solarize inverts from this share of white on.
    """
    height, width = size
    shear, across, down, rotation, blend, bits = 0.3, 150.0 / 331.0 * width, 150.0 / 331.0 * height, 30.0, 0.9, 4
    if settings.trivial_augment:
        shear, across, down, rotation, blend, bits = 0.99, 32.0, 32.0, 135.0, 0.99, 6
    largest = dict.fromkeys(OPERATIONS, blend) | {
        "ShearX": shear, "ShearY": shear, "TranslateX": across, "TranslateY": down, "Rotate": rotation,
    }  # fmt: skip
    return {name: _even(0.0, value) for name, value in largest.items()} | {
        "Posterize": np.rint(8 - np.arange(MOST_MAGNITUDE + 1) * bits / MOST_MAGNITUDE),
        "Solarize": _even(1.0, 0.0),
    }


def _square_of(settings: AugmentSettings, size: tuple[int, int]) -> int:
    """Return the side of the square in which images rotate, or 0 if they rotate within their own size."""
    return max(size) if settings.trivial_augment else 0  # RandAugment's rotations are below 45 degrees


def draw_operations(settings: AugmentSettings, uniform: Array, size: tuple[int, int]) -> Array:
    """Return the numbers that describe each image's operations, float64 (batch, operations x COLUMNS).

    `uniform` are random numbers between 0 and 1, (batch, operations, 4). Of GROUP neighbouring images at most one
    is equalized, because that costs a device as much as all other operations.
    """
    batch, count, _ = uniform.shape
    chosen = (uniform[..., 0] * _LAST).astype(int)
    # In each group, the last number of the first image says which image is equalized, or that none is.
    equalized = (uniform[::GROUP, :, 3] * len(OPERATIONS)).astype(int)
    places = np.arange(batch)
    chosen = np.where(equalized[places // GROUP] == (places % GROUP)[:, None], _LAST, chosen)
    strength: Any = settings.magnitude
    if settings.trivial_augment:
        strength = (uniform[..., 1] * (MOST_MAGNITUDE + 1)).astype(int)
    is_negative = (uniform[..., 2] < 0.5).astype(int)
    return operation_numbers(settings, size)[chosen, strength, is_negative].reshape(batch, count * COLUMNS)


@functools.lru_cache(maxsize=8)
def operation_numbers(settings: AugmentSettings, size: tuple[int, int]) -> Array:
    """Return the numbers that describe each of OPERATIONS at each strength, (14, 31, 2, COLUMNS).

    The third dimension has magnitudes with the signs + and -, of which only some operations have both.
    """
    height, width = size
    side = _square_of(settings, size)
    # The distance between the centres of the image and of the square in which it turns.
    down, across = ((side - each) // 2 - (side - each) / 2 if side else 0.0 for each in size)
    of = {
        name: values[:, None] * np.array([1, -1 if name in _SIGNED else 1])
        for name, values in magnitudes(settings, size).items()
    }
    described: dict[str, dict[int, Any]] = {
        # Shears keep the upper left corner in place, as Pillow's do.
        "ShearX": {ROW_SLOPE: of["ShearX"], ROW_START: of["ShearX"] * (height / 2 - down)},
        "ShearY": {COLUMN_SLOPE: of["ShearY"], COLUMN_START: of["ShearY"] * (width / 2 - across)},
        "TranslateX": {ROW_START: -np.trunc(of["TranslateX"])},
        "TranslateY": {COLUMN_START: -np.trunc(of["TranslateY"])},
        "Rotate": _rotation(of["Rotate"], down, across),
        "Brightness": {KEPT: 1 + of["Brightness"]},
        "Color": {KEPT: 1 + of["Color"], GREY: 1},
        "Contrast": {KEPT: 1 + of["Contrast"], MEAN: 1},
        "Sharpness": {KEPT: 1 + of["Sharpness"], SMOOTH: 1},
        "Posterize": {QUANTUM: 2.0 ** (8 - np.rint(of["Posterize"]))},
        "Solarize": {THRESHOLD: np.ceil(np.round(255 * of["Solarize"], 6))},
        "AutoContrast": {STRETCHED: 1},
        "Equalize": {EQUALIZED: 1},
    }
    found = np.zeros((len(OPERATIONS), MOST_MAGNITUDE + 1, 2, COLUMNS))
    for numbers, operation in zip(found, OPERATIONS, strict=True):
        for column, values in {**_NEUTRAL, **described.get(operation, {})}.items():
            numbers[..., column] = values
    return found


def _rotation(degrees: Array, down: float, across: float) -> dict[int, Array]:
    """Return the numbers, by column, that describe rotations by `degrees`: one number for each rotation.

    Beyond 45 or -45 degrees, the image turns by a right angle first; three shears turn it by the rest.
    """
    turn = np.where(np.abs(degrees) > _MOST_TILT, np.sign(degrees), 0)
    tilt = np.radians(degrees - 90 * turn)
    slope, sine, cosine = np.tan(tilt / 2), np.sin(tilt), np.cos(tilt)
    # The position to which the turn moves the point, minus the position to which the shears would move it.
    x, y = np.where(turn, turn * down, across), np.where(turn, -turn * across, down)
    x, y = x - cosine * across + sine * down, y - sine * across - cosine * down
    return {
        TRANSPOSED: np.abs(turn), ROWS_REVERSED: turn > 0, COLUMNS_REVERSED: turn < 0,
        ROW_SLOPE: -slope, ROW_START: x + slope * y, COLUMN_SLOPE: sine, COLUMN_START: y, LAST_SLOPE: -slope,
    }  # fmt: skip


def _even(first: float, last: float) -> Array:
    """Return MOST_MAGNITUDE + 1 evenly spaced magnitudes from `first` to `last`, rounded so that integers are exact.

    Torchvision's magnitudes are float32: there a translation of 16 pixels is 15.99, and moves pixels only by 15.
    """
    return np.round(np.linspace(first, last, MOST_MAGNITUDE + 1), 9)


_WHITE: Final = 255
_HALF: Final = 16  # values of 4 bits
#: A value that is below an integer by less than this becomes that integer, so that all devices, which compute slightly
#: different values, round down to the same integers.
_NEARLY: Final = 2.0**-10
#: The number in masks that means "no class". Pixels that come in from outside the image get it.
_NO_CLASS: Final = 255


class AutoAugment:
    """Applies the random operations that `draw_operations` chose to images of bytes; masks move with their images."""

    def __init__(
        self, settings: AugmentSettings, height: int, width: int, channels: int, library: ArrayLibrary, dtype: str
    ) -> None:
        """Take the images' size, channels and dtype."""
        name = "trivial_augment" if settings.trivial_augment else "rand_augment"
        if np.dtype(dtype) != np.uint8:
            raise UsageError(f"{name} needs images of bytes, not of {np.dtype(dtype)}: leave {name} out")
        if channels not in (1, 3):
            raise UsageError(f"{name} needs images of 1 or 3 channels, not {channels}: leave {name} out")
        self._library, self._functions = library, library.functions
        self._height, self._width, self._side = height, width, _square_of(settings, (height, width))
        self._count, self._views = settings.operations, settings.views
        drawn = operation_numbers(settings, (height, width))
        if not settings.trivial_augment:
            drawn = drawn[:, [settings.magnitude]]

        def reach(start: Array, slope: int, length: Array) -> int:
            """Return the largest distance, in pixels, by which a shear moves one of `length` rows or columns."""
            return math.ceil(float((abs(start) + abs(drawn[..., slope]) * length / 2).max()))

        rows, columns = self._side or height, self._side or width
        self._last = reach(0, LAST_SLOPE, rows)
        self._row_reach = reach(drawn[..., ROW_START], ROW_SLOPE, rows)
        # The first two shears also compute the columns that the last shear moves into the image.
        columns += 2 * self._last * (drawn[..., LAST_SLOPE] != 0)
        self._column_reach = reach(drawn[..., COLUMN_START], COLUMN_SLOPE, columns)
        # `_values` has the 16 values of 4 bits, and 16, which is above all of them. `_before` has 1 where a row's
        # number is above the column's.
        self._values = library.constant(np.arange(_HALF + 1, dtype=np.float32).reshape(1, -1, 1))
        self._before = library.constant(np.tri(_HALF, k=-1, dtype=np.float32)[None])
        self._luma = library.constant(LUMA)

    def images(self, images: Array, draws: Array) -> Array:
        """Return the changed images, float32 (batch, channels, height, width) with integers from 0 to 255.

        `draws` has the numbers that describe each image's operations, (batch, operations x COLUMNS); see
        `draw_operations`.
        """
        for numbers in self._operations(draws):
            images = self._toned(self._library.float(self._moved(images, numbers, 0, nearest=False)), numbers)
        return images

    def masks(self, masks: Array, draws: Array) -> Array:
        for numbers in self._operations(draws):
            masks = self._moved(masks, numbers, _NO_CLASS, nearest=True)
        return masks

    def _operations(self, draws: Array) -> list[Array]:
        return [draws[:, at * COLUMNS : (at + 1) * COLUMNS] for at in range(self._count)]

    def _moved(self, pixels: Array, numbers: Array, outside: int, *, nearest: bool) -> Array:
        """Return images rotated and sheared, uint8; pixels from outside the image have the value `outside`."""
        library, side = self._library, self._side
        pixels = library.cast(pixels, "uint8")
        if side:
            pixels = self._squared(pixels, outside)
            pixels = library.turned(pixels, numbers, TRANSPOSED, ROWS_REVERSED, COLUMNS_REVERSED)
        shear = functools.partial(sheared_bytes, library, nearest=nearest)
        pixels = bordered(library, pixels, self._row_reach + self._last, outside)
        pixels = shear(pixels, numbers[:, ROW_SLOPE], numbers[:, ROW_START], self._row_reach).swapaxes(2, 3)
        pixels = bordered(library, pixels, self._column_reach, outside)
        pixels = shear(pixels, numbers[:, COLUMN_SLOPE], numbers[:, COLUMN_START], self._column_reach).swapaxes(2, 3)
        last = numbers[:, LAST_SLOPE]
        pixels = shear(pixels, last, self._functions.zeros_like(last), self._last)
        if side:
            top, left = (side - self._height) // 2, (side - self._width) // 2
            pixels = pixels[:, :, top : top + self._height, left : left + self._width]
        return pixels

    def _squared(self, pixels: Array, outside: int) -> Array:
        """Return images centred in the square in which they rotate."""
        for missing in (self._side - self._width, self._side - self._height):
            pixels = bordered(self._library, pixels, (missing + 1) // 2, outside)[..., missing % 2 :].swapaxes(2, 3)
        return pixels

    def _toned(self, pixels: Array, numbers: Array) -> Array:
        functions = self._functions
        grey = (
            functions.floor((pixels * self._luma).sum(1, keepdims=True) + _NEARLY) if pixels.shape[1] == 3 else pixels
        )
        mean = grey.mean((1, 2, 3)).reshape(-1, 1, 1, 1)
        # A change of colour mixes an image with its grey version, so that it leaves a grey image unchanged.
        other = grey * number(numbers, GREY) + mean * number(numbers, MEAN)
        other = other + _smoothed(functions, pixels) * number(numbers, SMOOTH)
        pixels = self._cut(pixels + (other - pixels) * (1 - number(numbers, KEPT)))
        quantum = number(numbers, QUANTUM)
        pixels = functions.floor(pixels / quantum) * quantum
        pixels = functions.where(pixels >= number(numbers, THRESHOLD), _WHITE - pixels, pixels)
        least, most = (
            extreme(pixels, (2, 3)).reshape(*pixels.shape[:2], 1, 1) for extreme in (functions.amin, functions.amax)
        )
        stretches = flag(numbers, STRETCHED) & (most > least)
        scale = functions.where(stretches, _WHITE / functions.where(stretches, most - least, 1.0), 1.0)
        pixels = self._cut((pixels - functions.where(stretches, least, 0.0)) * scale)
        return self._equalized_some(pixels, flag(numbers, EQUALIZED))

    def _equalized_some(self, pixels: Array, is_chosen: Array) -> Array:
        shape, functions = pixels.shape, self._functions
        size = math.gcd(len(pixels) // self._views, GROUP)
        grouped = pixels.reshape(-1, size, self._views, *shape[1:])
        is_chosen = is_chosen.reshape(-1, size, self._views, 1, 1, 1)
        chosen = functions.where(is_chosen, grouped, 0.0).sum(1).reshape(-1, *shape[1:])
        equalized = self._equalized(chosen).reshape(-1, 1, self._views, *shape[1:])
        return functions.where(is_chosen, equalized, grouped).reshape(*shape)

    def _equalized(self, pixels: Array) -> Array:
        """Return pixels in which all values of a channel are about equally frequent, as ImageOps.equalize does."""
        functions = self._functions
        flat = pixels.reshape(-1, 1, pixels.shape[2] * pixels.shape[3])
        high = functions.floor(flat / _HALF)
        low = flat - high * _HALF
        of_high = self._library.float(high == self._values[:, :_HALF])
        is_low = self._library.float(low == self._values[:, :_HALF])
        # Count pixels with the same high bits and smaller low bits. The last column counts all with these high bits.
        less = of_high @ self._library.float(low < self._values).swapaxes(1, 2)
        rows = less[..., _HALF:]
        less = less[..., :_HALF] + (self._before * rows.swapaxes(1, 2)).sum(2, keepdims=True)
        most = functions.amax(flat, (2,)).reshape(-1, 1, 1)
        others = flat.shape[2] - self._library.float(flat == most).sum(2, keepdims=True)
        step = functions.floor((others + 0.5) / _WHITE)
        changes = step > 0
        step = functions.where(changes, step, 1.0)
        # Adding 1/2 keeps the quotient away from whole numbers, for devices that divide inexactly.
        table = functions.clip(functions.floor((less + functions.floor(step / 2) + 0.5) / step), 0, _WHITE)
        found = ((table.swapaxes(1, 2) @ of_high) * is_low).sum(1, keepdims=True)
        return functions.where(changes, found, flat).reshape(*pixels.shape)

    def _cut(self, pixels: Array) -> Array:
        return self._functions.clip(self._functions.floor(pixels + _NEARLY), 0, _WHITE)


def _smoothed(functions: Any, pixels: Array) -> Array:
    """Return images in which each inner pixel is the rounded mean of the 3 x 3 pixels around it."""
    if min(pixels.shape[2:]) < 3:
        return pixels
    rows = pixels[:, :, :-2] + pixels[:, :, 1:-1] + pixels[:, :, 2:]
    inner = pixels[:, :, 1:-1, 1:-1]
    means = functions.round((rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * inner) / 13)
    means = functions.concatenate([pixels[:, :, 1:-1, :1], means, pixels[:, :, 1:-1, -1:]], 3)
    return functions.concatenate([pixels[:, :, :1], means, pixels[:, :, -1:]], 2)
