"""Pillow's own scaled decode and Lanczos, the loop that comes to mind first; nothing is written."""

from __future__ import annotations

import functools

from PIL import Image, ImageOps

from scripts.bench.peers.building import Work, bare_loop, run
from scripts.bench.peers.protocol import Setting


def shrink(size: int, file: str) -> int:
    with Image.open(file) as image:
        image.draft("RGB", (2 * size, 2 * size))
        return len(ImageOps.fit(image.convert("RGB"), (size, size), Image.Resampling.LANCZOS).tobytes())


def start(setting: Setting) -> Work:
    return bare_loop(functools.partial(shrink, setting["size"]), setting["jobs"])


if __name__ == "__main__":
    run(start)
