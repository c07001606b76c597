"""One trial of `engines`: warmup by an engine, and again with a worker killed. Prints what happened as JSON."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

from scripts.digits import write_digits
from tpucache import BuildError, Recipe, build_cache
from tpucache.progress import BuildProgress
from tpucache.warmup.run.executors import Executor

WORKERS: Final = 2
_PHOTOGRAPHS: Final = 400
_MODULE: Final = """
import os, pathlib, time
def slowly(image, generator):
    place = pathlib.Path(os.environ["TRIAL_WORKERS"])
    if place.exists():
        (place / str(os.getpid())).touch()
        time.sleep(0.02)
    return image ^ generator.integers(0, 8, image.shape).astype(image.dtype)
"""


def run() -> None:
    """Run the trial of the engine that the command line names, such as `dask`."""
    name = sys.argv[1]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "engine_trial_module.py").write_text(_MODULE)
        os.environ["TRIAL_WORKERS"] = str(work / "workers")
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        sys.path.insert(0, folder)
        if name == "ray":
            import ray

            ray.init(num_cpus=WORKERS, include_dashboard=False)
        engine: Any = Executor(name, jobs=WORKERS)  # type: ignore[arg-type]  # one of its names
        print(json.dumps(_try(work, engine)))


def _try(work: Path, engine: Executor) -> dict[str, Any]:
    """Return whether files are those of a local run, what a killed worker did, and what a second run kept of it."""
    write_digits(work / "photos")
    for path in sorted((work / "photos").rglob("*.png"), key=lambda path: path.name)[_PHOTOGRAPHS:]:
        path.unlink()
    settings: dict[str, Any] = {"recipe": Recipe(size=32, variants=1, augment="engine_trial_module:slowly")}
    build_cache(work / "photos", work / "local", jobs=1, **settings)
    build_cache(work / "photos", work / "whole", engine=engine, **settings)
    wanted = _digests(work / "local")
    found: dict[str, Any] = {"is_equal": _digests(work / "whole") == wanted}
    cache, stop = work / "killed", threading.Event()
    reports: list[BuildProgress] = []
    killer = threading.Thread(target=_kill_one, args=(work / "workers", cache, found, stop))
    (work / "workers").mkdir()
    killer.start()
    try:
        build_cache(work / "photos", cache, engine=engine, **settings)
        found["then"] = "its tasks were given to another worker"
    except BuildError as error:
        found["then"] = f"BuildError: {error}"
    finally:
        stop.set()
        killer.join()
    (work / "workers").rename(work / "workers before")
    build_cache(work / "photos", cache, engine=engine, on_progress=reports.append, **settings)
    kept = reports[0].samples if reports else _PHOTOGRAPHS
    return {**found, "kept": kept, "is_equal_then": _digests(cache) == wanted}


def _kill_one(workers: Path, cache: Path, found: dict[str, Any], stop: threading.Event) -> None:
    """Kill a worker as soon as a chunk is complete and one is at work."""
    while not stop.is_set():
        at_work = [int(path.name) for path in workers.iterdir() if path.name != str(os.getpid())]
        if at_work and any(cache.glob(".warmup/chunk-*.json")):
            os.kill(at_work[-1], signal.SIGKILL)
            found["killed"] = True
            return
        time.sleep(0.01)


def _digests(cache: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in cache.iterdir() if path.is_file()}


if __name__ == "__main__":
    run()
