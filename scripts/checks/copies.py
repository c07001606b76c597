"""Which edits of photographs `tpucache.insight.pairs` finds, and which other photographs it takes for copies.

It takes photographs below a folder, makes an edited copy of each in several ways, hashes all as warmup would store
them, and prints, for each edit, the share of copies that are found at several thresholds; then how many pairs of
photographs of the folder itself are that close, which are true copies or false ones: look at them.

    python -m scripts.checks copies FOLDER [--photos 300] [--size 224]
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageEnhance, ImageOps

from scripts.commands import say
from tpucache import Recipe
from tpucache.insight import Hashes, pairs
from tpucache.insight.hashing import grey_grids, phash
from tpucache.warmup.records.presize import presize

THRESHOLDS: Final = (24, 48, 64)
_BLANK_STD: Final = 2.0

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


def _bordered(image: Picture) -> Picture:
    return ImageOps.expand(image, max(1, min(image.size) // 50), (0, 0, 0))


#: The edits by name. Those above the line are to be found, those below are known not to be.
EDITS: Final[Mapping[str, Callable[[Picture], Picture]]] = {
    "jpeg 15": _jpeg,
    "half": lambda image: image.resize((max(1, image.width // 2), max(1, image.height // 2)), Image.Resampling.BICUBIC),
    "brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.3),
    "contrast": lambda image: ImageEnhance.Contrast(image).enhance(1.4),
    "grey": lambda image: image.convert("L").convert("RGB"),
    "mirrored": ImageOps.mirror,
    "mark": _marked,
    "border 2 %": _bordered,
    "5 % of area": _crop(1 - 0.95**0.5),
    "crop 5 %": _crop(0.05),
    "crop 10 %": _crop(0.1),
    "turned 1": lambda image: image.rotate(1, Image.Resampling.BICUBIC),
    "turned 3": lambda image: image.rotate(3, Image.Resampling.BICUBIC),
    "turned 90": lambda image: image.rotate(90, expand=True),
}


def hashed(images: list[npt.NDArray[np.uint8]]) -> Hashes:
    """Return the hashes of images (height, width, 3)."""
    grids = np.concatenate([grey_grids(image[None]) for image in images])
    words, mirrored = phash(grids)
    blank, thumbnails = grids.std((1, 2)) < _BLANK_STD, np.zeros((len(images), 8, 8), np.uint8)
    return Hashes(np.arange(len(images), dtype=np.uint64), words, mirrored, blank, thumbnails)


def _stored(image: Picture, size: int) -> npt.NDArray[np.uint8]:
    pixels: Any = presize(np.asarray(image.convert("RGB")), Recipe(size=size), "a photograph")
    return np.asarray(pixels, np.uint8)


def main() -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--photos", type=int, default=300, help="photographs to edit, at most")
    parser.add_argument("--size", type=int, default=224)
    options = parser.parse_args()
    found = sorted(path for path in options.folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    chosen = found[:: max(1, len(found) // options.photos)][: options.photos]
    photos = [ImageOps.exif_transpose(Image.open(path)).convert("RGB") for path in chosen]
    originals = hashed([_stored(photo, options.size) for photo in photos])
    say(f"{len(photos):,} of {len(found):,} photographs of {options.folder}, at {options.size}")
    say(f"{'edit':12} {'bits, median':>12}" + "".join(f"{f'at {most}':>8}" for most in THRESHOLDS))
    for name, edit in EDITS.items():
        copies = hashed([_stored(edit(photo), options.size) for photo in photos])
        straight, turned = (
            np.unpackbits((originals.words ^ words).view(np.uint8), axis=1).sum(1)
            for words in (copies.words, copies.mirrored)
        )
        bits = np.minimum(straight, turned)
        shares = "".join(f"{(bits <= most).mean():>8.2f}" for most in THRESHOLDS)
        say(f"{name:12} {np.median(bits):>12.0f}{shares}")
    began = time.process_time()
    for most in THRESHOLDS:
        close = pairs(originals, most)
        say(f"photographs of the folder that are at most {most} bits apart: {len(close):,} pairs")
        for first, second, far in list(zip(close.first, close.second, close.distance, strict=True))[:10]:
            say(f"  {far:>3}  {chosen[first]}  {chosen[second]}")
    say(f"{time.process_time() - began:.1f} s of one core for all pairs")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
