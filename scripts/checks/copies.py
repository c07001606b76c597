"""Which edits of photographs `tpucache.insight.pairs` finds, and which other photographs it takes for copies.

It takes photographs below a folder, makes an edited copy of each in several ways, hashes all as warmup would store
them, and prints, for each edit, the share of copies that are found at several thresholds; then how many pairs of
photographs of the folder itself are that close, which are true copies or false ones: look at them.

    python -m scripts.checks copies FOLDER [--photos 300] [--size 224]
"""

from __future__ import annotations

import argparse
import io
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageOps

from scripts.commands import say
from tpucache import Recipe, build_cache
from tpucache.insight import Hashes, hashes, pairs

THRESHOLDS: Final = (24, 48, 64)

Picture = Image.Image


def _jpeg(image: Picture) -> Picture:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=15)
    return Image.open(file)


def _crop(share: float) -> Callable[[Picture], Picture]:
    """Return what cuts off a share of the width and of the height, half of it at each edge."""

    def crop(image: Picture) -> Picture:
        left, top = (int(side * share / 2) for side in image.size)
        return image.crop((left, top, image.width - left, image.height - top))

    return crop


def _marked(image: Picture) -> Picture:
    marked = image.copy()
    width, height = image.size
    ImageDraw.Draw(marked).rectangle((width * 0.6, height * 0.88, width * 0.97, height * 0.97), fill=(255, 255, 255))
    return marked


#: The edits by name; the first is none.
EDITS: Final[Mapping[str, Callable[[Picture], Picture]]] = {
    "none": lambda image: image,
    "jpeg 15": _jpeg,
    "half": lambda image: image.resize((max(1, image.width // 2), max(1, image.height // 2)), Image.Resampling.BICUBIC),
    "brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.3),
    "contrast": lambda image: ImageEnhance.Contrast(image).enhance(1.4),
    "grey": lambda image: image.convert("L").convert("RGB"),
    "mirrored": ImageOps.mirror,
    "mark": _marked,
    "border 2 %": lambda image: ImageOps.expand(image, max(1, min(image.size) // 50), (0, 0, 0)),
    "5 % of area": _crop(1 - 0.95**0.5),
    "crop 5 %": _crop(0.05),
    "crop 10 %": _crop(0.1),
    "turned 1": lambda image: image.rotate(1, Image.Resampling.BICUBIC),
    "turned 3": lambda image: image.rotate(3, Image.Resampling.BICUBIC),
    "turned 90": lambda image: image.rotate(90, expand=True),
}


class Edited:
    """Photographs, each edited in one way."""

    def __init__(self, paths: list[Path], name: str) -> None:
        self._paths, self._name = paths, name

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, at: int) -> tuple[Picture, int]:
        return EDITS[self._name](ImageOps.exif_transpose(Image.open(self._paths[at])).convert("RGB")), 0


def hashed(paths: list[Path], name: str, size: int) -> Hashes:
    """Return the hashes of edited photographs, out of a cache of them."""
    with tempfile.TemporaryDirectory() as folder:
        build_cache(Edited(paths, name), Path(folder, "cache"), Recipe(size=size), jobs=1)
        return hashes(Path(folder, "cache"), keep=False)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of photographs")
    parser.add_argument("--photos", type=int, default=300, help="photographs to edit, at most (%(default)s)")
    parser.add_argument("--size", type=int, default=224, help="pixels of the caches (%(default)s)")
    options = parser.parse_args()
    found = sorted(path for path in options.folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    chosen = found[:: max(1, len(found) // options.photos)][: options.photos]
    originals = hashed(chosen, "none", options.size)
    say(f"{len(chosen):,} of {len(found):,} photographs of {options.folder}, at {options.size}")
    say(f"{'edit':12} {'bits, median':>12}" + "".join(f"{f'at {most}':>8}" for most in THRESHOLDS))
    for name in EDITS:
        copies = hashed(chosen, name, options.size)
        turns = [originals.words ^ words for words in (copies.words, copies.mirrored)]
        bits = np.minimum(*(np.unpackbits(turn.view(np.uint8), axis=1).sum(1) for turn in turns))
        say(f"{name:12} {np.median(bits):>12.0f}" + "".join(f"{(bits <= most).mean():>8.2f}" for most in THRESHOLDS))
    for most in THRESHOLDS:
        close = pairs(originals, most)
        say(f"photographs of the folder that are at most {most} bits apart: {len(close):,} pairs")
        for first, second, far in list(zip(close.first, close.second, close.distance, strict=True))[:10]:
            say(f"  {far:>3}  {chosen[first]}  {chosen[second]}")
