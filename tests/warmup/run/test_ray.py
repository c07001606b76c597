"""Warmup by a local Ray instance of two workers."""

from __future__ import annotations

import importlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from patience import PATIENCE

from tpucache import Recipe, build_cache
from tpucache.warmup.run.executors import Executor

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray's own

_MODULE = """
import glob, os, pathlib, time
def slowly(image, generator):
    place = pathlib.Path(os.environ["RAY_WORKERS_BY_TEST"])
    if place.exists() and os.environ["DRIVER_BY_TEST"] != str(os.getpid()) and glob.glob(os.environ["KEPT_BY_TEST"]):
        (place / str(os.getpid())).touch()
        while not (place / "killed").exists():  # it is held until one of them is killed
            time.sleep(0.01)
    return image ^ generator.integers(0, 8, image.shape).astype(image.dtype)
"""


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Start Ray; the folder has the process numbers of its workers once it is made."""
    ray = pytest.importorskip("ray")
    (tmp_path / "ray_slow_by_test.py").write_text(_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("HOME", str(tmp_path))  # Ray writes there
    monkeypatch.setenv("RAY_WORKERS_BY_TEST", str(tmp_path / "workers"))
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setenv("KEPT_BY_TEST", str(tmp_path / "cache" / ".warmup" / "chunk-*.json"))
    monkeypatch.setenv("DRIVER_BY_TEST", str(os.getpid()))
    # Ray gives a node 30 seconds to start, on any machine: here its clock is slower.
    clock = SimpleNamespace(**{**vars(time), "monotonic": lambda: time.monotonic() * 30 / PATIENCE})
    monkeypatch.setattr(importlib.import_module("ray._private.node"), "time", clock)
    ray.init(num_cpus=2, include_dashboard=False)
    signal.signal(signal.SIGTERM, before)  # Ray's own would end the tests of signals
    yield tmp_path / "workers"
    ray.shutdown()


def test_ray_writes_the_bytes_of_a_local_run_also_when_a_worker_dies(
    write_photos: Any, workers: Path, tmp_path: Path, digests: Callable[[Path], dict[str, str]]
) -> None:
    source = write_photos(tmp_path / "photos", 150, size=(80, 70))
    recipe = Recipe(size=32, variants=1, augment="ray_slow_by_test:slowly")
    build_cache(source, tmp_path / "local", recipe, jobs=1)
    cache, killed, stop = tmp_path / "cache", list[int](), threading.Event()

    def kill() -> None:
        try:
            while not killed and not stop.wait(0.01):
                for path in workers.iterdir():
                    os.kill(int(path.name), signal.SIGKILL)
                    killed.append(int(path.name))
                    break
        finally:
            (workers / "killed").touch()

    workers.mkdir()
    killer = threading.Thread(target=kill)
    killer.start()
    try:
        build_cache(source, cache, recipe, engine=Executor("ray", jobs=2))
    finally:
        stop.set()
        killer.join()
    assert killed
    assert digests(cache) == digests(tmp_path / "local")
