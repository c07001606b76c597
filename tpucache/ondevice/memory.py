"""The memory of one torch device, in which resident records are kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

from tpucache.errors import UsageError
from tpucache.ondevice.slots import NO_TILE, DeviceFullError, RecordSlots

#: Integer types by size. Rows are gathered as the largest type that divides their bytes, which needs the fewest reads.
_WORDS: Final = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class TorchMemory:
    """The memory of a CPU, a GPU, or another torch device that runs operations one by one."""

    cores, tile = 1, NO_TILE

    def __init__(self, device: Any) -> None:
        """Take a device by its name. Raises UsageError where this machine does not have it."""
        try:
            self._device = torch.empty(1, device=device).device
        except Exception as error:  # torch's error depends on the device and on the build
            raise UsageError(f"device {device!r} cannot be used: {error}") from error

    def put(self, array: Any, name: str = "rows") -> torch.Tensor:
        """Send an array or tensor of the host. From page-locked memory, this does not wait for the copy."""
        tensor = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
        return tensor.to(self._device, non_blocking=self._device.type == "cuda")

    def put_all(self, arrays: Sequence[np.ndarray[Any, Any]]) -> list[torch.Tensor]:
        """Send arrays of one shape and dtype in one transfer."""
        return [*self.put(np.stack(arrays)).unbind()]

    def reserve(self, slots: RecordSlots, chunk: torch.Tensor) -> TorchTable:
        """Return a table with a row for each of these slots, to be written in chunks of `chunk`'s dtype and shape."""
        return TorchTable(slots, chunk)

    def itemsize(self, dtype: np.dtype[Any]) -> int:
        """Return the bytes that a value of this dtype takes: as many as on the host."""
        return dtype.itemsize

    def free_bytes(self) -> int | None:
        """Return the bytes of a GPU's memory that no program uses; None for other devices."""
        return int(torch.cuda.mem_get_info(self._device)[0]) if self._device.type == "cuda" else None

    def as_image(self, images: torch.Tensor) -> torch.Tensor:
        """Return images as (batch, channels, height, width), channels last in memory."""
        return images.permute(0, 3, 1, 2)


class TorchTable:
    """A table whose rows are bytes, so that rows of any dtype are gathered in the same way."""

    def __init__(self, slots: RecordSlots, chunk: torch.Tensor) -> None:
        """Reserve memory on the chunk's device. Raises DeviceFullError where there is not enough."""
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
                "leave resident out"
            ) from error

    def write(self, number: torch.Tensor, chunk: torch.Tensor) -> None:
        """Write chunk `number` to its rows."""
        rows = chunk.reshape(len(chunk), -1).view(torch.uint8).view(self._word)
        places = number * self._count + torch.arange(self._count, device=self.rows.device)
        self.rows.index_copy_(0, places, rows)

    def take(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the rows with these numbers, in the shape and dtype of the records."""
        rows = self.rows.index_select(0, slots)
        return rows.view(torch.uint8).view(self._dtype).reshape(len(slots), *self._shape)
