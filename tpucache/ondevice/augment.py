"""Augmentation of whole batches on the device.

Random numbers are drawn on the host and uploaded with the batch. The compiled graph leaves out augmentations that are
off. Shapes are static, and nothing is read back to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import UsageError
from tpucache.ondevice import draws as drawn
from tpucache.ondevice.arrays import LUMA, Array, ArrayLibrary, flag, number
from tpucache.ondevice.auto_augment import AutoAugment
from tpucache.ondevice.resample import blur_weights, crop_weights, resampled, tilt_reach, tilted
from tpucache.ondevice.settings import AugmentSettings
from tpucache.store.fields import BOXES, IMAGE, KEYPOINTS, MASK

#: Returns a batch with its rows moved down by a number of rows; the last rows come to the front.
Roll = Callable[[Array, int], Array]

_BYTES: Final = "|u1"

#: A number for red, green and blue. Where a pixel's hue plus this number, in sixths of a turn, is from 1 to 3, the
#: channel is the pixel's smallest one.
_SIXTHS: Final = (5, 3, 1)
#: The value of white by dtype; for other dtypes it is not known.
_WHITE: Final = {"|u1": 255, "<u2": 65535}


class BatchAugment:
    """Changes whole batches on the device as AugmentSettings say, by the random numbers of `draw`."""

    def __init__(
        self,
        settings: AugmentSettings,
        mean: Sequence[float],
        std: Sequence[float],
        height: int,
        width: int,
        library: ArrayLibrary,
        dtype: str = _BYTES,
    ) -> None:
        """Take each channel's mean and standard deviation, in the images' own scale, and the images' size and dtype.

        Raises UsageError for settings that images of this size, dtype or number of channels cannot have.
        """
        if settings.rotate and height != width:
            raise UsageError(f"rotate turns only square images, not {height}x{width}: leave rotate out")
        if settings.shift >= min(height, width):
            raise UsageError(
                f"a shift of {settings.shift} pixels leaves nothing of images of {height}x{width}: "
                "choose a smaller shift"
            )
        for name in ("saturation", "hue", "grey"):
            if getattr(settings, name) and len(mean) != 3:
                raise UsageError(f"{name} needs 3 channels, not {len(mean)}: leave {name} out")
        if settings.brightness and dtype not in _WHITE:
            raise UsageError(
                f"brightness needs images of uint8 or uint16, whose white is known, not {np.dtype(dtype)}: "
                "leave brightness out"
            )
        self.settings, self._dtype = settings, dtype
        self._reach = tilt_reach(settings.tilt, height, width)
        self._library, self._functions = library, library.functions
        self._auto = AutoAugment(settings, height, width, len(mean), library, dtype) if settings.operations else None
        #: Normalises images, and changes nothing else.
        self.plain = BatchNormalise(mean, std, library)
        self._luma = library.constant(LUMA)
        self._sixths = library.constant(np.array(_SIXTHS, np.float32).reshape(1, 3, 1, 1))
        self._rows, self._columns = (library.constant(np.arange(side, dtype=np.float32)) for side in (height, width))

    def fields(self, fields: Mapping[str, Array], draws: Array | None = None) -> dict[str, Array]:
        """Return a batch's fields with the image normalised and, given `draws`, augmented; a mask moves with its image.

        A given image is (batch, height, width, channels), a mask (batch, height, width, 1). The returned image is
        float32 (batch, channels, height, width). With `draws`, every field has one row for each view of each sample.
        """
        if draws is None:
            return {**fields, IMAGE: self.plain(fields[IMAGE])}
        changed = {name: self.views(field) for name, field in fields.items()}
        changed[IMAGE] = self.images(changed[IMAGE], draws)
        if MASK in changed:
            changed[MASK] = self.masks(changed[MASK][..., 0], draws)[..., None]
        return changed

    def views(self, array: Array) -> Array:
        """Return an array (batch, ...) with one row for each view of a sample; the views of a sample are neighbours."""
        if self.settings.views == 1:
            return array
        # Stacking along a new axis leaves each sample on the device that has it.
        return self._functions.stack([array] * self.settings.views, 1).reshape(-1, *array.shape[1:])

    def images(self, images: Array, draws: Array) -> Array:
        """Return augmented and normalised images, float32 (batch, channels, height, width), one for each view.

        `images` are (batch, height, width, channels). In this order, pixels are moved, changed by the random
        operations, blurred, changed in colour, normalised and erased. An erased rectangle has the mean colour.
        """
        draws, library, dtype = self._by_view(draws), self._library, self._dtype
        images = self._functions.moveaxis(images, 3, 1)
        with library.exact():
            # torch cannot flip most integer dtypes
            moved = self._move(images if dtype == _BYTES else library.float(images), draws, dtype)
            if self._auto is not None:
                moved = self._auto.images(moved, draws[:, drawn.COLUMNS :])
            pixels = library.float(moved)
            if self.settings.blur:
                rows, columns = (
                    blur_weights(library, places, draws[:, drawn.BLUR]) for places in (self._rows, self._columns)
                )
                pixels = resampled(pixels, rows, columns, _parts(dtype))
            pixels = self.plain.pixels(self._coloured(pixels, draws))
            if self.settings.erase:
                pixels = pixels * (1 - self._inside(draws[:, drawn.ERASED]))
        return pixels

    def masks(self, masks: Array, draws: Array) -> Array:
        """Return masks (batch, height, width) of class numbers 0 to 255, moved like their images; the dtype stays.

        Where images are interpolated, the nearest class is taken. Pixels that random operations move in from outside
        the image have class 255.
        """
        draws = self._by_view(draws)
        with self._library.exact():
            moved = self._move(masks[:, None], draws, nearest=True)
            if self._auto is not None:
                moved = self._auto.masks(moved, draws[:, drawn.COLUMNS :])
        return self._library.cast(moved[:, 0], str(masks.dtype).removeprefix("torch."))

    def mix(self, images: Array, targets: Array, draws: Array, roll: Roll | None = None) -> tuple[Array, Array]:
        """Mix each image with the image of the sample before it in the batch, and its targets in the same proportion.

        Targets are floats (batch, outputs), or (batch, outputs, height, width), which are cut like their images.
        Mix-up: Zhang et al., arXiv:1710.09412; CutMix: Yun et al., arXiv:1905.04899. If the batch is a slice of a
        larger batch, give `roll`: it moves the rows of the larger batch and returns the slice of the result.
        """
        if not self.settings.mixes:
            return images, targets
        draws = self._by_view(draws)
        roll = roll or (lambda each, rows: self._functions.roll(each, rows, 0))
        others, other_targets = (roll(each, self.settings.views) for each in (images, targets))
        # The weight of the sample's own image. It is 1 where cut-mix pastes nothing.
        share = number(draws, drawn.SHARE)
        if self.settings.cutmix:
            share = share * (1 - self._inside(draws[:, drawn.CUT]))
        own = share if targets.ndim == 4 else share.mean((1, 2, 3)).reshape(-1, 1)
        return images * share + others * (1 - share), targets * own + other_targets * (1 - own)

    def _move(self, images: Array, draws: Array, dtype: str = _BYTES, *, nearest: bool = False) -> Array:
        """Return images (batch, channels, height, width) transposed, reversed, shifted, tilted and cropped.

        `draws` has a row of random numbers for each image, (batch, columns), and `dtype` is the dtype of the images.
        """
        settings = self.settings
        by_rows, by_columns = settings.vertical_flip or settings.rotate, settings.flip or settings.rotate
        images = self._library.turned(
            images,
            draws,
            drawn.TRANSPOSED if settings.rotate else -1,
            drawn.ROWS_REVERSED if by_rows else -1,
            drawn.COLUMNS_REVERSED if by_columns else -1,
        )
        if settings.shift:
            # Multiplying by matrices with one 1 in each row moves bytes exactly, even in bfloat16. It is fast on a TPU.
            rows = self._one_hot(self._rows, draws[:, drawn.DOWN])
            columns = self._one_hot(self._columns, draws[:, drawn.RIGHT])
            images = resampled(self._library.float(images), rows, columns, (1, 1) if dtype == _BYTES else (3, 3))
        if settings.tilt:
            slopes = draws[:, drawn.TILT_ROWS], draws[:, drawn.TILT_COLUMNS]
            images = self._whole(
                tilted(self._library, self._library.float(images), *slopes, self._reach, nearest=nearest), dtype
            )
        if settings.crop:
            top, height, left, width = (draws[:, n] for n in range(drawn.CROPPED.start, drawn.CROPPED.stop))
            rows = crop_weights(self._library, self._rows, top, height, nearest=nearest)
            columns = crop_weights(self._library, self._columns, left, width, nearest=nearest)
            images = self._whole(resampled(self._library.float(images), rows, columns, _parts(dtype)), dtype)
        return images

    def _whole(self, pixels: Array, dtype: str) -> Array:
        return self._functions.round(pixels) if np.dtype(dtype).kind in "iu" else pixels

    def _inside(self, boxes: Array) -> Array:
        """Return 1 where the centre of a pixel lies in its sample's box, else 0: float32 (batch, 1, height, width).

        `boxes` are top, bottom, left and right as shares of the image's sides, (batch, 4).
        """
        rows = _between(self._rows, boxes[:, 0:1], boxes[:, 1:2])
        columns = _between(self._columns, boxes[:, 2:3], boxes[:, 3:4])
        return self._library.float((rows[:, :, None] & columns[:, None, :])[:, None])

    def _one_hot(self, places: Array, shift: Array) -> Array:
        """Return float32 (batch, 1, n, n): a matrix that moves n rows by `shift` and reflects them at the border.

        `places` are the numbers 0 to n - 1, and `shift` is (batch,).
        """
        last = len(places) - 1
        source = abs(places - shift[:, None])
        source = last - abs(last - source)
        return self._library.float(source[:, :, None] == places)[:, None]

    def _coloured(self, pixels: Array, draws: Array) -> Array:
        """Return pixels with changed brightness, contrast, saturation and hue, and without colours, in this order.

        Contrast changes around the image's mean luma. Hue is that of HSV, as in torchvision: the largest and the
        smallest channel of a pixel keep their values. If any setting but `grey` is on, pixels of uint8 and uint16
        images are limited to the range from black to white.
        """
        settings, white = self.settings, _WHITE.get(self._dtype)
        if settings.brightness:
            pixels = pixels * number(draws, drawn.BRIGHTNESS)
        if settings.contrast:
            centre = self._grey(pixels).mean((1, 2, 3), keepdims=True)
            pixels = centre + (pixels - centre) * number(draws, drawn.CONTRAST)
        if settings.saturation:
            grey = self._grey(pixels)
            pixels = grey + (pixels - grey) * number(draws, drawn.SATURATION)
        if settings.hue:
            pixels = self._with_hue(pixels, 6 * number(draws, drawn.HUE))
        if settings.grey:
            pixels = self._functions.where(flag(draws, drawn.GREY), self._grey(pixels), pixels)
        changes = settings.brightness or settings.contrast or settings.saturation or settings.hue
        return self._functions.clip(pixels, 0, white) if changes and white is not None else pixels

    def _with_hue(self, pixels: Array, turn: Array) -> Array:
        """Return pixels with their hue moved by `turn`, which is in sixths of a turn."""
        functions = self._functions
        red, green, blue = (pixels[:, channel : channel + 1] for channel in range(3))
        largest = functions.maximum(functions.maximum(red, green), blue)
        chroma = largest - functions.minimum(functions.minimum(red, green), blue)
        divisor = functions.where(chroma > 0, chroma, 1.0)
        of_green, of_blue = 2 + (blue - red) / divisor, 4 + (red - green) / divisor
        hue = functions.where(green == largest, of_green, of_blue)
        hue = functions.where(red == largest, (green - blue) / divisor, hue)
        place = self._sixths + (hue + turn)
        place = place - 6 * functions.floor(place / 6)
        return largest - chroma * functions.clip(functions.minimum(place, 4 - place), 0, 1)

    def _grey(self, pixels: Array) -> Array:
        return (pixels * self._luma).sum(1, keepdims=True) if pixels.shape[1] == 3 else pixels

    def _by_view(self, draws: Array) -> Array:
        return draws.reshape(-1, draws.shape[1] // self.settings.views)


def _parts(dtype: str) -> tuple[int, int]:
    """Return into how many parts `resampled` splits the pixels of images, and then the means of these."""
    return (1, 2) if dtype == _BYTES else (3, 3)  # in a crop, means of bytes have 16 bits


def _between(places: Array, low: Array, high: Array) -> Array:
    centres = (places + 0.5) / len(places)
    return (centres >= low) & (centres < high)


class BatchNormalise:
    """Normalises images: (batch, height, width, channels) of any dtype -> float32 (batch, channels, height, width).

    Each channel becomes (x - mean) / std.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float], library: ArrayLibrary) -> None:
        """Take the mean and standard deviation of each channel; a channel whose deviation is 0 is only centred."""
        self._library = library
        self._scale, self._shift = (
            library.constant(values.reshape(1, -1, 1, 1)) for values in scale_and_shift(mean, std)
        )

    def __call__(self, images: Array) -> Array:
        """Return images (batch, height, width, channels) normalised: float32 (batch, channels, height, width)."""
        return self.pixels(self._library.float(self._library.functions.moveaxis(images, 3, 1)))

    def pixels(self, images: Array) -> Array:
        """Normalise images that are float32 (batch, channels, height, width) already; shape and dtype stay."""
        pixels = images * self._scale
        pixels += self._shift  # torch adds in place: the page faults of another large array take longer than the sum
        return pixels


def scale_and_shift(mean: Sequence[float], std: Sequence[float]) -> tuple[npt.NDArray[np.float32], ...]:
    """Return `scale` and `shift`, float32 (channels,) each: x * scale + shift normalises the values x of a channel.

    A channel whose standard deviation is 0 is only centred.
    """
    scale = [1.0 / spread if spread else 1.0 for spread in std]
    shift = [-m * s for m, s in zip(mean, scale, strict=True)]
    return np.array(scale, np.float32), np.array(shift, np.float32)


def check_fields(settings: AugmentSettings | None, names: Container[str]) -> None:
    """Raise UsageError if the device cannot normalise records with fields of these `names`, or apply the settings."""
    if settings is None:
        return
    if IMAGE not in names:
        raise UsageError("the cache has no images to normalise or augment: leave normalise and augment out")
    points = [name for name in (BOXES, KEYPOINTS) if name in names]
    if settings.moves and points:
        raise UsageError(
            f"the device moves pixels and masks, not {' and '.join(points)}: leave flip, vertical_flip, shift, rotate, "
            "tilt, crop, rand_augment and trivial_augment out, or make these changes in warmup's variants"
        )


def check_labels(labels: np.ndarray[Any, Any], settings: AugmentSettings | None, names: Container[str]) -> None:
    """Raise UsageError if the settings mix samples, and these labels or masks cannot be mixed."""
    if settings is None or not settings.mixes:
        return
    if labels.ndim == 1 and labels.dtype.kind != "f" and labels.min(initial=0) < 0:
        raise UsageError(
            "mixup and cutmix mix classes, and some samples of this cache have no class: leave mixup and cutmix out"
        )
    if MASK in names:
        raise UsageError("mixup and cutmix mix labels, and this cache's targets are masks: leave mixup and cutmix out")
    if labels.ndim == 1 and labels.dtype.kind == "f":
        raise UsageError(
            "mixup and cutmix mix classes, and this cache's labels are numbers: leave mixup and cutmix out"
        )
