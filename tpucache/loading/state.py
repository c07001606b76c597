"""What a loader tells about itself: its position, which another loader continues from, and its metrics."""

from __future__ import annotations

import json
import operator
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tpucache.errors import UsageError
from tpucache.loading.reading.record_reader import WaysRead
from tpucache.native import Array

if TYPE_CHECKING:
    from tpucache.store.reader import NetworkUse

_COMPARED: Final = {
    "samples": "it belongs to another cache or to another selection of samples",
    "digest": "the cache, the variants, the labels, the selection or the order of the selection have changed",
    "order": "it was saved in another order: give the same shuffle, window, weights, balance or sampler",
}


_ROUNDING: Final = 1e-6  # as a part of the deviation


@dataclass(frozen=True)
class LoaderState:
    """A position in an epoch, and everything that decides the batches after it.

    `position` is the number of samples that all ranks together have handed out in this epoch, of `samples`. `order` is
    the text of the EpochOrder, and `chunk` its samples per chunk, or 0. `fingerprint` is the recipe's, and `digest` the
    dataset's. `drawn` is a digest of this epoch's order if a torch Sampler gives the order, otherwise "".
    """

    seed: int
    epoch: int
    position: int
    samples: int
    order: str
    chunk: int
    fingerprint: str
    digest: str
    drawn: str = ""
    scale: str = ""

    def to_dict(self) -> dict[str, int | str]:
        return asdict(self)


def read_state(state: Mapping[str, Any], own: LoaderState, by_sample: str) -> LoaderState:
    """Check a saved state of another loader against `own`, and return it. It keeps an order by samples, `by_sample`."""
    if state.get("order") == by_sample:
        own = replace(own, order=by_sample)
    mine = own.to_dict()
    # The fingerprint is not compared: adding variants may change it. The digest covers exactly what is read.
    for name, reason in _COMPARED.items():
        if state.get(name) != mine[name]:
            raise UsageError(
                f"the state cannot be continued here, {reason}: {name} {state.get(name)!r} in the state, "
                f"{mine[name]!r} here. Make the dataset and the loader as they were, or begin anew"
            )
    if not _same_scale(state.get("scale", own.scale), own.scale):  # states of before have no scale
        raise UsageError(
            "the state cannot be continued here, its labels were standardised by other numbers: "
            f"{state['scale'] or 'none'} in the state, {own.scale or 'none'} here. Give with_standardised_labels the "
            "same means and deviations, or begin anew"
        )
    chunk = own.chunk and _integer(state, "chunk", 1)
    seed, epoch, position = (_integer(state, name, 0) for name in ("seed", "epoch", "position"))
    if position > own.samples:
        raise UsageError(
            f"a loader's state has a position of at most {own.samples}, the samples of an epoch, not {position}: "
            "begin anew, as this state was changed"
        )
    return replace(own, seed=seed, epoch=epoch, position=position, chunk=chunk, drawn=state.get("drawn", ""))


def scale_text(scale: tuple[Array, Array] | None) -> str:
    """Return the means and the deviations that labels are standardised by as JSON; "" if they are as stored."""
    return "" if scale is None else json.dumps([each.tolist() for each in scale])


def _same_scale(saved: object, own: str) -> bool:
    """Return whether two texts of `scale_text` stand for the same numbers, except for rounding by another library."""
    if saved == own or not (isinstance(saved, str) and saved and own):
        return saved == own
    try:
        old, new = (np.array(json.loads(text), np.float64) for text in (saved, own))
    except ValueError:
        return False
    return old.shape == new.shape and bool((np.abs(old - new) <= _ROUNDING * new[1]).all())


def _integer(state: Mapping[str, Any], name: str, low: int) -> int:
    value = state.get(name)
    if type(value) is not int or value < low:
        raise UsageError(f"a loader's state holds {name} as a whole number from {low}, not {value!r}")
    return value


_KEPT_WAITS: Final = 1024
_QUANTILES: Final = (50, 95, 99)


class LoaderMetrics:
    """Counts the batches that a loader hands out. Only the thread that takes the batches may call its methods."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._waits: deque[float] = deque(maxlen=_KEPT_WAITS)
        self._waited = 0.0
        self._batches = self._samples = self._ready = 0
        self._read = WaysRead()

    def note(self, asked: float, ready: int, samples: int, read: WaysRead | None) -> None:
        """Count a batch, which was requested at `asked`, a value of `time.perf_counter()`, and was `read` in these
        ways.
        """
        now = time.perf_counter()
        if self._began is None:
            self._began = asked
        self._waits.append(now - asked)
        self._waited += now - asked
        self._batches += 1
        self._samples += samples
        self._ready = ready
        if read is not None:
            self._read = WaysRead(*map(operator.add, self._read, read))

    def to_dict(self, queue_size: int, networks: Sequence[NetworkUse], maps: Mapping[str, int]) -> dict[str, Any]:
        read = self._read
        records = read.memory + read.map + read.file
        waits = np.percentile(self._waits, _QUANTILES).tolist() if self._waits else [0.0] * len(_QUANTILES)
        return {
            "batches": self._batches,
            "samples": self._samples,
            "seconds": 0.0 if self._began is None else time.perf_counter() - self._began,
            "waited_seconds": self._waited,
            **{f"wait_p{quantile}": wait for quantile, wait in zip(_QUANTILES, waits, strict=True)},
            "queue": {"ready": self._ready, "size": queue_size},
            "records": {"memory": read.memory, "map": read.map, "file": read.file},
            "bytes": {
                "memory": read.memory_bytes,
                "map": read.map_bytes,
                "file": read.file_bytes,
                "network": sum(use.bytes for use in networks),
            },
            "maps": dict(maps),
            "hits": (read.memory + read.map) / records if records else 0.0,
            "network": {
                "requests": sum(use.requests for use in networks),
                "failures": sum(use.failures for use in networks),
                "waited_seconds": sum(use.waited for use in networks),
            }
            if networks
            else None,
        }
