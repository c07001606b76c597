"""Code digests: threads that look at the code of one callable at the same time all see the same."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from tpucache.warmup.code_digest import code_digests

_THREADS = 4


@pytest.fixture
def eager_switches() -> Iterator[None]:
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()

    def collected(*_: object) -> None:
        for _ in range(10):
            pass

    gc.callbacks.append(collected)
    gc.set_threshold(50)
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)
    gc.set_threshold(*thresholds)
    gc.callbacks.remove(collected)


@pytest.mark.usefixtures("eager_switches")
def test_threads_digest_the_code_of_a_callable_at_the_same_time(write_module: Callable[[str, str], None]) -> None:
    write_module("helper_by_test", "values = [" + "1 + (2 * (3 - 4)), " * 50 + "]\n")
    write_module("digested_by_test", "import helper_by_test\ndef same(image, generator):\n    return image\n")
    expected = code_digests("digested_by_test:same")
    found = []
    start = threading.Barrier(_THREADS)

    def work() -> None:
        start.wait()
        found.extend(code_digests("digested_by_test:same") for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 20 * _THREADS
    assert set(expected["helpers"]) == {"helper_by_test"}
