"""Reference builds by this checkout and by another: shards, index and samples of each must have the same bytes.

    git worktree add ../before COMMIT
    python -m scripts.checks reference ../before

Pictures are made here. Both checkouts build the same caches with the command line: each codec, variants, masks,
numbers, other sizes and modes, samples that are added later, and builds that are killed and continued.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from PIL import Image

from scripts.commands import ROOT, make_parser, say

_MINUTES: Final = 10  # that one command may take
_COMPARED: Final = (".lmdb", ".npy", ".npz")  # shards, index, samples


class Case(NamedTuple):
    """A source below the work folder, options of warmup, and what is added to the source for a second build."""

    source: str
    options: str
    added: str = ""
    is_killed: bool = False


CASES: Final = {
    "raw": Case("photos", "--size 64"),
    "yuv420": Case("photos", "--size 64 --codec yuv420"),
    "dct-lz4": Case("photos", "--size 64 --codec dct-lz4 --quality 90"),
    "dct-zstd": Case("photos", "--size 64 --codec dct-zstd"),
    "jpeg": Case("photos", "--size 64 --codec jpeg"),
    "png": Case("photos", "--size 64 --codec png"),
    "zstd": Case("photos", "--size 64 --codec zstd"),
    "exact, pad": Case("photos", "--size 80x48 --fit pad --exact"),
    "grey": Case("photos", "--size 64 --mode grey"),
    "keep": Case("deep", "--size 32 --mode keep"),
    "variants": Case("photos", "--size 64 --variants 2 --augment standard --seed 7"),
    "masks": Case("masked/table.csv", "--size 64 --variants 1 --augment standard --mask-col mask"),
    "numbers": Case("masked/table.csv", "--size 64 --label-col number --labels numbers --drop mask"),
    "added": Case("grown", "--size 64 --shard-mb 1 --variants 1 --augment flip", added="more"),
    "zip": Case("photos.zip", "--size 64"),
    "killed": Case("photos", "--size 96 --shard-mb 1 --variants 2 --augment standard", is_killed=True),
    "killed, lz4": Case("photos", "--size 224 --shard-mb 1 --codec dct-lz4", is_killed=True),
}


def main() -> int:
    """Build every case by both checkouts, and compare the files."""
    parser = make_parser(__doc__)
    parser.add_argument("other", type=Path, help="a checkout of another commit")
    parser.add_argument("--cases", nargs="*", default=[*CASES], choices=CASES, help="only these")
    options = parser.parse_args()
    different = 0
    with tempfile.TemporaryDirectory(prefix="tpucache-reference-") as name:
        for case in options.cases:
            files = [build(CASES[case], checkout, Path(name)) for checkout in (ROOT, options.other.resolve())]
            names = sorted({*files[0], *files[1]})
            unlike = [each for each in names if files[0].get(each) != files[1].get(each)]
            different += bool(unlike)
            print(f"{case:14} {len(names):3} files  {f'DIFFERENT: {unlike}' if unlike else 'same'}", flush=True)
    return 1 if different else 0


def build(case: Case, checkout: Path, work: Path) -> dict[str, str]:
    """Build a case by a checkout, and return the digests of the cache's files."""
    shutil.rmtree(work / "sources", ignore_errors=True)
    shutil.rmtree(work / "cache", ignore_errors=True)
    make_sources(work / "sources")
    words = ["warmup", case.source, str(work / "cache"), *case.options.split(), "--jobs", "2"]
    if case.is_killed:
        kill(words, checkout, work)
    run(words, checkout, work)
    if case.added:
        shutil.copytree(work / "sources" / case.added, work / "sources" / case.source, dirs_exist_ok=True)
        run(words, checkout, work)
    files = [path for path in (work / "cache").iterdir() if path.suffix in _COMPARED]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def command(words: Sequence[str], checkout: Path, work: Path) -> subprocess.Popen[bytes]:
    """Start a command of a checkout in the folder of the sources."""
    return subprocess.Popen(
        [sys.executable, "-m", "tpucache", *words],
        cwd=work / "sources",
        env={**os.environ, "PYTHONPATH": str(checkout), "TPUCACHE_DIR": str(work / "kept")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def run(words: Sequence[str], checkout: Path, work: Path) -> None:
    """Run a command to its end. Exits when it fails."""
    process = command(words, checkout, work)
    _, errors = process.communicate(timeout=60 * _MINUTES)
    if process.returncode:
        sys.exit(f"{checkout}: tpucache {' '.join(words)} ended with {process.returncode}:\n{errors.decode()[-2000:]}")


def kill(words: Sequence[str], checkout: Path, work: Path) -> None:
    """Start a build, and kill it with its workers once it has written a part of the cache."""
    process = command(words, checkout, work)
    until = time.monotonic() + 60 * _MINUTES
    while not _has_written(work / "cache") and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    _, errors = process.communicate()
    if process.returncode != -signal.SIGKILL:
        say(f"{checkout}: the build ended before it could be killed:\n{errors.decode()[-500:]}")


def _has_written(cache: Path) -> bool:
    try:
        return any(path.suffix == ".lmdb" and path.stat().st_size > 0 for path in cache.rglob("*"))
    except FileNotFoundError:
        return False


def make_sources(folder: Path) -> None:
    """Make the sources of all cases below a folder; always the same pictures."""
    photos, masked = folder / "photos", folder / "masked"
    for number, pixels in enumerate(pictures(96)):
        path = photos / f"class-{number % 3}" / f"{number:03}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path, quality=92)
        part = folder / ("grown" if number < 64 else "more") / path.relative_to(photos)
        part.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, part)
    masked.mkdir()
    rows = ["image,mask,number"]
    for number, pixels in enumerate(pictures(24)):
        Image.fromarray(pixels).save(masked / f"{number}.jpg", quality=90)
        Image.fromarray((pixels[..., 0] // 90).astype(np.uint8)).save(masked / f"{number}-mask.png")
        rows.append(f"{number}.jpg,{number}-mask.png,{number / 8}")
    (masked / "table.csv").write_text("\n".join(rows) + "\n")
    deep = folder / "deep" / "one"
    deep.mkdir(parents=True)
    for number, pixels in enumerate(pictures(12)):
        Image.fromarray(pixels[..., 0].astype(np.uint16) * 257).save(deep / f"{number}.png")
    shutil.make_archive(str(photos), "zip", photos)


def pictures(count: int) -> Iterator[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]:
    """Yield pictures of smooth noise, of several shapes."""
    random = np.random.default_rng(65)
    for number in range(count):
        coarse = random.integers(0, 256, (9, 9, 3), dtype=np.uint8)
        fine = random.integers(0, 40, (180 + number % 5 * 40, 240, 3), dtype=np.uint8)
        height, width, _ = fine.shape
        smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
        yield (smooth // 2 + fine).astype(np.uint8)
