"""Caches that are opened, read, left, resumed, forked and damaged for half an hour, in a folder and at a URL.

One process chooses one of these at random, again and again, and compares every sample with what it should be: it may be
right, or one StoreError where something was damaged. The server now and then cuts, delays, refuses or spoils its
answers, what was kept of the cache is cleared, and another program cuts, replaces and restores shards of the folder.
Once a minute it prints how many samples were compared, and the least private memory, threads and open files of that
minute. It ends with status 1 where a sample was wrong, or where one of the three grew after the first minute.

    python -m scripts.checks soak [--minutes 30] [--seed 0]
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from scripts.bench.photos import Pictures
from scripts.checks.leases import CHANGES
from scripts.commands import make_parser, say
from tpucache import CachedDataset, CachedLoader, MixedLoader, Recipe, StoreError, build_cache
from tpucache.loading.order import Shuffle

_SAMPLES, _SIDE, _VARIANTS = 240, 32, 1
_BATCH: Final = 16
#: What may be more at the end than after the first minute: what other parts of Python keep varies by as much.
_MEGABYTES, _THREADS, _FILES = 20.0, 0, 0
SHUFFLES: Final[tuple[Shuffle, ...]] = (True, "block", False)
#: How many of a hundred requests the server answers wrongly, late or not at all.
_FAULTS: Final = 3
_SHARE_OF_CHANGES: Final = 0.1

#: Serves a folder, and spoils some answers: the server of the tests.
SERVER: Final = """
import random, sys, threading
sys.path[:0] = sys.argv[3:]
import servers
servers.STALL_SECONDS = 0.5
chance = random.Random(int(sys.argv[2]))
server = servers.Server(__import__("pathlib").Path(sys.argv[1]))
faults = ["cut", "503", "stall", "flip", "whole"]
server.fault = lambda name, number: chance.choice(faults) if chance.random() < FAULTS / 100 else None
print(server.url, flush=True)
sys.stdin.read()
server.close()
"""


@dataclass
class Soak:
    """The cache in a folder and at a URL, what its samples should be, and what was found."""

    folder: Path
    url: str
    work: Path
    expected: np.ndarray
    chance: random.Random
    right: int = 0
    wrong: int = 0
    refused: int = 0
    uses: int = 0

    def use(self) -> None:
        """Open the cache somewhere, do something with it, and close it or not."""
        is_local = self.chance.random() < 0.5
        options: dict[str, Any] = {"in_memory": self.chance.choice(["auto", False, True])}
        if not is_local:
            options["cache_dir"] = self.work / "kept"
            if self.chance.random() < 0.2:
                shutil.rmtree(self.work / "kept", ignore_errors=True)
        use = self.chance.choice(USES)
        self.uses += 1
        is_changed = is_local and use is not fork and self.chance.random() < _SHARE_OF_CHANGES
        try:
            dataset = CachedDataset(self.folder if is_local else self.url, **options)
            if is_changed:  # what is changed before it is read is damage that verify finds
                _read(self, CachedLoader(dataset, _SAMPLES, threads=1), 1)
            with self.changed() if is_changed else contextlib.nullcontext():
                use(self, dataset)
                if self.chance.random() < 0.5:
                    dataset.close()
        except StoreError:
            self.refused += 1

    @contextlib.contextmanager
    def changed(self) -> Iterator[None]:
        """Have another program change a shard of the folder meanwhile; it is whole again at the end."""
        shard = self.chance.choice(sorted(self.folder.glob("*.lmdb")))
        whole, aside = self.work / "whole", self.work / "aside"
        shutil.copy2(shard, whole)
        variables = {"shard": str(shard), "whole": str(whole), "aside": str(aside)}
        program = f"sleep {self.chance.uniform(0, 0.05)}; {self.chance.choice(list(CHANGES.values()))}"
        change = subprocess.Popen(["bash", "-c", program], env={**os.environ, **variables})
        try:
            yield
        finally:
            change.wait(60)
            shutil.copy2(whole, aside)
            aside.replace(shard)

    def compare(self, images: Any, labels: Any) -> None:
        """Count samples that are as they should be, and those that are not."""
        found = np.asarray(images).reshape(-1, 3, _SIDE, _SIDE)
        numbers = np.asarray(labels).reshape(-1)
        are_right = [np.array_equal(image, self.expected[at]) for image, at in zip(found, numbers, strict=True)]
        self.right += sum(are_right)
        self.wrong += len(are_right) - sum(are_right)


def read_samples(soak: Soak, dataset: CachedDataset) -> None:
    """Read some samples one by one."""
    for at in soak.chance.sample(range(len(dataset)), 5):
        soak.compare(*dataset[at])


def read_epochs(soak: Soak, dataset: CachedDataset) -> None:
    """Read two epochs; the first may be left early."""
    loader = _loader(soak, dataset)
    _read(soak, loader, soak.chance.choice([1, 3, 100]))
    _read(soak, loader, 100)


def resume(soak: Soak, dataset: CachedDataset) -> None:
    """Leave an epoch, and continue it in another loader."""
    shuffle = soak.chance.choice(SHUFFLES)
    loader = CachedLoader(dataset, _BATCH, shuffle=shuffle, seed=1, threads=1)
    before = iter(loader)
    for _ in range(3):
        soak.compare(*next(before))
    state = loader.state_dict()
    other = CachedLoader(dataset, _BATCH, shuffle=shuffle, seed=1, threads=2)
    other.load_state_dict(state)
    rest, again = [labels.tolist() for _, labels in before], []
    for images, labels in other:
        soak.compare(images, labels)
        again.append(labels.tolist())
    soak.wrong += rest != again


def mix(soak: Soak, dataset: CachedDataset) -> None:
    """Read a mixture, and leave it."""
    halves = [dataset.select(range(_SAMPLES // 2)), dataset.select(range(_SAMPLES // 2, _SAMPLES))]
    mixed = MixedLoader([CachedLoader(half, _BATCH, shuffle=True, threads=1) for half in halves], shares=[1, 1])
    for number, batch in enumerate(mixed):
        soak.compare(*batch[:2])
        if number == 3:
            break


def fork(soak: Soak, dataset: CachedDataset) -> None:
    """Read by a worker of torch's DataLoader, which is a fork of this process."""
    loader = torch.utils.data.DataLoader(dataset, _BATCH, shuffle=True, num_workers=1)
    try:
        for number, batch in enumerate(loader):
            soak.compare(*batch)
            if number == 3:
                break
    except RuntimeError as error:  # torch makes another error of the one that its worker raised
        if "StoreError" not in str(error) and "DamageError" not in str(error):
            raise
        soak.refused += 1


Use = Callable[[Soak, CachedDataset], None]
USES: Final[tuple[Use, ...]] = (read_samples, read_epochs, resume, mix, fork)


def _loader(soak: Soak, dataset: CachedDataset) -> CachedLoader:
    shuffle = soak.chance.choice(SHUFFLES)
    return CachedLoader(dataset, _BATCH, shuffle=shuffle, threads=soak.chance.choice([1, 2]))


def _read(soak: Soak, loader: CachedLoader, most: int) -> None:
    for number, batch in enumerate(loader, 1):
        soak.compare(*batch[:2])
        if number == most:
            break


def held() -> tuple[float, int, int]:
    """Return this process's private memory in MB, its threads and its open files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (private,) = (int(line.split()[1]) / 1000 for line in lines if line.startswith("RssAnon"))
    threads, files = (len([*Path("/proc/self", name).iterdir()]) for name in ("task", "fd"))
    return private, threads, files


def run(soak: Soak, minutes: float) -> list[tuple[float, int, int]]:
    """Use the cache for so long; return what was held at least in each minute, and print it."""
    began, found = time.monotonic(), []
    say("minute  uses  samples right  wrong  errors  MB private  threads  files")
    for minute in range(1, round(minutes) + 1):
        seen = []
        while time.monotonic() - began < 60 * minute:
            soak.use()
            gc.collect()
            seen.append(held())
        least = tuple(min(column) for column in zip(*seen, strict=True))
        found.append(least)
        megabytes, threads, files = least
        say(
            f"{minute:6}  {soak.uses:4}  {soak.right:13,}  {soak.wrong:5}  {soak.refused:6}  {megabytes:10.1f}"
            f"  {threads:7}  {files:5}"
        )
    return found


def main() -> int:
    """Build a cache, serve it, and use it as the command line asks."""
    parser = make_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=30, help="how long, at least 2 (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all that is random (%(default)s)")
    options = parser.parse_args()
    tests = Path(__file__).parents[2] / "tests"
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        recipe = Recipe(size=_SIDE, variants=_VARIANTS)
        build_cache(Pictures(_SAMPLES, _SIDE), work / "cache", recipe, jobs=1)
        shutil.copytree(work / "cache", work / "served")
        with CachedDataset(work / "cache") as whole:
            expected = np.stack([np.asarray(whole[at][0]) for at in np.argsort(np.asarray(whole.labels)).tolist()])
        program = SERVER.replace("FAULTS", str(_FAULTS))
        words = [sys.executable, "-c", program, str(work / "served"), str(options.seed)]
        places = [str(tests), str(tests / "store" / "remote")]
        ask = functools.partial(subprocess.Popen, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        with ask([*words, *places], stderr=subprocess.DEVNULL) as server:
            url = server.stdout.readline().strip() if server.stdout is not None else ""
            soak = Soak(work / "cache", url, work, expected, random.Random(options.seed))
            found = run(soak, max(2, options.minutes))
            server.communicate()  # it ends with its input
    mosts = (_MEGABYTES, _THREADS, _FILES)
    grown = [after - before > most for before, after, most in zip(found[1], found[-1], mosts, strict=True)]
    return int(soak.wrong > 0 or any(grown))
