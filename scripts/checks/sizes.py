"""Images of other sizes out of coefficients: how near they are to full decoding and Pillow's Lanczos, by size and K.

    python -m scripts.checks sizes PHOTOGRAPHS --size 512

Prints the median PSNR of each size, made of the lowest K frequencies and of all, and fails where one of all is below 45
dB. Then, for colours at half and at full resolution, grey images and odd sizes: by how many levels XLA, JAX, numpy and
products of operands rounded to bfloat16 differ from torch, of which one is allowed. XLA and JAX are left out where they
are not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageOps

from scripts.bench.table import as_markdown
from scripts.commands import say
from tpucache.ondevice.arrays import ArrayLibrary
from tpucache.ondevice.decode import CoefficientDecoder, Resize
from tpucache.store.codecs.dct.coefficients import BLOCK, CoefficientLayout, pack, unpack

Pixels = npt.NDArray[np.uint8]

_SIZES: Final = (64, 96, 128, 160, 192, 224, 256, 320, 384, 448)
_LEAST: Final = 45.0  # dB
_LAYOUTS: Final = {
    "4:2:0": CoefficientLayout(256, 256, 3, 90, "420"),
    "4:4:4": CoefficientLayout(256, 256, 3, 90, "444"),
    "grey": CoefficientLayout(256, 256, 1, 90),
    "odd": CoefficientLayout(253, 207, 3, 90, "420"),
}


def photographs(source: Path, count: int, height: int, width: int) -> list[Pixels]:
    """Return photographs, spread over the source, as uint8 (height, width, 3), made by Pillow."""
    paths = sorted(path for path in source.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    found = []
    for path in paths[:: max(1, len(paths) // count)][:count]:
        with Image.open(path) as picture:
            picture.draft("RGB", (2 * width, 2 * height))
            found.append(np.asarray(ImageOps.fit(picture.convert("RGB"), (width, height), Image.Resampling.LANCZOS)))
    return found


def psnr(found: Pixels, expected: Pixels) -> float:
    """Return the PSNR in dB."""
    error = float(np.square(found.astype(np.float64) - expected).mean())
    return 99.0 if not error else float(10 * np.log10(255**2 / error))


def table(images: Iterable[Pixels], size: int) -> list[list[float]]:
    """Return, by size, the median PSNR of images made of the lowest 1 to 8 frequencies."""
    layout = CoefficientLayout(size, size, 3, 90, "420")
    packed = [np.frombuffer(pack(image, layout), np.uint8) for image in images]
    whole = [Image.fromarray(unpack(each.tobytes(), layout)) for each in packed]
    rows: list[list[float]] = []
    for side in _SIZES:
        expected = [np.asarray(image.resize((side, side), Image.Resampling.LANCZOS)) for image in whole]
        row: list[float] = []
        for frequencies in range(1, BLOCK + 1):
            decoder = CoefficientDecoder(layout, Resize(side, side, "stretch"), frequencies)
            made = [decoder.decode_here(each[None])[0] for each in packed]
            row.append(statistics.median(map(psnr, made, expected)))
        rows.append(row)
        say(f"{side}: {', '.join(f'{value:.1f}' for value in row)}")
    return rows


def decode_torch(decoder: CoefficientDecoder, packed: Pixels, device: str = "cpu") -> Pixels:
    """Return the pixels that torch makes."""
    library = ArrayLibrary(torch, lambda constant: torch.from_numpy(constant).to(device))
    constants = {name: library.constant(value) for name, value in decoder.constants.items()}
    made: Pixels = decoder.decode(library, torch.from_numpy(packed.copy()).to(device), constants).cpu().numpy()
    return made


def decode_rounded(decoder: CoefficientDecoder, packed: Pixels) -> Pixels:
    """Return the pixels that torch makes where products round their operands to bfloat16."""
    product: Callable[..., torch.Tensor] = torch.matmul
    with mock.patch.object(torch, "matmul", lambda a, b: product(a.bfloat16().float(), b.bfloat16().float())):
        return decode_torch(decoder, packed)


def decode_jax(decoder: CoefficientDecoder, packed: Pixels) -> Pixels:
    """Return the pixels that JAX makes, by a jitted function."""
    import jax
    import jax.numpy as jnp

    library: Any = ArrayLibrary(jnp, lambda constant: constant)
    return np.asarray(jax.jit(lambda batch: decoder.decode(library, batch, decoder.constants))(packed))


def decode_numpy(decoder: CoefficientDecoder, packed: Pixels) -> Pixels:
    """Return the pixels that the host makes."""
    return np.moveaxis(decoder.decode_here(packed), 3, 1)


def decode_xla(decoder: CoefficientDecoder, packed: Pixels) -> Pixels:
    """Return the pixels that XLA makes."""
    return decode_torch(decoder, packed, "xla")


def differences(source: Path, ways: Mapping[str, Callable[[CoefficientDecoder, Pixels], Pixels]]) -> list[list[str]]:
    """Return the rows of a table: by layout and size, how many levels each way differs from torch at most."""
    rows = [["images", "to", *ways]]
    for name, layout in _LAYOUTS.items():
        images = photographs(source, 4, layout.height, layout.width)
        shown = [image if layout.channels == 3 else image.mean(2, keepdims=True).astype(np.uint8) for image in images]
        packed = np.stack([np.frombuffer(pack(image, layout), np.uint8) for image in shown])
        for size in ((64, 64), (112, 96), (224, 224), (320, 320)):
            decoder = CoefficientDecoder(layout, Resize(*size))
            expected = decode_torch(decoder, packed).astype(int)
            most = [int(abs(way(decoder, packed) - expected).max()) for way in ways.values()]
            rows.append([name, f"{size[0]}x{size[1]}", *map(str, most)])
    return rows


def main() -> int:
    """Run the check as the command line asks; 1 where images are too far from what they should be."""
    options = _parse()
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    rows = table(photographs(options.source, options.images, options.size, options.size), options.size)
    heading = ["size", *(f"K={count}" for count in range(1, BLOCK)), "all"]
    print(
        as_markdown(
            [
                heading,
                *([str(side), *(f"{value:.1f}" for value in row)] for side, row in zip(_SIZES, rows, strict=True)),
            ]
        )
    )
    ways = {"numpy": decode_numpy, "bfloat16": decode_rounded}
    ways |= {"JAX": decode_jax} if importlib.util.find_spec("jax") else {}
    ways |= {"XLA": decode_xla} if importlib.util.find_spec("torch_xla") else {}
    if "XLA" in ways:
        import torch_xla  # noqa: F401  # makes the device known to torch
    found = differences(options.source, ways)
    print(as_markdown(found))
    is_near = all(row[-1] >= _LEAST for row in rows)
    return int(not is_near or any(int(cell) > 1 for row in found[1:] for cell in row[2:]))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a folder of photographs")
    parser.add_argument("--size", type=int, default=512, help="that is stored (%(default)s)")
    parser.add_argument("--images", type=int, default=24, help="(%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
