"""Decides whether records stay in an accelerator's memory, by how much memory is free after the first steps."""

from __future__ import annotations

import logging
from typing import Final

from tpucache.errors import UsageError
from tpucache.ondevice.resident import ResidentMemory
from tpucache.ondevice.settings import ResidentChoice
from tpucache.ondevice.slots import DeviceFullError

#: Records may take this share of the memory that is free after the first steps. Fragmentation takes some of the rest.
MOST_OF_FREE: Final = 0.8

_log = logging.getLogger("tpucache")


class ResidentDecision:
    """Says whether records stay on a device, how many bytes of its memory they need, and why.

    With the choice "auto" this is decided when `decide` is called, after the first steps have allocated their memory.
    Until then, `is_resident` is False.
    """

    def __init__(
        self, choice: ResidentChoice, memory: ResidentMemory | None, planned_bytes: int, never: str, not_auto: str
    ) -> None:
        """Take the user's `choice`, the device's `memory`, and the bytes that all records need in it, `planned_bytes`.

        `never` says why the device cannot keep records, and `not_auto` why the choice "auto" does not keep them; each
        is "" if there is no such reason. Raises UsageError for the choice "yes" if the records do not fit, or `never`
        gives a reason.
        """
        self.planned_bytes, self.choice, self._memory = planned_bytes, choice, memory
        self.is_resident, self.reason, self._is_open = False, "resident=yes", False
        if choice == "yes":
            free = None if never or memory is None else memory.free_bytes()
            if free is not None and planned_bytes > free:
                never = f"the device has {free / 1e9:,.2f} GB left"
            if never:
                raise UsageError(
                    f"resident=yes would keep {self._gigabytes} of records on the device, but {never}: use resident=no"
                )
            self.is_resident = True
        elif choice == "auto":
            self._is_open = not (never or not_auto)
            self.reason = never or not_auto or "the first steps have not ended yet"

    def decide(self) -> bool:
        """Decide for the choice "auto" whether records stay on the device, and return the decision.

        Call this after the first steps have allocated their memory. If there is nothing left to decide, nothing changes
        and the result is False.
        """
        if not self._is_open:
            return False
        free, self._is_open = (self._memory and self._memory.free_bytes()) or 0, False
        self.is_resident = self.planned_bytes <= MOST_OF_FREE * free
        relation = "fit into" if self.is_resident else "are more than"
        self.reason = f"they {relation} {MOST_OF_FREE:.0%} of the {free / 1e9:,.2f} GB that steps leave"
        return self.is_resident

    def give_up(self, error: DeviceFullError) -> None:
        """Keep no records on the device from now on, and log a warning with the text of `error`.

        If the choice is "yes", raise `error` instead.
        """
        if self.choice == "yes":
            raise error
        self.is_resident, self.reason = False, str(error)
        _log.warning("%s. From now on, each batch is sent to the device when it is needed", error)

    def describe(self) -> str:
        """Return the decision as text, with the bytes of the records and the reason."""
        if self.is_resident:
            return f"yes, {self._gigabytes} of records in the device's memory: {self.reason}"
        return f"no, {self._gigabytes} of records are sent as they are needed: {self.reason}"

    @property
    def _gigabytes(self) -> str:
        return f"{self.planned_bytes / 1e9:,.2f} GB"
