"""Builds a cache 12 times as large as the disk into a dataset at Kaggle's stand-in, killed again and again.

    python -m scripts.checks publishing --kills 50

Each run is a process of its own, `tpucache warmup SOURCE kaggle:ann/… --keep-local no`, on a tmpfs of a twelfth of the
cache, which needs root. SIGKILL comes at requests that are drawn by chance:
before one is carried out, or after it and before its answer, so between any two calls. Now and then an upload expires,
or a connection breaks. Each build that ends has to leave one version with the bytes of a local warmup, and no file.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from scripts.bench.photos import write_pictures
from scripts.commands import make_parser
from scripts.kaggle_server import PIECE, KaggleServer

SAMPLES, SIZE, SHARDS = 900, 128, 44
DATASET = "ann/larger-than-the-disk"
#: Requests of which a run makes few: those that make the version, and look at it.
RARE = ("GetDataset", "CreateDataset", "GetDatasetStatus", "ListDatasetFiles", "DownloadDataset")


def command(source: Path, place: str, *options: str) -> list[str]:
    """Return the command that builds a cache of one variant, in as many shards as a dataset has."""
    words = [sys.executable, "-m", "tpucache", "warmup", str(source), place, "--size", str(SIZE), "--shard-mb", "1"]
    return [*words, "--jobs", "1", "--target", "kaggle", *options]


@contextlib.contextmanager
def small_disk(size: int, folder: Path) -> Iterator[None]:
    """Mount a tmpfs of this size at a folder meanwhile. Raises CalledProcessError."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


class Killer:
    """Kills a process at a request that is drawn by chance, and notes which."""

    def __init__(self, server: KaggleServer, rng: random.Random) -> None:
        self.server, self.rng = server, rng
        self.process: subprocess.Popen[bytes] | None = None
        self.killed: Counter[str] = Counter()
        self._left: Counter[str] = Counter()
        self._lock = threading.Lock()

    def draw(self) -> None:
        """Draw where the next run is to be killed: the number of a kind of requests, and the moment of it."""
        kind = self.rng.choice(["StartBlobUpload", "PUT", "PUT", "PUT of nothing", *RARE])
        most = {"StartBlobUpload": 9, "PUT": 9, "PUT of nothing": 60}.get(kind, 3)
        self._left = Counter({f"{kind} {self.rng.choice(['asked', 'done'])}": self.rng.randint(1, most)})

    def spare(self) -> None:
        """Kill none of the next run."""
        self._left = Counter()

    def watch(self, call: str, moment: str) -> None:
        """Kill the process where this is the request that was drawn."""
        with self._lock:
            key = f"{call} {moment}"
            if self.process is None or key not in self._left:
                return
            self._left[key] -= 1
            if self._left[key] == 0:
                os.kill(self.process.pid, signal.SIGKILL)
                self.process.wait()
                self.process = None
                self.killed[key] += 1


def run(words: list[str], environment: dict[str, str], killer: Killer, log: Path) -> int:
    """Run a command; return its exit status."""
    with log.open("ab") as output:
        process = subprocess.Popen(words, env=environment, stdout=output, stderr=output)
        killer.process = process
        process.wait()
        killer.process = None
    return process.returncode


class Trial:
    """Builds into the stand-in until a number of runs were killed, and what became of them."""

    def __init__(self, folder: Path, server: KaggleServer, options: argparse.Namespace) -> None:
        self.server, self.rng, self.kills = server, random.Random(options.seed), options.kills
        self.killer = Killer(server, self.rng)
        self.source, self.disk, self._log = folder / "source", folder / "disk", folder / "log"
        write_pictures(self.source, SAMPLES, 8)
        words = command(self.source, str(folder / "local"))
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.expected = {path.name: path.read_bytes() for path in (folder / "local").iterdir()}
        shutil.rmtree(folder / "local")
        self.total = sum(map(len, self.expected.values()))
        self.room = self.total // options.times
        self._environment = {**os.environ, **server.environment, "HOME": str(folder), "TMPDIR": str(folder)}
        self.builds = self.received = self.again = self.expired = 0
        self.bad: list[str] = []

    def build(self) -> None:
        """Build once, with as many kills as come, and look at what is published."""
        self.server.reset()
        self.server.watch, self.server.faults.lag = self.killer.watch, 3
        words = command(self.source, f"kaggle:{DATASET}", "--keep-local", "no", "--local", str(self.disk / "work"))
        status = -1
        while status != 0:
            self.server.faults.cuts = [PIECE, 2 * PIECE] if self.rng.random() < 0.2 else []
            if self.killer.killed.total() < self.kills:
                self.killer.draw()
            else:
                self.killer.spare()
            status = run(words, self._environment, self.killer, self._log)
            if status not in (0, 3, -signal.SIGKILL):
                sys.exit(f"status {status} after {dict(self.killer.killed)}: {self._log.read_text()[-3000:]}")
            whole = [blob for blob in self.server.blobs.values() if blob.is_whole and not blob.has_expired]
            if status and whole and not self.server.datasets and self.rng.random() < 0.1:
                self.rng.choice(whole).has_expired = True
                self.expired += 1
        self.builds += 1
        self.received += self.server.received
        self._look()

    def _look(self) -> None:
        versions = self.server.datasets[DATASET].versions
        there = versions[-1].files
        self.again += len(self.server.blobs) - len(there)
        if len(versions) != 1 or {name: there.get(name) for name in self.expected} != self.expected:
            self.bad.append(f"build {self.builds}: {len(versions)} versions, or other bytes")
        others, left = sorted(there.keys() - self.expected.keys()), [path.name for path in self.disk.iterdir()]
        if others != ["README.md"] or left:
            self.bad.append(f"build {self.builds}: besides there are {others}; left here: {left}")


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--times", type=int, default=12, help="how many times the disk's size the cache has")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work, KaggleServer().running() as server:
        trial = Trial(Path(work), server, options)
        with small_disk(trial.room, trial.disk):
            while trial.killer.killed.total() < options.kills:
                trial.build()
    print(
        f"a cache of {trial.total / 1e6:.1f} MB on a disk of {trial.room / 1e6:.1f} MB: {trial.builds} builds, "
        f"{trial.killer.killed.total()} kills, {trial.expired} uploads expired, {trial.again} begun again, "
        f"{trial.received / trial.total / trial.builds:.2f} of the cache sent; "
        f"{trial.bad or 'each file as built locally'}"
    )
    print("killed at:", ", ".join(f"{key} {count}" for key, count in sorted(trial.killer.killed.items())))
    return bool(trial.bad)
