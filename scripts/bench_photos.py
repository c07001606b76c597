"""The images of bench_read.py: photographs, given or made up, as our caches and as one array that peers convert."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any, Final

import numpy as np
from bench_peers import say
from PIL import Image

from tpucache import CachedDataset, CachedLoader, Recipe, build_cache

SIZE: Final = 224
_MADE: Final = 3072
_CLASSES: Final = 10
_SHAPE: Final = (480, 360)
_OCTAVES: Final = ((3, 70), (12, 35), (48, 18), (240, 9))  # grid points across, and their spread in grey levels


def prepare_data(work: Path, source: Path | None) -> tuple[Path, int]:
    """Build the caches and the array of one source, unless they stand; return their folder and the number of images."""
    if source is None:
        source = work / "photos"
        _make_photos(source)
    data = work / f"data-{hashlib.sha256(str(source.resolve()).encode()).hexdigest()[:8]}"
    for codec in ("raw", "jpeg"):
        say(f"tpucache: building the {codec} cache")
        recipe = Recipe(size=SIZE, codec=codec, quality=95 if codec == "jpeg" else None)
        build_cache(source, data / f"cache-{codec}", recipe, on_error="skip")
    dataset = CachedDataset(data / "cache-raw")
    _export(dataset, data)
    return data, len(dataset)


def _export(dataset: CachedDataset, data: Path) -> None:
    """Write images.npy and labels.npy: the very bytes of the raw cache, in its order."""
    mark, wanted = data / "exported", dataset.manifest.fingerprint + str(len(dataset))
    if mark.exists() and mark.read_text() == wanted:
        return
    say("writing the same images as one array")
    shutil.rmtree(data / "peer", ignore_errors=True)
    mark.unlink(missing_ok=True)
    images = np.lib.format.open_memmap(data / "images.npy", "w+", np.uint8, (len(dataset), SIZE, SIZE, 3))
    at = 0
    for batch, _ in CachedLoader(dataset, 256):
        images[at : at + len(batch)] = batch.permute(0, 2, 3, 1).numpy()
        at += len(batch)
    images.flush()
    np.save(data / "labels.npy", dataset.labels.numpy().astype(np.int64))
    mark.write_text(wanted)


def _make_photos(folder: Path) -> None:
    """Write JPEG files that are about as hard to decode as photographs: noise of four scales, a folder a class."""
    if (folder / "finished").exists():
        return
    say(f"making {_MADE:,} photographs in {folder}")
    rng = np.random.default_rng(0)
    for number in range(_MADE):
        path = folder / f"class-{number % _CLASSES}" / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        _photo(rng).save(path, quality=90)
    (folder / "finished").touch()


def _photo(rng: np.random.Generator) -> Image.Image:
    pixels: Any = np.full((_SHAPE[1], _SHAPE[0], 3), 128.0)
    for across, spread in _OCTAVES:
        grid = rng.integers(0, 256, (across, across, 3), np.uint8)
        grown = np.asarray(Image.fromarray(grid).resize(_SHAPE, Image.Resampling.BICUBIC), np.float32)
        pixels += (grown - 128) * (spread / 64)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
