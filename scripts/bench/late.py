"""How fast warmup is where files answer late, as on a network mount; and verify, stage and a first epoch from there.

    python -m scripts.bench late
    python -m scripts.bench late PHOTOGRAPHS --delays 0 30 --jobs 2 --rounds 1
    python -m scripts.bench late --sources dct-lz4 raw --delays 0 10 50

Photographs lie in a folder, in the same folder with a .csv, and in a .zip. A library that is loaded before the C
library (LD_PRELOAD; a C compiler is needed) makes each opening of one of their files, and each read of it, answer so
many milliseconds later. Every row is warmup of all of them, its listing and its workers' start included. Beside it, a
plain pool of 32 threads in one process reads, decodes and resizes the files of the folder with Pillow. The source
"mount" is that folder on a mount of late_mount.c (see below), where the size of each file comes late, too.

Last, two caches of four times the photographs, a small one (dct-lz4) and a large one (raw), are verified, staged, and
read in one shuffled epoch as they lie, and out of a copy of stage_cache. Such a library could not delay what maps of
files and hints to the kernel do, so the caches are mounted read-only by late_mount.c, a file system of this benchmark's
own (FUSE; it needs root): each lookup, opening and request of the kernel for up to 128 KiB is answered so much later,
however many are asked at a time. Each row has a new mount, also without a delay; nothing of it is in memory. The column
"page cache" is the folder itself, whose files are in memory. A read-only mount is mapped, as /kaggle/input is. The
package's import is not measured.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from scripts.bench.photos import make_once, make_up_photographs
from scripts.bench.table import (
    add_race_options,
    as_markdown,
    as_text,
    machine,
    machine_line,
    parse_options,
    write_files,
)
from scripts.commands import ROOT, say
from tpucache import Recipe, build_cache
from tpucache.store.files import link_or_copy
from tpucache.warmup.sources import open_source

_SOURCES: Final = ("folder", ".csv", ".zip", "mount")
_PLAIN: Final = "plain pool, folder"
_SHIM: Final = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { MOST = 65536 };
static char late[MOST];

static void pause_late(void) {
    const char *text = getenv("LATE_MICROSECONDS");
    if (text && atoi(text) > 0) usleep(atoi(text));
}

static int opened(const char *path, int number) {
    const char *below = getenv("LATE_BELOW");
    int is_late = below && path && strncmp(path, below, strlen(below)) == 0;
    if (number >= 0 && number < MOST) late[number] = is_late;
    if (is_late) pause_late();
    return number;
}

#define MODE int mode = 0; if (flags & (O_CREAT | O_TMPFILE)) { va_list rest; va_start(rest, flags); \
    mode = va_arg(rest, int); va_end(rest); }
#define OPEN(name) int name(const char *path, int flags, ...) { MODE \
    int (*next)(const char *, int, ...) = dlsym(RTLD_NEXT, #name); return opened(path, next(path, flags, mode)); }
#define OPENAT(name) int name(int at, const char *path, int flags, ...) { MODE \
    int (*next)(int, const char *, int, ...) = dlsym(RTLD_NEXT, #name); \
    return opened(path, next(at, path, flags, mode)); }
OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64)

static ssize_t has_read(int number, ssize_t found) {
    if (found > 0 && number >= 0 && number < MOST && late[number]) pause_late();
    return found;
}
ssize_t read(int number, void *to, size_t size) {
    ssize_t (*next)(int, void *, size_t) = dlsym(RTLD_NEXT, "read");
    return has_read(number, next(number, to, size));
}
#define PREAD(name) ssize_t name(int number, void *to, size_t size, off_t at) { \
    ssize_t (*next)(int, void *, size_t, off_t) = dlsym(RTLD_NEXT, #name); \
    return has_read(number, next(number, to, size, at)); }
PREAD(pread) PREAD(pread64)
#define PREADV(name) ssize_t name(int number, const struct iovec *to, int parts, off_t at) { \
    ssize_t (*next)(int, const struct iovec *, int, off_t) = dlsym(RTLD_NEXT, #name); \
    return has_read(number, next(number, to, parts, at)); }
PREADV(preadv) PREADV(preadv64)
#define PREADV2(name) ssize_t name(int number, const struct iovec *to, int parts, off_t at, int flags) { \
    ssize_t (*next)(int, const struct iovec *, int, off_t, int) = dlsym(RTLD_NEXT, #name); \
    return has_read(number, next(number, to, parts, at, flags)); }
PREADV2(preadv2) PREADV2(preadv64v2)
"""

_WARMUP: Final = """
import sys, time
from pathlib import Path
from tpucache import Recipe, build_cache
from tpucache.warmup.sources import TableOptions, open_source

if __name__ == "__main__":
    path, root, cache, jobs = sys.argv[1:]
    source = open_source(path, TableOptions(root=root)) if path.endswith(".csv") else open_source(path)
    began = time.monotonic()
    manifest = build_cache(source, cache, Recipe(size=224), jobs=int(jobs))
    print(manifest.samples / (time.monotonic() - began))
"""

_POOL: Final = """
import io, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import numpy as np
from PIL import Image

def load(path):
    with open(path, "rb", buffering=0) as file:
        data = file.read()
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB").resize((224, 224), Image.Resampling.LANCZOS))

began = time.monotonic()
paths = sorted(Path(sys.argv[1]).rglob("*.jpg"))
with ThreadPoolExecutor(32) as pool:
    count = sum(1 for _ in pool.map(load, paths))
print(count / (time.monotonic() - began))
"""


_READ: Final = """
import sys, time
import tpucache.loading.loader, tpucache.store.verify
from tpucache import CachedDataset, CachedLoader, stage_cache, verify_cache

way, path, place = sys.argv[1:]
began = time.monotonic()
if way == "verify":
    assert not verify_cache(path)
else:
    if way != "epoch":
        path = stage_cache(path, place)
    if way != "stage":
        for _ in CachedLoader(CachedDataset(path), 256, shuffle=True, finish="device"):
            pass
seconds = time.monotonic() - began
print(len(CachedDataset(path)) / seconds)
"""
#: What reads a cache.
_READERS: Final = ("verify", "stage", "epoch", "stage, epoch")
#: The codecs of the caches that are read.
_CODECS: Final = ("dct-lz4", "raw")
#: How often each photograph is in these caches. With fewer samples, a few answers take as long as all of the reading.
_COPIES: Final = 4
#: What is measured in a column: a delay in milliseconds, or that a cache is read from the page cache, without a mount.
_Column = float | Literal["page cache"]


def make_sources(work: Path, photographs: Path | None, sources: Sequence[str]) -> dict[str, Path]:
    """Return the places of the photographs by kind of source, and of those caches that are in `sources`."""
    folder = photographs.resolve() if photographs else make_up_photographs(work / "photos")

    def make(unfinished: Path) -> None:
        files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
        names = [path.relative_to(folder).as_posix() for path in files]
        lines = ["path,label", *(f"{name},{name.partition('/')[0]}" for name in names)]
        (unfinished / "table.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
        with zipfile.ZipFile(unfinished / "photos.zip", "w") as archive:
            for path, name in zip(files, names, strict=True):
                archive.write(path, name)

    def repeat(unfinished: Path) -> None:
        for number in range(_COPIES):
            shutil.copytree(folder, unfinished, copy_function=_link_as(f"copy-{number}-"), dirs_exist_ok=True)

    def build(codec: str, unfinished: Path) -> None:
        build_cache(open_source(make_once(work / "repeated-photos", repeat)), unfinished, Recipe(size=224, codec=codec))

    packed = make_once(work / "packed", make)
    wanted = [codec for codec in _CODECS if codec in sources]
    caches = {codec: make_once(work / f"repeated-{codec}", functools.partial(build, codec)) for codec in wanted}
    files = {"folder": folder, "mount": folder, ".csv": packed / "table.csv", ".zip": packed / "photos.zip"}
    return {**files, **caches}


def _link_as(prefix: str) -> Callable[[str, str], object]:
    """Return a function for `shutil.copytree` that gives a file one more name, which begins with `prefix`."""

    def link(source: str, target: str) -> None:
        name = Path(target).with_name(prefix + Path(target).name)
        link_or_copy(Path(source), name, name.with_suffix(".unfinished"))

    return link


def make_shim(work: Path) -> Path:
    """Compile the library that makes files answer late, and return it. Raises CalledProcessError."""
    source, library = work / "late.c", work / "late.so"
    source.write_text(_SHIM)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


def make_mount(work: Path) -> Path:
    """Compile the program that mounts a folder as a late file system, and return it. Raises CalledProcessError."""
    program = work / "late_mount"
    source = Path(__file__).with_name("late_mount.c")
    subprocess.run(["cc", "-O2", "-o", program, source, "-lpthread"], check=True)
    return program


@contextlib.contextmanager
def mounted(program: Path, folder: Path, column: _Column) -> Iterator[Path]:
    """Mount a folder so that it answers late, and yield the place; the folder itself for the column "page cache".

    Raises CalledProcessError if it cannot be mounted.
    """
    if column == "page cache":
        yield folder
        return
    with tempfile.TemporaryDirectory() as place:
        command = [str(program), str(folder), place, str(round(column * 1000))]
        with subprocess.Popen(command) as server:
            try:
                while not os.path.ismount(place):
                    if server.poll() is not None:
                        raise subprocess.CalledProcessError(server.returncode, command)
                    time.sleep(0.01)
                yield Path(place)
            finally:
                subprocess.run(["umount", "--lazy", place], check=server.poll() is None)


def read(way: str, cache: Path, program: Path, column: _Column) -> float:
    """Return the images a second of one way to read a cache."""
    if column == "page cache":  # a cache that was just built may be on its way to the disk
        for path in cache.iterdir():
            path.read_bytes()
    with mounted(program, cache, column) as place:
        return _run(_READ, [way, place, "copy"], {**os.environ, "PYTHONPATH": str(ROOT)})


def measure(kind: str, jobs: int | None, sources: dict[str, Path], shim: Path, milliseconds: float) -> float:
    """Return the images a second of one warmup from slow files, or of the plain pool."""
    folder = sources["folder"]
    below = sources[".zip"] if kind == ".zip" else folder
    environment = {
        **os.environ,
        "LD_PRELOAD": str(shim),
        "LATE_BELOW": str(below),
        "LATE_MICROSECONDS": str(round(milliseconds * 1000)),
        "PYTHONPATH": str(ROOT),
    }
    words: list[str | Path] = [sources[kind], folder, "cache", str(jobs)] if kind != _PLAIN else [folder]
    return _run(_POOL if kind == _PLAIN else _WARMUP, words, environment)


def measure_mount(jobs: int | None, folder: Path, program: Path, milliseconds: float) -> float:
    """Return the images a second of one warmup of a folder on a late mount."""
    with mounted(program, folder, milliseconds) as place:
        return _run(_WARMUP, [place, place, "cache", str(jobs)], {**os.environ, "PYTHONPATH": str(ROOT)})


def _run(code: str, words: Sequence[str | Path], environment: dict[str, str]) -> float:
    """Run a program in an empty folder, and return the number that it prints last."""
    with tempfile.TemporaryDirectory() as place:
        script = Path(place, "measured.py")
        script.write_text(code)
        command = [sys.executable, script, *words]
        done = subprocess.run(command, env=environment, cwd=place, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.split()[-1])


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Return all figures, each the median of the rounds."""
    options.work.mkdir(parents=True, exist_ok=True)
    sources, shim = make_sources(options.work, options.source, options.sources), make_shim(options.work)
    wanted = [(source, jobs) for source in _SOURCES if source in options.sources for jobs in options.jobs]
    ways: list[tuple[str, int | None]] = [*wanted, *([(_PLAIN, None)] if "folder" in options.sources else [])]
    reading = {f"{way}, {codec}": (way, sources[codec]) for codec in _CODECS if codec in sources for way in _READERS}
    program = make_mount(options.work) if reading or "mount" in options.sources else None
    ways += [(name, None) for name in reading]
    columns: list[_Column] = [*options.delays]
    if reading:
        columns.insert(0, "page cache")
    found: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for column in columns:
            for kind, jobs in ways:
                say(f"{kind}, {jobs or 'no'} jobs, {_heading(column)}")
                if program and kind in reading:
                    rate = read(*reading[kind], program, column)
                elif column == "page cache":
                    continue
                elif program and kind == "mount":
                    rate = measure_mount(jobs, sources["folder"], program, column)
                else:
                    rate = measure(kind, jobs, sources, shim, column)
                found.setdefault(json.dumps([kind, jobs, column]), []).append(rate)
    rows = []
    for kind, jobs in ways:
        rates = [found.get(json.dumps([kind, jobs, column])) for column in columns]
        medians = [None if each is None else statistics.median(each) for each in rates]
        rows.append({"source": kind, "jobs": jobs, "rates": medians})
    return {"machine": machine(), "columns": columns, "rounds": options.rounds, "rows": rows}


def _heading(column: _Column) -> str:
    return column if column == "page cache" else f"{column:g} ms"


def to_rows(report: dict[str, Any]) -> list[list[str]]:
    """Return the rows of the table, its heading first."""
    columns = report["columns"]
    table = [["source", "jobs", *(f"{_heading(column)}, images/s" for column in columns)]]
    first = columns.index(next(column for column in columns if column != "page cache"))
    for row in report["rows"]:
        cells = []
        for column, rate in zip(columns, row["rates"], strict=True):
            if rate is None:
                cells.append("")
            else:
                cells.append(
                    f"{rate:,.0f}" + ("" if column == "page cache" else f" ({rate / row['rates'][first]:.2f})")
                )
        table.append([row["source"], str(row["jobs"] or ""), *cells])
    return table


def main() -> None:
    """Run the benchmark as the command line asks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", type=Path, metavar="PHOTOGRAPHS", help="a folder; else some are made up")
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 10.0, 30.0, 50.0], help="in milliseconds")
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 2, 4], help="workers of warmup")
    kinds = [*_SOURCES, *_CODECS]
    parser.add_argument("--sources", nargs="+", choices=kinds, default=kinds, help="what warmup and readers read")
    add_race_options(parser, "build/late")
    parser.set_defaults(rounds=3)
    options = parse_options(parser)
    try:
        report = run(options)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"bench late: {error}")
    rows = to_rows(report)
    note = (
        "In brackets: of the rate at the first delay. Median of "
        f"{report['rounds']} rounds; {machine_line(report['machine'])}."
    )
    print(as_text(rows, left=(0,)), note, sep="\n")
    write_files(options, report, f"{as_markdown(rows)}\n{note}\n")
