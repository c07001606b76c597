"""BuildBar: the progress of a build, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpucache.progress import Progress
from tpucache.units import size_text

if TYPE_CHECKING:
    from tpucache.warmup.run.scheduler import BuildProgress


class BuildBar:
    """Shows the progress of a build or repair, from its first report."""

    def __init__(self, label: str) -> None:
        """Show nothing yet."""
        self._label = label
        self._shown: Progress | None = None

    def show(self, progress: BuildProgress) -> None:
        """Show what is done."""
        if self._shown is None:
            self._shown = Progress(progress.total, self._label, "samples", initial=progress.samples)
        skipped = f", {progress.skipped:,} skipped" if progress.skipped else ""
        self._shown.advance_to(progress.samples, f"{size_text(progress.bytes)}{skipped}")

    def close(self) -> None:
        """Show the last state and end the bar."""
        if self._shown is not None:
            self._shown.close()
