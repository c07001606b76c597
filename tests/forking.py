"""Runs Python programs in forks of a process that has imported what they need, which takes 6 s of a processor.

As the program of its own process it reads one request a line: a folder. There, `request.json` says what to run; the
fork's output goes into `out` and `err`, its process group into `group`, and its status into `status` when it has ended.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import itertools
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from patience import PATIENCE


class Forks:
    """Runs programs in forks of the process that reads its requests at this place, which any process may write to."""

    def __init__(self, place: str) -> None:
        self.place = place

    def run(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        timeout: float = PATIENCE,
        cwd: Path | None = None,
        finalise: bool = False,
        grace: float = 30.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run what `python ARGUMENTS` would: a file, or -m and a module. Raises TimeoutError after `timeout` seconds.

        Taking apart what torch has imported takes a second of a processor: only where `finalise` says so. Processes
        that the program has started and that run for `grace` seconds longer fail it.
        """
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            request = {
                "arguments": arguments,
                "environment": dict(environment),
                "cwd": str(cwd or Path.cwd()),
                "finalise": finalise,
                "grace": grace,
            }
            (folder / "request.json").write_text(json.dumps(request))
            self._write(f"{folder}\n")
            try:
                self._wait(folder / "status", time.monotonic() + timeout)
            except BaseException:
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    os.killpg(int((folder / "group").read_text()), signal.SIGKILL)
                raise
            status = int((folder / "status").read_text())
            out, err = ((folder / stream).read_text(errors="replace") for stream in ("out", "err"))
            left = (folder / "left").read_text()
        assert not left, f"the program left processes behind, which were killed now: {left}"
        return subprocess.CompletedProcess(["python", *arguments], status, out, err)

    def _write(self, line: str) -> None:
        pipe = os.open(self.place, os.O_WRONLY | os.O_NONBLOCK)  # raises OSError where nobody reads any more
        try:
            os.write(pipe, line.encode())  # less than a page, and so never mixed with another line
        finally:
            os.close(pipe)

    def _wait(self, status: Path, until: float) -> None:
        while not status.exists():
            self._write("")
            if time.monotonic() > until:
                raise TimeoutError("the program took too long: it is killed")
            time.sleep(0.01)


@contextlib.contextmanager
def start_forks(environment: Mapping[str, str], modules: Sequence[str]) -> Iterator[Forks]:
    """Start the process that forks, which has one thread, and imports these modules when it is first asked for one."""
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    with tempfile.TemporaryDirectory() as folder:
        place = f"{folder}/requests"
        os.mkfifo(place)
        pipe = os.open(place, os.O_RDWR)  # also for writing, so that there is no end of it
        try:
            process = subprocess.Popen(
                [sys.executable, __file__, *modules], env={**environment, **one}, stdin=pipe, text=True
            )
        finally:
            os.close(pipe)
        with process:
            try:
                yield Forks(place)
            finally:
                process.kill()


def shorten_runs() -> None:
    """Have runs replay five steps at their end and draw no curves, and `bench` measure for a fiftieth of its time."""
    from tpucache.report.bench import run_bench
    from tpucache.training import loop

    ceiling = loop.ceiling
    loop.ceiling = lambda execute, device, images, seconds: ceiling(execute, device, images, 0.0)
    loop.drawn_curves = lambda *_: contextlib.nullcontext()
    run_bench.__kwdefaults__["seconds"] = 0.02


def serve(requests: Iterable[str]) -> Path | None:
    """Fork for each request; return its folder in the fork that is to run it, and None when there are no more."""
    from processes import adopt_orphans

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the watchers
    for line in requests:
        folder = Path(line.rstrip("\n"))
        if (threads := len(os.listdir("/proc/self/task"))) > 1:  # noqa: PTH208
            sys.exit(f"the process that forks has {threads} threads: import nothing that starts one")
        watcher = os.fork()
        if watcher:
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        adopt_orphans()
        (folder / "group").write_text(str(os.getpid()))
        program = os.fork()
        if not program:
            return folder
        status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
        (folder / "left").write_text(end_all(json.loads((folder / "request.json").read_text())["grace"]))
        (folder / "ended").write_text(str(status))
        (folder / "ended").rename(folder / "status")
        os._exit(0)
    return None


def end_all(grace: float) -> str:
    """Wait for what the program has started; return the command lines of what did not end, and kill it."""
    from processes import children

    until = time.monotonic() + grace
    while left := children():
        if time.monotonic() > until:
            for number in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            return "; ".join(left.values())
        time.sleep(0.005)
    return ""


def run_program(folder: Path) -> None:
    """Become the program that a request asks for."""
    request = json.loads((folder / "request.json").read_text())
    os.chdir(request["cwd"])
    for number, path in enumerate((os.devnull, folder / "out", folder / "err")):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    program, *rest = request["arguments"]
    try:
        if program == "-m":
            sys.path[0] = request["cwd"]
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(program).parent)
            sys.argv = [program, *rest]
            runpy.run_path(program, run_name="__main__")
        status: object = 0
    except SystemExit as end:
        status = end.code
        raise
    except Exception:
        status = 1
        raise
    except BaseException:
        request["finalise"] = True  # the interpreter's own end says which signal it was
        raise
    finally:
        if not request["finalise"]:
            ENDED.append(status if isinstance(status, int) else 0 if status is None else 1)


#: The status of a program that has ended, and whose modules need not be taken apart.
ENDED: list[int] = []


def leave() -> None:
    """End this process, after all that is to be done when an interpreter ends but for taking its modules apart."""
    if ENDED:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(ENDED[0])


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: it ends with the process that started it
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # as tpucache does before it imports torch_xla
    atexit.register(leave)  # registered first, and so called last
    first = sys.stdin.readline()
    for module in sys.argv[1:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    if "tpucache.training.fitting" in sys.modules:
        shorten_runs()
    gc.freeze()  # what the programs collect is their own
    if (asked := serve(itertools.chain([first], sys.stdin))) is not None:
        run_program(asked)
