"""Caches that several parts' tests read, built once a session from generated photographs."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

# Before torch and numpy are imported, here and in every process that a test starts: arrays here are tiny, and threads
# of OpenMP that wait for each other in a loop slow everything down where processes outnumber the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# XLA's programs here run for a moment, and making them fast would take longer: torch_xla and JAX both read this.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
# A build whose number of workers no test names is this process's own work, on every machine: workers take seconds to
# start, and each imports what augments.
os.environ["LOKY_MAX_CPU_COUNT"] = "1"
# Compiled modules are kept, also where the environment says otherwise: hundreds of processes would each compile them.
os.environ["PYTHONDONTWRITEBYTECODE"] = ""
os.environ["PYTHONUNBUFFERED"] = ""  # as most users have it: what a full disk did not take is tried again at the end

sys.path.append(str(Path(__file__).parent))  # for disk.py, forking.py, patience.py and others

import forking
import hypothesis
import numpy as np
import pytest
from meeting import pytest_runtest_protocol  # noqa: F401  # a hook of pytest
from once import once
from PIL import Image
from processes import adopt_orphans, children, end_all_but, refuse_forks
from skips import failing

from tpucache import Recipe, build_cache

sys.dont_write_bytecode = False  # the same for this process
refuse_forks()
adopt_orphans()
# A shell's background job begins with SIGINT ignored, and so would each process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

HERE = Path(__file__).parent
NEEDS_XLA = pytest.mark.skip(reason="torch_xla is not installed: it has no release for this Python or machine")

#: Where there is room, the tests' files are made in memory: a disk takes a third more of the processors' time. To have
#: them elsewhere, set PYTEST_DEBUG_TEMPROOT, or pass --basetemp.
MEMORY, ROOM = Path("/dev/shm"), 4 << 30

CLASSES = ("ant", "bee", "cat", "dog")
SAMPLES = 150

# The same examples in every run, however long a busy machine takes; --hypothesis-profile default looks for others.
hypothesis.settings.register_profile("steady", derandomize=True, deadline=None)
hypothesis.settings.register_profile("few", hypothesis.settings.get_profile("steady"), max_examples=25)
hypothesis.settings.load_profile("steady")


def pytest_configure(config: pytest.Config) -> None:
    """Choose a place for files, and the number of examples; list what is skipped, and why, where CI is set."""
    if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ROOM:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
    if os.environ.get("CI"):
        config.option.reportchars += "s"
    if "not thorough" in config.option.markexpr:
        hypothesis.settings.load_profile("few")
    if not hasattr(config, "workerinput"):
        start_forks(config)


#: What each process has imported whose forks run tests' programs: seconds of a processor, and so once for all workers.
FORKING = {
    "torch": ("torch", "torch.utils.data", "torch._dynamo", "tpucache.loading.dataset", "processes"),
    "xla": ("torch", "torch_xla", "tpucache.cli", "tpucache.training.fitting"),
    "jax": ("jax", "jax.numpy", "jax.sharding", "torch", "pytest", "tpucache.loading.dataset", "tpucache.jax"),
}
FORKS, PLACES = pytest.StashKey[dict[str, Any]](), "forks"


def start_forks(config: pytest.Config) -> None:
    """Start these processes, which import nothing before they are asked for a fork, and end with this one."""
    path = os.pathsep.join([str(HERE), str(HERE / "training"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "PJRT_DEVICE": "CPU", "JAX_PLATFORMS": "cpu"}
    stack = contextlib.ExitStack()
    config.add_cleanup(stack.close)
    started = {name: forking.start_forks(environment, modules) for name, modules in FORKING.items()}
    config.stash[FORKS] = {name: stack.enter_context(each) for name, each in started.items()}


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell each of pytest-xdist's workers where these processes read what they are asked."""
    node.workerinput[PLACES] = {name: each.place for name, each in node.config.stash[FORKS].items()}


def forks(config: pytest.Config) -> dict[str, Any]:
    """Return each of them by its name."""
    if hasattr(config, "workerinput"):
        return {name: forking.Forks(place) for name, place in config.workerinput[PLACES].items()}
    return config.stash[FORKS]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where CI is set, fail a test that is skipped for want of a package."""
    report = yield
    failing(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same of a whole file."""
    report = yield
    failing(report)
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs torch_xla where it is not installed."""
    if importlib.util.find_spec("torch_xla") is None:
        for item in items:
            if item.get_closest_marker("xla"):
                item.add_marker(NEEDS_XLA)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Search for no garbage among thousands of tests and what their files import, while they are collected or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def nothing_outlives_the_session() -> Iterator[None]:
    """Fail where a process that fixtures of modules or the session have started outlives them."""
    known = children()
    yield
    end_all_but(known)


@pytest.fixture(autouse=True)
def nothing_outlives_its_test(nothing_outlives_the_session: None) -> Iterator[None]:
    """Fail a test that leaves a process behind; one of a wider fixture has been started before this one asks."""
    known = children()
    yield
    end_all_but(known)


@pytest.fixture(scope="session")
def short_runs() -> None:
    """Have the runs and measurements of this process take a moment, from now on."""
    forking.shorten_runs()


@pytest.fixture(scope="session")
def torch_forks(pytestconfig: pytest.Config) -> Any:
    """The Forks of a process that has imported torch and what reads caches, once for all."""
    return forks(pytestconfig)["torch"]


@pytest.fixture(scope="session")
def xla_forks(pytestconfig: pytest.Config) -> Any:
    """The Forks of a process that has imported torch_xla and what trains, for its CPU client."""
    return forks(pytestconfig)["xla"]


@pytest.fixture(scope="session")
def run_with_jax(pytestconfig: pytest.Config) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The function `run_with_jax(*arguments, devices=1, cwd=None, **more)`: what a Python does that has JAX and torch.

    JAX has so many simulated devices, which is set once a process. Keywords are added to its environment.
    """
    jax_forks = forks(pytestconfig)["jax"]

    def run(*arguments: object, devices: int = 1, cwd: Path | None = None, **more: object) -> Any:
        flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
        added = {name: str(value) for name, value in more.items()}
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, **added}
        return jax_forks.run([*map(str, arguments)], environment, cwd=cwd)

    return run


@pytest.fixture(scope="session")
def xla_flags() -> str:
    """XLA_FLAGS for torch_xla: compiling takes half the time. Its release is a fixed one, which knows this flag.

    XLA ends a process that gives it one that it does not know, so that JAX, which may be any release, is not given it.
    """
    return f"{os.environ['XLA_FLAGS']} --xla_cpu_use_fusion_emitters=false"


@pytest.fixture(scope="session")
def run_with_torch(torch_forks: Any) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The function `run_with_torch(code, *arguments)`: what a Python does that has imported torch before it runs code.

    It may fork as long as it has one thread. `processes` can be imported. Its modules are taken apart at its end only
    with `finalise=True`.
    """
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])

    def run(code: str, *arguments: object, finalise: bool = False) -> subprocess.CompletedProcess[str]:
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder) / "program.py"
            program.write_text(code)
            words = [*map(str, [program, *arguments])]
            environment = {**os.environ, "PYTHONPATH": path}
            done: subprocess.CompletedProcess[str] = torch_forks.run(words, environment, finalise=finalise)
            return done

    return run


#: What a program that may fork does first. Where there is one core, torch warns of two workers of a DataLoader.
_BEFORE_FORKING = """
import processes, warnings
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "This DataLoader will create 2 worker")
processes.fork_alone()
"""


@pytest.fixture(scope="session")
def run_forking(run_with_torch: Callable[..., subprocess.CompletedProcess[str]]) -> Callable[..., str]:
    """The function `run_forking(code, *arguments)`: what a Python prints that may fork as long as it has one thread."""

    def run(code: str, *arguments: object) -> str:
        done = run_with_torch(f"{_BEFORE_FORKING}\n{code}", *arguments)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    """Leave out os.fsync, which takes milliseconds: what a test kills is a process, never the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


def write_photos(folder: Path, samples: int, classes: tuple[str, ...] = CLASSES, side: int = 24) -> Path:
    """Write `samples` PNG images of noise around a colour that tells the class, a folder a class."""
    rng = np.random.default_rng(7)
    for number in range(samples):
        label = number % len(classes)
        base = np.array([40 + 50 * label, 200 - 50 * label, 90 + 30 * (label % 2)])
        pixels = np.clip(rng.normal(base, 40, (side, side, 3)), 0, 255).astype(np.uint8)
        path = folder / classes[label] / f"{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    return folder


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """150 photographs in four classes."""
    return once(tmp_path_factory, "photos", lambda folder: write_photos(folder, SAMPLES))


@pytest.fixture(scope="session")
def published(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The photographs at 16x16 with three augmented variants, several shards each. Not to be written to."""

    def make(folder: Path) -> None:
        build_cache(photos, folder / "cache", Recipe(size=16, variants=3), jobs=1)

    return once(tmp_path_factory, "caches", make) / "cache"


@pytest.fixture(scope="session")
def cache(published: Path) -> Path:
    """The same. Not to be written to."""
    return published


@pytest.fixture
def no_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system gives no read leases, as macOS does: shards in folders that can be written are not mapped."""
    monkeypatch.setattr("tpucache.loading.reading.maps.has_leases", lambda: False)
