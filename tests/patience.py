"""How long tests wait for what must come: for so long that no machine is too slow, and never for a time to pass."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

#: Seconds that bound what would hang, everywhere. A test's own limit is longer, so that its message is this one.
PATIENCE: Final = 480.0


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until a condition is true. Raises TimeoutError where it never is."""
    until = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError("what the test waits for does not come")
        time.sleep(0.002)
