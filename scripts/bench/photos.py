"""Make the images that the other benchmarks compare: photographs, our caches of them, and one array for the peers.

Photographs are given by --source or made up. All of it is written once to the work folder, where `read` finds it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

from scripts.commands import say
from tpucache import CachedDataset, CachedLoader, Recipe, build_cache

SIZE: Final = 224
#: Our caches by the kind that contenders name: codec and quality.
KINDS: Final = {
    "raw": ("raw", None),
    "jpeg": ("jpeg", 90),
    "yuv420": ("yuv420", None),
    "dct-zstd": ("dct-zstd", 90),
    "dct-lz4": ("dct-lz4", 90),
}
_MADE_UP: Final = 3072
_CLASSES: Final = 10
_SHAPE: Final = (480, 360)
_OCTAVES: Final = ((3, 70), (12, 35), (48, 18), (240, 9))  # grid points across, and their spread in grey levels


def prepare_data(
    work: Path, source: Path | None, size: int = SIZE, kinds: Sequence[str] = ("raw", "jpeg")
) -> tuple[Path, int]:
    """Build the caches and the array of one source, unless they exist; return their folder and the number of images."""
    data = prepare_caches(work, source or make_up_photographs(work / "photos"), size, kinds)
    dataset = CachedDataset(data / "cache-raw")
    _export(dataset, data, size)
    return data, len(dataset)


def prepare_caches(work: Path, source: Path, size: int, kinds: Sequence[str]) -> Path:
    """Build the caches of one source, unless they exist; return their folder."""
    name = hashlib.sha256(str(source.resolve()).encode()).hexdigest()[:8]
    data = work / (f"data-{name}" if size == SIZE else f"data-{name}-{size}")
    for kind in kinds:
        codec, quality = KINDS[kind]
        recipe = Recipe(size=size, codec=codec, quality=quality)
        say(f"tpucache: building the {kind} cache")
        build_cache(source, data / f"cache-{kind}", recipe, on_error="skip")
    return data


def make_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Let `make` fill a folder unless it exists, and return it; a folder that exists is complete."""
    if not folder.exists():
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        make(unfinished)
        unfinished.rename(folder)
    return folder


def link_photographs(files: Sequence[Path], count: int, folder: Path) -> Path:
    """Give photographs other names in a folder: some of them, evenly spread, or all of them repeatedly."""

    def make(unfinished: Path) -> None:
        places = (at * len(files) // count if count < len(files) else at % len(files) for at in range(count))
        for at, file in enumerate(files[place] for place in places):
            try:
                os.link(file, unfinished / f"{at:07d}{file.suffix}")
            except OSError:  # on another disk
                shutil.copy(file, unfinished / f"{at:07d}{file.suffix}")

    return make_once(folder, make)


def make_up_photographs(folder: Path) -> Path:
    """Write JPEG files that are about as hard to decode as photographs, a folder a class, unless they exist."""

    def make(unfinished: Path) -> None:
        say(f"making {_MADE_UP:,} photographs in {folder}")
        rng = np.random.default_rng(0)
        for number in range(_MADE_UP):
            path = unfinished / f"class-{number % _CLASSES}" / f"{number:05d}.jpg"
            path.parent.mkdir(exist_ok=True)
            _photograph(rng).save(path, quality=90)

    return make_once(folder, make)


def noise_picture(number: int, side: int) -> Image.Image:
    """Return a small picture of noise, for checks whose data do not matter."""
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (side, side, 3), np.uint8))


def write_pictures(folder: Path, count: int, side: int) -> Path:
    """Write pictures of two classes into a folder, and return it."""
    for number in range(count):
        path = folder / "ab"[number % 2] / f"{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        noise_picture(number, side).save(path)
    return folder


@dataclass(frozen=True)
class Pictures:
    """A data set of pictures, each with its own number as the label."""

    count: int
    side: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, at: int) -> tuple[Any, int]:
        return noise_picture(at, self.side), at


def _photograph(rng: np.random.Generator) -> Image.Image:
    """Return noise of four scales, each finer one fainter, as in real photographs."""
    pixels: Any = np.full((_SHAPE[1], _SHAPE[0], 3), 128.0)
    for across, deviation in _OCTAVES:
        grid = rng.integers(0, 256, (across, across, 3), np.uint8)
        grown = np.asarray(Image.fromarray(grid).resize(_SHAPE, Image.Resampling.BICUBIC), np.float32)
        pixels += (grown - 128) * (deviation / 64)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def _export(dataset: CachedDataset, data: Path, size: int) -> None:
    """Write images.npy and labels.npy: the very bytes of the raw cache, in its order."""
    mark, wanted = data / "exported", dataset.manifest.fingerprint + str(len(dataset))
    if mark.exists() and mark.read_text() == wanted:
        return
    say("writing the same images as one array")
    shutil.rmtree(data / "peer", ignore_errors=True)
    mark.unlink(missing_ok=True)
    images = np.lib.format.open_memmap(data / "images.npy", "w+", np.uint8, (len(dataset), size, size, 3))
    at = 0
    for batch, _ in CachedLoader(dataset, 256):
        images[at : at + len(batch)] = batch.permute(0, 2, 3, 1).numpy()
        at += len(batch)
    images.flush()
    np.save(data / "labels.npy", dataset.labels.numpy().astype(np.int64))
    mark.write_text(wanted)
