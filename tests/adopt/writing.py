"""Pictures in files, and what happens to them, for the tests of this folder."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from tpucache.adopt.growing import LEAST_GROWING

#: What each build of a kept cache prints.
BUILDS = "decoding and resizing its pictures once"


def write_picture(path: Path, number: int = 0, mode: str = "RGB") -> Path:
    """Write a picture of 12x10 pixels without loss, another one for each number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(number).integers(0, 256, (10, 12, 4), np.uint8)
    Image.fromarray(pixels).convert(mode).save(path, "bmp" if path.suffix == ".bmp" else "png")
    return path


def large_folder(folder: Path) -> Path:
    """Return a folder with enough pictures that its cache is read while it is built."""
    picture = write_picture(folder / "ant" / "0.png")
    for number in range(LEAST_GROWING):
        os.link(picture, picture.with_name(f"{number + 1}.png"))
    return folder


@contextlib.contextmanager
def changing(paths: Iterable[str | Path]) -> Iterator[None]:
    """Change files again and again in the `with` block, without another byte in them."""
    is_over = threading.Event()

    def change() -> None:
        while not is_over.wait(0.001):
            for path in paths:
                os.utime(path, ns=(0, time.time_ns()))

    thread = threading.Thread(target=change)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
