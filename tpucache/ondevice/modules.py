"""What needs torch: modules that decode, normalise and augment batches, and the memory in which records stay."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from tpucache.errors import UsageError
from tpucache.geometry import Fit
from tpucache.ondevice.arrays import ArrayLibrary
from tpucache.ondevice.augment import BatchAugment, BatchNormalise
from tpucache.ondevice.crop import CropDecoder
from tpucache.ondevice.decode import PackedDecoder, Resize, Size, field_decoder, packed_or_pixels, to_resize
from tpucache.ondevice.resident import NO_TILE, DeviceFullError, RecordSlots
from tpucache.ondevice.settings import AugmentSettings
from tpucache.store.fields import IMAGE, Field

_log: Final = logging.getLogger("tpucache")


class Normalise(BatchNormalise):
    """Normalises images: (batch, height, width, channels) of any dtype -> float32 (batch, channels, height, width).

    Each channel becomes (x - mean) / std.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float], device: torch.device) -> None:
        """Take each channel's mean and standard deviation. A channel whose deviation is 0 is only centred."""
        super().__init__(mean, std, _torch_on(device))


class Augment(BatchAugment):
    """Applies AugmentSettings to whole batches on the device, with the random numbers of `draw`."""

    def __init__(
        self,
        settings: AugmentSettings,
        mean: Sequence[float],
        std: Sequence[float],
        height: int,
        width: int,
        device: torch.device,
        dtype: str = "|u1",
    ) -> None:
        """Take each channel's mean and standard deviation, in the images' own scale, and the images' size and dtype.

        Raises UsageError for settings that images of this size, dtype or number of channels cannot have.
        """
        super().__init__(settings, mean, std, height, width, _torch_on(device), dtype)
        if settings.crop and device.type == "cpu":
            _say_slow()


@functools.cache
def _say_slow() -> None:
    _log.warning(
        "on a CPU, Augment makes random crops about ten times more slowly than "
        "CachedLoader(dataset, …, augment=AugmentSettings(crop=True)) while it reads"
    )


class Decoder(nn.Module):
    """Decodes packed images, uint8 (batch, bytes) -> uint8 (batch, channels, height, width).

    A decoder of crops also takes the random numbers of `draw`. The module has static shapes and no parameters.
    """

    def __init__(self, packed: PackedDecoder | CropDecoder) -> None:
        super().__init__()
        self._decode: Callable[..., Any] = packed.decode
        self._library = _torch_on(torch.device("cpu"))
        for name, constant in packed.constants.items():
            self.register_buffer(name, self._library.constant(constant), persistent=False)

    def forward(self, packed: torch.Tensor, *draws: torch.Tensor) -> torch.Tensor:
        """Return the decoded images of a batch of packed images."""
        with torch.autocast(packed.device.type, enabled=False):
            images: torch.Tensor = self._decode(self._library, packed, dict(self.named_buffers()), *draws)
        return images


def decoder(dataset: Any, size: Size | None = None, *, fit: Fit = "crop", crop: bool = False) -> nn.Module:
    """Return a module that decodes batches of `CachedLoader(finish="device")`.

    The module returns uint8 (batch, channels, height, width). `size` is the size of the decoded images, (height, width)
    in pixels or one number for both, from 8 to twice the stored size (default: the stored size). `fit` says how an
    image of another shape is fitted to `size`, as warmup's option `--fit` does.

    With `crop` the module resizes a random part of each image to that size, without aliasing, and mirrors some of the
    parts: `module(batch, draws)`. Here `draws` are the numbers of
    `draw(AugmentSettings(crop=True, flip=True), seed, step, len(batch), stored_size)`, for one view, on the batch's
    device.

    The module consists of plain torch operators with static shapes and has no parameters; `.to(device)` moves its
    constants. Without `size` and `crop`, images of a codec without a packed form pass through unchanged. Raises
    UsageError for a cache without images, and for an impossible size.
    """
    field: Field | None = next((each for each in dataset.manifest.fields if each.name == IMAGE), None)
    if field is None:
        raise UsageError("the cache has no images, so that there is nothing to decode: take a cache of images")
    resize = None if size is None else to_resize(field, size, fit)
    if crop:
        height, width, _ = field.shape
        return Decoder(CropDecoder(packed_or_pixels(field), resize or Resize(height, width, fit)))
    packed = field_decoder(field, resize)
    return nn.Identity() if packed is None else Decoder(packed)


def _torch_on(device: torch.device) -> ArrayLibrary:
    # CUDA has copied pageable memory when the call returns, so this is safe. A blocking copy would also wait for all
    # earlier steps.
    is_cuda = device.type == "cuda"
    return ArrayLibrary(
        torch,
        lambda constant: torch.from_numpy(constant).to(device, non_blocking=is_cuda),
        functools.partial(torch.autocast, device.type, enabled=False),
    )


#: Integer types by size. Rows are gathered as the largest type that divides their bytes, which needs the fewest reads.
_WORDS: Final = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class TorchMemory:
    """The memory of a CPU, a GPU, or another torch device that runs operations one by one (an XLA device does not)."""

    cores, tile = 1, NO_TILE

    def __init__(self, device: Any) -> None:
        """Take `device`, a torch.device or its name."""
        try:
            self._device = torch.empty(1, device=device).device
        except Exception as error:  # torch's error depends on the device and on the build
            raise UsageError(f"device {device!r} cannot be used: {error}") from error

    def put(self, array: Any, name: str = "rows") -> torch.Tensor:
        tensor = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
        return tensor.to(self._device, non_blocking=self._device.type == "cuda")

    def put_all(self, arrays: Sequence[np.ndarray[Any, Any]]) -> list[torch.Tensor]:
        return [*self.put(np.stack(arrays)).unbind()]

    def reserve(self, slots: RecordSlots, chunk: torch.Tensor) -> TorchTable:
        return TorchTable(slots, chunk)

    def itemsize(self, dtype: np.dtype[Any]) -> int:
        return dtype.itemsize

    def free_bytes(self) -> int | None:
        return int(torch.cuda.mem_get_info(self._device)[0]) if self._device.type == "cuda" else None


class TorchTable:
    """One field of all records, on a torch device.

    Each row is stored as integers, so that records of any dtype are gathered in the same way.
    """

    def __init__(self, slots: RecordSlots, chunk: torch.Tensor) -> None:
        self._count, self._shape, self._dtype = len(chunk), chunk.shape[1:], chunk.dtype
        row_bytes = chunk[:1].nbytes
        self._word = _WORDS[max(size for size in _WORDS if row_bytes % size == 0)]
        try:
            self.rows = torch.empty(
                (slots.rows, row_bytes // self._word.itemsize), dtype=self._word, device=chunk.device
            )
        except RuntimeError as error:  # also torch's OutOfMemoryError
            raise DeviceFullError(
                f"{slots.rows * row_bytes / 1e9:,.2f} GB of records do not fit into the memory of {chunk.device}: "
                "use resident=no"
            ) from error

    def write(self, number: torch.Tensor, chunk: torch.Tensor) -> None:
        rows = chunk.reshape(len(chunk), -1).view(torch.uint8).view(self._word)
        places = number * self._count + torch.arange(self._count, device=self.rows.device)
        self.rows.index_copy_(0, places, rows)

    def take(self, slots: torch.Tensor) -> torch.Tensor:
        rows = self.rows.index_select(0, slots)
        return rows.view(torch.uint8).view(self._dtype).reshape(len(slots), *self._shape)
