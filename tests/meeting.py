"""A plugin of pytest: a test is tried again if the threads of XLA's simulated devices did not meet in time."""

from __future__ import annotations

from typing import Final

import pytest
from _pytest.runner import runtestprotocol

#: XLA's CPU client says this when it ends a process, ten seconds after the first thread has begun to wait for the
#: others. No option changes that limit, and on a busy machine a thread may come later.
DID_NOT_MEET: Final = "Termination timeout for"
TRIES: Final = 3


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test of XLA up to three times. Threads that never meet fail it each time."""
    if not item.get_closest_marker("xla"):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for _ in range(TRIES):
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        if not any(DID_NOT_MEET in report.longreprtext for report in reports):
            break
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
