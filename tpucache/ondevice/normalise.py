"""Normalisation of whole batches on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Normalise:
    """uint8 (batch, height, width, channels) -> float32 (batch, channels, height, width), (x - mean) / std."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], device: torch.device) -> None:
        """Take each channel's mean and standard deviation in 0..255; a channel without spread is only centred."""
        scale = [1.0 / spread if spread else 1.0 for spread in std]
        shape = (1, len(scale), 1, 1)
        self._scale = torch.tensor(scale).view(shape).to(device)
        self._shift = torch.tensor([-m * s for m, s in zip(mean, scale, strict=True)]).view(shape).to(device)

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Return the normalised batch."""
        return self.pixels(images.permute(0, 3, 1, 2).float())

    def pixels(self, images: torch.Tensor) -> torch.Tensor:
        """Normalise a batch of pixel values that is float32 (batch, channels, height, width) already."""
        return images * self._scale + self._shift
