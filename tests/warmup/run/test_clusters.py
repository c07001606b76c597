"""Warmup by more than one machine, played by a Dask cluster of two worker processes that share one folder."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made import build_here, digests, write_photos
from patience import wait_for

from tpucache import BuildError, Recipe, build_cache
from tpucache.cli import main
from tpucache.progress import BuildProgress
from tpucache.warmup.run.executors import Executor

dask = pytest.importorskip("dask")
distributed = pytest.importorskip("distributed")

pytestmark = pytest.mark.slow


_SIZE = 64
# Where a test asks for it, workers are held once something is kept, so that one can be killed in the middle.
_MODULE = """
import glob, os, pathlib, time
def slowly(image, generator):
    held = pathlib.Path(os.environ["SLOW_BY_TEST"])
    while held.exists() and glob.glob(held.with_suffix(".kept").read_text()):
        time.sleep(0.01)
    return image ^ generator.integers(0, 8, image.shape).astype(image.dtype)
"""
_RECIPE = Recipe(size=_SIZE, variants=1, augment="dask_slow_by_test:slowly")


@pytest.fixture(autouse=True)
def nothing_outlives_its_test() -> None:
    """Let the cluster, which all tests here share, start a worker for one that died: it outlives its test."""


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("modules")
    (folder / "dask_slow_by_test.py").write_text(_MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]))
        patch.setenv("SLOW_BY_TEST", str(folder / "slow"))
        yield folder / "slow"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photos(tmp_path_factory.mktemp("shared") / "photos", 150, size=(80, 70))


@pytest.fixture(scope="module")
def local(source: Path, slow: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("local") / "cache"
    build_here(source, cache, _RECIPE)
    return cache


@pytest.fixture(scope="module")
def cluster(slow: Path) -> Iterator[Any]:
    with distributed.LocalCluster(
        n_workers=2, processes=True, threads_per_worker=1, dashboard_address=":0", silence_logs=50
    ) as running:
        yield running


def test_dask_workers_in_this_process_write_the_bytes_of_a_local_run(tmp_path: Path) -> None:
    source, recipe = write_photos(tmp_path / "photos", 60, size=(20, 20)), Recipe(size=16)
    build_here(source, tmp_path / "local", recipe)
    with distributed.LocalCluster(
        n_workers=2, processes=False, threads_per_worker=1, dashboard_address=":0", silence_logs=50
    ) as running:
        build_cache(source, tmp_path / "cache", recipe, engine=Executor("dask", scheduler=running.scheduler_address))
    assert digests(tmp_path / "cache") == digests(tmp_path / "local")


@pytest.mark.thorough
def test_a_dask_cluster_writes_the_bytes_of_a_local_run(
    source: Path, local: Path, cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"
    options = f"--size {_SIZE} --variants 1 --augment dask_slow_by_test:slowly --backend dask"
    command = ["warmup", str(source), str(cache), *options.split(), "--scheduler", cluster.scheduler_address]
    assert main(command) == 0, capsys.readouterr().err
    assert digests(cache) == digests(local)


@pytest.mark.thorough
@pytest.mark.parametrize("allowed_failures", [3, 0])
def test_a_dask_worker_that_dies_is_replaced_or_ends_the_run_and_finished_work_is_kept(
    allowed_failures: int,
    source: Path,
    local: Path,
    slow: Path,
    cluster: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, reports = tmp_path / "cache", list[BuildProgress]()
    engine = Executor("dask", scheduler=cluster.scheduler_address)
    monkeypatch.setattr(cluster.scheduler, "allowed_failures", allowed_failures)
    slow.with_suffix(".kept").write_text(str(cache / ".warmup" / "arrived.jsonl"))
    slow.touch()
    killed: list[int] = []

    def kill() -> None:
        try:
            wait_for(lambda: list(cache.glob(".warmup/arrived.jsonl")))
            with distributed.Client(cluster.scheduler_address) as client:
                busy = list[str]()

                def is_busy() -> bool:
                    # A worker that has just done its last task would be no loss: one with another one after it dies.
                    busy[:] = [worker for worker, tasks in client.processing().items() if len(tasks) > 1]
                    return bool(busy)

                wait_for(is_busy)
                killed.append(client.run(os.getpid, workers=busy[:1])[busy[0]])
                os.kill(killed[0], signal.SIGKILL)
        finally:
            slow.unlink()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with (
            contextlib.nullcontext()
            if allowed_failures
            else pytest.raises(BuildError, match=r"dask.*KilledWorker.*run the same command again")
        ):
            build_cache(source, cache, _RECIPE, engine=engine)
    finally:
        killer.join()
    assert killed
    assert (cache / "manifest.json").exists() == bool(allowed_failures)
    monkeypatch.setattr(cluster.scheduler, "allowed_failures", 3)  # of a busy machine's, which this is not about
    build_cache(source, cache, _RECIPE, engine=engine, on_progress=reports.append)
    assert allowed_failures or reports[0].samples > 0, "what was finished was built again"
    assert digests(cache) == digests(local)


def test_a_scheduler_that_is_not_there_is_reported(source: Path, slow: Path, tmp_path: Path) -> None:
    engine = Executor("dask", scheduler="tcp://127.0.0.1:1")
    with (
        dask.config.set({"distributed.comm.timeouts.connect": "1s"}),
        pytest.raises(BuildError, match="no dask scheduler answers at tcp://127"),
    ):
        build_cache(source, tmp_path / "cache", _RECIPE, engine=engine)
