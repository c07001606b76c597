"""ReadingPlan: how a loader will read records."""

from __future__ import annotations

from typing import Literal, NamedTuple


class ReadingPlan(NamedTuple):
    """How records are read: kept in memory once they are read, from maps of the shards, or from files each time.

    `planned_bytes` are those of the process's memory that they will take.
    """

    way: Literal["keep", "map", "stream"]
    planned_bytes: int

    @property
    def text(self) -> str:
        """The plan in words."""
        size = f"{self.planned_bytes / 1e9:,.1f} GB"
        if self.way == "keep":
            return f"kept in memory, {size}"
        if self.way == "map":
            return f"mapped, {size}"
        return f"from files, {size} of them kept in memory" if self.planned_bytes else "from files"
