"""EpochOrder: the samples of an epoch, their order, and how many consecutive samples have the same variant."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np

from tpucache.errors import UsageError
from tpucache.loading.dataset import CachedDataset
from tpucache.loading.indices import Positions
from tpucache.loading.sampler import (
    BalancedDraws,
    WeightedDraws,
    block_order,
    full_order,
    local_order,
    local_parts,
)
from tpucache.loading.state import LoaderState
from tpucache.loading.tensors import HAS_TORCH

Shuffle = bool | Literal["full", "block", "local"]

_BY_CHUNK = ", variants by chunk"


class Sampling(Protocol):
    """Draws the samples of an epoch: by weights, by classes, or by a torch Sampler."""

    text: str

    def __len__(self) -> int:
        """Return the number of samples in an epoch."""
        ...

    def positions(self, seed: int, epoch: int) -> Positions:
        """Return the positions of an epoch's samples: int64 (n,)."""
        ...

    def digest(self, seed: int, epoch: int) -> str:
        """Return a SHA-256 of an epoch's order, or "" if `text` determines the order."""
        ...


@dataclass(frozen=True)
class EpochOrder:
    """An order of samples. `name` is "file", "full", "block", "local", or "drawn" for an order by `sampling`.

    `window` and `chunk` are the sizes, in samples, for "block", else 0. `parts` and `each` are for "local": the number
    of parts into which the samples are divided, and the number of samples of each part in a batch. If `is_by_chunk` is
    True, all samples of a chunk have the same variant in an epoch, so that a chunk is a contiguous range of a file.
    """

    name: str
    window: int = 0
    chunk: int = 0
    is_by_chunk: bool = False
    sampling: Sampling | None = None
    parts: int = 0
    each: int = 0

    @property
    def text(self) -> str:
        """The order as text, for a loader's state."""
        return self.text_by_sample + (_BY_CHUNK if self.is_by_chunk else "")

    @property
    def text_by_sample(self) -> str:
        """The order as text. Unlike `text`, it never says that all samples of a chunk have the same variant."""
        if self.sampling is not None:
            return self.sampling.text
        if self.name == "local":
            return f"local {self.parts} parts, {self.each} of each a batch"
        return f"block {self.window}" if self.name == "block" else self.name

    @property
    def shared(self) -> int:
        """The number of consecutive samples that have the same variant."""
        return self.chunk if self.is_by_chunk else 1

    def length(self, samples: int) -> int:
        """Return the number of samples in an epoch, for a dataset with `samples` samples."""
        return samples if self.sampling is None else len(self.sampling)

    def positions(self, samples: int, seed: int, epoch: int) -> Positions:
        """Return the positions of the samples in an epoch's order: int64 (n,)."""
        if self.sampling is not None:
            return self.sampling.positions(seed, epoch)
        if self.name == "full":
            return full_order(samples, seed, epoch)
        if self.name == "block":
            return block_order(samples, seed, epoch, chunk=self.chunk, window=self.window)
        if self.name == "local":
            return local_order(samples, seed, epoch, parts=self.parts, each=self.each)
        return np.arange(samples)

    def devices(self, samples: int, seed: int, count: int) -> Positions | None:
        """Return the device, from 0 to `count` - 1, that gets each sample in every epoch: int64 (samples,).

        Returns None if `count` is 1, or if a sample may go to different devices in different epochs.
        """
        if count == 1 or not self.parts or self.parts % count:
            return None
        return local_parts(samples, seed, parts=self.parts) // (self.parts // count)

    def digest(self, seed: int, epoch: int) -> str:
        """Return a SHA-256 of an epoch's order if a torch Sampler gives the order, otherwise ""."""
        return "" if self.sampling is None else self.sampling.digest(seed, epoch)

    def check(self, saved: LoaderState) -> None:
        """Raise UsageError if a sampler gives another order than when the state was saved."""
        if self.digest(saved.seed, saved.epoch) != saved.drawn:
            raise UsageError(
                f"the state cannot be continued here: the sampler gives another order in epoch {saved.epoch} than when "
                "the state was saved. A sampler's order must follow from its arguments, set_epoch and the random "
                "numbers of torch, numpy and Python alone"
            )

    def continued(self, text: str, chunk: int) -> EpochOrder:
        """Return this order with the `chunk` and `is_by_chunk` of a saved order, whose `EpochOrder.text` is `text`."""
        return replace(self, chunk=chunk, is_by_chunk=text.endswith(_BY_CHUNK))


def make_order(
    shuffle: Shuffle, window: int, chunk: int, *, changes_variants: bool, parts: int = 1, each: int = 1
) -> EpochOrder:
    """Return the order for a loader's `shuffle`. Raises UsageError for an invalid value.

    `window` and `chunk` are used for "block", `parts` and `each` for "local"; see EpochOrder. `changes_variants` says
    whether the dataset has variant="epoch".
    """
    if shuffle == "local":
        return EpochOrder("local", parts=parts, each=each)
    if isinstance(shuffle, bool):
        return EpochOrder("full" if shuffle else "file")
    if shuffle == "full":
        return EpochOrder("full")
    if shuffle == "block":
        return EpochOrder("block", window, chunk, is_by_chunk=changes_variants and chunk > 1)
    raise UsageError(f'shuffle is True, False, "full", "block" or "local", not {shuffle!r}')


def make_sampled_order(
    dataset: CachedDataset, shuffle: Shuffle = True, weights: Any = None, balance: bool = False, sampler: Any = None
) -> EpochOrder | None:
    """Return the order for `weights`, `balance` or `sampler`; None if all three are left out.

    Raises UsageError for an invalid value, for two of the three, and in combination with shuffle="block" or "local".
    """
    if not isinstance(balance, bool):
        raise UsageError(f"balance is True or False, not {balance!r}")
    given = {"weights": weights is not None, "balance": balance, "sampler": sampler is not None}
    names = [name for name, is_given in given.items() if is_given]
    if not names:
        return None
    if len(names) > 1:
        raise UsageError(f"{' and '.join(names)} each say which samples an epoch has: give one of them")
    if shuffle not in (True, False, "full"):
        raise UsageError(f"{names[0]} decides the order itself: leave shuffle={shuffle!r} out")
    sampling: Sampling
    if weights is not None:
        sampling = WeightedDraws(weights, len(dataset))
    elif balance:
        sampling = BalancedDraws(np.asarray(dataset.labels), len(dataset.classes))
    else:
        if not HAS_TORCH:
            raise UsageError("sampler needs torch, which is not installed: install torch, or give weights instead")
        from tpucache.loading.torch_sampler import SamplerOrder

        sampling = SamplerOrder(sampler, len(dataset))
    return EpochOrder("drawn", sampling=sampling)
