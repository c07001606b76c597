"""Which of several sources each sample of a mixture is of: an even pattern that their shares repeat."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from tpucache.errors import UsageError
from tpucache.loading.arguments import to_integer
from tpucache.loading.samples.sampler import Positions

_LONGEST: Final = 1_000_000


class Mixture:
    """An endless row of samples, in which source i has `shares[i]` of each `sum(shares)`, spread evenly."""

    def __init__(self, shares: Sequence[Any]) -> None:
        """Take a whole number from 1 for each source. Raises UsageError."""
        numbers = [to_integer("a share", share, 1) for share in shares]
        divisor = math.gcd(*numbers)
        self.shares = np.array([number // divisor for number in numbers], np.int64)
        if self.shares.sum() > _LONGEST:
            raise UsageError(f"shares add up to at most {_LONGEST:,}, not {self.shares.sum():,}: give smaller ones")
        sources = np.repeat(np.arange(len(numbers)), self.shares)
        turns = np.concatenate([np.arange(share) for share in self.shares])
        order = np.lexsort([sources, (turns + 0.5) / self.shares[sources]])
        self._sources, self._turns = sources[order], turns[order]

    def sources(self, first: int, stop: int) -> tuple[Positions, Positions]:
        """Return, for samples `first` to `stop` of the row, the source of each, and how many of it came before."""
        rounds, places = np.divmod(np.arange(first, stop), len(self._sources))
        sources = self._sources[places]
        return sources, rounds * self.shares[sources] + self._turns[places]
