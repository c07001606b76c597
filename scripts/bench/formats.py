"""Formats of images by their bytes: how large, how good, how fast to read, and what is left for the device.

The formats that a device finishes (yuv420, dct-zstd, dct-lz4; with bands of frequencies also read as images of half and
a quarter of the side, whose PSNR is against that size made of all frequencies) beside raw pixels and JPEG of quality
90, ours and FFCV's: the same photographs, in shuffled batches out of the page cache, nothing kept decoded. PSNR is
against the raw pixels, the mean over 16 images. The device is this machine's processors, by plain torch and by XLA.

    python -m scripts.bench formats --source photographs --size 512 --picture rate_bytes.png
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
from pathlib import Path
from typing import Any, Final

from scripts.bench.finish import milliseconds_an_image
from scripts.bench.photos import BANDED, BANDS, SIZE, prepare_data
from scripts.bench.picture import draw_formats
from scripts.bench.read import BATCH, Field
from scripts.bench.read_contenders import FORMATS, KINDS_COMPARED, OURS, PARTS, files_of, slipstream
from scripts.bench.rounds import LeftOut, Track, leaving_out, ratio
from scripts.bench.table import (
    add_race_options,
    as_markdown,
    as_text,
    machine,
    parse_options,
    to_markdown,
    write_files,
)
from scripts.commands import say
from tpucache.store.manifest import Manifest

_RAW, _JPEG, _PLANES = "ffcv raw", "ffcv jpeg90", "slipstream yuv420"
_PASSES: Final = 16
_BACKENDS: Final = ("torch", "xla")


def main() -> None:
    """Run the benchmark as the command line asks."""
    options = _parse()
    data, images = prepare_data(options.work, options.source, options.size, (*KINDS_COMPARED, *BANDED))
    # Large images in smaller batches: the memory of all processes together would leave none for the page cache.
    batch = min(BATCH, round(BATCH * (SIZE / options.size) ** 2))
    for name, value in {"PASSES": _PASSES, "SIZE": options.size, "BATCH": batch}.items():
        os.environ[f"BENCH_{name}"] = str(value)  # for those that read
    report: dict[str, Any] = {"machine": machine(), "images": images, "size": options.size, "batch": batch}
    report |= {"rounds": options.rounds, "seconds": options.seconds, "passes": _PASSES}
    left_out: LeftOut = []
    track = Track(options.work)
    with contextlib.ExitStack() as stack:
        field = Field(track, data, options.seconds, left_out)
        others = slipstream(options.slipstream) if options.slipstream else []
        contenders = track.admit([*FORMATS, *others], left_out)
        for contender in contenders:
            field.enter(contender, stack)
        readers = {row["name"]: row for row in field.race(options.rounds)}
    names = dict.fromkeys(name.rpartition(" ")[0] for name in readers)
    sizes = {
        contender.name.rpartition(" ")[0]: sum(path.stat().st_size for path in files_of(contender, data)) / images
        for contender in contenders
    }
    finish = {backend: finish_times(backend, data, left_out) for backend in _BACKENDS}
    report |= {"versions": track.versions, "left_out": left_out, "finish": finish}
    psnr = {**field.psnr, **banded_psnr(data)}
    report["formats"] = [to_format(name, readers, sizes[name], psnr, finish) for name in names]
    report["formats"].sort(key=lambda row: -(row["images_per_second"].get("2") or 0))
    print(as_text(to_rows(report)), end="")
    for row in left_out:
        say(f"left out: {row['name']}: {row['reason']}")
    table = as_markdown(to_rows(report), is_bold=lambda name: name.startswith(OURS))
    write_files(options, report, to_markdown(report, table, "Ratios compare two threads, round by round. "))
    if options.picture:
        draw_formats(report, options.picture)


def banded_psnr(data: Path) -> dict[str, float]:
    """Return the figures of smaller images from caches in bands, and of the same size made of all frequencies."""
    return {
        f"{OURS} {kind} 1/{part} {threads}": Manifest.load(data / f"cache-{kind}").statistics.frequencies[at - 1].psnr
        for kind in BANDED
        for part, at in zip(PARTS[1:], reversed(BANDS[:-1]), strict=True)
        for threads in (1, 2)
    }


def finish_times(backend: str, data: Path, left_out: LeftOut) -> dict[str, float]:
    """Return by kind how many milliseconds an image takes to be finished, nothing where the backend is not there."""
    with leaving_out(f"finishing by {backend}", left_out):
        return milliseconds_an_image(backend, {kind: data / f"cache-{kind}" for kind in KINDS_COMPARED})
    return {}


def to_format(
    name: str,
    readers: dict[str, dict[str, Any]],
    size: float,
    psnr: dict[str, float | None],
    finish: dict[str, dict[str, float]],
) -> dict[str, Any]:
    """Return the row of a format: `images_per_second` by the number of threads, `host_us` of one thread an image."""
    found = {threads: readers[f"{name} {threads}"] for threads in "12" if f"{name} {threads}" in readers}
    rates = {threads: row["rates"] for threads, row in found.items()}
    kind = name.partition(" ")[2]
    alone = rates.get("1")
    return {
        "name": name,
        "bytes_per_image": size,
        "psnr": next((psnr[row["name"]] for row in found.values()), None),
        "images_per_second": {threads: statistics.median(each) for threads, each in rates.items()},
        "host_us": 1e6 / statistics.median(alone) if alone else None,
        "device_ms": {backend: finish[backend].get(kind) if name.startswith(OURS) else None for backend in finish},
        "of_ffcv_jpeg": _ratio(rates, readers, _JPEG),
        "of_ffcv_raw": _ratio(rates, readers, _RAW),
        "of_raw": _ratio(rates, readers, f"{OURS} raw"),
        "of_slipstream": _ratio(rates, readers, _PLANES),
    }


def _ratio(rates: dict[str, list[float]], readers: dict[str, dict[str, Any]], other: str) -> float | None:
    """Return the rate with two threads over another's, round by round."""
    return ratio(rates.get("2"), readers.get(f"{other} 2", {}).get("rates"))


def to_rows(report: dict[str, Any]) -> list[list[str]]:
    """Return the rows of the table, its heading first, without columns of what was not measured."""
    heading = ["format", "kB an image", "PSNR, dB", "images/s, 1 thread", "2 threads"]
    heading += [
        "of FFCV JPEG",
        "of FFCV raw",
        "of raw",
        "of slipstream",
        "host, us",
        *(f"device ({name}), ms" for name in _BACKENDS),
    ]
    rows = [heading]
    for row in report["formats"]:
        rates = [row["images_per_second"].get(threads) for threads in "12"]
        ratios = [row[key] for key in ("of_ffcv_jpeg", "of_ffcv_raw", "of_raw", "of_slipstream")]
        rows.append(
            [row["name"], f"{row['bytes_per_image'] / 1000:.1f}", f"{row['psnr']:.1f}" if row["psnr"] else "exact"]
            + [_shown(rate, ",.0f") for rate in rates]
            + [_shown(each, ".2f") for each in ratios]
            + [_shown(row["host_us"], ".0f"), *(_shown(row["device_ms"][backend], ".2f") for backend in _BACKENDS)]
        )
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    return [list(row) for row in zip(*columns, strict=True)]


def _shown(value: float | None, digits: str) -> str:
    return "" if value is None else f"{value:{digits}}"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="a folder of photographs, a folder a class; else some are made up")
    add_race_options(parser, "build/bench", seconds=2.0)
    parser.add_argument("--size", type=int, default=SIZE, help="of the images, in pixels (%(default)s)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw rate against bytes (needs matplotlib)")
    parser.add_argument("--slipstream", type=Path, metavar="PYTHON", help="an interpreter that has slipstream")
    return parse_options(parser, {"size": 16})
