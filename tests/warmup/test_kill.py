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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import wait_for
from thorough import thorough

from tpucache.recipe import Recipe
from tpucache.store.verify import verify_cache
from tpucache.warmup.build import build_cache

pytestmark = pytest.mark.slow

Digests = Callable[[Path], dict[str, str]]

_SIZE = 96  # so that a shard of 1 MiB holds 37 images
_FORKED_KILLS = 8  # of runs in one process; every fourth is killed three times in a row: 12 in all
_FORKED_SAMPLES = 60  # in two blocks

# A worker that is to be held says so when it has made so many samples, or when there is a receipt of a shard, and waits
# until the gate is there: whoever kills it then kills it in the middle, however slow the machine is.
_MODULE = """
import multiprocessing, os, time
import numpy as np
made = 0
step = lambda: None  # what a run in one process counts
def is_held():
    return made > int(os.environ["HELD_AFTER"])
def slowly(image, generator):
    global made
    step()
    gate = os.environ.get("GATE")
    if gate and not multiprocessing.parent_process():
        time.sleep(0.02)  # the run itself makes some before the workers start, and must leave some to them
    elif gate:
        made += 1
        if is_held() and not os.path.exists(gate):
            with open(gate + ".arrived", "a") as arrived:
                arrived.write(f"{os.getpid()}\\n")
            for _ in range(24_000):  # so that nothing waits for ever when a test is stopped
                if os.path.exists(gate):
                    break
                time.sleep(0.01)
    return np.ascontiguousarray(image[:, ::-1] ^ generator.integers(0, 8, dtype=np.uint8))
"""

# Imports everything once; then each line asks for a warmup in a fork. It kills itself at the step of a number: steps
# are whatever it does to a file of its own or of its source, just before, and each sample. Or where it is about to give
# a file its name. Prints the status, and how many steps there were.
_FORKS = """
import json, mmap, os, processes, signal, sys
from tpucache.recipe import Recipe
from tpucache.warmup.build import build_cache
from tpucache.store import files
from tpucache.warmup import listing
from tpucache.warmup.run import tasks
import slow_by_test
listing._COMPARE_SECONDS = 1e9  # a slow machine would compare fewer samples, in fewer steps
tasks._CHECK_SECONDS = 1e9  # and look at its lock more often
tasks.keep_freed_memory()  # which a fork need not do again
processes.fork_alone()
rename = files.rename_durably
steps = mmap.mmap(-1, 8)  # shared with the forks
for line in sys.stdin:
    source, cache, variants, dies_at, last = json.loads(line)
    def step():
        number = int.from_bytes(steps[:], "little") + 1
        steps[:] = number.to_bytes(8, "little")
        if number == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
    def note(event, arguments):
        if event in ("open", "os.rename", "os.remove", "os.mkdir", "os.truncate") and arguments:
            if str(arguments[0]).startswith((cache, source)):
                step()
    def dying(source, target):
        if target.name == last:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(source, target)
    steps[:] = bytes(8)
    pid = os.fork()
    if not pid:
        slow_by_test.step = step
        sys.addaudithook(note)
        files.rename_durably = dying
        recipe = Recipe(size=SIZE, variants=variants, augment="slow_by_test:slowly", shard_mb=1)
        build_cache(source, cache, recipe, jobs=1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(status, int.from_bytes(steps[:], "little"), flush=True)
"""


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("modules")
    (folder / "slow_by_test.py").write_text(_MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(Path(__file__).parents[1])]), prepend=os.pathsep)
        yield folder


@pytest.fixture(scope="module")
def source(write_photos: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_photos(tmp_path_factory.mktemp("killed") / "photos", 150, size=(120, 100)))


@pytest.fixture(scope="module")
def warmup(modules: Path, source: Path) -> Callable[..., contextlib.AbstractContextManager[subprocess.Popen[bytes]]]:
    @contextlib.contextmanager
    def start(cache: Path, gate: Path | str = "", held_after: int = 1 << 30) -> Iterator[subprocess.Popen[bytes]]:
        options = f"--size {_SIZE} --variants 1 --augment slow_by_test:slowly --shard-mb 1 --jobs 2".split()
        held = {"GATE": str(gate), "HELD_AFTER": str(held_after)}
        process = subprocess.Popen(
            [sys.executable, "-m", "tpucache", "warmup", str(source), str(cache), *options],
            env={**os.environ, **held},
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
def uninterrupted(warmup: Any, tmp_path_factory: pytest.TempPathFactory, digests: Digests) -> Any:
    cache = tmp_path_factory.mktemp("uninterrupted") / "cache"
    with warmup(cache) as process:
        assert process.wait() == 0
    assert len(list(cache.glob("*.lmdb"))) == 10
    return digests(cache)


def _held(process: subprocess.Popen[bytes], gate: Path) -> list[int]:
    arrived = Path(f"{gate}.arrived")
    wait_for(lambda: process.poll() is not None or (arrived.exists() and len(arrived.read_text().splitlines()) == 2))
    assert process.poll() is None, "the run ended before it could be killed"
    return [int(line) for line in arrived.read_text().splitlines()]


def _finish(source: Path, cache: Path) -> None:
    recipe = Recipe(size=_SIZE, variants=1, augment="slow_by_test:slowly", shard_mb=1)
    build_cache(source, cache, recipe, jobs=1)


@pytest.mark.thorough
@pytest.mark.parametrize(("made", "is_alone"), [(3, True), (40, False)])
def test_a_killed_run_finishes_with_the_same_bytes(
    made: int, is_alone: bool, source: Path, warmup: Any, uninterrupted: Any, tmp_path: Path, digests: Digests
) -> None:
    cache, gate = tmp_path / "cache", tmp_path / "gate"
    with warmup(cache, gate, held_after=made) as process:
        _held(process, gate)
        if is_alone:
            process.kill()
            gate.touch()  # its workers live on while the next run begins
        else:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        _finish(source, cache)
    assert digests(cache) == uninterrupted


class Forks:
    def __init__(self, process: subprocess.Popen[str], source: Path) -> None:
        self._process, self._source = process, source

    def run(
        self, cache: Path, variants: int, dies_at: int = 0, source: Path | None = None, dies_naming: str = ""
    ) -> tuple[int, int]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        words = [str(source or self._source), str(cache), variants, dies_at, dies_naming]
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        status, steps = map(int, self._process.stdout.readline().split())
        return status, steps

    def finish(self, cache: Path, variants: int, source: Path | None = None) -> int:
        status, steps = self.run(cache, variants, source=source)
        assert status == 0
        return steps

    def kill(self, cache: Path, variants: int, share: float, steps: int, source: Path | None = None) -> None:
        # A run has `steps` steps, or fewer where storage seems late: tasks have more samples then.
        before = Path(f"{cache}-{share}")
        cache.mkdir(exist_ok=True)
        shutil.copytree(cache, before)
        while (ended := self.run(cache, variants, max(1, int(share * steps)), source))[0] == 0:
            steps = ended[1]
            shutil.rmtree(cache)
            shutil.copytree(before, cache)
        assert ended[0] == -signal.SIGKILL


@pytest.fixture(scope="module")
def fewer(write_photos: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(write_photos(tmp_path_factory.mktemp("forked") / "photos", _FORKED_SAMPLES, size=(60, 50)))


@pytest.fixture(scope="module")
def forks(modules: Path, fewer: Path) -> Iterator[Forks]:
    with subprocess.Popen(
        [sys.executable, "-c", _FORKS.replace("SIZE", str(_SIZE))],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Forks(process, fewer)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def forked(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, int]]:
    folder = tmp_path_factory.mktemp("forked")
    caches = {}
    for variants in (1, 2):
        cache = folder / f"{variants}"
        if variants > 1:
            shutil.copytree(folder / f"{variants - 1}", cache)
        caches[variants] = cache, forks.finish(cache, variants)
    return caches


@pytest.mark.parametrize("moment", [1, 2, *thorough(*{*range(_FORKED_KILLS)} - {1, 2})])
def test_a_build_or_an_addition_killed_at_any_moment_finishes_with_the_same_bytes(
    moment: int, forks: Forks, forked: dict[int, tuple[Path, int]], tmp_path: Path, digests: Digests
) -> None:
    cache, variants, chance = tmp_path / "cache", 1 + moment % 2, random.Random(moment)
    expected, steps = forked[variants]
    assert steps > 2 * _FORKED_SAMPLES
    if variants > 1:
        shutil.copytree(forked[1][0], cache)
    for _ in range(3 if moment % 4 == 3 else 1):
        forks.kill(cache, variants, chance.uniform(moment, moment + 1) / _FORKED_KILLS, steps)
        if variants > 1:
            assert verify_cache(cache) == []
    forks.finish(cache, variants)
    assert digests(cache) == digests(expected)


@pytest.mark.parametrize("kind", ["zip", *thorough("tar")])
def test_a_killed_run_of_an_archive_finishes_with_the_same_bytes(
    kind: str, forks: Forks, fewer: Path, tmp_path: Path, digests: Digests
) -> None:
    archive = Path(shutil.make_archive(str(tmp_path / "photos"), kind, fewer / "cat"))
    steps = forks.finish(tmp_path / "whole", 1, archive)
    for part in (0.3, 0.4):
        forks.kill(tmp_path / "cache", 1, part, steps, archive)
    forks.finish(tmp_path / "cache", 1, archive)
    assert digests(tmp_path / "cache") == digests(tmp_path / "whole")


@pytest.mark.parametrize("name", [*thorough("plan.json", "index.npy", "samples.npz"), "manifest.json"])
def test_a_run_killed_while_it_names_a_file_leaves_nothing_behind_once_finished(
    name: str, forks: Forks, forked: dict[int, tuple[Path, int]], tmp_path: Path, digests: Digests
) -> None:
    assert forks.run(tmp_path / "cache", 1, dies_naming=name)[0] == -signal.SIGKILL
    assert not (tmp_path / "cache" / "manifest.json").exists()
    forks.finish(tmp_path / "cache", 1)
    assert digests(tmp_path / "cache") == digests(forked[1][0])


def test_workers_of_a_killed_run_end_in_the_middle_of_a_sample(source: Path, warmup: Any, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with warmup(tmp_path / "cache", gate, held_after=0) as process:
        workers = _held(process, gate)  # each at its first augmentation, and the gate stays closed
        process.kill()
        process.wait()
        wait_for(lambda: not any(map(_is_running, workers)))
        assert not list((tmp_path / "cache").glob("*.lmdb"))


def _is_running(process: int) -> bool:
    try:
        return bool(Path(f"/proc/{process}/cmdline").read_bytes())
    except OSError:
        return False
