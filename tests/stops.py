"""Builds that are stopped where something is known to be kept, however slow the machine is."""

from __future__ import annotations

from collections.abc import Callable

from tpucache.progress import BuildProgress


class Stopped(Exception):
    """What ends a build in these tests."""


def stop_after(samples: int) -> Callable[[BuildProgress], None]:
    """Return an `on_progress` that ends a build once more than this many samples are kept."""

    def look(progress: BuildProgress) -> None:
        if progress.samples > samples:
            raise Stopped

    return look
