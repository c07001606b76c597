"""Warmup by Ray: by a stand-in of its functions, and by a local instance of two workers."""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made import build_here, digests, write_photos
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
    ray = pytest.importorskip("ray")
    (tmp_path / "ray_slow_by_test.py").write_text(_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("HOME", str(tmp_path))  # Ray writes there
    monkeypatch.setenv("RAY_WORKERS_BY_TEST", str(tmp_path / "workers"))
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setenv("KEPT_BY_TEST", str(tmp_path / "cache" / ".warmup" / "arrived.jsonl"))
    monkeypatch.setenv("DRIVER_BY_TEST", str(os.getpid()))
    # Ray gives a node 30 seconds to start, on any machine: here its clock is slower.
    clock = SimpleNamespace(**{**vars(time), "monotonic": lambda: time.monotonic() * 30 / PATIENCE})
    monkeypatch.setattr(importlib.import_module("ray._private.node"), "time", clock)
    # The name of a socket has at most 107 bytes, whatever TMPDIR is.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        ray.init(num_cpus=2, include_dashboard=False, _temp_dir=folder)
        signal.signal(signal.SIGTERM, before)  # Ray's own would end the tests of signals
        yield tmp_path / "workers"
        ray.shutdown()


class StandIn:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.most = 0

    def is_initialized(self) -> bool:
        return False

    def init(self, address: str | None) -> None:
        self.calls.append(f"init {address}")
        self._threads = futures.ThreadPoolExecutor(2)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def shutdown(self) -> None:
        self.calls.append("shutdown")
        self._threads.shutdown()

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 2.0}

    def remote(self, function: Callable[..., Any]) -> SimpleNamespace:
        def submit(*arguments: Any) -> futures.Future[bytes]:
            sent = pickle.dumps((function, arguments))

            def work() -> bytes:
                called, words = pickle.loads(sent)
                return pickle.dumps(called(*words))

            return self._threads.submit(work)

        return SimpleNamespace(remote=submit)

    def wait(self, running: list[Any]) -> tuple[list[Any], list[Any]]:
        self.most = max(self.most, len(running))
        first = next(futures.as_completed(running))
        return [first], [each for each in running if each is not first]

    def get(self, done: list[Any]) -> list[Any]:
        return [pickle.loads(each.result()) for each in done]


def test_a_run_by_ray_has_a_few_tasks_under_way_and_writes_the_bytes_of_a_local_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, ray, before = (
        write_photos(tmp_path / "photos", 60, size=(20, 20)),
        StandIn(),
        signal.getsignal(signal.SIGTERM),
    )
    recipe = Recipe(size=16)
    build_here(source, tmp_path / "local", recipe)
    monkeypatch.setitem(sys.modules, "ray", ray)
    build_cache(source, tmp_path / "cache", recipe, engine=Executor("ray", scheduler="ray://a:1"))
    assert digests(tmp_path / "cache") == digests(tmp_path / "local")
    assert ray.calls == ["init ray://a:1", "shutdown"] * (len(ray.calls) // 2) != []
    assert 1 < ray.most <= 4
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.thorough
def test_ray_writes_the_bytes_of_a_local_run_also_when_a_worker_dies(workers: Path, tmp_path: Path) -> None:
    source = write_photos(tmp_path / "photos", 150, size=(80, 70))
    recipe = Recipe(size=32, variants=1, augment="ray_slow_by_test:slowly")
    build_here(source, tmp_path / "local", recipe)
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
