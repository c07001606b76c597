"""Shards that other programs cut, overwrite, append to, remove and replace while a loader reads them out of maps.

In each round one process reads epochs of a small cache and compares every batch with what it should be, while another
program changes one of its shards at a random moment. The reader must not die; a batch is right, or one DamageError; and
the other program does not wait longer than two seconds. It does so on each folder that is given, and otherwise on the
disk, in /dev/shm, and on an overlay of the two where this user may mount one.

    python -m scripts.checks leases [FOLDER …] [--rounds 200] [--codec raw] [--seed 0]
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from scripts.bench.photos import Pictures
from scripts.commands import make_parser, say
from tpucache import Recipe, build_cache

LONGEST_WAIT: Final = 2.0
_SAMPLES, _SIDE = 1200, 48  # eight shards of a megabyte
_LATEST: Final = 0.15  # seconds from the beginning of a round to its change

#: What programs do to a file: shell commands of `$shard`, of `$whole`, an undamaged copy of it, and of `$aside`.
#: `truncate` opens files without waiting, and is refused at first where there is a lease, which it takes away.
#: "in place" makes the system calls of `rsync --inplace`.
CHANGES: Final = {
    "truncate": 'until truncate -s 4096 "$shard" 2>/dev/null; do sleep 0.01; done',
    "empty": ': > "$shard"',
    "overwrite": 'dd if=/dev/urandom of="$shard" bs=4k count=128 seek=3 conv=notrunc status=none',
    "dd": 'dd if="$whole" of="$shard" bs=64k status=none',
    "append": 'head -c 10000 /dev/urandom >> "$shard"',
    "unlink": 'rm "$shard"',
    "rename": 'cp "$whole" "$aside" && mv "$aside" "$shard"',
    "rename another": 'head -c 1000000 /dev/urandom > "$aside" && mv "$aside" "$shard"',
    "cp": 'cp "$whole" "$shard"',
    "in place": 'dd if="$whole" of="$shard" bs=64k conv=notrunc status=none && touch -r "$whole" "$shard"',
    "grow": 'until truncate -s +8192 "$shard" 2>/dev/null; do sleep 0.01; done',
    "punch": 'fallocate --punch-hole --offset 4096 --length 200000 "$shard"',
}

#: Reads epochs of the cache until it is told to end the round, and says how that went: one line a round.
READER: Final = """
import sys, threading
import numpy as np
from tpucache import CachedDataset, CachedLoader, DamageError

folder, seed = sys.argv[1], int(sys.argv[2])
with CachedDataset(folder, in_memory=True) as whole:
    expected = np.stack([np.asarray(whole[at][0]) for at in range(len(whole))])
    order = np.argsort(np.asarray(whole.labels))
lines = iter(sys.stdin.readline, "")
for line in lines:
    ending = threading.Event()
    waiter = threading.Thread(target=lambda: (next(lines), ending.set()))
    right = wrong = damaged = after = mapped = 0
    with CachedDataset(folder, in_memory=False) as dataset:
        loader = CachedLoader(dataset, 100, shuffle=True, seed=seed, threads=2)
        epochs = 0
        try:
            while epochs < 2 or not ending.is_set() or after < 1:
                for images, labels in loader:
                    is_right = np.array_equal(np.asarray(images), expected[order[np.asarray(labels)]])
                    right, wrong = right + is_right, wrong + (not is_right)
                    if right + wrong == 1:
                        print("begun", flush=True)
                        waiter.start()
                epochs += 1
                after += ending.is_set()  # a whole epoch after the change
        except DamageError:
            damaged = 1
            if not waiter.ident:
                print("begun", flush=True)
                waiter.start()
        waiter.join()
        mapped = loader.metrics()["records"]["map"]
    print(right, wrong, damaged, mapped, flush=True)
"""


class Reader:
    """The process that reads."""

    def __init__(self, cache: Path, seed: int) -> None:
        """Start it; it reads the whole cache once before the first round."""
        command = [sys.executable, "-c", READER, str(cache), str(seed)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def begin(self) -> None:
        """Begin a round: return when the first batch was read."""
        self._say()
        self._line()

    def end(self) -> list[int]:
        """End a round; return how many batches were right and wrong, of damage errors, and of records out of maps."""
        self._say()
        return [int(word) for word in self._line().split()]

    def close(self) -> int:
        """End the process; return its status."""
        self._process.communicate(timeout=60)
        return self._process.returncode

    def _say(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.write("\n")
            self._process.stdin.flush()

    def _line(self) -> str:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            raise SystemExit(f"the reading process has died: status {self._process.wait()}")
        return line


def make_cache(folder: Path, codec: str) -> Path:
    """Build a cache of several small shards."""
    build_cache(Pictures(_SAMPLES, _SIDE), folder / "whole", Recipe(size=_SIDE, codec=codec, shard_mb=1), jobs=1)
    return Path(shutil.copytree(folder / "whole", folder / "read"))


def check(folder: Path, rounds: int, codec: str, seed: int) -> Counter[str]:
    """Do some rounds in a folder; return how often each change was made. Raises SystemExit for a wrong answer."""
    cache = make_cache(folder, codec)
    shards = sorted(path.name for path in cache.glob("*.lmdb"))
    draws, made, longest = random.Random(seed), Counter[str](), 0.0
    found = np.zeros(4, np.int64)
    reader = Reader(cache, seed)
    for _ in range(rounds):
        name, shard = draws.choice(sorted(CHANGES)), draws.choice(shards)
        reader.begin()
        time.sleep(draws.uniform(0, _LATEST))
        begun = time.monotonic()
        places = {"shard": cache / shard, "whole": folder / "whole" / shard, "aside": cache / f".{shard}.aside"}
        subprocess.run(
            ["sh", "-c", CHANGES[name]], env={**os.environ, **{k: str(v) for k, v in places.items()}}, check=True
        )
        waited = time.monotonic() - begun
        right, wrong, damaged, mapped = reader.end()
        if wrong or waited > LONGEST_WAIT or not (damaged or right):
            raise SystemExit(
                f"{name} of {shard}: {right} right, {wrong} wrong, {damaged} errors, waited {waited:.2f} s"
            )
        longest, made[name] = max(longest, waited), made[name] + 1
        found += [right, wrong, damaged, mapped]
        shutil.copyfile(folder / "whole" / shard, places["aside"])
        places["aside"].replace(cache / shard)
    if reader.close():
        raise SystemExit("the reading process did not end well")
    right, _, damaged, mapped = found.tolist()
    say(
        f"{folder}: {rounds} rounds, {right:,} batches right, none wrong, {damaged} errors of damage, {mapped:,} "
        f"records out of maps; the other program waited {longest:.2f} s at most"
    )
    if not mapped:
        say(f"{folder}: nothing was mapped, so this shows nothing of leases")
    return made


@contextlib.contextmanager
def overlay(lower: Path, upper: Path) -> Iterator[Path | None]:
    """Give an overlay of two new folders there; None where this user may not mount one."""
    parts = {name: str(place / name) for name, place in (("lowerdir", lower), ("upperdir", upper), ("workdir", upper))}
    for part in parts.values():
        Path(part).mkdir()
    place = lower / "overlay"
    place.mkdir()
    options = ",".join(f"{name}={part}" for name, part in parts.items())
    mount = ["mount", "-t", "overlay", "overlay", "-o", options, str(place)]
    is_mounted = shutil.which("mount") and subprocess.run(mount, check=False, capture_output=True).returncode == 0
    try:
        yield place if is_mounted else None
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(place)], check=True)


def main() -> None:
    """Run the check as the command line asks."""
    parser = make_parser(__doc__)
    parser.add_argument("folders", type=Path, nargs="*", metavar="FOLDER", help="where to try it, a file system each")
    parser.add_argument("--rounds", type=int, default=200, help="on each of them (%(default)s)")
    parser.add_argument("--codec", default="raw", help="of the records (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the changes and their moments (%(default)s)")
    options = parser.parse_args()
    places = options.folders or [place for place in (Path(tempfile.gettempdir()), Path("/dev/shm")) if place.is_dir()]
    with contextlib.ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory(dir=place))) for place in places]
        if not options.folders:
            mounted = stack.enter_context(overlay(folders[0], folders[-1]))
            folders += [] if mounted is None else [mounted]
            if mounted is None:
                say("overlayfs: left out, this user may not mount one")
        for folder in folders:
            made = check(folder, options.rounds, options.codec, options.seed)
            say("  " + ", ".join(f"{name} {count}" for name, count in sorted(made.items())))
