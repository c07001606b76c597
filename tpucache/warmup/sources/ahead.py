"""Reads samples ahead in threads while a worker encodes earlier ones, if the storage is slow to answer."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Final

from tpucache.store.ahead import Lateness, ReadAhead
from tpucache.warmup.sources.source import Item, Sample, Source, loads_in_threads

#: The size that is assumed for a sample of unknown size.
_UNKNOWN_BYTES: Final = 2 << 20


@functools.lru_cache(maxsize=1)
def lateness_of(_work: Path, latency: float = 0.0) -> Lateness:
    """Return this process's measurements of how fast the storage answers, for the build with this work folder.

    The first measurement is `latency`, the seconds that the storage took for an earlier answer.
    """
    return Lateness(latency)


class LoadAhead(ReadAhead[Sample, Item]):
    """Loads samples ahead, and returns their items in order; the end of its `with` block ends its threads."""

    def __init__(
        self, load: Callable[[Sample], Item], source: Source, samples: Iterable[Sample], lateness: Lateness
    ) -> None:
        """Prepare to load `samples`, in this order, with the function `load`. This does not read them yet.

        If the storage is slow, and the source allows loading in threads, several threads call the function. Otherwise
        the calling thread does.
        """
        self._may_load_ahead = loads_in_threads(source)
        ahead = samples if self._may_load_ahead else ()
        super().__init__(load, ahead, lambda sample: sample.bytes or _UNKNOWN_BYTES, lateness)

    def follow(self, samples: Iterable[Sample]) -> None:
        """Load `samples` from now on, in this order, instead of the samples that were still to be loaded.

        If `samples` begins with samples that are being read already, these are not read again. Samples with the same
        number are the same.
        """
        if not self._may_load_ahead:
            return
        left, kept = deque(samples), deque[tuple[Sample, Future[Item]]]()
        while self._ahead and (not left or self._ahead[0][0].number != left[0].number):
            self._take().cancel()
        while self._ahead and left and self._ahead[0][0].number == left[0].number:
            kept.append((left.popleft(), self._ahead.popleft()[1]))
        while self._ahead:
            self._take().cancel()
        self._ahead, self._left, self._returned = kept, left, None
