"""Decides whether records stay in an accelerator's memory, by how much is free after the first steps."""

from __future__ import annotations

import logging
from typing import Final

from tpucache.errors import UsageError
from tpucache.ondevice.resident import ResidentMemory
from tpucache.ondevice.settings import ResidentChoice
from tpucache.ondevice.slots import DeviceFullError

#: The share of the memory free after the first steps that records may take. Fragmentation takes some of the rest.
MOST_OF_FREE: Final = 0.8

_log = logging.getLogger("tpucache")


class ResidentDecision:
    """Says whether records stay on a device, how many bytes of its memory they need, and why.

    With "auto" the decision waits until the first steps have allocated their memory; until `decide` is called, the
    answer is no.
    """

    def __init__(
        self, choice: ResidentChoice, memory: ResidentMemory | None, planned_bytes: int, never: str, not_auto: str
    ) -> None:
        """Take the bytes that all records need, and the reasons against keeping them, each "" if there is none.

        `never` says why the device cannot keep records, and `not_auto` why "auto" does not keep them. Raises UsageError
        for "yes" if the records do not fit, or `never` gives a reason.
        """
        self.planned_bytes, self.choice, self._memory = planned_bytes, choice, memory
        self.is_resident, self.reason, self._is_open = False, "asked for", False
        if choice == "yes":
            free = None if never or memory is None else memory.free_bytes()
            if free is not None and planned_bytes > free:
                never = f"the device has {free / 1e9:,.2f} GB left"
            if never:
                raise UsageError(f"resident=yes would keep {self._gigabytes} of records on the device, but {never}")
            self.is_resident = True
        elif choice == "auto":
            self._is_open = not (never or not_auto)
            self.reason = never or not_auto or "the first steps have not ended yet"

    def decide(self) -> bool:
        """Decide for "auto", after the steps have allocated their memory.

        Return whether records stay from now on and did not before.
        """
        if not self._is_open:
            return False
        free, self._is_open = (self._memory and self._memory.free_bytes()) or 0, False
        self.is_resident = self.planned_bytes <= MOST_OF_FREE * free
        relation = "fit into" if self.is_resident else "are more than"
        self.reason = f"they {relation} {MOST_OF_FREE:.0%} of the {free / 1e9:,.2f} GB that steps leave"
        return self.is_resident

    def give_up(self, error: DeviceFullError) -> None:
        """Send batches as they are needed from now on, and log a warning. If "yes" was asked for, raise the error."""
        if self.choice == "yes":
            raise error
        self.is_resident, self.reason = False, str(error)
        _log.warning("%s. From now on, batches are sent as they are needed", error)

    def describe(self) -> str:
        """Return the decision in words, with the memory that it takes and the reason."""
        if self.is_resident:
            return f"yes, {self._gigabytes} of records in the device's memory: {self.reason}"
        return f"no, {self._gigabytes} of records are sent as they are needed: {self.reason}"

    @property
    def _gigabytes(self) -> str:
        return f"{self.planned_bytes / 1e9:,.2f} GB"
