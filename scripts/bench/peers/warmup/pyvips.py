"""pyvips: its fastest way to a thumbnail, one thread a process; nothing is written."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from scripts.bench.peers.building import Work, bare_loop, run
from scripts.bench.peers.protocol import Setting


def shrink(size: int, file: str) -> int:
    os.environ["VIPS_CONCURRENCY"] = "1"
    import pyvips  # libvips has threads of its own: it is loaded in the processes that use it

    pyvips.cache_set_max(0)  # a photograph that comes again is decoded again
    image = pyvips.Image.thumbnail_buffer(Path(file).read_bytes(), size, height=size, crop="centre")
    return len(image.write_to_memory())


def start(setting: Setting) -> Work:
    return bare_loop(functools.partial(shrink, setting["size"]), setting["jobs"])


def refuses(file: str) -> bool:
    """Return whether libvips does not read a photograph: it is stricter with damaged ones than Pillow."""
    import pyvips

    try:
        shrink(16, file)  # at the smallest scale
    except pyvips.Error:
        return True
    return False


if __name__ == "__main__":
    run(start, refuses)
