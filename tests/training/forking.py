"""Runs Python programs in forks of a process that has imported what they need, which takes 6 s of a processor.

As the program of its own process it reads one request a line: a folder. There, `request.json` says what to run; the
fork's output goes into `out` and `err`, its process group into `group`, and its status into `status` when it has ended.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

#: What no fork has to import any more: a training run's own modules, and the libraries that they import at some time.
MODULES = ("torch", "torch_xla", "tpucache.cli", "tpucache.training.fitting")


class PythonForks:
    """Starts the process that forks, which has one thread. Threads may run programs at once."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        command = [sys.executable, __file__]
        self._lock = threading.Lock()
        self._process = subprocess.Popen(command, env={**environment, **one}, stdin=subprocess.PIPE, text=True)

    def run(
        self, arguments: Sequence[str], environment: Mapping[str, str], timeout: float = 240
    ) -> subprocess.CompletedProcess[str]:
        """Run what `python ARGUMENTS` would: a file, or -m and a module. Raises TimeoutError after so many seconds."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            request = {"arguments": arguments, "environment": dict(environment), "cwd": str(Path.cwd())}
            (folder / "request.json").write_text(json.dumps(request))
            with self._lock:
                assert self._process.stdin is not None
                self._process.stdin.write(f"{folder}\n")
                self._process.stdin.flush()
            try:
                self._wait(folder / "status", time.monotonic() + timeout)
            except BaseException:
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    os.killpg(int((folder / "group").read_text()), signal.SIGKILL)
                raise
            status = int((folder / "status").read_text())
            out, err = ((folder / stream).read_text(errors="replace") for stream in ("out", "err"))
        return subprocess.CompletedProcess(["python", *arguments], status, out, err)

    def close(self) -> None:
        """End the process that forks."""
        with self._process as process:  # its pipe is closed, too
            process.kill()

    def _wait(self, status: Path, until: float) -> None:
        while not status.exists():
            assert self._process.poll() is None, "the process that forks has ended"
            if time.monotonic() > until:
                raise TimeoutError("the program took too long: it is killed")
            time.sleep(0.01)


def shorten_runs() -> None:
    """Have each run replay five steps for the ceiling at its end, not as many as it has trained, and draw no curves."""
    from tpucache.training import loop

    ceiling = loop.ceiling
    loop.ceiling = lambda execute, device, images, seconds: ceiling(execute, device, images, 0.0)
    loop.drawn_curves = lambda *_: contextlib.nullcontext()


def serve() -> Path | None:
    """Fork for each request; return its folder in the fork that is to run it, and None when there are no more."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the watchers
    for line in sys.stdin:
        folder = Path(line.rstrip("\n"))
        if (threads := len(os.listdir("/proc/self/task"))) > 1:  # noqa: PTH208
            sys.exit(f"the process that forks has {threads} threads: import nothing that starts one")
        watcher = os.fork()
        if watcher:
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        (folder / "group").write_text(str(os.getpid()))
        program = os.fork()
        if not program:
            return folder
        status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
        (folder / "ended").write_text(str(status))
        (folder / "ended").rename(folder / "status")
        os._exit(0)
    return None


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
    if program == "-m":
        sys.path[0] = request["cwd"]
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(program).parent)
        sys.argv = [program, *rest]
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # as tpucache does before it imports torch_xla
    for module in MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    shorten_runs()

    if (asked := serve()) is not None:
        run_program(asked)
