"""EpochOrder: in which order a loader shows the samples of an epoch, and which of them share a variant."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from tpucache.errors import UsageError
from tpucache.loading.samples.sampler import Positions, block_order, full_order

Shuffle = bool | Literal["full", "block"]

_BY_CHUNK = ", variants by chunk"


@dataclass(frozen=True)
class EpochOrder:
    """The order "file", "full" or "block".

    `window` and `chunk`, in samples, are those of the block order, else 0. Where `is_by_chunk`, the samples of a chunk
    show the same variant of an epoch, so that a chunk is one stretch of a file.
    """

    name: str
    window: int = 0
    chunk: int = 0
    is_by_chunk: bool = False

    @property
    def text(self) -> str:
        """What a loader's state says of it."""
        return self.earlier_text + (_BY_CHUNK if self.is_by_chunk else "")

    @property
    def earlier_text(self) -> str:
        """What earlier versions said of it, which never changed variants by chunk."""
        return f"block {self.window}" if self.name == "block" else self.name

    @property
    def shared(self) -> int:
        """How many consecutive samples share a variant."""
        return self.chunk if self.is_by_chunk else 1

    def positions(self, samples: int, seed: int, epoch: int) -> Positions:
        """Return the positions of the samples in an epoch's order: int64 (samples,)."""
        if self.name == "full":
            return full_order(samples, seed, epoch)
        if self.name == "block":
            return block_order(samples, seed, epoch, chunk=self.chunk, window=self.window)
        return np.arange(samples)

    def continued(self, text: str, chunk: int) -> EpochOrder:
        """Return the order that a state of this text and chunk was saved in."""
        return replace(self, chunk=chunk, is_by_chunk=text.endswith(_BY_CHUNK))


def make_order(shuffle: Shuffle, window: int, chunk: int, *, changes_variants: bool) -> EpochOrder:
    """Return the order that a loader is asked for. Raises UsageError for any other value of `shuffle`."""
    if isinstance(shuffle, bool):
        return EpochOrder("full" if shuffle else "file")
    if shuffle == "full":
        return EpochOrder("full")
    if shuffle == "block":
        return EpochOrder("block", window, chunk, is_by_chunk=changes_variants and chunk > 1)
    raise UsageError(f'shuffle is True, False, "full" or "block", not {shuffle!r}')
