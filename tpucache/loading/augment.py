"""HostCrop: a loader's threads crop, flip and normalise images on the host while they read records."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import UsageError
from tpucache.loading.dataset import CachedDataset
from tpucache.loading.reading.buffers import Buffer
from tpucache.loading.reading.crops import MOST_CHANNELS, Boxes, Form, Normal, crop, needed_bytes
from tpucache.loading.reading.record_reader import Divide, WaysRead
from tpucache.native import Addresses, Array
from tpucache.ondevice import draws as drawn
from tpucache.ondevice.augment import scale_and_shift
from tpucache.ondevice.decode import Yuv420Decoder, packed_or_pixels
from tpucache.ondevice.settings import AugmentSettings
from tpucache.store.fields import IMAGE, Field

Numbers = npt.NDArray[np.int64]

_BYTES: Final = "|u1"
_FLOATS: Final = "<f4"


class HostCrop:
    """Reads random crops of a batch's images, or whole images.

    With the same random numbers, a device would crop the same boxes. If each box is enlarged to the size of the whole
    images, the pixels are also exactly those that a device would compute. If normalising is all that is left to do, the
    crops are normalised, too.
    """

    def __init__(self, settings: AugmentSettings, dataset: CachedDataset, size: tuple[int, int] | None) -> None:
        """Store the settings and the samples. `size` is the height and width of the crops, by default the images' size.

        Raises UsageError if `why_not` gives a reason.
        """
        reason = why_not(settings, dataset)
        if reason is not None:
            raise UsageError(f"crops are not made on the host: {reason}")
        image = _image(dataset)
        height, width, channels = image.shape
        # Whole images are decoded, as cropping planes rounds otherwise.
        has_planes = _crops_planes(settings, dataset)
        self._form = Form(height, width, channels, has_planes)
        #: The dataset to read. If images are stored as planes, it does not decode them.
        self.dataset = dataset.packed() if has_planes else dataset
        self._settings, self.size = settings, size or (height, width)
        #: The augmentation that a batch still needs after it was cropped and flipped; None if it is finished.
        self.left = _left(settings)
        statistics = self.dataset.manifest.statistics
        self._normal = Normal(*scale_and_shift(statistics.mean, statistics.std)) if self.left is None else None
        #: The fields of the result: one image (height, width, channels), float32 if it is normalised, else uint8.
        self.fields = (Field(IMAGE, "raw", _BYTES if self._normal is None else _FLOATS, (*self.size, channels)),)

    def reading(self, seed: int, step: int, rows: int, own: slice) -> Callable[..., WaysRead]:
        """Return a function that reads crops into a buffer for `fields`. Call it like `CachedDataset.read_into`.

        The function reads the slice `own` of a global batch with `rows` rows. The batch's random numbers follow from
        (seed, step).
        """
        size = self._form.height, self._form.width
        draws = drawn.draw(self._settings, seed, step, rows, size)[own]
        if not self._settings.crop:
            draws[:, drawn.CROPPED] = 0, size[0], 0, size[1]
        first = drawn.CROPPED.start
        columns = (*range(first, drawn.CROPPED.stop), drawn.ROWS_REVERSED, drawn.COLUMNS_REVERSED)
        return functools.partial(self._read_into, Boxes(*(draws[:, column] for column in columns)))

    def _read_into(
        self, boxes: Boxes, buffer: Buffer, indices: Array, epoch: int, chunk: int, divide: Divide
    ) -> WaysRead:
        (targets,), dataset = buffer.starts, self.dataset
        if dataset.can_visit:

            def use(numbers: Numbers, sources: Addresses) -> None:
                self._crop(boxes.at(numbers), np.ascontiguousarray(sources), targets[numbers])

            return dataset.visit(indices, epoch, chunk, use, needed_bytes(self._form, boxes), divide)
        pool = dataset.buffer_pools.pool(len(targets))
        whole = pool.take()  # images that need decoding are decoded as a whole batch, then cropped
        try:
            ways = dataset.read_into(whole, indices, epoch, chunk, divide)
            (sources,) = whole.starts

            def crop_part(start: int, stop: int) -> None:
                self._crop(boxes.at(slice(start, stop)), sources[start:stop], targets[start:stop])

            divide(crop_part, len(indices))
        finally:
            pool.give_back(whole)
        return ways

    def _crop(self, boxes: Boxes, sources: Addresses, targets: Addresses) -> None:
        crop(self._form, boxes, sources, targets, *self.size, self._normal)


def why_not(settings: AugmentSettings | None, dataset: CachedDataset, size: object = None) -> str | None:
    """Return why the host cannot crop a dataset's images to `size` (None: their own size); None if the host can."""
    if settings is None or not (settings.crop or (size is None and _left(settings) is None)):
        return "there is no random crop: give augment=AugmentSettings(crop=True)"
    before = [name for name in ("rotate", "shift", "tilt") if getattr(settings, name)]
    if before:
        return f"the crop would come after {' and '.join(before)}: give only a crop and flips"
    if settings.views > 1:
        return "each sample has several views: leave views out"
    return _why_not_images(settings, dataset)


def _left(settings: AugmentSettings) -> AugmentSettings | None:
    """Return the settings that are left to apply after crops and flips; None if only normalising is left."""
    left = replace(settings, crop=False, flip=False, vertical_flip=False, zoom=AugmentSettings().zoom)
    return None if left == AugmentSettings() else left


def _why_not_images(settings: AugmentSettings, dataset: CachedDataset) -> str | None:
    if dataset.names != [IMAGE]:
        return "records have more fields than an image"
    image = _image(dataset)
    if image.dtype != _BYTES:
        return f"images are {np.dtype(image.dtype)}, not uint8"
    if image.shape[2] > MOST_CHANNELS:
        return f"images have {image.shape[2]} channels, and the host crops images of at most {MOST_CHANNELS}"
    if len(dataset.record_fields[0].shape) == 1 and not _crops_planes(settings, dataset):
        return 'images are left packed for a device: leave finish="device" out'
    return None


def _crops_planes(settings: AugmentSettings, dataset: CachedDataset) -> bool:
    return settings.crop and isinstance(packed_or_pixels(_image(dataset)), Yuv420Decoder)


def _image(dataset: CachedDataset) -> Field:
    return next(field for field in dataset.manifest.fields if field.name == IMAGE)
