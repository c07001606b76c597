"""SamplerOrder: an epoch's order from a torch Sampler, the same on every rank."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, Sampler
from torch.utils.data.distributed import DistributedSampler

from tpucache.errors import OutOfRangeError, UsageError
from tpucache.loading.indices import Positions, integer_positions


class SamplerOrder:
    """The indices of a torch Sampler, listed once per epoch.

    While the sampler runs, the random generators of torch, numpy and Python and the sampler's own generator are seeded
    by (seed, epoch), and by the initial seed of the sampler's own generator if it has one. So every rank with this
    initial seed gets the same indices, and a saved state can continue. The sampler's `set_epoch` is called if it
    exists.
    """

    def __init__(self, sampler: Any, samples: int) -> None:
        """Store a sampler for a dataset with `samples` samples.

        Raises UsageError for a sampler of batches, for a sampler of a single rank, for a sampler without a length, and
        for anything that is not a torch Sampler.
        """
        if isinstance(sampler, BatchSampler):
            raise UsageError("sampler gives batches: give the sampler of single samples that the BatchSampler wraps")
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas != 1:
            raise UsageError(
                "a DistributedSampler divides samples among ranks, which CachedLoader does itself: give the loader "
                "rank and world_size, and a sampler of all samples"
            )
        if not isinstance(sampler, Sampler):
            raise UsageError(f"sampler is a torch.utils.data.Sampler, not {type(sampler).__name__}")
        try:
            len(sampler)  # type: ignore[arg-type]  # most samplers have a length, although Sampler itself has none
        except (TypeError, NotImplementedError) as error:
            raise UsageError(
                f"{type(sampler).__name__} has no __len__: add a method __len__ that returns the number of indices in "
                "an epoch"
            ) from error
        self._sampler: Any = sampler
        self._samples = samples
        self._listed: tuple[int, int, Positions] | None = None
        self.text = f"sampler {type(sampler).__qualname__}"

    def __len__(self) -> int:
        return len(self._sampler)

    def positions(self, seed: int, epoch: int) -> Positions:
        """Return the indices of an epoch: int64 (n,). Do not write to this array.

        Raises UsageError for indices out of range, or if their number is not the sampler's length.
        """
        listed = self._listed
        if listed is None or listed[:2] != (seed, epoch):
            listed = self._listed = seed, epoch, self._list(seed, epoch)
        return listed[2]

    def digest(self, seed: int, epoch: int) -> str:
        """Return a SHA-256, in hexadecimal, of an epoch's order."""
        return hashlib.sha256(self.positions(seed, epoch).astype("<i8").tobytes()).hexdigest()

    def _list(self, seed: int, epoch: int) -> Positions:
        name = type(self._sampler).__name__
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        expected = len(self._sampler)
        with _seeded(seed, epoch, getattr(self._sampler, "generator", None)):
            indices = list(self._sampler)
        try:
            array = np.asarray(indices)
        except ValueError:  # rows of several lengths
            array = np.empty((0, 0))
        if array.ndim != 1:
            raise UsageError(f"{name} gives batches, not single samples: give a sampler of single samples")
        try:
            found = integer_positions(array, self._samples, from_end=False)
        except OutOfRangeError as error:
            raise OutOfRangeError(
                f"{name} is not for this dataset: {error}. Make the sampler from this dataset"
            ) from error
        if len(found) != expected:
            raise UsageError(
                f"{name} gives {len(found):,} indices in epoch {epoch}, but its __len__ returns {expected:,}: correct "
                "__len__"
            )
        return found


@contextmanager
def _seeded(seed: int, epoch: int, generator: Any) -> Iterator[None]:
    """Seed all random generators by (seed, epoch) and the initial seed of `generator`; restore them after the block."""
    own = generator if isinstance(generator, torch.Generator) else None
    entropy = [seed, epoch] if own is None else [seed, epoch, own.initial_seed()]
    word = int(np.random.SeedSequence(entropy).generate_state(1)[0])
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    kept = None if own is None else own.get_state()
    random.seed(word)
    np.random.seed(word)
    torch.default_generator.manual_seed(word)
    if own is not None:
        own.manual_seed(word)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if own is not None and kept is not None:
            own.set_state(kept)
