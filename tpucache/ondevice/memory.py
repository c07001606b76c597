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
    """The memory of a CPU, a GPU, or another torch device that runs operations one by one (an XLA device does not)."""

    cores, tile = 1, NO_TILE

    def __init__(self, device: Any) -> None:
        """Take `device`, a torch.device or its name. Raises UsageError if this machine does not have the device."""
        try:
            self._device = torch.empty(1, device=device).device
        except Exception as error:  # torch's error depends on the device and on the build
            raise UsageError(f"device {device!r} cannot be used: {error}") from error

    def put(self, array: Any, name: str = "rows") -> torch.Tensor:
        """Return a tensor on the device with the values of `array`, a numpy array or a tensor of the host.

        For an array in page-locked memory, this does not wait until the values are copied to a GPU. `name` is not used.
        """
        tensor = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
        return tensor.to(self._device, non_blocking=self._device.type == "cuda")

    def put_all(self, arrays: Sequence[np.ndarray[Any, Any]]) -> list[torch.Tensor]:
        """Return a tensor on the device for each of these arrays of one shape and dtype, all sent in one transfer."""
        return [*self.put(np.stack(arrays)).unbind()]

    def reserve(self, slots: RecordSlots, chunk: torch.Tensor) -> TorchTable:
        """Return a table on the device with as many rows as `slots`, for records like those in `chunk`.

        `chunk` is a tensor (records, *shape). It only gives the records' dtype and shape.
        """
        return TorchTable(slots, chunk)

    def itemsize(self, dtype: np.dtype[Any]) -> int:
        """Return the bytes that a value of this dtype takes on the device: as many as on the host."""
        return dtype.itemsize

    def free_bytes(self) -> int | None:
        """Return the bytes of a GPU's memory that no program uses; None for other devices."""
        return int(torch.cuda.mem_get_info(self._device)[0]) if self._device.type == "cuda" else None

    def as_image(self, images: torch.Tensor) -> torch.Tensor:
        """Return a view (batch, channels, height, width) of images (batch, height, width, channels)."""
        return images.permute(0, 3, 1, 2)


class TorchTable:
    """One field of all records, on a torch device.

    Each row is stored as integers, so that records of any dtype are gathered in the same way.
    """

    def __init__(self, slots: RecordSlots, chunk: torch.Tensor) -> None:
        """Reserve memory for `slots.rows` rows on the device of `chunk`, whose rows have the records' shape and dtype.

        Raises DeviceFullError if the device has not enough memory.
        """
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
        """Write the records of `chunk` to that chunk's rows.

        `number` is the number of the chunk, a tensor (1,) on the device.
        """
        rows = chunk.reshape(len(chunk), -1).view(torch.uint8).view(self._word)
        places = number * self._count + torch.arange(self._count, device=self.rows.device)
        self.rows.index_copy_(0, places, rows)

    def take(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the records in these rows of the table, with their shape and dtype: (len(slots), ...)."""
        rows = self.rows.index_select(0, slots)
        return rows.view(torch.uint8).view(self._dtype).reshape(len(slots), *self._shape)
