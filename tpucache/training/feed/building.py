"""Measures how long a run waits while its cache is being built, and afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tpucache.loading.dataset import CachedDataset


class Building:
    """Measures how long a run waits for a cache that is built while the run trains.

    For a finished cache it measures nothing. Only the time of steps counts, without evaluations and checkpoints.
    """

    def __init__(self, train_set: CachedDataset, clock: Callable[[], float] = time.monotonic) -> None:
        """Take the training samples, before the first epoch; `clock` returns the time in seconds."""
        self._train_set, self._clock = train_set, clock
        self._is_needed = train_set.cache.is_growing
        self._is_over, self._is_new = False, True  # whether the cache is built; whether the epoch is new
        self._epochs = 0  # epochs during which the cache was built
        self._began: tuple[float, float] | None = None  # at `begin`: the clock, and the seconds waited before
        self._spent = [[0.0, 0.0], [0.0, 0.0]]  # [seconds, seconds waited], during the build and after it
        self._waited: Callable[[], float] = lambda: 0.0

    def begin(self, waited: Callable[[], float]) -> None:
        """Start the clock, as steps begin; `waited` returns the seconds that the loop has waited so far."""
        if not self._is_needed or self._began is not None:
            return
        self._waited, self._began = waited, (self._clock(), waited())
        if self._is_new and not self._is_over:
            self._is_over = self._train_set.is_finished and self._epochs > 0
            self._epochs += not self._is_over
        self._is_new = False

    def end(self) -> None:
        """Stop the clock, as steps pause."""
        for at, spent in enumerate(self._so_far()):
            self._spent[self._is_over][at] += spent
        self._began = None

    def end_epoch(self) -> None:
        """Record that the next steps belong to another epoch."""
        self._is_new = True

    @property
    def text(self) -> str:
        """The share of the cache that is built, and the share of the time spent waiting, for the progress bar.

        It is "" in the epochs that begin after the cache is built.
        """
        if not self._is_needed or self._is_over:
            return ""
        seconds, waited = (sum(both) for both in zip(self._so_far(), self._spent[0], strict=True))
        return f"cache built {self._train_set.cache.built:.0%}, waited {waited / seconds if seconds > 0 else 0.0:.0%}"

    def to_dict(self) -> dict[str, Any]:
        """Return the value of `Pace.built`; empty if the cache was finished before the run."""
        if not self._is_needed:
            return {}
        shares = [waited / seconds if seconds > 0 else None for seconds, waited in self._spent]
        is_finished = self._train_set.is_finished
        return {
            "cache": self._train_set.place,
            "bytes": self._train_set.manifest.total_bytes if is_finished else None,
            "epochs": self._epochs,
            "waited": shares[0] or 0.0,
            "later": shares[1],
        }

    def _so_far(self) -> tuple[float, float]:
        """Return the seconds since the last `begin`, and how many of them the loop waited."""
        if self._began is None:
            return 0.0, 0.0
        return self._clock() - self._began[0], self._waited() - self._began[1]
