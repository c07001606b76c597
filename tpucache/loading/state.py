"""What CachedLoader.state_dict holds: written by one loader, checked by the one that continues."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from tpucache.errors import UsageError

_COMPARED: Final = {
    "samples": "it belongs to another cache, or another part of it",
    "digest": "the cache, the variants, the labels, the selection or its order have changed",
    "order": "it belongs to another order: give the same shuffle, window, weights, balance or sampler",
}


@dataclass(frozen=True)
class LoaderState:
    """A place in an epoch, and what decides the batches that follow it.

    `position` counts the samples of the epoch that have been handed out, over all ranks. `digest` is the dataset's;
    `chunk` the samples in a chunk of the block order, 0 for other orders; `drawn` a digest of this epoch's order where
    a torch Sampler gives it, else "".
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

    def to_dict(self) -> dict[str, int | str]:
        """Return the state as plain numbers and strings, for torch.save or JSON."""
        return asdict(self)


def read_state(state: Mapping[str, Any], own: LoaderState, by_sample: str) -> LoaderState:
    """Return another loader's state, if this loader can continue there; `own` is this loader's state.

    A state of the order `by_sample`, in which each sample changes its variant by itself, is continued in that order.
    Raises UsageError for a state that does not fit.
    """
    if "digest" not in state:
        raise UsageError(
            "this is no state of a loader, or one that was written before version 0.2 of tpucache: begin anew, or "
            "finish what it is for with version 0.2"
        )
    if state.get("order") == by_sample:
        own = replace(own, order=by_sample)
    mine = own.to_dict()
    # Adding variants may change the fingerprint, which covers how they are made; the digest covers what is read.
    for name, reason in _COMPARED.items():
        if state.get(name) != mine[name]:
            raise UsageError(
                f"the state cannot be continued here, {reason}: {name} {state.get(name)!r}, here {mine[name]!r}. "
                "Make the dataset and the loader as they were, or begin anew"
            )
    chunk = own.chunk and _integer(state, "chunk", 1)
    seed, epoch, position = (_integer(state, name, 0) for name in ("seed", "epoch", "position"))
    if position > own.samples:
        raise UsageError(
            f"a loader's state holds position as at most the {own.samples} samples of the dataset, not {position}"
        )
    return replace(own, seed=seed, epoch=epoch, position=position, chunk=chunk, drawn=state.get("drawn", ""))


def _integer(state: Mapping[str, Any], name: str, low: int) -> int:
    value = state.get(name)
    if type(value) is not int or value < low:
        raise UsageError(f"a loader's state holds {name} as a whole number from {low}, not {value!r}")
    return value
