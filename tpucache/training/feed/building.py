"""Building: how long a run waited while its cache was built, and afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tpucache.loading.dataset import CachedDataset


class Building:
    """Measures the waiting of a run whose cache is built while it trains; for a finished cache it reports nothing.

    Time counts while steps are taken: without evaluations and checkpoints.
    """

    def __init__(self, train_set: CachedDataset, clock: Callable[[], float] = time.monotonic) -> None:
        """Take the training samples, before the first epoch."""
        self._train_set, self._clock = train_set, clock
        self._is_needed = train_set.cache.is_growing
        self._is_over, self._is_new = False, True  # the building; the epoch
        self._epochs = 0  # in which the cache was built
        self._began: tuple[float, float] | None = None  # the clock, and the seconds that the loop had waited
        self._spent = [[0.0, 0.0], [0.0, 0.0]]  # while it was built, and later: seconds, and those waited
        self._waited: Callable[[], float] = lambda: 0.0

    def begin(self, waited: Callable[[], float]) -> None:
        """Steps are taken from now on; `waited` gives the seconds that the loop has waited so far."""
        if not self._is_needed or self._began is not None:
            return
        self._waited, self._began = waited, (self._clock(), waited())
        if self._is_new and not self._is_over:
            self._is_over = self._train_set.is_finished and self._epochs > 0
            self._epochs += not self._is_over
        self._is_new = False

    def end(self) -> None:
        """No steps are taken for now."""
        for at, spent in enumerate(self._so_far()):
            self._spent[self._is_over][at] += spent
        self._began = None

    def end_epoch(self) -> None:
        """The steps from now on belong to another epoch."""
        self._is_new = True

    @property
    def text(self) -> str:
        """How much is built, and which share of the time the loop waits, for a bar; "" once that is over."""
        if not self._is_needed or self._is_over:
            return ""
        seconds, waited = (sum(both) for both in zip(self._so_far(), self._spent[0], strict=True))
        return f"cache built {self._train_set.cache.built:.0%}, waited {waited / seconds if seconds > 0 else 0.0:.0%}"

    def to_dict(self) -> dict[str, Any]:
        """Return `built` of a Pace; empty where the cache was finished before."""
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
        """Return the seconds since the last `begin`, and those that the loop waited in them."""
        if self._began is None:
            return 0.0, 0.0
        return self._clock() - self._began[0], self._waited() - self._began[1]
