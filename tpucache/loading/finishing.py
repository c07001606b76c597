"""Finishes a CachedLoader's batches: crops them on the host while it reads; decodes and augments them on a device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from tpucache.errors import DependencyError, UsageError
from tpucache.loading.dataset import CachedDataset
from tpucache.loading.reading.crops import MOST_CHANNELS, Boxes, Form, Normal, crop, needed_bytes
from tpucache.loading.reading.memory import Buffer
from tpucache.loading.reading.record_reader import Divide, WaysRead
from tpucache.loading.tensors import HAS_TORCH, to_integer
from tpucache.native import Addresses, Array
from tpucache.ondevice import draws as drawn
from tpucache.ondevice.augment import check_fields, check_labels, scale_and_shift
from tpucache.ondevice.decode import Yuv420Decoder, packed_or_pixels
from tpucache.ondevice.draws import draw
from tpucache.ondevice.settings import AugmentSettings
from tpucache.store.fields import IMAGE, LABEL, Field

if TYPE_CHECKING:
    import torch

    from tpucache.ondevice.modules import Augment

#: A device as torch takes it: "cuda", "cpu", "xla" or a torch.device.
Device = Any


@dataclass(frozen=True)
class FinishSettings:
    """How a loader finishes its batches: on which device, by its name in torch, and with which augmentation.

    `augment` is None if images are neither normalised nor augmented. `size` is the height and width of random crops;
    None for that of the images.
    """

    device: str
    augment: AugmentSettings | None
    size: tuple[int, int] | None = None

    @classmethod
    def of(
        cls, augment: AugmentSettings | None, normalise: bool, device: Device, size: Any = None
    ) -> FinishSettings | None:
        """Make the settings from a CachedLoader's arguments; None if none of them is given."""
        if augment is not None and not isinstance(augment, AugmentSettings):
            raise UsageError(f"augment is an AugmentSettings, such as AugmentSettings(flip=True), not {augment!r:.60}")
        if augment is None and not normalise and device is None and size is None:
            return None
        settings = AugmentSettings() if augment is None and normalise else augment
        return cls(_usable("cpu" if device is None else device), settings, None if size is None else _to_size(size))

    @property
    def is_on_cpu(self) -> bool:
        return self.device.startswith("cpu")


class BatchFinish:
    """Turns a loader's batches into the input of a model, on the device."""

    def __init__(self, settings: FinishSettings, dataset: Any, crop: HostCrop | None = None) -> None:
        import torch

        from tpucache.ondevice.modules import Augment, decoder

        self._device, augment = torch.device(settings.device), settings.augment
        manifest = dataset.manifest
        fields: dict[str, Field] = {field.name: field for field in manifest.fields}
        shapes = {field.name: field.shape for field in dataset.record_fields}
        check_fields(augment, fields)
        if crop is not None:
            augment = crop.left
        self._draws = None if augment == AugmentSettings() else augment
        self._classes = len(manifest.classes)
        self._decode = None
        if len(shapes.get(IMAGE, ())) == 1 and crop is None:
            self._decode = decoder(dataset).to(self._device)
        self._augment: Augment | None = None
        if augment is not None:
            image, statistics = fields[IMAGE], manifest.statistics
            self._size = height, width = (image.shape[0], image.shape[1]) if crop is None else crop.size
            self._augment = Augment(augment, statistics.mean, statistics.std, height, width, self._device, image.dtype)

    def __call__(self, batch: Any, seed: int, step: int, rows: int, own: slice) -> Any:
        """Finish a batch, (images, labels) or a dict. Normalised images are float32."""
        import torch

        named = dict(batch) if isinstance(batch, Mapping) else dict(zip((IMAGE, LABEL), batch, strict=True))
        check_labels(named[LABEL].numpy(), self._draws, named)
        with torch.no_grad():
            fields = {name: self._put(tensor) for name, tensor in named.items()}
            if self._decode is not None:
                fields[IMAGE] = self._decode(fields[IMAGE])
            if self._augment is not None:
                draws = None if self._draws is None else draw(self._draws, seed, step, rows, self._size)[own]
                fields = self._augmented(self._augment, fields, draws)
        return fields if isinstance(batch, Mapping) else (fields[IMAGE], fields[LABEL])

    def _augmented(
        self, augment: Augment, fields: dict[str, torch.Tensor], drawn: npt.NDArray[np.float32] | None
    ) -> dict[str, torch.Tensor]:
        import torch

        labels = fields.pop(LABEL)
        draws = None if drawn is None else self._put(torch.from_numpy(drawn))
        # The loader reads images with channels last, so this view is contiguous.
        changed = augment.fields({**fields, IMAGE: fields[IMAGE].permute(0, 2, 3, 1)}, draws)
        if draws is not None:
            labels = augment.views(labels)
            if augment.settings.mixes:
                targets = labels if labels.ndim > 1 else torch.nn.functional.one_hot(labels, self._classes)
                changed[IMAGE], labels = augment.mix(changed[IMAGE], targets.float(), draws)
        return {**changed, LABEL: labels}

    def _put(self, tensor: torch.Tensor) -> torch.Tensor:
        # On CUDA, a copy from page-locked memory is asynchronous, and a copy from other memory is not.
        return tensor.to(self._device, non_blocking=self._device.type == "cuda")


def _to_size(size: Any) -> tuple[int, int]:
    sides = (size, size) if isinstance(size, int) else size
    if not isinstance(sides, (tuple, list)) or len(sides) != 2:
        raise UsageError(f"size is the size of the crops in pixels, such as 224 or (160, 224), not {size!r:.60}")
    height, width = (to_integer("size", side, 1) for side in sides)
    return height, width


def _usable(device: Device) -> str:
    if not HAS_TORCH:
        raise DependencyError(
            "augment, normalise and device need torch, which is not installed: use tpucache.jax.feed, or install torch"
        )
    import torch

    try:
        torch.empty(1, device=device)
        return str(torch.device(device))
    except Exception as error:  # torch's exception depends on the device, and on how torch was built
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(f"device {device!r} cannot be used: {reason}") from error


Numbers = npt.NDArray[np.int64]

_BYTES: Final = "|u1"
_FLOATS: Final = "<f4"


class HostCrop:
    """Reads random crops of a batch's images, or whole images.

    A device would crop the same boxes, and, if boxes are enlarged to the images' size, make exactly the same pixels. If
    normalising is all that is left to do, the crops are normalised, too.
    """

    def __init__(self, settings: AugmentSettings, dataset: CachedDataset, size: tuple[int, int] | None) -> None:
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
        """Return a function that reads crops into a buffer for `fields`. Call it like `CachedDataset.read_into`."""
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
