"""Disturbs builds at random moments, and compares what is read of them with the pictures that were there.

    python -m scripts.checks builds --minutes 10 --seed 1

Builds are a warmup, `open_or_build` with a process that reads on, and `train SOURCE`. A process of them is killed, the
disk is full, the source is changed, or the folder is replaced by another cache. Each picture says which one it is, so
that a reader notices one under another label. If the source is as before, a warmup then has to make the bytes of an
undisturbed build. Each build may only end well, by the signal, or with a message. Ends in status 1 if one did not. A
full disk needs the right to mount.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from scripts.commands import make_parser
from tpucache import CachedDataset, Manifest, verify_cache

SIDE, COUNT = 24, 420
SIZE = ["--size", str(SIDE)]
TRAIN = ["--run=run", "--model=small_model:small", "--epochs=2", "--batch-size=16", "--valid=0.2", "--backend=eager"]
WAYS = ("train", "open_or_build", "warmup", "open_or_build", "warmup")
HOWS = ("killed", "full disk", "replaced", "added", "removed", "renamed", "overwritten")
LATEST, LONGEST = 12.0, 180.0  # seconds until a build is disturbed, and until it has to end
MODEL = """
from torch import nn
def small(n):
    return nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, n))
"""
READER = f"""
import sys, numpy as np, tpucache
try:
    data = tpucache.open_or_build(sys.argv[1], sys.argv[2], tpucache.Recipe(size={SIDE}), jobs=2)
    for epoch in range(6):
        seen = []
        for images, labels in tpucache.CachedLoader(data, 20, shuffle=True, seed=1, threads=1):
            heads = np.asarray(images)[:, :, 0, 0]
            assert (heads[:, 0] == np.asarray(labels)).all(), "a picture under another label"
            seen += (heads[:, 1].astype(int) * 256 + heads[:, 2]).tolist()
        numbers = [int(path[-8:-4]) for path in data.paths]
        assert sorted(seen) == sorted(numbers), "other pictures than those that are listed"
except (tpucache.errors.TpucacheError, KeyboardInterrupt) as error:
    sys.exit(f"error: {{error}}")
"""


def draw(path: Path, number: int, seed: int) -> None:
    """Write a picture whose first pixel says its class and its number."""
    pixels = np.random.default_rng([number, seed]).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    pixels[0, 0] = int(path.parent.name), number >> 8, number & 255
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def change(source: Path, how: str, chance: random.Random) -> None:
    """Change one picture of a source, or add one."""
    path = chance.choice(sorted(source.rglob("*.png")))
    number = int(path.stem)
    if how == "added":
        draw(path.with_name("0000.png" if number else "9000.png"), 9000 * (not number), 0)
    elif how == "removed":
        path.unlink()
    elif how == "renamed":
        path.rename(path.with_name(f"x{path.name}"))
    elif how == "overwritten":  # with as many bytes, or another number of them
        draw(path, number, 1)


def family(process: int) -> list[int]:
    """Return a process and those that it started, directly or not."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
    found = [process]
    for one in found:
        found += [each for each, parent in parents.items() if parent == one]
    return found


class Trial:
    """One build in a folder of its own, which is disturbed once."""

    def __init__(self, folder: Path, source: Path, chance: random.Random) -> None:
        self._folder, self._chance = folder, chance
        self._source = Path(shutil.copytree(source, folder / "source"))
        self.cache = folder / "disk" / "cache"
        self.cache.parent.mkdir()
        (folder / "small_model.py").write_text(MODEL)

    def build(self, way: str, disturb: Callable[[int], object] = lambda process: None) -> str:
        """Build; return what is wrong with how it ended, or ""."""
        places = [str(self._source), str(self.cache)]
        words = {
            "warmup": ["-m", "tpucache", "warmup", *places, *SIZE, "--jobs", "2"],
            "train": ["-m", "tpucache", "train", places[0], "--cache", places[1], *SIZE, *TRAIN],
            "open_or_build": ["-c", READER, *places],
        }
        null, pipe = subprocess.DEVNULL, subprocess.PIPE
        command = [sys.executable, *words[way]]
        with subprocess.Popen(command, cwd=self._folder, stdout=null, stderr=pipe, text=True) as process:
            disturb(process.pid)
            try:
                said = process.communicate(timeout=LONGEST)[1]
            except subprocess.TimeoutExpired:
                process.kill()
                return "it did not end"
        is_good = process.returncode in (0, 3, -signal.SIGKILL) or (said.strip() and "Traceback" not in said)
        return "" if is_good else said

    def disturb(self, how: str, after: float, process: int, other: Path) -> None:
        """Do to a build what it has to bear, after some seconds."""
        time.sleep(after)
        if how == "killed":
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._chance.choice(family(process)), signal.SIGKILL)
        elif how == "replaced" and self.cache.exists():
            shutil.rmtree(self.cache, ignore_errors=True)
            with contextlib.suppress(FileExistsError):
                shutil.copytree(other, self.cache)
        else:
            change(self._source, how, self._chance)

    def wrong_pictures(self) -> str:
        """Return what is wrong with a finished cache, or ""."""
        if verify_cache(self.cache):
            return "verify finds damage"
        with CachedDataset(self.cache) as data:
            heads = [np.asarray(data[at][0])[:, 0, 0].tolist() for at in range(len(data))]
            named = [(int(path[0]), int(path[-8:-4])) for path in data.paths]
        shown = [(kind, high * 256 + low) for kind, high, low in heads]
        return "a picture under another path" * (named != shown)

    def mount(self, options: str) -> None:
        """Give the cache a disk of its own."""
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", self.cache.parent], check=True)

    def close(self) -> None:
        """Remove the folder."""
        if self.cache.parent.is_mount():
            subprocess.run(["umount", "--lazy", self.cache.parent], check=True)
        shutil.rmtree(self._folder, ignore_errors=True)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance, until = random.Random(options.seed), time.monotonic() + 60 * options.minutes
    builds = found = 0
    with tempfile.TemporaryDirectory() as name:
        sources = [Path(name, "source"), Path(name, "other")]
        for source, first in zip(sources, (0, 2000), strict=True):
            for number in range(first, first + COUNT):
                draw(source / f"{number % 3}" / f"{number:04}.png", number, 0)
        whole, other = (Trial(source.with_name(f"of-{source.name}"), source, chance) for source in sources)
        if wrong := whole.build("warmup") or other.build("warmup"):
            sys.exit(wrong)
        expected = Manifest.load(whole.cache).identity
        while time.monotonic() < until:
            way, how = chance.choice(WAYS), chance.choice(HOWS)
            after, builds = chance.uniform(0, LATEST), builds + 1
            trial = Trial(Path(name, f"{builds}"), sources[0], chance)
            if how == "full disk":
                trial.mount(f"size={chance.randrange(300, 1800)}k")
            wrong = trial.build(way, lambda pid: trial.disturb(how, after, pid, other.cache))  # noqa: B023
            if how in ("killed", "full disk"):
                if trial.cache.parent.is_mount():
                    trial.mount("remount,size=100m")
                wrong = wrong or trial.build("warmup")
                wrong = wrong or "other bytes" * (Manifest.load(trial.cache).identity != expected)
            if (trial.cache / "manifest.json").exists():
                wrong = wrong or trial.wrong_pictures()
            if wrong:
                found += 1
                print(f"{builds}: {way}, {how} after {after:.2f} s: {wrong}", flush=True)
            trial.close()
    print(f"seed {options.seed}: {builds} builds, {found} wrong")
    return bool(found)
