"""How fast warmup is where files answer late, as on a network mount; and verify, stage and a first epoch from there.

    python -m scripts.bench late
    python -m scripts.bench late PHOTOGRAPHS --delays 0 30 --jobs 2 --rounds 1
    python -m scripts.bench late --sources dct-lz4 raw --delays 0 10 50

Photographs lie in a folder, and in a .zip, whose warmup is measured, its listing and its workers' start included. Two
caches of four times the photographs, a small one (dct-lz4) and a large one (raw), are verified, staged, and read in one
shuffled epoch as they lie, and out of a copy of stage_cache. All of them are mounted by late_mount.c, a file system of
this benchmark's own (FUSE; it needs root and a C compiler): each lookup, opening and request of the kernel for up to
128 KiB is answered so many milliseconds later, however many are asked at a time. Each row has a new mount, also without
a delay; nothing of it is in memory. The column "page cache" is the folder itself, whose files are in memory. A
read-only mount is mapped, as /kaggle/input is. The package's import is not measured.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from scripts.bench.photos import link_photographs, make_once, make_up_photographs
from scripts.bench.rounds import race, read_whole
from scripts.bench.table import Rows, add_race_options, parse_options, show
from scripts.commands import ROOT, make_parser
from tpucache import Recipe, build_cache

_MEASURED: Final = """
import sys, time
import tpucache.loading.loader, tpucache.store.verify
from pathlib import Path
from tpucache import CachedDataset, CachedLoader, Recipe, build_cache, stage_cache, verify_cache

if __name__ == "__main__":
    way, path, jobs = sys.argv[1:]
    began = time.monotonic()
    if way == "warmup":
        samples = build_cache(path, "cache", Recipe(size=224), jobs=int(jobs)).samples
    elif way == "verify" and verify_cache(path):
        sys.exit("the cache is damaged")
    else:
        if way.startswith("stage"):
            path = stage_cache(path, "copy")
        if way.endswith("epoch"):
            for _ in CachedLoader(CachedDataset(path), 256, shuffle=True, finish="device"):
                pass
    seconds = time.monotonic() - began
    print((samples if way == "warmup" else len(CachedDataset(path))) / seconds)
"""
_SOURCES: Final = ("folder", ".zip")
_READERS: Final = ("verify", "stage", "epoch", "stage, epoch")
_CODECS: Final = ("dct-lz4", "raw")
#: How often each photograph is in caches. With fewer samples, a few answers take as long as all of the reading.
_COPIES: Final = 4
_PAGE_CACHE: Final = -1.0  # in place of a delay


@dataclass(frozen=True)
class Way:
    """What is done with a `source` below a `folder`, which is mounted."""

    name: str
    does: str
    folder: Path
    source: str = "."
    jobs: int = 0


def make_ways(options: argparse.Namespace) -> list[Way]:
    """Return the ways that are asked for, with what they read, which is made unless it is there."""
    folder = options.source.resolve() if options.source else make_up_photographs(options.work / "photos")
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))

    def pack(unfinished: Path) -> None:
        with zipfile.ZipFile(unfinished / "photos.zip", "w") as archive:
            for path in files:
                archive.write(path, path.relative_to(folder))

    def build(codec: str, unfinished: Path) -> None:
        count = _COPIES * len(files)
        photographs = link_photographs(files, count, options.work / f"{count}-photographs")
        build_cache(photographs, unfinished, Recipe(size=224, codec=codec))

    places = {"folder": (folder, "."), ".zip": (options.work / "packed", "photos.zip")}
    wanted = [(kind, jobs) for kind in _SOURCES if kind in options.sources for jobs in options.jobs]
    ways = [Way(f"warmup, {kind}, {jobs} jobs", "warmup", *places[kind], jobs) for kind, jobs in wanted]
    if ".zip" in options.sources:
        make_once(options.work / "packed", pack)
    for codec in _CODECS:
        if codec in options.sources:
            cache = make_once(options.work / f"repeated-{codec}", functools.partial(build, codec))
            ways += [Way(f"{reader}, {codec}", reader, cache) for reader in _READERS]
    return ways


def make_mount(work: Path) -> Path:
    """Compile the program that mounts a folder as a late file system, and return it. Raises CalledProcessError."""
    program, source = work / "late_mount", Path(__file__).with_name("late_mount.c")
    subprocess.run(["cc", "-O2", "-o", program, source, "-lpthread"], check=True)
    return program


@contextlib.contextmanager
def mounted(program: Path, folder: Path, milliseconds: float) -> Iterator[Path]:
    """Mount a folder so that it answers late, and yield the place; the folder itself for the page cache.

    Raises CalledProcessError if it cannot be mounted.
    """
    if milliseconds == _PAGE_CACHE:
        read_whole([folder])
        yield folder
        return
    with tempfile.TemporaryDirectory() as place:
        command = [str(program), str(folder), place, str(round(milliseconds * 1000))]
        with subprocess.Popen(command) as server:
            try:
                while not os.path.ismount(place):
                    if server.poll() is not None:
                        raise subprocess.CalledProcessError(server.returncode, command)
                    time.sleep(0.01)
                yield Path(place)
            finally:
                subprocess.run(["umount", "--lazy", place], check=server.poll() is None)


def measure(way: Way, milliseconds: float, program: Path) -> float:
    """Return the images a second of one way, in a process of its own."""
    with mounted(program, way.folder, milliseconds) as mount, tempfile.TemporaryDirectory() as place:
        script = Path(place, "measured.py")
        script.write_text(_MEASURED)
        words: list[str | Path] = [sys.executable, script, way.does, mount / way.source, str(way.jobs)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(words, env=environment, cwd=place, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.split()[-1])


def to_rows(ways: Sequence[Way], columns: Sequence[float], rates: dict[str, list[float]]) -> Rows:
    """Return the rows of the table, its heading first: the rates, and of the first delay's in brackets."""
    table = [["", *("page cache" if each == _PAGE_CACHE else f"{each:g} ms" for each in columns)]]
    for way in ways:
        found = [statistics.median(rates[f"{way.name}, {column:g}"]) for column in columns]
        cells = (f"{rate:,.0f} ({rate / found[1]:.2f})" for rate in found)
        table.append([way.name, *cells])
    return table


def main() -> None:
    """Run the benchmark as the command line asks."""
    options = _parse()
    options.work.mkdir(parents=True, exist_ok=True)
    ways, columns = make_ways(options), [_PAGE_CACHE, *options.delays]
    try:
        program = make_mount(options.work)
        turns: dict[str, Callable[[], float]] = {
            f"{way.name}, {column:g}": functools.partial(measure, way, column, program)
            for way in ways
            for column in columns
        }
        rates = race(turns, options.rounds)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"bench late: {error}")
    figures: dict[str, Any] = {"rates": rates}
    note = f"images/s; in brackets of the rate at the first delay; medians of {options.rounds} rounds."
    show(options, figures, [("", to_rows(ways, columns, rates))], [note])


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("source", nargs="?", type=Path, metavar="PHOTOGRAPHS", help="a folder; else some are made up")
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 10.0, 30.0, 50.0], help="in milliseconds")
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 2, 4], help="workers of warmup")
    kinds = [*_SOURCES, *_CODECS]
    parser.add_argument("--sources", nargs="+", choices=kinds, default=kinds, help="what warmup and readers read")
    add_race_options(parser, "build/late")
    parser.set_defaults(rounds=3)
    return parse_options(parser)
