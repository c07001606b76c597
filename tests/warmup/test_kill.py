"""Warmups that are killed, at any moment and in whatever way, and then finished: the same bytes as without."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tpucache.recipe import Recipe
from tpucache.store.verify import verify_cache
from tpucache.warmup.build import build_cache

pytestmark = pytest.mark.slow

Digests = Callable[[Path], dict[str, str]]

_SIZE = 96  # so that a shard of 1 MiB holds 37 images
_KILLS = 2  # of runs with workers: one with its workers, one without them
_FORKED_KILLS = 16  # of runs in one process; every fourth is killed three times in a row: 24 in all
_FORKED_SAMPLES = 60  # in two blocks

# Slow in the killed runs only, so that they spend their time on samples and not on starting.
_MODULE = """
import multiprocessing, os, time
import numpy as np
def slowly(image, generator):
    time.sleep(float(os.environ.get("SECONDS_A_SAMPLE", "0")))
    gate = os.environ.get("GATE")
    if gate and multiprocessing.parent_process():  # before the workers start, the run itself tries some
        with open(gate + ".arrived", "a") as arrived:
            arrived.write("x")
        for _ in range(6000):  # so that nothing waits for ever when a test is stopped
            if os.path.exists(gate):
                break
            time.sleep(0.01)
    return np.ascontiguousarray(image[:, ::-1] ^ generator.integers(0, 8, dtype=np.uint8))
"""

# Imports everything once; then each line asks for a warmup in a fork, in a process group of its own. It may kill itself
# where it is about to give a file its name.
_FORKS = """
import json, os, processes, signal, sys
from tpucache.recipe import Recipe
from tpucache.warmup.build import build_cache
from tpucache.store import files
from tpucache.warmup import blocks
from tpucache.warmup.run.tasks import keep_freed_memory
import slow_by_test
blocks.MIN_CHUNKS = 16
keep_freed_memory()  # which a fork need not do again
processes.fork_alone()
rename = files.rename_durably
for line in sys.stdin:
    source, cache, variants, last = json.loads(line)
    def dying(source, target):
        if target.name == last:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(source, target)
    pid = os.fork()
    if not pid:
        os.setpgid(0, 0)
        files.rename_durably = dying
        recipe = Recipe(size=SIZE, variants=variants, augment="slow_by_test:slowly", shard_mb=1)
        build_cache(source, cache, recipe, jobs=1)
        os._exit(0)
    os.setpgid(pid, pid)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("modules")
    (folder / "slow_by_test.py").write_text(_MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder


@pytest.fixture(scope="module")
def source(write_photos: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_photos(tmp_path_factory.mktemp("killed") / "photos", 150, size=(120, 100)))


@pytest.fixture(scope="module")
def warmup(modules: Path, source: Path) -> Callable[..., contextlib.AbstractContextManager[subprocess.Popen[bytes]]]:
    """Return a function that starts a warmup of two workers in a session of its own; leaving it kills what is left."""

    @contextlib.contextmanager
    def start(cache: Path, seconds_a_sample: str = "0.006", gate: str = "") -> Iterator[subprocess.Popen[bytes]]:
        options = f"--size {_SIZE} --variants 1 --augment slow_by_test:slowly --shard-mb 1 --jobs 2".split()
        found = [str(modules), *filter(None, [os.environ.get("PYTHONPATH")])]
        process = subprocess.Popen(
            [sys.executable, "-m", "tpucache", "warmup", str(source), str(cache), *options],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(found),
                "SECONDS_A_SAMPLE": seconds_a_sample,
                "GATE": gate,
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    return start


@pytest.fixture(scope="module")
def uninterrupted(warmup: Any, tmp_path_factory: pytest.TempPathFactory, digests: Digests) -> tuple[Any, float]:
    """What every killed run must come to, and the seconds it took."""
    cache = tmp_path_factory.mktemp("uninterrupted") / "cache"
    began = time.monotonic()
    with warmup(cache) as process:
        assert process.wait() == 0
    assert len(list(cache.glob("*.lmdb"))) == 10
    return digests(cache), time.monotonic() - began


def _finish(source: Path, cache: Path) -> int:
    """Finish a killed run in this process; return how many samples stood."""
    reports: list[int] = []
    recipe = Recipe(size=_SIZE, variants=1, augment="slow_by_test:slowly", shard_mb=1)
    build_cache(source, cache, recipe, jobs=1, on_progress=lambda progress: reports.append(progress.samples))
    return reports[0] if reports else 150  # a finished cache reports nothing


@pytest.mark.parametrize("moment", range(_KILLS))
def test_a_killed_run_finishes_with_the_same_bytes(
    moment: int, source: Path, warmup: Any, uninterrupted: tuple[Any, float], tmp_path: Path, digests: Digests
) -> None:
    expected, seconds = uninterrupted
    cache = tmp_path / "cache"
    with warmup(cache) as process:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds * random.Random(moment).uniform(moment, moment + 1) / _KILLS)
        if moment % 2:
            with contextlib.suppress(ProcessLookupError):  # it may just have finished
                os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()  # its workers live on while the next run begins
        process.wait()
        _finish(source, cache)
    assert digests(cache) == expected


class Forks:
    """Runs warmups in forks of a process that has everything imported."""

    def __init__(self, process: subprocess.Popen[str], source: Path) -> None:
        self._process, self._source = process, source

    def run(
        self,
        cache: Path,
        variants: int,
        kill_after: float | None = None,
        source: Path | None = None,
        dies_naming: str = "",
    ) -> int:
        """Warm up, perhaps kill the process group after so many seconds, and return the status."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(source or self._source), str(cache), variants, dies_naming]) + "\n")
        self._process.stdin.flush()
        pid = int(self._process.stdout.readline())
        if kill_after is not None:
            time.sleep(kill_after)
            with contextlib.suppress(ProcessLookupError):  # it may just have finished
                os.killpg(pid, signal.SIGKILL)
        return int(self._process.stdout.readline())


@pytest.fixture(scope="module")
def fewer(write_photos: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_photos(tmp_path_factory.mktemp("forked") / "photos", _FORKED_SAMPLES, size=(60, 50)))


@pytest.fixture(scope="module")
def forks(modules: Path, fewer: Path) -> Iterator[Forks]:
    found = [str(modules), str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    with subprocess.Popen(
        [sys.executable, "-c", _FORKS.replace("SIZE", str(_SIZE))],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(found),
            "SECONDS_A_SAMPLE": "0.001",
            "OPENBLAS_NUM_THREADS": "1",
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Forks(process, fewer)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def forked(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, float]]:
    """By its number of variants, a cache of one go, the next an addition to a copy of it; and the seconds it took."""
    folder = tmp_path_factory.mktemp("forked")
    caches = {}
    for variants in (1, 2):
        cache = folder / f"{variants}"
        if variants > 1:
            shutil.copytree(folder / f"{variants - 1}", cache)
        began = time.monotonic()
        assert forks.run(cache, variants) == 0
        caches[variants] = cache, time.monotonic() - began
    return caches


@pytest.mark.parametrize("moment", range(_FORKED_KILLS))
def test_a_build_or_an_addition_killed_at_any_moment_finishes_with_the_same_bytes(
    moment: int, forks: Forks, forked: dict[int, tuple[Path, float]], tmp_path: Path, digests: Digests
) -> None:
    cache, variants, chance = tmp_path / "cache", 1 + moment % 2, random.Random(moment)
    expected, seconds = forked[variants]
    if variants > 1:
        shutil.copytree(forked[1][0], cache)
    for _ in range(3 if moment % 4 == 3 else 1):
        assert forks.run(cache, variants, seconds * chance.uniform(moment, moment + 1) / _FORKED_KILLS) in (0, -9)
        if variants > 1:
            assert verify_cache(cache) == []
    assert forks.run(cache, variants) == 0
    assert digests(cache) == digests(expected)


@pytest.mark.parametrize("part", [0.2, 0.4, 0.6, 0.8])
def test_a_killed_build_of_small_blocks_finishes_with_the_same_bytes(
    part: float, forks: Forks, tmp_path: Path, digests: Digests
) -> None:
    began = time.monotonic()
    assert forks.run(tmp_path / "whole", 0) == 0
    seconds = time.monotonic() - began
    assert forks.run(tmp_path / "cache", 0, seconds * part) in (0, -9)
    assert forks.run(tmp_path / "cache", 0) == 0
    assert digests(tmp_path / "cache") == digests(tmp_path / "whole")


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_a_killed_run_of_an_archive_finishes_with_the_same_bytes(
    kind: str, forks: Forks, fewer: Path, tmp_path: Path, digests: Digests
) -> None:
    archive = Path(shutil.make_archive(str(tmp_path / "photos"), kind, fewer / "cat"))
    began = time.monotonic()
    assert forks.run(tmp_path / "whole", 1, source=archive) == 0
    seconds = time.monotonic() - began
    for part in (0.3, 0.6):
        assert forks.run(tmp_path / "cache", 1, seconds * part, archive) in (0, -9)
    assert forks.run(tmp_path / "cache", 1, source=archive) == 0
    assert digests(tmp_path / "cache") == digests(tmp_path / "whole")


def test_a_run_killed_after_a_shard_does_not_build_it_again(
    source: Path, warmup: Any, uninterrupted: tuple[Any, float], tmp_path: Path, digests: Digests
) -> None:
    cache = tmp_path / "cache"
    # So slow that there are samples left when the first shard is there, however busy the machine is.
    with warmup(cache, seconds_a_sample="0.05") as process:
        while process.poll() is None and not list(cache.glob(".warmup/shard-*.npz")):
            time.sleep(0.005)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not (cache / "manifest.json").exists()
    receipts = {path.stem for path in cache.glob(".warmup/shard-*.npz")}
    names = {path: f"shard-{path.stem[4:]}-v{int(path.stem[1:3]):04d}" for path in cache.glob("*.lmdb")}
    existing = {path: path.stat().st_ino for path, name in names.items() if name in receipts}
    assert len(existing) == len(receipts) > 0
    assert 0 < _finish(source, cache) < 150
    assert {path: path.stat().st_ino for path in existing} == existing
    assert digests(cache) == uninterrupted[0]


@pytest.mark.parametrize("name", ["plan.json", "index.npy", "samples.npz", "manifest.json"])
def test_a_run_killed_while_it_names_a_file_leaves_nothing_behind_once_finished(
    name: str, forks: Forks, forked: dict[int, tuple[Path, float]], tmp_path: Path, digests: Digests
) -> None:
    assert forks.run(tmp_path / "cache", 1, dies_naming=name) == -signal.SIGKILL
    assert not (tmp_path / "cache" / "manifest.json").exists()
    assert forks.run(tmp_path / "cache", 1) == 0
    assert digests(tmp_path / "cache") == digests(forked[1][0])


def test_workers_of_a_killed_run_begin_no_other_sample(source: Path, warmup: Any, tmp_path: Path) -> None:
    """Else they may write into a cache that is begun anew in the same place, or that another run finishes."""
    gate, arrived = tmp_path / "gate", tmp_path / "gate.arrived"
    with warmup(tmp_path / "cache", seconds_a_sample="0", gate=str(gate)) as process:
        # Each of both workers waits at its first augmentation when the run is killed.
        for _ in range(6000):
            if process.poll() is not None or (arrived.exists() and len(arrived.read_text()) == 2):
                break
            time.sleep(0.01)
        process.kill()
        process.wait()
        time.sleep(0.1)  # workers look for their run twenty times a second
        gate.touch()
        time.sleep(1.5)  # a worker that continues shows at once
        assert arrived.read_text() == "xx"
        assert not list((tmp_path / "cache").glob("*.lmdb"))
