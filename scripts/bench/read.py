"""How fast tpucache reads, compared with its peers, and what its codecs cost: the same images, taking turns.

Every peer gets an environment of its own, the same photographs in its own format, and a process that reads shuffled
batches when asked to. In each round everyone reads once, in another order each round, while the others are still;
the gather, rows of an array in memory copied into reused batches, is what the machine allows at most. PSNR is against
the pixels that went in. Without `in memory`, nothing is kept decoded; of packed codecs the device finishes the images.

On a machine of many CPUs compare two of them: `taskset -c 0,1 python -m scripts.bench read`. The first run installs
some gigabytes of peers and writes each image about ten times; later ones find all that in the work folder.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from scripts.bench.photos import KINDS, SIZE, prepare_data
from scripts.bench.picture import draw_bars
from scripts.bench.rounds import (
    Contender,
    LeftOut,
    Track,
    add_choice,
    choose,
    leaving_out,
    race,
    ratio,
    read_whole,
    spread,
    spread_cell,
)
from scripts.bench.table import add_race_options, parse_options, peer_notes, show
from scripts.bench.worker import Worker
from scripts.commands import ROOT, make_parser, say
from scripts.environments import Environment

BATCH: Final = 256
LIMIT: Final = "gather"
REFERENCE: Final = "tpucache in memory 2"
PACKED: Final = ("yuv420", "dct-zstd", "dct-lz4")

# All are for Python 3.11; every peer that needs torch gets the same one.
_TORCH: Final = "torch==2.13.0"
_NUMPY: Final = "numpy==2.2.6"
_PILLOW: Final = "pillow==12.0.0"
_OPENCV: Final = "opencv-python-headless==4.11.0.86"
# FFCV is compiled: apt-get install -y g++ pkg-config libopencv-dev libturbojpeg0-dev
FFCV: Final = Environment(
    "ffcv",
    (
        ("numpy==1.26.4", "numba==0.61.2", _TORCH, _PILLOW, _OPENCV, "tqdm", "setuptools"),
        ("--no-build-isolation", "--no-deps", "ffcv==1.0.2", "pytorch-pfn-extras==0.9.0"),
    ),
)
_LITDATA: Final = Environment("litdata", ((_TORCH, _NUMPY, "litdata==0.2.76"),))
_WEBDATASET: Final = Environment("webdataset", ((_TORCH, _NUMPY, "webdataset==1.0.2"),))
_FOLDER: Final = Environment("torch", ((_TORCH, _NUMPY, _PILLOW),))


def _ours(name: str, **setting: Any) -> Contender:
    return Contender(f"tpucache {name}", "tpucache", "read", setting)


def _ffcv(kind: str, threads: int) -> Contender:
    return Contender(f"ffcv {kind} {threads}", "ffcv", "read", {"kind": kind, "threads": threads}, FFCV)


CONTENDERS: Final = (
    *(Contender(f"{LIMIT} {n}", "limits", "read", {"threads": n}) for n in (1, 2)),
    *(_ours(f"in memory {n}", kind="raw", threads=n, memory=True) for n in (1, 2)),
    *(_ours(f"{kind} {n}", kind=kind, threads=n) for kind in ("raw", "jpeg") for n in (1, 2)),
    *(_ours(f"{kind} {n}", kind=kind, threads=n, finish="device") for kind in PACKED for n in (1, 2)),
    *(_ffcv(kind, n) for kind in ("raw", "jpeg") for n in (1, 2)),
    Contender("litdata", "litdata", "read", {"workers": 2}, _LITDATA),
    Contender("webdataset", "webdataset", "read", {"workers": 2}, _WEBDATASET),
    Contender("jpeg folder", "torchvision", "read", {"workers": 2}, _FOLDER),
)


def main() -> None:
    """Run the benchmark as the command line asks."""
    options = _parse()
    data, images = prepare_data(options.work, options.source, options.size, tuple(KINDS))
    # Large images in smaller batches: the memory of all processes together would leave none for the page cache.
    batch = min(BATCH, round(BATCH * (SIZE / options.size) ** 2))
    for name, value in {"PASSES": options.passes, "SIZE": options.size, "BATCH": batch}.items():
        os.environ[f"BENCH_{name}"] = str(value)  # for those that read
    left_out: LeftOut = []
    track = Track(options.work)
    chosen = choose(CONTENDERS, options.only)
    chosen += [each for each in CONTENDERS if (each.peer == "limits" or each.name == REFERENCE) and each not in chosen]
    with contextlib.ExitStack() as stack:
        field = Field(track, data, options.seconds, left_out)
        for contender in track.admit(chosen, left_out):
            field.enter(contender, stack)
        readers = field.race(options.rounds)
    for row in readers:
        row["bytes_per_image"] = sum(path.stat().st_size for path in field.files[row["name"]]) / images
    note = (
        f"{images:,} images of {options.size}x{options.size} uint8, shuffled batches of {batch}, epochs of "
        f"{options.passes} passes, warm page cache; median of {options.rounds} rounds of {options.seconds:g} s."
    )
    figures = {"images": images, "versions": track.versions, "left_out": left_out, "readers": readers}
    show(options, figures, [("", to_rows(readers))], [note, *peer_notes(track.versions, left_out)])
    if options.picture:
        bars = [(row["name"], row["images_per_second"]) for row in readers if not row["name"].endswith(" 1")]
        draw_bars("Images a second", [("", bars)], options.picture, "{:,.0f}")


class Field:
    """Those who take part, each with a process that waits for its turn."""

    def __init__(self, track: Track, data: Path, seconds: float, left_out: LeftOut) -> None:
        self._track, self._data, self._seconds, self._left_out = track, data, seconds, left_out
        self._workers: dict[str, Worker] = {}
        #: The files that hold the images that a contender reads, where its format is one of those that are known.
        self.files: dict[str, list[Path]] = {}
        self._psnr: dict[str, float | None] = {}

    def enter(self, contender: Contender, stack: contextlib.ExitStack) -> None:
        """Start the process of a contender, and let it warm up."""
        say(f"{contender.name}: warming up")
        with leaving_out(contender.name, self._left_out):
            self._write(contender)
            worker = stack.enter_context(contextlib.closing(self._start(contender)))
            worker.rate(self._seconds / 2)
            self._workers[contender.name] = worker
            self.files[contender.name] = files_of(contender, self._data)

    def race(self, rounds: int) -> list[dict[str, Any]]:
        """Let everyone read once a round, and return their rows, the fastest first."""
        turns = {name: functools.partial(self._turn, name) for name in self._workers}
        rates = race(turns, rounds, self._left_out)
        rows = [summarise(name, rates) | {"psnr": self._psnr[name]} for name in rates]
        return sorted(rows, key=lambda row: -row["images_per_second"])

    def _turn(self, name: str) -> float:
        """Return the rate of one of them, with its files in the page cache, as other turns may push large ones out."""
        read_whole(self.files[name])
        return self._workers[name].rate(self._seconds)

    def _start(self, contender: Contender) -> Worker:
        """Start the process that reads. Raises CommandError when its first batch is not right."""
        folder = self._data / "peer" / contender.peer
        read_whole([folder])
        worker = self._track.start(contender, {**contender.setting, "data": str(self._data), "folder": str(folder)})
        try:
            self._psnr[contender.name] = worker.ask("check")["psnr"]
        except BaseException:
            worker.close()
            raise
        return worker

    def _write(self, contender: Contender) -> None:
        """Have a peer write its format, unless it is there. Raises CommandError."""
        folder = self._data / "peer" / contender.peer
        module = ROOT / "scripts" / "bench" / "peers" / f"{contender.peer}.py"
        installs = contender.environment.fingerprint if contender.environment else ""
        mark, wanted = folder.with_suffix(".written"), hashlib.sha256(module.read_bytes() + installs.encode())
        if mark.exists() and mark.read_text() == wanted.hexdigest():
            return
        say(f"{contender.peer}: writing its format, if it has one")
        mark.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        setting = {"data": str(self._data), "folder": str(folder)}
        with contextlib.closing(self._track.start(contender, setting, "write", contender.peer)) as worker:
            worker.ask("write", patience=math.inf)
        mark.write_text(wanted.hexdigest())


def files_of(contender: Contender, data: Path) -> list[Path]:
    """Return the files of a contender's images, none where its format is not one of these."""
    kind = contender.setting.get("kind")
    folder = data / f"cache-{kind}" if contender.is_ours else data / "peer" / contender.peer
    patterns = {"tpucache": "*.lmdb", "ffcv": f"{kind}.beton"}
    return list(folder.glob(patterns[contender.peer])) if contender.peer in patterns else []


def summarise(name: str, rates: dict[str, list[float]]) -> dict[str, Any]:
    """Return a contender's row; the name of one ends with the number of its threads, and others have two workers."""
    figures = spread(rates[name])
    return {
        "name": name,
        "images_per_second": figures["median"],
        **figures,
        "of_gather": ratio(rates[name], rates.get(f"{LIMIT} {1 if name.endswith(' 1') else 2}")),
        "times_slower": ratio(rates.get(REFERENCE), rates[name]),
    }


def to_rows(readers: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the rows of the table, its heading first."""
    rows = [["reader", "images/s", "min - max", "of the gather", "times slower", "kB an image", "PSNR, dB"]]
    for row in readers:
        figures = (row["of_gather"], ".2f"), (row["times_slower"], ".1f"), (row["bytes_per_image"] / 1000, ".1f")
        cells = [f"{value:{digits}}" if value else "" for value, digits in (*figures, (row["psnr"], ".1f"))]
        rows.append([row["name"], f"{row['images_per_second']:,.0f}", spread_cell(row), *cells])
    return rows


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--source", type=Path, help="a folder of photographs, a folder a class; else some are made up")
    add_race_options(parser, "build/bench", seconds=2.0)
    parser.add_argument(
        "--passes",
        type=int,
        default=16,
        help="how often an epoch shows each image; default: %(default)s, as if there"
        " were so many times more: beginning an epoch costs time, of which a large data set sees little",
    )
    parser.add_argument("--size", type=int, default=SIZE, help="of the images, in pixels (%(default)s)")
    add_choice(parser, CONTENDERS)
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw it (needs matplotlib)")
    return parse_options(parser, {"passes": 1, "size": 16})
