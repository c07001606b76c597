"""What smaller images out of a cache of large ones cost: bytes, reading with unpacking, and finishing on the device.

    python -m scripts.bench sizes PHOTOGRAPHS --size 512 --backend xla

Of each codec there is a cache without bands and one with the bands 2, 4, 8, of the same photographs. Bytes are those of
shards, over those of whole images without bands, as are both times: of one thread that reads out of the page cache and
unpacks, and the processor's of unpacking alone, of up to 64 records in memory. Finishing is the decoding of one packed
batch that is on the device, over and over: whole, smaller, and a random resized crop to the smaller size. All of them
take turns; ratios are medians over the rounds.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from scripts.bench.photos import BANDED, BANDS, make_up_photographs, prepare_caches
from scripts.bench.rounds import race, ratio, spread
from scripts.bench.table import add_race_options, as_markdown, as_text, parse_options, write_files
from tpucache import CachedDataset, CachedLoader, Manifest
from tpucache.ondevice import AugmentSettings, decoder, draw
from tpucache.report.bench import measure_reading
from tpucache.store.cache import Cache
from tpucache.store.codecs import unpack_rows
from tpucache.store.codecs.dct.coefficients import BLOCK
from tpucache.training.device import Device, open_device

_LEAST: Final = 1024  # samples of an epoch
_KINDS: Final = tuple(kind for banded, codec in BANDED.items() for kind in (codec, banded))


def reading(data: Path, size: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return by codec and band: the size that it shows, bytes an image, and the ratios."""
    found = []
    for banded, codec in BANDED.items():
        plain, manifest = Manifest.load(data / f"cache-{codec}"), Manifest.load(data / f"cache-{banded}")
        whole = sum(entry.bytes for entry in plain.shards)
        turns = {codec: _turn(data / f"cache-{codec}", None, options)}
        unpacking = {f"{codec}, unpacking": Unpacking(data / f"cache-{codec}", 1).rate}
        for number, band in enumerate(BANDS, 1):
            turns[f"{band}"] = _turn(data / f"cache-{banded}", None if band == BLOCK else size * band // BLOCK, options)
            unpacking[f"{band}, unpacking"] = Unpacking(data / f"cache-{banded}", number).rate
        rates = race(turns | unpacking, options.rounds)
        for number, band in enumerate(BANDS):
            taken = sum(entry.bytes for entry in manifest.shards if entry.band <= number)
            found.append(
                {
                    "codec": codec,
                    "size": size * band // BLOCK,
                    "bytes_per_image": taken / manifest.samples,
                    "bytes": taken / whole,
                    "time": ratio(rates[codec], rates[f"{band}"]),
                    "unpacking": ratio(rates[f"{codec}, unpacking"], rates[f"{band}, unpacking"]),
                    "images_per_second": spread(rates[f"{band}"]),
                }
            )
    return found


def _turn(cache: Path, resolution: int | None, options: argparse.Namespace) -> Callable[[], float]:
    def rate() -> float:
        with CachedDataset(cache, resolution=resolution, in_memory=False) as dataset:
            # An epoch of a few photographs would be mostly its own beginning.
            samples = dataset.select(np.resize(np.arange(len(dataset)), max(len(dataset), _LEAST)))
            batch = min(256, len(samples))
            return measure_reading(samples, batch_size=batch, threads=1, rounds=1, seconds=options.seconds)

    return rate


class Unpacking:
    """Records of a cache in memory, in its first bands."""

    def __init__(self, cache: Path, bands: int) -> None:
        opened = Cache.open(cache)
        self._images = min(64, opened.manifest.samples)
        self._parts = []
        (image,) = opened.manifest.fields
        for band, (layout, field) in enumerate(zip(opened.manifest.layouts[:bands], image.split, strict=False)):
            rows = opened.index[opened.rows(0, np.arange(self._images), band)]
            block = np.frombuffer(b"".join(map(opened.reader.read, rows)), np.uint8)
            lengths = rows["length"].astype(np.int64)
            spans = layout.spans_of(block, np.cumsum(lengths) - lengths, lengths)[:, 0]
            self._parts.append((field, block, spans, np.zeros((self._images, *field.packed.shape), np.uint8)))

    def rate(self) -> float:
        """Return the images a second of the processor's time, the most of a few turns."""
        return self._images / min(self._seconds() for _ in range(5))

    def _seconds(self) -> float:
        began = time.thread_time()
        for field, block, spans, out in self._parts:
            unpack_rows(field, block, spans, out, np.arange(self._images))
        return time.thread_time() - began


class Finishing:
    """One packed batch on a device, and a module that finishes it in some way."""

    def __init__(self, dataset: CachedDataset, module: torch.nn.Module, device: Device, batch_size: int, crop: bool):
        self._device = device
        batch = next(iter(CachedLoader(dataset, batch_size, finish="device")))[0]
        self._arguments = [device.put(batch.contiguous())]
        if crop:
            settings, shape = AugmentSettings(crop=True, flip=True), dataset.manifest.fields[0].shape
            numbers = draw(settings, 0, 0, len(batch), (shape[0], shape[1]))
            self._arguments.append(device.put(torch.from_numpy(numbers)))
        self._module = module.to(device.torch_device)
        self.milliseconds(2)

    def milliseconds(self, times: int) -> float:
        """Return what finishing an image takes, the mean over so many times of the batch."""
        self._device.wait()
        began = time.perf_counter()
        for _ in range(times):
            _kept = self._module(*self._arguments)  # what nothing refers to is not computed
            self._device.step_end()
        self._device.wait()
        return 1e3 * (time.perf_counter() - began) / times / len(self._arguments[0])


def finishing(data: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return by way: milliseconds an image, and over those of whole images."""
    device = open_device(options.backend)
    if options.threads:
        torch.set_num_threads(options.threads)
    cache, small = data / f"cache-{_KINDS[0]}", options.to
    whole, shown = CachedDataset(cache), CachedDataset(cache, resolution=small)
    named = {
        f"{options.size}": (whole, decoder(whole), False),
        f"{small}": (shown, decoder(shown), False),
        f"{small}, all frequencies": (whole, decoder(whole, small), False),
        f"{small}, crop": (whole, decoder(whole, small, crop=True), True),
    }
    made = {
        name: Finishing(data, module, device, options.batch_size, crop) for name, (data, module, crop) in named.items()
    }
    turns = {name: _times(each, options.times) for name, each in made.items()}
    found = race(turns, options.rounds)
    first = found[f"{options.size}"]
    return [{"to": name, "milliseconds": spread(each), "time": ratio(each, first)} for name, each in found.items()]


def _times(way: Finishing, times: int) -> Callable[[], float]:
    return lambda: way.milliseconds(times)


def main() -> None:
    """Run the benchmark as the command line asks."""
    options = _parse()
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    source = options.source or make_up_photographs(options.work / "photos")
    data = prepare_caches(options.work, source, options.size, _KINDS)
    figures: dict[str, Any] = {"size": options.size, "backend": options.backend}
    figures["reading"] = [] if options.only == "finishing" else reading(data, options.size, options)
    figures["finishing"] = [] if options.only == "reading" else finishing(data, options)
    tables = [
        rows for rows in (reading_rows(figures["reading"]), finishing_rows(figures["finishing"])) if len(rows) > 1
    ]
    print("\n".join(map(as_text, tables)), end="")
    write_files(options, figures, "\n".join(map(as_markdown, tables)))


def reading_rows(found: list[dict[str, Any]]) -> list[list[str]]:
    """Return the rows of the table of reading, its heading first."""
    rows = [["codec", "read as", "kB an image", "of the bytes", "of the time", "of unpacking", "images/s, 1 thread"]]
    for row in found:
        cells = [row["codec"], str(row["size"]), f"{row['bytes_per_image'] / 1000:.1f}", f"{row['bytes']:.3f}"]
        cells += [f"{row['time']:.2f}", f"{row['unpacking']:.2f}"]
        rows.append([*cells, f"{row['images_per_second']['median']:,.0f}"])
    return rows


def finishing_rows(found: list[dict[str, Any]]) -> list[list[str]]:
    """Return the rows of the table of finishing, its heading first."""
    rows = [["finished to", "ms an image", "of the time"]]
    rows += [[row["to"], f"{row['milliseconds']['median']:.2f}", f"{row['time']:.2f}"] for row in found]
    return rows


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, nargs="?", help="a folder of photographs; some are made up if not given")
    add_race_options(parser, "build/bench", seconds=1.0)
    parser.add_argument("--size", type=int, default=512, help="that is stored (%(default)s)")
    parser.add_argument("--to", type=int, default=224, help="the size to finish to (%(default)s)")
    parser.add_argument("--backend", choices=["torch", "xla"], default="torch", help="that finishes (%(default)s)")
    parser.add_argument(
        "--threads", type=int, help="of torch, all if not given: more wait for each other on a busy machine"
    )
    parser.add_argument("--batch-size", type=int, default=8, help="images that are finished together (%(default)s)")
    parser.add_argument("--times", type=int, default=10, help="that a round finishes the batch (%(default)s)")
    parser.add_argument("--only", choices=["reading", "finishing"], help="measure one of the two")
    return parse_options(parser, {"size": 16})
