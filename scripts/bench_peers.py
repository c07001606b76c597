"""What bench_read.py compares: each peer's environment, its format on disk, and the process that reads it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

SCRIPTS: Final = Path(__file__).parent / "peers"
PATIENCE: Final = 900.0  # seconds for an answer, the compiling of a pipeline and a slow disk included

# Releases found to work together, on Python 3.11; every peer that needs torch gets the same one.
_TORCH: Final = "torch==2.13.0"
_NUMPY: Final = "numpy==2.2.6"
_PILLOW: Final = "pillow==12.0.0"

Setting = dict[str, Any]


class LeftOutError(Exception):
    """A peer cannot take part; the message is the reason, in one line."""


@dataclass(frozen=True)
class Peer:
    """One library: `installs` are pip's arguments, a call each; none means the environment this script runs in."""

    name: str
    environment: str = ""
    installs: tuple[tuple[str, ...], ...] = ()
    debian: tuple[str, ...] = ()
    pkg_config: tuple[str, ...] = ()
    own_format: bool = True

    @property
    def script(self) -> Path:
        """The file that writes and reads for it."""
        return SCRIPTS / f"read_{self.name}.py"

    @property
    def packages(self) -> list[str]:
        """The names of the packages whose versions say what was measured."""
        words = [word for install in self.installs for word in install if not word.startswith("-")]
        return [re.split(r"[=<>\[]", word)[0].lower().replace("_", "-") for word in words]


@dataclass(frozen=True)
class Contender:
    """A row of the table: a peer with one setting, or with several of which the fastest is taken."""

    name: str
    peer: str
    settings: tuple[Setting, ...]


def _installed(name: str, *installs: tuple[str, ...], environment: str = "", **more: Any) -> Peer:
    return Peer(name, environment or name, installs, **more)


PEERS: Final = {
    peer.name: peer
    for peer in (
        Peer("gather", own_format=False),
        Peer("tpucache", own_format=False),
        _installed(
            "ffcv",
            (
                "numpy==1.26.4",
                "numba==0.61.2",
                _TORCH,
                _PILLOW,
                "opencv-python-headless==4.11.0.86",
                "tqdm",
                "setuptools",
            ),
            ("--no-build-isolation", "--no-deps", "ffcv==1.0.2", "pytorch-pfn-extras==0.9.0"),
            debian=("g++", "pkg-config", "libopencv-dev", "libturbojpeg0-dev"),
            pkg_config=("opencv4", "libturbojpeg"),
        ),
        _installed("grain", (_NUMPY, "grain==0.2.18", "array-record==0.8.6")),
        _installed("litdata", (_TORCH, _NUMPY, "litdata==0.2.76")),
        _installed("mds", (_TORCH, "numpy==2.1.3", "mosaicml-streaming==0.13.0")),
        _installed("webdataset", (_TORCH, _NUMPY, "webdataset==1.0.2")),
        _installed("tfdata", (_NUMPY, "tensorflow-cpu==2.21.0")),
        *(
            _installed(name, (_TORCH, _NUMPY, _PILLOW), environment="torch", own_format=name != "memmap")
            for name in ("memmap", "torchsave", "jpegfolder")
        ),
    )
}

_ORDERS: Final = ("RANDOM", "QUASI_RANDOM")
_WORKERS: Final = ({"workers": 0}, {"workers": 2})

CONTENDERS: Final = (
    *(Contender(f"gather {n}", "gather", ({"threads": n},)) for n in (1, 2)),
    *(
        Contender(f"tpucache in memory {n}", "tpucache", ({"kind": "raw", "threads": n, "memory": True},))
        for n in (1, 2)
    ),
    Contender("tpucache jpeg in memory 2", "tpucache", ({"kind": "jpeg", "threads": 2, "memory": True},)),
    *(
        Contender(f"tpucache {kind} {n}", "tpucache", ({"kind": kind, "threads": n},))
        for kind in ("raw", "jpeg")
        for n in (1, 2)
    ),
    *(
        Contender(f"ffcv {kind} {n}", "ffcv", tuple({"kind": kind, "threads": n, "order": order} for order in _ORDERS))
        for kind in ("raw", "jpeg")
        for n in (1, 2)
    ),
    Contender(
        "grain 2", "grain", tuple({"threads": 2, "batch": where} for where in ("in the threads", "after the threads"))
    ),
    Contender("litdata", "litdata", _WORKERS),
    Contender("mds", "mds", _WORKERS),
    Contender("webdataset", "webdataset", _WORKERS),
    Contender("tf.data", "tfdata", ({"parse": "samples"}, {"parse": "batches"})),
    Contender("memmap", "memmap", ({"workers": 0},)),
    Contender("torch.save", "torchsave", ({"workers": 2},)),
    Contender("jpeg folder", "jpegfolder", ({"workers": 2},)),
)


def threads_of(setting: Setting) -> int:
    """Return how many threads or processes a setting reads with; one that does not say takes both."""
    return max(1, setting.get("threads", setting.get("workers", 2)))


class Bench:
    """The peers in one work folder: their environments and formats are made once and found again."""

    def __init__(self, work: Path, data: Path) -> None:
        self._environments, self._logs = work / "env", work / "log"
        self._data, self._formats = data, data / "peer"
        for folder in (self._environments, self._logs, self._formats):
            folder.mkdir(parents=True, exist_ok=True)

    def prepare(self, peer: Peer) -> dict[str, str]:
        """Install a peer, have it write its format, and return its versions. Raises LeftOutError."""
        self._check_system(peer)
        if peer.installs:
            self._install(peer)
        if peer.own_format:
            self._write(peer)
        return self._versions(peer)

    def start(self, contender: Contender, setting: Setting) -> Worker:
        """Start the process that reads with a setting. Raises LeftOutError when its first batch is not right."""
        peer = PEERS[contender.peer]
        for path in self._format(peer).rglob("*"):  # into the page cache
            if path.is_file():
                with path.open("rb") as file:
                    while file.read(1 << 24):
                        pass
        command = [self._python(peer), peer.script, "serve", self._data, self._format(peer), json.dumps(setting)]
        worker = Worker([str(word) for word in command], self._logs / f"{contender.name.replace(' ', '-')}.log")
        try:
            worker.ask("check")
        except BaseException:
            worker.close()
            raise
        return worker

    def _python(self, peer: Peer) -> Path:
        return self._environments / peer.environment / "bin" / "python" if peer.installs else Path(sys.executable)

    def _format(self, peer: Peer) -> Path:
        return self._formats / peer.name

    @staticmethod
    def _check_system(peer: Peer) -> None:
        if not peer.debian:
            return
        tools = all(map(shutil.which, ("g++", "pkg-config")))
        found = tools and not subprocess.run(["pkg-config", "--exists", *peer.pkg_config], check=False).returncode
        if not found:
            raise LeftOutError(f"needs system packages: apt-get install -y {' '.join(peer.debian)}")

    def _install(self, peer: Peer) -> None:
        folder = self._environments / peer.environment
        mark, wanted = folder / "installed.json", json.dumps(peer.installs)
        if mark.exists() and mark.read_text() == wanted:
            return
        say(f"{peer.name}: installing into {folder}")
        shutil.rmtree(folder, ignore_errors=True)
        log = self._logs / f"install-{peer.environment}.log"
        self._run([sys.executable, "-m", "venv", folder], log)
        for install in peer.installs:
            self._run([self._python(peer), "-m", "pip", "install", "--quiet", *install], log)
        mark.write_text(wanted)

    def _write(self, peer: Peer) -> None:
        folder = self._format(peer)
        mark = folder.with_suffix(".written")
        wanted = hashlib.sha256(peer.script.read_bytes() + json.dumps(peer.installs).encode()).hexdigest()
        if mark.exists() and mark.read_text() == wanted:
            return
        say(f"{peer.name}: writing its format")
        mark.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        self._run([self._python(peer), peer.script, "write", self._data, folder], self._logs / f"write-{peer.name}.log")
        mark.write_text(wanted)

    def _versions(self, peer: Peer) -> dict[str, str]:
        command = [self._python(peer), "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"]
        listed = subprocess.run(command, check=False, capture_output=True, text=True)
        if listed.returncode:
            return {}
        rows = {row["name"].lower().replace("_", "-"): row["version"] for row in json.loads(listed.stdout)}
        own = ["tpucache", "torch", "numpy", "simplejpeg", "cykooz-resizer", "llvmlite"]
        return {name: rows[name] for name in (peer.packages or own) if name in rows}

    @staticmethod
    def _run(command: list[Any], log: Path) -> None:
        with log.open("w") as file:
            words = [str(word) for word in command]
            done = subprocess.run(words, check=False, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        if done.returncode:
            raise LeftOutError(_reason(log))


class Worker:
    """A process that reads batches on command; only the one asked works."""

    def __init__(self, command: list[str], log: Path) -> None:
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, bufsize=0, start_new_session=True
            )

    def ask(self, line: str) -> dict[str, Any]:
        """Send a line, return the answer once the process is idle again. Raises LeftOutError."""
        try:
            self._stdin.write(f"{line}\n".encode())
            answer = self._answer()
        except BrokenPipeError:
            answer = b""
        if not answer:
            raise LeftOutError(_reason(self._log))
        self._settle()
        return json.loads(answer)

    def read(self, seconds: float) -> float:
        """Return images a second, over so many seconds. Raises LeftOutError."""
        turn = self.ask(f"go {seconds}")
        return turn["images"] / turn["seconds"]

    def close(self) -> None:
        """End the process and those it started."""
        self._stdin.close()  # it ends by itself at the end of its input
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    @cached_property
    def _stdin(self) -> Any:
        return self._process.stdin

    def _answer(self) -> bytes:
        deadline = time.monotonic() + PATIENCE
        line = b""
        while not line.endswith(b"\n"):
            if select.select([self._process.stdout], [], [], 0.5)[0]:
                part = os.read(self._process.stdout.fileno(), 1 << 16)
                if not part:
                    return b""
                line += part
            elif self._process.poll() is not None:
                return b""
            elif time.monotonic() > deadline:
                raise LeftOutError(f"gave no answer within {PATIENCE:.0f} s")
        return line

    def _settle(self) -> None:
        """Wait, not for ever, until the process and its children have read ahead as far as they do, and are still."""
        before = -1
        for _ in range(50):
            now = _session_ticks(self._process.pid)
            if now - before <= 1 and before >= 0:
                return
            before = now
            time.sleep(0.1)


def _session_ticks(session: int) -> int:
    """Return the processor time that the processes of a session have used, in clock ticks."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[3]) == session:
            ticks += int(fields[11]) + int(fields[12])
    return ticks


def _reason(log: Path) -> str:
    """Return the line of a log that most likely says why."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(error:|\w*(\.\w+)*(Error|Exception)\b)", line, re.IGNORECASE)]
    return f"{(errors or lines or ['ended without a word'])[-1]} (see {log})"


def say(line: str) -> None:
    """Tell the person who waits."""
    print(line, file=sys.stderr, flush=True)
