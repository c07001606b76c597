"""Normalisation of whole batches on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tpucache.ondevice.arrays import Array, ArrayLibrary


class BatchNormalise:
    """(batch, height, width, channels) of any dtype -> float32 (batch, channels, height, width), (x - mean) / std."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], library: ArrayLibrary) -> None:
        """Take each channel's mean and standard deviation; a channel without spread is only centred."""
        scale = [1.0 / spread if spread else 1.0 for spread in std]
        shift = [-m * s for m, s in zip(mean, scale, strict=True)]
        self._library = library
        self._scale, self._shift = (
            library.constant(np.array(values, np.float32).reshape(1, -1, 1, 1)) for values in (scale, shift)
        )

    def __call__(self, images: Array) -> Array:
        """Return the normalised batch."""
        return self.pixels(self._library.cast(self._library.functions.moveaxis(images, 3, 1), "float32"))

    def pixels(self, images: Array) -> Array:
        """Normalise a batch of pixel values that is float32 (batch, channels, height, width) already."""
        return images * self._scale + self._shift
