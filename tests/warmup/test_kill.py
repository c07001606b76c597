"""Warmups that are killed in the middle and then finished: the same bytes as without, and no worker lives on."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from made import build_here, digests, write_photos
from patience import wait_for
from thorough import thorough

from tpucache.recipe import Recipe

pytestmark = pytest.mark.slow


_RECIPE = Recipe(size=96, variants=1, augment="slow_by_test:slowly", shard_mb=1)  # 37 images a shard

# A worker that is to be held says so when it has made so many samples, and waits until the gate is there: whoever kills
# it then kills it in the middle, however slow the machine is.
_MODULE = """
import multiprocessing, os, time
import numpy as np
made = 0
def slowly(image, generator):
    global made
    gate = os.environ.get("GATE")
    if gate and not multiprocessing.parent_process():
        time.sleep(0.02)  # the run itself makes some before the workers start, and must leave some to them
    elif gate:
        made += 1
        if made > int(os.environ["HELD_AFTER"]) and not os.path.exists(gate):
            with open(gate + ".arrived", "a") as arrived:
                arrived.write(f"{os.getpid()}\\n")
            for _ in range(24_000):  # so that nothing waits for ever when a test is stopped
                if os.path.exists(gate):
                    break
                time.sleep(0.01)
    return np.ascontiguousarray(image[:, ::-1] ^ generator.integers(0, 8, dtype=np.uint8))
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
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photos(tmp_path_factory.mktemp("killed") / "photos", 150, size=(30, 25))


@contextlib.contextmanager
def _warmup(source: Path, cache: Path, gate: Path, held_after: int) -> Iterator[subprocess.Popen[bytes]]:
    options = ["--size", "96", "--variants", "1", "--augment", "slow_by_test:slowly", "--shard-mb", "1", "--jobs", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tpucache", "warmup", str(source), str(cache), *options],
        env={**os.environ, "GATE": str(gate), "HELD_AFTER": str(held_after)},
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


def _held(process: subprocess.Popen[bytes], gate: Path) -> list[int]:
    arrived = Path(f"{gate}.arrived")
    wait_for(lambda: process.poll() is not None or (arrived.exists() and len(arrived.read_text().splitlines()) == 2))
    assert process.poll() is None, "the run ended before it could be killed"
    return [int(line) for line in arrived.read_text().splitlines()]


def _is_running(process: int) -> bool:
    try:
        return bool(Path(f"/proc/{process}/cmdline").read_bytes())
    except OSError:
        return False


@pytest.mark.parametrize(
    ("made", "how"), [(0, "alone"), *thorough((3, "alone, its workers go on"), (40, "with workers"))]
)
def test_a_killed_run_finishes_with_the_same_bytes_and_its_workers_end(
    made: int, how: str, modules: Path, source: Path, tmp_path: Path
) -> None:
    cache, gate = tmp_path / "cache", tmp_path / "gate"
    with _warmup(source, cache, gate, made) as process:
        workers = _held(process, gate)
        if how == "with workers":
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()
        if how == "alone":  # each is in the middle of a sample, and the gate stays closed
            wait_for(lambda: not any(map(_is_running, workers)))
        gate.touch()
        build_here(source, cache, _RECIPE)
    manifest = build_here(source, tmp_path / "whole", _RECIPE)
    assert len(manifest.shards) == 10
    assert digests(cache) == digests(tmp_path / "whole")
