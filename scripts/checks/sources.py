"""Damaged pictures against a fresh Pillow, and random tables against pandas.

    python -m scripts.checks sources
    python -m scripts.checks sources --damages 1000 --seed 3

Each of some 25 encodings is cut and has bits flipped, 105 times by default. A picture that Pillow refuses must be
refused, as an image and as a mask, and one that it accepts must be accepted; the table lists what differs, by reason.
`tables.py` describes the tables. The random COCO files are for tests.
"""

from __future__ import annotations

import importlib.util
import io
import logging
import random
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from PIL import Image

from scripts.checks.tables import print_differences
from scripts.commands import make_parser
from tpucache.errors import SampleError
from tpucache.recipe import Recipe
from tpucache.store.fields import IMAGE
from tpucache.warmup.records.masks import decode_mask
from tpucache.warmup.records.presize import presize
from tpucache.warmup.sources import Item, Listing, Sample

SIDE: Final = 48
DAMAGES: Final = 105

#: Why a picture that Pillow decodes is refused all the same: its numbers or its form leave open what they mean.
REASONS: Final = (
    r"nearly black if",  # 12 or 14 bits in 16
    r"not within 0 to",
    r"not finite",
    r"too many pixels",  # a damaged header
    r"the mask holds \d+",  # numbers above 255
    r"the mask is an image of mode \w+",
    r"one of its 16-bit colours is transparent",
    r"colours have 16 bits",
    r"the mask has the colour",
)


def drawing(mode: str) -> Image.Image:
    """Return a picture with smooth parts and edges in a mode of Pillow."""
    rows, columns = np.mgrid[:SIDE, :SIDE].astype(np.float64) / SIDE
    planes = [rows, columns, (rows + columns) / 2]
    pixels = np.stack([np.where((plane * 6 % 1) < 0.2, 1 - plane, plane) for plane in planes], axis=-1) * 255
    image = Image.fromarray(np.rint(pixels).astype(np.uint8))
    if mode in ("I;16", "I"):
        return Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)
    if mode == "F":
        return Image.fromarray(np.asarray(image.convert("L")).astype(np.float32) / 255)
    if mode == "P":
        return image.quantize(16)
    if mode in ("RGBA", "LA"):
        image.putalpha(image.convert("L"))
    return image.convert(mode)


def encoded(mode: str, form: str, **options: Any) -> bytes:
    """Return the drawing in a mode and a format of Pillow."""
    file = io.BytesIO()
    if options.pop("animated", False):
        options |= {"save_all": True, "append_images": [drawing(mode).rotate(90), drawing(mode).rotate(180)]}
    drawing(mode).save(file, form, **options)
    return file.getvalue()


def encoded_heif(mode: str, **options: Any) -> bytes:
    """Return the drawing as pillow-heif writes it. Raises KeyError without that, as Pillow does."""
    try:
        from pillow_heif import register_heif_opener
    except ImportError as error:
        raise KeyError("HEIF") from error
    register_heif_opener()
    return encoded(mode, "HEIF", **options)


def with_exif(value: int = 6) -> Image.Exif:
    """Return EXIF that says how a picture is turned."""
    exif = Image.Exif()
    exif[0x0112] = value
    return exif


ENCODINGS: Final[dict[str, Callable[[], bytes]]] = {
    "PNG RGB": lambda: encoded("RGB", "PNG"),
    "PNG RGBA": lambda: encoded("RGBA", "PNG"),
    "PNG palette": lambda: encoded("P", "PNG"),
    "PNG grey": lambda: encoded("L", "PNG"),
    "PNG grey and alpha": lambda: encoded("LA", "PNG"),
    "PNG 1 bit": lambda: encoded("1", "PNG"),
    "PNG 16 bits": lambda: encoded("I;16", "PNG"),
    "PNG with EXIF": lambda: encoded("RGB", "PNG", exif=with_exif()),
    "APNG": lambda: encoded("RGB", "PNG", animated=True),
    "JPEG": lambda: encoded("RGB", "JPEG"),
    "JPEG grey": lambda: encoded("L", "JPEG"),
    "JPEG progressive": lambda: encoded("RGB", "JPEG", progressive=True),
    "JPEG CMYK": lambda: encoded("CMYK", "JPEG"),
    "JPEG with EXIF": lambda: encoded("RGB", "JPEG", exif=with_exif()),
    "MPO": lambda: encoded("RGB", "MPO", animated=True),
    "GIF": lambda: encoded("P", "GIF"),
    "GIF animated": lambda: encoded("P", "GIF", animated=True),
    "BMP": lambda: encoded("RGB", "BMP"),
    "TIFF": lambda: encoded("RGB", "TIFF"),
    "TIFF LZW": lambda: encoded("RGB", "TIFF", compression="tiff_lzw"),
    "TIFF deflate, turned": lambda: encoded("RGB", "TIFF", compression="tiff_adobe_deflate", exif=with_exif()),
    "TIFF 16 bits": lambda: encoded("I;16", "TIFF"),
    "TIFF floats": lambda: encoded("F", "TIFF"),
    "TIFF pages": lambda: encoded("RGB", "TIFF", animated=True),
    "WebP": lambda: encoded("RGB", "WEBP"),
    "WebP lossless, EXIF": lambda: encoded("RGBA", "WEBP", lossless=True, exif=with_exif()),
    "WebP animated": lambda: encoded("RGB", "WEBP", animated=True),
    "ICO": lambda: encoded("RGBA", "ICO", sizes=[(SIDE, SIDE)]),
    "PPM": lambda: encoded("RGB", "PPM"),
    "PGM": lambda: encoded("L", "PPM"),
    "TGA": lambda: encoded("RGB", "TGA", compression="tga_rle"),
    "JPEG 2000": lambda: encoded("RGB", "JPEG2000"),
    "AVIF": lambda: encoded("RGB", "AVIF"),
    "HEIF": lambda: encoded_heif("RGB"),
    "HEIF with alpha and a thumbnail": lambda: encoded_heif("RGBA", thumbnails=[SIDE // 2]),
}


def damaged(data: bytes, times: int, draw: random.Random) -> Iterator[bytes]:
    """Yield data cut somewhere, a third of the times, and with one to four bits flipped."""
    for number in range(times):
        if number % 3 == 0:
            yield data[: draw.randrange(1, len(data))]
            continue
        flipped = bytearray(data)
        for _ in range(draw.randint(1, 4)):
            flipped[draw.randrange(len(flipped))] ^= 1 << draw.randrange(8)
        yield bytes(flipped)


def is_decoded_by_pillow(data: bytes) -> bool:
    """Return whether a fresh Pillow decodes a picture in full; one of too many pixels it does not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            with Image.open(io.BytesIO(data)) as image:
                image.load()
        except Exception:  # noqa: BLE001 - whatever it raises, it has not decoded
            return False
    return True


def refusal(read: Callable[[bytes], object], data: bytes) -> str:
    """Return why a picture is refused, or an empty text."""
    try:
        read(data)
    except SampleError as error:
        return str(error)
    return ""


READERS: Final[dict[str, Callable[[bytes], object]]] = {
    "image": lambda data: presize(data, Recipe(size=32), "a"),
    "mask": lambda data: decode_mask(data, "a", Recipe(size=32)),
}


def differences(encoding: str, times: int, seed: int) -> Counter[str]:
    """Return how often what is accepted or refused differs from Pillow, by what differs."""
    found: Counter[str] = Counter()
    data = ENCODINGS[encoding]()
    for broken in damaged(data, times, random.Random(f"{seed} {encoding}")):
        is_decoded = is_decoded_by_pillow(broken)
        found["refused by Pillow"] += not is_decoded
        for name, read in READERS.items():
            reason = refusal(read, broken)
            if not is_decoded and not reason:
                found[f"{name}: ACCEPTED, Pillow refuses it"] += 1
            if is_decoded and reason:
                known = next((pattern for pattern in REASONS if re.search(pattern, reason)), None)
                found[f"{name}: {'listed: ' + known if known else 'REFUSED: ' + reason}"] += 1
    return found


class Encoded:
    """A source of pictures as they are stored."""

    def __init__(self, files: Sequence[bytes], field: str = IMAGE) -> None:
        self._files, self._field = files, field

    def list(self) -> Listing:
        """Return the pictures, called by their numbers."""
        return Listing([Sample(number, str(number)) for number in range(len(self._files))])

    def load(self, sample: Sample) -> Item:
        """Return a picture; where it is a mask, with a whole image."""
        whole = np.zeros((SIDE, SIDE, 3), np.uint8)
        return Item({IMAGE: whole, self._field: self._files[int(sample.path)]})


def random_coco(draw: random.Random) -> dict[str, Any]:
    """Return a COCO file of a few images with ids in any order, crowds, run lengths and annotations with faults."""
    ids = draw.sample(range(60), draw.randint(2, 8))
    categories = draw.sample(range(90), draw.randint(1, 6))
    images = [{"id": key, "file_name": f"{key}.png", "width": 100, "height": 80} for key in ids]
    annotations = []
    for number in range(draw.randint(1, 30)):
        box = [draw.randint(0, 50), draw.random() * 40, draw.randint(0, 50), draw.random() * 40]
        item: dict[str, Any] = {
            "id": number,
            "image_id": draw.choice(ids) if draw.random() < 0.9 else 777,
            "category_id": draw.choice(categories) if draw.random() < 0.97 else 888,
            "bbox": box if draw.random() < 0.97 else [],
            "area": box[2] * box[3],
            "iscrowd": int(draw.random() < 0.1),
        }
        if item["iscrowd"]:
            item["segmentation"] = {"size": [80, 100], "counts": [0, 8000]}
        annotations.append(item)
    annotations.append({"id": -1, "image_id": ids[0], "category_id": categories[0], "bbox": [0, 0, 1, 1], "area": 1})
    names = [draw.choice("abcdef") for _ in categories]
    listed = [{"id": key, "name": name} for key, name in zip(categories, names, strict=True)]
    return {"images": images, "annotations": annotations, "categories": listed}


class Listed:
    """A source of the images that a COCO file lists, without their pixels."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._paths = [image["file_name"] for image in content["images"]]

    def list(self) -> Listing:
        """Return the images in the file's order."""
        return Listing([Sample(number, path) for number, path in enumerate(self._paths)])

    def load(self, _sample: Sample) -> Item:
        """Return an item without fields."""
        return Item({})


def main() -> None:
    """Run the check as the command line asks."""
    parser = make_parser(__doc__)
    parser.add_argument("--damages", type=int, default=DAMAGES, help=f"damages of each encoding ({DAMAGES})")
    parser.add_argument("--tables", type=int, default=1000, help="random tables (1000)")
    parser.add_argument("--seed", type=int, default=0, help="of all that is random (0)")
    options = parser.parse_args()
    logging.getLogger("tpucache").setLevel(logging.ERROR)
    total = Counter[str]()
    for encoding in ENCODINGS:
        try:
            ENCODINGS[encoding]()
        except (KeyError, OSError) as error:
            print(f"{encoding}: left out, Pillow does not write it here ({error})")
            continue
        found = differences(encoding, options.damages, options.seed)
        total += found
        print(
            f"{encoding}: {options.damages} damages, {found.pop('refused by Pillow', 0)} refused by Pillow", flush=True
        )
        for what, count in sorted(found.items()):
            print(f"    {count} {what}")
    unlisted = sum(count for what, count in total.items() if "ACCEPTED" in what or "REFUSED" in what)
    print(f"{unlisted} differences without a reason")
    if importlib.util.find_spec("pandas"):
        unlisted += print_differences(options.tables, options.seed)
    else:
        print("tables: left out, `pip install pandas pyarrow` compares them")
    sys.exit(bool(unlisted))
